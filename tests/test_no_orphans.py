"""Whatever stops a training, seen from outside: it saves, all of its processes end, and none outlives its launcher."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import pytest

from lm_pcfg.storage import checkpoint
from processes import alive, launch_command, launched, wait_until, workers
from texts import write_config

# `make chaos` runs all of them; tests/test_faults.py has three in every test run.
pytestmark = pytest.mark.chaos
SECONDS = 40.0  # in which everything has to be over, on a machine that is busy with all of these at once


def stop_one_worker(launcher: Popen, ranks: list[int]) -> None:
    os.kill(ranks[-1], signal.SIGTERM)


def warn_the_launcher(launcher: Popen, ranks: list[int]) -> None:
    """No launcher listens to SIGUSR1: it dies of it."""
    launcher.send_signal(signal.SIGUSR1)


def stop_the_launcher(launcher: Popen, ranks: list[int]) -> None:
    launcher.terminate()


def kill_the_launcher(launcher: Popen, ranks: list[int]) -> None:
    launcher.kill()


def interrupt(launcher: Popen, ranks: list[int]) -> None:
    """Ctrl-C: the terminal tells the group in the foreground; torchrun's workers have groups of their own."""
    os.killpg(launcher.pid, signal.SIGINT)


ACTIONS = [stop_one_worker, warn_the_launcher, stop_the_launcher, kill_the_launcher, interrupt]
CASES = [(action, processes) for processes in (1, 2) for action in ACTIONS]


@dataclass
class Training:
    folder: Path
    launcher: Popen
    ranks: list[int]

    def over(self) -> bool:
        return self.launcher.poll() is not None and not any(alive(pid) for pid in self.ranks)

    def said(self) -> str:
        return (self.folder / "log").read_text()


@pytest.fixture(scope="module")
def trainings(tmp_path_factory) -> Iterator[dict[tuple[Callable, int], Training]]:
    """One for each case, all in mid-training; started together, as most of the time goes into imports."""
    folder = tmp_path_factory.mktemp("orphans")
    started = {}
    with ExitStack() as stack:
        for action, processes in CASES:
            own = folder / f"{action.__name__}-{processes}"
            own.mkdir()
            config = write_config(own, training={"epochs": 100_000, "log_every": 1000})
            command = launch_command(processes, "--config", str(config), "checkpoint.every_steps=5")
            started[action, processes] = Training(own, stack.enter_context(launched(command, own / "log")), [])
        for (action, processes), training in started.items():
            wait_until(
                lambda own=training.folder: checkpoint.latest(own / "runs" / "small") is not None,
                180, what=f"{action.__name__} with {processes} to train",
            )  # fmt: skip
            training.ranks = workers(training.launcher.pid)
            assert len(training.ranks) == processes, training.said()
            os.kill(training.launcher.pid, signal.SIGSTOP)  # the others need the processors
            for pid in training.ranks:
                os.kill(pid, signal.SIGSTOP)
        yield started


@pytest.mark.parametrize(("action", "processes"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_stopped_training_saves_and_leaves_no_process(trainings, action, processes):
    training = trainings[action, processes]
    for pid in [training.launcher.pid, *training.ranks]:
        os.kill(pid, signal.SIGCONT)
    time.sleep(0.2)  # some steps
    action(training.launcher, training.ranks)
    wait_until(training.over, SECONDS, what=f"all to be over\n{training.said()}")
    run = training.folder / "runs" / "small"
    newest = checkpoint.latest(run)
    assert newest is not None
    checkpoint.verify(newest)
    assert not (run / "FINISHED").exists()
    assert "stopped by " in training.said()
