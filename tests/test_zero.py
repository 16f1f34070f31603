"""ZeRO in one process: its steps are those of plain training, and cost the host no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from processes import ROOT, run_ranks
from texts import write_config
from zero_scenario import BROKEN

STAGES = ["zero1", "zero2", "zero3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("zero")
    write_config(folder, optimizer={"clip": 0.5}, inside={"precision": "fp64"}, model={"dimension": 7, "spelling": 2})
    run_ranks(1, [str(ROOT / "tests" / "zero_scenario.py"), str(folder)])
    return folder


def told(folder: Path, run: str) -> dict:
    return json.loads((folder / f"{run}.json").read_text())


def assert_same_weights_and_moments(folder: Path, *runs: str) -> None:
    for file in ("", "-optimizer"):
        plain, other = (load_file(folder / f"{run}{file}.safetensors") for run in runs)
        assert plain.keys() == other.keys()
        for name, tensor in plain.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["", "-late", "-deepspeed", "-graphs"])
@pytest.mark.parametrize("stage", STAGES)
def test_steps_clipping_and_what_is_left_out_are_those_of_plain_training(trained, stage, how):
    if (stage, how) == ("zero3", "-graphs"):
        pytest.skip("under ZeRO 3 weights have no fixed place in memory")
    assert_same_weights_and_moments(trained, "plain", f"{stage}{how}")
    assert told(trained, f"{stage}{how}")["skipped"] == told(trained, "plain")["skipped"] == len(BROKEN)
    assert told(trained, f"{stage}{how}")["norm"] == pytest.approx(told(trained, "plain")["norm"], rel=1e-5)
    assert told(trained, f"{stage}{how}")["one_bucket"] == (how != "-deepspeed")
    assert told(trained, f"{stage}{how}")["captured"] == (how == "-graphs")


@pytest.mark.parametrize("stage", STAGES)
def test_layers_that_learn_at_another_rate_do_so_under_deepspeed(trained, stage):
    """Two groups of parameters are two flat tensors: DeepSpeed's own reduction takes them, whatever its bucket."""
    assert_same_weights_and_moments(trained, "plain-rates", f"{stage}-rates")
    assert told(trained, f"{stage}-rates")["skipped"] == len(BROKEN)
    assert not told(trained, f"{stage}-rates")["one_bucket"]
    plain, rates = (load_file(trained / f"{run}.safetensors") for run in ("plain", "plain-rates"))
    assert not torch.equal(plain["parent.linear.weight"], rates["parent.linear.weight"])


@pytest.mark.parametrize("stage", STAGES)
def test_an_update_takes_as_few_launches_as_without_deepspeed_and_none_waits(trained, stage):
    """However many parameters there are: 31 here."""
    counts = told(trained, f"{stage}-late")
    assert counts["waits"] == 0
    assert counts["launches"] <= told(trained, "plain")["launches"] < 31
