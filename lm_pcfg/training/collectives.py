"""What all processes of a run do together, each with its own values. One process does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed

from lm_pcfg.errors import FailedElsewhere, UserError

T = TypeVar("T")


class Collectives:
    def __init__(self, rank: int, world_size: int, device: torch.device):
        self.rank, self.world_size, self.device = rank, world_size, device
        self.is_main = rank == 0

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
        return self.sum_tensor(torch.tensor(values, dtype=torch.float64, device=self.device)).tolist()

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Summed over the processes, in place."""
        if self.world_size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor
