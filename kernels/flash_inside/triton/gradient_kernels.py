"""Triton kernels around the passes over the widths: posteriors, what can be believed, gradients of the inputs.

Layout, tables and conventions are those of kernels.py.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from flash_inside.triton.kernels import crosses, nan_to_inf, row_of


@triton.jit(do_not_specialize=["words"])
def posterior_kernel(
    beta,
    d_beta,
    largest,  # [rows, blocks] from outside_kernel
    row_largest,  # [rows] the divisor of beta~
    scale,  # [rows]
    posterior,  # [rows] fp32
    largest_of_width,  # [widths, parts, sentences] fp32
    offset,
    prefix,
    capacity,
    lengths,
    limits,
    word_of_leaf,
    words,
    n,
    blocks,
    BRACKETED: tl.constexpr,
    POSTERIOR: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The largest |D| of a sentence's width, and if wanted the posterior of every span = beta~ . D_beta.

    Grid: (widths, parts, sentences); part r of a width has the spans from words r, r + PARTS, ... on.
    A value of the undivided row lost below 1e-38 has D_beta / divisor as derivative, so that counts as stored too.
    """
    width, part, b = tl.program_id(0) + 1, tl.program_id(1), tl.program_id(2)
    prefix_b = tl.load(prefix + b)
    length = tl.load(lengths + b).to(tl.int32)
    room = tl.load(capacity + b).to(tl.int32)
    columns, numbers = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    overall = tl.full([], 0.0, tl.float32)
    for i in range(part, room - width + 1, PARTS):
        row = row_of(offset, prefix_b, b, width, i)
        probability = tl.full([], 0.0, tl.float32)
        if i + width <= length:
            if width > 1:  # a row lost as a whole is in no split above it, so no derivative tells
                lost = tl.load(scale + row) == float("-inf")
                if BRACKETED:  # such a row is meant to be empty
                    lost = lost & (crosses(limits, word_of_leaf, prefix_b, i, i + width) == 0)
                overall = tl.where(lost, float("inf"), overall)
            if (width == 1) | (width == length):
                probability += 1.0
            else:
                total = tl.zeros([BLOCK], tl.float32)
                running = tl.zeros([BLOCK], tl.float32)
                for first in range(0, n, BLOCK):
                    in_row = first + columns < n
                    at = (row - words) * n + first + columns
                    d = tl.load(d_beta + at, mask=in_row, other=0.0).to(tl.float32)
                    if POSTERIOR:
                        total += tl.load(beta + at, mask=in_row, other=0.0).to(tl.float32) * d
                    running = tl.maximum(running, nan_to_inf(tl.abs(d)))
                probability += tl.sum(total, 0)
                overall = tl.maximum(overall, tl.max(running, 0) / tl.load(row_largest + row))
            if width < length:
                blockwise = tl.load(largest + row * blocks + numbers, mask=numbers < blocks, other=0.0)
                overall = tl.maximum(overall, tl.max(blockwise, 0))
        if POSTERIOR:
            tl.store(posterior + row, probability)
    tl.store(largest_of_width + ((width - 1) * PARTS + part) * tl.num_programs(2) + b, overall)


