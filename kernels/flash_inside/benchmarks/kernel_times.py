"""`main(argv)`: what a pass, forward + backward, spends its time in, by kernel; checked as `inside.py` does first.

    python -m flash_inside.benchmarks.kernel_times --grid 8192x40x16 --csv kernels.csv

A size is nonterminals x words x sentences, as there. On a GPU the times are the device's, from PyTorch's profiler; the
row `no kernel` has the time in which none ran. All products of cuBLAS are one row: which of its kernels runs, and how
many, differs from width to width. Without a GPU the rows are operations of the `torch` backend.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import flash_inside
from flash_inside.benchmarks.accuracy import errors_of, is_right
from flash_inside.benchmarks.arguments import check_files, default_grid, find_device, positive
from flash_inside.benchmarks.inside import GRID_WITHOUT_GPU
from flash_inside.benchmarks.results import Results, Row, machine, out_of_memory
from flash_inside.benchmarks.sizes import Size, make_inputs, parse_grid
from flash_inside.precision import FAST_PRECISIONS
from flash_inside.rules import Rules

GRID = "8192x20x16,8192x40x16,8192x25x64,8192xptbx16"
FIELDS = ("nonterminals", "words", "sentences", "kernel", "calls", "ms", "device", "torch", "triton", "date")
#: Names that cuBLAS gives its kernels on Ampere and Hopper.
PRODUCT = re.compile(r"gemm|nvjet|cutlass|cublas|splitK")
IDLE = "no kernel"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench kernels", description="what a pass spends its time in, by kernel")
    parser.add_argument(
        "--grid", type=parse_grid, help=f"sizes NxWORDSxSENTENCES ({GRID}; without a GPU {GRID_WITHOUT_GPU})"
    )
    parser.add_argument("--precision", choices=FAST_PRECISIONS, default="bf16")
    parser.add_argument("--passes", type=positive, default=5, help="how many to take the mean of")
    parser.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args(argv)
    device = find_device(parser, arguments.device)
    check_files(parser, [arguments.csv])
    on_gpu = device.type == "cuda"
    results, backend, wrong = Results(FIELDS, arguments.csv), "triton" if on_gpu else "torch", False
    for size in arguments.grid or parse_grid(default_grid(on_gpu, "--grid", GRID, GRID_WITHOUT_GPU)):
        name = "x".join(map(str, size))
        try:
            if not is_right(backend, arguments.precision, *errors_of(backend, size, arguments.precision, device)):
                print(f"{name}: WRONG", flush=True)
                wrong = True
                continue
            rows = _rows(size, arguments.precision, device, backend, arguments.passes)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            print(f"{name}: out of memory", flush=True)
            continue
        results.add(*rows)
        print(f"{name}: {sum(row['ms'] for row in rows):.2f} ms a pass, watched by a profiler")
        for row in rows:
            print(f"{row['ms']:10.3f} ms {row['calls']:8.1f} calls  {row['kernel']}", flush=True)
    return 1 if wrong or not results.rows else 0


def _rows(size: Size, precision: str, device: torch.device, backend: str, passes: int) -> list[Row]:
    on_gpu = device.type == "cuda"
    inputs = make_inputs(size, precision, device)

    def one_pass() -> None:
        for tensor in inputs:
            tensor.grad = None
        log_z, _ = flash_inside.inside_unchecked(Rules(*inputs[:3]), inputs[3], size.lengths, precision, backend)
        log_z.sum().backward()

    for _ in range(4):  # compiles, and captures what is captured
        one_pass()
    if on_gpu:
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(passes):
            one_pass()
        if on_gpu:
            torch.cuda.synchronize()
    if on_gpu:
        spans = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        times = by_kernel(spans)
    else:
        times = {average.key: (average.count, average.self_cpu_time_total) for average in profiler.key_averages()}
    return [
        size._asdict()
        | {"kernel": name, "calls": calls / passes, "ms": round(microseconds / passes / 1e3, 4)}
        | machine(device)
        for name, (calls, microseconds) in sorted(times.items(), key=lambda item: -item[1][1])
    ]


def by_kernel(spans: list[tuple[str, float, float]]) -> dict[str, tuple[int, float]]:
    """Sum (name, start, end) of what ran on a device to calls and time of each kernel, and of the gaps between."""
    times: dict[str, tuple[int, float]] = {}

    def add(name: str, time: float) -> None:
        calls, before = times.get(name, (0, 0.0))
        times[name] = calls + 1, before + time

    last = None
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        add("products (cuBLAS)" if PRODUCT.search(name) else _short(name), end - start)
        if last is not None and start > last:
            add(IDLE, start - last)
        last = end if last is None else max(last, end)
    return times


def _short(name: str) -> str:
    """Shorten the name of a C++ function to what precedes its template arguments and parameters."""
    return re.sub(r"^void |[<(].*", "", name).strip()


if __name__ == "__main__":
    sys.exit(main())
