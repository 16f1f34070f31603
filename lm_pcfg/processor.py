"""How this process uses its CPU and the memory beside it."""

from __future__ import annotations

import os

import torch


def check_memory(needed: float) -> None:
    """MemoryError if this machine does not have so many bytes at all (where the system tells).

    Allocators may hand out more than there is (overcommit), and the system then kills whoever uses it.
    """
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return
    if needed > there:
        raise MemoryError(f"at least {needed / 2**30:,.1f} GiB are needed, and there are {there / 2**30:,.1f}")


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
