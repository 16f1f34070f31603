"""The chunked emission on 1 to 4 processes against the plain dense computation: loss and every gradient, in fp64."""

from __future__ import annotations

import itertools
import os
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

import flash_inside
from flash_inside import Rules
from flash_inside.softmax import rows
from lm_pcfg.distributed.collectives import ProcessGroup
from lm_pcfg.distributed.engine import shard_count
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.computation import Computation, backward_through
from lm_pcfg.grammar.dropout import Dropout, FeatureDropout, draw_kept
from lm_pcfg.grammar.emission import EmissionShards
from lm_pcfg.grammar.families.sn_pcfg import SimplePCFG
from processes import run_ranks

N, P, V = 5, 37, 101
SENTENCES = [np.random.default_rng(number).integers(0, V, size) for number, size in enumerate((4, 1, 7, 2, 5, 3, 3))]
#: sentences of each rank, as micro-batches: dealt in turn; all to one rank; two micro-batches here and none there
DEALS = {
    "in turn": lambda rank, world: [list(range(rank, len(SENTENCES), world))],
    "all to the last": lambda rank, world: [list(range(len(SENTENCES)))] if rank == world - 1 else [],
    "micro-batches": lambda rank, world: [[0, 1], [2, 3, 4, 5, 6]] if rank == 0 else [],
}


def model_of(parameterization: str) -> SimplePCFG:
    model = SimplePCFG(
        nonterminals=N,
        preterminals=P,
        words=V,
        rotated_children=True,
        dimension=8,
        parameterization=parameterization,
        symbol_deviation=0.5,
    )
    return model.double()


def left_out(rate: float) -> Dropout:
    """Symbols and coordinates: every process has to leave out the same ones."""
    return Dropout(draw_kept(N, P, rate, seed=3, step=7), FeatureDropout.of_step(rate, seed=3, step=7))


def dense_loss(model: SimplePCFG, dropout: Dropout) -> torch.Tensor:
    """Mean -log p with every matrix in full, and log space."""
    nonterminals, preterminals = model.symbols[:N], model.symbols[N:]
    root_output = model.root_output if model.parameterization == "paper" else model.symbols
    if (kept := dropout.kept) is not None:
        nonterminals, preterminals = nonterminals[kept.nonterminals], preterminals[kept.preterminals]
        root_output = root_output[torch.cat((kept.nonterminals, N + kept.preterminals))]
    symbols = torch.cat((nonterminals, preterminals))
    left, right = (
        torch.softmax(model.parent(nonterminals) @ child(symbols, rotation(symbols)).T, 1)
        for child, rotation in ((model.left_child, model.left_rotation), (model.right_child, model.right_rotation))
    )
    start = model.root_network(model.start) if model.parameterization == "paper" else model.start
    root_logits = (root_output @ start.T).squeeze(1).split([len(nonterminals), len(preterminals)])
    root = torch.cat(
        [
            part.softmax(0) * torch.sigmoid(sign * model.one_word)
            for part, sign in zip(root_logits, (-1, 1), strict=True)
        ]
    )
    features = model.emission_network(preterminals)
    if model.parameterization == "released":
        features = features + preterminals
    emission = (dropout.features(features) @ model.words.T).log_softmax(1)  # [P, V]
    words = torch.from_numpy(np.concatenate(SENTENCES))
    log_z = flash_inside.inside(
        Rules(root, left, right), emission[:, words].T, [len(s) for s in SENTENCES], "fp64", "reference"
    )
    return -log_z.sum() / len(SENTENCES)


def sharded_loss(model: SimplePCFG, how: Computation, batches: list[list[int]], world: int) -> float:
    """As the trainer does it; the gradients are on the parameters, not averaged yet."""
    grammar = model(how)
    leaves = grammar.detached()
    total = 0.0
    for batch in batches:
        if batch:
            words = torch.from_numpy(np.concatenate([SENTENCES[number] for number in batch]))
            log_z = leaves.log_likelihood(words, [len(SENTENCES[number]) for number in batch], precision="fp64")
            loss = -log_z.sum() * (world / len(SENTENCES))
            loss.backward()
            total += loss.item()
    backward_through(grammar, leaves).backward()
    return total


