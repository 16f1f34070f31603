"""The `Grammar`: plain tensors between the parameter networks above it and the dynamic programmes below it.

It is computed once per optimizer step. Micro-batches work on a detached copy of its tensors and accumulate gradients
there; one backward pass then takes those through the networks (`backward_through`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import flash_inside
from flash_inside import FactoredRules, GrowingPrefixes, LeftCorners, Prefixes, ResidentRules, Rules, Statistics
from flash_inside.devices import check_memory
from flash_inside.softmax import product_precision
from lm_pcfg.grammar import analysis
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.generation import Derivation, Draw, sample_derivations


class Grammar(NamedTuple):
    """Probabilities of a simple PCFG. Shapes of root, left and right as in `flash_inside.Rules`.

    With a leading dimension [B, ...] they are of as many sentences, and so is the emission: see `of_sentence`.
    The root is fp64: training soon gives nearly all of it to one symbol, and what another symbol has left might be 0
    in fp32, with no gradient to come back by.
    """

    root: Tensor
    left: Tensor
    right: Tensor
    emission: Emission
    #: Where the gradients of left and right (and inner) enter the graph, if not through themselves: narrow
    #: probabilities take none. See `child_probabilities`.
    entrances: tuple[Tensor, ...] | None = None
    #: For the gradients of left and right, where these stay at the same addresses: see `flash_inside.ResidentRules`.
    gradient_memory: tuple[Tensor, Tensor] | None = None
    #: A factor of left and right, which are then those of `flash_inside.FactoredRules`. Likelihoods and posteriors of
    #: spans need no others; what needs whole rules asks `rules` for them, or `whole`.
    inner: Tensor | None = None

    @property
    def rules(self) -> Rules:
        """The rules [N, N+P]; factors are multiplied out each time."""
        if self.inner is None:
            return Rules(self.root, self.left, self.right)
        n, p = self.nonterminals, len(self.emission.features)
        check_memory(4.0 * 4 * n * (n + p), self.left.device)  # two matrices, and their parts before they are joined
        return FactoredRules(self.root, self.left, self.right, self.inner).multiplied()

    def whole(self) -> Grammar:
        """Return the same grammar without factors, for what uses its rules again and again."""
        return self if self.inner is None else Grammar(*self.rules, self.emission)

    @property
    def rules_of_inside(self) -> Rules | FactoredRules:
        """The rules as the inside algorithm takes them fastest."""
        if self.inner is not None:
            return FactoredRules(self.root, self.left, self.right, self.inner)
        if self.gradient_memory is not None:
            return ResidentRules(self.root, self.left, self.right, self.gradient_memory)
        return self.rules

    @property
    def nonterminals(self) -> int:
        return self.left.shape[-2]

    def of_sentence(self, sentence: int) -> Grammar:
        """Return the grammar of one sentence, where each has its own."""
        root, left, right = self.rules.of_sentence(sentence)
        return Grammar(root, left, right, self.emission.of_sentence(sentence))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that receive the gradients of root, left, right (and inner) and the emission."""
        return self.root, *(self.entrances or self._factors), *self.emission.tensors

    @property
    def _factors(self) -> tuple[Tensor, ...]:
        return (self.left, self.right) if self.inner is None else (self.left, self.right, self.inner)

    @property
    def penalty(self) -> None:
        return None

    def log_likelihood(
        self,
        words: Tensor,
        lengths: list[int],
        *,
        precision: str = "fp32",
        backend: str = "auto",
        statistics: Statistics | None = None,
        limits: np.ndarray | None = None,
    ) -> Tensor:
        """Natural log-probability of each sentence: [B]. words: [sum(lengths)] ids, sentences one after another.

        limits: [sum(lengths), 2], brackets that trees may not cross; see `flash_inside.span_limits`.
        """
        self._check_differentiable()
        emissions = self.emission.log_probabilities(words)
        return flash_inside.inside(self.rules_of_inside, emissions, lengths, precision, backend, statistics, limits)

    def log_likelihood_unchecked(
        self,
        words: Tensor,
        lengths: list[int],
        *,
        precision: str = "fp32",
        backend: str = "auto",
        limits: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The same before it is known which sentences have to be recomputed; see `flash_inside.inside_unchecked`."""
        self._check_differentiable()
        emissions = self.emission.log_probabilities(words)
        return flash_inside.inside_unchecked(self.rules_of_inside, emissions, lengths, precision, backend, limits)

    @torch.no_grad()
    def span_marginals(
        self, words: Tensor, lengths: list[int], *, precision: str = "fp32", backend: str = "auto",
        statistics: Statistics | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Posterior of every span: a table [l+1, l+1] a sentence, all zeros where it has no tree."""
        with product_precision("fp32"):
            emissions = self.emission.log_probabilities(words)
        return flash_inside.span_marginals(self.rules_of_inside, emissions, lengths, precision, backend, statistics)

    def word_posteriors(
        self, words: Tensor, lengths: list[int], *, precision: str = "fp32", backend: str = "auto",
        statistics: Statistics | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Posterior of the preterminals at every word: [l, P] a sentence, zeros where it has no tree."""
        return self.emission.posteriors(
            words,
            lengths,
            lambda some: flash_inside.inside(self.rules_of_inside, some, lengths, precision, backend, statistics),
        )

    @torch.no_grad()
    def last_siblings(self, words: Tensor, lengths: list[int]) -> list[Tensor]:
        """Posterior of where the sibling of the last word begins: see `flash_inside.last_siblings`."""
        with product_precision("fp32"):
            emissions = self.emission.log_probabilities(words)
        return flash_inside.last_siblings(self.rules, emissions, lengths)

    @torch.no_grad()
    def viterbi(
        self, words: Tensor, lengths: list[int], *, precision: str = "fp32", backend: str = "auto"
    ) -> list[tuple[float, list[tuple[int, int, int]]]]:
        """Find the most probable labelled tree of every sentence, as `flash_inside.viterbi` returns it."""
        with product_precision("fp32"):
            emissions = self.emission.log_probabilities(words)
        return flash_inside.viterbi(self.rules, emissions, lengths, precision, backend)

    @torch.no_grad()
    def sample_trees(
        self, words: Tensor, lengths: list[int], samples: int, generator: torch.Generator
    ) -> list[list[tuple[float, list[tuple[int, int, int]]]]]:
        """Draw trees of every sentence from p(tree | sentence), as `flash_inside.sample_trees` returns them."""
        with product_precision("fp32"):
            emissions = self.emission.log_probabilities(words)
        return flash_inside.sample_trees(self.rules, emissions, lengths, samples, generator=generator)

    @torch.no_grad()
    def sample(self, number: int, *, seed: int, max_length: int, end_id: int | None = None) -> Iterator[Derivation]:
        """Draw so many sentences with their trees; see `sample_derivations`. A sentence ends where its tree does."""
        return iter(sample_derivations(self.whole(), number, seed=seed, max_length=max_length))

    def draw_children(self, parents: np.ndarray, draw: Draw) -> np.ndarray:
        """Draw the children of some nonterminals: all left ones, then all right ones."""
        left, right = self.rules.left, self.rules.right
        return np.concatenate([draw(rule.__getitem__, parents, rule.shape[1]) for rule in (left, right)])

    def prefix_model(self) -> GrammarPrefixes:
        """Return what says how sentences begin and go on."""
        return GrammarPrefixes(self)

    def _check_differentiable(self) -> None:
        if self.entrances is not None and self.entrances[0] is not self.left and torch.is_grad_enabled():
            raise RuntimeError("these rules take no gradients themselves: use detached() and backward_through()")

    def detached(self) -> Grammar:
        """The same values as leaves of a new graph, on which micro-batches accumulate their gradients, in fp32."""
        values = (self.root, *self._factors, *self.emission.tensors)
        leaves = [tensor.detach().requires_grad_() for tensor in values]
        for leaf in leaves:
            if leaf.dtype.itemsize < 4:
                leaf.grad_dtype = torch.float32
        root, left, right, *inner, features, embeddings, normalizers = leaves
        emission = self.emission._replace(features=features, embeddings=embeddings, log_normalizers=normalizers)
        return Grammar(root, left, right, emission, inner=inner[0] if inner else None)

    def resident(self, gradients: Sequence[Tensor]) -> Grammar:
        """Promise that its tensors keep their addresses from step to step; gradients: memory for those of `tensors`."""
        return self if self.inner is not None else self._replace(gradient_memory=(gradients[1], gradients[2]))

    @property
    def warning(self) -> str | None:
        """What a user should know before figures of this grammar are believed."""
        return self.emission.warning

    def describe(self, thorough: bool = False) -> dict[str, float]:
        """Return figures for the metrics; thorough adds what is too slow for every evaluation."""
        figures = analysis.summary(self.rules_of_inside, self.emission)
        return figures | analysis.criticality(self.rules, self.emission) if thorough else figures

    def with_root_over_nonterminals(self) -> Grammar:
        """The paper's root: the mass of S -> preterminal is taken away and the rest renormalised."""
        nonterminal_part = self.root[..., : self.nonterminals]
        return self._replace(root=nonterminal_part / nonterminal_part.sum(-1, keepdim=True))


class GrammarPrefixes:
    """What a grammar says of prefixes; see `PrefixModel` (families/shared/family.py)."""

    end_is_a_word = False

    def __init__(self, grammar: Grammar):
        self.emission, self.rules = grammar.emission, Rules(*grammar.rules)
        self.corners = LeftCorners.of(self.rules)

    @property
    def finite_mass(self) -> float:
        return self.corners.finite_mass(self.rules.root).item()

    def prefixes(
        self, emissions: Tensor, lengths: list[int], *, precision: str, statistics: Statistics | None = None,
        with_next: bool = False,
    ) -> Prefixes:  # fmt: skip
        return flash_inside.prefix(
            self.rules, emissions, lengths, precision, "auto", statistics, self.corners, with_next
        )

    def growing(self, count: int) -> GrowingPrefixes:
        return GrowingPrefixes(self.rules, count, self.corners)

    def memory(self, max_length: int) -> int:
        return self.rules.nonterminals * max_length**2
