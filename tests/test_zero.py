"""ZeRO in one process: its steps are those of plain training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from processes import ROOT, run_ranks
from texts import write_config
from zero_scenario import BROKEN


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("zero")
    write_config(folder, optimizer={"clip": 0.5}, inside={"precision": "fp64"}, model={"dimension": 7})
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


@pytest.mark.parametrize("buckets", ["", "-buckets"])
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_steps_clipping_and_what_is_left_out_are_those_of_plain_training(trained, stage, buckets):
    run = f"{stage}{buckets}"
    assert_same_weights_and_moments(trained, "plain", run)
    assert told(trained, run)["skipped"] == told(trained, "plain")["skipped"] == len(BROKEN)
    assert told(trained, run)["norm"] == pytest.approx(told(trained, "plain")["norm"], rel=1e-5)
