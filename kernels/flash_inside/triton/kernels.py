"""Triton kernels of the inside algorithm in scaled linear space, over packed sentences (layout: packing.py).

A chart row (w, b, i) is the span of w words from word i of sorted sentence b. It holds beta~, a
natural-log scale t in fp64, and eta | zeta = beta~ [left; right]^T as the product left them: the maxima mL and
mR stay inside the values, because fp32 and bf16 have exponents to spare, and no pass over the row is needed.

    c_ikj = exp(t_ik + t_kj - t_ij)          beta~_ij[A] = sum_k c_ikj eta_ik[A] zeta_kj[A]

Numbers of fp32 and bf16 reach as far below 1 as above, and only small ones get lost. So the largest entry of a row is
2^40, which moves 12 decades to where they are needed, and sums over splits begin at 2^20 times their largest scale:
at most (2^40)^2 2^20 times the number of splits, still far below 2^127.

Every kernel finds its rows from (b, i) and three small tables, in 64-bit arithmetic; nothing is added atomically, so
results are bitwise reproducible. `capacity` is the room a sentence has in the layout, `lengths` its words: they differ
where one CUDA graph serves many batches, and rows beyond the words then hold zeros.

Roundings of bf16 average out over many words, but not in short sentences. The last sentences, from `first` on, are
PRECISE: what rounding left of their e~, beta~, eta and zeta is kept in bf16 too, in tables of their own ("residual")
whose rows are laid out likewise, with offset_residual for offset. Derivatives do without.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

LARGEST_ENTRY = tl.constexpr(2.0**40)
ROOT_OF_LARGEST_ENTRY = tl.constexpr(2.0**20)
LOG_LARGEST_ENTRY = tl.constexpr(40 * 0.6931471805599453)
LOG_HEADROOM = tl.constexpr(20 * 0.6931471805599453)


@triton.jit
def row_of(offset, prefix_b, b, width, start):
    """Row of the span of `width` words from word `start`; width and start may be blocks. int64, as the tables are."""
    return tl.load(offset + width) + prefix_b - b * (width - 1) + start


@triton.jit
def crosses(limits, word_of_leaf, prefix_b, start, end):
    """Whether a span of words crosses a bracket of its sentence (brackets.py). limits: [words, 2], caller's order."""
    first_word = tl.load(word_of_leaf + prefix_b)
    latest_end = tl.load(limits + 2 * (first_word + start))
    earliest_start = tl.load(limits + 2 * (first_word + end - 1) + 1)
    return (end > latest_end) | (start < earliest_start)


@triton.jit
def nan_to_inf(values):
    """A maximum must not lose a NaN."""
    return tl.where(values == values, values, float("inf"))


@triton.jit
def root_of_exp(exponent, EXACT: tl.constexpr):
    """exp(exponent / 2) in fp32, of fp64.

    EXACT, where rows are fp32: an exponent of 32 in fp32 is off by 1e-6, which adds up along a deep tree whose spans
    are all alike.
    """
    if EXACT:
        root = tl.exp(exponent * 0.5).to(tl.float32)
    else:
        root = tl.exp((exponent * 0.5).to(tl.float32))
    return root


