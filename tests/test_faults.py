"""Dead, frozen and failing processes; signals to workers and launchers. Real launchers, real processes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaos import Chaos, assert_same
from lm_pcfg.storage import checkpoint
from processes import TRAIN, alive, environment, free_port, launch_command, launched, wait_until, workers
from texts import write_config

pytestmark = pytest.mark.long
ENDLESS = {
    "training": {"epochs": 100_000},
    "evaluation": {"every_epochs": None, "every_steps": 50, "patience": None},
    "checkpoint": {"every_steps": 5},
}


def saved(folder: Path) -> list[Path]:
    return checkpoint.list_checkpoints(folder / "runs" / "small")


def run_until_saved(launcher: subprocess.Popen, folder: Path, processes: int) -> list[int]:
    """Wait until the run trains and has two checkpoints; its workers."""
    wait_until(lambda: len(saved(folder)) >= 2 or launcher.poll() is not None, 120, what="two checkpoints")
    assert launcher.poll() is None, (folder / "log").read_text()[-3000:]
    found = workers(launcher.pid)
    assert len(found) == processes
    return found


def all_gone(pids: list[int]) -> bool:
    return not any(map(alive, pids))


# ---- processes that die ---------------------------------------------------------------------------------------------


def test_a_killed_rank_ends_the_job_at_once(tmp_path):
    config = write_config(tmp_path, engine={"timeout_seconds": 60}, **ENDLESS)
    with launched(launch_command(2, "--config", str(config)), tmp_path / "log") as launcher:
        ranks = run_until_saved(launcher, tmp_path, 2)
        killed_at = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        assert launcher.wait(timeout=60 + 30) != 0
        wait_until(lambda: all_gone(ranks), 5, what="no worker is left")
        assert time.monotonic() - killed_at < 60 + 30
    log = (tmp_path / "log").read_text()
    assert "lm_pcfg: error: rank 0: another process is gone or does not answer" in log
    assert "SIGKILL" in log  # the launcher's summary names what happened to the other
    for path in saved(tmp_path):
        checkpoint.verify(path)


def start_ranks(config: Path, log: Path, world_size: int, program: str | None = None) -> list[subprocess.Popen]:
    """Without a launcher that would clean up after them."""
    port = str(free_port())
    ranks = []
    for rank in range(world_size):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_PORT": port}
        env = environment(**variables, MASTER_ADDR="127.0.0.1", LOCAL_WORLD_SIZE=str(world_size))
        command = [sys.executable, *(["-c", program] if program else [TRAIN]), "--config", str(config)]
        with log.open("ab") as output:
            ranks.append(subprocess.Popen(command, env=env, stdout=output, stderr=output))
    return ranks


def test_a_frozen_rank_is_given_up_after_the_time_limit(tmp_path):
    """Frozen as a hanging network or disk would freeze it: its connections stay open."""
    config = write_config(tmp_path, engine={"timeout_seconds": 7}, **ENDLESS)
    ranks = start_ranks(config, tmp_path / "log", 2)
    try:
        wait_until(lambda: len(saved(tmp_path)) >= 2, 120, what="two checkpoints")
        os.kill(ranks[1].pid, signal.SIGSTOP)
        frozen_at = time.monotonic()
        assert ranks[0].wait(timeout=60) == 1
        assert time.monotonic() - frozen_at < 7 + 30
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    (error,) = [line for line in (tmp_path / "log").read_text().splitlines() if "lm_pcfg: error" in line]
    assert "rank 0: another process is gone or does not answer" in error
    assert "Timed out" in error


@pytest.mark.chaos
@pytest.mark.parametrize("zero_stage", [None, 2])
def test_a_job_with_a_frozen_rank_is_gone_30_seconds_after_the_time_limit(tmp_path, zero_stage):
    """With its launcher, which kills what does not react only after 30 s."""
    config = write_config(tmp_path, engine={"timeout_seconds": 60}, **ENDLESS)
    command = launch_command(2, "--config", str(config), zero_stage=zero_stage)
    with launched(command, tmp_path / "log") as launcher:
        ranks = run_until_saved(launcher, tmp_path, 2)
        os.kill(ranks[1], signal.SIGSTOP)
        frozen_at = time.monotonic()
        assert launcher.wait(timeout=120) == 1
        assert time.monotonic() - frozen_at < 60 + 30
        assert all_gone(ranks)


FAILING = """
import os, sys
from lm_pcfg.cli import main
from lm_pcfg.errors import UserError
from lm_pcfg.training.steps import Steps
original = Steps.step
def step(self, batches):
    if self.position.step == 3 and self.engine.rank == 1:
        raise UserError("this rank's GPU fell off the bus")
    return original(self, batches)
