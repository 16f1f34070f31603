"""metrics.jsonl, the truth about a run: one JSON object a line, each written as it happens.

    {"step": 12, "time": 1760000000.123, "train/loss": 4.56, ...}

Every line is JSON as the standard has it; a value that is not finite is the string "NaN", "Infinity" or "-Infinity".
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lm_pcfg.storage import durable

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MOST_WAITING_LINES = 100_000


class MetricsFile:
    """Appends lines. A disk that is full for a while stops no training and costs no line: they are written later."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path = path
        self._warn = warn
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING_LINES)
        self._failing = False
        self._descriptor: int | None = None

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        own = {"step": step, "time": round(time.time(), 3)}
        line = own | {name: _plain(value) for name, value in metrics.items()} | own
        self._waiting.append((json.dumps(line, allow_nan=False) + "\n").encode())
        self._write_waiting()

    def truncate_after(self, step: int) -> int:
        """Drop the lines of later steps, which a resumed run writes again, and broken ones; returns how many."""
        self.close()
        if not self.path.exists():
            return 0
        kept, dropped = [], 0
        for line in self.path.read_bytes().splitlines():
            content = _parse(line)
            if content is None or content["step"] > step:
                dropped += 1
            else:
                kept.append(line + b"\n")
        if dropped:
            # A fixed name: a run has one writer, and what a crash leaves here the next resume overwrites.
            beside = self.path.with_name(f".{self.path.name}.new")
            beside.write_bytes(b"".join(kept))
            durable.fsync(beside)
            os.replace(beside, self.path)
            durable.fsync(self.path.parent)
        return dropped

    def close(self) -> None:
        if self._waiting:
            self._write_waiting()
        if self._waiting:
            self._warn(f"{len(self._waiting)} lines of {self.path} are lost")
            self._waiting.clear()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write_waiting(self) -> None:
        try:
            if self._descriptor is None:
                self._descriptor = _open_after_last_whole_line(self.path)
            while self._waiting:
                _write_whole(self._descriptor, self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._failing:
                self._warn(f"cannot write {self.path}: {error.strerror}; its lines wait in memory until it works again")
            self._failing = True
        else:
            self._failing = False


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file, even if it is being written or was cut off; NaN and infinities are floats."""
    with path.open("rb") as file:
        for line in file:
            content = _parse(line)
            if content is not None:
                yield {name: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for name, v in content.items()}


def _plain(value: Any) -> Any:
    """Convert a value for JSON: tensors and numpy scalars to numbers, what is not finite to its name."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _parse(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None for one that a crash cut off, or that is not ours."""
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) and isinstance(content.get("step"), int) else None


def _open_after_last_whole_line(path: Path) -> int:
    """Open for appending. Cut off half a line that a crash left behind: it would spoil the next one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        end = os.fstat(descriptor).st_size
        tail = os.pread(descriptor, min(end, 1 << 20), max(0, end - (1 << 20)))
        if tail and not tail.endswith(b"\n"):
            last_line = tail[tail.rfind(b"\n") + 1 :]
            if _parse(last_line) is None:
                os.ftruncate(descriptor, end - len(last_line))
            else:  # only its end is missing
                _write_whole(descriptor, b"\n")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _write_whole(descriptor: int, line: bytes) -> None:
    """Write the whole line or nothing of it: a disk that fills up must not leave half a line."""
    before = os.fstat(descriptor).st_size
    written = 0
    try:
        while written < len(line):
            written += os.write(descriptor, line[written:])
    except OSError:
        if written:
            os.ftruncate(descriptor, before)
        raise
