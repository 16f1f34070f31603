"""The `HiddenMarkovModel`: plain tensors between the networks of a family and the forward algorithm.

A sentence is a sequence of words that ends in `<eos>`, which is a word like any other: the model has no other end. It
stops where it first emits `<eos>`, so the probabilities of all strings that end in their only `<eos>` sum to 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_inside import Statistics, forward
from flash_inside.forward import Chain
from flash_inside.softmax import product_precision
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.analysis import entropy
from lm_pcfg.grammar.emission import Emission

LARGEST_BLOCK = 1 << 27  # numbers [words, states] of the sentences that are scored together: 512 MiB in fp32


class HiddenMarkovModel(NamedTuple):
    """p(words) = sum over states of start[s_1] p(w_1 | s_1) T[s_1, s_2] p(w_2 | s_2) ...

    The start is fp64, as the root of a `Grammar` is. T is one matrix, or two factors of which it is the product.
    """

    start: Tensor  # [S]
    transition: tuple[Tensor, ...]  # ([S, S],) or ([S, r], [r, S]); rows sum to 1
    emission: Emission  # of S states

    @property
    def chain(self) -> Chain:
        return Chain(self.start, self.transition)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that receive the gradients of start, transition and the emission."""
        return self.start, *self.transition, *self.emission.tensors

    @property
    def penalty(self) -> None:
        return None

    def log_likelihood(
        self, words: Tensor, lengths: list[int], *, precision: str = "fp32", backend: str = "auto",
        statistics: Statistics | None = None,
    ) -> Tensor:  # fmt: skip
        """Natural log-probability of each sentence: [B]. words: [sum(lengths)] ids, each sentence with its `<eos>`."""
        _check_backend(backend)
        parts = [
            forward.log_likelihood(
                self.chain, self.emission.log_probabilities(some), their_lengths, precision, backend, statistics
            )
            for some, their_lengths in self._blocks(words, lengths)
        ]
        return torch.cat(parts)

    def log_likelihood_unchecked(
        self, words: Tensor, lengths: list[int], *, precision: str = "fp32", backend: str = "auto"
    ) -> tuple[Tensor, Tensor]:
        """The same before it is known which sentences have to be recomputed; see `forward.log_likelihood_unchecked`."""
        _check_backend(backend)
        emissions = self.emission.log_probabilities(words)
        return forward.log_likelihood_unchecked(self.chain, emissions, lengths, precision, backend)

    @torch.no_grad()
    def word_posteriors(
        self, words: Tensor, lengths: list[int], *, precision: str = "fp32", backend: str = "auto",
        statistics: Statistics | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Posterior of the states at every word: [l, S] a sentence; zeros where it has probability 0."""
        _check_backend(backend)
        with product_precision("fp32"):
            emissions = self.emission.log_probabilities(words)
        return list(forward.posteriors(self.chain, emissions, lengths, precision, statistics).split(lengths))

    def detached(self) -> HiddenMarkovModel:
        """The same values as leaves of a new graph, on which micro-batches accumulate their gradients."""
        start, *rest = (tensor.detach().requires_grad_() for tensor in self.tensors)
        *transition, features, embeddings, normalizers = rest
        emission = self.emission._replace(features=features, embeddings=embeddings, log_normalizers=normalizers)
        return HiddenMarkovModel(start, tuple(transition), emission)

    @property
    def warning(self) -> str | None:
        """What a user should know before figures of this model are believed."""
        return self.emission.warning

    @torch.no_grad()
    def describe(self, thorough: bool = False) -> dict[str, float]:
        """Mean entropies (nats), which tell early whether symmetry breaks, and how many states are used."""
        first, *second = self.transition
        rows = [part @ second[0] if second else part for part in first.split(1024)]
        into = torch.stack([part.sum(0) for part in rows]).sum(0) / len(first)  # [S] as reached from an average state
        return {
            "entropy/start": entropy(self.start).item(),
            "entropy/transition": torch.cat([entropy(part) for part in rows]).mean().item(),
            "entropy/emission": self.emission.entropies().mean().item(),
            "symbols/effective_states": entropy(into / into.sum()).exp().item(),
        }

    def _blocks(self, words: Tensor, lengths: list[int]) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield some sentences at a time, where gradients do not need all of them anyway."""
        most = max(1, LARGEST_BLOCK // len(self.start)) if not torch.is_grad_enabled() else sum(lengths)
        begin = taken = 0
        some: list[int] = []
        for length in lengths:
            if some and taken + length > most:
                yield words[begin : begin + taken], some
                begin, taken, some = begin + taken, 0, []
            some.append(length)
            taken += length
        yield words[begin:], some


def _check_backend(backend: str) -> None:
    if backend == "triton":
        raise UserError("inside.backend triton: hidden Markov models choose their kernels; use inside.backend=auto")
