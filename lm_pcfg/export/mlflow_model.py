"""An exported folder as an MLflow model: `mlflow.pyfunc.load_model` and `mlflow models serve` open it, without pickle.

The file MLmodel names this module as its loader. What the model is asked for is a parameter:

    model = mlflow.pyfunc.load_model("FOLDER")
    model.predict(["the cat sat"])                              # natural log-probabilities
    model.predict(["the cat sat"], params={"task": "parse"})    # trees in brackets
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from lm_pcfg.errors import UserError

if TYPE_CHECKING:  # it imports torch
    from lm_pcfg.inference.model import Model

COLUMN = "text"  # of a table of several columns
TASKS = ("score", "parse")


class GrammarModel:
    """What MLflow calls: one value for each line."""

    def __init__(self, model: Model):
        self.model = model

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> list[Any]:
        """Score or parse lines: a list, or a table with one column or a column `text`. params: {"task": "parse"}

        A line without a probability (blank, or impossible) has None, one without a tree an empty string.
        """
        task = (params or {}).get("task", TASKS[0])
        tasks: dict[str, Callable[[Sequence[str]], list[Any]]] = {"score": self.score, "parse": self.parse}
        if task not in tasks:
            raise UserError(f"unknown task {task!r}: use {' or '.join(TASKS)}")
        return tasks[task](_lines(model_input))

    def score(self, lines: Sequence[str]) -> list[float | None]:
        return [value if math.isfinite(value) else None for value in self.model.score(lines).tolist()]

    def parse(self, lines: Sequence[str]) -> list[str]:
        from lm_pcfg.corpus.treebank import bracketed

        return [bracketed(tree) if tree.words else "" for tree in self.model.parse(lines)]


def _load_pyfunc(path: str) -> GrammarModel:
    """MLflow calls this by its name, with the folder of MLmodel (or what was logged as `data_path`)."""
    from lm_pcfg import load

    return GrammarModel(load(path))


def _lines(given: Any) -> list[str]:
    """Return the lines of a list, an array, or a table of MLflow's (pandas)."""
    if isinstance(given, str):
        return [given]
    if hasattr(given, "columns"):
        if COLUMN not in given.columns and len(given.columns) != 1:
            raise UserError(f"the table has no column {COLUMN!r}: it has {', '.join(map(str, given.columns))}")
        given = given[COLUMN if COLUMN in given.columns else given.columns[0]]
    elif isinstance(given, dict):
        given = given.get(COLUMN, ())
    lines = given.tolist() if hasattr(given, "tolist") else list(given)
    if not all(isinstance(line, str) for line in lines):
        raise UserError("lines should be text: give a list of strings")
    return lines


def mlmodel() -> bytes:
    """Return the file MLmodel: which module opens the folder, what goes in, and the parameter `task`.

    It is written without MLflow, which takes seconds to import.
    """
    inputs = [{"type": "string", "required": True}]
    parameters = [{"name": "task", "type": "string", "default": TASKS[0], "shape": None}]
    loader = {"loader_module": __name__, "python_version": platform.python_version()}
    signature = {"inputs": json.dumps(inputs), "outputs": None, "params": json.dumps(parameters)}
    return yaml.safe_dump({"flavors": {"python_function": loader}, "signature": signature}).encode()
