"""What a power cut may not take: a file gets its name only after its content has been fsynced."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lm_pcfg.corpus.preparation.shards import write_ids
from lm_pcfg.storage import checkpoint, durable, metrics_file
from lm_pcfg.storage.state_file import state_bytes

DEAD_PID = 2**22 + 1  # above the largest pid Linux hands out


def state_of(status: os.stat_result) -> tuple[int, ...]:
    """Which file it is, and what it holds: a later write changes the time. Of a folder, only which."""
    content = () if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)
    return status.st_dev, status.st_ino, *content


@dataclass
class Disk:
    """Notes what has been fsynced, and what was renamed before its content was."""

    synced: set[tuple[int, ...]] = field(default_factory=set)
    named_too_early: list[str] = field(default_factory=list)

    def fsync(self, original: Callable, file: Any) -> None:
        self.synced.add(state_of(os.fstat(file if isinstance(file, int) else file.fileno())))
        original(file)

    def rename(self, original: Callable, source: Any, target: Any, **options: Any) -> None:
        files = [path for path in [Path(source), *Path(source).rglob("*")] if path.is_file() and not path.is_symlink()]
        self.named_too_early += [path.name for path in files if not self.has(path)]
        original(source, target, **options)
        self.synced.discard(state_of(Path(target).parent.stat()))  # it has a name more

    def has(self, path: Path) -> bool:
        return state_of(path.stat()) in self.synced


@pytest.fixture
def disk(monkeypatch) -> Disk:
    disk = Disk()
    for method, names in ((disk.fsync, ("fsync", "fdatasync")), (disk.rename, ("replace", "rename"))):
        for name in names:
            original = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *a, m=method, o=original, **options: m(o, *a, **options))
    return disk


def save(run: Path, step: int, value: float = 0.0) -> Path:
    tensors = {"weights": torch.full((3,), value)}
    return checkpoint.save(run, step, model=tensors, optimizer=tensors, ema=tensors, state={"value": value})


def test_the_disk_of_these_tests_notices(tmp_path, disk):
    (tmp_path / "old").write_text("one")
    os.replace(tmp_path / "old", tmp_path / "new")
    assert disk.named_too_early == ["old"]
    with (tmp_path / "new").open("a") as file:
        os.fsync(file)
        assert disk.has(tmp_path / "new")
        file.write("more")
    assert not disk.has(tmp_path / "new")


@pytest.mark.parametrize("swap", [True, False], ids=["exchange", "two-renames"])
def test_every_file_of_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path, disk, monkeypatch, swap):
    if not swap:
        monkeypatch.setattr(durable, "_exchange", lambda one, other: False)
    for value in (1.0, 2.0):  # the second replaces the first
        folder = save(tmp_path, 7, value)
        assert disk.named_too_early == []
        files = sorted(folder.iterdir())
        assert len(files) == 4
        assert [path.name for path in files if not disk.has(path)] == []
        assert disk.has(folder.parent)  # the name itself


def test_the_link_to_the_best_is_on_disk(tmp_path, disk):
    """A power cut after `prune` would leave a link to a checkpoint that is gone."""
    for step in (1, 2):  # the second link replaces the first
        saved = save(tmp_path, step)
        checkpoint.point_best(tmp_path, saved)
        assert disk.has(tmp_path)
        assert disk.named_too_early == []


def test_a_pruned_checkpoint_stays_away(tmp_path, disk):
    """A power cut brought it back into a run that had ended, where nobody would prune it again."""
    for step in (1, 2):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, keep_last=1)
    assert disk.has(tmp_path / "checkpoints")


def test_metrics_that_are_set_aside_are_on_disk_before_new_ones_take_their_name(tmp_path, disk):
    metrics = metrics_file.MetricsFile(tmp_path / "metrics.jsonl", pytest.fail)
    for number in (1, 2):
        metrics.append(1, {"train/loss": 1.0})
        metrics.sync()
        assert metrics.set_aside() == tmp_path / f"metrics-{number}.jsonl"
        assert disk.has(tmp_path)
        assert disk.has(tmp_path / f"metrics-{number}.jsonl")
        assert disk.named_too_early == []


def test_a_prepared_shard_is_on_disk_before_it_has_its_name(tmp_path, disk):
    path = tmp_path / "shard-00000-00000.parquet"
    write_ids(path, np.array([2, 1]), np.array([5, 6, 7], dtype=np.int32))
    assert disk.named_too_early == []
    assert disk.has(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_replaced_folder_of_a_dead_process_does_not_return_beside_its_successor(tmp_path):
    old, new = save(tmp_path, 4, 1.0), save(tmp_path, 5, 2.0)
    set_aside = new.with_name(f".replaced-{new.name}.{durable._host()}.{DEAD_PID}")
    shutil.copytree(old, set_aside)
    durable.remove_leftovers(new.parent)
    assert sorted(path.name for path in new.parent.iterdir()) == [old.name, new.name]
    assert checkpoint.verify(new)["value"] == 2.0


def test_whole_files_that_hold_no_tensors_are_named(tmp_path):
    """Their hashes are right, so only opening them can tell."""
    folder = save(tmp_path, 1)
    (folder / checkpoint.MODEL).write_bytes(b"no tensors")
    state = json.loads((folder / checkpoint.STATE).read_bytes())
    state["files"][checkpoint.MODEL] = {"sha256": hashlib.sha256(b"no tensors").hexdigest(), "size": 10}
    (folder / checkpoint.STATE).write_bytes(state_bytes(state))
    checkpoint.verify(folder)
    with pytest.raises(checkpoint.CheckpointError, match=rf"{folder.name}/{checkpoint.MODEL} cannot be read: "):
        checkpoint.load(folder, with_optimizer=False)


def test_what_is_deleted_is_gone(tmp_path):
    folder = save(tmp_path, 1)
    durable.delete(folder)
    assert list(folder.parent.iterdir()) == []


def test_a_folder_that_resists_deletion_costs_space_only(tmp_path, monkeypatch):
    """... and is tried again: nothing fails for it."""
    folder, later = save(tmp_path, 1), save(tmp_path, 2)
    (tmp_path / "checkpoints" / f".writing-step-9.{durable._host()}.{DEAD_PID}").mkdir()

    def resist(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(shutil, "rmtree", resist)
    durable.remove_leftovers(folder.parent)
    durable.delete(folder)
    assert checkpoint.list_checkpoints(tmp_path) == [later]
    monkeypatch.setattr(durable, "_exchange", lambda one, other: False)
    assert save(tmp_path, 2) == later


def test_a_file_that_cannot_be_begun_says_why(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(durable, "open", refuse, raising=False)
    with pytest.raises(PermissionError):
        durable.replace_file(tmp_path / "file", b"")


def test_what_another_host_wrote_is_abandoned_after_an_hour(tmp_path, monkeypatch):
    names = [f".writing-step-{number}.elsewhere.1" for number in (1, 2)]
    for name, age in zip(names, (3599.5, 3600.5), strict=True):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (10**9 - age,) * 2)
    monkeypatch.setattr(durable.time, "time", lambda: 1e9)
    durable.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == names[:1]


@pytest.mark.parametrize("error", [PermissionError, ProcessLookupError, None])
def test_a_process_that_may_not_be_asked_lives(tmp_path, monkeypatch, error):
    def kill(pid, number):
        assert (pid, number) == (7, 0)
        if error:
            raise error

    monkeypatch.setattr(os, "kill", kill)
    (tmp_path / f".writing-x.{durable._host()}.7").mkdir()
    durable.remove_leftovers(tmp_path)
    assert len(list(tmp_path.iterdir())) == (error is not ProcessLookupError)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_file_systems_that_cannot_sync_a_folder(tmp_path, monkeypatch, number):
    (tmp_path / "file").touch()

    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=os.strerror(number)):
        durable.fsync(tmp_path / "file")
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            durable.fsync(tmp_path)
    else:
        durable.fsync(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_folder_that_one_may_not_list_is_not_synced(tmp_path, monkeypatch):
    (tmp_path / "file").touch()

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        durable.fsync(tmp_path)
        with pytest.raises(PermissionError):
            durable.fsync(tmp_path / "file")


@pytest.mark.parametrize("code", [0, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EIO])
def test_names_are_swapped_if_the_system_can(tmp_path, monkeypatch, code):
    calls = []
    library = SimpleNamespace(renameat2=lambda *given: calls.append(given) or -bool(code))
    monkeypatch.setattr(durable.ctypes, "CDLL", lambda name, use_errno: library if use_errno else None)
    monkeypatch.setattr(durable.ctypes, "get_errno", lambda: code)
    if code == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            durable._exchange(tmp_path / "one", tmp_path / "other")
    else:
        assert durable._exchange(tmp_path / "one", tmp_path / "other") == (code == 0)
    assert calls == [(-100, bytes(tmp_path / "one"), -100, bytes(tmp_path / "other"), 2)]
    del library.renameat2
    assert not durable._exchange(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (ValueError("while serializing: I/O error: No space left on device (os error 28)"), "No space left on device"),
        (ValueError("two\n  lines"), "two lines"),
        (ValueError(), "ValueError"),
        (OSError("without a number"), "without a number"),
    ],
)  # fmt: skip
def test_reasons_are_one_line(error, expected):
    assert durable.reason(error) == expected


def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path):
    def fail(*_):
        raise TimeoutError("it waits")

    os.mkfifo(tmp_path / "pipe")
    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, 5.0)
    try:
        for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
            with pytest.raises(OSError, match="not a regular file"):
                durable.open_regular(path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_file_of_just_so_many_bytes_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert durable.read_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="5 bytes are too many"):
        durable.read_file(tmp_path / "file", 4)


def test_no_file_stays_open(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "file").write_bytes(b"x")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="not a regular file"):
        durable.open_regular(tmp_path)
    durable.fsync(tmp_path / "file")
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        durable.fsync(tmp_path / "file")
    monkeypatch.setattr(os, "pread", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        metrics_file._open_after_last_whole_line(tmp_path / "file")
    assert len(os.listdir("/proc/self/fd")) == before
