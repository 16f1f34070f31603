"""How the tensors of a grammar are computed from its networks: precision, types, dropout, who computes which part."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from lm_pcfg.grammar.emission_shards import EmissionShards
from lm_pcfg.grammar.feature_dropout import FeatureDropout


class Computation(NamedTuple):
    """The default is exact: what scoring uses."""

    precision: str = "fp32"  # of the products of the networks and softmaxes: "fp32", "tf32" or "bf16" (fp64 stays fp64)
    rules: torch.dtype | None = None  # type of left and right; None: that of the networks
    shards: EmissionShards | None = None  # None: every process computes all normalisers of the emission
    dropout: FeatureDropout = FeatureDropout()  # of embeddings and features; the default is none
    mark: Callable[[str], None] = lambda part: None  # told when a part of the computation is over, for benchmarks


EXACT = Computation()
