"""What every family of models promises, in one test each: right probabilities, gradients, ranks, kills, commands.

What is special to a family is in another file: test_grammar, test_rank_families, test_dense, test_compound, test_hmm.
"""

from __future__ import annotations

import itertools
import json
import math
import signal
from typing import NamedTuple

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

import forks
import processes
from grammars import enumerate_trees
from lm_pcfg.cli import app
from lm_pcfg.grammar import families
from lm_pcfg.grammar.compound import Compound
from lm_pcfg.grammar.computation import EXACT, backward_through
from lm_pcfg.grammar.dense import DenseGrammar
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.grammar.markov import HiddenMarkovModel
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.metrics_file import read_metrics
from test_dense import enumerated as enumerate_pairs
from texts import write_config

#: Sizes of a tiny instance of every family.
SIZES = {
    "tables": {},
    "sn_pcfg": {"dimension": 3, "init": "normal(1, 1)"},
    "rank_pcfg": {"rank": 3, "dimension": 3, "init": "normal(2, 1)"},
    "tn_pcfg": {"rank": 3, "dimension": 3, "init": "normal(2, 1)"},
    "n_pcfg": {"dimension": 3, "init": "normal(1, 1)"},
    "sc_pcfg": {"dimension": 3, "latent": 2, "encoder": 3, "init": "normal(1, 1)"},
    "c_pcfg": {"dimension": 3, "latent": 2, "encoder": 3, "init": "normal(1, 1)"},
    "nhmm": {"states": 3, "dimension": 3, "init": "normal(1, 1)"},
    "lhmm": {"states": 3, "features": 2, "dimension": 3, "init": "normal(1, 1)"},
    "rank_hmm": {"states": 4, "rank": 3, "dimension": 3, "init": "normal(1, 1)"},
}
HMMS = ("nhmm", "lhmm", "rank_hmm")
END, WORDS = 0, 3  # of the tiny instances of HMMs: `<eos>`, and how many words there are
every_family = pytest.mark.parametrize("name", sorted(SIZES))


def test_these_are_all_families():
    assert sorted(SIZES) == families.names()


def section_of(name: str) -> dict:
    symbols = {"eos": "explicit"} if name in HMMS else {"nonterminals": 2, "preterminals": 3}
    return {"family": name, **symbols, **SIZES[name]}


def tiny(name: str) -> torch.nn.Module:
    """In fp64, far from uniform."""
    section = families.section_of(name).model_validate(section_of(name))
    module = families.get(name).build(section, [f"w{number}" for number in range(WORDS)], 1).double()
    if name == "tables":
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return module


def one_grammar(model):
    """Return the model itself, or of a compound one the grammar of some z: what it says of p(x | z)."""
    return model.at(torch.tensor([0.7, -1.1], dtype=torch.float64)) if isinstance(model, Compound) else model


def strings(model, length: int) -> list[tuple[int, ...]]:
    """All strings of so many symbols; those of an HMM end in their only `<eos>`."""
    if isinstance(model, HiddenMarkovModel):
        return [(*string, END) for string in itertools.product(range(1, WORDS), repeat=length - 1)]
    return list(itertools.product(range(WORDS), repeat=length))


def by_enumeration(model, string: tuple[int, ...]) -> float:
    """Return the probability of a string as the sum over all derivations."""
    emissions = model.emission.log_probabilities(torch.tensor(string))
    if isinstance(model, Grammar):
        return enumerate_trees(model.rules, emissions)[0]
    if isinstance(model, DenseGrammar):
        return enumerate_pairs(model.rules, emissions)[0]
    transition = model.transition[0] if len(model.transition) == 1 else model.transition[0] @ model.transition[1]
    total = 0.0
    for states in itertools.product(range(len(model.start)), repeat=len(string)):
        p = model.start[states[0]].item()
        for here, following in itertools.pairwise(states):
            p *= transition[here, following].item()
        total += p * math.exp(sum(emissions[place, state].item() for place, state in enumerate(states)))
    return total


