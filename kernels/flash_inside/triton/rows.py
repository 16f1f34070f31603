"""Triton kernels of the networks: the passes over rows of softmax/rows.py, those of residual.py, and dropout.py.

In the softmaxes one program works on one row. It reads the row in blocks, the second time out of the cache.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence

import torch
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
def softmax_kernel(
    logits,
    out,
    log_sums,
    stride,
    out_stride,
    c,
    count,
    WHOLE: tl.constexpr,
    LOG_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Softmax of the first `count` of c columns, 0 in the others.

    WHOLE: a block is a whole row, which is read once; LOG_SUMS: write the logarithms of the divisors, too
    """
    r = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    if WHOLE:
        values = tl.load(logits + r * stride + columns, mask=columns < c, other=float("-inf")).to(tl.float32)
        values = tl.where(columns < count, values, float("-inf"))
        largest = tl.max(values, 0)
        values = tl.exp(values - largest)
        total = tl.sum(values, 0)
        values *= 1.0 / total
        tl.store(out + r * out_stride + columns, values.to(out.dtype.element_ty), mask=columns < c)
    else:
        largest, total = online(logits + r * stride, columns, c, count, BLOCK)
        for first in range(0, c, BLOCK):
            inside = first + columns < c
            values = tl.load(logits + r * stride + first + columns, mask=inside).to(tl.float32)
            values = tl.where(first + columns < count, tl.exp(values - largest) / total, 0.0)
            tl.store(out + r * out_stride + first + columns, values.to(out.dtype.element_ty), mask=inside)
    if LOG_SUMS:
        tl.store(log_sums + r, largest + tl.log(total))


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


@triton.jit
def activated_kernel(sums, bias, skip, out, count, d, SKIP: tl.constexpr, BLOCK: tl.constexpr):
    """relu(sums + bias) + skip. Grid: (blocks of the [R, d] numbers,)."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    values = tl.load(sums + places, mask=inside).to(tl.float32)
    values += tl.load(bias + places % d, mask=inside).to(tl.float32)
    values = tl.where(values <= 0.0, 0.0, values)  # NaN stays NaN
    if SKIP:
        values += tl.load(skip + places, mask=inside).to(tl.float32)
    tl.store(out + places, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def activation_gradient_kernel(
    gradient, sums, bias, out, totals, rows, d, ROWS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr
):
    """out = gradient where sums + bias > 0, and the totals of ROWS rows of it. Grid: (parts of R, blocks of d)."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < d
    b = tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for row in range(0, ROWS, STEP):
        r = first + row + tl.arange(0, STEP)
        inside = (r < rows)[:, None] & there[None]
        places = r[:, None] * d + columns[None]
        s = tl.load(sums + places, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
        g = tl.where(s + b[None] <= 0.0, 0.0, g)
        total += tl.sum(g, 0)
        tl.store(out + places, g.to(out.dtype.element_ty), mask=inside)
    tl.store(totals + tl.program_id(0) * d + columns, total, mask=there)


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
#: Up to so many columns a softmax holds the row in registers, at most 32 values a thread, and reads it once.
LONGEST_WHOLE_ROW = 32768
#: Coordinates of one program of the dropout.
DROPOUT_BLOCK = 1024
#: Numbers of one program of an activation, and rows and columns of one of its gradient.
ACTIVATION_BLOCK, GRADIENT_ROWS, GRADIENT_COLUMNS = 2048, 64, 128


def _block(columns: int, largest: int = 4096) -> dict[str, int]:
    """Choose block and warps so that a thread has 8 values."""
    size = min(largest, max(128, triton.next_power_of_2(columns)))
    return {"BLOCK": size, "num_warps": max(1, size // 256)}


def _block_of_whole_row(columns: int) -> dict[str, int]:
    size = max(128, triton.next_power_of_2(columns))
    return {"BLOCK": size, "num_warps": max(1, min(32, size // 512))}


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
    _softmax(logits, logits.shape[1], out, out, LOG_SUMS=False)


def softmax_and_log_sum_exp(logits: Tensor, columns: int, out: Tensor, log_sums: Tensor) -> None:
    _softmax(logits, columns, out, log_sums, LOG_SUMS=True)


def _softmax(logits: Tensor, columns: int, out: Tensor, log_sums: Tensor, LOG_SUMS: bool) -> None:
    rows, all_columns = logits.shape
    if rows:
        whole = all_columns <= LONGEST_WHOLE_ROW
        block = _block_of_whole_row(all_columns) if whole else _block_of_two_reads(all_columns)
        softmax_kernel[(rows,)](
            logits, out, log_sums, logits.stride(0), out.stride(0), all_columns, columns, WHOLE=whole,
            LOG_SUMS=LOG_SUMS, **block,
        )  # fmt: skip


def softmax_gradient(probabilities: Tensor, gradient: Tensor, out: Tensor) -> None:
    rows, columns = probabilities.shape
    if rows:
        softmax_gradient_kernel[(rows,)](
            probabilities, gradient, out, probabilities.stride(0), gradient.stride(0), out.stride(0), columns,
            **_block_of_two_reads(columns),
        )  # fmt: skip


def activated(sums: Tensor, bias: Tensor, skip: Tensor | None, out: Tensor) -> None:
    if sums.numel():
        activated_kernel[(triton.cdiv(sums.numel(), ACTIVATION_BLOCK),)](
            sums, bias, sums if skip is None else skip.contiguous(), out, sums.numel(), sums.shape[1],
            SKIP=skip is not None, BLOCK=ACTIVATION_BLOCK, num_warps=8,
        )  # fmt: skip


def activation_gradient(gradient: Tensor, sums: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    rows, d = sums.shape
    parts = triton.cdiv(rows, GRADIENT_ROWS)
    totals = torch.empty(parts, d, dtype=torch.float32, device=sums.device)
    if rows:
        activation_gradient_kernel[(parts, triton.cdiv(d, GRADIENT_COLUMNS))](
            gradient, sums, bias, out, totals, rows, d, ROWS=GRADIENT_ROWS, STEP=16, BLOCK=GRADIENT_COLUMNS
        )
    return totals.sum(0).to(bias.dtype)


def drop(
    x: Tensor, key: Tensor, threshold: int, scale: float, shifts: Sequence[int], factors: Sequence[int], out: Tensor
) -> None:
    if x.numel():
        dropout_kernel[(triton.cdiv(x.numel(), DROPOUT_BLOCK),)](
            x, key, out, x.numel(), threshold, scale, *shifts, *factors, BLOCK=DROPOUT_BLOCK
        )
