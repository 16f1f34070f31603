"""`main(argv)`: time and peak memory of the emission's normalisers, forward + backward, checked against fp64 first.

    python -m flash_inside.benchmarks.normalizers --grid 16384x10000x512,65536x65536x512 --precision tf32

A size is preterminals x words x dimension. Memory is the peak above the two tables and their gradients.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from flash_inside.benchmarks.arguments import check_files, default_grid, find_device, not_negative
from flash_inside.benchmarks.results import Results, Row, machine, milliseconds, out_of_memory, percentiles
from flash_inside.devices import check_memory
from flash_inside.precision import FAST_PRECISIONS, TOLERANCE_OF_NORMALIZERS
from flash_inside.softmax import log_normalizers
from flash_inside.softmax.normalizers import may_be_kept

GRID, GRID_WITHOUT_GPU = "16384x10000x512,65536x65536x512", "1024x10000x256"
FIELDS = (
    "preterminals", "words", "dimension", "precision", "p20_ms", "p50_ms", "p80_ms", "peak_gib", "tflops",
    "error", "gradient_error", "device", "torch", "triton", "date", "note",
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    device = arguments.device
    results = Results(FIELDS, arguments.csv)
    for size in arguments.grid:
        row = _row(size, arguments.precision, device)
        try:
            row |= _measure(size, arguments.precision, device, arguments.seconds)
        except (RuntimeError, MemoryError) as problem:
            if not out_of_memory(problem):
                raise
            row["note"] = "out of memory"
        results.add(row)
        peak = f"{row['peak_gib']} GiB  " if device.type == "cuda" else ""
        shown = row["note"] or f"{row['p50_ms']} ms  {peak}{row['tflops']} TFLOP/s"
        print("x".join(map(str, size)), arguments.precision, shown, flush=True)
    nothing = all(row["note"] for row in results.rows)
    return 1 if nothing or any(row["note"] == "WRONG" for row in results.rows) else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench emission", description="time the emission's normalisers")
    parser.add_argument("--grid", type=_grid, help=f"sizes PxVxD (default {GRID}; without a GPU {GRID_WITHOUT_GPU})")
    parser.add_argument("--precision", choices=FAST_PRECISIONS, default="tf32")
    parser.add_argument("--seconds", type=not_negative, default=1.0, help="time to spend on each measurement")
    parser.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args(argv)
    arguments.device = find_device(parser, arguments.device)
    if arguments.grid is None:
        arguments.grid = _grid(default_grid(arguments.device.type == "cuda", "--grid", GRID, GRID_WITHOUT_GPU))
    check_files(parser, [arguments.csv])
    return arguments


def _grid(text: str) -> list[tuple[int, int, int]]:
    sizes = [[int(number) if number.isdecimal() else 0 for number in part.split("x")] for part in text.split(",")]
    if any(len(size) != 3 or min(size) < 1 for size in sizes):
        raise argparse.ArgumentTypeError("sizes are PRETERMINALSxWORDSxDIMENSION, such as 16384x10000x512")
    return [(p, v, d) for p, v, d in sizes]


def _tables(size: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Make random tables as after some training: logits have a standard deviation of about 3."""
    preterminals, words, dimension = size
    check_memory((preterminals + words) * dimension * 4, device)
    generator = torch.Generator(device).manual_seed(1)
    scale = (3.0 / dimension**0.5) ** 0.5
    features, embeddings = (
        (torch.randn(rows, dimension, device=device, generator=generator) * scale).requires_grad_()
        for rows in (preterminals, words)
    )
    return features, embeddings


def _errors(size: tuple[int, int, int], precision: str, device: torch.device) -> tuple[float, float]:
    """Return the errors of normalisers and gradients against fp64, at some rows and some words of the whole size."""
    features, embeddings = _tables(size, device)
    generator = torch.Generator(device).manual_seed(2)
    weights = torch.randn(size[0], device=device, generator=generator)
    ours = log_normalizers(features, embeddings, precision)
    d_features, d_embeddings = torch.autograd.grad(ours @ weights, (features, embeddings))
    with torch.no_grad():
        rows = torch.randperm(size[0], device=device, generator=generator)[:64]
        words = torch.randperm(size[1], device=device, generator=generator)[:64]
        wide = embeddings.double()
        logits = features[rows].double() @ wide.T
        truth = logits.logsumexp(1)
        by_rows = (logits - truth[:, None]).exp() * weights[rows, None].double() @ wide
        by_words = torch.zeros(len(words), size[2], dtype=torch.float64, device=device)
        for part, weight in zip(features.double().split(1024), weights.double().split(1024), strict=True):
            logits = part @ wide.T
            shares = (logits[:, words] - logits.logsumexp(1, keepdim=True)).exp() * weight[:, None]
            by_words += shares.T @ part
    pairs = ((d_features[rows], by_rows), (d_embeddings[words], by_words))
    gradient_error = max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)
    return (ours[rows].double() - truth).abs().max().item(), gradient_error


def _row(size: tuple[int, int, int], precision: str, device: torch.device) -> Row:
    preterminals, words, dimension = size
    sizes = {"preterminals": preterminals, "words": words, "dimension": dimension, "precision": precision}
    return dict.fromkeys(FIELDS, "") | sizes | machine(device)


def _measure(size: tuple[int, int, int], precision: str, device: torch.device, seconds: float) -> Row:
    preterminals, words, dimension = size
    row: Row = {"note": ""}
    row["error"], row["gradient_error"] = errors = _errors(size, precision, device)
    if not all(error <= allowed for error, allowed in zip(errors, TOLERANCE_OF_NORMALIZERS[precision], strict=True)):
        return row | {"note": "WRONG"}
    features, embeddings = _tables(size, device)

    def forward_and_backward() -> None:
        features.grad = embeddings.grad = None
        log_normalizers(features, embeddings, precision).sum().backward()

    forward_and_backward()
    if device.type == "cuda":
        kept = 2 * (features.nbytes + embeddings.nbytes)
        torch.cuda.reset_peak_memory_stats(device)
        forward_and_backward()
        row["peak_gib"] = round((torch.cuda.max_memory_allocated(device) - kept) / 2**30, 3)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        times += milliseconds(forward_and_backward, device)
    row |= percentiles(times)
    operations = (6 if may_be_kept(features, embeddings, precision) else 8) * preterminals * words * dimension
    row["tflops"] = round(operations / sorted(times)[len(times) // 2] / 1e9, 3)
    return row


if __name__ == "__main__":
    sys.exit(main())
