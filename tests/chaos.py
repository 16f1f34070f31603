"""`make chaos`: kill -9 at random moments, again and again; the run that is left ends as if nothing had happened.

    python tests/chaos.py [--kills 25] [--seed 0] [--ranks 2] [--zero-stage 1|2|3]

A kill takes one rank (its launcher restarts the workers), all of them, or the launcher as well; at a random step, or in
the middle of a checkpoint's write. After each, every checkpoint folder has to be whole; at the end, all metrics and all
tensors have to be those of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

import watchdog
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.metrics_file import read_metrics
from processes import alive, kill, launch_command, launched, wait_until, workers
from texts import write_config

STEPS = 120
COMBINATIONS = [
    (victim, moment)
    for victim in ("a rank", "all ranks", "ranks and launcher")
    for moment in ("at a step", "in a checkpoint")
]


class Chaos:
    def __init__(self, folder: Path, *, seed: int, ranks: int, zero_stage: int | None = None, say=print):
        self.folder, self.ranks, self.zero_stage, self.say = folder, ranks, zero_stage, say
        self.random = random.Random(seed)
        self.killed_run = folder / "runs" / "killed"
        self.config = write_config(
            folder,
            "chaos",
            model={"state_dropout": 0.25},
            ema={"decay": 0.9},
            batch={"sentences": 4},
            training={"epochs": 1000, "max_steps": STEPS, "log_every": 1},
            evaluation={"every_epochs": None, "every_steps": 7, "patience": None},
            checkpoint={"every_steps": 2, "keep_last": 3, "keep_best": 2},
            engine={"timeout_seconds": 60, "world_size": ranks},
        )

    def command(self, name: str) -> list[str]:
        arguments = ["--config", str(self.config), f"name={name}", "resume=auto"]
        return launch_command(self.ranks, *arguments, zero_stage=self.zero_stage, restarts=100)

    def undisturbed(self) -> Path:
        log = self.folder / "whole.log"
        with launched(self.command("whole"), log) as launcher:
            assert launcher.wait(timeout=300) == 0, log.read_text()[-3000:]
        return self.folder / "runs" / "whole"

    def disturbed(self, kills: int) -> Path:
        """A run killed so many times, and then left alone."""
        log = self.folder / "killed.log"
        plan = self._plan(kills)
        while True:
            with launched(self.command("killed"), log) as launcher:
                self._earlier, self._killed_at = [], time.time()
                while plan:
                    number = kills - len(plan) + 1
                    victim, moment = plan.pop(0)
                    self._kill(launcher.pid, victim, moment, number, kills)
                    if victim == "ranks and launcher":
                        break
                else:
                    assert launcher.wait(timeout=300) == 0, log.read_text()[-3000:]
                    return self.killed_run

    def _plan(self, kills: int) -> list[tuple[str, str]]:
        """Every combination comes as often as any other, in random order."""
        plan: list[tuple[str, str]] = []
        while len(plan) < kills:
            plan += self.random.sample(COMBINATIONS, len(COMBINATIONS))
        return plan[:kills]

    def _kill(self, launcher: int, victim: str, moment: str, number: int, kills: int) -> None:
        run = self.killed_run
        self._wait_for(launcher, moment, step=STEPS * number // (kills + 2))
        there = workers(launcher)
        at = last_step(run)
        victims = [self.random.choice(there)] if victim == "a rank" else there
        if victim == "ranks and launcher":
            kill(launcher)
        for pid in victims:
            kill(pid)
        wait_until(lambda: not any(map(alive, victims)), what="the killed are gone")
        self._earlier, self._killed_at = there, time.time()
        self.say(
            f"kill {number}/{kills}: {victim}, {moment}, near step {at}: {check_checkpoints(run)} checkpoints whole"
        )

    def _wait_for(self, launcher: int, moment: str, step: int) -> None:
        """Until training has come to the step, and a little longer; or to a write after it."""
        run = self.killed_run

        def trains() -> bool:
            """New workers, who have written metrics."""
            there, file = workers(launcher), run / "metrics.jsonl"
            new = len(there) == self.ranks and not set(there) & set(self._earlier)
            return new and file.exists() and file.stat().st_mtime > self._killed_at and last_step(run) >= step

        wait_until(trains, timeout=180, every=0.005, what=f"step {step} of {run.name}")
        if moment == "in a checkpoint":
            wait_until(lambda: any((run / "checkpoints").glob(".writing-*")), every=0.0, what="a checkpoint's write")
        else:
            time.sleep(self.random.uniform(0, 0.15))


def last_step(run: Path) -> int:
    file = run / "metrics.jsonl"
    return max((line["step"] for line in read_metrics(file)), default=0) if file.exists() else 0


def check_checkpoints(run: Path) -> int:
    """Every folder that has the name of a checkpoint is whole; how many there are."""
    whole = 0
    for folder in checkpoint.list_checkpoints(run):
        try:
            checkpoint.verify(folder)
            whole += 1
        except checkpoint.CheckpointError:
            if folder.exists():  # a living run may have pruned it meanwhile
                raise
    return whole


def assert_same(one: Path, other: Path) -> None:
    """All metrics but times, and all tensors of the last checkpoint, bit for bit; the same checkpoints are kept."""
    timed = ("time", "ranks/", "train/words_per_second", "train/sentences_per_second", "train/seconds", "valid/seconds")
    lines = [
        [{k: v for k, v in line.items() if not k.startswith(timed)} for line in read_metrics(run / "metrics.jsonl")]
        for run in (one, other)
    ]
    assert lines[0] == lines[1]
    kept = [[folder.name for folder in checkpoint.list_checkpoints(run)] for run in (one, other)]
    assert kept[0] == kept[1], kept
    assert (one / "best").resolve().name == (other / "best").resolve().name
    for file in ("model", "optimizer", "ema"):
        tensors = [load_file(checkpoint.latest(run) / f"{file}.safetensors") for run in (one, other)]
        assert tensors[0].keys() == tensors[1].keys()
        assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0]), file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--zero-stage", type=int, choices=(1, 2, 3))
    options = parser.parse_args()
    watchdog.start()
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(Path(folder), seed=options.seed, ranks=options.ranks, zero_stage=options.zero_stage)
        whole = chaos.undisturbed()
        killed = chaos.disturbed(options.kills)
        assert_same(whole, killed)
        final = list(read_metrics(killed / "metrics.jsonl"))[-2]["train/loss"]
    print(f"{options.kills} kills, the same metrics and tensors bit for bit; final loss {final!r}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
