"""`main(argv)`: time forward + backward over a grid of sizes, check each against fp64 first, write one CSV and a plot.

    python -m flash_inside.benchmarks.inside --csv inside.csv --plot inside.svg
    python -m flash_inside.benchmarks.inside --grid 512x20x16,8192xptbx16 --methods triton
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
import datetime
import importlib.metadata
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import flash_inside
from flash_inside.benchmarks import accuracy, baselines, table1
from flash_inside.benchmarks.accuracy import TOLERANCE
from flash_inside.benchmarks.arguments import check_files, default_grid, find_device, not_negative
from flash_inside.benchmarks.lengths import ptb_lengths
from flash_inside.benchmarks.plot import draw
from flash_inside.benchmarks.results import Results, Row, out_of_memory, read_rows
from flash_inside.memory import check_memory
from flash_inside.rules import Rules

GRID = "512x20x16,512x40x16,2048x40x16,4096x40x16,8192x20x16,8192x40x16,8192x25x64"
GRID_WITHOUT_GPU = "64x20x16,128x20x16"
METHODS = ("triton", "torch", "log-einsum-exp", "log-sum-exp")
FIELDS = (
    "method", "nonterminals", "words", "sentences", "precision", "p20_ms", "p50_ms", "p80_ms", "peak_gib",
    "accumulating_gib", "training_gib", "total_gib", "error", "gradient_error", "share_of_ceiling", "ceiling_tflops",
    "device", "torch", "triton", "date", "note",
)  # fmt: skip


class Size(NamedTuple):
    nonterminals: int
    words: int | str  # of every sentence, or "ptb"
    sentences: int

    @property
    def lengths(self) -> list[int]:
        return ptb_lengths(self.sentences) if isinstance(self.words, str) else [self.words] * self.sentences

    @property
    def spans(self) -> int:
        """Of two words or more."""
        return sum(length * (length - 1) // 2 for length in self.lengths)

    @property
    def flops(self) -> float:
        """Of the matrix products, forward and backward: three for the spans (those of whole sentences too, though they
        need fewer), three for the words."""
        n = self.nonterminals
        return 3 * 2 * 2 * n * (n * self.spans + 2 * n * sum(self.lengths))


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    results = Results(FIELDS, arguments.csv, arguments.plot, draw)
    for row in _measured(arguments) if arguments.from_csv is None else arguments.from_csv:
        if arguments.table1 and not any(_is_of(row, size) for size in arguments.grid):
            continue  # of a table with other sizes too
        results.add(row)
        print(_line(row), flush=True)
    if arguments.table1:
        print(table1.table(results.rows))
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
            if arguments.table1 and method == "log-sum-exp" and size.nonterminals > table1.LARGEST_LOG_SUM_EXP:
                continue
            yield _measure(method, size, arguments.precision, device, arguments.seconds, ceiling)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench inside", description="time the inside algorithm")
    parser.add_argument(
        "--grid", type=parse_grid, help=f"sizes NxWORDSxSENTENCES (default {GRID}; without a GPU {GRID_WITHOUT_GPU})"
    )
    parser.add_argument("--table1", action="store_true", help=f"the paper's table 1 (default grid {table1.GRID})")
    parser.add_argument("--methods", type=_methods, default=list(METHODS), help=f"default {','.join(METHODS)}")
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), default="bf16", help="of triton and torch")
    parser.add_argument("--seconds", type=not_negative, default=1.0, help="time to spend on each measurement")
    parser.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG file")
    parser.add_argument("--from-csv", type=_rows, metavar="CSV", help="measure nothing: show what was measured")
    arguments = parser.parse_args(argv)
    arguments.device = find_device(parser, arguments.device)
    check_files(parser, [arguments.csv, arguments.plot])
    if arguments.from_csv is not None and arguments.grid is not None and not arguments.table1:
        parser.error("--grid has no effect with --from-csv, but with --table1")
    if arguments.grid is None:
        large = table1.GRID if arguments.table1 else GRID
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


def parse_grid(text: str) -> list[Size]:
    sizes = []
    for part in text.split(","):
        size = re.fullmatch(r"0*([1-9]\d*)x0*([1-9]\d*|ptb)x0*([1-9]\d*)", part)
        if size is None or size[2] == "1":
            raise argparse.ArgumentTypeError(
                f"{part!r}: sizes are NxWORDSxSENTENCES, with at least two words (or `ptb`)"
            )
        sizes.append(Size(int(size[1]), "ptb" if size[2] == "ptb" else int(size[2]), int(size[3])))
    return sizes


def _methods(text: str) -> list[str]:
    methods = text.split(",")
    unknown = set(methods) - set(METHODS)
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown method {', '.join(sorted(unknown))}: use {', '.join(METHODS)}")
    return methods


def make_inputs(size: Size, precision: str, device: torch.device) -> list[Tensor]:
    """root, left, right, emissions of a random grammar; the rules in the type the precision works in."""
    generator = torch.Generator(device).manual_seed(1)
    n, rules_type = size.nonterminals, torch.bfloat16 if precision == "bf16" else torch.float32
    chart = size.spans * 3 * n * rules_type.itemsize  # beta, eta and zeta: there is more
    check_memory(2 * 3 * n * n * rules_type.itemsize + sum(size.lengths) * 2 * n * 4 + chart, device)

    def softmax(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).softmax(-1)

    root, left, right = (
        softmax(n if size.words != "ptb" else 3 * n),
        softmax(n, 3 * n).to(rules_type),
        softmax(n, 3 * n).to(rules_type),
    )
    emissions = torch.randn(sum(size.lengths), 2 * n, device=device, generator=generator) - 8
    return [tensor.requires_grad_() for tensor in (root, left, right, emissions)]


def _function(
    method: str, precision: str, verdicts: list[Tensor], of_rules: tuple[Tensor, Tensor] | None = None
) -> accuracy.Inside:
    """verdicts: will hold which sentences of the last pass can be trusted."""
    if method == "log-einsum-exp":
        return baselines.log_einsum_exp
    if method == "log-sum-exp":
        return baselines.log_sum_exp

    def inside(rules: Rules, emissions: Tensor, lengths: list[int]) -> Tensor:
        log_z, trusted = flash_inside.inside_unchecked(rules, emissions, lengths, precision, method, of_rules)
        verdicts[:] = [trusted]
        return log_z

    return inside


def is_right(method: str, precision: str, error: float, gradient_error: float | None) -> bool:
    """Whether the errors of log Z and of the gradients (None: not known) are no more than is allowed."""
    of_log_z = TOLERANCE[precision][0] if method in ("triton", "torch") else 10 * TOLERANCE["fp32"][0]
    of_gradients = TOLERANCE[precision][1]  # whatever a method computes in, the rules' gradients are of their type
    return error <= of_log_z and (gradient_error is None or gradient_error <= of_gradients)


def errors_of(method: str, size: Size, precision: str, device: torch.device) -> tuple[float, float | None]:
    """Of log Z and of the gradients, against fp64 on the same rounded tensors, for two sentences."""
    small = size._replace(sentences=min(2, size.sentences))
    inputs = [tensor.detach() for tensor in make_inputs(small, precision, device)]
    function = _function(method, precision, [])
    try:
        wide = [tensor.double() for tensor in inputs]
        truth, counts = accuracy.expected_counts(_torch("fp64"), wide, small.lengths)
        del wide
        ours, our_counts = accuracy.expected_counts(function, inputs, small.lengths)
        return (
            accuracy.error_of_log_z(ours, truth, small.lengths),
            accuracy.error_of_counts(our_counts, counts, inputs),
        )
    except torch.cuda.OutOfMemoryError:
        print(f"N {size.nonterminals}: no memory for gradients in fp64; log Z is checked, in fp32", file=sys.stderr)
    # Only here: while an exception is handled, it keeps the tensors of where it was raised.
    with torch.no_grad():
        ours = function(Rules(*inputs[:3]), inputs[3], small.lengths).double()
        wide = [tensor.float() for tensor in inputs]
        truth = _torch("fp32")(Rules(*wide[:3]), wide[3], small.lengths).double()
    return accuracy.error_of_log_z(ours, truth, small.lengths), None


def _torch(precision: str) -> accuracy.Inside:
    return lambda rules, emissions, lengths: flash_inside.inside(rules, emissions, lengths, precision, "torch")


def _measure(method: str, size: Size, precision: str, device: torch.device, seconds: float, ceiling: float) -> Row:
    row: Row = dict.fromkeys(FIELDS, "")
    row |= {"method": method, "precision": precision if method in ("triton", "torch") else "fp32"}
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
    times.sort()
    for name, share in (("p20_ms", 0.2), ("p50_ms", 0.5), ("p80_ms", 0.8)):
        row[name] = round(times[round(share * (len(times) - 1))], 4)
    for column, peak in peaks.items():
        row[column] = round(peak / 2**30, 3)
    row["share_of_ceiling"] = round(size.flops / (ceiling * 1e12) / (float(row["p50_ms"]) / 1e3), 3)
    return row


def _times(
    method: str, size: Size, precision: str, device: torch.device, seconds: float
) -> tuple[list[float], dict[str, int]]:
    """Milliseconds of single passes, and on a GPU the peaks of memory in bytes, by the column they belong to."""
    inputs, lengths = make_inputs(size, precision, device), size.lengths
    verdicts: list[Tensor] = []
    function = _function(method, precision, verdicts)

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
    """Above inputs and memory for the gradients of the rules, which is there before and after."""
    of_rules = torch.empty_like(inputs[1]), torch.empty_like(inputs[2])
    _free_graphs("triton")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _function("triton", precision, [], of_rules)(Rules(*inputs[:3]), inputs[3], lengths).sum().backward()
    return torch.cuda.max_memory_allocated() - before


def _free_graphs(method: str) -> None:
    """The memory of graphs counts: let it be taken again."""
    if method == "triton":
        from flash_inside import triton_graphs

        triton_graphs.clear()


def milliseconds(function: Callable[[], object], device: torch.device, passes: int = 1) -> list[float]:
    """Of each of some passes in a row."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(passes):
            function()
        return [(time.perf_counter() - start) * 1e3 / passes] * passes
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(passes + 1)]
    function()  # so that the first mark is not waited for
    marks[0].record()
    for mark in marks[1:]:
        function()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(marks)]


def _ceiling(device: torch.device) -> float:
    """TFLOP/s of a large matrix product: bf16 on a GPU, fp32 on a CPU."""
    side, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    times = sorted(milliseconds(lambda: a @ b, device, passes=15))
    return 2 * side**3 / times[7] / 1e9


def machine(device: torch.device) -> dict[str, str]:
    try:
        triton_version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton_version = "none"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return {"device": name, "torch": torch.__version__, "triton": triton_version, "date": date}


def _line(row: Row) -> str:
    size = f"{row['nonterminals']:>6} x {row['words']:>3} x {row['sentences']:>3}  {row['method']:<15}"
    if row["note"]:
        return f"{size} {row['note']}"
    share, error = 100 * float(row["share_of_ceiling"]), float(row["error"])
    memory = f"{row['peak_gib']:>7} GiB  " if row["peak_gib"] != "" else ""  # of a GPU
    return f"{size} {row['p50_ms']:>10} ms  {memory}{share:5.1f} % of the ceiling  error {error:.1e}"


if __name__ == "__main__":
    sys.exit(main())
