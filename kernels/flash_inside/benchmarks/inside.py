"""`main(argv)`: time forward + backward over a grid of sizes, check each against fp64 first, write one CSV.

    python -m flash_inside.benchmarks.inside --csv inside.csv
    python -m flash_inside.benchmarks.inside --grid 512x20x16,8192xptbx16 --methods triton
    python -m flash_inside.benchmarks.inside --grid 2048x40x16 --methods triton-per-sentence
    python -m flash_inside.benchmarks.inside --table1

A size is nonterminals x words x sentences; there are twice as many preterminals. Words `ptb`: lengths drawn from those
of the Penn Treebank, up to 40. --table1 measures what the paper's table 1 compares, and prints it like that.

Each is checked against fp64 on the same rounded tensors (fp32 where the rules in fp64 do not fit in memory): log Z and
the gradients of all inputs, for two sentences.
Inputs are resident, gradients go to all four of them. Passes follow each other without waiting, as in training: a time
is that between two marks on the device. Whether a sentence has to be recomputed (none has here) is asked at the end.
Memory is the peak above the inputs and one set of their gradients: in a first pass, when there are no gradients yet
(peak_gib), and in one whose gradients are added to those of an earlier pass (accumulating_gib). For triton also as in
training (training_gib): the gradients of the rules have memory that is there all the time and are written into it.
total_gib is the peak of the first pass with inputs and gradients.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flash_inside.benchmarks.accuracy import errors_of, is_right
from flash_inside.benchmarks.arguments import check_files, default_grid, find_device, not_negative
from flash_inside.benchmarks.methods import METHODS, PER_SENTENCE, backend_of, function_of
from flash_inside.benchmarks.results import Results, Row, machine, milliseconds, out_of_memory, percentiles, read_rows
from flash_inside.benchmarks.sizes import Size, make_inputs, parse_grid
from flash_inside.precision import FAST_PRECISIONS
from flash_inside.rules import ResidentRules, Rules

GRID = "512x20x16,512x40x16,2048x40x16,4096x40x16,8192x20x16,8192x40x16,8192x25x64"
GRID_WITHOUT_GPU = "64x20x16,128x20x16"
#: The paper's table 1: its sizes, and where it has no figure (tensors [spans, 2N, N] that do not fit).
TABLE1_GRID = "512x20x16,8192x20x16,512x40x16,8192x40x16"
LARGEST_LOG_SUM_EXP = 512
NAMES = {"triton": "FlashInside (triton)", "torch": "FlashInside (torch)"}
FIELDS = (
    "method", "nonterminals", "words", "sentences", "precision", "p20_ms", "p50_ms", "p80_ms", "peak_gib",
    "accumulating_gib", "training_gib", "total_gib", "error", "gradient_error", "share_of_ceiling", "ceiling_tflops",
    "device", "torch", "triton", "date", "note",
)  # fmt: skip


def main(argv: list[str] | None = None, draw: Callable[[list[Row]], str] | None = None) -> int:
    """Run the benchmark. draw: makes the file that --plot names from the rows of the CSV; without it no --plot."""
    arguments = _parse(argv, can_draw=draw is not None)
    results = Results(FIELDS, arguments.csv, arguments.plot, draw)
    for row in _measured(arguments) if arguments.from_csv is None else arguments.from_csv:
        if arguments.table1 and not any(_is_of(row, size) for size in arguments.grid):
            continue  # of a table with other sizes too
        results.add(row)
        print(_line(row), flush=True)
    if arguments.table1:
        print(table1(results.rows))
    nothing = bool(results.rows) and all(row["note"] for row in results.rows)
    if arguments.table1 and not results.rows:
        print("none of the sizes is in the table; --grid says which to look for", file=sys.stderr)
        nothing = True
    return 1 if nothing or any(row["note"] == "WRONG" for row in results.rows) else 0


def _is_of(row: Row, size: Size) -> bool:
    return tuple(str(row[field]) for field in Size._fields) == tuple(map(str, size))


def _measured(arguments: argparse.Namespace) -> Iterator[Row]:
    device = arguments.device
    ceiling = _ceiling(device)
    for size in arguments.grid:
        for method in arguments.methods:
            if arguments.table1 and method == "log-sum-exp" and size.nonterminals > LARGEST_LOG_SUM_EXP:
                continue
            yield _measure(method, size, arguments.precision, device, arguments.seconds, ceiling)


def _parse(argv: list[str] | None, can_draw: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench inside", description="time the inside algorithm")
    parser.add_argument(
        "--grid", type=parse_grid, help=f"sizes NxWORDSxSENTENCES (default {GRID}; without a GPU {GRID_WITHOUT_GPU})"
    )
    parser.add_argument("--table1", action="store_true", help=f"the paper's table 1 (default grid {TABLE1_GRID})")
    parser.add_argument(
        "--methods",
        type=_methods,
        default=list(METHODS),
        help=f"default {','.join(METHODS)}; also {','.join(PER_SENTENCE)}, with one grammar per sentence",
    )
    parser.add_argument("--precision", choices=FAST_PRECISIONS, default="bf16", help="of triton and torch")
    parser.add_argument("--seconds", type=not_negative, default=1.0, help="time to spend on each measurement")
    parser.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG file")
    parser.add_argument("--from-csv", type=_rows, metavar="CSV", help="measure nothing: show what was measured")
    arguments = parser.parse_args(argv)
    if arguments.plot is not None and not can_draw:
        parser.error("nothing here draws: `lm_pcfg bench inside --plot` does")
    arguments.device = find_device(parser, arguments.device)
    check_files(parser, [arguments.csv, arguments.plot])
    if arguments.from_csv is not None and arguments.grid is not None and not arguments.table1:
        parser.error("--grid has no effect with --from-csv, but with --table1")
    if arguments.grid is None:
        large = TABLE1_GRID if arguments.table1 else GRID
        can_be_large = arguments.device.type == "cuda" or arguments.from_csv is not None
        arguments.grid = parse_grid(default_grid(can_be_large, "--grid", large, GRID_WITHOUT_GPU))
    return arguments


def _rows(table: str) -> list[Row]:
    try:
        rows = read_rows(Path(table), FIELDS)
        for row in rows:
            if row["p50_ms"]:
                float(row["p50_ms"])
        return rows
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _methods(text: str) -> list[str]:
    methods = text.split(",")
    known = (*METHODS, *PER_SENTENCE)
    unknown = set(methods) - set(known)
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown method {', '.join(sorted(unknown))}: use {', '.join(known)}")
    return methods


def _measure(method: str, size: Size, precision: str, device: torch.device, seconds: float, ceiling: float) -> Row:
    row: Row = dict.fromkeys(FIELDS, "")
    row |= {"method": method, "precision": precision if backend_of(method) else "fp32"}
    row |= size._asdict() | machine(device) | {"ceiling_tflops": round(ceiling, 1)}
    try:
        error, gradient_error = errors_of(method, size, precision, device)
        row |= {"error": error, "gradient_error": "" if gradient_error is None else gradient_error}
        if not is_right(method, precision, error, gradient_error):
            return row | {"note": "WRONG"}
        times, peaks = _times(method, size, precision, device, seconds)
    except (RuntimeError, MemoryError) as problem:
        if not out_of_memory(problem):
            raise
        return row | {"note": "out of memory"}
    except ValueError as problem:  # a method that does not run here, in one line
        return row | {"note": str(problem)}
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    row |= percentiles(times)
    for column, peak in peaks.items():
        row[column] = round(peak / 2**30, 3)
    row["share_of_ceiling"] = round(size.flops / (ceiling * 1e12) / (float(row["p50_ms"]) / 1e3), 3)
    return row


def _times(
    method: str, size: Size, precision: str, device: torch.device, seconds: float
) -> tuple[list[float], dict[str, int]]:
    """Return milliseconds of single passes, and on a GPU the peaks of memory in bytes, by column."""
    inputs, lengths = make_inputs(size, precision, device, method in PER_SENTENCE), size.lengths
    verdicts: list[Tensor] = []
    function = function_of(method, precision, verdicts)

    def forward_and_backward() -> None:
        function(Rules(*inputs[:3]), inputs[3], lengths).sum().backward()

    def clear() -> None:
        for tensor in inputs:
            tensor.grad = None

    for _ in range(3):
        clear()
        forward_and_backward()
    peaks: dict[str, int] = {}
    if device.type == "cuda":
        kept = sum(tensor.nbytes + tensor.grad.nbytes for tensor in inputs if tensor.grad is not None)
        clear()
        _free_graphs(method)
        for column in ("peak_gib", "accumulating_gib"):  # the second pass adds to the gradients of the first
            torch.cuda.reset_peak_memory_stats()
            forward_and_backward()
            peaks[column] = torch.cuda.max_memory_allocated() - kept
        peaks["total_gib"] = peaks["peak_gib"] + kept
        clear()
        if method == "triton":
            peaks["training_gib"] = _peak_in_training(inputs, lengths, precision)
            clear()
        forward_and_backward()

    def again() -> None:
        clear()
        forward_and_backward()

    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 1000):
        times += milliseconds(again, device, passes=10 if device.type == "cuda" else 1)
    if not all(trusted.all() for trusted in verdicts):
        raise ValueError("a sentence left the range of the number format: this would not be the time of all its work")
    return times, peaks


def _peak_in_training(inputs: list[Tensor], lengths: list[int], precision: str) -> int:
    """Return the peak above the inputs and the memory for gradients of the rules, which is there all the time."""
    root, left, right, emissions = inputs
    rules = ResidentRules(root, left, right, (torch.empty_like(left), torch.empty_like(right)))
    _free_graphs("triton")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function_of("triton", precision, [])(rules, emissions, lengths).sum().backward()
    return torch.cuda.max_memory_allocated() - before


def _free_graphs(method: str) -> None:
    """Free the memory of graphs, so that the next pass takes it again and it is counted."""
    if backend_of(method) == "triton":
        from flash_inside.triton import graphs

        graphs.clear()


def _ceiling(device: torch.device) -> float:
    """Measure the TFLOP/s of a large matrix product: bf16 on a GPU, fp32 on a CPU."""
    side, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    times = sorted(milliseconds(lambda: a @ b, device, passes=15))
    return 2 * side**3 / times[7] / 1e9


def _line(row: Row) -> str:
    size = f"{row['nonterminals']:>6} x {row['words']:>3} x {row['sentences']:>3}  {row['method']:<19}"
    if row["note"]:
        return f"{size} {row['note']}"
    share, error = 100 * float(row["share_of_ceiling"]), float(row["error"])
    memory = f"{row['peak_gib']:>7} GiB  " if row["peak_gib"] != "" else ""  # of a GPU
    return f"{size} {row['p50_ms']:>10} ms  {memory}{share:5.1f} % of the ceiling  error {error:.1e}"


def table1(rows: Sequence[Row]) -> str:
    """Return in Markdown the speed relative to the textbook's method, and the memory relative to FlashInside.

    Speed 1x is log-sum-exp or, at sizes where it was not measured, log-einsum-exp.
    """
    lines = ["| algorithm | N | words | ms | speed | GiB | memory |", "|---|---|---|---|---|---|---|"]
    sizes = list(dict.fromkeys((row["nonterminals"], row["words"], row["sentences"]) for row in rows))
    for size in sizes:
        here = {
            str(row["method"]): row for row in rows if (row["nonterminals"], row["words"], row["sentences"]) == size
        }
        timed = {method: row for method, row in here.items() if row["p50_ms"] not in ("", None)}
        textbook = next((timed[m] for m in ("log-sum-exp", "log-einsum-exp") if m in timed), None)
        ours = timed.get("triton") or timed.get("torch")
        for method in ("log-sum-exp", "log-einsum-exp", "torch", "triton"):
            if method not in here:
                continue
            start = f"| {NAMES.get(method, method)} | {size[0]} | {size[1]} |"
            if method not in timed:
                lines.append(f"{start} {here[method]['note']} | | | |")
                continue
            row = timed[method]
            speed = _ratio(textbook, row, "p50_ms") if textbook else ""
            memory = _ratio(row, ours, "peak_gib") if ours and row["peak_gib"] != "" else ""  # "": on a CPU
            lines.append(f"{start} {row['p50_ms']} | {speed} | {row['peak_gib']} | {memory} |")
    return "\n".join(lines)


def _ratio(above: Row, below: Row, field: str) -> str:
    numerator, denominator = float(str(above[field])), float(str(below[field]))
    return f"{numerator / denominator:.1f}x" if denominator else ""


if __name__ == "__main__":
    sys.exit(main())
