"""What all processes of a run do together, each with its own values. One process does nothing."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed

from lm_pcfg.errors import FailedElsewhere, LostContact, UserError

T = TypeVar("T")

# What gloo, NCCL and the store say when a process is gone or does not answer.
_LOST = re.compile(r"gloo|NCCL|Connection (?:closed|reset|refused)|Timed out|Broken pipe|TCPStore|DistStore|peer")


class Collectives:
    def __init__(self, rank: int, world_size: int, device: torch.device):
        self.rank, self.world_size, self.device = rank, world_size, device
        self.is_main = rank == 0
        self.waited = 0.0  # seconds spent in `sums`

    def from_main(self, value: T) -> T:
        """The main process's value, on every process."""
        if self.world_size == 1:
            return value
        box: list[Any] = [value]
        torch.distributed.broadcast_object_list(box, device=self.device)
        return box[0]

    def on_main(self, action: Callable[[], T]) -> T:
        """What the action gives on the main process, on every process; if it fails there, all of them stop."""
        result: Any = None
        failure: UserError | None = None
        if self.is_main:
            try:
                result = action()
            except UserError as error:
                failure = error
        result, failed = self.from_main((result, failure is not None))
        if failure is not None:
            raise failure
        if failed:
            raise FailedElsewhere("the main process failed")
        return result

    def together(self, action: Callable[[], T]) -> T:
        """The action, which must not wait for others, on every process; if any fails, one says why and all stop."""
        result: Any = None
        failure: UserError | None = None
        try:
            result = action()
        except UserError as error:
            failure = error
        failed = self.gather(failure is not None)
        if any(failed):
            raise failure if failure and failed.index(True) == self.rank else FailedElsewhere("another process failed")
        return result

    def gather(self, value: T) -> list[T]:
        """Of every process, in the order of ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def sums(self, values: list[float]) -> list[float]:
        """Each summed over the processes, in fp64."""
        if self.world_size == 1:
            return values
        began = time.perf_counter()
        total = self.sum_tensor(torch.tensor(values, dtype=torch.float64, device=self.device)).tolist()
        self.waited += time.perf_counter() - began
        return total

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Summed over the processes, in place."""
        if self.world_size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor


@contextmanager
def telling_lost_contact() -> Iterator[None]:
    """One line for what ends this process because another one ended; the other's own error is the one to read."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1  # also before they have met
        lost = isinstance(error, torch.distributed.DistError) or _LOST.search(str(error))
        if not several or isinstance(error, torch.OutOfMemoryError) or not lost:
            raise
        reason = re.sub(r"^\[\S+:\d+\] ", "", " ".join(str(error).split())).split(". This ")[0][:200]
        raise LostContact(f"another process is gone or does not answer, look for its error ({reason})") from error
