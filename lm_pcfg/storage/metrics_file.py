"""metrics.jsonl, the truth about a run: one JSON object a line, each written as it happens.

    {"step": 12, "time": 1760000000.123, "train/loss": 4.56, ..., "check": "9ae0daaf"}

Every line is JSON as the standard has it; a value that is not finite is the string "NaN", "Infinity" or "-Infinity".
`check` is the CRC-32 of the line as it would be without it. Lines of earlier versions have none.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from lm_pcfg.console import warn
from lm_pcfg.errors import UserError
from lm_pcfg.storage import durable

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_CHECK = re.compile(rb'(.*), "check": "([0-9a-f]{8})"\}', re.DOTALL)
_MOST_WAITING_LINES = 100_000
#: What is counted, timed or summed by those who read it, so that no sum overflows.
_COUNTED = ("step", "time", "epoch", "train/seconds", "train/words", "train/words_per_second", "train/skipped",
            "valid/impossible", "valid/tokens")  # fmt: skip
_LARGEST_COUNT = 2**53


class MetricsFile:
    """Appends lines. A disk that is full for a while stops no training and costs no line: they are written later."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path = path
        self._warn = warn
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING_LINES)
        self._failing = self._sync_failed = False
        self._descriptor: int | None = None
        self._lines, self._hash = 0, hashlib.sha256()  # of the lines so far

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        own = {"step": step, "time": round(time.time(), 3)}
        line = _checked(own | {name: _plain(value) for name, value in metrics.items()} | own)
        self._count(line)
        self._waiting.append(line)
        self._write_waiting()

    def mark(self) -> dict[str, Any]:
        """Return what a checkpoint remembers of the lines so far: how many they are, and their hash."""
        return {"lines": self._lines, "sha256": self._hash.hexdigest()}

    def sync(self) -> None:
        """Make the lines so far durable; a thread may do it. A disk that cannot is told, and stops no training."""
        try:
            durable.fsync(self.path)
            durable.fsync(self.path.parent)
        except FileNotFoundError:
            pass  # no line yet, or told when it could not be written
        except OSError as error:
            if not self._sync_failed:
                self._warn(f"{self.path} may not survive a power cut: {error.strerror}")
            self._sync_failed = True

    def truncate_after(self, step: int, recorded: Mapping[str, Any] | None = None) -> int:
        """Drop the lines of later steps, which a resumed run writes again, and broken ones; returns how many.

        recorded: the `mark` of the checkpoint. If the lines up to it are not there as they were, that is told.
        """
        self.close()
        lines = _read(self.path).split(b"\n")
        lines = [line + b"\n" for line in (lines if lines[-1] else lines[:-1])]
        if recorded is not None and _hash_of(lines[: recorded["lines"]]) == recorded["sha256"]:
            kept = lines[: recorded["lines"]]
        else:
            parsed = [(line, _parse(line)) for line in lines]
            kept = [line for line, content in parsed if content is not None and content["step"] <= step]
            if recorded is not None:
                lost = recorded["lines"] - len(kept)
                what = f"{lost} of {recorded['lines']} lines are missing" if lost > 0 else "they were changed"
                self._warn(f"{self.path} is not as it was written up to step {step}: {what}; training goes on")
        if kept != lines:
            durable.replace_file(self.path, b"".join(kept))
        self._lines, self._hash = 0, hashlib.sha256()
        for line in kept:
            self._count(line)
        return len(lines) - len(kept)

    def set_aside(self) -> Path | None:
        """Keep the lines of a run that begins again, beside its new ones; returns where, None if there are none."""
        self.close()
        if not self.path.exists():
            return None
        names = (self.path.with_name(f"{self.path.stem}-{number}{self.path.suffix}") for number in count(1))
        beside = next(name for name in names if not os.path.lexists(name))
        os.replace(self.path, beside)
        durable.fsync(self.path.parent)
        return beside

    def _count(self, line: bytes) -> None:
        self._lines += 1
        self._hash.update(line)

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


def read_metrics(path: Path, warn: Callable[[str], None] = warn) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file, even if it is being written; NaN and infinities are floats.

    Lines that are damaged or cut off are left out, and told at the end.
    """
    damaged = []
    with durable.open_regular(path) as file:
        for number, line in enumerate(file, start=1):
            content = _parse(line)
            if content is None:
                damaged.append(number)
            else:
                yield {name: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for name, v in content.items()}
    if damaged:
        which = f"line {damaged[0]} is" if len(damaged) == 1 else f"{len(damaged)} lines from line {damaged[0]} on are"
        warn(f"{path}: {which} damaged, and left out")


def check_metrics(path: Path, recorded: Mapping[str, Any] | None = None) -> tuple[int, list[str]]:
    """Return the number of lines of a metrics file, and in words what is wrong with it.

    recorded: the `mark` of the newest checkpoint.
    """
    problems: list[str] = []
    lines: list[bytes] = []
    if path.is_file():
        with path.open("rb") as file:
            lines = list(file)
        deque(read_metrics(path, problems.append), maxlen=0)
    elif os.path.lexists(path):
        problems.append(f"{path} is not a regular file")
    if recorded is not None and _hash_of(lines[: recorded["lines"]]) != recorded["sha256"]:
        lost = recorded["lines"] - len(lines)
        what = f"{lost} of {recorded['lines']} lines are missing" if lost > 0 else "lines were lost, changed or added"
        problems.append(f"{path} is not what the newest checkpoint remembers: {what}")
    return len(lines), problems


def _checked(line: dict[str, Any]) -> bytes:
    """Format a line, with its check at the end."""
    text = json.dumps(line, allow_nan=False).encode()
    return b'%s, "check": "%08x"}\n' % (text[:-1], zlib.crc32(text))


def _read(path: Path) -> bytes:
    """Read all lines; none if there is no file."""
    try:
        with durable.open_regular(path) as file:
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:  # a pipe, a folder, a file of somebody else
        raise UserError(f"{path} cannot be read: {durable.reason(error)}; move it away, and resume again") from None


def _hash_of(lines: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()


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
    """Parse a line; None for one that a crash cut off, that is damaged, or that is not ours."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or type(content.get("step")) is not int or not _is_plausible(content):
        return None
    if "check" in content:
        match = _CHECK.fullmatch(line.removesuffix(b"\n"))
        if match is None or b"%08x" % zlib.crc32(match[1] + b"}") != match[2]:
            return None
        del content["check"]
    return content


def _is_plausible(content: dict[str, Any]) -> bool:
    """Whether all numbers of a line are such as a training writes, so that one can compute with them."""
    for name, value in content.items():
        if not isinstance(value, int | float):
            continue
        if not -sys.float_info.max <= value <= sys.float_info.max:  # also of NaN; the right ones are words
            return False
        if name.endswith("/ppl") and value <= 0:
            return False
        if name in _COUNTED and abs(value) > _LARGEST_COUNT:
            return False
    return content["step"] >= 0


def _open_after_last_whole_line(path: Path) -> int:
    """Open for appending. Cut off half a line that a crash left behind: it would spoil the next one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
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
