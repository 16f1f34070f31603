"""Triton kernels of the networks: the passes over rows of softmax/rows.py, those of residual.py, and dropout.py.

In softmaxes and their gradients one program works on one row. It holds the row, or reads it twice in blocks, the second
time out of the cache.
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
def piece(row, number: tl.constexpr, count, other, BLOCK: tl.constexpr):
    """Columns number * BLOCK and so on of a row, `other` from `count` on."""
    columns = number * BLOCK + tl.arange(0, BLOCK)
    return tl.load(row + columns, mask=columns < count, other=other)


@triton.jit
def store_piece(row, number: tl.constexpr, values, c, BLOCK: tl.constexpr):
    columns = number * BLOCK + tl.arange(0, BLOCK)
    tl.store(row + columns, values.to(row.dtype.element_ty), mask=columns < c)


@triton.jit
def logits_piece(row, number: tl.constexpr, c, count, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """The same of a row of logits; the mask of loads is by c, as in `online`. PADDED: count is less than c"""
    values = piece(row, number, c, float("-inf"), BLOCK).to(tl.float32)
    if PADDED:
        values = tl.where(number * BLOCK + tl.arange(0, BLOCK) < count, values, float("-inf"))
    return values


@triton.jit
def softmax_of_whole_row_kernel(
    logits, out, log_sums, stride, out_stride, c, count,
    PADDED: tl.constexpr, LOG_SUMS: tl.constexpr, FOUR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Softmax of the first `count` of c columns, 0 in the others. The row is three blocks, or four, and is read once.

    LOG_SUMS: write the logarithms of the divisors, too
    """
    r = tl.program_id(0).to(tl.int64)
    row, to = logits + r * stride, out + r * out_stride
    x0 = logits_piece(row, 0, c, count, PADDED, BLOCK)
    x1 = logits_piece(row, 1, c, count, PADDED, BLOCK)
    x2 = logits_piece(row, 2, c, count, PADDED, BLOCK)
    largest = tl.maximum(tl.maximum(x0, x1), x2)
    if FOUR:
        x3 = logits_piece(row, 3, c, count, PADDED, BLOCK)
        largest = tl.maximum(largest, x3)
    largest = tl.max(largest, 0)
    x0 = tl.exp(x0 - largest)
    x1 = tl.exp(x1 - largest)
    x2 = tl.exp(x2 - largest)
    total = x0 + x1 + x2
    if FOUR:
        x3 = tl.exp(x3 - largest)
        total += x3
    total = tl.sum(total, 0)
    factor = 1.0 / total
    store_piece(to, 0, x0 * factor, c, BLOCK)
    store_piece(to, 1, x1 * factor, c, BLOCK)
    store_piece(to, 2, x2 * factor, c, BLOCK)
    if FOUR:
        store_piece(to, 3, x3 * factor, c, BLOCK)
    if LOG_SUMS:
        tl.store(log_sums + r, largest + tl.log(total))


@triton.jit
def softmax_kernel(logits, out, log_sums, stride, out_stride, c, count, LOG_SUMS: tl.constexpr, BLOCK: tl.constexpr):
    """The same for rows of any length, which are read twice."""
    r = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    largest, total = online(logits + r * stride, columns, c, count, BLOCK)
    for first in range(0, c, BLOCK):
        inside = first + columns < c
        values = tl.load(logits + r * stride + first + columns, mask=inside).to(tl.float32)
        values = tl.where(first + columns < count, tl.exp(values - largest) / total, 0.0)
        tl.store(out + r * out_stride + first + columns, values.to(out.dtype.element_ty), mask=inside)
    if LOG_SUMS:
        tl.store(log_sums + r, largest + tl.log(total))


@triton.jit
def softmax_gradient_of_whole_row_kernel(
    probabilities, gradient, out, stride, gradient_stride, out_stride, c, FOUR: tl.constexpr, BLOCK: tl.constexpr
):
    """p (g - sum(p g) / sum(p)). The row is three blocks, or four, and is read once."""
    r = tl.program_id(0).to(tl.int64)
    of_p, of_g, to = probabilities + r * stride, gradient + r * gradient_stride, out + r * out_stride
    p0 = piece(of_p, 0, c, 0.0, BLOCK).to(tl.float32)
    p1 = piece(of_p, 1, c, 0.0, BLOCK).to(tl.float32)
    p2 = piece(of_p, 2, c, 0.0, BLOCK).to(tl.float32)
    g0 = piece(of_g, 0, c, 0.0, BLOCK).to(tl.float32)
    g1 = piece(of_g, 1, c, 0.0, BLOCK).to(tl.float32)
    g2 = piece(of_g, 2, c, 0.0, BLOCK).to(tl.float32)
    products, total = p0 * g0 + p1 * g1 + p2 * g2, p0 + p1 + p2
    if FOUR:
        p3 = piece(of_p, 3, c, 0.0, BLOCK).to(tl.float32)
        g3 = piece(of_g, 3, c, 0.0, BLOCK).to(tl.float32)
        products, total = products + p3 * g3, total + p3
    mean = tl.sum(products, 0) / tl.sum(total, 0)
    store_piece(to, 0, p0 * (g0 - mean), c, BLOCK)
    store_piece(to, 1, p1 * (g1 - mean), c, BLOCK)
    store_piece(to, 2, p2 * (g2 - mean), c, BLOCK)
    if FOUR:
        store_piece(to, 3, p3 * (g3 - mean), c, BLOCK)


