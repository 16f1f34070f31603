"""Read the metrics of runs: a line of figures for each, and the points of its learning curves.

Times count training only, without evaluations and without pauses between a stop and its resume. Unfinished runs, runs
without an evaluation and lines that are not finite are read too.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lm_pcfg.corpus.pieces import KIND
from lm_pcfg.corpus.text import read_bounded
from lm_pcfg.corpus.vocabulary import DESCRIPTION_FILE
from lm_pcfg.errors import UserError
from lm_pcfg.storage import durable
from lm_pcfg.storage.metrics_file import read_metrics
from lm_pcfg.storage.notes import failure_of
from lm_pcfg.training.documents import Carried, newest_carried, vocabulary_folder, written_settings

_LARGEST_COUNT = 2**53


@dataclass(frozen=True)
class Point:
    step: int
    seconds: float  # of training so far
    perplexity: float
    impossible: int = 0  # sentences of probability 0, which no sum contains
    words: float = 0.0  # in training: how many words the perplexity is over; 0: unknown
    loss: float | None = None  # in training, as it is minimised
    s_f1: float | None = None  # in validation with gold trees, in percent
    tokens: int | None = None  # in validation, if all sentences have a probability: those of the text
    epoch: int = 0  # in training, from 0: that of its last step


@dataclass
class Run:
    name: str
    unit: str | None = None  # what perplexities and speeds are per: words or pieces; None: not known
    types: int | None = None  # of the vocabulary
    config: dict[str, Any] = field(default_factory=dict)  # its settings as they were written
    config_problem: str = ""  # why they are unknown
    unknown_share: float | None = None  # of the words (or pieces) of the validation text
    valid_tokens: int | None = None  # of the validation text, if all of its sentences have a probability
    nonterminals: int | None = None
    epochs_planned: int | None = None
    is_bound: bool = False  # perplexities are upper bounds, as those of compound models are
    finished: bool = False
    failure: str | None = None  # why it has failed; None: it has not
    epochs: int = 0  # begun
    steps: int = 0
    seconds: float = 0.0
    periods: list[tuple[float, float]] = field(default_factory=list)  # when it trained, by the clock: of each line
    skipped: int = 0
    words_per_second: list[float] = field(default_factory=list)
    train: list[Point] = field(default_factory=list)
    valid: list[Point] = field(default_factory=list)
    folder: Path = Path()
    vocabulary: Path = Path()  # the folder that has it

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by section and name."""
        return {name: section for name, section in self.config.items() if isinstance(section, dict)}

    def best(self) -> Point | None:
        """The best evaluation, chosen as in training: the fewest impossible sentences, then the lowest perplexity.

        A run that was resumed with another validation text has forgotten what it reached on the one before.
        """
        finite = [point for point in self.on_last_text() if math.isfinite(point.perplexity)]
        return min(finite, key=lambda point: (point.impossible, point.perplexity), default=None)

    def training_perplexity(self) -> float | None:
        """The mean over the last tenth of the steps, since the last line of metrics may be of a handful of batches."""
        if not self.train:
            return None
        last = [point for point in self.train if point.step > 0.9 * self.train[-1].step] or self.train[-1:]
        words = [point.words for point in last]
        logarithms = [math.log(point.perplexity) for point in last]
        return math.exp(statistics.fmean(logarithms, words if all(words) else None))

    def reached(self, perplexity: float) -> Point | None:
        """The first evaluation at or below a validation perplexity."""
        return next((point for point in self.on_last_text() if point.perplexity <= perplexity), None)

    def on_last_text(self) -> list[Point]:
        """The evaluations on the validation text that the run ended with, as far as their sizes tell."""
        known = [point.tokens for point in self.valid if point.tokens is not None]
        return [point for point in self.valid if point.tokens is None or point.tokens == known[-1]]


def read_runs(folders: Sequence[Path], warn: Callable[[str], None]) -> list[Run]:
    """Read runs, each named like its folder, or by its path where two folders have the same name.

    A pattern like `runs/*` also finds folders that are no runs, such as that of a search: those are passed over, unless
    there are no others.
    """
    if any(_why_no_run(folder) is None for folder in folders):
        for folder in folders:
            if problem := _why_no_run(folder):
                warn(f"{folder} {problem}: passed over")
        folders = [folder for folder in folders if _why_no_run(folder) is None]
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return [_read_run(folder, name, warn) for folder, name in zip(folders, names, strict=True)]


