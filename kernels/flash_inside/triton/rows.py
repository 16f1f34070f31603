"""Triton kernels of the networks: the passes over rows of softmax/rows.py, and the dropout of dropout.py.

One program works on one row. It reads the row in blocks, the second time out of the cache.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def online(row, columns, c, count, BLOCK: tl.constexpr):
    """Largest value and sum of exp(value - largest) of the first `count` of a row.

    c: columns of the matrix. Where it is a multiple of 16 loads are 16 bytes wide, which no mask by `count` allows.
    """
    largest = float("-inf")
    total = 0.0
    for first in range(0, c, BLOCK):
        values = tl.load(row + first + columns, mask=first + columns < c, other=float("-inf")).to(tl.float32)
        values = tl.where(first + columns < count, values, float("-inf"))
        new = tl.maximum(largest, tl.max(values, 0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(values - new), 0)
        largest = new
    return largest, total


@triton.jit
def log_sum_exp_kernel(logits, out, stride, c, count, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    largest, total = online(logits + r * stride, tl.arange(0, BLOCK), c, count, BLOCK)
    tl.store(out + r, largest + tl.log(total))


@triton.jit
def scaled_exp_kernel(logits, log_divisor, factor, out, stride, out_stride, c, count, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < c
    values = tl.load(logits + r * stride + columns, mask=inside).to(tl.float32)
    values = tl.exp(values - tl.load(log_divisor + r)) * tl.load(factor + r)
    values = tl.where(columns < count, values, 0.0)
    tl.store(out + r * out_stride + columns, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def softmax_kernel(logits, out, stride, out_stride, c, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    largest, total = online(logits + r * stride, columns, c, c, BLOCK)
    for first in range(0, c, BLOCK):
        inside = first + columns < c
        values = tl.load(logits + r * stride + first + columns, mask=inside).to(tl.float32)
        values = tl.exp(values - largest) / total
        tl.store(out + r * out_stride + first + columns, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def softmax_gradient_kernel(probabilities, gradient, out, stride, gradient_stride, out_stride, c, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    products = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, c, BLOCK):
        inside = first + columns < c
        p = tl.load(probabilities + r * stride + first + columns, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + r * gradient_stride + first + columns, mask=inside, other=0.0).to(tl.float32)
        products += p * g
        total += p
    mean = tl.sum(products, 0) / tl.sum(total, 0)
    for first in range(0, c, BLOCK):
        inside = first + columns < c
        p = tl.load(probabilities + r * stride + first + columns, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + r * gradient_stride + first + columns, mask=inside, other=0.0).to(tl.float32)
        values = p * (g - mean)
        tl.store(out + r * out_stride + first + columns, values.to(out.dtype.element_ty), mask=inside)


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


#: Beyond so many columns, programs that read their row twice take more threads each: fewer of them are at work, so that
#: the cache still holds the row (an H200, 24,576 columns: softmax 0.36 ms instead of 0.45, its gradient 0.43 and 0.62).
LONG_ROW = 16384
#: Coordinates of one program of the dropout.
DROPOUT_BLOCK = 1024


def _block(columns: int, largest: int = 4096) -> dict[str, int]:
    """Choose block and warps so that a thread has 8 values."""
    size = min(largest, max(128, triton.next_power_of_2(columns)))
    return {"BLOCK": size, "num_warps": max(1, size // 256)}


def _block_of_two_reads(columns: int) -> dict[str, int]:
    return _block(columns, 8192 if columns > LONG_ROW else 4096)


def log_sum_exp(logits: Tensor, columns: int, out: Tensor) -> None:
    rows, all_columns = logits.shape
    if rows:
        log_sum_exp_kernel[(rows,)](logits, out, logits.stride(0), all_columns, columns, **_block(all_columns))


def scaled_exp(logits: Tensor, columns: int, log_divisor: Tensor, factor: Tensor, out: Tensor) -> None:
    rows, all_columns = logits.shape
    if rows:
        block = _block(all_columns)
        scaled_exp_kernel[(rows, triton.cdiv(all_columns, block["BLOCK"]))](
            logits, log_divisor, factor, out, logits.stride(0), out.stride(0), all_columns, columns, **block
        )


def softmax(logits: Tensor, out: Tensor) -> None:
    rows, columns = logits.shape
    if rows:
        softmax_kernel[(rows,)](logits, out, logits.stride(0), out.stride(0), columns, **_block_of_two_reads(columns))


def softmax_gradient(probabilities: Tensor, gradient: Tensor, out: Tensor) -> None:
    rows, columns = probabilities.shape
    if rows:
        softmax_gradient_kernel[(rows,)](
            probabilities, gradient, out, probabilities.stride(0), gradient.stride(0), out.stride(0), columns,
            **_block_of_two_reads(columns),
        )  # fmt: skip


def drop(
    x: Tensor, key: Tensor, threshold: int, scale: float, shifts: Sequence[int], factors: Sequence[int], out: Tensor
) -> None:
    if x.numel():
        dropout_kernel[(triton.cdiv(x.numel(), DROPOUT_BLOCK),)](
            x, key, out, x.numel(), threshold, scale, *shifts, *factors, BLOCK=DROPOUT_BLOCK
        )
