"""What a benchmark has measured: times, the machine they are of, and rows in files.

Files are written from the first row on, so that a run that is cut short loses nothing.
"""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import platform
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


class Results:
    def __init__(
        self,
        fields: Sequence[str],
        table: Path | None,
        plot: Path | None = None,
        draw: Callable[[list[Row]], str] | None = None,
    ):
        self.rows: list[Row] = []
        self._fields, self._table, self._plot, self._draw = fields, table, plot, draw

    def add(self, *rows: Row) -> None:
        self.rows += rows
        if self._table:
            with self._table.open("w", newline="") as file:
                writer = csv.DictWriter(file, self._fields)
                writer.writeheader()
                writer.writerows(self.rows)
        if self._plot and self._draw:
            self._plot.write_text(self._draw(self.rows))


def out_of_memory(problem: BaseException) -> bool:
    """Whether a GPU or the host is out of memory; for the host PyTorch has no exception of its own."""
    return isinstance(problem, MemoryError | torch.OutOfMemoryError) or "you tried to allocate" in str(problem)


def read_rows(table: Path, fields: Sequence[str]) -> list[Row]:
    """Read the rows of a CSV as text. ValueError: its columns are not these fields."""
    with table.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        if tuple(reader.fieldnames or ()) != tuple(fields):
            raise ValueError(f"{table} was not written by this benchmark: its columns should be {','.join(fields)}")
    return rows


def milliseconds(function: Callable[[], object], device: torch.device, passes: int = 1) -> list[float]:
    """Measure the milliseconds of each of some passes in a row."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(passes):
            function()
        return [(time.perf_counter() - start) * 1e3 / passes] * passes
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(passes + 1)]
    function()  # so that the first mark is not waited for
    marks[0].record()
    for mark in marks[1:]:
        function()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(marks)]


def percentiles(times: Sequence[float]) -> Row:
    """Return the 20th, 50th and 80th percentile of times in milliseconds."""
    ordered = sorted(times)
    shares = {"p20_ms": 0.2, "p50_ms": 0.5, "p80_ms": 0.8}
    return {name: round(ordered[round(share * (len(ordered) - 1))], 4) for name, share in shares.items()}


def machine(device: torch.device) -> dict[str, str]:
    try:
        triton_version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton_version = "none"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return {"device": name, "torch": torch.__version__, "triton": triton_version, "date": date}
