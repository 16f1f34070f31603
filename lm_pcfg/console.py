"""What a person sees on standard error: messages, and progress as a bar in a terminal or as plain lines elsewhere."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

# What a terminal obeys instead of showing it, or takes for the end of a line; names and files may hold any of it.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


_left_to_main = False  # this is not the main process, and what it has to say the main one says, too


def leave_to_main() -> None:
    """Drop the warnings and the progress of this process. An error is told all the same."""
    global _left_to_main
    _left_to_main = True


def say(message: str) -> None:
    """Print a line on standard error, control characters as escapes; standard output is for results."""
    print(_CONTROL.sub(lambda found: repr(found[0])[1:-1], message), file=sys.stderr, flush=True)


def warn(message: str) -> None:
    if not _left_to_main:
        say(f"warning: {message}")


def duration(seconds: float) -> str:
    """1:05:09, 5:09, 9 s"""
    seconds = int(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Advance(Protocol):
    def __call__(self, amount: int, detail: str = "", /) -> None:
        """Count so much more as done, and show the detail at the end of the line; with 0, it is what is done now."""


def unseen(amount: int, detail: str = "", /) -> None:
    """The progress of what nobody watches."""


class Progress(Protocol):
    @property
    def advance(self) -> Advance: ...

    def message(self, text: str) -> None:
        """Print a line of its own, above the bar."""


class _Silent:
    advance = staticmethod(unseen)

    def message(self, text: str) -> None:
        if not _left_to_main:
            say(text)


class _Plain:
    """Prints a line now and then, for log files."""

    def __init__(self, title: str, total: int | None, done: int, seconds_between: float):
        self.title, self.total, self.done, self._between = title, total, done, seconds_between
        self._first_done, self._start = done, time.monotonic()
        self._last_line, self._detail, self._told_now = self._start, "", False

    def advance(self, amount: int, detail: str = "", /) -> None:
        self.done += amount
        of_now = bool(detail) and not amount
        if not of_now:
            self._detail = detail or self._detail
        now = time.monotonic()
        if now - self._last_line >= self._between or (of_now and not self._told_now):
            self._last_line, self._told_now = now, self._told_now or of_now
            self._line(now - self._start, detail if of_now else self._detail)

    def _line(self, passed: float, detail: str) -> None:
        rate = (self.done - self._first_done) / passed if passed > 0 else 0.0
        parts = [f"{self.title} {self.done}", detail]
        if self.total is not None:
            left = duration((self.total - self.done) / rate) if rate > 0 else "?"
            parts = [f"{self.title} {self.done}/{self.total}", detail, f"{left} left"]
        say("  ".join(part for part in parts if part))

    def message(self, text: str) -> None:
        say(text)


@contextmanager
def progress(
    title: str, total: int | None, *, done: int = 0, show: bool = True, seconds_between_lines: float = 10.0
) -> Iterator[Progress]:
    """Show the progress of `total` units (None: unknown); show=False is for all ranks but one."""
    if not show or _left_to_main:
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
            _now = False  # whether the detail is of what is done now

            def advance(self, amount: int, detail: str = "", /) -> None:
                bars.advance(task, amount)
                if detail or (self._now and amount):
                    bars.update(task, detail=detail)
                    self._now = not amount

            def message(self, text: str) -> None:
                bars.console.print(text, highlight=False, markup=False)

        with bars:
            yield _Bar()
