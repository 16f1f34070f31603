"""Updates that are not finite: left out, counted and told, read at once or late; too many of them stop a run."""

from __future__ import annotations

import math
import time

import pytest
import torch
from safetensors.torch import load_file

from lm_pcfg.distributed.engine import Engine
from lm_pcfg.distributed.learner import Learner, Update
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.metrics_file import read_metrics
from lm_pcfg.training import loop, steps
from lm_pcfg.training.position import Position
from texts import write_config
from training_runs import EVERYTHING_ON, break_steps, metrics_without_times, run


def read_late(monkeypatch, late: bool) -> None:
    """True: as one process on a GPU. Adam's kernel leaves an update out, and the host learns of it a step later."""
    original, adam = steps.make_learner, torch.optim.Adam

    def make_learner(*arguments):
        made = original(*arguments)
        made.asynchronous = late
        return made

    monkeypatch.setattr(steps, "make_learner", make_learner)
    monkeypatch.setattr(torch.optim, "Adam", lambda *a, **options: adam(*a, **(options | {"fused": True})))


@pytest.fixture(params=["at once", "late"])
def reading(request, monkeypatch) -> None:
    read_late(monkeypatch, request.param == "late")


def test_reading_late_changes_nothing_but_when_it_is_known(tmp_path, monkeypatch):
    lines, weights = [], []
    for late in (False, True):
        with monkeypatch.context() as patch:
            read_late(patch, late)
            break_steps(patch, lambda call: call in (2, 5, 16))
            options = EVERYTHING_ON | {"optimizer": {}, "batch": {"sentences": 4}}
            folder = run(tmp_path, f"name=late-{late}", **options)
        lines.append(metrics_without_times(folder))
        weights.append([load_file(checkpoint.latest(folder) / f"{file}.safetensors") for file in ("model", "ema")])
    assert lines[0] == lines[1]
    assert any(line.get("train/skipped") == 3 for line in lines[0])
    for one, other in zip(*weights, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_time_of_an_update_read_late_is_counted(tmp_path, monkeypatch):
    read_late(monkeypatch, True)
    original = Learner.reader

    def slow_device(*arguments):
        read = original(*arguments)
        return lambda: time.sleep(0.05) or read()

    monkeypatch.setattr(Learner, "reader", staticmethod(slow_device))
    folder = run(tmp_path, "training.max_steps=3", "training.log_every=1", "data.valid=null")
    for line in read_metrics(folder / "metrics.jsonl"):
        assert line["time/compute"] >= 0.05
        assert line["train/seconds"] >= 0.05


def test_a_non_finite_update_is_skipped_counted_and_reported(tmp_path, monkeypatch, capsys, reading):
    break_steps(monkeypatch, lambda call: call in (2, 5))
    folder = run(tmp_path)
    assert (folder / "FINISHED").exists()
    model = load_file(checkpoint.latest(folder) / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in model.values())
    last = [line for line in read_metrics(folder / "metrics.jsonl") if "train/skipped" in line][-1]
    assert last["train/skipped"] == 2
    told = capsys.readouterr().err
    assert told.count("is not finite, update skipped") == 2
    assert "step 3: " in told
    assert "step 6: " in told


def test_an_infinite_loss_with_finite_gradients_is_no_update(tmp_path, monkeypatch, reading):
    break_steps(monkeypatch, lambda call: call == 1, lambda log_z: log_z - math.inf)
    settings = load_settings(write_config(tmp_path))
    made = steps.Steps(settings, Engine(settings))
    weights = []
    for _ in range(3):
        made.step(made.stream.next_step())
        made.finish_update()
        weights.append({name: tensor.clone() for name, tensor in made.learner.local_weights().items()})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[1][name], weights[2][name]) for name in weights[0])
    assert (made.position.skipped, made.position.skipped_in_a_row) == (1, 0)
    assert math.isfinite(made.position.window.nll)
    assert (made.skipped_step, made.trouble) == (2, "the loss")
    assert made.weights_told() == "all weights are finite"
    name, weight = next(iter(made.learner.local_weights().items()))
    weight.view(-1)[0] = math.nan
    assert made.weights_told() == f"weights that are not finite: {name}"


def test_what_was_not_finite_is_told():
    assert Update(1.0, 0.0, math.inf).trouble == "the gradient"
    assert Update(math.nan, 0.0, math.nan).trouble == "the loss"


def test_too_many_in_a_row_stop_the_run_and_leave_the_last_good_checkpoint(tmp_path, monkeypatch, reading):
    break_steps(monkeypatch, lambda call: call >= 10)
    monkeypatch.setattr(loop, "MOST_SKIPPED_IN_A_ROW", 3)
    with pytest.raises(loop.TrainingStopped, match=r"3 updates in a row .*all weights are finite.*step-00000008"):
        run(tmp_path, "training.epochs=4")
    folder = tmp_path / "runs" / "small"
    assert not (folder / "FINISHED").exists()
    state = checkpoint.verify(checkpoint.latest(folder))
    assert state["step"] == 8
    assert state["skipped"] == 0


def test_checkpoints_are_not_replaced_while_updates_are_skipped(tmp_path, monkeypatch, reading):
    break_steps(monkeypatch, lambda call: call >= 10)
    monkeypatch.setattr(loop, "MOST_SKIPPED_IN_A_ROW", 5)
    with pytest.raises(loop.TrainingStopped):
        run(tmp_path, "checkpoint.every_steps=1", "training.epochs=4")
    names = [path.name for path in checkpoint.list_checkpoints(tmp_path / "runs" / "small")]
    assert names[-2:] == ["step-00000009", "step-00000010"]


@pytest.mark.parametrize(
    ("networks", "way_out"),
    [
        ("paper", ", a longer warm-up or model.parameterization=bounded from the start"),
        ("bounded", " or a longer warm-up"),
    ],
)
def test_a_run_that_diverges_at_once_says_so_and_what_to_try(networks, way_out, tmp_path):
    with pytest.raises(loop.TrainingStopped, match=r"updates in a row were not finite \(the last one: the ") as stopped:
        run(
            tmp_path, f"model.parameterization={networks}", "model.init=xavier_normal", "optimizer.learning_rate=1e15",
            "training.epochs=9",
        )  # fmt: skip
    assert str(stopped.value).endswith(f"try a lower learning rate{way_out}")


def test_the_best_is_saved_even_if_an_update_was_skipped_just_before(tmp_path, monkeypatch):
    values = iter([5.0, 1.0, 4.0])
    original = loop.Steps.step

    def step(self, batches):
        applied = original(self, batches)
        if self.position.step == 8:
            self.position.skipped_in_a_row = 1
        elif self.position.step == 9:
            self.position.skipped_in_a_row = 0
        return applied

    def ranked(self, nll, impossible, s_f1=None, types=None):
        return take(self, next(values), impossible)

    take = Position.take_evaluation
    monkeypatch.setattr(loop.Steps, "step", step)
    monkeypatch.setattr(Position, "take_evaluation", ranked)
    folder = run(tmp_path, "training.max_steps=12", "evaluation.every_steps=4", "evaluation.every_epochs=null")
    assert (folder / "checkpoints" / "step-00000008").is_dir()
    assert (folder / "best").resolve().name == "step-00000008"