def _why_no_run(folder: Path) -> str | None:
    try:
        parts = [folder / "config.yaml", folder / "metrics.jsonl"]
        return None if any(part.is_file() for part in parts) else "is not a run folder"
    except PermissionError as error:  # one may not even look at what is in it
        return f"cannot be read: {durable.reason(error)}"


def _read_run(folder: Path, name: str, warn: Callable[[str], None]) -> Run:
    if problem := _why_no_run(folder):
        why = ": it has neither config.yaml nor metrics.jsonl" if "not a run" in problem else ""
        raise UserError(f"{folder} {problem}{why}; give one like runs/tiny")
    try:
        carried = newest_carried(folder, warn)
    except (UserError, OSError) as error:
        warn(str(error))
        carried = None
    vocabulary = vocabulary_folder(folder, carried, warn)
    run = Run(name, *_unit_and_types(vocabulary), finished=(folder / "FINISHED").exists())
    run.folder, run.vocabulary, run.failure = folder, vocabulary, failure_of(folder)
    _add_settings(run, carried, warn)
    metrics = folder / "metrics.jsonl"
    lines: list[dict[str, Any]] = []
    try:
        for line in read_metrics(metrics, warn):
            while lines and lines[-1]["step"] > line["step"]:  # written again after a resume from further back
                lines.pop()
            lines.append(line)
    except FileNotFoundError:
        pass  # it has just begun
    except OSError as error:
        warn(f"{metrics} cannot be read: {durable.reason(error)}")
    if any(_is_of_training(line) and "train/seconds" not in line for line in lines):
        warn(f"{folder}: no train/seconds; its times are from time stamps, without the steps before the first of them")
    previous: dict[str, Any] | None = None
    for line in lines:
        _add(run, line, previous)
        previous = line
    return run


def _unit_and_types(vocabulary: Path) -> tuple[str | None, int | None]:
    """Return what a run's vocabulary is of, and how many of them it has; None for what cannot be read."""
    try:
        description = json.loads(read_bounded(vocabulary / DESCRIPTION_FILE))
        return "pieces" if description.get("kind") == KIND else "words", _whole({"": description}, "", "types")
    except (OSError, ValueError, RecursionError, AttributeError):
        return None, None


def _add_settings(run: Run, carried: Carried | None, warn: Callable[[str], None]) -> None:
    """Add the settings without checking them, so that those of other versions can be read too."""
    try:
        run.config = written_settings(run.folder, carried, warn)
    except UserError as error:
        run.config_problem = str(error)
        if (run.folder / "config.yaml").exists():
            warn(f"{error}; the settings of this run are unknown")
    run.nonterminals = _whole(run.settings, "model", "nonterminals")
    run.epochs_planned = _whole(run.settings, "training", "epochs")


def _whole(settings: dict[str, Any], section: str, name: str) -> int | None:
    value = settings.get(section, {}).get(name)
    return value if type(value) is int and 0 <= value <= _LARGEST_COUNT else None


def _add(run: Run, line: dict[str, Any], previous: dict[str, Any] | None) -> None:
    run.steps = line["step"]
    passed = _number(line, "train/seconds")
    if passed is None and previous is not None and _is_of_training(line):
        passed = (_number(line, "time") or math.nan) - (_number(previous, "time") or math.nan)
    if passed is not None and passed > 0:
        run.seconds += passed
        if (ended := _number(line, "time")) is not None:
            run.periods.append((ended - passed, ended))
    if (epoch := _number(line, "epoch")) is not None:
        run.epochs = int(epoch) + 1
    if (skipped := _number(line, "train/skipped")) is not None:
        run.skipped = int(skipped)
    if (speed := _number(line, "train/words_per_second")) is not None:
        run.words_per_second.append(speed)
    if (perplexity := _number(line, "train/ppl")) is not None:
        words = _number(line, "train/words")
        if words is None:  # earlier versions wrote no words
            words = (speed or 0.0) * _seconds_of_steps(run, line, max(passed or 0.0, 0.0))
        point = Point(run.steps, run.seconds, perplexity, words=words, loss=_number(line, "train/loss"))
        run.train.append(replace(point, epoch=max(run.epochs - 1, 0)))
    if isinstance(line.get("valid/ppl"), int | float):
        impossible = int(_number(line, "valid/impossible") or 0)
        run.unknown_share = _number(line, "valid/unknown_share")
        run.is_bound = run.is_bound or "valid/kl" in line
        tokens = _number(line, "valid/tokens")
        run.valid_tokens = None if tokens is None or impossible else int(tokens)
        s_f1 = _number(line, "valid/s_f1")
        point = Point(run.steps, run.seconds, float(line["valid/ppl"]), impossible, s_f1=s_f1, tokens=run.valid_tokens)
        run.valid.append(point)


