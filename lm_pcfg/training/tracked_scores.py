"""Scores of a run in MLflow: `lm_pcfg score` adds its figures to the run that it scores.

Only to a run that is there already: no store, no experiment and no run is made. A thread does it, which begins while
the text is being scored; the command waits a few seconds for it at most, after the result is printed. A failure is told
in one line, and changes neither the result nor the exit status.

Figures are called after the file, as score/test.txt/ppl. A run that has the score of another text under that name gets
score/test.txt-0123abcd/ppl, with the beginning of the text's hash: no score takes the place of another one's.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lm_pcfg.storage.run_folder import read_tracking_id
from lm_pcfg.training.mlflow_run import one_line, quiet_client, sqlite_file, valid_name
from lm_pcfg.training.tracking import ENVIRONMENT, default_store

FIGURES = ("ppl", "ppl_per_word", "ppl_per_byte", "ppl_words", "nll", "tokens", "skipped", "unknown_share")
DETAILS = (
    *("file", "text_hash", "checkpoint", "weights", "precision", "unit", "unknown_words", "literal_unknown"),
    *("ppl_is", "samples", "seed"),  # of compound models
)
SECONDS = 8.0  # that a command waits for a store on this machine, after its result
SECONDS_FOR_A_SERVER = 2.0  # it may be dead
SECONDS_FOR_A_LOCK = 1.0  # that another process may have on a store
_SERVERS = ("http://", "https://", "databricks")


class _Given(NamedTuple):
    name: str
    step: int
    figures: dict[str, float]
    details: dict[str, Any]


class ScoreLog:
    """Gets one score, and logs it to a run of a store."""

    def __init__(self, uri: str, run_id: str):
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.uri, self.run_id = uri, run_id
        self.given: queue.SimpleQueue[_Given | None] = queue.SimpleQueue()
        self.outcome = "no answer"  # "logged", "not there" (the store or the run), or what went wrong
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def send(self, name: str, step: int, report: Mapping[str, Any], warn: Callable[[str], None]) -> str:
        """Log the figures of a report under a name, at the step of the checkpoint; return how that went."""
        figures = {_figure_name(name, report): float(report[name]) for name in FIGURES if report.get(name) is not None}
        details = {detail: report[detail] for detail in DETAILS if detail in report}
        self.given.put(_Given(name, step, figures, details))
        seconds = SECONDS_FOR_A_SERVER if self.uri.startswith(_SERVERS) else SECONDS
        self._thread.join(seconds)
        if self.outcome not in ("logged", "not there"):
            why = f"no answer within {seconds:g} s" if self._thread.is_alive() else self.outcome
            warn(f"MLflow: this score was not logged ({why}); --no-track leaves MLflow alone")
        return self.outcome

    def _work(self) -> None:
        try:
            self.outcome = self._log()
        except Exception as error:  # whatever it is, the score is printed
            self.outcome = one_line(error)

    def _log(self) -> str:
        given, there = None, is_there(self.uri, self.run_id)
        if there is None:  # perhaps the store is free when the text has been scored
            if (given := self.given.get()) is None:
                return "not there"
            there = is_there(self.uri, self.run_id)
        if there is None:
            return "another process has locked the store"
        if not there:
            return "not there"
        client = quiet_client(self.uri)
        from mlflow.entities import Metric, RunTag

        if given is None and (given := self.given.get()) is None:
            return "not there"
        name = _free_name(given, client.get_run(self.run_id).data.tags)
        now = int(time.time() * 1000)
        client.log_batch(
            self.run_id,
            metrics=[
                Metric(valid_name(f"score/{name}/{figure}"), value, now, given.step)
                for figure, value in given.figures.items()
            ],
            tags=[RunTag(valid_name(f"score.{name}"), json.dumps(given.details))],
        )
        return "logged"


def _figure_name(name: str, report: Mapping[str, Any]) -> str:
    """Return what a figure is called in MLflow, where it stands alone in a column: a lower bound says so."""
    return f"{name}_at_least" if report.get(f"{name}_is_lower_bound") else name


def _free_name(given: _Given, tags: Mapping[str, str]) -> str:
    """Return the name of a score, another one if the run has the score of another text under it."""
    before: Any = None
    with contextlib.suppress(ValueError, KeyError, RecursionError):
        before = json.loads(tags[valid_name(f"score.{given.name}")])
    if not isinstance(before, dict):
        return given.name
    by = "text_hash" if "text_hash" in before else "file"  # earlier versions had no hash
    if before.get(by) == given.details.get(by):
        return given.name
    return f"{given.name}-{given.details.get('text_hash', 'other')[:8]}"


def score_name(file: str, **options: Any) -> str:
    """Return what the score of a file is called; options: those that change it and are not the default."""
    name = Path(file).name if file != "-" else "stdin"
    return "-".join([name, *(f"{option.replace('_', '-')}-{value}" for option, value in options.items())])


@contextlib.contextmanager
def score_log(run: Path, wanted: bool = True) -> Iterator[ScoreLog | None]:
    """Give what logs a score to the MLflow run of a run folder; None: it has none here. Only rank 0 logs."""
    log = None
    with contextlib.suppress(OSError):  # a working folder that is gone, say
        log = _open(run) if wanted else None
    try:
        yield log
    finally:
        if log is not None:
            log.given.put(None)  # the end of its thread, if nothing was sent


def _open(run: Path) -> ScoreLog | None:
    if os.environ.get("RANK", "0") != "0" or (run_id := read_tracking_id(run)) is None:
        return None
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return ScoreLog(uri, run_id)
    # A run folder is usually runs/NAME of the folder that the training was started in.
    locked = None
    for folder in (Path.cwd(), run.resolve().parent.parent):
        uri = default_store(folder)
        if there := sqlite_has_run(sqlite_file(uri), run_id):
            return ScoreLog(uri, run_id)
        locked = uri if there is None and locked is None else locked
    return ScoreLog(locked, run_id) if locked is not None else None


def is_there(uri: str, run_id: str) -> bool | None:
    """Whether a store has this run; None: it is locked, so that nobody knows.

    To open a store with MLflow would make it, where that can be done.
    """
    if uri.startswith(_SERVERS):
        return True  # a server is nothing that we could make; it refuses a run that it does not have
    if (file := sqlite_file(uri)) is not None:
        return sqlite_has_run(file, run_id)
    if "://" not in uri or uri.startswith("file:"):
        folder = Path(uri.removeprefix("file://").removeprefix("file:"))
        return any(folder.glob(f"*/{run_id}/meta.yaml"))
    import sqlalchemy

    engine = sqlalchemy.create_engine(uri)
    with contextlib.closing(engine.connect()) as connection:
        query = sqlalchemy.text("SELECT 1 FROM runs WHERE run_uuid = :run")
        return connection.execute(query, {"run": run_id}).first() is not None


def sqlite_has_run(file: Path | None, run_id: str) -> bool | None:
    """Whether a file is a store that has this run; None: another process has locked it."""
    import sqlite3

    if file is None or not file.is_file():
        return False
    address = f"{file.resolve().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True, timeout=SECONDS_FOR_A_LOCK)) as store:
            return store.execute("SELECT 1 FROM runs WHERE run_uuid = ?", (run_id,)).fetchone() is not None
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # its lowest byte is the error, above it is why
        return None if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) else False  # not a store
