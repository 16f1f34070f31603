"""The inside algorithm as one would write it on a blackboard, in log space: the truth the fast backends are held to.

    log beta_ij[A] = logsumexp over splits k of  log eta_ik[A] + log zeta_kj[A]
    log eta_ij[A]  = logsumexp over children B of  log left[A, B] + log beta_ij[B]         (zeta: right)

Children B in `FactoredRules` are middle symbols, whose value is logsumexp over A of log inner[B, A] + log beta_ij[A].

Slow, but exact in range: nothing underflows. Differentiable by autograd. -inf stands for probability zero throughout,
and every operation here gives -inf a zero gradient instead of NaN.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flash_inside.brackets import allowed_spans
from flash_inside.precision import upcast
from flash_inside.rules import AnyRules, Rules, connection, log

NEGATIVE_INFINITY = float("-inf")


def inside(
    rules: AnyRules,
    emissions: Tensor,
    lengths: list[int],
    dtype: torch.dtype = torch.float64,
    limits: np.ndarray | None = None,
) -> Tensor:
    """Return sentence log marginals [B] in `dtype` (fp64 or fp32). limits: see brackets.py."""
    span_scores = scores_of_brackets(limits, lengths, emissions.device, dtype)
    scores = [
        _inside_of_sentence(rules.of_sentence(b), words, dtype, span_scores[b])
        for b, words in enumerate(emissions.split(lengths))
    ]
    # Every input stays connected, so that what no tree of the batch uses has a zero gradient and not none.
    return torch.stack(scores) + connection(rules, emissions).to(dtype)


def scores_of_brackets(
    limits: np.ndarray | None, lengths: list[int], device: torch.device, dtype: torch.dtype
) -> list[Tensor | None]:
    """Return a table of every sentence to add to log beta: -inf where a span crosses a bracket. None: no limits."""
    if limits is None:
        return [None] * len(lengths)
    allowed = [torch.from_numpy(allowed_spans(own)) for own in np.split(limits, np.cumsum(lengths)[:-1])]
    return [torch.where(table.to(device), 0.0, NEGATIVE_INFINITY).to(dtype) for table in allowed]


def one_word_inside(root: Tensor, words: Tensor, nonterminals: int) -> Tensor:
    """Log marginals of sentences of one word, in fp64: no rule takes part. words: [B, P] log-emissions -> [B].

    root: one for all, or [B, ...]
    """
    wide = upcast(words)
    if root.shape[-1] == nonterminals:  # a nonterminal never emits a word
        return wide.new_full((len(words),), NEGATIVE_INFINITY)
    return log_sum_exp(safe_log(upcast(root)[..., nonterminals:]) + wide, dim=1)


def span_marginals(
    rules: AnyRules, emissions: Tensor, lengths: list[int], dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Return the posterior of every span: the derivative of log Z by a score added to log beta of that span."""
    tables = []
    with torch.inference_mode(False), torch.enable_grad():
        fixed: AnyRules = type(rules)(*(tensor.detach().clone() for tensor in rules))
        for b, words in enumerate(emissions.detach().clone().split(lengths)):
            span_scores = torch.zeros(lengths[b] + 1, lengths[b] + 1, dtype=dtype, device=words.device).requires_grad_()
            log_z = _inside_of_sentence(fixed.of_sentence(b), words, dtype, span_scores)
            if log_z == NEGATIVE_INFINITY:  # no tree, so no posterior: all zero
                tables.append(torch.zeros_like(span_scores))
            else:
                tables.append(torch.autograd.grad(log_z, span_scores)[0])
    return [table.detach() for table in tables]


def _inside_of_sentence(rules: AnyRules, words: Tensor, dtype: torch.dtype, span_scores: Tensor | None) -> Tensor:
    """Return log Z of one sentence. words: [l, P] log-emissions; span_scores: [l+1, l+1] added to log beta, or None."""
    length, n = words.shape[0], rules.nonterminals
    wide = upcast if dtype == torch.float64 else partial(torch.Tensor.to, dtype=dtype)
    root, left, right, *inner = (wide(tensor) for tensor in rules)
    words = wide(words)
    log_root, log_left, log_right = safe_log(root), safe_log(left), safe_log(right)
    log_inner = safe_log(inner[0]) if inner else None
    m = n if log_inner is None else len(log_inner)

    def add_span_scores(log_beta: Tensor, width: int) -> Tensor:
        """log_beta: [spans of this width, symbols]."""
        return log_beta if span_scores is None else log_beta + span_scores.diagonal(width)[:, None]

    # log_eta[w-1], log_zeta[w-1]: [l-w+1, N] for the spans of width w, by first word
    leaves = add_span_scores(words, 1)  # [l, P]
    log_eta = [log_matmul(leaves, log_left[:, m:])]
    log_zeta = [log_matmul(leaves, log_right[:, m:])]
    if length == 1:
        if root.shape[0] == n:  # a nonterminal never emits a word
            return root.new_full((), NEGATIVE_INFINITY)
        return log_sum_exp(log_root[n:] + leaves[0], dim=0)

    log_beta = leaves
    for width in range(2, length + 1):
        spans = length - width + 1
        splits = [
            log_eta[part - 1][:spans] + log_zeta[width - part - 1][part : part + spans] for part in range(1, width)
        ]  # each [spans, N]
        log_beta = add_span_scores(log_sum_exp(torch.stack(splits), dim=0), width)
        if width < length:
            children = log_beta if log_inner is None else log_matmul(log_beta, log_inner)
            log_eta.append(log_matmul(children, log_left[:, :m]))
            log_zeta.append(log_matmul(children, log_right[:, :m]))
    return log_sum_exp(log_root[:n] + log_beta[0], dim=0)


