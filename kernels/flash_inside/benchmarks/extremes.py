"""`main(argv)`: random grammars so peaked that numbers leave the range of fp32: is every result still right?

    python -m flash_inside.benchmarks.extremes --batches 10000 --deviation 30

Every batch has a grammar of its own, logits of the given standard deviation, and sentences of --shortest (2) to
--longest words. Log Z and all gradients, as expected counts, are compared with fp64 on the same tensors (for bf16: the
same rounded rules); exit status 1 if anything is wrong. Left out are rules that are needed at a probability whose
inverse no fp32 number holds (their gradient is the largest).
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor

import flash_inside
from flash_inside.benchmarks import accuracy
from flash_inside.benchmarks.arguments import at_least_two, find_device, not_negative, positive
from flash_inside.precision import FAST_PRECISIONS, TOLERANCE
from flash_inside.rules import Rules


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench extremes", description="compare peaked random grammars with fp64")
    parser.add_argument("--batches", type=positive, default=1000)
    parser.add_argument("--deviation", type=not_negative, default=30.0, help="of the logits")
    parser.add_argument("--nonterminals", type=positive, default=64)
    parser.add_argument("--sentences", type=positive, default=16, help="of a batch")
    parser.add_argument("--shortest", type=at_least_two, default=2, help="words of a sentence, at least")
    parser.add_argument("--longest", type=at_least_two, default=16, help="words of a sentence, at most")
    parser.add_argument("--precision", choices=FAST_PRECISIONS, default="fp32")
    parser.add_argument("--backend", choices=flash_inside.BACKENDS, default="auto")
    parser.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.shortest > arguments.longest:
        parser.error(f"--shortest {arguments.shortest} is more than --longest {arguments.longest}")
    device = find_device(parser, arguments.device, arguments.backend)
    if arguments.backend == "reference" and arguments.precision != "fp32":
        parser.error(f"--backend reference computes in fp32 here, not in {arguments.precision}")
    generator = torch.Generator(device).manual_seed(arguments.seed)
    statistics = flash_inside.Statistics()
    wrong = not_finite = impossible = 0
    worst = [0.0, 0.0]
    shown = time.perf_counter()
    for number in range(1, arguments.batches + 1):
        inputs, lengths = _batch(arguments, device, generator)
        ours, our_counts = _pass(inputs, lengths, arguments.precision, arguments.backend, statistics)
        truth, counts = _pass([tensor.double() for tensor in inputs], lengths, "fp64", "torch")
        finite = all(count.isfinite().all() for count in our_counts) and not ours.isnan().any()
        possible = truth.isfinite()
        impossible += int((~possible).sum())
        not_finite += int(not finite or not torch.equal(ours.isfinite(), possible))
        error = accuracy.error_of_log_z(ours, truth, lengths)
        count_error = accuracy.error_of_counts(our_counts, counts, inputs)
        worst = [accuracy.worse(worst[0], error), accuracy.worse(worst[1], count_error)]
        allowed = TOLERANCE[arguments.precision]
        wrong += int(not (error <= allowed[0] and count_error <= allowed[1]))
        if time.perf_counter() - shown > 10:
            shown = time.perf_counter()
            print(f"{number} batches, {wrong} wrong, {not_finite} not finite", file=sys.stderr, flush=True)
    print(
        f"{arguments.batches} batches of {arguments.sentences}, {arguments.shortest} to {arguments.longest} words, "
        f"N {arguments.nonterminals}, deviation {arguments.deviation:g}, {arguments.precision}: {wrong} wrong, "
        f"{not_finite} not finite, {statistics.recomputed} of {statistics.sentences} sentences recomputed, "
        f"{impossible} impossible; worst error {worst[0]:.1e} of log Z, {worst[1]:.1e} of the counts"
    )
    return 1 if wrong or not_finite else 0


def _batch(
    arguments: argparse.Namespace, device: torch.device, generator: torch.Generator
) -> tuple[list[Tensor], list[int]]:
    n, count = arguments.nonterminals, arguments.sentences
    most = arguments.longest + 1
    lengths = torch.randint(arguments.shortest, most, (count,), generator=generator, device=device).tolist()

    def logits(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device) * arguments.deviation

    root, left, right = (logits(*shape).softmax(-1) for shape in ((n,), (n, 3 * n), (n, 3 * n)))
    if arguments.precision == "bf16":
        left, right = left.bfloat16(), right.bfloat16()
    words = max(1000, sum(lengths))  # each preterminal's distribution is over that many
    emissions = logits(words, 2 * n).log_softmax(0)[: sum(lengths)]
    return [root, left, right, emissions], lengths


def _pass(
    inputs: list[Tensor],
    lengths: list[int],
    precision: str,
    backend: str,
    statistics: flash_inside.Statistics | None = None,
) -> tuple[Tensor, list[Tensor]]:
    def inside(rules: Rules, emissions: Tensor, lengths: list[int]) -> Tensor:
        return flash_inside.inside(rules, emissions, lengths, precision, backend, statistics)

    return accuracy.expected_counts(inside, inputs, lengths)


if __name__ == "__main__":
    sys.exit(main())
