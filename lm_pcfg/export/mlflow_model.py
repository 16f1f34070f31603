"""An exported folder as an MLflow model: `mlflow.pyfunc.load_model` and `mlflow models serve` open it, without pickle.

The file MLmodel names this module as its loader. What the model is asked for is a parameter:

    model = mlflow.pyfunc.load_model("FOLDER")
    model.predict(["the cat sat"])                              # natural log-probabilities
    model.predict(["the cat sat"], params={"task": "parse"})    # trees in brackets
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lm_pcfg.errors import UserError

if TYPE_CHECKING:  # it imports torch
    from lm_pcfg.inference.model import Model

COLUMN = "text"  # of a table that is asked about
TASKS = ("score", "parse")


class GrammarModel:
    """What MLflow calls: one value for each line."""

    def __init__(self, model: Model):
        self.model = model

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> list[Any]:
        """model_input: lines of text, or a table with a column `text`; params: {"task": "score" or "parse"}

        A line without a probability (blank, or impossible) has None, one without a tree an empty string.
        """
        task = (params or {}).get("task", TASKS[0])
        tasks: dict[str, Callable[[Sequence[str]], list[Any]]] = {"score": self.score, "parse": self.parse}
        if task not in tasks:
            raise UserError(f"unknown task {task!r}: use {' or '.join(TASKS)}")
        return tasks[task](_lines(model_input))

    def score(self, lines: Sequence[str]) -> list[float | None]:
        import math

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
        if COLUMN not in given.columns:
            raise UserError(f"the table has no column {COLUMN!r}: it has {', '.join(map(str, given.columns))}")
        given = given[COLUMN]
    elif isinstance(given, dict):
        given = given.get(COLUMN, ())
    lines = given.tolist() if hasattr(given, "tolist") else list(given)
    if not all(isinstance(line, str) for line in lines):
        raise UserError("lines should be text: give a list of strings")
    return lines


def mlmodel() -> bytes:
    """Return the file MLmodel: which module opens the folder, what goes in, and the parameter `task`."""
    import mlflow.pyfunc
    from mlflow.models import Model as Description
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    signature = ModelSignature(
        inputs=Schema([ColSpec("string", COLUMN)]), params=ParamSchema([ParamSpec("task", "string", TASKS[0])])
    )
    description = Description(signature=signature)
    mlflow.pyfunc.add_to_model(description, loader_module=__name__)
    return description.to_yaml().encode()
