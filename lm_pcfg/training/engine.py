"""Accelerate, and the few collective operations the loop needs. One process today; the loop does not know."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from lm_pcfg.errors import UserError
from lm_pcfg.processor import prepare_cpu
from lm_pcfg.settings import Settings

T = TypeVar("T")


class Engine:
    """The process's place among the others, and its device."""

    def __init__(self, settings: Settings):
        if settings.device == "cuda" and not torch.cuda.is_available():
            raise UserError("device: cuda was asked for, but PyTorch sees no GPU; use device=cpu or device=auto")
        prepare_cpu(settings.threads)
        # Accumulation and precision are this loop's own, whatever a launcher's environment says.
        self.accelerator = Accelerator(
            cpu=settings.device == "cpu", gradient_accumulation_steps=1, mixed_precision="no"
        )
        self.device = self.accelerator.device
        if settings.inside.backend == "triton" and self.device.type != "cuda":
            raise UserError("inside.backend: triton needs a GPU, and this process has none; use inside.backend=auto")
        self.rank, self.world_size = self.accelerator.process_index, self.accelerator.num_processes
        self.is_main = self.accelerator.is_main_process

    def describe(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        threads = f", {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        kind = self.accelerator.distributed_type.value
        processes = "one process" if kind == "NO" else f"{kind}, {self.world_size} processes"
        return f"{processes}, {name}{threads}"

    def from_main(self, value: T) -> T:
        """The main process's value, on every process."""
        if self.world_size == 1:
            return value
        box: list[Any] = [value]
        broadcast_object_list(box)
        return box[0]

    def sums(self, values: list[float]) -> list[float]:
        """Each summed over the processes, in fp64."""
        if self.world_size == 1:
            return values
        total = self.accelerator.reduce(torch.tensor(values, dtype=torch.float64, device=self.device), "sum")
        return total.tolist()


def peak_memory(device: torch.device) -> str:
    """In words, for people."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB of GPU memory"
    import resource

    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of memory"  # Linux counts in KiB
