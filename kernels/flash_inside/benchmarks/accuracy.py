"""How far log Z and expected counts may be from fp64 on the same rounded tensors, and how far they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flash_inside.rules import Rules

#: Of log Z, relative to max(|log Z|, words); of the counts, relative in norm.
TOLERANCE = {"fp64": (1e-12, 1e-10), "fp32": (1e-6, 1e-5), "tf32": (1e-4, 2e-3), "bf16": (3e-4, 2.5e-2)}

Inside = Callable[[Rules, Tensor, list[int]], Tensor]


def expected_counts(inside: Inside, inputs: Sequence[Tensor], lengths: list[int]) -> tuple[Tensor, list[Tensor]]:
    """log Z [B] in fp64, and for root, left, right and emissions probability times derivative."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    log_z = inside(Rules(*leaves[:3]), leaves[3], lengths)
    gradients = torch.autograd.grad(torch.where(log_z.isfinite(), log_z, 0.0).sum(), leaves)
    # By a log-probability the derivative is the count.
    counts = [leaf.detach().double() * gradient for leaf, gradient in zip(leaves[:3], gradients[:3], strict=True)]
    return log_z.detach().double(), [*counts, gradients[3].double()]


def error_of_log_z(ours: Tensor, truth: Tensor, lengths: list[int]) -> float:
    """Relative to max(|log Z|, words); the worst of the sentences that the grammar can generate."""
    possible = truth.isfinite()
    scale = torch.maximum(truth.abs(), torch.tensor(lengths, device=truth.device, dtype=torch.float64))
    return ((ours - truth).abs() / scale)[possible].max().item() if possible.any() else 0.0


def error_of_counts(ours: list[Tensor], truth: list[Tensor], inputs: Sequence[Tensor]) -> float:
    """Relative to the norm of all counts, the worst of the four; derivatives that fp32 cannot hold are left out."""
    limit = torch.finfo(torch.float32).max / 64
    worst = 0.0
    for number, (our_counts, counts) in enumerate(zip(ours, truth, strict=True)):
        difference = our_counts - counts
        if number < 3:  # the derivative is count / probability
            too_large = counts.abs() > inputs[number].double() * limit
            difference = difference.masked_fill(too_large, 0.0)
        worst = worse(worst, (difference.norm() / counts.norm().clamp(min=1e-300)).item())
    return worst


def worse(one: float, other: float) -> float:
    """The larger of two errors; NaN is the worst."""
    return other if not other <= one else one
