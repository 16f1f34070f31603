"""What a device allows: Triton kernels, so much memory, graph capture, asynchronous copies."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flash_inside.precision import chart_format

CPU = torch.device("cpu")


@cache
def triton_installed() -> bool:
    """Whether Triton is there. The system is asked once, so that the warning comes once."""
    installed = importlib.util.find_spec("triton") is not None
    if not installed:
        warnings.warn("triton is not installed: CUDA tensors use the slower torch backend", stacklevel=4)
    return installed


def in_triton(tensor: Tensor) -> bool:
    """Whether a pass that has a Triton kernel and a form in PyTorch runs its kernel. fp64, for checking, has none."""
    if tensor.dtype == torch.float64:
        return False
    return (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") and triton_installed()


def memory_of(device: torch.device = CPU) -> float:
    """Return how many bytes the GPU has in all, or for a CPU those this process may use; inf if nothing tells."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        there: float = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        there = math.inf
    return min(there, cgroup_limit())


@cache
def cgroup_limit(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Return the limit that containers and SLURM set: the least of this process's cgroup and of those above it.

    groups: where cgroups are mounted, version 1 or 2; own: which of them are this process's. A container may see its
    own cgroup as the topmost one, and yet its path from outside.
    """
    limit = math.inf
    try:
        lines = own.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return limit
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, file = (groups / "memory", "memory.limit_in_bytes") if controllers else (groups, "memory.max")
        folder = top / name.strip("/")
        while folder.is_relative_to(top):
            with suppress(OSError, ValueError):  # not there, or "max"
                limit = min(limit, int((folder / file).read_text(encoding="ascii")))
            folder = folder.parent
    return limit


def chart_memory(lengths: Iterable[int], nonterminals: int, precision: str) -> float:
    """Return the bytes of the chart of some sentences on a CPU: it grows with the square of their lengths."""
    return sum(length * (length + 1) / 2 for length in lengths) * _row_memory(nonterminals, precision)


def longest_fitting(memory: float, nonterminals: int, precision: str) -> float:
    """Return how long a sentence may be so that its chart takes no more than so many bytes; inf for inf."""
    return math.sqrt(2 * memory / _row_memory(nonterminals, precision) + 0.25) - 0.5


def _row_memory(nonterminals: int, precision: str) -> int:
    """Return the bytes of a row: eta and zeta, beta, the derivatives of the first two; some 100 of scales and sums."""
    return (8 if precision == "fp64" else 4) * 5 * nonterminals + 100


def sentence_memory(length: int, nonterminals: int, preterminals: int, precision: str) -> float:
    """Return the bytes that a sentence with rules of its own takes at most, its gradients included.

    That is four times left and right (as given, sorted by length, gradients as computed and as returned), twelve
    numbers a nonterminal for each span, and four a preterminal for each word.
    """
    size = chart_format(precision, nonterminals).storage.itemsize
    rules = 2 * nonterminals * (nonterminals + preterminals)
    spans = length * (length + 1) // 2
    return size * (4 * rules + 12 * nonterminals * spans) + 16 * preterminals * length + 200 * spans


def chunks_of_sentences(
    lengths: Sequence[int], nonterminals: int, preterminals: int, precision: str, memory: float
) -> list[slice]:
    """Cut sentences with rules of their own into consecutive chunks that take so many bytes each, or have one sentence.

    Whoever makes the rules of a batch calls this, and makes and uses those of one chunk at a time.
    """
    starts, used = [0], 0.0
    for number, length in enumerate(lengths):
        needed = sentence_memory(length, nonterminals, preterminals, precision)
        if used + needed > memory and number > starts[-1]:
            starts.append(number)
            used = 0.0
        used += needed
    return [slice(*ends) for ends in itertools.pairwise((*starts, len(lengths)))] if lengths else []


def check_memory(needed: float, device: torch.device = CPU) -> None:
    """Raise MemoryError if the device, or this process, has fewer bytes than that in all.

    Allocators may hand out more than there is (overcommit), and the system then kills whoever uses it.
    """
    there = memory_of(device)
    if needed > there:
        raise MemoryError(f"at least {needed / 2**30:,.1f} GiB are needed, and there are {there / 2**30:,.1f}")


def copy_to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device, asynchronously."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def copy_to_host(tensor: Tensor) -> Callable[[], Any]:
    """Start an asynchronous copy to the host. The function that is returned waits for it and gives tensor.tolist()."""
    if not tensor.is_cuda:
        return tensor.tolist
    on_host = tensor.to("cpu", non_blocking=True)  # into pinned memory
    copied = torch.cuda.Event()
    copied.record()

    def read() -> Any:
        copied.synchronize()
        return on_host.tolist()

    return read


def capture(launch: Callable[[], None], pool: Any = None, family: str = "") -> torch.cuda.CUDAGraph:
    """Capture what `launch` starts on the current device. Kernels must be compiled and libraries loaded before.

    pool    memory of an earlier graph (`graph.pool()`) that this one may work in: they must never run at the same time
    family  graphs of one family share cuBLAS's working memory, which lies in the pool of the first of them that needs
            it: they must all work in one pool, or be dropped together

    `with torch.cuda.graph(...)` would also collect garbage and give all unused memory back to the driver, which later
    steps would ask for again piece by piece: steps 251 to 290 of N 4096 on an H200, in which graphs are captured, took
    34 ms each with it and take 19 ms without. The garbage collector is off meanwhile: what it frees during a capture,
    an older graph for instance, would spoil the capture.
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
    """Make a stream for captures, which the default one cannot be; one a family, as cuBLAS keeps memory for each."""
    return torch.cuda.Stream(device)


def lasting_pool(family: str) -> Any:
    """Return a memory pool of this device for a family whose graphs come and go, and whose results lie elsewhere.

    A graph that is dropped frees its own pool, and with it cuBLAS's working memory, which the others still write to.
    """
    return _keeper(torch.cuda.current_device(), family).pool()


@cache
def _keeper(device: int, family: str) -> torch.cuda.CUDAGraph:
    """Return a graph that is never dropped, so that its pool stays."""
    return capture(_nothing_much, family=family)


def _nothing_much() -> None:
    torch.zeros(1, device="cuda")


class Replay:
    """Launches: plain the first time, since what is met once is not worth a capture, then captured, then replayed."""

    def __init__(self, launch: Callable[[], None], family: str):
        """family: of `lasting_pool`."""
        self.launch, self.family, self.met = launch, family, False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self.graph is None and (not self.met or not torch.cuda.is_available()):
            self.met = True
            self.launch()
            return
        if self.graph is None:
            self.graph = capture(self.launch, lasting_pool(self.family), self.family)
        self.graph.replay()


_allowed = True


def allow_graphs(yes: bool) -> bool:
    """Set whether charts may be computed by CUDA graphs; return what it was."""
    global _allowed
    before, _allowed = _allowed, yes
    return before


def graphs_allowed(tensor: Tensor) -> bool:
    """Whether the chart of these emissions may be computed by a CUDA graph.

    Not while another one is captured, and not on another device than the current one, whose streams a capture takes.
    """
    if not _allowed or not tensor.is_cuda or tensor.device.index != torch.cuda.current_device():
        return False
    return not torch.cuda.is_current_stream_capturing()
