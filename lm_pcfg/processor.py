"""How this process uses its CPU."""

from __future__ import annotations

import os

import torch


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
