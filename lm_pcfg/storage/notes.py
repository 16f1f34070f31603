"""The small files in a run folder, most of one line: what they say, and which are damaged."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from lm_pcfg.storage import durable

FINISHED, FAILED = "FINISHED", "FAILED"  # files that say why
STARTED_FROM, LAST_CHECKPOINT, TRACKING_ID = "started_from", "last_checkpoint", "mlflow_run_id"
ENVIRONMENT = "environment.json"
_LARGEST_ENVIRONMENT = 1 << 20  # bytes
_STEP = re.compile(r"step-\d+")
_SHOWN = 80  # characters of a name that is none
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


def read_tracking_id(folder: Path) -> str | None:
    """The id of a run in MLflow; None if it has none, or one that is damaged."""
    file = folder / TRACKING_ID
    run_id = read_note(file) if file.exists() else ""
    return run_id if re.fullmatch(r"[0-9A-Za-z_-]+", run_id) else None


def damaged_notes(folder: Path) -> list[str]:
    """Say which of the small files of a run cannot be read, or say what they never would."""
    whole = {name: bool(read_note(folder / name)) for name in (STARTED_FROM, LAST_CHECKPOINT, FINISHED, FAILED)}
    whole |= {TRACKING_ID: read_tracking_id(folder) is not None, ENVIRONMENT: _is_object(folder / ENVIRONMENT)}
    return [f"{folder / name} is damaged" for name in whole if os.path.lexists(folder / name) and not whole[name]]


def lost_checkpoint(folder: Path) -> str | None:
    """Say that the checkpoint which was written last is gone; None: it is there, or none is noted."""
    file, before = folder / LAST_CHECKPOINT, ""
    while (name := read_note(file)) != before:  # a training may replace both after the note is read
        if _STEP.fullmatch(name) and os.path.isdir(folder / "checkpoints" / name):
            return None
        before = name
    return f"{file} names {name[:_SHOWN]}, which is not there" if name else None


def _is_object(file: Path) -> bool:
    try:
        return isinstance(json.loads(durable.read_file(file, _LARGEST_ENVIRONMENT)), dict)
    except (OSError, ValueError, RecursionError):
        return False
