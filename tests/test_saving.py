"""Checkpoints written beside the training: it does not wait, one at a time, failures end the run."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint, durable, saving
from lm_pcfg.storage.metrics_file import check_metrics
from lm_pcfg.training import loop
from lm_pcfg.training.position import Position
from processes import launch_command, launched
from texts import write_config

EVERY_STEP = {"checkpoint": {"every_steps": 1, "keep_last": 99}, "training": {"epochs": 9, "max_steps": 12}}


def run(folder: Path, *overrides: str, **changes) -> Path:
    return loop.train(load_settings(write_config(folder, **changes), list(overrides)))


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The write of step 4 waits for step 7, so steps 5, 6 and 7 cannot have waited for it."""
    reached, original_save, original_step = threading.Event(), checkpoint.save, loop.Steps.step

    def slow_save(folder, step, **content):
        assert step != 4 or reached.wait(60)
        return original_save(folder, step, **content)

    def step(self, batches):
        applied = original_step(self, batches)
        if self.position.step == 7:
            reached.set()
        return applied

    monkeypatch.setattr(checkpoint, "save", slow_save)
    monkeypatch.setattr(loop.Steps, "step", step)
    folder = run(tmp_path, "checkpoint.every_steps=4")
    assert [path.name for path in checkpoint.list_checkpoints(folder)] == ["step-00000012", "step-00000016"]
    checkpoint.verify(checkpoint.latest(folder))


def test_one_write_at_a_time_and_each_of_its_own_step(tmp_path, monkeypatch):
    writing, most, original = [], [], checkpoint.save

    def save(folder, step, **content):
        writing.append(step)
        most.append(len(writing))
        threading.Event().wait(0.05)  # longer than a step
        saved = original(folder, step, **content)
        writing.remove(step)
        return saved

    monkeypatch.setattr(checkpoint, "save", save)
    folder = run(tmp_path, **EVERY_STEP)
    assert max(most) == 1
    saved = [checkpoint.load(path, with_optimizer=True) for path in checkpoint.list_checkpoints(folder)]
    assert [loaded.state["step"] for loaded in saved] == list(range(1, 13))
    for before, after in itertools.pairwise(saved):  # what was copied is the step's, not a later one's
        assert not torch.equal(before.model["symbols"], after.model["symbols"])
        assert after.optimizer["step/symbols"] == before.optimizer["step/symbols"] + 1


def test_metrics_are_durable_before_a_checkpoint_counts_them(tmp_path, monkeypatch):
    synced, original_fsync, original_save = [], durable.fsync, checkpoint.save

    def fsync(path):
        synced.append((Path(path).name, threading.current_thread().name))
        original_fsync(path)

    def save(folder, step, **content):
        assert synced[:2] == [("metrics.jsonl", "checkpoint"), ("small", "checkpoint")]  # beside the training
        synced.clear()
        assert check_metrics(folder / "metrics.jsonl", content["state"]["metrics"])[1] == []
        counts.append(content["state"]["metrics"]["lines"])
        saved = original_save(folder, step, **content)
        synced.clear()
        return saved

    counts: list[int] = []
    monkeypatch.setattr(durable, "fsync", fsync)
    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(loop.Trainer, "_begin", lambda self: synced.clear())
    monkeypatch.setattr(saving.run_folder, "remember_checkpoint", lambda folder, saved: None)
    monkeypatch.setattr(checkpoint, "point_best", lambda folder, saved: None)
    folder = run(tmp_path, "training.max_steps=8", "checkpoint.every_steps=4", "data.valid=null")
    assert counts == [1, 3]
    assert checkpoint.verify(checkpoint.latest(folder))["metrics"]["lines"] == 3


def test_a_failed_write_ends_the_run_at_the_next_step(tmp_path, monkeypatch):
    steps, original = [], checkpoint.save
    written = threading.Event()

    def save(folder, step, **content):
        if step < 3:
            return original(folder, step, **content)
        written.set()
        raise checkpoint.CheckpointError(f"cannot write checkpoint {step}: {os.strerror(errno.EROFS)}")

    original_step = loop.Steps.step

    def step(self, batches):
        if self.position.step >= 3:
            written.wait(60)
        steps.append(self.position.step)
        return original_step(self, batches)

    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(loop.Steps, "step", step)
    with pytest.raises(checkpoint.CheckpointError, match="cannot write checkpoint 3: Read-only file system"):
        run(tmp_path, **EVERY_STEP)
    assert steps[-1] <= 4
    assert checkpoint.latest(tmp_path / "runs" / "small").name == "step-00000002"


def test_a_write_that_fails_at_the_very_end_is_told(tmp_path, monkeypatch):
    def save(folder, step, **content):
        raise checkpoint.CheckpointError("cannot write the last one")

    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(checkpoint.CheckpointError, match="the last one"):
        run(tmp_path, "training.max_steps=3", "data.valid=null")
    assert not (tmp_path / "runs" / "small" / "FINISHED").exists()


def test_the_last_and_the_best_are_kept(tmp_path, monkeypatch):
    values = iter([5.0, 2.0, 4.0, 1.0, 3.0, 6.0, 7.0, 8.0])
    original = Position.take_evaluation
    monkeypatch.setattr(Position, "take_evaluation", lambda self, *_: original(self, next(values), 0))
    folder = run(
        tmp_path, "evaluation.every_steps=2", "evaluation.every_epochs=null", "evaluation.patience=null",
        "checkpoint.keep_best=3", "checkpoint.keep_last=2",
    )  # fmt: skip
    kept = [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(folder)]
    assert kept == [4, 8, 10, 14, 16]  # values 2, 1, 3 and the last two
    assert (folder / "best").resolve().name == "step-00000008"
    assert (folder / "last_checkpoint").read_text() == "step-00000016\n"


def test_a_copy_does_not_follow_its_tensor():
    tensor = torch.zeros(3, 4).T  # not contiguous
    (copy,) = saving._copied({"name": tensor}).values()
    tensor.fill_(1)
    assert copy.shape == (4, 3)
    assert not copy.any()


@pytest.mark.parametrize(
    ("changes", "model", "message"),
    [
        ({"window": None}, (2, 3), r"{folder}/state.json does not say where the training stood: no 'window' in it"),
        ({"data": None}, (2, 3), r"{folder}/state.json does not say where the training stood: no 'data' in it"),
        ({"vocabulary_hash": "other"}, (2, 3), "{folder} was trained with another vocabulary than this run has"),
        ({}, (2, 4), "{folder} does not fit the settings of `model`: bias is [3] there, but [4] here; continue with "),
        ({}, (9, 3), "{folder} does not fit the settings of `model`: weight is [3, 2] there, but [3, 9] here; "),
        ({}, None, "{folder} does not fit the settings of `model`: bias is [3] there, but unknown here; continue with"),
        ({}, (2, 3), None),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, changes, model, message):
    data = {"epoch": 0, "batch": 0, "batches": 1, "plan": ""}
    state = {"window": {}, "data": data, "vocabulary_hash": "own", **changes}
    state = {key: value for key, value in state.items() if value is not None}
    there = torch.nn.Linear(2, 3).state_dict()
    folder = checkpoint.save(tmp_path, 1, model=there, optimizer={"step/w": torch.ones(())}, ema=None, state=state)
    here = torch.nn.Linear(*model) if model else torch.nn.Module()
    if message is None:
        loaded = saving.load_fitting(folder, here, "own", torch.device("cpu"))
        assert (loaded.state["data"], loaded.optimizer["step/w"]) == (data, 1.0)
        return
    with pytest.raises(loop.UserError) as caught:
        saving.load_fitting(folder, here, "own", torch.device("cpu"))
    assert str(caught.value).startswith(message.format(folder=folder))


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "ema.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, capsys, file, damage):
    options = {"ema": {"decay": 0.9}, "evaluation": {"every_epochs": 0.5}}
    folder = run(tmp_path, **options)
    newest, before = checkpoint.latest(folder), checkpoint.list_checkpoints(folder)[-2]
    whole = {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}
    victim = newest / file
    content = bytearray(victim.read_bytes())
    content[len(content) // 3] ^= 4
    if damage == "flip":
        victim.write_bytes(content)
    elif damage == "truncate":
        os.truncate(victim, len(content) // 2)
    else:
        victim.unlink()
    capsys.readouterr()
    assert run(tmp_path, "resume=auto", **options) == folder
    said = capsys.readouterr().err
    assert f"warning: damaged checkpoint passed over: {victim}" in said
    assert f"continued from step {checkpoint.step_of(before)}" in said
    checkpoint.verify(newest)  # written anew, with the same bits
    assert {path.name: path.read_bytes() for path in newest.glob("*.safetensors")} == whole


def test_a_damaged_checkpoint_takes_no_whole_ones_place(tmp_path):
    """Resumed before it, the run ends or is stopped at an earlier step than the damaged one's."""
    folder = run(tmp_path, "training.max_steps=6", "checkpoint.every_steps=3", "data.valid=null")
    os.truncate(checkpoint.latest(folder) / "model.safetensors", 100)
    other = run(tmp_path, "training.max_steps=4", "data.valid=null", f"resume={folder}", "name=other")
    assert (other / "started_from").read_text().endswith("small/checkpoints/step-00000003\n")
    run(tmp_path, "training.max_steps=5", "data.valid=null", "resume=auto", "checkpoint.keep_last=1")
    assert [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(folder)] == [5, 6]
    run(tmp_path, "training.max_steps=7", "data.valid=null", f"resume={folder}", "checkpoint.keep_last=1")
    assert [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(folder)] == [7]


# ---- file systems ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder, mount = tmp_path / "disk", shutil.which("mount")
    folder.mkdir()
    options = [mount, "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if mount is None or subprocess.run(options, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.long
def test_a_full_disk_ends_a_run_of_two_processes_with_one_line(tmp_path, small_disk):
    config = write_config(tmp_path, runs_folder=str(small_disk / "runs"), **EVERY_STEP)
    log = tmp_path / "log"
    with launched(launch_command(2, "--config", str(config), "training.max_steps=400"), log) as launcher:
        assert launcher.wait(timeout=120) == 1
    errors = [line for line in log.read_text().splitlines() if "lm_pcfg: error" in line]
    assert len(errors) == 1, log.read_text()
    assert "rank 0: cannot write checkpoint" in errors[0]
    assert "No space left on device" in errors[0]
    folder = small_disk / "runs" / "small"
    saved = checkpoint.list_checkpoints(folder)
    assert len(saved) >= 2
    for path in saved:
        checkpoint.verify(path)
    assert not list((folder / "checkpoints").glob(".*"))
    assert not (folder / "FINISHED").exists()
    for path in saved[:-1]:  # somebody makes room; the same command goes on
        shutil.rmtree(path)
    resumed = ["resume=auto", "checkpoint.every_steps=null", "training.max_steps=30"]
    again = loop.train(load_settings(config, resumed))
    assert (again / "FINISHED").exists()


def test_a_read_only_file_system(tmp_path, small_disk, capsys):
    folder = run(tmp_path, "training.max_steps=2", runs_folder=str(small_disk / "runs"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for overrides in (["resume=auto", "training.max_steps=4"], ["name=new"]):
        with pytest.raises(loop.UserError, match=r"cannot write to .*: Read-only file system; set runs_folder"):
            run(tmp_path, *overrides, runs_folder=str(small_disk / "runs"))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
