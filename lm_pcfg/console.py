"""What a person sees on standard error: messages, and progress as a bar in a terminal or as plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


def say(message: str) -> None:
    """Print a line on standard error; standard output is for results."""
    print(message, file=sys.stderr, flush=True)


def warn(message: str) -> None:
    say(f"warning: {message}")


def duration(seconds: float) -> str:
    """1:05:09, 5:09, 9 s"""
    seconds = int(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Progress(Protocol):
    def advance(self, amount: int, detail: str = "") -> None:
        """Count so much more as done, and show the detail at the end of the line."""

    def message(self, text: str) -> None:
        """Print a line of its own, above the bar."""


class _Silent:
    def advance(self, amount: int, detail: str = "") -> None:
        pass

    def message(self, text: str) -> None:
        say(text)


class _Plain:
    """Prints a line now and then, for log files."""

    def __init__(self, title: str, total: int | None, done: int, seconds_between: float):
        self.title, self.total, self.done, self._between = title, total, done, seconds_between
        self._first_done, self._start = done, time.monotonic()
        self._last_line, self._detail = self._start, ""

    def advance(self, amount: int, detail: str = "") -> None:
        self.done += amount
        self._detail = detail or self._detail
        now = time.monotonic()
        if now - self._last_line >= self._between:
            self._last_line = now
            self._line(now - self._start)

    def _line(self, passed: float) -> None:
        rate = (self.done - self._first_done) / passed if passed > 0 else 0.0
        parts = [f"{self.title} {self.done}", self._detail]
        if self.total is not None:
            left = duration((self.total - self.done) / rate) if rate > 0 else "?"
            parts = [f"{self.title} {self.done}/{self.total}", self._detail, f"{left} left"]
        say("  ".join(part for part in parts if part))

    def message(self, text: str) -> None:
        say(text)


@contextmanager
def progress(
    title: str, total: int | None, *, done: int = 0, show: bool = True, seconds_between_lines: float = 10.0
) -> Iterator[Progress]:
    """Show the progress of `total` units (None: unknown); show=False is for all ranks but one."""
    if not show:
        yield _Silent()
    elif not sys.stderr.isatty():
        yield _Plain(title, total, done, seconds_between_lines)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        bars = Bars(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}"), console=Console(stderr=True),
            redirect_stdout=False, redirect_stderr=False,  # results must reach standard output
        )  # fmt: skip
        task = bars.add_task(title, total=total, completed=done, detail="")

        class _Bar:
            def advance(self, amount: int, detail: str = "") -> None:
                bars.advance(task, amount)
                if detail:
                    bars.update(task, detail=detail)

            def message(self, text: str) -> None:
                bars.console.print(text, highlight=False, markup=False)

        with bars:
            yield _Bar()
