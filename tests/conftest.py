"""Shared set-up: tests import `grammars.py` beside them, and leave one core to the rest of the machine."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# The same examples each time, so that a change is judged by what it changed; `make fuzz` looks for new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("fuzz", deadline=None, print_blob=True)
settings.load_profile("same")


def pytest_collection_finish(session: pytest.Session) -> None:
    """The longest begin before the first test, beside the others: a module's BEGIN_EARLY, {test: what starts it}."""
    if session.config.option.collectonly:
        return
    for item in session.items:
        starters = getattr(item.module, "BEGIN_EARLY", {})  # type: ignore[attr-defined]
        if start := starters.get(getattr(item, "originalname", item.name)):
            start()


@pytest.fixture(autouse=True)
def denormals_as_they_were() -> Iterator[None]:
    """A training in this process makes numbers below 1e-38 zero from then on; the next test shall not depend on it."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)
