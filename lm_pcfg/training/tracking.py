"""MLflow beside the training, never in its way.

Everything that touches MLflow, its import included, happens in a daemon thread that a queue feeds. Whatever fails there
is told once; metrics wait in memory, are sent again from time to time, and what is never delivered is counted. The file
metrics.jsonl (metrics_file.py) is the truth, MLflow the window on it.

The store is MLFLOW_TRACKING_URI, or a sqlite file in `mlruns/` of the working folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import posixpath
import queue
import re
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from lm_pcfg.training.environment import environment_artifacts

Status = Literal["FINISHED", "FAILED", "KILLED"]

_MOST_WAITING_METRICS = 200_000
_METRICS_PER_CALL = 1000  # MLflow's own limits
_SETTINGS_PER_CALL = 100
_LONGEST_NAME = 250
_LONGEST_VALUE = 6000

_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # standard output is for results
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # MLflow would try for minutes; here a later attempt follows anyway, and the end of a run must not wait.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
}


class Tracker:
    """One run in MLflow. `log` neither blocks nor raises; `finish` takes its timeout at most.

    `warn` and `remember_run_id` are called from the thread as well. A run_id that the store no longer has gives a
    warning and a new run.
    """

    def __init__(
        self,
        *,
        run_name: str,
        experiment: str = "lm_pcfg",
        run_id: str | None,
        parameters: Mapping[str, Any],
        artifacts: Mapping[str, str],
        tags: Mapping[str, str] | None = None,
        warn: Callable[[str], None],
        remember_run_id: Callable[[str], None],
        flush_seconds: float = 5.0,
        retry_seconds: float = 30.0,
    ) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        local = Path.cwd() / "mlruns"
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{local / 'mlflow.db'}"
        self._run = _MlflowRun(
            uri=self.uri,
            artifact_location=None if os.environ.get("MLFLOW_TRACKING_URI") else (local / "artifacts").as_uri(),
            experiment=experiment,
            run_name=run_name,
            run_id=run_id,
            parameters=dict(parameters),
            artifacts=dict(artifacts),
            tags=dict(tags or {}),
            warn=warn,
            remember_run_id=remember_run_id,
        )
        self._warn = warn
        self._flush_seconds = flush_seconds
        self._retry_seconds = retry_seconds
        # A SimpleQueue may be fed from anywhere, even from a signal handler that interrupted another `put`.
        self._queue: queue.SimpleQueue[tuple[int, int, dict[str, float]] | Status] = queue.SimpleQueue()
        self._waiting: deque[tuple[str, float, int, int]] = deque()  # name, value, time, step; the thread's own
        # Counters, each written by one side only, so that no lock is needed.
        self._accepted = self._refused = 0  # by log
        self._delivered = self._rejected = 0  # by the thread
        self._failure: str | None = None
        self._all_done = False
        self._finishing = False
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over numbers; what is no number is left to metrics.jsonl."""
        numbers = {}
        for name, value in metrics.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, RuntimeError):  # the last is what a tensor of several elements raises
                continue
        waiting = self._accepted - self._delivered - self._rejected
        if self._finishing or waiting + len(numbers) > _MOST_WAITING_METRICS:
            self._refused += len(numbers)
        elif numbers:
            self._accepted += len(numbers)
            self._queue.put((int(step), int(time.time() * 1000), numbers))

    def finish(self, status: Status, timeout: float = 20.0) -> None:
        """Deliver what waits and set the run's status, within the timeout; tell what was lost."""
        if self._finishing:
            return
        self._finishing = True
        self._queue.put(status)
        self._thread.join(timeout)
        # Read once: a thread that is still at work may go on delivering.
        lost = self._accepted + self._refused - self._delivered
        reason = self._failure or (f"no answer within {timeout:g} s" if self._thread.is_alive() else "unknown reason")
        if lost:
            self._warn(f"MLflow: {lost} metrics lost, all are in metrics.jsonl ({reason})")
        elif not self._all_done:
            self._warn(f"MLflow: its record of this run is incomplete ({reason})")

    def _work(self) -> None:
        status: Status | None = None
        attempt_at = time.monotonic()  # at once, so that the run is seen in MLflow from its beginning
        healthy = True
        while status is None:
            try:
                item = self._queue.get(timeout=max(0.0, attempt_at - time.monotonic()))
            except queue.Empty:
                pass
            else:
                if isinstance(item, str):
                    status = item
                else:
                    step, when, numbers = item
                    self._waiting.extend((_valid_name(name), value, when, step) for name, value in numbers.items())
            many = healthy and len(self._waiting) >= _METRICS_PER_CALL
            if status is not None or many or time.monotonic() >= attempt_at:
                healthy = self._attempt(status)
                attempt_at = time.monotonic() + (self._flush_seconds if healthy else self._retry_seconds)

    def _attempt(self, status: Status | None) -> bool:
        """Do all that is due. A part that fails (artifacts nobody may write, say) does not hold up the others."""
        parts: list[Callable[[], None]] = [self._deliver_metrics, self._run.log_settings, self._run.log_artifacts]
        if status is not None:
            parts.append(lambda: self._run.end(status))
        healthy = True
        try:
            self._run.begin()
        except Exception as error:  # whatever it is, training goes on
            self._note_failure(error)
            return False
        for part in parts:
            try:
                part()
            except Exception as error:
                self._note_failure(error)
                healthy = False
        self._all_done = healthy and status is not None
        return healthy

    def _deliver_metrics(self) -> None:
        while self._waiting:
            batch = list(itertools.islice(self._waiting, _METRICS_PER_CALL))
            try:
                self._run.log_metrics(batch)
                self._delivered += len(batch)
            except Exception as error:
                if not _refused_for_good(error):
                    raise
                self._rejected += len(batch)  # sending it again would hold up all that comes after it
                self._note_failure(error)
            for _ in batch:
                self._waiting.popleft()

    def _note_failure(self, error: Exception) -> None:
        first = self._failure is None
        self._failure = _one_line(error)
        if first and not self._finishing:  # finish tells it otherwise
            self._warn(
                f"MLflow tracking fails and training goes on; retried every {self._retry_seconds:g} s: {self._failure}"
            )


