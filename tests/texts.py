"""Small texts and settings for tests of training and of the command line."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

WORDS = ["the", "a", "cat", "dog", "bird", "tree", "house", "sees", "likes", "chases", "sleeps", "runs"]
WORDS += ["and", "near", "old", "small"]


def write_text(path: Path, lines: int, seed: int = 0, longest: int = 9) -> Path:
    generator = random.Random(seed)
    sentences = [" ".join(generator.choices(WORDS, k=generator.randint(1, longest))) for _ in range(lines)]
    path.write_text("\n".join(sentences) + "\n", encoding="utf-8")
    return path


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in change.items():
        result[key] = merged(result.get(key, {}), value) if isinstance(value, dict) else value
    return result


def write_config(folder: Path, name: str = "small", **changes: Any) -> Path:
    """A run of a few steps on random text, written beside it. Tracking is off unless asked for."""
    train, valid = folder / "train.txt", folder / "valid.txt"
    if not train.exists():
        write_text(train, 60, seed=1)
        write_text(valid, 12, seed=2)
    settings = {
        "data": {"train": str(train), "valid": str(valid)},
        "runs_folder": str(folder / "runs"),
        "device": "cpu",
        "threads": 1,
        "model": {"nonterminals": 4, "preterminals": 6, "dimension": 8, "init": "normal(0.5, 0.5)"},
        "batch": {"sentences": 8},
        "training": {"epochs": 2, "log_every": 3},
        "tracking": {"mlflow": False},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(merged(settings, changes)), encoding="utf-8")
    return path
