"""The small files of one line in a run folder, and what those say that tell how a run ended by itself."""

from __future__ import annotations

import os
from pathlib import Path

from lm_pcfg.storage import durable

FINISHED, FAILED = "FINISHED", "FAILED"  # files that say why
_LARGEST_NOTE = 1 << 16  # bytes


def read_note(file: Path) -> str:
    """Return the line of a small file; nothing if it is damaged."""
    try:
        text = os.fsdecode(durable.read_file(file, _LARGEST_NOTE)).removesuffix("\n")
    except OSError:
        return ""
    return text if text.isprintable() else ""


def failure_of(folder: Path) -> str | None:
    """Say why a run has failed for good, so that no restart continues it; None: it has not."""
    file = folder / FAILED
    return (read_note(file) or "its reason cannot be read") if os.path.lexists(file) else None
