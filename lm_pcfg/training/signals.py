"""SIGTERM, SIGINT, SIGUSR1 and SIGHUP ask for an orderly end: finish the step, save, exit 0. A second Ctrl-C ends now.

The death of the launcher asks for it, too, or workers would outlive it: `accelerate launch` of one process dies of a
SIGTERM without telling its worker, and no launcher can do anything about SIGKILL.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from torch.distributed import DistError, distributed_c10d

from lm_pcfg.distributed import launcher
from lm_pcfg.distributed.collectives import Collectives

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


_SECONDS_BETWEEN = 1.0  # looks into the store, which is on another host


class StopFlag:
    """A flag in the store of the rendezvous: one process that is asked to stop sets it, the others look at it.

    It is for long work that each process does alone, an evaluation. Steps need none: all processes wait for each other.
    """

    def __init__(self, stop: StopSignals, processes: Collectives):
        self._stop = stop
        self._store: Any = distributed_c10d._get_default_store() if processes.world_size > 1 else None
        # The store may outlive its processes, where a launcher restarts them: the key is of these alone.
        self._key = f"lm_pcfg stop {processes.broadcast(time.time_ns())}"
        self._next_look = 0.0

    def is_set(self) -> bool:
        """Whether this process was asked to stop, or another one at least a second ago.

        The store may be a launcher's, and die with it; that launcher's workers are then asked to stop. So whoever does
        not reach it leaves its work as well, and all save together.
        """
        try:
            return self._set_or_look()
        except DistError:
            return True

    def _set_or_look(self) -> bool:
        if self._stop.received is not None:
            if self._store is not None:
                self._store.set(self._key, self._stop.received)
            return True
        now = time.monotonic()
        if self._store is None or now < self._next_look:
            return False
        self._next_look = now + _SECONDS_BETWEEN
        return self._store.check([self._key])
