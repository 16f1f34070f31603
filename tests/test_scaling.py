"""The scaling model: its parameter counts are the networks', its limits are what they must be."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lm_pcfg.bench import scaling
from lm_pcfg.bench.scaling import LINKS, Machines, predict, step_on_one_gpu
from lm_pcfg.cli import app
from lm_pcfg.errors import UserError
from lm_pcfg.grammar import families
from lm_pcfg.grammar.families.shared.sections import SNPCFGSection

LARGE = SNPCFGSection(nonterminals=4096)
WORDS = 10_000


@pytest.mark.parametrize("parameterization", ["paper", "bounded", "released", "tables"])
@pytest.mark.parametrize("root", ["all", "nonterminals"])
def test_parameters_are_those_of_the_model(parameterization, root):
    networks = {"dimension": 6, "parameterization": parameterization}
    family = families.get("tables" if parameterization == "tables" else "sn_pcfg")
    own = {} if parameterization == "tables" else networks
    settings = family.section(nonterminals=7, preterminals=9, root=root, **own)
    built = family.build(settings, ["word"] * 11, seed=0)
    assert scaling.parameters(settings, 11) == sum(parameter.numel() for parameter in built.parameters())


def at(gpus: int, machines: Machines | None = None, model: SNPCFGSection = LARGE, **options) -> scaling.Prediction:
    return predict(model, WORDS, step_on_one_gpu(model, WORDS), machines or Machines(), gpus, **options)


def test_one_gpu_needs_no_communication():
    alone = at(1)
    assert alone.step_ms == alone.compute_ms
    assert alone.efficiency == 1.0
    assert alone.words_per_second == pytest.approx(16 * 40 / alone.step_ms * 1e3)


def test_links_of_infinite_speed_lose_nothing_if_the_batch_grows():
    free = replace(LINKS["nvlink"], gigabytes_per_second=float("inf"), microseconds=0.0)
    machines = Machines(within=free, between=free)
    assert at(1024, machines, emission_shards=1).efficiency == pytest.approx(1.0)
    assert at(1024, machines).efficiency > 1.0  # the emission is divided, which one GPU computes alone


def test_all_reduce_of_a_ring_on_one_node_moves_twice_the_gradients():
    machines = Machines(within=replace(LINKS["nvlink"], microseconds=0.0), attained=1.0)
    assert machines.all_reduce_ms(450e6, 8) == pytest.approx(2 * 7 / 8)


def test_efficiency_falls_with_gpus_and_with_slower_links():
    efficiencies = [at(gpus, emission_shards=1).efficiency for gpus in scaling.gpu_counts(1024)]
    assert efficiencies == sorted(efficiencies, reverse=True)
    slow = Machines(between=LINKS["ethernet-10"])
    assert at(16, slow).efficiency < at(16).efficiency


def test_repeated_rules_bite_where_the_batch_does_not_grow():
    """However many GPUs: a step is never shorter than what every rank repeats."""
    step = step_on_one_gpu(LARGE, WORDS)
    crowded = at(1024, all_sentences=1024)
    assert crowded.compute_ms > step.rules + step.optimizer
    assert crowded.efficiency < 0.5
    assert at(1024, all_sentences=1024, emission_shards=8).compute_ms == pytest.approx(
        crowded.compute_ms + step.emission * (1 / 8 - 1 / 1024)
    )


def test_the_emission_is_divided_as_the_trainer_does_it():
    from lm_pcfg.distributed.engine import shard_count

    for gpus in (1, 8, 1024):
        assert at(gpus) == at(gpus, emission_shards=shard_count("auto", gpus))
    assert at(8).normalizers_ms > at(8, emission_shards=1).normalizers_ms == 0.0


def test_a_measured_step_replaces_the_table():
    step = step_on_one_gpu(LARGE, WORDS, step_ms=20.0)
    assert step.compute(16, 1) == pytest.approx(20.0)
    with pytest.raises(UserError, match="--step-ms"):
        step_on_one_gpu(LARGE, WORDS, step_ms=0.1)
    with pytest.raises(UserError, match="--inside-ms"):
        step_on_one_gpu(SNPCFGSection(nonterminals=1000), WORDS)


def test_zero_divides_all_but_never_more_than_there_is():
    count = scaling.parameters(LARGE, WORDS)
    sizes = [scaling.zero_bytes(count, 8, stage) for stage in range(4)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 16 * count
    assert sizes[3] == pytest.approx(2.5 * count)  # with a copy of the weights it updates


def test_the_command_prints_a_table_its_assumptions_and_json():
    result = CliRunner().invoke(app, ["bench", "scaling", "--most-gpus", "64"])
    assert result.exit_code == 0, result.output
    assert "repeated on every rank" in result.output
    assert [line.split()[0] for line in result.output.splitlines() if line[:6].strip().isdigit()][-1] == "64"
    result = CliRunner().invoke(
        app, ["bench", "scaling", "--json", "--between", "ethernet-100", "--all-sentences", "4096"]
    )
    report = json.loads(result.stdout)
    assert report["predictions"][-1]["gpus"] == 1024
    assert report["assumptions"]


def test_the_command_takes_the_model_of_a_config():
    options = ["--config", "configs/tiny.yaml", "--words", "303", "--step-ms", "2", "--json"]
    report = json.loads(CliRunner().invoke(app, ["bench", "scaling", *options]).stdout)
    assert report["parameters"] == 160 + 2 * 64 * 160 + 96 * 303


def test_the_table_of_the_readme_is_what_the_command_says():
    text = (Path(__file__).resolve().parents[1] / "docs/lab/clusters.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if re.match(r"\| .* \| 100 % \|", line)]
    assert len(rows) == 6
    for title, *figures in rows:
        options = shlex.split(found[1]) if (found := re.search(r"`(--.*)`", title)) else []
        report = json.loads(CliRunner().invoke(app, ["bench", "scaling", "--json", *options]).stdout)
        shown = [p["efficiency"] for p in report["predictions"] if p["gpus"] in (1, 8, 16, 64, 128, 1024)]
        assert [float(figure.strip(" |%")) for figure in figures] == [round(100 * value, 1) for value in shown], title
