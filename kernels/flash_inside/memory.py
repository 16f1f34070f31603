"""Whether something can fit at all, asked before it is made."""

from __future__ import annotations

import os

import torch

CPU = torch.device("cpu")


def check_memory(needed: float, device: torch.device = CPU) -> None:
    """MemoryError if the GPU, or for a CPU this machine, does not have so many bytes at all (where the system tells).

    Allocators may hand out more than there is (overcommit), and the system then kills whoever uses it.
    """
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    else:
        try:
            there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, OSError, ValueError):
            return
    if needed > there:
        raise MemoryError(f"at least {needed / 2**30:,.1f} GiB are needed, and there are {there / 2**30:,.1f}")