def _seconds_of_steps(run: Run, line: dict[str, Any], passed: float) -> float:
    """The seconds that a line's speed is of: those of its steps, without what passed between them, as in a save."""
    parts = [_number(line, f"time/{part}") for part in ("data", "compute", "communication")]  # of a step
    steps = run.steps - (run.train[-1].step if run.train else 0)
    return passed if None in parts else sum(filter(None, parts)) * steps


def _is_of_training(line: dict[str, Any]) -> bool:
    """Whether the line was written after some steps, not after an evaluation."""
    return "train/learning_rate" in line


def _number(line: dict[str, Any], name: str) -> float | None:
    """A value of a line; None if it is missing, not a number, or not finite."""
    value = line.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def summary(run: Run, reach: float | None = None) -> dict[str, Any]:
    """One line of the report; None stands for what the run does not have (yet). reach: a validation perplexity."""
    best = run.best()
    line = {
        "run": run.name,
        "nonterminals": run.nonterminals,
        "finished": run.finished,
        "failure": run.failure,
        "epochs": run.epochs,
        "epochs_planned": run.epochs_planned,
        "steps": run.steps,
        "unit": run.unit,
        "best_valid_ppl": best.perplexity if best else None,
        **({"ppl_is": "an upper bound (evidence lower bound)"} if run.is_bound else {}),
        "unknown_share": run.unknown_share,
        "best_step": best.step if best else None,
        "impossible": best.impossible if best else None,
        "last_train_ppl": run.training_perplexity(),
        "skipped_share": run.skipped / run.steps if run.steps else None,
        "words_per_second": statistics.median(run.words_per_second) if run.words_per_second else None,
        "training_seconds": round(run.seconds, 3) if run.train else None,
    }
    if reach is not None:
        point = run.reached(reach)
        line |= {
            "reach": reach,
            "reached_step": point.step if point else None,
            "reached_seconds": round(point.seconds, 3) if point else None,
        }
    return line


def cells(lines: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The summaries of runs for people: the names of the columns, and a row for each run.

    Perplexities per word and per piece are in different columns: they cannot be compared. Upper bounds have a "<=".
    """

    def shown(line: dict[str, Any], name: str, form: str) -> str:
        return "-" if line[name] is None else format(line[name], form)

    def bound(line: dict[str, Any], name: str) -> str:
        return "<= " if "ppl_is" in line and name.endswith("ppl") and line[name] is not None else ""

    def per_unit(title: str, name: str, form: str) -> dict[str, Callable[[dict[str, Any]], str]]:
        """A column for each unit that the runs have; a run has its figure in that of its unit."""

        def of(unit: str | None) -> Callable[[dict[str, Any]], str]:
            return lambda line: bound(line, name) + shown(line, name, form) if line["unit"] == unit else ""

        units = sorted({line["unit"] for line in lines}, key=lambda unit: (unit is None, unit != "words"))
        return {title.format(unit[:-1] if unit else "token"): of(unit) for unit in units}

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "run": lambda line: line["run"] + _how_it_ended(line),
        "N": lambda line: shown(line, "nonterminals", ",d"),
        "epoch": lambda line: f"{line['epochs']}/{shown(line, 'epochs_planned', 'd')}",
        "steps": lambda line: shown(line, "steps", ",d"),
        **per_unit("valid ppl per {}", "best_valid_ppl", ".2f"),
        "unknown": lambda line: shown(line, "unknown_share", ".2%"),
        "at step": lambda line: shown(line, "best_step", ",d"),
        **per_unit("train ppl per {}", "last_train_ppl", ".2f"),
        "skipped": lambda line: shown(line, "skipped_share", ".3%"),
        **per_unit("{}s/s", "words_per_second", ",.0f"),
        "training s": lambda line: shown(line, "training_seconds", ",.1f"),
    }
    if lines and "reach" in lines[0]:
        columns[f"s to {lines[0]['reach']:g}"] = lambda line: shown(line, "reached_seconds", ",.1f")
    return list(columns), [[show(line) for show in columns.values()] for line in lines]


def _how_it_ended(line: dict[str, Any]) -> str:
    return " (failed)" if line["failure"] else "" if line["finished"] else " (unfinished)"


def failures(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Say which runs have failed, and why."""
    return [f"{line['run']} has failed: {line['failure']}" for line in lines if line["failure"]]


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The summaries of runs as a table, one line for each run."""
    columns, rows = cells(lines)
    rows = [columns, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    padded = [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        for row in rows
    ]
    return "\n".join("  ".join(row) for row in padded)
