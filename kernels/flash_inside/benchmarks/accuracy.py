"""How far log Z and expected counts are from fp64 on the same rounded tensors, and whether that is allowed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

import flash_inside
from flash_inside.benchmarks.methods import PER_SENTENCE, Inside, backend_of, function_of
from flash_inside.benchmarks.sizes import Size, make_inputs
from flash_inside.precision import TOLERANCE, largest_gradient
from flash_inside.rules import Rules


def expected_counts(inside: Inside, inputs: Sequence[Tensor], lengths: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Return log Z [B] in fp64, and for root, left, right and emissions probability times derivative."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    log_z = inside(Rules(*leaves[:3]), leaves[3], lengths)
    gradients = torch.autograd.grad(torch.where(log_z.isfinite(), log_z, 0.0).sum(), leaves)
    # By a log-probability the derivative is the count.
    counts = [leaf.detach().double() * gradient for leaf, gradient in zip(leaves[:3], gradients[:3], strict=True)]
    return log_z.detach().double(), [*counts, gradients[3].double()]


def error_of_log_z(ours: Tensor, truth: Tensor, lengths: list[int]) -> float:
    """Return the error relative to max(|log Z|, words): the worst of the sentences that the grammar can generate."""
    possible = truth.isfinite()
    scale = torch.maximum(truth.abs(), torch.tensor(lengths, device=truth.device, dtype=torch.float64))
    return ((ours - truth).abs() / scale)[possible].max().item() if possible.any() else 0.0


def error_of_counts(ours: list[Tensor], truth: list[Tensor], inputs: Sequence[Tensor]) -> float:
    """Return the worst of the four errors relative to the norm of counts, without derivatives too large for fp32."""
    limit = largest_gradient(torch.float32)
    worst = 0.0
    for number, (our_counts, counts) in enumerate(zip(ours, truth, strict=True)):
        difference = our_counts - counts
        if number < 3:  # the derivative is count / probability
            too_large = counts.abs() > inputs[number].double() * limit
            difference = difference.masked_fill(too_large, 0.0)
        worst = worse(worst, (difference.norm() / counts.norm().clamp(min=1e-300)).item())
    return worst


def worse(one: float, other: float) -> float:
    """Return the larger of two errors; NaN is the worst."""
    return other if not other <= one else one


def is_right(method: str, precision: str, error: float, gradient_error: float | None) -> bool:
    """Whether the errors of log Z and of the gradients (None: not known) are no more than is allowed."""
    of_log_z = TOLERANCE[precision][0] if backend_of(method) else 10 * TOLERANCE["fp32"][0]
    of_gradients = TOLERANCE[precision][1]  # whatever a method computes in, the rules' gradients are of their type
    return error <= of_log_z and (gradient_error is None or gradient_error <= of_gradients)


def errors_of(method: str, size: Size, precision: str, device: torch.device) -> tuple[float, float | None]:
    """Return the errors of log Z and of the gradients against fp64 on the same rounded tensors, for two sentences."""
    small = size._replace(sentences=min(2, size.sentences))
    inputs = [tensor.detach() for tensor in make_inputs(small, precision, device, method in PER_SENTENCE)]
    function = function_of(method, precision, [])
    try:
        wide = [tensor.double() for tensor in inputs]
        truth, counts = expected_counts(_torch("fp64"), wide, small.lengths)
        del wide
        ours, our_counts = expected_counts(function, inputs, small.lengths)
        return (
            error_of_log_z(ours, truth, small.lengths),
            error_of_counts(our_counts, counts, inputs),
        )
    except torch.cuda.OutOfMemoryError:
        print(f"N {size.nonterminals}: no memory for gradients in fp64; log Z is checked, in fp32", file=sys.stderr)
    # Only here: while an exception is handled, it keeps the tensors of where it was raised.
    with torch.no_grad():
        ours = function(Rules(*inputs[:3]), inputs[3], small.lengths).double()
        wide = [tensor.float() for tensor in inputs]
        truth = _torch("fp32")(Rules(*wide[:3]), wide[3], small.lengths).double()
    return error_of_log_z(ours, truth, small.lengths), None


def _torch(precision: str) -> Inside:
    return lambda rules, emissions, lengths: flash_inside.inside(rules, emissions, lengths, precision, "torch")