def distributions(model) -> list[torch.Tensor]:
    """Return what has to sum to one over its last dimension: start or root, rules or transitions, words."""
    words = model.emission.log_probabilities(torch.arange(WORDS)).exp().T  # [P, V]
    if isinstance(model, HiddenMarkovModel):
        return [model.start, *model.transition, words]
    root, *rules = model.rules
    if isinstance(model, DenseGrammar):
        return [root, rules[0].flatten(1), words]  # [N, pairs]
    return [root, *rules, words]


@every_family
def test_probabilities_are_those_of_all_derivations_and_sum_to_one(name):
    with torch.no_grad():
        model = one_grammar(tiny(name)(EXACT))
        of_lengths = []
        for length in range(1, 6):
            some = strings(model, length)
            words = torch.tensor(some).flatten()
            log_p = model.log_likelihood(words, [length] * len(some), precision="fp64")
            of_lengths.append(log_p.exp().sum().item())
            for string, found in zip(some, log_p.exp().tolist(), strict=True):
                if length <= 3 or string == some[-1]:
                    assert found == pytest.approx(by_enumeration(model, string), rel=1e-9)
        assert sum(of_lengths) <= 1.0 + 1e-12
        for table in distributions(model):
            torch.testing.assert_close(table.sum(-1), torch.ones_like(table.sum(-1)), rtol=1e-12, atol=0)
        # The rest is the mass beyond: of lengths if every word were the same, and certain.
        if isinstance(model, HiddenMarkovModel):
            certain = model.emission.log_probabilities(torch.tensor([END])).exp()
            transition = torch.linalg.multi_dot(model.transition) if len(model.transition) > 1 else model.transition[0]
            going = model.start[None] * (1 - certain)
            for _ in range(4):
                going = (going @ transition) * (1 - certain)
            assert sum(of_lengths) + going.sum().item() == pytest.approx(1.0, abs=1e-12)
        else:
            from flash_inside import dense, inside

            compute = dense.inside if isinstance(model, DenseGrammar) else inside
            for length, total in enumerate(of_lengths, start=1):
                certain = compute(model.rules, torch.zeros(length, 3, dtype=torch.float64), [length], "fp64")
                assert total == pytest.approx(certain.exp().item(), rel=1e-9)


class OneTag(NamedTuple):
    """An emission in which only one symbol may emit one of the words."""

    emission: Emission
    place: int
    symbol: int

    def log_probabilities(self, words: torch.Tensor) -> torch.Tensor:
        table = self.emission.log_probabilities(words).clone()
        others = torch.arange(table.shape[1]) != self.symbol
        table[self.place, others] = -math.inf
        return table


@every_family
def test_tags_have_the_posterior_of_all_derivations(name):
    with torch.no_grad():
        model = one_grammar(tiny(name)(EXACT))
        some = [strings(model, 2)[-1], strings(model, 3)[1]]
        tables = model.word_posteriors(torch.tensor([*some[0], *some[1]]), [2, 3], precision="fp64")
        for string, table in zip(some, tables, strict=True):
            whole = by_enumeration(model, string)
            for place, row in enumerate(table.tolist()):
                assert math.fsum(row) == pytest.approx(1.0, rel=1e-9)
                for symbol, found in enumerate(row):
                    of_tag = by_enumeration(model._replace(emission=OneTag(model.emission, place, symbol)), string)
                    assert found == pytest.approx(of_tag / whole, rel=1e-9)


