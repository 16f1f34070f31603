"""One thread computes, requests wait for it in a queue of bounded length.

The event loop stays free meanwhile: a health check is answered while a long sentence is parsed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

LEAST_SECONDS = 1  # that a client is asked to wait


class Busy(Exception):
    """The queue is full. `seconds`: when to try again, by how long requests have taken so far."""

    def __init__(self, waiting: int, seconds: int):
        super().__init__(f"{waiting} requests are waiting already: try again in {seconds} s")
        self.seconds = seconds


class Worker:
    """Runs one piece of work after the other; used from one event loop."""

    def __init__(self, most_waiting: int):
        self.most = most_waiting + 1  # one of them runs
        self.under_way = 0
        self.done = 0
        self._mean_seconds = 0.0  # of the last ten or so
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="model")

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run it when its turn comes, and return what it returns; raise `Busy` if too many wait."""
        self.check_room()
        self.under_way += 1
        try:
            return await asyncio.wrap_future(self._pool.submit(self._timed, work))
        finally:
            self.under_way -= 1

    def check_room(self) -> None:
        """Raise `Busy` if no more may wait."""
        if self.under_way >= self.most:
            expected = math.ceil(self.under_way * self._mean_seconds)
            raise Busy(self.under_way - 1, max(LEAST_SECONDS, expected))

    def _timed(self, work: Callable[[], Result]) -> Result:
        began = time.monotonic()
        try:
            return work()
        finally:
            seconds = time.monotonic() - began
            self._mean_seconds += (seconds - self._mean_seconds) / min(10, self.done + 1)
            self.done += 1

    def close(self) -> None:
        """End after the work that runs now; what waits is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
