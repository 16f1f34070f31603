"""Triton kernels of the Viterbi algorithm: the product with max and +, and the best split."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flash_inside.packing import Layout
from flash_inside.triton.chart import Launcher, Precise, Tables, check_sentences, row_block
from flash_inside.triton.kernels import row_of

#: A program's block of the result, and how many of its terms are on their way at a time.
COLUMNS, STEPS = 64, 4
#: Few rows are few programs: smaller blocks make more of them.
FEW_ROWS, ROWS_OF_FEW, ROWS_OF_MANY = 96, 4, 8


@triton.jit(do_not_specialize=["rows"])
def max_plus_kernel(
    values,  # [batch, K, room]: its columns are the rows of the result
    weight,  # [batch, K, A]
    out,  # [batch, rows, A]
    rows,
    room,
    k,
    a,
    weight_stride,  # from one of the batch to the next
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """out[r, a] = max_k values[k, r] + weight[k, a]. Grid: (blocks of rows, blocks of A, batch).

    No tensor core computes this: a block of the result stays in registers, and each step adds one row of the weights
    to one row of the values. These are the same for all threads of a warp, which has ROWS x 2 results a thread.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.program_id(2).to(tl.int64)
    values += number * k * room
    weight += number * weight_stride
    out += number * rows * a
    in_columns = column < a
    best = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
    value, addend = values + row, weight + column  # moved along, so that no product of indices can overflow
    for _ in range(0, k - STEPS + 1, STEPS):
        for _ in tl.static_range(STEPS):
            one = tl.load(value)
            other = tl.load(addend, mask=in_columns, other=float("-inf"))
            best = tl.maximum(best, one[:, None] + other[None, :])
            value += room
            addend += a
    for _ in range(k // STEPS * STEPS, k):
        one = tl.load(value)
        other = tl.load(addend, mask=in_columns, other=float("-inf"))
        best = tl.maximum(best, one[:, None] + other[None, :])
        value += room
        addend += a
    at = out + row.to(tl.int64)[:, None] * a + column[None, :]
    tl.store(at, best, mask=(row < rows)[:, None] & in_columns[None, :])


def max_plus(values: Tensor, weight: Tensor, out: Tensor) -> None:
    """out[r, a] = max_k values[r, k] + weight[k, a]: [R, K], [K, A] -> [R, A], or a batch of these. out: contiguous"""
    if values.dim() == 2:
        values, weight = values[None], weight[None]
    batch, rows, k = values.shape
    a = weight.shape[2]
    of_block = ROWS_OF_FEW if batch * rows <= FEW_ROWS else ROWS_OF_MANY
    room = triton.cdiv(rows, 16) * 16  # aligned
    by_step = values.new_empty(batch, k, room)  # what is beyond the rows comes to nothing
    by_step[:, :, :rows] = values.mT
    max_plus_kernel[(triton.cdiv(rows, of_block), triton.cdiv(a, COLUMNS), batch)](
        by_step, weight, out, rows, room, k, a, weight.stride(0), ROWS=of_block, COLUMNS=COLUMNS, STEPS=STEPS,
        num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width", "words"])
def split_maximum_kernel(children, beta, offset, prefix, lengths, width, words, n, BLOCK: tl.constexpr):
    """beta_ij = max_k eta_ik + zeta_kj for every span of a width. Grid: (blocks of N, first words, sentences)."""
    block, i, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if i + width > tl.load(lengths + b):
        return
    prefix_b = tl.load(prefix + b)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    in_row = columns < n
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for left_width in range(1, width):
        left = row_of(offset, prefix_b, b, left_width, i)
        right = row_of(offset, prefix_b, b, width - left_width, i + left_width)
        eta = tl.load(children + left * (2 * n) + columns, mask=in_row, other=float("-inf"))
        zeta = tl.load(children + right * (2 * n) + n + columns, mask=in_row, other=float("-inf"))
        best = tl.maximum(best, eta + zeta)
    row = row_of(offset, prefix_b, b, width, i)
    tl.store(beta + (row - words) * n + columns, best, mask=in_row)


class SplitMaximum:
    def __init__(self, children: Tensor, beta: Tensor, layout: Layout):
        check_sentences(len(layout.lengths))
        self.children, self.beta, self.layout = children, beta, layout
        self.tables = Tables.of(layout, Precise.none(layout), beta.device)
        self.block = row_block(beta.shape[1])
        self.launch = Launcher(split_maximum_kernel, 4, BLOCK=self.block)

    def __call__(self, width: int) -> None:
        layout, n = self.layout, self.beta.shape[1]
        self.launch(
            (triton.cdiv(n, self.block), layout.longest - width + 1, layout.alive[width]),
            self.children, self.beta, self.tables.offset, self.tables.prefix, self.tables.lengths, width,
            layout.words, n,
        )  # fmt: skip
