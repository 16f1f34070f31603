"""MLflow beside the training, never in its way.

Everything that touches MLflow, its import included, happens in a daemon thread that a queue feeds. A failure there is
told once; metrics wait in memory and are sent again from time to time, and what is never delivered is counted. The file
metrics.jsonl (storage/metrics_file.py) is the truth, MLflow the window on it.

The store is MLFLOW_TRACKING_URI, or a sqlite file in `mlruns/` of the working folder. The experiment is
MLFLOW_EXPERIMENT_NAME, or `lm_pcfg`.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lm_pcfg.console import warn
from lm_pcfg.corpus.pieces import AnyVocabulary
from lm_pcfg.settings import Settings
from lm_pcfg.settings_file import dump_yaml
from lm_pcfg.storage.run_folder import RunFolder
from lm_pcfg.training.mlflow_run import METRICS_PER_CALL, MlflowRun, Status, one_line, refused_for_good, valid_name

_MOST_WAITING_METRICS = 200_000
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # standard output is for results
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # MLflow would try for minutes; here a later attempt follows anyway, and the end of a run must not wait.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
}


def default_store(folder: Path) -> str:
    """The store of trainings that are started in a folder."""
    return f"sqlite:///{folder / 'mlruns' / 'mlflow.db'}"


class Tracker:
    """One run in MLflow. `log` neither blocks nor raises; `finish` takes its timeout at most.

    `warn` and `remember_run_id` are called from the thread as well. A run_id that the store no longer has gives a
    warning and a new run.
    """

    def __init__(
        self,
        *,
        run_name: str,
        run_id: str | None,
        parameters: Mapping[str, Any],
        artifacts: Mapping[str, str],
        tags: Mapping[str, str] | None = None,
        warn: Callable[[str], None],
        remember_run_id: Callable[[str], None],
        flush_seconds: float = 5.0,
        retry_seconds: float = 30.0,
    ) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        local = Path.cwd() / "mlruns"
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or default_store(Path.cwd())
        self._run = MlflowRun(
            uri=self.uri,
            artifact_location=None if os.environ.get("MLFLOW_TRACKING_URI") else (local / "artifacts").as_uri(),
            experiment=os.environ.get("MLFLOW_EXPERIMENT_NAME") or "lm_pcfg",
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
                    self._waiting.extend((valid_name(name), value, when, step) for name, value in numbers.items())
            many = healthy and len(self._waiting) >= METRICS_PER_CALL
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
            batch = list(itertools.islice(self._waiting, METRICS_PER_CALL))
            try:
                self._run.log_metrics(batch)
                self._delivered += len(batch)
            except Exception as error:
                if not refused_for_good(error):
                    raise
                self._rejected += len(batch)  # sending it again would hold up all that comes after it
                self._note_failure(error)
            for _ in batch:
                self._waiting.popleft()

    def _note_failure(self, error: Exception) -> None:
        first = self._failure is None
        self._failure = one_line(error)
        if first and not self._finishing:  # finish tells it otherwise
            self._warn(
                f"MLflow tracking fails and training goes on; retried every {self._retry_seconds:g} s: {self._failure}"
            )


class NoTracker:
    """Does nothing: tracking is off, or this is not rank 0."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def finish(self, status: Status, timeout: float = 20.0) -> None:
        pass


def track(settings: Settings, folder: RunFolder, vocabulary: AnyVocabulary, is_main: bool) -> Tracker | NoTracker:
    """Tell MLflow of a run: its settings, its vocabulary, its folder. Only the main process does."""
    if not (is_main and settings.tracking.mlflow):
        return NoTracker()
    of_vocabulary = {
        "types": len(vocabulary),
        "unit": vocabulary.unit,
        "training_unknown_share": vocabulary.training_unknown_share,
    }
    return Tracker(
        run_name=folder.path.name,
        run_id=folder.tracking_id,
        parameters=settings.model_dump(mode="json") | {"vocabulary": of_vocabulary},
        artifacts={"config.yaml": dump_yaml(settings), "vocabulary_hash.txt": vocabulary.hash + "\n"},
        tags={"run_folder": str(folder.path.resolve()), "vocabulary_hash": vocabulary.hash},
        warn=warn,
        remember_run_id=folder.remember_tracking_id,
    )
