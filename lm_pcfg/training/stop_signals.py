"""SIGTERM, SIGINT, SIGUSR1 and SIGHUP ask for an orderly end: finish the step, save, exit 0. A second Ctrl-C ends now.

So does the death of the launcher, which would otherwise leave its workers behind: `accelerate launch` of one process
dies of a SIGTERM without a word to its worker, and no launcher can do anything about SIGKILL.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from lm_pcfg.training import launcher

# Of a Ctrl-C both the terminal and the launcher tell a worker: what comes so soon after the first is not a second one.
_SAME_INTERRUPT_SECONDS = 3.0


class StopSignals:
    """with StopSignals() as stop: ... if stop.received: save and leave."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

    def __init__(self) -> None:
        self._received: str | None = None
        self._first_at = 0.0
        launcher.follow()
        self._has_launcher = launcher.has_launcher()
        self._before: dict[signal.Signals, Any] = {}

    @property
    def received(self) -> str | None:
        """The signal's name, or what else asks to stop; None: go on."""
        if self._received is None and self._has_launcher and launcher.is_gone():
            self._received = "the death of its launcher"
        return self._received

    def __enter__(self) -> StopSignals:
        launcher.follow()
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
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._has_launcher else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._received is not None and number == signal.SIGINT:
            if not self._has_launcher or now - self._first_at > _SAME_INTERRUPT_SECONDS:
                raise KeyboardInterrupt
        elif self._received is None:
            self._received, self._first_at = signal.Signals(number).name, now
