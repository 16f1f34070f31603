"""What the benchmarks' command lines have in common: refuse in one line, before anything is measured."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch


def number_from(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number, at least {least}")
    return int(text)


def positive(text: str) -> int:
    return number_from(1, text)


def at_least_two(text: str) -> int:
    return number_from(2, text)


def not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number, at least 0")
    return value


def find_device(parser: argparse.ArgumentParser, name: str | None, backend: str = "auto") -> torch.device:
    """Return the named device; by default a GPU if there is one."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or not (number or "0").isdecimal():
        parser.error(f"--device {name}: should be cuda or cpu")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        parser.error(f"--device {name}: there is no {'such ' if torch.cuda.is_available() else ''}GPU here")
    if kind == "cpu" and backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--backend triton needs a GPU")
    return torch.device(name)


def default_grid(on_gpu: bool, option: str, large: str, small: str) -> str:
    """Return the default grid, a smaller one without a GPU, and say so: a CPU takes hours for a GPU's minutes."""
    if not on_gpu:
        print(f"without a GPU by default {option} {small} instead of {large}", file=sys.stderr, flush=True)
    return large if on_gpu else small


def check_files(parser: argparse.ArgumentParser, files: Sequence[Path | None]) -> None:
    """Refuse files that cannot be written. What they hold stays."""
    if problem := why_not_all_written(files):
        parser.error(problem)


def why_not_all_written(files: Sequence[Path | None]) -> str | None:
    named = [path for path in files if path is not None]
    if len({path.absolute() for path in named}) < len(named):
        return f"{named[0]} is named for two things; name two files"
    return next(filter(None, map(_why_not_written, named)), None)


def _why_not_written(path: Path) -> str | None:
    """Say in one line what keeps a file from being written; nothing is left behind by the attempt."""
    try:
        if not path.parent.is_dir():
            return f"{path}: there is no folder {path.parent}; make it first"
        if path.is_dir():
            return f"{path} is a folder; name a file in it"
        new = not path.exists()
        path.open("a").close()
        if new:
            path.resolve().unlink()  # a link to a file that was not there stays
    except OSError as error:
        return f"{path}: cannot be written: {error.strerror}"
    return None
