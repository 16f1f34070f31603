"""How a training step computes its grammar: precision of the networks, type of the rules, shards of the emission."""

from __future__ import annotations

from datetime import timedelta

from flash_inside import rules_type
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.computation import Computation
from lm_pcfg.grammar.emission_shards import EmissionShards
from lm_pcfg.settings import Settings


def shard_count(asked: int | str, world_size: int) -> int:
    """Processes that share the emission's normalisers; "auto": all of them."""
    shards = world_size if asked == "auto" else int(asked)
    if world_size % shards:
        fitting = [number for number in range(1, world_size + 1) if world_size % number == 0]
        raise UserError(
            f"emission.shards {shards} does not divide the {world_size} processes of this run; use auto or one of "
            + ", ".join(map(str, fitting))
        )
    return shards


def training_computation(settings: Settings, rank: int, world_size: int) -> Computation:
    """Every process has to call it: groups of processes are made here."""
    shards = shard_count(settings.emission.shards, world_size)
    timeout = timedelta(seconds=settings.engine.timeout_seconds)
    return Computation(
        precision=settings.networks.precision,
        rules=rules_type(settings.inside.precision, settings.model.nonterminals),
        shards=EmissionShards(shards, rank, world_size, timeout) if shards > 1 else None,
    )
