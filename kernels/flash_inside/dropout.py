"""Dropout that hashes a key and the coordinate: it is the same on every device, and keeps nothing for the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_inside.devices import in_triton

LOW_32_BITS = 0xFFFFFFFF
#: The hash mixes 32 bits in three rounds: each shifts, and all but the last multiply.
SHIFTS, FACTORS = (16, 15, 15), (0x21F0AAAD, 0x735A2D97)


def hashed_dropout(x: Tensor, rate: float, key: Tensor) -> Tensor:
    """Set a random part of x to 0, and multiply the others by 1 / (1 - rate), so that the expectation stays.

    key: two integers of 32 bits as int64, on the device of x where a CUDA graph is to read others at every replay.
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"rate {rate} should be at least 0 and below 1")
    return _HashedDropout.apply(x, rate, key.to(x.device, non_blocking=True)) if rate else x


class _HashedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, key: Tensor) -> Tensor:
        ctx.rate = rate
        ctx.save_for_backward(key)
        return _drop(x.contiguous(), rate, key)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _drop(gradient.contiguous(), ctx.rate, *ctx.saved_tensors), None, None


def _drop(x: Tensor, rate: float, key: Tensor) -> Tensor:
    threshold, scale = round(rate * 2**32), 1.0 / (1.0 - rate)
    if not in_triton(x):
        return torch.where(_hash(x.numel(), key).view(x.shape) >= threshold, x * scale, 0.0)
    from flash_inside.triton import rows  # imported where it is used: needs triton

    out = torch.empty_like(x)
    rows.drop(x, key, threshold, scale, SHIFTS, FACTORS, out)
    return out


def _hash(count: int, key: Tensor) -> Tensor:
    """[count], int64 of 32 bits: a linear sequence of its own for each key, then a mix. No product leaves int64."""
    first, second = key
    x = torch.arange(count, device=key.device) * (first >> 1 | 1) + second
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        x = x & LOW_32_BITS
        x = (x ^ (x >> shift)) * factor
    x = x & LOW_32_BITS
    return x ^ (x >> SHIFTS[-1])
