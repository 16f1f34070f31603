"""What an optimizer step leaves out: symbols (state dropout) and coordinates of features.

Both are functions of (seed, step) alone, so that they are the same on every rank, whatever its device, and after a
resume. Processes that share the emission's normalisers have to agree on them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flash_inside.dropout import hashed_dropout
from lm_pcfg.grammar.families.shared.sections import PCFGSection

FEWEST_ROUNDED = 256  # symbols of which a round number is kept
UNIT = 16  # rows of other lengths are unaligned in memory, and products of them several times slower on a GPU
LEVELS = 32  # a rate that falls is a multiple of a 32nd: CUDA graphs serve one number of symbols, so it should last


class Kept(NamedTuple):
    """Sorted numbers of the symbols that take part, in a step for instance."""

    nonterminals: Tensor  # [kept N] of 0..N-1
    preterminals: Tensor  # [kept P] of 0..P-1

    def to(self, device: torch.device) -> Kept:
        return Kept(*(numbers.to(device, non_blocking=True) for numbers in self))

    def columns(self, n: int) -> Tensor:
        """Return their numbers among all symbols: n nonterminals, then preterminals."""
        return torch.cat((self.nonterminals, self.preterminals + n))


class KeptStates(NamedTuple):
    """The same of a hidden Markov model."""

    states: Tensor  # [kept S] of 0..S-1
    features: Tensor  # [kept F] of 0..F-1; F is 0 where transitions have no features

    def to(self, device: torch.device) -> KeptStates:
        return KeptStates(*(numbers.to(device, non_blocking=True) for numbers in self))


def draw_kept(nonterminals: int, preterminals: int, rate: float, *, seed: int, step: int) -> Kept | None:
    """Draw the symbols that take part in a step; None keeps all."""
    if rate <= 0.0:
        return None
    generator = _generator(seed, step)
    return Kept(_subset(nonterminals, rate, generator), _subset(preterminals, rate, generator))


def draw_states(
    states: int, rate: float, features: int = 0, feature_rate: float = 0.0, *, seed: int, step: int
) -> KeptStates | None:
    """Draw the states that take part in a step, and the features of transitions; None keeps all."""
    if rate <= 0.0 and feature_rate <= 0.0:
        return None
    generator = _generator(seed, step)
    kept = _subset(states, rate, generator)
    return KeptStates(kept, _subset(features, feature_rate, generator) if features else kept[:0])


def _generator(seed: int, step: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, step, 0xD809])))


def kept_of(size: int, rate: float) -> int:
    """Return how many symbols are kept: of many the nearest multiple of 16."""
    count = max(1, round(size * (1.0 - rate)))
    if size >= FEWEST_ROUNDED and count < size:
        count = min(max(UNIT, round(count / UNIT) * UNIT), (size - 1) // UNIT * UNIT)
    return count


def _subset(size: int, rate: float, generator: np.random.Generator) -> Tensor:
    """Draw the sorted numbers that are kept of 0..size-1."""
    count = kept_of(size, rate)
    # Those with the smallest random numbers: half the time of generator.choice.
    return torch.from_numpy(np.sort(np.argpartition(generator.random(size), count - 1)[:count]))


def falls_in_levels(nonterminals: int) -> bool:
    """Whether a rate that falls stays the same for many steps in a row."""
    return nonterminals >= FEWEST_ROUNDED


def state_dropout_rate(model: PCFGSection, nonterminals: int, step: int, total_steps: int) -> float:
    """Return the fraction of the symbols that a step, counted from 0, leaves out. nonterminals: of the chart"""
    if model.state_dropout_until is None:
        return model.state_dropout
    rate = model.state_dropout * max(0.0, 1.0 - step / (model.state_dropout_until * total_steps))
    return round(rate * LEVELS) / LEVELS if falls_in_levels(nonterminals) else rate


class FeatureDropout(NamedTuple):
    """Dropout of coordinates: each is 0 with probability `rate`, by a hash of the key and its place."""

    rate: float = 0.0
    key: Tensor = torch.zeros(2, dtype=torch.int64)  # on any device

    @classmethod
    def of_step(cls, rate: float, *, seed: int, step: int) -> FeatureDropout:
        if not rate:
            return cls()
        key = np.random.SeedSequence([seed, step, 2, 0xFEA7]).generate_state(2)
        return cls(rate, torch.from_numpy(key.astype(np.int64)))

    def __call__(self, x: Tensor) -> Tensor:
        return hashed_dropout(x, self.rate, self.key)


class Latent(NamedTuple):
    """How latent vectors are drawn (compound models), and what their KL term counts; by default as in scores."""

    seed: int = 0
    step: int | None = None  # None: of no step, for scores
    kl_weight: float = 1.0


class Dropout(NamedTuple):
    """All that a step leaves out, or draws; the default leaves out nothing."""

    kept: Kept | None = None  # symbols; None: all
    features: FeatureDropout = FeatureDropout()
    states: KeptStates | None = None  # those of a hidden Markov model; None: all
    latent: Latent = Latent()

    @classmethod
    def of_step(
        cls, model: PCFGSection, nonterminals: int, feature_rate: float, *, seed: int, step: int, total_steps: int
    ) -> Dropout:
        """nonterminals: of the chart."""
        rate = state_dropout_rate(model, nonterminals, step, total_steps)
        kept = draw_kept(nonterminals, model.preterminals, rate, seed=seed, step=step)
        return cls(kept, FeatureDropout.of_step(feature_rate, seed=seed, step=step))

    @property
    def shape(self) -> tuple[int, ...]:
        """Steps of the same shape may share a CUDA graph."""
        return tuple(len(numbers) for numbers in (*(self.kept or ()), *(self.states or ())))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*(self.kept or ()), *(self.states or ()), *((self.features.key,) if self.features.rate else ()))

    def to(self, device: torch.device) -> Dropout:
        kept = None if self.kept is None else self.kept.to(device)
        states = None if self.states is None else self.states.to(device)
        features = self.features._replace(key=self.features.key.to(device))
        return self._replace(kept=kept, features=features, states=states)
