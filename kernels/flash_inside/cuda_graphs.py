"""Capturing a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch


def capture(launch: Callable[[], None], pool: Any = None, family: str = "") -> torch.cuda.CUDAGraph:
    """The work that `launch` starts on the current device. Kernels must be compiled and libraries loaded before.

    pool    memory of an earlier graph (`graph.pool()`) that this one may work in: they must never run at the same time
    family  graphs of one family share cuBLAS's working memory, which lies in the pool of the first of them that needs
            it: they must all work in one pool, or be dropped together

    `with torch.cuda.graph(...)` would also collect garbage and give all unused memory back to the driver, which later
    steps then ask for again piece by piece (H200, N 4096, steps 251 to 290, in which graphs are captured: 34 ms a step,
    without that 19). What the garbage collector frees during a capture, an older graph say, would spoil it: not then.
    """
    graph = torch.cuda.CUDAGraph()
    device = torch.cuda.current_device()
    torch.cuda.synchronize(device)
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(_stream(device, family)):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                launch()
            except BaseException:
                with suppress(Exception):  # a spoilt capture; what spoilt it is the error to see
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    return graph


@cache
def _stream(device: int, family: str) -> torch.cuda.Stream:
    """A capture may not be on the default stream. One for a family: cuBLAS keeps working memory for each."""
    return torch.cuda.Stream(device)


def lasting_pool(family: str) -> Any:
    """Memory on the current device for graphs of a family that come and go one by one, and whose results lie elsewhere.

    Dropping a graph frees its own pool, and with it cuBLAS's working memory, which the others still write to.
    """
    return _keeper(torch.cuda.current_device(), family).pool()


@cache
def _keeper(device: int, family: str) -> torch.cuda.CUDAGraph:
    """A graph that is never dropped, so that its pool stays."""
    return capture(_nothing_much, family=family)


def _nothing_much() -> None:
    torch.zeros(1, device="cuda")
