"""Split sums and derivatives of a band of widths at once, so that a row read from memory serves several spans.

A sum over splits reads two rows for every split of every span. Spans that share a first or a last word share those
rows: a program that holds STARTS x WIDTHS spans needs STARTS + (STARTS + WIDTHS - 1) rows a split instead of
2 STARTS WIDTHS. A band is some widths in a row. What a band needs from outside of it is summed here for all its widths;
the few splits inside the band are added width by width (`split_sum_kernel`, `outside_kernel` with PARTIAL).

The coefficient of a split is the same for all symbols, but a program holds a few symbols and many splits: computed
there, scales and exponentials would cost more than the rows. So there is a table [parent row, words of the left part].
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from flash_inside.triton_kernels import HEADROOM, flow, row_of


@triton.jit(do_not_specialize=["first_width", "room"])
def band_coefficient_kernel(
    scale,  # [rows] fp64
    partial_scale,  # [rows of the band] fp64, written: largest log scale of the splits below
    table,  # [rows of the band, room] fp32, written: 2^20 exp(log scale of the split - that)
    offset,
    prefix,
    capacity,
    lengths,
    first_width,
    room,
    SCALES: tl.constexpr,  # splits at a time
):
    """Splits into two parts that are narrower than the band. Grid: (first words, sentences, widths of the band)."""
    i, b, d = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    width = first_width + d
    if i + width > tl.load(capacity + b):
        return
    prefix_b = tl.load(prefix + b)
    row = row_of(offset, prefix_b, b, width, i) - tl.load(offset + first_width)
    splits = tl.where(i + width <= tl.load(lengths + b), first_width - 1, 0)  # no such span: the row is zero
    running = tl.full([SCALES], float("-inf"), tl.float64)
    for done in range(d, splits, SCALES):
        left_width = 1 + done + tl.arange(0, SCALES)
        real = left_width <= splits
        left_width = tl.where(real, left_width, d + 1)
        left_scale = tl.load(scale + row_of(offset, prefix_b, b, left_width, i))
        right_scale = tl.load(scale + row_of(offset, prefix_b, b, width - left_width, i + left_width))
        running = tl.maximum(running, tl.where(real, left_scale + right_scale, float("-inf")))
    largest = tl.max(running, 0)
    tl.store(partial_scale + row, largest)
    subtracted = tl.where(largest == float("-inf"), 0.0, largest)
    for done in range(d, first_width - 1, SCALES):
        left_width = 1 + done + tl.arange(0, SCALES)
        in_table = left_width < first_width
        real = left_width <= splits
        left_width = tl.where(in_table, left_width, d + 1)
        left_scale = tl.load(scale + row_of(offset, prefix_b, b, left_width, i))
        right_scale = tl.load(scale + row_of(offset, prefix_b, b, width - left_width, i + left_width))
        coefficient = tl.exp((left_scale + right_scale - subtracted).to(tl.float32)) * HEADROOM
        tl.store(table + row * room + left_width, tl.where(real, coefficient, 0.0), mask=in_table)


@triton.jit(do_not_specialize=["first_width", "room"])
def band_sum_kernel(
    children,  # [rows, 2, N]
    table,  # [rows of the band, room] fp32
    partial,  # [rows of the band, N] fp32, written
    offset,
    prefix,
    capacity,
    first_width,
    room,
    n,
    BLOCK: tl.constexpr,
    STARTS: tl.constexpr,
    WIDTHS: tl.constexpr,  # of the band
):
    """Sums over the splits of `band_coefficient_kernel`. Grid: (blocks of N, tiles of first words, sentences)."""
    block, first_start, b = tl.program_id(0), tl.program_id(1) * STARTS, tl.program_id(2)
    room_b = tl.load(capacity + b).to(tl.int32)
    if first_start + first_width > room_b:
        return
    prefix_b = tl.load(prefix + b)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    in_row = columns < n
    i = first_start + tl.arange(0, STARTS)  # [STARTS]
    d = tl.arange(0, WIDTHS)  # [WIDTHS]
    band_row = tl.load(offset + first_width)
    there = (i[:, None] + first_width + d[None, :]) <= room_b  # [STARTS, WIDTHS] spans in the layout
    width = tl.where(there, first_width + d[None, :], 1)
    span = row_of(offset, prefix_b, b, width, i[:, None]) - band_row  # [STARTS, WIDTHS]
    total = tl.zeros([STARTS, WIDTHS, BLOCK], tl.float32)
    last_split = tl.minimum(first_start + STARTS - 1 + first_width - 1, room_b - 1)
    for k in range(first_start + 1, last_split + 1):
        left_width = k - i  # [STARTS]
        has_left = (left_width >= 1) & (left_width < first_width)
        right_width = i[:, None] + first_width + d[None, :] - k  # [STARTS, WIDTHS]
        real = there & has_left[:, None] & (right_width < first_width)
        left = row_of(offset, prefix_b, b, tl.where(has_left, left_width, 1), tl.where(has_left, i, 0))
        right = row_of(offset, prefix_b, b, tl.where(real, right_width, 1), tl.where(real, k, 0))
        coefficient = tl.load(table + span * room + left_width[:, None], mask=real, other=0.0)
        eta = tl.load(
            children + left[:, None] * (2 * n) + columns[None, :], mask=has_left[:, None] & in_row[None, :], other=0.0
        )
        zeta = tl.load(
            children + right[:, :, None] * (2 * n) + n + columns[None, None, :],
            mask=real[:, :, None] & in_row[None, None, :],
            other=0.0,
        )
        total += coefficient[:, :, None] * eta.to(tl.float32)[:, None, :] * zeta.to(tl.float32)
    target = partial + span[:, :, None] * n + columns[None, None, :]
    tl.store(target, total, mask=there[:, :, None] & in_row[None, None, :])


@triton.jit(do_not_specialize=["room"])
def flow_table_kernel(scale, table, offset, prefix, capacity, lengths, room, SCALES: tl.constexpr):
    """c of all splits of all spans: table [rows, room]. Grid: (first words, sentences, widths)."""
    i, b, width = tl.program_id(0), tl.program_id(1), tl.program_id(2) + 1
    if i + width > tl.load(capacity + b):
        return
    prefix_b = tl.load(prefix + b)
    row = row_of(offset, prefix_b, b, width, i)
    is_span = i + width <= tl.load(lengths + b)
    for done in range(0, width - 1, SCALES):
        left_width = 1 + done + tl.arange(0, SCALES)
        real = left_width < width
        left_width = tl.where(real, left_width, 1)
        right_width = tl.where(real, width - left_width, 1)
        left = row_of(offset, prefix_b, b, left_width, i)
        right = row_of(offset, prefix_b, b, right_width, tl.where(real, i + left_width, i))
        coefficient = flow(scale, tl.load(scale + left), row + tl.zeros([SCALES], tl.int64), right)
        tl.store(table + row * room + left_width, tl.where(is_span, coefficient, 0.0), mask=real)


@triton.jit(do_not_specialize=["last_width", "words", "room"])
def band_outside_kernel(
    children,  # [rows, 2, N]
    d_beta,  # [rows - words, N] of all widths beyond the band; not read for whole sentences
    table,  # [rows, room] fp32: c
    partial,  # [rows of the band, 2, N] fp32, written: D_eta | D_zeta from parents beyond the band
    offset,
    prefix,
    capacity,
    lengths,
    last_width,
    words,
    room,
    n,
    BLOCK: tl.constexpr,
    STARTS: tl.constexpr,
    WIDTHS: tl.constexpr,  # of the band: last_width - WIDTHS + 1 to last_width
):
    """Derivatives from parents that are wider than the band. Grid: (blocks of N, tiles of first words, sentences)."""
    block, first_start, b = tl.program_id(0), tl.program_id(1) * STARTS, tl.program_id(2)
    room_b = tl.load(capacity + b).to(tl.int32)
    first_width = last_width - WIDTHS + 1
    if first_start + first_width > room_b:
        return
    prefix_b = tl.load(prefix + b)
    length = tl.load(lengths + b).to(tl.int32)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    in_row = columns < n
    i = first_start + tl.arange(0, STARTS)
    d = tl.arange(0, WIDTHS)
    width = first_width + d  # [WIDTHS]
    k = i[:, None] + width[None, :]  # [STARTS, WIDTHS]: where the spans end
    there = k <= room_b
    here = row_of(offset, prefix_b, b, tl.where(there, width[None, :], 1), tl.where(there, i[:, None], 0))
    target = partial + (here - tl.load(offset + first_width))[:, :, None] * (2 * n) + columns[None, None, :]
    stored = there[:, :, None] & in_row[None, None, :]

    total = tl.zeros([STARTS, WIDTHS, BLOCK], tl.float32)  # D_eta: span (i, k) is the left part of (i, j)
    for j in range(first_start + last_width + 1, length + 1):
        has_parent = (j - i > last_width) & (j - i < length)  # [STARTS]; the root stands for the whole sentence
        real = has_parent[:, None] & there
        parent = row_of(offset, prefix_b, b, tl.where(has_parent, j - i, 2), tl.where(has_parent, i, 0))
        sibling = row_of(offset, prefix_b, b, tl.where(real, j - k, 1), tl.where(real, k, 0))
        coefficient = tl.load(table + parent[:, None] * room + width[None, :], mask=real, other=0.0)
        d_parent = tl.load(
            d_beta + (parent - words)[:, None] * n + columns[None, :],
            mask=has_parent[:, None] & in_row[None, :],
            other=0.0,
        )
        zeta = tl.load(
            children + sibling[:, :, None] * (2 * n) + n + columns[None, None, :],
            mask=real[:, :, None] & in_row[None, None, :],
            other=0.0,
        )
        total += coefficient[:, :, None] * zeta.to(tl.float32) * d_parent.to(tl.float32)[:, None, :]
    tl.store(target, total, mask=stored)

    total = tl.zeros([STARTS, WIDTHS, BLOCK], tl.float32)  # D_zeta: span (i, k) is the right part of (s, k)
    for s in range(first_start + STARTS - 1):
        is_before = (s < i) & (i + first_width <= room_b)  # [STARTS]
        real = is_before[:, None] & (k - s > last_width) & (k <= length) & (k - s < length)
        parent = row_of(offset, prefix_b, b, tl.where(real, k - s, 2), tl.where(real, s, 0))
        sibling = row_of(offset, prefix_b, b, tl.where(is_before, i - s, 1), tl.where(is_before, s, 0))
        coefficient = tl.load(table + parent * room + (i - s)[:, None], mask=real, other=0.0)
        eta = tl.load(
            children + sibling[:, None] * (2 * n) + columns[None, :],
            mask=is_before[:, None] & in_row[None, :],
            other=0.0,
        )
        d_parent = tl.load(
            d_beta + (parent - words)[:, :, None] * n + columns[None, None, :],
            mask=real[:, :, None] & in_row[None, None, :],
            other=0.0,
        )
        total += coefficient[:, :, None] * eta.to(tl.float32)[:, None, :] * d_parent.to(tl.float32)
    tl.store(target + n, total, mask=stored)
