"""A worker and its launcher: it tells it why it fails, and does not outlive it, however early that dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lm_pcfg import cli
from lm_pcfg.distributed import launcher
from processes import ROOT, TRAIN, environment, launch_command, wait_until
from texts import write_config

# ---- orphans --------------------------------------------------------------------------------------------------------

# The shell is the launcher: it is gone before the worker begins, which then belongs to this process: an init.
EARLY_ORPHAN = """
import ctypes, os, subprocess, sys
set_child_subreaper = 36
ctypes.CDLL(None).prctl(set_child_subreaper, 1)
worker = " ".join(sys.argv[1:])
subprocess.run(["sh", "-c", f"(sleep 0.5; ACCELERATE_MIXED_PRECISION=no exec {worker}) &"])
os.execvp("sleep", ["sleep", "60"])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="orphans are taken in by other processes on Linux")
def test_a_worker_whose_launcher_died_before_it_began_leaves(tmp_path):
    config = write_config(tmp_path, training={"epochs": 100_000})
    command = [sys.executable, "-c", EARLY_ORPHAN, sys.executable, TRAIN, "--config", str(config)]
    log = tmp_path / "log"
    with log.open("wb") as output:
        init = subprocess.Popen(command, env=environment(), stdout=output, stderr=output)
    try:
        wait_until(lambda: bool(log.read_text()), 30, what="the worker to speak")
    finally:
        init.kill()
        init.wait()
    assert log.read_text() == "lm_pcfg: the launcher of this process is gone, it leaves, too\n"
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def unknown_launcher(monkeypatch):
    """As when a process begins; the signal of its parent's death is not asked for in the tests' own process."""
    monkeypatch.setattr(launcher, "_started_by", None)
    monkeypatch.setattr(launcher.ctypes, "CDLL", lambda name: None)


def test_a_launcher_that_dies_in_between_is_noticed(monkeypatch, unknown_launcher):
    monkeypatch.setenv("LOCAL_RANK", "0")
    parents = iter([4_000_000, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    with pytest.raises(launcher.LauncherGone):
        launcher.follow()


@pytest.mark.parametrize("variables", [{"LOCAL_RANK": "0"}, {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}])
def test_a_parent_that_may_be_the_launcher_is_taken_for_it(monkeypatch, unknown_launcher, variables):
    """Any parent if LOCAL_RANK is all there is; else a Python, or a script that has the launcher's variables."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    script = subprocess.Popen(["sleep", "60"])
    try:
        for parent in [os.getpid(), script.pid, 0]:  # 0: outside of a container
            monkeypatch.setattr(launcher, "_started_by", None)
            monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
            launcher.follow()
            assert not launcher.is_gone()
    finally:
        script.kill()
        script.wait()


def test_a_parent_whose_program_is_still_being_loaded_is_not_judged(monkeypatch, unknown_launcher):
    """Right after it was started, its command line and its variables are empty (seen once in CI)."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"")
    monkeypatch.setattr(os, "getppid", lambda: 4_000_000)
    launcher.follow()
    monkeypatch.setattr(launcher, "_started_by", None)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(launcher.LauncherGone):
        launcher.follow()


# ---- the launcher's summary -----------------------------------------------------------------------------------------

FAILING = """
import os, sys
from lm_pcfg import cli
from lm_pcfg.errors import UserError
from lm_pcfg.training.steps import Steps
original = Steps.step
def step(self, batches):
    if self.position.step == 3 and self.engine.rank == 1:
        raise UserError("this GPU fell off the bus")
    return original(self, batches)
Steps.step = step
sys.argv.insert(1, "train")
cli.main()
"""


def summary(text: str) -> str:
    """What torchrun says of the first failure."""
    return text.rpartition("Root Cause (first observed failure):")[2]


@pytest.mark.long
def test_the_launchers_summary_shows_the_failing_ranks_one_line(tmp_path):
    program = tmp_path / "failing.py"
    program.write_text(FAILING)
    config = write_config(tmp_path, training={"epochs": 1000})
    command = [str(program) if word == TRAIN else word for word in launch_command(2, "--config", str(config))]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert result.returncode != 0
    line = "rank 1: this GPU fell off the bus"
    assert f"traceback : {line}\n" in summary(result.stderr), result.stderr[-3000:]
    assert "rank      : 1 (local_rank: 1)" in summary(result.stderr)


def told(file: Path) -> str:
    """As torchrun reads it."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    return ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file)).message["message"]


def test_wrong_settings_are_in_the_summary(tmp_path):
    """They are found before anything heavy is imported."""
    variables = environment(TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"), LOCAL_RANK="0")
    command = [sys.executable, TRAIN, "--config", str(ROOT / "configs" / "tiny.yaml"), "sede=1"]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "lm_pcfg: error: " + told(tmp_path / "error.json") == result.stderr.strip()
    assert "did you mean 'seed'" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


def test_a_bug_is_in_the_summary_in_one_line(tmp_path, monkeypatch):
    def bug(**options: object) -> None:
        raise IndexError("of\nmine")

    monkeypatch.setattr(cli, "app", bug)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(IndexError):
        cli.main()
    assert told(tmp_path / "error.json") == "IndexError: of mine"
