"""How a training step computes its grammar: precision of the networks, shards of the emission."""

from __future__ import annotations

from lm_pcfg.grammar.computation import Computation
from lm_pcfg.grammar.emission_shards import EmissionShards
from lm_pcfg.settings import Settings
from lm_pcfg.training.engine import Engine


def training_computation(settings: Settings, engine: Engine) -> Computation:
    """Every process has to call it: groups of processes are made here."""
    shards = engine.emission_shards
    return Computation(
        precision=settings.networks.precision,
        shards=EmissionShards(shards, engine.rank, engine.world_size, engine.patience) if shards > 1 else None,
    )
