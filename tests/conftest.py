"""Shared set-up: tests import `grammars.py` beside them, and leave one core to the rest of the machine."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def denormals_as_they_were() -> Iterator[None]:
    """A training in this process makes numbers below 1e-38 zero from then on; the next test shall not depend on it."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)
