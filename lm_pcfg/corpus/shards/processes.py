"""Work in other processes: results in the order of the tasks, and no process left behind when this one is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TypeVar

from lm_pcfg.errors import UserError

SMALL_BYTES = 16 << 20

Task = TypeVar("Task")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Count the cores this process may use: a container or a scheduler may allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worth_using(files: Iterable[Path]) -> int:
    """Return how many processes to read files with: one for a few megabytes, as others take a second to start."""
    size = sum(file.stat().st_size for file in files if file.exists())
    return 1 if size < SMALL_BYTES else usable_cores()


def make_pool(
    processes: int, initializer: Callable[..., None] | None = None, arguments: tuple = ()
) -> ProcessPoolExecutor:
    """Make a pool by spawn: this process may have threads and a GPU, which a fork would not survive."""
    return ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(initializer, arguments),
    )


def _start(initializer: Callable[..., None] | None, arguments: tuple) -> None:
    # A signal to the whole group (Ctrl-C, a scheduler) is for the parent to act on; it ends its pool, or dies.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    if initializer is not None:
        initializer(*arguments)


def in_processes(function: Callable[[Task], Result], tasks: Iterable[Task], *, processes: int) -> Iterator[Result]:
    """Yield function(task) for each task, in order; tasks are taken a few at a time, so that they may be large."""
    if isinstance(tasks, Sequence):
        processes = min(processes, len(tasks))
    if processes <= 1:
        yield from map(function, tasks)
        return
    pool = make_pool(processes)
    try:
        yield from in_order(pool, function, tasks, ahead=processes + 1, way_out="use fewer processes")
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def in_order(
    pool: Executor, function: Callable[[Task], Result], tasks: Iterable[Task], *, ahead: int, way_out: str
) -> Iterator[Result]:
    """Yield results in order, `ahead` more under way meanwhile; way_out: the advice if a process is killed."""
    waiting: deque[Future[Result]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(function, task))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(f"a process that reads data was killed (out of memory?); {way_out}") from None
    finally:
        for future in waiting:
            future.cancel()
