"""One thread computes, requests wait for it in a queue of bounded length.

The event loop stays free meanwhile: a health check is answered while a long sentence is parsed.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from lm_pcfg.errors import is_out_of_memory

Result = TypeVar("Result")

LEAST_SECONDS = 1  # that a client is asked to wait


class Busy(Exception):
    """Nothing more is taken now. `seconds`: when to try again."""

    def __init__(self, why: str, seconds: int):
        super().__init__(f"{why}: try again in {seconds} s")
        self.seconds = seconds


class _Job(NamedTuple):
    work: Callable[[], Any]
    answer: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class Worker:
    """Runs one piece of work after the other; used from one event loop."""

    def __init__(self, most_waiting: int):
        self._most = most_waiting + 1  # one of them runs
        self._open: set[asyncio.Future[Any]] = set()
        self._mean_seconds, self._done = 0.0, 0  # of the last ten or so
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self.runs = False  # whether the thread computes, perhaps for nobody any more
        # A daemon: what it computes when the service stops is not waited for.
        threading.Thread(target=self._work, name="model", daemon=True).start()

    @property
    def computing(self) -> bool:
        return bool(self._open)

    @property
    def waiting(self) -> int:
        return max(0, len(self._open) - 1)

    def check_room(self) -> None:
        """Raise `Busy` if no more may wait."""
        if len(self._open) >= self._most:
            expected = math.ceil(len(self._open) * self._mean_seconds)
            raise Busy(f"{self.waiting} requests are waiting already", max(LEAST_SECONDS, expected))

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run it when its turn comes, and return what it returns; raise `Busy` if too many wait."""
        self.check_room()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()
        self._open.add(answer)
        self._jobs.put(_Job(work, answer, loop))
        try:
            return await answer
        finally:
            self._open.discard(answer)

    def stop(self) -> None:
        """Answer all that wait, and what runs, with `Busy`."""
        for answer in self._open:
            if not answer.done():
                answer.set_exception(Busy("the service stops", LEAST_SECONDS))

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job.answer.done():  # nobody waits for it any more
                continue
            began, self.runs = time.monotonic(), True
            value, error = None, None
            try:
                value = job.work()
            except Exception as found:
                error = MemoryError() if is_out_of_memory(found) else found
            self.runs, seconds = False, time.monotonic() - began
            self._mean_seconds += (seconds - self._mean_seconds) / min(10, self._done + 1)
            self._done += 1
            try:
                job.loop.call_soon_threadsafe(_settle, job.answer, value, error)
            except RuntimeError:  # the loop has been closed meanwhile
                return


def _settle(answer: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(value)
