"""ZeRO in one process: its steps are those of plain training. And what learners do, with a stand-in for the engine."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lm_pcfg.distributed import learner, zero
from lm_pcfg.distributed.learner import Learner, Update
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


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_optimizer_is_that_of_the_settings(name):
    settings = OptimizerSection(name=name, learning_rate=0.25, betas=[0.5, 0.75], weight_decay=0.125)
    made = learner.make_optimizer(nn.Linear(2, 1), settings)
    assert type(made).__name__.lower() == name
    expected = {"lr": 0.25, "betas": (0.5, 0.75), "eps": 1e-8, "weight_decay": 0.125, "fused": False}
    assert {key: made.defaults[key] for key in expected} == expected


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weights_that_have_no_shape_between_steps_take_no_hook(monkeypatch, stage, world_size):
    clocks = []
    monkeypatch.setattr(learner, "ReductionClock", lambda parameters, engine: clocks.append(list(parameters)))
    monkeypatch.setattr(learner, "make_optimizer", lambda model, settings: None)
    engine = SimpleNamespace(
        accelerator=SimpleNamespace(prepare=lambda *both: both), world_size=world_size, is_deepspeed=stage > 0,
        zero_stage=stage, device=torch.device("cpu"),
    )  # fmt: skip
    model = nn.Linear(2, 1)
    assert not Learner(model, OptimizerSection(), engine).asynchronous
    assert [len(given) for given in clocks] == [0 if stage == 3 else 2]


def test_what_deepspeed_made_waits_no_longer_than_the_settings_say(monkeypatch):
    calls = []
    monkeypatch.setattr(Learner, "__init__", lambda *_: calls.append("made"))
    monkeypatch.setattr(ZeroLearner, "optimizer", SimpleNamespace(optimizer=None), raising=False)
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": 2}})
    engine = SimpleNamespace(
        accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)), zero_stage=2,
        on_all=lambda action: action(), limit_waiting=lambda: calls.append("limited"),
    )  # fmt: skip
    ZeroLearner(nn.Linear(2, 1), OptimizerSection(), engine)
    assert calls == ["made", "limited"]
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == 1  # it was configured before


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


# ---- ZeRO 3: a parameter is cut into equal parts, the last one padded ------------------------------------------------


@pytest.fixture
def second_of_two(monkeypatch) -> ZeroLearner:
    """A learner with one parameter of 5 numbers: 1 to 3 are the first process's, 4, 5 and a zero the second's."""
    made, own = ZeroLearner.__new__(ZeroLearner), SimpleNamespace(ds_tensor=torch.tensor([4.0, 5.0, 0.0]))
    made.parameters, made.shapes = {"w": own}, {"w": torch.Size([5, 1])}
    made.partitioned, made.engine = True, SimpleNamespace(device=torch.device("cpu"), world_size=2, rank=1)
    optimizer = SimpleNamespace(state={}, defaults={"fused": True})
    made.zero = SimpleNamespace(
        optimizer=optimizer, fp32_partitioned_groups_flat=[torch.zeros(2), torch.zeros(7)],
        grad_position={"id of w": (1, 2, 3)}, get_param_id=lambda parameter: "id of w",
    )  # fmt: skip

    def all_gather(parts, own):
        parts[0].copy_(own - 3)
        parts[1].copy_(own)

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    return made


def test_parts_of_weights(second_of_two):
    whole = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])
    assert second_of_two.local_parts({"w": whole})["w"].tolist() == [4, 5, 0]
    (local,) = second_of_two.local_weights().values()
    assert local.tolist() == [4, 5, 0]
    assert second_of_two.gathered({"w": torch.tensor([4.0, 5.0, 6.0])})["w"].tolist() == whole.tolist()
    second_of_two.partitioned = False  # ZeRO 1 and 2: every process has all weights
    assert second_of_two.local_parts({"w": whole})["w"] is second_of_two.gathered({"w": whole})["w"] is whole


@pytest.mark.parametrize("partitioned", [True, False])
def test_loaded_weights_go_into_both_copies(second_of_two, monkeypatch, partitioned):
    whole, calls = torch.arange(1.0, 6.0).view(5, 1), []

    @contextmanager
    def gathered(parameters, modifier_rank):
        calls.append(("gathered", len(parameters), modifier_rank))
        yield
        calls.append("dealt out")

    second_of_two.partitioned = partitioned
    monkeypatch.setattr(zero.deepspeed.zero, "GatheredParameters", gathered)
    monkeypatch.setattr(Learner, "_load_weights", lambda self, weights: calls.append("loaded"))
    for name in ("safe_set_local_fp32_param", "safe_set_full_fp32_param"):
        monkeypatch.setattr(zero, name, lambda _, part, name=name: calls.append((name, part.flatten().tolist())))
    second_of_two._load_weights({"w": whole})
    assert calls == (
        [("gathered", 1, 0), "loaded", "dealt out", ("safe_set_local_fp32_param", [4, 5, 0])]
        if partitioned
        else ["loaded", ("safe_set_full_fp32_param", [1, 2, 3, 4, 5])]
    )


def test_parts_of_moments(second_of_two, monkeypatch):
    monkeypatch.setattr(ZeroLearner, "_load_weights", lambda self, weights: None)
    assert second_of_two.optimizer_tensors() == {"step/w": torch.tensor(0.0)}  # before the first update
    moments = {"exp_avg/w": torch.arange(1.0, 6.0).view(5, 1), "exp_avg_sq/w": torch.ones(5, 1)}
    second_of_two.load({}, {"step/w": torch.tensor(7.0), **moments})
    first, second = (second_of_two.zero.optimizer.state[flat] for flat in second_of_two._flat_tensors())
    assert first["exp_avg"].tolist() == [0, 0]
    assert second["exp_avg"].tolist() == [0, 0, 4, 5, 0, 0, 0]
    assert second["exp_avg_sq"].tolist() == [0, 0, 1, 1, 0, 0, 0]
    second["exp_avg"][4] = 6.0  # of the padding: the stand-in for the first process takes 3 away from each
    found = second_of_two.optimizer_tensors()
    assert (found["step/w"].item(), found["step/w"].dtype) == (7.0, torch.float32)
    assert found["exp_avg/w"].tolist() == moments["exp_avg/w"].tolist()
    assert found["exp_avg_sq/w"].shape == (5, 1)


def test_steps_whose_loss_is_not_finite_enter_no_backward_pass(second_of_two):
    calls = []
    second_of_two.engine.sums = lambda values: [2 * value for value in values]
    second_of_two.model = SimpleNamespace(backward=lambda _: calls.append("back"), step=lambda: calls.append("step"))
    second_of_two.reduction = SimpleNamespace(backward_done=lambda: calls.append("reduced"))
    second_of_two.set_learning_rate = calls.append
    second_of_two.zero._global_grad_norm = 0.5
    update = second_of_two.update(torch.ones(()), torch.tensor(float("nan")), 1.0, 0.25)()
    assert (math.isnan(update.nll), math.isnan(update.gradient_norm), calls) == (True, True, [])
    update = second_of_two.update(torch.ones(()), torch.tensor(3.0), 1.0, 0.25)()
    assert update == Update(6.0, 2.0, 0.5)
    assert calls == ["back", "reduced", 0.25, "step"]


def test_from_a_million_weights_on_a_cpu_updates_them_in_one_pass():
    """Below, runs are repeated bit for bit: PyTorch's own passes round differently."""
    made = [learner.make_optimizer(nn.Linear(1 << 10, rows, bias=False), OptimizerSection()) for rows in (1023, 1024)]
    assert [optimizer.defaults["fused"] for optimizer in made] == [False, True]
