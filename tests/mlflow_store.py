"""What tests of MLflow share: a tracker whose warnings are noted, and looking into a store."""

import time
from collections.abc import Callable
from typing import Any

from lm_pcfg.training.tracking import Tracker

DEAD_SERVER = "http://127.0.0.1:9"


class Recorder:
    """What a tracker told its training."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.run_ids: list[str] = []

    def tracker(self, **overrides: Any) -> Tracker:
        arguments: dict[str, Any] = {
            "run_name": "test",
            "run_id": None,
            "parameters": {"model": {"nonterminals": 8, "root": "all"}, "lr": 0.001, "sizes": [1, 2]},
            "artifacts": {"config.yaml": "lr: 0.001\n", "vocabulary.txt": "sha256 0123\n"},
            "tags": {"engine": "accelerate"},
            "warn": self.warnings.append,
            "remember_run_id": self.run_ids.append,
        }
        return Tracker(**(arguments | overrides))


def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def history(client: Any, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
