"""The `HiddenMarkovModel`: plain tensors between the networks of a family and the forward algorithm.

A sentence is a sequence of words that ends in `<eos>`, which is a word like any other: the model has no other end. It
stops where it first emits `<eos>`, so the probabilities of all strings that end in their only `<eos>` sum to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flash_inside import Prefixes, Statistics, forward
from flash_inside.forward import Chain
from flash_inside.packing import side_by_side
from flash_inside.softmax import product_precision
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.analysis import entropy
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.generation import Derivation, draw_options

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

    def sample(self, number: int, *, seed: int, max_length: int, end_id: int) -> Iterator[Derivation]:
        """Draw so many sentences with their states, each up to its first word `end_id`."""
        return iter(sample_sequences(self, number, seed=seed, max_length=max_length, end=end_id))

    def prefix_model(self) -> ChainPrefixes:
        """Return what says how sentences begin and go on."""
        return ChainPrefixes(self)

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
            **self.emission.describe(),
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


def sample_sequences(
    model: HiddenMarkovModel, number: int, *, seed: int, max_length: int, end: int
) -> list[Derivation]:
    """Draw so many sequences of states and words, each up to its first word `end`. The same seed draws the same ones.

    Where transitions are given in two factors, what is drawn between them is part of the log-probability.
    """
    if number < 0 or max_length < 1:
        raise ValueError(f"{number} sequences of at most {max_length} words cannot be drawn")
    random, device = np.random.default_rng(seed), model.start.device
    log_probability = np.zeros(number)
    going, states = np.arange(number), np.zeros(number, dtype=np.int64)  # the samples that have not ended

    def draw(table: Callable[[Tensor], Tensor], rows: np.ndarray, options: int) -> np.ndarray:
        chosen, probability = draw_options(table, rows, options, random, device)
        log_probability[going] += np.log(probability)
        return chosen

    steps = []  # (sample, state, word) of each
    with torch.no_grad():
        states = draw(model.start[None].__getitem__, states, len(model.start))
        for step in range(max_length):
            if step:
                for matrix in model.transition:
                    states = draw(matrix.__getitem__, states, matrix.shape[1])
            words = draw(
                lambda rows: model.emission.log_probabilities_of(rows).double().exp(),
                states,
                len(model.emission.embeddings),
            )
            steps.append((going, states, words))
            going, states = going[words != end], states[words != end]
            if not len(going):
                break
    log_probability[going] = np.nan
    sample, state, word = (np.concatenate(arrays) for arrays in zip(*steps, strict=True))
    order = np.argsort(sample, kind="stable")  # steps of a sample stay in order
    lengths = np.bincount(sample, minlength=number)
    ends = np.cumsum(lengths).tolist()
    word, state = word[order], state[order]
    cut = np.isin(np.arange(number), going).tolist()
    samples = []
    for is_cut, stop, length, score in zip(cut, ends, lengths.tolist(), log_probability.tolist(), strict=True):
        own = slice(stop, stop) if is_cut else slice(stop - length, stop)
        nodes = [(place, place + 1, label) for place, label in enumerate(state[own].tolist())]
        samples.append(Derivation(word[own].tolist(), nodes, score, is_cut))
    return samples


class ChainPrefixes:
    """What a hidden Markov model says of prefixes; see `PrefixModel` (families/shared/family.py)."""

    end_is_a_word = True
    finite_mass = 1.0

    def __init__(self, model: HiddenMarkovModel):
        self.model, self.emission = model, model.emission

    def prefixes(
        self, emissions: Tensor, lengths: list[int], *, precision: str, statistics: Statistics | None = None,
        with_next: bool = False,
    ) -> Prefixes:  # fmt: skip
        """In fp64, whatever the precision."""
        if statistics is not None:
            statistics.sentences += len(lengths)
        growing = self.growing(len(lengths))
        begins = torch.empty(sum(lengths), dtype=torch.float64, device=emissions.device)
        following = torch.empty(emissions.shape if with_next else (0, 0), dtype=torch.float64, device=emissions.device)
        for alive, rows in side_by_side(lengths):
            growing.keep(torch.arange(alive, device=begins.device))
            if with_next:
                following[rows] = growing.next_preterminals()
            growing.add(emissions[rows])
            begins[rows] = growing.begins
        return Prefixes(begins, torch.full_like(begins, -math.inf), following if with_next else None)

    def growing(self, count: int) -> GrowingChain:
        return GrowingChain(self.model, count)

    def memory(self, max_length: int) -> int:
        return len(self.model.start)


class GrowingChain:
    """Prefixes of a hidden Markov model that grow by a word at a time, in fp64; as `flash_inside.GrowingPrefixes`."""

    def __init__(self, model: HiddenMarkovModel, count: int):
        self.model = model
        self._rows = model.start.double().expand(count, -1)  # [count, S] of the next state, divided by its sum
        self.begins = self._rows.new_zeros(count)
        self.ends = torch.full_like(self.begins, -math.inf)  # it has no end but a word
        self._scale = torch.zeros_like(self.begins)

    def next_preterminals(self) -> Tensor:
        return self._rows.log() + self._scale[:, None]

    def add(self, emissions: Tensor) -> None:
        largest = emissions.double().amax(1)
        largest = torch.where(largest == -math.inf, 0.0, largest)
        rows = self._rows * (emissions.double() - largest[:, None]).exp()
        total = rows.sum(1)
        self.begins = total.log() + self._scale + largest
        rows = rows / torch.where(total > 0, total, 1.0)[:, None]
        for matrix in self.model.transition:
            rows = rows @ matrix.double()
        self._rows, self._scale = rows, self.begins

    def keep(self, which: Tensor) -> None:
        self._rows, self._scale, self.begins = self._rows[which], self._scale[which], self.begins[which]
        self.ends = self.ends[which]


def _check_backend(backend: str) -> None:
    if backend == "triton":
        raise UserError("inside.backend triton: hidden Markov models choose their kernels; use inside.backend=auto")