@every_family
def test_gradcheck(name):
    """Of the log-likelihood (of compound models the bound) by every weight, through the leaves of a micro-batch."""
    module = tiny(name)
    words, lengths = (
        (torch.tensor([1, END, 2, 2, END]), [2, 3]) if name in HMMS else (torch.tensor([1, 0, 2, 2]), [1, 3])
    )
    weights = dict(module.named_parameters())

    def of_weights(*values):
        model = torch.func.functional_call(module, dict(zip(weights, values, strict=True)), (EXACT,))
        return model.log_likelihood(words, lengths, precision="fp64")

    values = [weight.detach().clone().requires_grad_() for weight in weights.values()]
    assert torch.autograd.gradcheck(of_weights, values, fast_mode=True, atol=1e-6)

    graph = module(EXACT)
    leaves = graph.detached()
    (-leaves.log_likelihood(words, lengths, precision="fp64").sum()).backward()
    backward_through(graph, leaves).backward()
    (-of_weights(*values).sum()).backward()
    for weight, value in zip(weights.values(), values, strict=True):
        gradient = torch.zeros_like(value) if value.grad is None else value.grad
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-7, atol=1e-9)


# ---- through the commands -------------------------------------------------------------------------------------------


def config_of(name: str, folder, **changes) -> str:
    training = {"epochs": 1, "max_steps": 6, "log_every": 1}
    path = write_config(folder, name, training=training, inside={"precision": "fp64"}, **changes)
    settings = yaml.safe_load(path.read_text())
    settings["model"] = section_of(name)
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def losses(run) -> list[float]:
    return [line["train/loss"] for line in read_metrics(run / "metrics.jsonl") if "train/loss" in line]


def ran(*arguments) -> str:
    """Run a command in this process: a process of its own would import for seconds."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.long
@every_family
def test_it_is_trained_killed_resumed_scored_and_sampled(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_of(name, tmp_path, checkpoint={"every_steps": 2})
    ran("train", "--config", config, "name=whole")
    slow = ["-m", "lm_pcfg", "train", "--config", config, "name=killed", "training.max_steps=100000",
            "training.epochs=100000"]  # fmt: skip
    folder = tmp_path / "runs" / "killed" / "checkpoints"
    process = forks.start(slow, processes.environment())
    try:
        processes.wait_until(lambda: any(folder.glob("step-*")), 100, every=0.01, what="a checkpoint")
    finally:
        process.kill()
    assert process.wait(60)[0] == -signal.SIGKILL
    reached = int(checkpoint.latest(tmp_path / "runs" / "killed").name.removeprefix("step-"))
    steps = max(6, reached + 2)
    for run in ("killed", "whole"):
        longer = [f"training.max_steps={steps}", "training.epochs=100000"]
        ran("train", "--config", config, f"name={run}", "resume=auto", *longer)
    whole, killed = (checkpoint.load(checkpoint.latest(tmp_path / "runs" / run), with_optimizer=True)
                     for run in ("whole", "killed"))  # fmt: skip
    assert whole.state["step"] == killed.state["step"] == steps
    for of_whole, of_killed in ((whole.model, killed.model), (whole.optimizer, killed.optimizer)):
        assert all(torch.equal(tensor, of_killed[key]) for key, tensor in of_whole.items())
    report = json.loads(ran("score", "valid.txt", "--checkpoint", "runs/whole", "--json"))
    assert math.isfinite(report["nll"])
    drawn = [ran("sample", "-n", "20", "--checkpoint", "runs/whole", "--seed", seed) for seed in "112"]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.long
@every_family
def test_one_process_and_two_have_the_same_losses(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = ["train", "--config", config_of(name, tmp_path, batch={"sentences": 4})]
    processes.run_ranks(2, ["-m", "lm_pcfg", *train, "name=two"])
    ran(*train, "name=one", "batch.accumulate=2")
    one, two = (losses(tmp_path / "runs" / run) for run in ("one", "two"))
    assert len(one) == 6
    np.testing.assert_allclose(one, two, rtol=1e-5)
    weights = [checkpoint.load(checkpoint.latest(tmp_path / "runs" / run), with_optimizer=False).model
               for run in ("one", "two")]  # fmt: skip
    for key, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][key], rtol=1e-4, atol=1e-6)
