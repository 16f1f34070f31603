"""One process, DDP and DeepSpeed, 1, 2, 3 and 4 ranks: the same steps, and each opens every other's checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engines_scenario import SAVED, STEPS
from processes import ROOT, run_ranks
from texts import write_config

pytestmark = pytest.mark.long
SCENARIO = str(ROOT / "tests" / "engines_scenario.py")
ZERO = ["zero1", "zero2", "zero3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Trainings of 30 steps under all engines. 15 batches an epoch: with 4 ranks one has none in every fourth step."""
    folder = tmp_path_factory.mktemp("engines")
    write_config(
        folder,
        # With 0 or 1 a unit of the child networks is on for all symbols kept. Its bias then cancels in the softmax, its
        # gradient is rounding alone (1e-9), and Adam makes steps of full size of that: other ones in every sum.
        seed=2,
        model={"state_dropout": 0.25, "dimension": 7},  # sizes that 2 and 4 do not divide: ZeRO 3 pads
        batch={"sentences": 4},
        ema={"decay": 0.9},
        inside={"precision": "fp64"},
        training={"epochs": 20, "max_steps": STEPS},
        optimizer={"schedule": {"kind": "cosine", "warmup_steps": 4}},
        evaluation={"every_epochs": None, "every_steps": SAVED, "patience": None, "batch_cost": 30},  # several batches
        checkpoint={"keep_last": 9},
    )
    run_ranks(1, [SCENARIO, str(folder), "single"])
    run_ranks(4, [SCENARIO, str(folder), "ddp", *ZERO])
    run_ranks(2, [SCENARIO, str(folder), "ddp", *ZERO])
    run_ranks(3, [SCENARIO, str(folder), "ddp"])
    run_ranks(1, [SCENARIO, str(folder), "last"])
    return folder


def last(folder: Path, run: str, file: str) -> dict[str, torch.Tensor]:
    return load_file(folder / "runs" / run / "checkpoints" / f"step-{STEPS:08d}" / f"{file}.safetensors")


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest relative difference of a tensor, as norms."""
    assert one.keys() == other.keys()
    return max(((one[name] - other[name]).norm() / one[name].norm().clamp_min(1e-12)).item() for name in one)


RUNS = [f"{engine}-{world_size}" for world_size in (2, 4) for engine in ("ddp", *ZERO)]


@pytest.mark.parametrize("run", [*RUNS, *(f"{run}-again" for run in RUNS)])
def test_thirty_steps_are_the_same_under_every_engine(trained, run):
    for file in ("model", "ema"):
        assert distance(last(trained, "single-1", file), last(trained, run, file)) < 1e-5


@pytest.mark.parametrize("run", ["ddp-4", "zero1-2", "zero2-4", "zero3-2"])
def test_one_process_continues_what_any_engine_saved(trained, run):
    for file in ("model", "ema"):
        assert distance(last(trained, run, file), last(trained, f"single-1-from-{run}", file)) < 1e-5
    ends = [last(trained, name, "optimizer") for name in (run, f"single-1-from-{run}")]
    assert distance(*ends) < 1e-4


def test_a_world_size_that_divides_nothing_resumes_too(trained):
    assert (trained / "runs" / "ddp-3-again" / "FINISHED").exists()


def test_an_evaluation_does_not_depend_on_the_processes_by_a_bit(trained):
    results = {file.read_text() for file in trained.glob("evaluated-*.json")}
    assert len(list(trained.glob("evaluated-*.json"))) == 10
    assert len(results) == 1
