"""Dropout of coordinates: a random part of the embeddings or features of each symbol is 0 for an optimizer step.

The choice is a hash of (seed, step, coordinate): the same on every rank, whatever its device, and after a resume.
Processes that share out the emission's normalisers have to agree on it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flash_inside.dropout import hashed_dropout

STREAMS = 4  # nonterminals, preterminals, features, parents: each has choices of its own


class FeatureDropout(NamedTuple):
    """The rates of a step; the default drops nothing."""

    embedding_rate: float = 0.0  # of symbol embeddings, before the networks
    feature_rate: float = 0.0  # of the preterminals' features, before the softmax over words
    rule_rate: float = 0.0  # of the parents' features, before the softmaxes over children
    keys: Tensor = torch.zeros(STREAMS, 2, dtype=torch.int64)  # that the choices follow from, on any device

    @classmethod
    def of_step(
        cls, embedding_rate: float, feature_rate: float, rule_rate: float = 0.0, *, seed: int, step: int
    ) -> FeatureDropout:
        if not (embedding_rate or feature_rate or rule_rate):
            return cls()  # keys take a tenth of a millisecond
        keys = [np.random.SeedSequence([seed, step, stream, 0xFEA7]).generate_state(2) for stream in range(STREAMS)]
        return cls(embedding_rate, feature_rate, rule_rate, torch.from_numpy(np.array(keys, dtype=np.int64)))

    @property
    def drops(self) -> bool:
        return any((self.embedding_rate, self.feature_rate, self.rule_rate))

    def embeddings(self, x: Tensor, kind: int) -> Tensor:
        """kind: 0 for nonterminals, 1 for preterminals."""
        return self._drop(x, self.embedding_rate, kind)

    def features(self, x: Tensor) -> Tensor:
        return self._drop(x, self.feature_rate, 2)

    def parents(self, x: Tensor) -> Tensor:
        return self._drop(x, self.rule_rate, 3)

    def _drop(self, x: Tensor, rate: float, stream: int) -> Tensor:
        return hashed_dropout(x, rate, self.keys[stream])
