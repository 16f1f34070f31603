"""The `Grammar`: plain tensors between the parameter networks above it and the dynamic programmes below it.

It is computed once per optimizer step. Micro-batches work on a detached copy of its tensors and accumulate gradients
there; one backward pass then takes those through the networks (`backward_through`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import flash_inside
from flash_inside import Rules, Statistics
from flash_inside.softmax import log_normalizers, rounded
from lm_pcfg.grammar.computation import EXACT, Computation


class Emission(NamedTuple):
    """p(word | preterminal) = softmax over the words of features . embeddings, or, smoothed,
    (1 - smoothing) softmax + smoothing background(word).

    Only columns for the words at hand are ever asked for, so no one outside may assume that the P x V matrix exists.
    """

    features: Tensor  # [P, d] of the preterminals
    embeddings: Tensor  # [V, d] of the words
    log_normalizers: Tensor  # [P] log sum over the words of exp(feature . embedding)
    precision: str = "fp32"  # of the products behind the normalisers
    background: Tensor | None = None  # [V] log-probabilities of words, whatever the preterminal
    smoothing: float = 0.0  # the background's share

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        smooth = () if self.background is None else (self.background,)
        return self.features, self.embeddings, self.log_normalizers, *smooth

    @classmethod
    def of(cls, features: Tensor, embeddings: Tensor, how: Computation = EXACT) -> Emission:
        """The one place that sees all words of all preterminals, or of this process's part of them."""
        shards, p = how.shards, len(features)
        own = features if shards is None else features[shards.part(p)]
        normalizers = log_normalizers(own, embeddings, how.precision)
        if shards is not None:
            normalizers = shards.gather(normalizers, p)
        return cls(features, embeddings, normalizers, how.precision)

    def smoothed(self, background: Tensor, smoothing: float) -> Emission:
        return self._replace(background=background, smoothing=smoothing)

    def log_probabilities(self, words: Tensor) -> Tensor:
        """words: [n] ids on any device -> [n, P] on that of the tables. Each distinct word is computed once.

        Ids on the host are sorted there: the host need not wait for a GPU.
        """
        distinct, position = torch.unique(words, return_inverse=True)
        device = self.features.device
        distinct, position = distinct.to(device, non_blocking=True), position.to(device, non_blocking=True)
        # Rounded as for the normalisers, or the probabilities of a preterminal would not sum to 1.
        # functional.embedding: rows by number, whose gradient is summed without a sort of the numbers.
        words_given = functional.embedding(distinct, self.embeddings)
        embeddings, features = (rounded(table, self.precision) for table in (words_given, self.features))
        columns = embeddings @ features.T - self.log_normalizers  # [distinct, P]
        if self.background is not None:
            columns = self._with_background(columns, functional.embedding(distinct, self.background[:, None]))
        return functional.embedding(position, columns)

    def _with_background(self, log_p: Tensor, background: Tensor) -> Tensor:
        return torch.logaddexp(log_p + math.log1p(-self.smoothing), background + math.log(self.smoothing))

    def entropies(self, rows: int = 1024) -> Tensor:
        """Entropy in nats of each preterminal's words: [P], computed for some rows at a time."""
        parts = []
        for first in range(0, self.features.shape[0], rows):
            part = slice(first, first + rows)
            log_p = self.features[part] @ self.embeddings.T - self.log_normalizers[part, None]
            if self.background is not None:
                log_p = self._with_background(log_p, self.background)
            parts.append(-(log_p.exp() * log_p).sum(1))
        return torch.cat(parts)


class Grammar(NamedTuple):
    """Probabilities of a simple PCFG. Shapes of root, left and right as in `flash_inside.Rules`.

    The root is fp64: training soon gives nearly all of it to one symbol, and what another symbol has left might be 0
    in fp32, with no gradient to come back by.
    """

    root: Tensor
    left: Tensor
    right: Tensor
    emission: Emission
    #: Where the gradients of left and right enter the graph, if not through themselves: see `child_probabilities`.
    entrances: tuple[Tensor, Tensor] | None = None

    @property
    def rules(self) -> Rules:
        return Rules(self.root, self.left, self.right)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.root, self.left, self.right, *self.emission.tensors

    @property
    def entrance_tensors(self) -> tuple[Tensor, ...]:
        """`tensors`, with those that take their gradients."""
        return self.root, *(self.entrances or (self.left, self.right)), *self.emission.tensors

    def log_likelihood(
        self,
        words: Tensor,
        lengths: list[int],
        *,
        precision: str = "fp32",
        backend: str = "auto",
        statistics: Statistics | None = None,
    ) -> Tensor:
        """Natural log-probability of each sentence: [B]. words: [sum(lengths)] ids, sentences one after another."""
        self._check_differentiable()
        emissions = self.emission.log_probabilities(words)
        return flash_inside.inside(self.rules, emissions, lengths, precision, backend, statistics)

    def log_likelihood_unchecked(
        self,
        words: Tensor,
        lengths: list[int],
        *,
        precision: str = "fp32",
        backend: str = "auto",
        of_rules: tuple[Tensor, Tensor] | None = None,
        rules_stay: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The same before it is known which sentences have to be recomputed; see `flash_inside.inside_unchecked`."""
        self._check_differentiable()
        emissions = self.emission.log_probabilities(words)
        return flash_inside.inside_unchecked(self.rules, emissions, lengths, precision, backend, of_rules, rules_stay)

    def _check_differentiable(self) -> None:
        if self.entrances is not None and self.entrances[0] is not self.left and torch.is_grad_enabled():
            raise RuntimeError("these rules take no gradients themselves: use detached() and backward_through()")

    def detached(self) -> Grammar:
        """The same values as leaves of a new graph, on which micro-batches accumulate their gradients, in fp32."""
        leaves = [tensor.detach().requires_grad_() for tensor in self.tensors]
        for leaf in leaves:
            if leaf.dtype.itemsize < 4:
                leaf.grad_dtype = torch.float32
        root, left, right, features, embeddings, normalizers, *background = leaves
        emission = Emission(features, embeddings, normalizers, self.emission.precision)
        if background:
            emission = emission.smoothed(background[0], self.emission.smoothing)
        return Grammar(root, left, right, emission)

    def with_root_over_nonterminals(self) -> Grammar:
        """The paper's root: the mass of S -> preterminal is taken away and the rest renormalised."""
        nonterminal_part = self.root[: self.rules.nonterminals]
        return self._replace(root=nonterminal_part / nonterminal_part.sum())


def backward_through(grammar: Grammar, leaves: Grammar) -> Tensor:
    """A scalar whose backward pass takes the gradients gathered on `leaves` through the graph that made `grammar`.

    Its value means nothing.
    """
    tensors, gathered = grammar.entrance_tensors, leaves.tensors
    # A tensor no micro-batch has touched (no data on this rank) still takes part, so that all ranks do the same work.
    gradients = [
        torch.zeros_like(tensor) if leaf.grad is None else leaf.grad
        for tensor, leaf in zip(tensors, gathered, strict=True)
    ]
    return _Delivery.apply(gradients, *tensors)


class _Delivery(torch.autograd.Function):
    """sum(tensor * gradient) has these derivatives too, but would pass over the rules three times more."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        torch._assert_async(scale == 1.0, "an engine that scales its loss would go unheard here")
        return None, *ctx.gradients