@triton.jit
def verdict_kernel(
    top_sum,  # [sentences]
    scale,  # [rows]
    largest_of_width,  # [widths, parts, sentences]
    log_z,  # [sentences] fp32, caller's order
    trusted,  # [sentences] int8, caller's order
    usable,  # [sentences] int8, sorted: trusted and possible, so it has derivatives
    offset,
    prefix,
    lengths,
    order,  # [sentences] the caller's number of a sorted sentence
    row_largest,  # [rows]
    limit,  # of |D|
    ONE_WORD: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """log Z, and whether it can be believed (see `trusted` in scaled/passes.py). Grid: (sentences,)."""
    b = tl.program_id(0)
    length = tl.load(lengths + b).to(tl.int32)
    prefix_b = tl.load(prefix + b)
    numbers = tl.arange(0, BLOCK)
    overall = tl.full([], 0.0, tl.float32)
    impossible_words = tl.full([], 0, tl.int32)
    for first in range(0, length * PARTS, BLOCK):
        at = first + numbers
        of_width = tl.load(largest_of_width + at * tl.num_programs(0) + b, mask=at < length * PARTS, other=0.0)
        overall = tl.maximum(overall, tl.max(of_width, 0))
    for first in range(0, length, BLOCK):
        at = first + numbers
        word_scale = tl.load(scale + prefix_b + at, mask=at < length, other=0.0)
        impossible_words += tl.sum((word_scale == float("-inf")).to(tl.int32), 0)
    total = tl.load(top_sum + b)
    top = row_of(offset, prefix_b, b, tl.where(length > 0, length, 1), 0)
    overall = tl.maximum(overall, 1.0 / tl.where(total > 0, total, 1.0))
    if length > 1:  # the undivided top row is stored too
        overall = tl.maximum(overall, 1.0 / tl.where(total > 0, total, 1.0) / tl.load(row_largest + top))
    # NaN compares as false everywhere: not positive, not finite
    possible = (impossible_words == 0) & ((length > 1) | ONE_WORD)
    positive = total > 0
    in_range = (total < float("inf")) & (overall <= limit)
    not_nan = total == total
    believed = tl.where(positive, in_range, not_nan & (possible == 0))
    if length > 0:
        caller = tl.load(order + b)
        value = tl.log(tl.where(positive, total, 1.0).to(tl.float64)) + tl.load(scale + top)
        tl.store(log_z + caller, tl.where(positive, value, float("-inf")).to(tl.float32))
        tl.store(trusted + caller, believed.to(tl.int8))
    tl.store(usable + b, ((length > 0) & believed & positive).to(tl.int8))


@triton.jit
def clear_kernel(
    d_children, usable, posterior, offset, prefix, capacity, n, POSTERIOR: tl.constexpr, BLOCK: tl.constexpr
):
    """Zero D and posterior of sentences without derivatives, as 0 x inf is NaN. Grid: (widths, sentences)."""
    width, b = tl.program_id(0) + 1, tl.program_id(1)
    if tl.load(usable + b) != 0:
        return
    room = tl.load(capacity + b).to(tl.int32)
    prefix_b = tl.load(prefix + b)
    columns = tl.arange(0, BLOCK)
    for i in range(room - width + 1):
        row = row_of(offset, prefix_b, b, width, i)
        if POSTERIOR:
            tl.store(posterior + row, 0.0)
        if width < tl.num_programs(0):  # the widest rows have no D
            for first in range(0, 2 * n, BLOCK):
                zeros = tl.zeros([BLOCK], tl.float32).to(d_children.dtype.element_ty)
                tl.store(d_children + row * (2 * n) + first + columns, zeros, mask=first + columns < 2 * n)


@triton.jit(do_not_specialize=["first_row"])
def weigh_kernel(
    rows,
    weighted,
    usable,
    d_log_z,
    offset,
    prefix,
    capacity,
    order,
    first_row,
    columns_in_row,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows (beta~ or e~) times the incoming gradient of their sentence. Grid: (widths, first words, sentences).

    Sentences without derivatives get zeros, whatever their rows hold.
    """
    width, i, b = tl.program_id(0) + FIRST, tl.program_id(1), tl.program_id(2)
    if i + width > tl.load(capacity + b):
        return
    row = row_of(offset, tl.load(prefix + b), b, width, i) - first_row
    good = tl.load(usable + b) != 0
    gradient = tl.load(d_log_z + tl.load(order + b), mask=good, other=0.0).to(tl.float32)
    available = tl.where(good, columns_in_row, 0)
    columns = tl.arange(0, BLOCK)
    for first in range(0, columns_in_row, BLOCK):
        at = row * columns_in_row + first + columns
        values = tl.load(rows + at, mask=first + columns < available, other=0.0).to(tl.float32) * gradient
        tl.store(weighted + at, values.to(weighted.dtype.element_ty), mask=first + columns < columns_in_row)


@triton.jit
def emission_gradient_kernel(
    d_leaves,  # [words, P]: D by e~
    leaves,  # [words, P] e~
    root,
    top_sum,
    usable,
    d_log_z,
    d_emissions,  # [words, P] in the caller's order
    word_of_leaf,
    prefix,
    lengths,
    order,
    n,
    p,
    root_stride,  # from sentence to sentence, 0 if they have one root
    ONE_WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """d log Z / d emission = e~ * D, the posterior of the preterminal. Grid: (words of a sentence, sentences)."""
    i, b = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + b)
    if i >= length:
        return
    row = tl.load(prefix + b) + i
    word = tl.load(word_of_leaf + row)
    root += b.to(tl.int64) * root_stride
    good = tl.load(usable + b) != 0
    gradient = tl.load(d_log_z + tl.load(order + b), mask=good, other=0.0).to(tl.float32)
    available = tl.where(good, p, 0)
    columns = tl.arange(0, BLOCK)
    for first in range(0, p, BLOCK):
        in_row = first + columns < p
        known = first + columns < available
        d = tl.load(d_leaves + row * p + first + columns, mask=known, other=0.0).to(tl.float32)
        if ONE_WORD:  # noqa: SIM102  (a constant)
            if length == 1:
                total = tl.load(top_sum + b)
                inverse = tl.where(total > 0, 1.0 / total, 0.0)
                d = tl.load(root + n + first + columns, mask=known, other=0.0).to(tl.float32) * inverse
        e = tl.load(leaves + row * p + first + columns, mask=known, other=0.0).to(tl.float32)
        tl.store(
            d_emissions + word * p + first + columns, (e * d * gradient).to(d_emissions.dtype.element_ty), mask=in_row
        )


@triton.jit(do_not_specialize=["sentences", "words"])
def root_gradient_kernel(
    beta,
    leaves,
    top_sum,
    usable,
    d_log_z,
    d_root,
    offset,
    prefix,
    lengths,
    order,
    sentences,
    words,
    n,
    p,
    size,  # N or N + P
    PER_SENTENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """d root = sum over sentences of gradient * beta~ / (root . beta~), in one fixed order. Grid: (blocks of root,).

    PER_SENTENCE: each has its own, in the caller's order. Grid: (blocks of root, sentences).
    """
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    first = 0
    if PER_SENTENCE:
        first = tl.program_id(1)
        sentences = first + 1
        d_root += tl.load(order + first) * size
    for b in range(first, sentences):
        if tl.load(usable + b) != 0:
            length = tl.load(lengths + b)
            weight = tl.load(d_log_z + tl.load(order + b)).to(tl.float32) / tl.load(top_sum + b)
            if length > 1:
                row = row_of(offset, tl.load(prefix + b), b, length, 0)
                values = tl.load(beta + (row - words) * n + columns, mask=columns < n, other=0.0)
                total += values.to(tl.float32) * weight
            else:
                row = tl.load(prefix + b)
                wanted = (columns >= n) & (columns < size)
                values = tl.load(leaves + row * p + columns - n, mask=wanted, other=0.0)
                total += values.to(tl.float32) * weight
    tl.store(d_root + columns, total.to(d_root.dtype.element_ty), mask=columns < size)
