"""`main(argv)`: time of the best trees, checked first against fp64 and for being trees.

    python -m flash_inside.benchmarks.viterbi --grid 4096x40x16

A size is nonterminals x words x sentences; there are twice as many preterminals.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

import flash_inside
from flash_inside.benchmarks.arguments import default_grid, find_device, positive
from flash_inside.benchmarks.results import out_of_memory
from flash_inside.benchmarks.sizes import Size, make_inputs, parse_grid
from flash_inside.precision import TOLERANCE_OF_TREES
from flash_inside.rules import Rules

GRID, GRID_WITHOUT_GPU = "4096x40x16", "64x20x16"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench viterbi", description="time the best labelled binary trees")
    parser.add_argument(
        "--grid", type=parse_grid, help=f"sizes NxWORDSxSENTENCES ({GRID}; without a GPU {GRID_WITHOUT_GPU})"
    )
    parser.add_argument("--backend", choices=flash_inside.BACKENDS, default="auto")
    parser.add_argument("--repeats", type=positive, default=5, help="passes that are timed")
    parser.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    arguments = parser.parse_args(argv)
    device = find_device(parser, arguments.device, arguments.backend)
    on_gpu = device.type == "cuda"
    grid = arguments.grid or parse_grid(default_grid(on_gpu, "--grid", GRID, GRID_WITHOUT_GPU))
    wrong = False
    for size in grid:
        try:
            problem = _problem(size, device, arguments.backend)
            shown = problem or f"{_milliseconds(size, device, arguments.backend, arguments.repeats):.1f} ms"
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            problem = shown = "out of memory"
        print("x".join(map(str, size)), shown, flush=True)
        wrong |= problem is not None
    return 1 if wrong else 0


def _problem(size: Size, device: torch.device, backend: str) -> str | None:
    """Check two sentences and say what is wrong with their trees; None: nothing."""
    small = size._replace(sentences=min(2, size.sentences))
    inputs = [tensor.detach() for tensor in make_inputs(small, "fp32", device)]
    found = flash_inside.viterbi(Rules(*inputs[:3]), inputs[3], small.lengths, "fp32", backend)
    wide = [tensor.double() for tensor in inputs]
    truth = flash_inside.viterbi(Rules(*wide[:3]), wide[3], small.lengths, "fp64", "torch")
    for (score, tree), (true_score, _), words in zip(found, truth, small.lengths, strict=True):
        if not abs(score - true_score) <= TOLERANCE_OF_TREES * max(abs(true_score), words):
            return f"WRONG: score {score}, in fp64 {true_score}"
        if not is_binary_tree([(first, end) for first, end, _ in tree], words):
            return "WRONG: not a binary tree"
    return None


def is_binary_tree(spans: list[tuple[int, int]], words: int) -> bool:
    """Whether every span of two words or more splits into two others; parents come first, then left, then right."""
    following = iter(spans)

    def derives(first: int, end: int) -> bool:
        if next(following, None) != (first, end):
            return False
        if end - first == 1:
            return True
        middle = max((last for start, last in spans if start == first and last < end), default=None)
        return middle is not None and derives(first, middle) and derives(middle, end)

    return derives(0, words) and next(following, None) is None


def _milliseconds(size: Size, device: torch.device, backend: str, repeats: int) -> float:
    """Measure the median over passes that end with the trees on the host."""
    inputs = [tensor.detach() for tensor in make_inputs(size, "fp32", device)]
    times = []
    for _ in range(repeats + 1):  # the first compiles
        start = time.perf_counter()
        flash_inside.viterbi(Rules(*inputs[:3]), inputs[3], size.lengths, "fp32", backend)
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times[1:])[repeats // 2]


if __name__ == "__main__":
    sys.exit(main())