def count_logits() -> dict[str, int]:
    """Of every pass over a block of logits, from now on."""
    counted = {"log_sum_exp": 0, "scaled_exp": 0}

    def counting(name: str, function):
        def wrapper(logits, columns, *others, **named):
            counted[name] += len(logits) * columns
            return function(logits, columns, *others, **named)

        return wrapper

    for name in counted:
        setattr(rows, name, counting(name, getattr(rows, name)))
    return counted


def one_process(rank: int, folder: str, expected: dict) -> None:
    torch.set_num_threads(1)
    counted = count_logits()
    for world in (1, 2, 3, 4):
        if rank < world:
            store = dist.FileStore(f"{folder}/{world}", world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            for shards in (number for number in range(1, world + 1) if world % number == 0):
                for (name, deal), (networks, dropout) in itertools.product(DEALS.items(), expected):
                    counted.update(log_sum_exp=0, scaled_exp=0)
                    model, dropped = model_of(networks), left_out(dropout)
                    group = ProcessGroup.of_neighbours(shards, rank, world) if shards > 1 else None
                    parts = None if group is None else EmissionShards(group)
                    how = Computation("fp64", shards=parts, dropout=dropped)
                    loss = torch.tensor(sharded_loss(model, how, deal(rank, world), world), dtype=torch.float64)
                    dist.all_reduce(loss)
                    case = f"{world} processes, {shards} shards, {name}, {networks} networks, dropout {dropout}"
                    wanted_loss, wanted = expected[networks, dropout]
                    assert abs(loss.item() / world - wanted_loss) <= 1e-10 * wanted_loss, case
                    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
                        dist.all_reduce(parameter.grad)
                        difference = (parameter.grad / world - gradient).norm()
                        assert difference <= 1e-10 * gradient.norm(), case
                    if group is not None:
                        assert group.take_seconds() > 0, case  # in two collectives
                        assert group.take_seconds() == 0, case  # since then: none
                    # What was really computed, forward and again backward: this process's part of the logits.
                    preterminals = P if dropped.kept is None else len(dropped.kept.preterminals)
                    part = preterminals * (rank % shards + 1) // shards - preterminals * (rank % shards) // shards
                    assert counted == {"log_sum_exp": part * V, "scaled_exp": part * V}, case
            dist.destroy_process_group()


@pytest.mark.long
def test_loss_and_gradients_equal_the_dense_ones_on_1_to_4_processes(tmp_path):
    expected = {}
    for networks, dropout in itertools.product(("paper", "released"), (0.0, 0.4)):
        model = model_of(networks)
        loss = dense_loss(model, left_out(dropout))
        expected[networks, dropout] = loss.item(), torch.autograd.grad(loss, list(model.parameters()))
    torch.save(expected, tmp_path / "expected")
    run_ranks(4, [__file__, str(tmp_path)])


def test_parts_cover_all_preterminals_in_order():
    for preterminals, shards in [(37, 4), (2, 3), (8, 8), (1, 1), (1000, 7)]:
        parts = [EmissionShards(ProcessGroup(rank, shards)).part(preterminals) for rank in range(shards)]
        assert [number for part in parts for number in range(part.start, part.stop)] == list(range(preterminals))


def test_shards_must_divide_the_processes():
    assert shard_count("auto", 6) == 6
    assert shard_count(3, 6) == 3
    with pytest.raises(
        UserError, match=r"emission.shards 4 does not divide the 6 processes.*auto or one of 1, 2, 3, 6"
    ):
        shard_count(4, 6)
    with pytest.raises(UserError, match=r"emission.shards 2 does not divide the 1 process of this run; use auto or 1$"):
        shard_count(2, 1)


if __name__ == "__main__":  # on every rank: python test_emission_shards.py FOLDER
    one_process(int(os.environ["RANK"]), sys.argv[1], torch.load(f"{sys.argv[1]}/expected"))
