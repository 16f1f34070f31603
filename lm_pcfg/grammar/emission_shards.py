"""The normalisers of the emission, chunked across processes.

Each of S processes computes those of its P/S preterminals; the group gathers the P numbers. In the backward the P
gradients, which differ from process to process because their sentences do, are summed, and each process takes its part
through its own P/S x V logits. Arithmetic falls by S, and memory where P/S x V logits are fewer than
a block of them (flash_inside.softmax); what travels is P numbers, twice.

The engine averages parameter gradients over all processes. Every normaliser's gradient is carried by one process of
each group instead of by all, but as the sum over the group: the average is the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class EmissionShards:
    """This process's part. Every process of the group has to enter every forward and every backward pass."""

    def __init__(self, shards: int, rank: int, world_size: int, timeout: timedelta | None = None):
        """Groups of `shards` neighbouring ranks; all ranks of the world must construct this.

        timeout: after which a rank that does not answer is an error; by default that of PyTorch.
        """
        if world_size % shards:
            raise ValueError(f"{shards} shards do not divide {world_size} processes")
        self.count, self.index = shards, rank % shards
        self._began_and_ended: list[tuple[Any, Any]] = []  # collectives since `waited` was asked
        self._group: Any = None
        for first in range(0, world_size, shards):
            ranks = list(range(first, first + shards))
            group = dist.new_group(ranks, timeout=timeout)
            if rank in ranks:
                self._group = group

    def part(self, preterminals: int, index: int | None = None) -> slice:
        """The preterminals of a shard (by default this process's): sizes differ by one at most, and may be 0."""
        index = self.index if index is None else index
        return slice(preterminals * index // self.count, preterminals * (index + 1) // self.count)

    def gather(self, own: Tensor, preterminals: int) -> Tensor:
        """The normalisers of all preterminals, in order, from those of every part."""
        return _Gathered.apply(own, self, preterminals)

    def collect(self, own: Tensor, preterminals: int) -> Tensor:
        parts = [self.part(preterminals, index) for index in range(self.count)]
        largest = max(part.stop - part.start for part in parts)
        padded = own.new_zeros(largest)
        padded[: len(own)] = own
        received = [torch.empty_like(padded) for _ in parts]
        with self._timed(own.device):
            dist.all_gather(received, padded, group=self._group)
        return torch.cat([values[: part.stop - part.start] for values, part in zip(received, parts, strict=True)])

    def sum(self, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        with self._timed(total.device):
            dist.all_reduce(total, group=self._group)
        return total

    @contextmanager
    def _timed(self, device: torch.device) -> Iterator[None]:
        began = _now(device)
        yield
        self._began_and_ended.append((began, _now(device)))

    def waited(self) -> float:
        """Seconds in these collectives since the last call; call it when the device has finished the step."""
        pairs, self._began_and_ended = self._began_and_ended, []
        return sum(end - began if isinstance(began, float) else began.elapsed_time(end) / 1000 for began, end in pairs)


def _now(device: torch.device) -> Any:
    """On a GPU an event: its stream waits for the collective, the host does not."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, shards: EmissionShards, preterminals: int) -> Tensor:
        ctx.shards, ctx.preterminals = shards, preterminals
        return shards.collect(own.detach(), preterminals)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.shards.sum(gradient.contiguous())[ctx.shards.part(ctx.preterminals)], None, None
