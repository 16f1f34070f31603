"""A training that fails before it has written anything leaves the disk as it was, and nobody else's files are lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import processes
from lm_pcfg.errors import UserError
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import durable, run_folder
from lm_pcfg.storage.run_folder import RunFolder
from lm_pcfg.training import loop, steps
from texts import write_config

NOTHING_THERE = "data.train=missing.txt"


def files_of(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def train(folder: Path, *overrides: str) -> Path:
    config = write_config(folder, training={"max_steps": 2}, data={"valid": None})
    return loop.train(load_settings(config, list(overrides)))


@pytest.mark.parametrize("resume", ["false", "auto"])
@pytest.mark.parametrize("runs", [[], ["runs"], ["runs", "runs/small"]], ids=str)
def test_nothing_is_left(tmp_path, monkeypatch, resume, runs):
    write_config(tmp_path, training={"max_steps": 2}, data={"valid": None})
    for folder in runs:
        (tmp_path / folder).mkdir()
    before = files_of(tmp_path)
    with pytest.raises(UserError, match="no such file"):
        train(tmp_path, NOTHING_THERE, f"resume={resume}")
    monkeypatch.setattr(steps, "memory_of", lambda: 5_000.0)  # the model takes 2,368, a batch 64,800
    with pytest.raises(UserError, match="GiB of memory"):
        train(tmp_path, f"resume={resume}")
    left = files_of(tmp_path).keys() - before.keys()
    assert left == ({tmp_path / "runs/small/.lock"} if "runs/small" in runs else set())  # it was not made here
    assert files_of(tmp_path).items() >= before.items()


@pytest.mark.long
def test_nothing_is_left_by_several_processes(tmp_path):
    config = str(write_config(tmp_path))
    before = files_of(tmp_path)
    with pytest.raises(AssertionError, match="no such file"):
        processes.run_ranks(2, ["-m", "lm_pcfg", "train", "--config", config, NOTHING_THERE])
    assert files_of(tmp_path) == before


def test_a_run_and_the_logs_of_a_job_stay(tmp_path):
    logs = tmp_path / "runs" / "job" / "logs"
    logs.mkdir(parents=True)
    (logs / "node-0.log").write_text("started")
    train(tmp_path)
    before = files_of(tmp_path)
    for name in ("small", "job", "new"):
        for resume in ("auto", "false"):
            with pytest.raises(UserError, match="no such file"):
                train(tmp_path, NOTHING_THERE, f"name={name}", f"resume={resume}")
    assert files_of(tmp_path) == before | {logs.parent / ".lock": (logs.parent / ".lock").read_bytes()}


def test_what_another_process_wrote_there_meanwhile_stays(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "new", "")
    assert folder.claim()
    (folder.path / "logs").mkdir()
    folder.release()
    assert sorted(os.listdir(folder.path)) == [".lock", "logs"]
    beside = RunFolder(tmp_path / "others" / "new", "")
    assert beside.claim()
    (tmp_path / "others" / "other").mkdir()
    beside.release()
    assert os.listdir(tmp_path / "others") == ["other"]


def test_without_locks_nothing_is_removed(tmp_path, monkeypatch):
    """Another training may have claimed the folder, too."""
    monkeypatch.setattr(run_folder, "_lock", lambda file: False)
    folder = RunFolder(tmp_path / "new", "")
    assert folder.claim()
    folder.release()
    assert os.listdir(folder.path) == [".lock"]


def test_a_lock_that_its_owner_removes_is_not_the_lock_of_the_next(tmp_path, monkeypatch):
    """The second opens the file just before the first removes it, and locks a file without a name just after."""
    first, second, original = (*(RunFolder(tmp_path / "new", name) for name in ("first", "second")), run_folder._lock)
    assert first.claim()

    def lock(file):
        first.release()
        return original(file)

    monkeypatch.setattr(run_folder, "_lock", lock)
    assert second.claim()
    assert run_folder._launched_by(second.path) == "second"
    with pytest.raises(UserError, match="in use"):
        RunFolder(second.path, "").claim()
    second.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("times", [1, 10**9])
def test_a_folder_that_its_owner_removes_is_made_again(tmp_path, monkeypatch, times):
    """... and a folder that is gone each time is an error, not an endless attempt."""
    original, removed = durable.make_folder, []

    def make_folder(folder):
        made = original(folder)
        if len(removed) < times:
            folder.rmdir()
            removed.append(folder)
        return made

    monkeypatch.setattr(durable, "make_folder", make_folder)
    folder = RunFolder(tmp_path / "new", "")
    if times == 1:
        assert folder.claim()
    else:
        with pytest.raises(UserError, match=r"cannot write to .*new: No such file or directory; set runs_folder="):
            folder.claim()
        assert 1 < len(removed) <= 1000
    folder.release()
    assert os.listdir(tmp_path) == []
