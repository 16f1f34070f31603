"""Linear and residual layers whose weights are fp32 while all else is in the type of x.

In bf16 autograd would round every gradient of a weight to bf16 and launch 30 kernels for two layers, most of them to
convert a few numbers. Here weights get gradients that were summed in fp32, and what lies between two products of
residual layers is one kernel on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_inside.devices import in_triton
from flash_inside.precision import product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in the type of x, with gradients of W and b that are summed in theirs: [R, d] -> [R, e]."""
    return _Linear.apply(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        narrow = weight.to(x.dtype)
        ctx.save_for_backward(x, narrow)
        ctx.wide, ctx.biased = weight.dtype, bias is not None
        return torch.nn.functional.linear(x, narrow, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow = ctx.saved_tensors
        d_bias = gradient.sum(0, dtype=ctx.wide) if ctx.biased else None
        return gradient @ narrow, product(gradient.T, x, ctx.wide), d_bias


def residual_layers(x: Tensor, skip: Tensor | None, *weights: Tensor) -> Tensor:
    """relu(... relu(x W1^T + b1) ... W_n^T + b_n) + skip, where None is x: [R, d] -> [R, d].

    weights: W1, b1, W2, b2, ...; as they are in fp32, or in the type of x
    """
    return _ResidualLayers.apply(x, skip, *weights)


class _ResidualLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, skip: Tensor | None, *weights: Tensor) -> Tensor:
        inputs, sums, narrow = [x], [], []
        layers = list(zip(weights[::2], weights[1::2], strict=True))
        for number, (weight, bias) in enumerate(layers, 1):
            narrow.append(weight.to(x.dtype))
            sums.append(inputs[-1] @ narrow[-1].T)
            added = None if number < len(layers) else x if skip is None else skip
            inputs.append(_activated(sums[-1], bias, added))
        ctx.own_skip, ctx.count = skip is None, len(layers)
        ctx.save_for_backward(*inputs[:-1], *sums, *narrow, *weights[1::2])
        return inputs[-1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        count, saved = ctx.count, ctx.saved_tensors
        inputs, sums, narrow, biases = (saved[first : first + count] for first in range(0, 4 * count, count))
        of_weights: list[Tensor] = []
        d_x = gradient
        for number in reversed(range(count)):
            d_sum, d_bias = _activation_gradient(d_x.contiguous(), sums[number], biases[number])
            of_weights[:0] = product(d_sum.T, inputs[number], biases[number].dtype), d_bias
            if number == 0 and ctx.own_skip:
                d_x = torch.addmm(gradient, d_sum, narrow[number])
            else:
                d_x = d_sum @ narrow[number]
        return d_x, None if ctx.own_skip else gradient, *of_weights


def _activated(sums: Tensor, bias: Tensor, skip: Tensor | None) -> Tensor:
    """relu(sums + bias) + skip"""
    if in_triton(sums):
        from flash_inside.triton import rows  # imported where it is used: needs triton

        out = torch.empty_like(sums)
        rows.activated(sums, bias, skip, out)
        return out
    positive = torch.relu(sums + bias)
    return (positive if skip is None else positive + skip).to(sums.dtype)


def _activation_gradient(gradient: Tensor, sums: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients by the sums [R, d] and by the bias [d]."""
    if in_triton(sums):
        from flash_inside.triton import rows

        out = torch.empty_like(sums)
        return out, rows.activation_gradient(gradient, sums, bias, out)
    d_sums = torch.where(sums + bias <= 0, 0.0, gradient)
    return d_sums, d_sums.sum(0, dtype=bias.dtype)