Steps.step = step
sys.argv.insert(1, "train")
main()
"""


def test_the_failing_rank_says_why_before_all_others(tmp_path):
    ranks = start_ranks(write_config(tmp_path, **ENDLESS), tmp_path / "log", 3, FAILING)
    try:
        assert [process.wait(timeout=120) for process in ranks] == [1, 1, 1]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    errors = [line for line in (tmp_path / "log").read_text().splitlines() if "lm_pcfg: error" in line]
    assert errors[0] == "lm_pcfg: error: rank 1: this rank's GPU fell off the bus"
    assert all("another process is gone" in line for line in errors[1:])
    assert "Traceback" not in (tmp_path / "log").read_text()


# ---- signals --------------------------------------------------------------------------------------------------------

QUICK = [(2, "SIGKILL", "launcher"), (1, "SIGTERM", "launcher")]
MORE = [
    (2, "SIGINT", "all"),
    *((2, name, "launcher") for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")),
    *((2, name, "a worker") for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")),
    *((2, name, "all") for name in ("SIGTERM", "SIGUSR1")),
    *((1, name, "launcher") for name in ("SIGKILL", "SIGINT", "SIGUSR1")),
    *((1, name, "a worker") for name in ("SIGTERM", "SIGINT", "SIGUSR1")),
    *((1, name, "all") for name in ("SIGTERM", "SIGINT", "SIGUSR1")),
]


@pytest.mark.parametrize(
    ("processes", "name", "target"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.chaos) for case in MORE)]
)
def test_a_signal_ends_a_run_in_order_and_leaves_no_worker(tmp_path, processes, name, target):
    """Every worker finishes the step, saves and marks the MLflow run; none outlives its launcher."""
    config = write_config(tmp_path, tracking={"mlflow": True}, **ENDLESS)
    tracking = f"sqlite:///{tmp_path}/tracking.db"
    log = tmp_path / "log"
    with launched(launch_command(processes, "--config", str(config)), log, MLFLOW_TRACKING_URI=tracking) as launcher:
        ranks = run_until_saved(launcher, tmp_path, processes)
        wait_until((tmp_path / "runs" / "small" / "mlflow_run_id").exists, 60, what="MLflow knows the run")
        number = signal.Signals[name]
        if target == "all":  # Ctrl-C, or scancel
            os.killpg(launcher.pid, number)
        else:
            os.kill(launcher.pid if target == "launcher" else ranks[-1], number)
        wait_until(lambda: all_gone(ranks), 60, what="no worker is left")
        launcher.wait(timeout=60)
    said = log.read_text()
    (command,) = re.findall(r"; to continue it: (.*)", said)
    assert shlex.split(command)[-3:] == ["--config", str(tmp_path / "runs/small/config.yaml"), "resume=auto"]
    assert f"{TRAIN} --config" in command
    assert "accelerate.commands.launch" in command
    assert "lm_pcfg: error" not in said
    step = int(said.rpartition(" after step ")[2].partition(";")[0])
    assert checkpoint.verify(saved(tmp_path)[-1])["step"] == step
    assert not (tmp_path / "runs" / "small" / "FINISHED").exists()

    from mlflow import MlflowClient

    run_id = (tmp_path / "runs" / "small" / "mlflow_run_id").read_text().strip()
    assert MlflowClient(tracking).get_run(run_id).info.status == "KILLED"


def test_workers_exit_0_after_a_signal(tmp_path):
    """The launchers' own statuses say nothing, so here without one."""
    ranks = start_ranks(write_config(tmp_path, **ENDLESS), tmp_path / "log", 2)
    try:
        wait_until(lambda: len(saved(tmp_path)) >= 2, 120, what="two checkpoints")
        for process in ranks:  # twice, as from a terminal and from a launcher
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
        assert [process.wait(timeout=60) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_two_kills(tmp_path):
    """`make chaos` kills more often: see chaos.py."""
    chaos = Chaos(tmp_path, seed=7, ranks=2)
    whole = chaos.undisturbed()
    assert_same(whole, chaos.disturbed(2))