@triton.jit
def store_residual(target, values, mask):
    """What is left of values after rounding to the type of the target, rounded itself."""
    rounded = values.to(target.dtype.element_ty).to(tl.float32)
    tl.store(target, (values - rounded).to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_precise"])
def leaf_kernel(
    emissions,  # [words, P] in the caller's order
    word_of_leaf,  # [rows], -1 = no word here
    leaves,  # [rows, P]
    residual,  # [rows from first_precise on, P]
    scale,
    p,
    first_precise,  # row
    PRECISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """e~ = 2^40 exp(emission - max), t to match; a word nothing emits has e~ = 0 and t = -inf. Grid: (leaf rows,)."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.load(word_of_leaf + row)
    available = tl.where(word >= 0, p, 0)
    columns = tl.arange(0, BLOCK)
    running = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, p, BLOCK):
        values = tl.load(
            emissions + word * p + first + columns, mask=first + columns < available, other=float("-inf")
        ).to(tl.float32)
        running = tl.maximum(running, values)
    largest = tl.max(running, 0)
    tl.store(scale + row, largest.to(tl.float64) - LOG_LARGEST_ENTRY)
    subtracted = tl.where(largest == float("-inf"), 0.0, largest)
    for first in range(0, p, BLOCK):
        values = tl.load(
            emissions + word * p + first + columns, mask=first + columns < available, other=float("-inf")
        ).to(tl.float32)
        values = tl.exp(values - subtracted) * LARGEST_ENTRY
        in_row = first + columns < p
        tl.store(leaves + row * p + first + columns, values.to(leaves.dtype.element_ty), mask=in_row)
        if PRECISE:  # noqa: SIM102  (a constant)
            if row >= first_precise:
                store_residual(residual + (row - first_precise) * p + first + columns, values, in_row)


@triton.jit(do_not_specialize=["width", "words", "first", "words_before"])
def split_sum_kernel(
    children,  # [rows, 2, N] eta | zeta of all narrower widths
    children_residual,
    scale,  # [rows] fp64: t, read for narrower rows, written here
    beta,  # [rows - words, N] storage type; written here if one program holds the row
    beta_residual,
    unscaled,  # [spans of the width, N] fp32, else
    block_largest,  # [spans of the width, blocks] fp32, else
    row_largest,  # [rows] fp32: the divisor of the row
    offset,
    prefix,
    capacity,
    lengths,
    offset_residual,
    limits,
    word_of_leaf,
    width,
    words,  # leaf rows
    first,  # precise sentence
    words_before,  # leaf rows before it
    n,
    BRACKETED: tl.constexpr,  # spans that cross a bracket have zero rows
    PRECISE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,  # splits at a time
    SCALES: tl.constexpr,  # scales at a time
    ONE_BLOCK: tl.constexpr,  # a program holds the whole row, so it can divide by the maximum at once
):
    """beta~ of every span of a width. Grid: (blocks of N, first words, sentences alive)."""
    block, i, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if i + width > tl.load(capacity + b):
        return
    prefix_b = tl.load(prefix + b)
    first_row = tl.load(offset + width)
    row = row_of(offset, prefix_b, b, width, i)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    in_row = columns < n
    splits = width - 1
    if i + width > tl.load(lengths + b):
        splits = 0  # no such span: the row is zero
    elif BRACKETED:  # noqa: SIM102  (a constant)
        if crosses(limits, word_of_leaf, prefix_b, i, i + width):
            splits = 0

    # The largest split scale comes first, so that nothing overflows and no sum has to be rescaled.
    running = tl.full([SCALES], float("-inf"), tl.float64)
    for done in range(0, splits, SCALES):
        left_width = 1 + done + tl.arange(0, SCALES)
        real = left_width <= splits
        left_width = tl.where(real, left_width, 1)
        left_scale = tl.load(scale + row_of(offset, prefix_b, b, left_width, i))
        right_scale = tl.load(scale + row_of(offset, prefix_b, b, width - left_width, i + left_width))
        running = tl.maximum(running, tl.where(real, left_scale + right_scale, float("-inf")))
    log_scale = tl.max(running, 0)
    log_scale = tl.where(log_scale == float("-inf"), 0.0, log_scale)

    total = tl.zeros([SPLITS, BLOCK], tl.float32)
    for done in range(0, splits, SPLITS):
        left_width = 1 + done + tl.arange(0, SPLITS)
        real = left_width <= splits
        left_width = tl.where(real, left_width, 1)
        left = row_of(offset, prefix_b, b, left_width, i)
        right = row_of(offset, prefix_b, b, width - left_width, i + left_width)
        # sqrt(c), because c would be lost below 1e-38, where eta zeta can be as large as 2^80
        exponent = tl.load(scale + left) + tl.load(scale + right) - log_scale + LOG_HEADROOM
        half = tl.where(real, root_of_exp(exponent, children.dtype.element_ty == tl.float32), 0.0)
        wanted = real[:, None] & in_row[None, :]
        eta = tl.load(children + left[:, None] * (2 * n) + columns[None, :], mask=wanted, other=0.0).to(tl.float32)
        zeta = tl.load(children + right[:, None] * (2 * n) + n + columns[None, :], mask=wanted, other=0.0)
        zeta = zeta.to(tl.float32)
        if PRECISE:  # noqa: SIM102  (a constant)
            if b >= first:
                left = row_of(offset_residual, prefix_b - words_before, b - first, left_width, i)
                right = row_of(offset_residual, prefix_b - words_before, b - first, width - left_width, i + left_width)
                at = left[:, None] * (2 * n) + columns[None, :]
                eta += tl.load(children_residual + at, mask=wanted, other=0.0).to(tl.float32)
                at = right[:, None] * (2 * n) + n + columns[None, :]
                zeta += tl.load(children_residual + at, mask=wanted, other=0.0).to(tl.float32)
        total += eta * zeta * half[:, None] * half[:, None]
    values = tl.sum(total, 0)  # [BLOCK]
    log_scale -= LOG_HEADROOM

    largest = tl.max(tl.where(in_row, nan_to_inf(values), 0.0), 0)
    if ONE_BLOCK:
        divisor = tl.where(largest > 0, largest / LARGEST_ENTRY, 1.0)
        values = values / divisor
        tl.store(beta + (row - words) * n + columns, values.to(beta.dtype.element_ty), mask=in_row)
        if PRECISE:  # noqa: SIM102  (a constant)
            if b >= first:
                row_residual = row_of(offset_residual, prefix_b - words_before, b - first, width, i) - (
                    words - words_before
                )
                store_residual(beta_residual + row_residual * n + columns, values, in_row)
        tl.store(row_largest + row, divisor)
        tl.store(scale + row, tl.where(largest > 0, log_scale + tl.log(divisor.to(tl.float64)), float("-inf")))
    else:
        span = row - first_row
        tl.store(unscaled + span * n + columns, values, mask=in_row)
        tl.store(block_largest + span * tl.num_programs(0) + block, largest)
        if block == 0:
            tl.store(scale + row, log_scale)


@triton.jit(do_not_specialize=["first_row", "words", "blocks", "first_span", "first_residual"])
def normalise_kernel(
    unscaled,
    block_largest,
    beta,
    beta_residual,
    scale,
    row_largest,
    first_row,
    words,
    n,
    blocks,
    first_span,  # of a precise sentence
    first_residual,  # its row of beta_residual
    PRECISE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """beta~ = 2^40 row / its maximum, rounded; t to match. Grid: (spans of the width, blocks of N).

    The symbol that dominates a row is then a power of two and has no rounding error, which is what bf16 needs.
    """
    span, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = first_row + span
    numbers = tl.arange(0, BLOCKS)
    largest = tl.max(tl.load(block_largest + span * blocks + numbers, mask=numbers < blocks, other=0.0), 0)
    divisor = tl.where(largest > 0, largest / LARGEST_ENTRY, 1.0)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    in_row = columns < n
    values = tl.load(unscaled + span * n + columns, mask=in_row, other=0.0) / divisor
    tl.store(beta + (row - words) * n + columns, values.to(beta.dtype.element_ty), mask=in_row)
    if PRECISE:  # noqa: SIM102  (a constant)
        if span >= first_span:
            store_residual(beta_residual + (span - first_span + first_residual) * n + columns, values, in_row)
    if block == 0:
        log_scale = tl.load(scale + row)
        tl.store(row_largest + row, divisor)
        tl.store(scale + row, tl.where(largest > 0, log_scale + tl.log(divisor.to(tl.float64)), float("-inf")))


@triton.jit(do_not_specialize=["first_row", "first_residual", "rows", "first_precise"])
def unite_kernel(
    products,  # [rows + precise rows, 2N] fp32: of the rows of a width, and of the residuals of the last ones
    children,
    children_residual,
    first_row,  # of children
    first_residual,  # of children_residual
    rows,
    first_precise,  # row of products
    n,
    BLOCK: tl.constexpr,
):
    """eta | zeta of a width, rounded, and what that leaves of the precise rows. Grid: (rows, blocks of 2N)."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = columns < 2 * n
    values = tl.load(products + row * (2 * n) + columns, mask=in_row, other=0.0)
    if row >= first_precise:
        precise = row - first_precise
        values += tl.load(products + (rows + precise) * (2 * n) + columns, mask=in_row, other=0.0)
        store_residual(children_residual + (first_residual + precise) * (2 * n) + columns, values, in_row)
    tl.store(children + (first_row + row) * (2 * n) + columns, values.to(children.dtype.element_ty), mask=in_row)


@triton.jit(do_not_specialize=["words", "first_precise", "words_before"])
def top_kernel(
    beta,
    leaves,
    beta_residual,
    leaves_residual,
    root,
    top_sum,
    offset,
    prefix,
    lengths,
    offset_residual,
    words,
    first_precise,
    words_before,
    n,
    p,
    root_stride,  # from sentence to sentence, 0 if they have one root
    ONE_WORD: tl.constexpr,
    PRECISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """root . beta~ of the whole sentence (one word: the preterminal part of root . e~). Grid: (sentences,)."""
    b = tl.program_id(0)
    prefix_b = tl.load(prefix + b)
    length = tl.load(lengths + b)
    root += b.to(tl.int64) * root_stride
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    if length > 1:
        row = row_of(offset, prefix_b, b, length, 0) - words
        for first in range(0, n, BLOCK):
            in_row = first + columns < n
            values = tl.load(beta + row * n + first + columns, mask=in_row, other=0.0).to(tl.float32)
            total += values * tl.load(root + first + columns, mask=in_row, other=0.0).to(tl.float32)
        if PRECISE:  # noqa: SIM102  (a constant)
            if b >= first_precise:
                row = row_of(offset_residual, prefix_b - words_before, b - first_precise, length, 0)
                row -= words - words_before
                for first in range(0, n, BLOCK):
                    in_row = first + columns < n
                    values = tl.load(beta_residual + row * n + first + columns, mask=in_row, other=0.0).to(tl.float32)
                    total += values * tl.load(root + first + columns, mask=in_row, other=0.0).to(tl.float32)
    if ONE_WORD:  # noqa: SIM102  (a constant: root has a preterminal part)
        if length == 1:
            for first in range(0, p, BLOCK):
                in_row = first + columns < p
                values = tl.load(leaves + prefix_b * p + first + columns, mask=in_row, other=0.0).to(tl.float32)
                if PRECISE:  # noqa: SIM102  (a constant)
                    if b >= first_precise:
                        at = (prefix_b - words_before) * p + first + columns
                        values += tl.load(leaves_residual + at, mask=in_row, other=0.0).to(tl.float32)
                total += values * tl.load(root + n + first + columns, mask=in_row, other=0.0).to(tl.float32)
    tl.store(top_sum + b, tl.sum(total, 0))