class NoTracker:
    """Tracking switched off, or a rank other than 0."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def finish(self, status: Status, timeout: float = 20.0) -> None:
        pass


class _MlflowRun:
    """All calls of MLflow; used by the thread alone. Each method can be called again until it has succeeded."""

    def __init__(
        self,
        *,
        uri: str,
        artifact_location: str | None,
        experiment: str,
        run_name: str,
        run_id: str | None,
        parameters: dict[str, Any],
        artifacts: dict[str, str],
        tags: dict[str, str],
        warn: Callable[[str], None],
        remember_run_id: Callable[[str], None],
    ) -> None:
        self._uri = uri
        self._artifact_location = artifact_location
        self._experiment = experiment
        self._run_name = run_name
        self._wanted_run_id = run_id
        self._parameters: dict[str, str] | None = _flatten(parameters)
        self._artifacts: dict[str, str] | None = artifacts
        self._tags = {_valid_name(name): str(value)[:_LONGEST_VALUE] for name, value in tags.items()}
        self._warn = warn
        self._remember_run_id = remember_run_id
        self._client: Any = None
        self._experiment_id: str | None = None
        self._run_id: str | None = None
        self._earlier_parameters: dict[str, str] = {}
        self._artifact_folder = ""

    def begin(self) -> None:
        """Open the store, find or create experiment and run."""
        if self._run_id is not None:
            return
        if self._experiment_id is None:
            with _alone_with_sqlite(self._uri):
                self._client = _quiet_client(self._uri)
                self._experiment_id = self._find_or_create_experiment()
        self._run_id = self._continue_run() or self._create_run()
        try:
            self._remember_run_id(self._run_id)
        except Exception as error:  # the caller's file; without it a resumed run starts a new MLflow run
            self._warn(f"the MLflow run {self._run_id} could not be remembered for a resume: {_one_line(error)}")

    def _find_or_create_experiment(self) -> str:
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is not None:
            return experiment.experiment_id
        try:
            return self._client.create_experiment(self._experiment, artifact_location=self._artifact_location)
        except Exception:
            experiment = self._client.get_experiment_by_name(self._experiment)
            if experiment is None:
                raise
            return experiment.experiment_id  # another run created it in between

    def _continue_run(self) -> str | None:
        if self._wanted_run_id is None:
            return None
        try:
            run = self._client.get_run(self._wanted_run_id)
        except Exception as error:
            if not _refused_for_good(error):
                raise
            run = None
        if run is None or run.info.lifecycle_stage != "active":
            self._warn(f"MLflow has no run {self._wanted_run_id} any more; a new one begins")
            self._wanted_run_id = None
            return None
        self._client.update_run(self._wanted_run_id, status="RUNNING")
        self._earlier_parameters = dict(run.data.params)
        # The first files stay: how the run began is worth keeping.
        self._artifact_folder = time.strftime("resumed-%Y%m%d-%H%M%S/")
        return self._wanted_run_id

    def _create_run(self) -> str:
        return self._client.create_run(self._experiment_id, run_name=self._run_name).info.run_id

    def log_settings(self) -> None:
        """Parameters, tags. MLflow lets no parameter change: what a resume changes becomes a tag `resumed.<name>`."""
        if self._parameters is None:
            return
        from mlflow.entities import Param, RunTag

        new = {name: value for name, value in self._parameters.items() if name not in self._earlier_parameters}
        changed = {
            f"resumed.{name}"[:_LONGEST_NAME]: value
            for name, value in self._parameters.items()
            if self._earlier_parameters.get(name, value) != value
        }
        settings = [Param(*item) for item in new.items()] + [RunTag(*item) for item in (self._tags | changed).items()]
        for start in range(0, len(settings), _SETTINGS_PER_CALL):
            chunk = settings[start : start + _SETTINGS_PER_CALL]
            self._client.log_batch(
                self._run_id,
                params=[setting for setting in chunk if isinstance(setting, Param)],
                tags=[setting for setting in chunk if isinstance(setting, RunTag)],
            )
        self._parameters = None

    def log_artifacts(self) -> None:
        if self._artifacts is None:
            return
        for name, text in (environment_artifacts() | self._artifacts).items():
            self._client.log_text(self._run_id, text, self._artifact_folder + name)
        self._artifacts = None

    def log_metrics(self, batch: list[tuple[str, float, int, int]]) -> None:
        from mlflow.entities import Metric

        self._client.log_batch(self._run_id, metrics=[Metric(*metric) for metric in batch])

    def end(self, status: Status) -> None:
        self._client.set_terminated(self._run_id, status)


def _quiet_client(uri: str) -> Any:
    from mlflow import MlflowClient  # 2 s, hence here in the thread

    # MLflow, alembic and urllib3 tell their story on standard error; drop what this thread makes them say.
    this_thread = threading.get_ident()

    def not_from_here(record: logging.LogRecord) -> bool:
        return record.thread != this_thread

    for name in ("mlflow", "alembic", "sqlalchemy.engine"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(not_from_here)
    logging.getLogger("urllib3.connectionpool").addFilter(not_from_here)
    return MlflowClient(tracking_uri=uri)


@contextlib.contextmanager
def _alone_with_sqlite(uri: str) -> Iterator[None]:
    """Hold off other runs while the sqlite store is created, and find out quickly whether it can be written.

    MLflow's own lock lies in the temporary folder, so it knows nothing of other hosts; and it would try for 100 s to
    open a file that cannot be opened.
    """
    path = re.sub(r"\?.*", "", uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or path in ("", ":memory:"):
        yield
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as lock_file:
        with contextlib.suppress(OSError):  # a file system without locks: MLflow's own has to do
            fcntl.flock(lock_file, fcntl.LOCK_EX)
        with contextlib.closing(sqlite3.connect(path, timeout=10.0)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
        yield


def _refused_for_good(error: Exception) -> bool:
    """Whether the store understood and said no, so that asking again is no use."""
    return getattr(error, "error_code", None) in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"://[^/@\s]+@", "://", text)  # a password in the address
    return text if len(text) <= 300 else text[:297] + "..."


def _valid_name(name: str) -> str:
    """MLflow takes letters, digits and `_ - . : / space`, and only what reads as a plain relative path."""
    name = posixpath.normpath(re.sub(r"[^\w./: -]", "_", name)).lstrip("/.") or "_"
    return name[:_LONGEST_NAME].rstrip("/")


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """{"model": {"nt": 8}} as {"model.nt": "8"}."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            flat[_valid_name(f"{prefix}{name}")] = text[:_LONGEST_VALUE]
    return flat
