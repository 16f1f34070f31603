"""Shared set-up of all tests: where they import from, their examples, and how they are spread over processes."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

import watchdog

watchdog.start()

# Each process of pytest-xdist has a core to itself. Read when PyTorch is imported, which nothing here does.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples each time, so that a change is judged by what it changed; `make fuzz` looks for new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("fuzz", deadline=None, print_blob=True)
settings.load_profile("same")


#: Files that take longest. Each file runs in one process, so that no process is left with one of these at the end.
BEGIN_WITH = [
    "readme",
    "manual",
    "engines",
    "slurm",
    "faults",
    "triton",
    "triton_compile",
    "two_hosts",
    "search",
    "cli",
    "training",
    "resumed_training",
    "zero",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = {f"test_{name}": number for number, name in enumerate(BEGIN_WITH)}
    items.sort(key=lambda item: first.get(item.path.stem, len(first)))


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """A training in this process makes numbers below 1e-38 zero and chooses threads; the next test shall not see it.

    Two processes of two threads each on two cores wait for each other: tests have taken 70 times as long.
    """
    yield
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.set_flush_denormal(False)
        threads = int(os.environ.get("OMP_NUM_THREADS", 0))
        if threads and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for most tests: creating its tables takes two seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def store(shared_store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A client of the store that trackers of this test write to."""
    from mlflow_store import client

    monkeypatch.chdir(tmp_path)  # where MLflow puts the artifacts of a store of the user's own
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shared_store)
    return client(shared_store)
