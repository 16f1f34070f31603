"""The `DenseGrammar`: rules over pairs of children, as plain tensors above flash_inside.dense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flash_inside import Rules, Statistics, dense
from flash_inside.dense import PairRules
from flash_inside.softmax import product_precision
from lm_pcfg.errors import UserError
from lm_pcfg.grammar import analysis
from lm_pcfg.grammar.analysis import entropy
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.generation import Derivation, Draw, sample_derivations


class DenseGrammar(NamedTuple):
    """Probabilities of a PCFG whose rules do not factor. Shapes of root and pairs as in `flash_inside.dense.PairRules`.

    The root is fp64, as that of a `Grammar` is. With a leading dimension [B, ...] it is of as many sentences.
    """

    root: Tensor
    pairs: Tensor
    emission: Emission

    @property
    def rules(self) -> PairRules:
        return PairRules(self.root, self.pairs)

    @property
    def nonterminals(self) -> int:
        return self.pairs.shape[-3]

    def of_sentence(self, sentence: int) -> DenseGrammar:
        """Return the grammar of one sentence, where each has its own."""
        return DenseGrammar(self.root[sentence], self.pairs[sentence], self.emission.of_sentence(sentence))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that receive the gradients of root, pairs and the emission."""
        return self.root, self.pairs, *self.emission.tensors

    @property
    def penalty(self) -> None:
        return None

    def log_likelihood(
        self, words: Tensor, lengths: list[int], *, precision: str = "fp32", backend: str = "auto",
        statistics: Statistics | None = None, limits: np.ndarray | None = None,
    ) -> Tensor:  # fmt: skip
        """Natural log-probability of each sentence: [B]. words: [sum(lengths)] ids, sentences one after another.

        limits: [sum(lengths), 2], brackets that trees may not cross; see `flash_inside.span_limits`.
        """
        _check_backend(backend)
        emissions = self.emission.log_probabilities(words)
        return dense.inside(self.rules, emissions, lengths, precision, backend, statistics, limits)

    def log_likelihood_unchecked(
        self, words: Tensor, lengths: list[int], *, precision: str = "fp32", backend: str = "auto",
        limits: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The same before it is known which sentences have to be recomputed; see `flash_inside.dense`."""
        _check_backend(backend)
        emissions = self.emission.log_probabilities(words)
        return dense.inside_unchecked(self.rules, emissions, lengths, precision, backend, limits)

    @torch.no_grad()
    def span_marginals(
        self, words: Tensor, lengths: list[int], *, precision: str = "fp32", backend: str = "auto",
        statistics: Statistics | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Posterior of every span: a table [l+1, l+1] a sentence, all zeros where it has no tree."""
        _check_backend(backend)
        with product_precision("fp32"):
            emissions = self.emission.log_probabilities(words)
        return dense.span_marginals(self.rules, emissions, lengths, precision, backend, statistics)

    def word_posteriors(
        self, words: Tensor, lengths: list[int], *, precision: str = "fp32", backend: str = "auto",
        statistics: Statistics | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Posterior of the preterminals at every word: [l, P] a sentence, zeros where it has no tree."""
        _check_backend(backend)
        return self.emission.posteriors(
            words, lengths, lambda some: dense.inside(self.rules, some, lengths, precision, backend, statistics)
        )

    @torch.no_grad()
    def last_siblings(self, words: Tensor, lengths: list[int]) -> list[Tensor]:
        """Posterior of where the sibling of the last word begins: see `flash_inside.last_siblings`."""
        with product_precision("fp32"):
            emissions = self.emission.log_probabilities(words)
        return dense.last_siblings(self.rules, emissions, lengths)

    def sample(self, number: int, *, seed: int, max_length: int, end_id: int | None = None) -> Iterator[Derivation]:
        """Draw so many sentences with their trees; see `sample_derivations`. A sentence ends where its tree does."""
        return iter(sample_derivations(self, number, seed=seed, max_length=max_length))

    def draw_children(self, parents: np.ndarray, draw: Draw) -> np.ndarray:
        """Draw the children of some nonterminals: all left ones, then all right ones."""
        size = self.pairs.shape[2]
        return np.concatenate(np.divmod(draw(lambda rows: self.pairs[rows].flatten(1), parents, size**2), size))

    def detached(self) -> DenseGrammar:
        """The same values as leaves of a new graph, on which micro-batches accumulate their gradients."""
        root, pairs, *of_emission = (tensor.detach().requires_grad_() for tensor in self.tensors)
        features, embeddings, normalizers = of_emission
        emission = self.emission._replace(features=features, embeddings=embeddings, log_normalizers=normalizers)
        return DenseGrammar(root, pairs, emission)

    @property
    def warning(self) -> str | None:
        """What a user should know before figures of this grammar are believed."""
        return self.emission.warning

    def with_root_over_nonterminals(self) -> DenseGrammar:
        """The paper's root: the mass of S -> preterminal is taken away and the rest renormalised."""
        nonterminal_part = self.root[..., : self.nonterminals]
        return self._replace(root=nonterminal_part / nonterminal_part.sum(-1, keepdim=True))

    @torch.no_grad()
    def describe(self, thorough: bool = False) -> dict[str, float]:
        """Mean entropies (nats), effective numbers of symbols, and whether derivations end; see analysis.py."""
        n = self.rules.nonterminals
        # The children of one side, whatever the other is: enough for what counts symbols, such as expected uses.
        sides = Rules(self.root, self.pairs.sum(2), self.pairs.sum(1))
        figures = analysis.summary(sides, self.emission)
        choices = torch.stack([entropy(pairs.flatten().double()) for pairs in self.pairs])  # [N]
        figures["entropy/pairs"] = choices.mean().item()
        if not thorough:
            return figures
        radius = analysis.spectral_radius(sides)
        uses = analysis.expected_uses(sides, radius)
        own = torch.cat((choices, self.emission.entropies().double()))
        ends = self.ending_probabilities()
        return figures | {
            "grammar/spectral_radius": radius,
            "grammar/subcritical": radius < 1.0,
            "grammar/mass_of_finite_strings": (self.root[:n].double() @ ends + self.root[n:].double().sum()).item(),
            "grammar/expected_length": uses[n:].sum().item(),
            "grammar/derivation_entropy": (
                (entropy(self.root.double()) + uses @ own).item() if uses.isfinite().all() else float("inf")
            ),
        }

    def ending_probabilities(self, iterations: int = 10_000, tolerance: float = 1e-12) -> Tensor:
        """Probability that a derivation from each nonterminal ends: fp64 [N], the least fixed point."""
        n, pairs = self.rules.nonterminals, self.pairs
        ends = torch.zeros(n, dtype=torch.float64, device=pairs.device)
        words = torch.ones(self.rules.preterminals, dtype=torch.float64, device=pairs.device)
        for _ in range(iterations):
            both = torch.cat((ends, words))
            deeper = torch.stack([both @ (of_parent.double() @ both) for of_parent in pairs])
            if (deeper - ends).abs().max().item() <= tolerance:
                break
            ends = deeper
        return ends


def _check_backend(backend: str) -> None:
    if backend == "triton":
        raise UserError("inside.backend triton: dense PCFGs have no Triton kernels; use inside.backend=auto")