def viterbi(
    rules: Rules, emissions: Tensor, lengths: list[int], dtype: torch.dtype = torch.float64
) -> list[tuple[float, list[tuple[int, int, int]]]]:
    """Best labelled tree of every sentence with stored back-pointers: (log score, [(first word, end, label), ...])."""
    with torch.no_grad():
        return [
            _best_tree(rules.of_sentence(b), words.to(dtype), dtype) for b, words in enumerate(emissions.split(lengths))
        ]


def _best_tree(rules: Rules, words: Tensor, dtype: torch.dtype) -> tuple[float, list[tuple[int, int, int]]]:
    length, n = words.shape[0], rules.nonterminals
    log_root, log_left, log_right = (log(tensor, dtype) for tensor in rules)
    if length == 1:
        if rules.root.shape[0] == n:
            return NEGATIVE_INFINITY, []
        score, best = (log_root[n:] + words[0]).max(0)
        return _tree(score, [(0, 1, n + int(best))])

    # For span (i, j): value[A], best split[A]; for either side the value[A] and label[A] of the best child of A
    split: dict[tuple[int, int], Tensor] = {}
    child: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
    value = words[0]
    for width in range(1, length + 1):
        for i in range(length - width + 1):
            j = i + width
            if width == 1:
                value, columns = words[i], slice(n, None)
            else:
                sums = [child[i, k, 0][0] + child[k, j, 1][0] for k in range(i + 1, j)]
                value, best = torch.stack(sums).max(0)
                split[i, j], columns = i + 1 + best, slice(0, n)
            for side, log_rule in enumerate((log_left, log_right)):
                best_value, best_label = (log_rule[:, columns] + value).max(1)
                child[i, j, side] = best_value, best_label + (n if width == 1 else 0)
    score, top = (log_root[:n] + value).max(0)

    nodes, open_nodes = [], [(0, length, int(top))]
    while open_nodes:
        i, j, label = open_nodes.pop()
        nodes.append((i, j, label))
        if j - i > 1:
            k = int(split[i, j][label])
            open_nodes.append((k, j, int(child[k, j, 1][1][label])))
            open_nodes.append((i, k, int(child[i, k, 0][1][label])))
    return _tree(score, nodes)


def _tree(score: Tensor, nodes: list[tuple[int, int, int]]) -> tuple[float, list[tuple[int, int, int]]]:
    return (score.item(), nodes) if score > NEGATIVE_INFINITY else (NEGATIVE_INFINITY, [])


def safe_log(probabilities: Tensor) -> Tensor:
    """Take log p, with -inf and a zero gradient where p is 0 (the derivative by log p is the expected count: zero)."""
    zero = probabilities <= 0  # not NaN, which stays NaN
    return torch.where(zero, 1.0, probabilities).log().masked_fill(zero, NEGATIVE_INFINITY)


def log_sum_exp(values: Tensor, dim: int) -> Tensor:
    """Compute logsumexp with a zero gradient, not NaN, where everything is -inf."""
    largest = values.detach().amax(dim, keepdim=True)
    largest = torch.where(largest == NEGATIVE_INFINITY, 0.0, largest)
    return safe_log((values - largest).exp().sum(dim)) + largest.squeeze(dim)


def log_matmul(rows: Tensor, log_weight: Tensor) -> Tensor:
    """out[r, a] = logsumexp_b(rows[r, b] + log_weight[a, b]): [R, S], [A, S] -> [R, A]."""
    return _LogMatmul.apply(rows, log_weight)


class _LogMatmul(torch.autograd.Function):
    """Works through blocks of R, recomputed in the backward, so that R x A x S never exists as a whole."""

    LARGEST_BLOCK = 1 << 24  # elements

    @staticmethod
    def _blocks(rows: Tensor, log_weight: Tensor) -> list[slice]:
        step = max(1, _LogMatmul.LARGEST_BLOCK // max(1, log_weight.numel()))
        return [slice(start, start + step) for start in range(0, rows.shape[0], step)]

    @staticmethod
    def forward(ctx: Any, rows: Tensor, log_weight: Tensor) -> Tensor:
        out = rows.new_empty(rows.shape[0], log_weight.shape[0])
        for block in _LogMatmul._blocks(rows, log_weight):
            out[block] = torch.logsumexp(rows[block, None, :] + log_weight[None], dim=-1)
        ctx.save_for_backward(rows, log_weight, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows, log_weight, out = ctx.saved_tensors
        d_rows, d_weight = torch.zeros_like(rows), torch.zeros_like(log_weight)
        finite_out = torch.where(out == NEGATIVE_INFINITY, 0.0, out)  # exp(-inf - 0) = 0 instead of NaN
        for block in _LogMatmul._blocks(rows, log_weight):
            posterior = (rows[block, None, :] + log_weight[None] - finite_out[block, :, None]).exp_()
            posterior *= gradient[block, :, None]
            d_rows[block] = posterior.sum(1)
            d_weight += posterior.sum(0)
        return d_rows, d_weight