@triton.jit
def softmax_gradient_kernel(probabilities, gradient, out, stride, gradient_stride, out_stride, c, BLOCK: tl.constexpr):
    """The same for rows of any length, which are read twice."""
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
    total = tl.zeros([STEP, BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for row in tl.static_range(0, ROWS, STEP):
        r = first + row + tl.arange(0, STEP)
        inside = (r < rows)[:, None] & there[None]
        places = r[:, None] * d + columns[None]
        s = tl.load(sums + places, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
        g = tl.where(s + b[None] <= 0.0, 0.0, g)
        total += g
        tl.store(out + places, g.to(out.dtype.element_ty), mask=inside)
    tl.store(totals + tl.program_id(0) * d + columns, tl.sum(total, 0), mask=there)


@triton.jit(do_not_specialize=["parts"])  # it changes with the rows of a step
def sum_of_parts_kernel(totals, out, parts, d, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of [parts, d] over parts. Grid: (blocks of d,)."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([STEP, BLOCK], tl.float32)
    for first in range(0, parts, STEP):
        r = first + tl.arange(0, STEP)
        inside = (r < parts)[:, None] & (columns < d)[None]
        total += tl.load(totals + r[:, None] * d + columns[None], mask=inside, other=0.0)
    tl.store(out + columns, tl.sum(total, 0).to(out.dtype.element_ty), mask=columns < d)


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


#: Up to so many columns a program of a softmax holds its row, at most 32 values a thread. One of a gradient holds two.
LONGEST_WHOLE_ROW = 32768
#: Block of programs that read a longer row twice: they take more threads each, so that fewer are at work, and the cache
#: still holds the row.
BLOCK_OF_TWO_READS = 8192
#: Coordinates of one program of the dropout.
DROPOUT_BLOCK = 1024
#: Numbers of one program of an activation, and rows and columns of one of its gradient.
ACTIVATION_BLOCK, GRADIENT_ROWS, GRADIENT_COLUMNS = 2048, 128, 64
#: Parts and columns of one program that sums parts.
PARTS, PART_COLUMNS = 64, 16


def _block(columns: int, largest: int = 4096) -> dict[str, int]:
    """Choose block and warps so that a thread has 8 values."""
    size = min(largest, max(128, triton.next_power_of_2(columns)))
    return {"BLOCK": size, "num_warps": max(1, size // 256)}


def _pieces_of_whole_row(columns: int) -> dict[str, int]:
    """Choose blocks so that three or four are a row (with P = 2N the children are 3N symbols: often three exactly)."""
    size = max(128, triton.next_power_of_2(columns) // 4)
    return {"BLOCK": size, "FOUR": columns > 3 * size, "num_warps": max(1, size // 256)}


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
    arguments = (logits, out, log_sums, logits.stride(0), out.stride(0), all_columns, columns)
    if rows and all_columns <= LONGEST_WHOLE_ROW:
        softmax_of_whole_row_kernel[(rows,)](
            *arguments, PADDED=columns < all_columns, LOG_SUMS=LOG_SUMS, **_pieces_of_whole_row(all_columns)
        )
    elif rows:
        softmax_kernel[(rows,)](*arguments, LOG_SUMS=LOG_SUMS, **_block(all_columns, BLOCK_OF_TWO_READS))


def softmax_gradient(probabilities: Tensor, gradient: Tensor, out: Tensor) -> None:
    rows, columns = probabilities.shape
    arguments = (probabilities, gradient, out, probabilities.stride(0), gradient.stride(0), out.stride(0), columns)
    if rows and columns <= LONGEST_WHOLE_ROW:
        softmax_gradient_of_whole_row_kernel[(rows,)](*arguments, **_pieces_of_whole_row(columns))
    elif rows:
        softmax_gradient_kernel[(rows,)](*arguments, **_block(columns, BLOCK_OF_TWO_READS))


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
            gradient, sums, bias, out, totals, rows, d, ROWS=GRADIENT_ROWS, STEP=32, BLOCK=GRADIENT_COLUMNS
        )
    of_bias = torch.empty_like(bias)
    sum_of_parts_kernel[(triton.cdiv(d, PART_COLUMNS),)](totals, of_bias, parts, d, STEP=PARTS, BLOCK=PART_COLUMNS)
    return of_bias


def drop(
    x: Tensor, key: Tensor, threshold: int, scale: float, shifts: Sequence[int], factors: Sequence[int], out: Tensor
) -> None:
    if x.numel():
        dropout_kernel[(triton.cdiv(x.numel(), DROPOUT_BLOCK),)](
            x, key, out, x.numel(), threshold, scale, *shifts, *factors, BLOCK=DROPOUT_BLOCK
        )
