"""SIGTERM, SIGINT, SIGUSR1 and SIGHUP ask for an orderly end: finish the step, save, exit 0. A second Ctrl-C ends now.

So does the death of the launcher, which would otherwise leave its workers behind: `accelerate launch` of one process
dies of a SIGTERM without a word to its worker, and no launcher can do anything about SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

# Of a Ctrl-C both the terminal and the launcher tell a worker: what comes so soon after the first is not a second one.
_SAME_INTERRUPT_SECONDS = 3.0


def has_launcher() -> bool:
    """Whether `accelerate launch` or torchrun started this process (as far as the environment tells)."""
    return any(name in os.environ for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"))


_launcher: int | None = None  # its process, as it was when this one began


def follow_launcher() -> None:
    """Have the system send this process a SIGTERM when its launcher dies (Linux). Call it as early as can be."""
    global _launcher
    if not has_launcher():
        return
    if _launcher is None:
        _launcher = os.getppid()
    if not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


class StopSignals:
    """with StopSignals() as stop: ... if stop.received: save and leave."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

    def __init__(self) -> None:
        self._received: str | None = None
        self._first_at = 0.0
        follow_launcher()
        self._launcher = _launcher if has_launcher() else None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def received(self) -> str | None:
        """The signal's name, or what else asks to stop; None: go on."""
        if self._received is None and self._launcher is not None and os.getppid() != self._launcher:
            self._received = "the death of its launcher"
        return self._received

    def __enter__(self) -> StopSignals:
        follow_launcher()
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in self.SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:  # nohup
                    continue
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A worker leaves now, with its own status and its own last words, whatever the launcher sends after it.
        leaving = self._launcher is not None
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if leaving else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._received is not None and number == signal.SIGINT:
            if self._launcher is None or now - self._first_at > _SAME_INTERRUPT_SECONDS:
                raise KeyboardInterrupt
        elif self._received is None:
            self._received, self._first_at = signal.Signals(number).name, now
