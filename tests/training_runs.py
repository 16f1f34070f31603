"""Runs of the training loop in the process of a test: whole, stopped by a signal, or with updates that are spoilt."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage.metrics_file import read_metrics
from lm_pcfg.training import loop
from texts import write_config

EVERYTHING_ON = {
    "model": {
        "state_dropout": 0.25,
        "feature_dropout": 0.2,
        "children": "rotated",
        "init": "contexts(0.3, 0.2)",
    },
    "ema": {"decay": 0.9},
    "batch": {"sentences": 4, "accumulate": 2},
    "data": {"curriculum": {"start": 6}},
    "optimizer": {"name": "adamw", "weight_decay": 0.01, "schedule": {"kind": "cosine", "warmup_steps": 4}},
    "training": {"epochs": 3},
    "evaluation": {"every_epochs": 0.5},
}


def run(folder: Path, *overrides: str, name: str = "small", **changes) -> Path:
    return loop.train(load_settings(write_config(folder, name, **changes), list(overrides)))


def stop_after(monkeypatch, steps: int, number: int = signal.SIGTERM) -> None:
    """Send this process a signal right after a step, as a scheduler would."""
    original = loop.Steps.step

    def step(self, batches):
        result = original(self, batches)
        if self.position.step == steps:
            os.kill(os.getpid(), number)
        return result

    monkeypatch.setattr(loop.Steps, "step", step)


def metrics_without_times(run_folder: Path) -> list[dict]:
    timed = ("time", "ranks/", "train/words_per_second", "train/sentences_per_second", "train/seconds", "valid/seconds")
    return [
        {key: value for key, value in line.items() if not key.startswith(timed)}
        for line in read_metrics(run_folder / "metrics.jsonl")
    ]


def break_steps(monkeypatch, broken, spoil=lambda log_z: log_z * math.nan) -> None:
    """Spoil the log-likelihood of some calls (counted from 0), in training alone: NaN, and so are its gradients."""
    original, calls = Grammar.log_likelihood_unchecked, []

    def log_likelihood(self, *arguments, **options):
        result, trusted = original(self, *arguments, **options)
        calls.append(None)
        return spoil(result) if broken(len(calls) - 1) else result, trusted

    monkeypatch.setattr(Grammar, "log_likelihood_unchecked", log_likelihood)
