"""What a benchmark has measured, in files from the first row on: a run that is cut short loses nothing."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
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
        draw: Callable[[list[Row]], str] = lambda rows: "",
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
        if self._plot:
            self._plot.write_text(self._draw(self.rows))


def out_of_memory(problem: BaseException) -> bool:
    """Of a GPU or of the host, for which PyTorch has no exception of its own."""
    return isinstance(problem, MemoryError | torch.OutOfMemoryError) or "you tried to allocate" in str(problem)


def read_rows(table: Path, fields: Sequence[str]) -> list[Row]:
    """As text. ValueError: not such a table."""
    with table.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        if tuple(reader.fieldnames or ()) != tuple(fields):
            raise ValueError(f"{table} was not written by this benchmark: its columns should be {','.join(fields)}")
    return rows
