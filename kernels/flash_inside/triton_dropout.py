"""The Triton kernel of dropout.py."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flash_inside.dropout import FACTORS, SHIFTS

BLOCK = 1024


@triton.jit(do_not_specialize=["threshold"])
def dropout_kernel(
    x, key, out, count, threshold, scale,
    SHIFT_0: tl.constexpr, SHIFT_1: tl.constexpr, SHIFT_2: tl.constexpr,
    FACTOR_0: tl.constexpr, FACTOR_1: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of coordinates,)."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    mixed = (places * (tl.load(key) >> 1 | 1) + tl.load(key + 1)).to(tl.uint32)
    mixed = (mixed ^ (mixed >> SHIFT_0)) * FACTOR_0
    mixed = (mixed ^ (mixed >> SHIFT_1)) * FACTOR_1
    mixed = mixed ^ (mixed >> SHIFT_2)
    values = tl.load(x + places, mask=inside).to(tl.float32) * scale
    values = tl.where(mixed.to(tl.int64) >= threshold, values, 0.0)
    tl.store(out + places, values.to(out.dtype.element_ty), mask=inside)


def drop(x: Tensor, key: Tensor, threshold: int, scale: float, out: Tensor) -> None:
    if x.numel():
        dropout_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            x, key, out, x.numel(), threshold, scale, *SHIFTS, *FACTORS, BLOCK=BLOCK
        )
