"""The passes over rows of logits or probabilities: one Triton kernel each on a GPU, PyTorch elsewhere.

On a GPU without Triton PyTorch does them too, more slowly, and a warning says so. They compute in the type of their
input; what they write may be narrower.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_inside.devices import in_triton


def log_sum_exp(logits: Tensor, columns: int, out: Tensor) -> None:
    """Compute logsumexp over the first columns: [R, C] -> [R]."""
    if in_triton(logits):
        from flash_inside.triton import rows as kernels

        kernels.log_sum_exp(logits, columns, out)
    else:
        torch.logsumexp(logits[:, :columns], dim=1, out=out)


def scaled_exp(logits: Tensor, columns: int, log_divisor: Tensor, factor: Tensor, out: Tensor) -> None:
    """exp(logits - log_divisor) * factor in the first columns, 0 in the others: [R, C], [R], [R] -> [R, C].

    `out` may be the logits themselves.
    """
    if in_triton(logits):
        from flash_inside.triton import rows as kernels

        kernels.scaled_exp(logits, columns, log_divisor, factor, out)
    else:
        out[:, :columns] = (logits[:, :columns] - log_divisor[:, None]).exp_().mul_(factor[:, None])
        out[:, columns:] = 0


def softmax(logits: Tensor, out: Tensor) -> None:
    """Compute the softmax of every row: [R, C] -> [R, C] in the type of `out`."""
    if in_triton(logits):
        from flash_inside.triton import rows as kernels

        kernels.softmax(logits, out)
    else:
        out.copy_(torch.softmax(logits, dim=1))


def softmax_and_log_sum_exp(logits: Tensor, columns: int, out: Tensor, log_sums: Tensor) -> None:
    """Compute both over the first columns: [R, C] -> [R, C], 0 in the others, and [R]. The logits may be lost."""
    if in_triton(logits):
        from flash_inside.triton import rows as kernels

        kernels.softmax_and_log_sum_exp(logits, columns, out, log_sums)
    else:
        some, largest = logits[:, :columns], logits[:, :columns].amax(1)
        sums = some.sub_(largest[:, None]).exp_().sum(1)
        torch.add(largest, sums.log(), out=log_sums)
        torch.div(some, sums[:, None], out=out[:, :columns])
        out[:, columns:] = 0


def softmax_gradient(probabilities: Tensor, gradient: Tensor, out: Tensor) -> None:
    """p * (g - sum(p * g) / sum(p)): the gradient by the logits, in the type of `out`.

    The sum of rounded probabilities is not 1. Without the division a gradient that is the same for all entries of a
    row, which means nothing to a softmax, would come through times that error.
    """
    if in_triton(gradient):
        from flash_inside.triton import rows as kernels

        kernels.softmax_gradient(probabilities, gradient, out)
    else:
        wide = probabilities.to(gradient.dtype)
        mean = (wide * gradient).sum(1, keepdim=True) / wide.sum(1, keepdim=True)
        out.copy_((gradient - mean).mul_(wide))
