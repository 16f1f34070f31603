"""The `Grammar`: plain tensors between the parameter networks above it and the dynamic programmes below it.

It is computed once per optimizer step. Micro-batches work on a detached copy of its tensors and accumulate gradients
there; one backward pass then takes those through the networks (`backward_through`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import flash_inside
from flash_inside import Rules, Statistics


class Emission(NamedTuple):
    """p(word | preterminal) = softmax over the words of features . embeddings.

    Only columns for the words at hand are ever asked for, so no one outside may assume that the P x V matrix exists.
    """

    features: Tensor  # [P, d] of the preterminals
    embeddings: Tensor  # [V, d] of the words
    log_normalizers: Tensor  # [P] log sum over the words of exp(feature . embedding)

    @classmethod
    def of(cls, features: Tensor, embeddings: Tensor) -> Emission:
        """The one place that sees all words of all preterminals."""
        return cls(features, embeddings, torch.logsumexp(features @ embeddings.T, dim=1))

    def log_probabilities(self, words: Tensor) -> Tensor:
        """words: [n] ids -> [n, P]. Each distinct word is computed once."""
        distinct, position = torch.unique(words, return_inverse=True)
        columns = self.embeddings[distinct] @ self.features.T - self.log_normalizers  # [distinct, P]
        return columns[position]

    def entropies(self, rows: int = 1024) -> Tensor:
        """Entropy in nats of each preterminal's words: [P], computed for some rows at a time."""
        parts = []
        for first in range(0, self.features.shape[0], rows):
            part = slice(first, first + rows)
            log_p = self.features[part] @ self.embeddings.T - self.log_normalizers[part, None]
            parts.append(-(log_p.exp() * log_p).sum(1))
        return torch.cat(parts)


class Grammar(NamedTuple):
    """Probabilities of a simple PCFG. Shapes of root, left and right as in `flash_inside.Rules`.

    The root is fp64: training soon gives nearly all of it to one symbol, and in fp32 one-word sentences, which need
    S -> T, would have probability 0 and no gradient to come back by.
    """

    root: Tensor
    left: Tensor
    right: Tensor
    emission: Emission

    @property
    def rules(self) -> Rules:
        return Rules(self.root, self.left, self.right)

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
        emissions = self.emission.log_probabilities(words)
        return flash_inside.inside(self.rules, emissions, lengths, precision, backend, statistics)

    def tensors(self) -> list[Tensor]:
        return [self.root, self.left, self.right, *self.emission]

    @classmethod
    def of_tensors(cls, tensors: list[Tensor]) -> Grammar:
        root, left, right, *emission = tensors
        return cls(root, left, right, Emission(*emission))

    def detached(self) -> Grammar:
        """The same values as leaves of a new graph, on which micro-batches accumulate their gradients."""
        return Grammar.of_tensors([tensor.detach().requires_grad_() for tensor in self.tensors()])

    def with_root_over_nonterminals(self) -> Grammar:
        """The paper's root: the mass of S -> preterminal is taken away and the rest renormalised."""
        nonterminal_part = self.root[: self.rules.nonterminals]
        return self._replace(root=nonterminal_part / nonterminal_part.sum())


def backward_through(grammar: Grammar, leaves: Grammar) -> Tensor:
    """A scalar whose backward pass takes the gradients gathered on `leaves` through the graph that made `grammar`.

    It is sum(tensor * gradient): its derivative by each tensor is that tensor's gradient. Its value means nothing.
    """
    pairs = zip(grammar.tensors(), leaves.tensors(), strict=True)
    # A tensor no micro-batch has touched (no data on this rank) still takes part, so that all ranks do the same work.
    parts = [(tensor * (leaf.grad if leaf.grad is not None else 0.0)).sum() for tensor, leaf in pairs]
    return torch.stack([part.double() for part in parts]).sum()
