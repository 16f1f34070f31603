"""The dense inside algorithm as one would write it on a blackboard, in log space: the truth for scaled.py.

    beta_ij[A] = sum over splits k and pairs B, C of  T[A, B, C] beta_ik[B] beta_kj[C]

A part of one word is a preterminal, a wider one a nonterminal. So a split has one of four kinds, by what its parts are,
and each kind has its own block of T: NN, NP, PN and PP.

Slow, but exact in range: nothing underflows. Differentiable by autograd; -inf has a zero gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flash_inside.precision import upcast
from flash_inside.reference import NEGATIVE_INFINITY, log_matmul, log_sum_exp, safe_log, scores_of_brackets


class PairRules(NamedTuple):
    """Rule probabilities of a PCFG with N nonterminals and P preterminals.

    root    [N] or [N+P]      as in `flash_inside.Rules`
    pairs   [N, N+P, N+P]     pairs[A, B, C] = probability of the children B C given the parent A; each [N+P, N+P] sums
                              to 1; the N nonterminals come before the P preterminals

    A leading dimension [B, ...] on both means one grammar per sentence (compound models).
    """

    root: Tensor
    pairs: Tensor

    @property
    def per_sentence(self) -> bool:
        return self.pairs.dim() == 4

    @property
    def nonterminals(self) -> int:
        return self.pairs.shape[-3]

    @property
    def preterminals(self) -> int:
        return self.pairs.shape[-1] - self.pairs.shape[-3]

    def of_sentence(self, sentence: int) -> PairRules:
        """Return the grammar of one sentence: its own, or the common one."""
        return PairRules(*(tensor[sentence] for tensor in self)) if self.per_sentence else self

    def index_of(self, sentences: Sequence[int]) -> Tensor | None:
        """Return where the grammars of these sentences are; None: all have one."""
        return torch.tensor(sentences, device=self.pairs.device) if self.per_sentence else None

    def of_sentences(self, sentences: Sequence[int]) -> PairRules:
        """Return the grammars of these sentences: a copy of their own, or the common one."""
        index = self.index_of(sentences)
        return self if index is None else PairRules(*(tensor[index] for tensor in self))


def columns_of(kind: str, n: int) -> tuple[slice, slice]:
    """Return the left and the right children of a kind of split, among all symbols."""
    left, right = (slice(n, None) if part == "P" else slice(0, n) for part in kind)
    return left, right


def block_of(pairs: Tensor, kind: str) -> Tensor:
    """Return T of one kind of split, such as "PN" (a preterminal, then a nonterminal): [N, left x right].

    pairs: [N, N+P, N+P], or with a leading dimension, which T then has too.
    """
    left, right = columns_of(kind, pairs.shape[-3])
    return pairs[..., left, right].flatten(-2)


def kinds_of(width: int) -> list[tuple[str, slice]]:
    """Return the kinds of the splits of a span, and which of its splits they are, counted from the left."""
    if width == 2:
        return [("PP", slice(0, 1))]
    ends = [("PN", slice(0, 1)), ("NP", slice(width - 2, width - 1))]
    return [*ends, ("NN", slice(1, width - 2))] if width > 3 else ends


def inside(
    rules: PairRules,
    emissions: Tensor,
    lengths: list[int],
    dtype: torch.dtype = torch.float64,
    limits: np.ndarray | None = None,
) -> Tensor:
    """Return sentence log marginals [B] in `dtype` (fp64 or fp32). limits: see flash_inside/brackets.py."""
    span_scores = scores_of_brackets(limits, lengths, emissions.device, dtype)
    scores = [
        _inside_of_sentence(rules.of_sentence(b), words, dtype, (own, None))
        for b, (words, own) in enumerate(zip(emissions.split(lengths), span_scores, strict=True))
    ]
    return torch.stack(scores) + connection(rules, emissions).to(dtype)


def connection(rules: PairRules, emissions: Tensor) -> Tensor:
    """Return a zero that depends on every input: what no tree uses has a zero gradient and not none."""
    first = [tensor.flatten()[:1] for tensor in (*rules, emissions)]
    return sum((0.0 * torch.where(value.isfinite(), value, 0.0).sum() for value in first), torch.zeros(()))


def posteriors(
    rules: PairRules, emissions: Tensor, lengths: list[int], dtype: torch.dtype = torch.float64
) -> list[tuple[Tensor, Tensor]]:
    """Return of every sentence two tables [l+1, l+1]: the posteriors of spans, and of spans that end in a word alone.

    They are the derivatives of log Z by a score added to log beta of a span, and by one added to its last split.
    """
    tables = []
    with torch.inference_mode(False), torch.enable_grad():
        fixed = PairRules(*(tensor.detach().clone() for tensor in rules))
        for b, words in enumerate(emissions.detach().clone().split(lengths)):
            size = len(words) + 1
            scores = torch.zeros(2, size, size, dtype=dtype, device=words.device).requires_grad_()
            log_z = _inside_of_sentence(fixed.of_sentence(b), words, dtype, (scores[0], scores[1]))
            there = log_z > NEGATIVE_INFINITY
            found = torch.autograd.grad(log_z, scores)[0] if there else torch.zeros_like(scores)
            tables.append((found[0].detach(), found[1].detach()))
    return tables


def _inside_of_sentence(
    rules: PairRules, words: Tensor, dtype: torch.dtype, scores: tuple[Tensor | None, Tensor | None]
) -> Tensor:
    """Return log Z of one sentence. words: [l, P] log-emissions

    scores: tables [l+1, l+1], added to log beta of a span, and to what its last split adds to that; or None
    """
    length, n = words.shape[0], rules.nonterminals
    root, pairs, words = (upcast(tensor) if dtype == torch.float64 else tensor.to(dtype) for tensor in (*rules, words))

    def added(log_values: Tensor, width: int, which: int) -> Tensor:
        """log_values: [spans of this width, symbols]."""
        table = scores[which]
        return log_values if table is None else log_values + table.diagonal(width)[:, None]

    log_root, log_pairs = safe_log(root), {kind: safe_log(block_of(pairs, kind)) for kind in ("NN", "NP", "PN", "PP")}
    log_beta = [added(words, 1, 0)]  # of each width: [l - width + 1, symbols], by first word
    if length == 1:
        if len(root) == n:  # a nonterminal never emits a word
            return root.new_full((), NEGATIVE_INFINITY)
        return log_sum_exp(log_root[n:] + log_beta[0][0], dim=0)
    for width in range(2, length + 1):
        spans = length - width + 1
        values = []
        for kind, splits in kinds_of(width):
            sums = [
                log_beta[part - 1][:spans, :, None] + log_beta[width - part - 1][part : part + spans, None, :]
                for part in range(splits.start + 1, splits.stop + 1)
            ]  # each [spans, left, right]
            log_value = log_matmul(log_sum_exp(torch.stack(sums), dim=0).flatten(1), log_pairs[kind])
            values.append(added(log_value, width, 1) if kind in ("NP", "PP") else log_value)
        log_beta.append(added(log_sum_exp(torch.stack(values), dim=0), width, 0))
    return log_sum_exp(log_root[:n] + log_beta[-1][0], dim=0)
