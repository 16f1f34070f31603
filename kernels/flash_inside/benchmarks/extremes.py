"""`main(argv)`: random grammars so peaked that numbers leave the range of fp32: is every result still right?

    python -m flash_inside.benchmarks.extremes --batches 10000 --deviation 30

Every batch has a grammar of its own, logits of the given standard deviation, and sentences of 2 to --longest words.
Log Z and all gradients, as expected counts, are compared with fp64 on the same tensors (for bf16: the same rounded
rules); exit status 1 if anything is wrong. Left out are rules that are needed at a probability whose inverse no fp32
number holds (their gradient is the largest).
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor

import flash_inside
from flash_inside.benchmarks.arguments import at_least_two, find_device, positive
from flash_inside.rules import Rules

#: Of log Z, relative to max(|log Z|, words); of the expected counts, relative in norm.
TOLERANCE = {"fp32": (1e-6, 1e-5), "tf32": (1e-4, 2e-3), "bf16": (3e-4, 2.5e-2)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench extremes", description="compare peaked random grammars with fp64")
    parser.add_argument("--batches", type=positive, default=1000)
    parser.add_argument("--deviation", type=float, default=30.0, help="of the logits")
    parser.add_argument("--nonterminals", type=positive, default=64)
    parser.add_argument("--sentences", type=positive, default=16, help="of a batch")
    parser.add_argument("--longest", type=at_least_two, default=16, help="words of a sentence, at most")
    parser.add_argument("--precision", choices=tuple(TOLERANCE), default="fp32")
    parser.add_argument("--backend", choices=flash_inside.BACKENDS, default="auto")
    parser.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    device = find_device(parser, arguments.device, arguments.backend)
    generator = torch.Generator(device).manual_seed(arguments.seed)
    statistics = flash_inside.Statistics()
    wrong = not_finite = impossible = 0
    worst = [0.0, 0.0]
    shown = time.perf_counter()
    for number in range(1, arguments.batches + 1):
        inputs, lengths = _batch(arguments, device, generator)
        ours, our_counts = _pass(inputs, lengths, arguments.precision, arguments.backend, statistics)
        truth, counts = _pass([tensor.double() for tensor in inputs], lengths, "fp64", "torch", None)
        finite = all(count.isfinite().all() for count in our_counts) and not ours.isnan().any()
        possible = truth.isfinite()
        impossible += int((~possible).sum())
        not_finite += int(not finite or not torch.equal(ours.isfinite(), possible))
        scale = torch.maximum(truth.abs(), torch.tensor(lengths, device=device, dtype=torch.float64))
        error = ((ours - truth).abs() / scale)[possible].max().item() if possible.any() else 0.0
        count_error = max(map(_difference, our_counts, counts, [tensor.double() for tensor in inputs[:3]] + [None]))
        worst = [max(worst[0], error), max(worst[1], count_error)]
        allowed = TOLERANCE[arguments.precision]
        wrong += int(not (error <= allowed[0] and count_error <= allowed[1]))
        if time.perf_counter() - shown > 10:
            shown = time.perf_counter()
            print(f"{number} batches, {wrong} wrong, {not_finite} not finite", file=sys.stderr, flush=True)
    print(
        f"{arguments.batches} batches of {arguments.sentences}, up to {arguments.longest} words, N "
        f"{arguments.nonterminals}, deviation {arguments.deviation:g}, {arguments.precision}: {wrong} wrong, "
        f"{not_finite} not finite, {statistics.recomputed} of {statistics.sentences} sentences recomputed, "
        f"{impossible} impossible; worst error {worst[0]:.1e} of log Z, {worst[1]:.1e} of the counts"
    )
    return 1 if wrong or not_finite else 0


def _batch(
    arguments: argparse.Namespace, device: torch.device, generator: torch.Generator
) -> tuple[list[Tensor], list[int]]:
    n, count = arguments.nonterminals, arguments.sentences
    lengths = torch.randint(2, arguments.longest + 1, (count,), generator=generator, device=device).tolist()

    def logits(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device) * arguments.deviation

    root, left, right = (logits(*shape).softmax(-1) for shape in ((n,), (n, 3 * n), (n, 3 * n)))
    if arguments.precision == "bf16":
        left, right = left.bfloat16(), right.bfloat16()
    words = max(1000, sum(lengths))  # each preterminal's distribution is over that many
    emissions = logits(words, 2 * n).log_softmax(0)[: sum(lengths)]
    return [root, left, right, emissions], lengths


def _difference(counts: Tensor, truth: Tensor, probabilities: Tensor | None) -> float:
    if probabilities is not None:  # the gradient is count / probability
        held = truth.abs() <= probabilities * (torch.finfo(torch.float32).max / 64)
        counts, truth = counts[held], truth[held]
    return ((counts - truth).norm() / truth.norm().clamp(min=1e-300)).item()


def _pass(
    inputs: list[Tensor], lengths: list[int], precision: str, backend: str, statistics: flash_inside.Statistics | None
) -> tuple[Tensor, list[Tensor]]:
    """log Z in fp64, and the expected counts: probability times its derivative."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    log_z = flash_inside.inside(Rules(*leaves[:3]), leaves[3], lengths, precision, backend, statistics)
    gradients = torch.autograd.grad(torch.where(log_z.isfinite(), log_z, 0.0).sum(), leaves)
    counts = [(leaf.double() * gradient.double()).detach() for leaf, gradient in zip(leaves, gradients, strict=True)]
    counts[3] = gradients[3].double()  # by a log-probability the derivative is the count
    return log_z.detach().double(), counts


if __name__ == "__main__":
    sys.exit(main())
