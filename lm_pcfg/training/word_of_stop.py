"""A stop that one process was asked for, made known to the others without waiting for any of them."""

from __future__ import annotations

import time
from typing import Any

from torch.distributed import DistError, distributed_c10d

from lm_pcfg.training.collectives import Collectives
from lm_pcfg.training.stop_signals import StopSignals

_SECONDS_BETWEEN = 1.0  # looks into the store, which is on another host


class WordOfStop:
    """For long work that each process does alone, an evaluation: word is left in the store by which they met.

    Steps need none of it: there all processes wait for each other anyway.
    """

    def __init__(self, stop: StopSignals, processes: Collectives):
        self._stop = stop
        self._store: Any = distributed_c10d._get_default_store() if processes.world_size > 1 else None
        # The store may outlive its processes, where a launcher restarts them: the word is of these alone.
        self._key = f"lm_pcfg stop {processes.from_main(time.time_ns())}"
        self._next_look = 0.0

    def heard(self) -> bool:
        """Whether this process was asked to stop, or one of the others a second ago.

        The store may be a launcher's, and die with it; that launcher's workers are then asked to stop. So whoever does
        not reach it leaves its work as well, and all save together.
        """
        try:
            return self._heard()
        except DistError:
            return True

    def _heard(self) -> bool:
        if self._stop.received is not None:
            if self._store is not None:
                self._store.set(self._key, self._stop.received)
            return True
        now = time.monotonic()
        if self._store is None or now < self._next_look:
            return False
        self._next_look = now + _SECONDS_BETWEEN
        return self._store.check([self._key])
