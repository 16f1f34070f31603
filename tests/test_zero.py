"""ZeRO in one process: its steps are those of plain training. And what learners do, with a stand-in for the engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lm_pcfg.distributed import learner
from lm_pcfg.distributed.learner import Learner
from lm_pcfg.distributed.zero import ZeroLearner
from lm_pcfg.settings import OptimizerSection
from lm_pcfg.storage.checkpoint import CheckpointError
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


# ---- learners with a stand-in for the engine ------------------------------------------------------------------------


def test_one_process_on_a_gpu_has_its_learning_rate_there(monkeypatch):
    """A CUDA graph reads it from memory."""
    given = []
    on_device = SimpleNamespace(tensor=lambda value, device: given.append(device) or torch.tensor(value))
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}, {"lr": 0.5}])
    monkeypatch.setattr(learner, "torch", on_device)
    monkeypatch.setattr(learner, "make_optimizer", lambda model, settings: optimizer)
    engine = SimpleNamespace(
        accelerator=SimpleNamespace(prepare=lambda *both: both), world_size=1, is_deepspeed=False, zero_stage=0,
        device=torch.device("cuda"),
    )  # fmt: skip
    made = Learner(nn.Linear(2, 1), OptimizerSection(), engine)
    rates = [group["lr"] for group in optimizer.param_groups]
    made.set_learning_rate(0.25)
    assert given == [engine.device] * 2
    assert [rate.item() for rate in rates] == [0.25, 0.25]
    assert all(group["capturable"] for group in optimizer.param_groups)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weights_that_have_no_shape_between_steps_take_no_hook(monkeypatch, stage):
    clocks = []
    monkeypatch.setattr(learner, "ReductionClock", lambda parameters, engine: clocks.append(list(parameters)))
    monkeypatch.setattr(learner, "make_optimizer", lambda model, settings: None)
    engine = SimpleNamespace(
        accelerator=SimpleNamespace(prepare=lambda *both: both), world_size=2, is_deepspeed=stage > 0,
        zero_stage=stage, device=torch.device("cpu"),
    )  # fmt: skip
    model = nn.Linear(2, 1)
    assert not Learner(model, OptimizerSection(), engine).asynchronous
    assert [len(given) for given in clocks] == [0 if stage == 3 else 2]


def test_what_deepspeed_made_waits_no_longer_than_the_settings_say(monkeypatch):
    calls = []
    monkeypatch.setattr(Learner, "__init__", lambda *_: calls.append("made"))
    monkeypatch.setattr(ZeroLearner, "optimizer", SimpleNamespace(optimizer=None), raising=False)
    plugin = SimpleNamespace(deepspeed_config={})
    engine = SimpleNamespace(
        accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)), zero_stage=2,
        on_all=lambda action: None, limit_waiting=lambda: calls.append("limited"),
    )  # fmt: skip
    ZeroLearner(nn.Linear(2, 1), OptimizerSection(), engine)
    assert calls == ["made", "limited"]


@pytest.fixture
def loading(monkeypatch) -> ZeroLearner:
    """A learner with one parameter [2, 3], whose part here is its last four numbers: 3 to 6 of a flat tensor of 8."""
    made = ZeroLearner.__new__(ZeroLearner)
    address = SimpleNamespace(
        lp_fragment_address=SimpleNamespace(start=2, numel=4), hp_fragment_address=SimpleNamespace(start=3, numel=4),
        param_group_index=0,
    )  # fmt: skip
    made.parameters, made.shapes = {"w": SimpleNamespace(_hp_mapping=address)}, {"w": torch.Size([2, 3])}
    made.partitioned, made.engine = False, SimpleNamespace(device=torch.device("cpu"))
    optimizer = SimpleNamespace(state={}, defaults={"fused": False})
    made.zero = SimpleNamespace(optimizer=optimizer, single_partition_of_fp32_groups=[torch.zeros(8)])
    monkeypatch.setattr(ZeroLearner, "_load_weights", lambda self, weights: None)
    return made


def optimizer_state(step=7.0, shape=(2, 3), **changes) -> dict:
    numbers = torch.arange(1.0, 7.0).view(shape)
    return {"step/w": torch.tensor(step), "exp_avg/w": numbers, "exp_avg_sq/w": 10 * numbers, **changes}


def test_moments_are_loaded_into_the_flat_tensors(loading):
    loading.load({}, optimizer_state())
    (state,) = loading.zero.optimizer.state.values()
    assert state["step"].item() == 7.0
    assert state["exp_avg"].tolist() == [0, 0, 0, 3, 4, 5, 6, 0]
    assert state["exp_avg_sq"].tolist() == [0, 0, 0, 30, 40, 50, 60, 0]


def test_before_the_first_update_there_is_nothing_to_load(loading):
    loading.load({}, {"step/w": torch.tensor(0.0)})
    assert not loading.zero.optimizer.state


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({}, "optimizer state step/w is missing"),
        ({"step/w": torch.tensor(7.0)}, "optimizer state exp_avg/w is missing"),
        (optimizer_state(0.0), "optimizer state exp_avg/w is missing in the checkpoint or belongs to no parameter"),
        (optimizer_state(**{"step/v": torch.tensor(7.0)}), "step/v is missing in the checkpoint or belongs to no"),
        (optimizer_state(**{"step/v": torch.tensor(6.0)}), "different numbers of updates"),
        (optimizer_state(shape=(3, 2)), "exp_avg/w has another shape than w"),
    ],
    ids=["nothing", "no-moments", "moments-of-no-update", "of-no-parameter", "different-steps", "shape"],
)
def test_an_optimizer_state_that_does_not_fit_is_refused(loading, optimizer, message):
    with pytest.raises(CheckpointError, match=message):
        loading.load({}, optimizer)
