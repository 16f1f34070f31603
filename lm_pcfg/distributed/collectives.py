"""Collective operations of all processes of a run, among which data are split, and of groups of them.

A group of neighbours shares the work on one model: Engine.model_group, for grammar/emission.py.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed

from lm_pcfg.errors import FailedElsewhere, LostContact, UserError

T = TypeVar("T")

# What gloo, NCCL and the store say when a process is gone or does not answer.
_LOST = re.compile(r"gloo|NCCL|Connection (?:closed|reset|refused)|Timed out|Broken pipe|TCPStore|DistStore|peer")


def timestamp(device: torch.device) -> Any:
    """Mark the present time. On a GPU this is an event in the stream, and the host does not wait for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(began: Any, ended: Any) -> float:
    """Return the seconds between two timestamps; the device must have passed both."""
    return ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1000


class ProcessGroup:
    """Processes that exchange tensors. All of them have to make the same calls in the same order."""

    def __init__(self, rank: int, size: int, handle: Any = None):
        """rank: in the group; handle: torch's group, None for that of all processes."""
        self.rank, self.size, self._handle = rank, size, handle
        self._timed: list[tuple[Any, Any]] = []

    @classmethod
    def of_neighbours(cls, size: int, rank: int, world_size: int, timeout: timedelta | None = None) -> ProcessGroup:
        """Return this process's group of `size` neighbouring ranks. All processes must call it: all make all groups.

        timeout: the time after which a process that does not answer is an error; by default that of PyTorch.
        """
        if world_size % size:
            raise ValueError(f"groups of {size} do not divide {world_size} processes")
        neighbours = [list(range(first, first + size)) for first in range(0, world_size, size)]
        handles = [torch.distributed.new_group(ranks, timeout=timeout) for ranks in neighbours]
        return cls(rank % size, size, handles[rank // size])

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensor of every process, in the order of ranks; all have the same shape."""
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._timing(tensor.device):
            torch.distributed.all_gather(tensors, tensor, group=self._handle)
        return tensors

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the processes, in place."""
        with self._timing(tensor.device):
            torch.distributed.all_reduce(tensor, group=self._handle)
        return tensor

    @contextmanager
    def _timing(self, device: torch.device) -> Iterator[None]:
        began = timestamp(device)
        yield
        self._timed.append((began, timestamp(device)))

    def take_seconds(self) -> float:
        """Return seconds in these collectives since the last call; call it when the device has finished the step."""
        timed, self._timed = self._timed, []
        return sum(seconds_between(began, ended) for began, ended in timed)


class Collectives:
    """What all processes of a run do together, each with its own values. One process alone does nothing."""

    def __init__(self, rank: int, world_size: int, device: torch.device):
        self.rank, self.world_size, self.device = rank, world_size, device
        self.is_main = rank == 0
        self.waited = 0.0  # seconds spent in `sums`

    def broadcast(self, value: T) -> T:
        """Send the main process's value to every process."""
        if self.world_size == 1:
            return value
        box: list[Any] = [value]
        torch.distributed.broadcast_object_list(box, device=self.device)
        return box[0]

    def on_main(self, action: Callable[[], T]) -> T:
        """Run the action on the main process and broadcast its result; if it fails there, all processes stop."""
        result: Any = None
        failure: UserError | None = None
        if self.is_main:
            try:
                result = action()
            except UserError as error:
                failure = error
        result, failed = self.broadcast((result, failure is not None))
        if failure is not None:
            raise failure
        if failed:
            raise FailedElsewhere("the main process failed")
        return result

    def on_all(self, action: Callable[[], T]) -> T:
        """Run the action, which must not wait for others, on every process; if one fails, it says why and all stop."""
        result: Any = None
        failure: UserError | None = None
        try:
            result = action()
        except UserError as error:
            failure = error
        self.agree(failure)
        return result

    def agree(self, failure: Exception | None = None) -> None:
        """Go on if no process has failed; else raise on all of them, and only the first that failed says why."""
        failed = self.all_gather(failure is not None)
        if any(failed):
            raise failure if failure and failed.index(True) == self.rank else FailedElsewhere("another process failed")

    def all_gather(self, value: T) -> list[T]:
        """Return the value of every process, in the order of ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def sums(self, values: list[float]) -> list[float]:
        """Sum each value over the processes, in fp64."""
        if self.world_size == 1:
            return values
        began = time.perf_counter()
        total = self.all_reduce(torch.tensor(values, dtype=torch.float64, device=self.device)).tolist()
        self.waited += time.perf_counter() - began
        return total

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the processes, in place."""
        if self.world_size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor


@contextmanager
def lost_contact_reported() -> Iterator[None]:
    """Turn the error of a process that lost the others into one line; the error to read is that of the lost one."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1  # also before they have met
        lost = isinstance(error, torch.distributed.DistError) or _LOST.search(str(error))
        if not several or isinstance(error, torch.OutOfMemoryError) or not lost:
            raise
        reason = re.sub(r"^\[\S+:\d+\] ", "", " ".join(str(error).split())).split(". This ")[0][:200]
        raise LostContact(f"another process is gone or does not answer, look for its error ({reason})") from error


def prepare_cpu(threads: int | None = None) -> None:
    """Call before the first computation; without `threads`, the cores are shared out among this machine's processes.

    Launchers set other numbers of threads, and floating-point sums depend on that: one rule here, so that the same
    command gives the same numbers however it was started.

    Numbers below 1e-38 become 0. A CPU is up to forty times slower on them, charts of peaked grammars are full of them,
    and flash_inside's check of its range counts on nothing below that.
    """
    torch.set_flush_denormal(True)  # threads started later inherit it
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # The cores this process may use, where the system tells (Linux)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(threads or max(1, cores // local_processes))
