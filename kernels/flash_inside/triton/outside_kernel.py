"""The Triton kernel of the outside pass: derivatives of log Z by all that the inside pass has stored, width by width.

Layout, tables and conventions are those of kernels.py. A derivative D belongs to a stored value, so the scales of three
rows come into every term, as they do into the sums of the inside pass:

    D_eta_ik[A] = sum_j c_ikj zeta_kj[A] D_beta_ij[A]          D_zeta_kj[A] = sum_i c_ikj eta_ik[A] D_beta_ij[A]
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from flash_inside.triton.kernels import LOG_LARGEST_ENTRY, ROOT_OF_LARGEST_ENTRY, nan_to_inf, root_of_exp, row_of


@triton.jit
def flow(scale, t_here, parent, sibling, EXACT: tl.constexpr):
    """sqrt(c) of some splits, from the scales of their three rows; a zero parent has none.

    The root, because c would be lost below 1e-38, where D zeta can be as large as 1e35. A c above 1e26 is infinite: its
    exponent has too large a rounding error for fp32 counts, so the sentence is to be recomputed.
    """
    t_parent = tl.load(scale + parent)
    exponent = t_here + tl.load(scale + sibling) - tl.where(t_parent == float("-inf"), 0.0, t_parent)
    # c is near 2^-40. fp32 rounds small exponents best, so that factor is put in afterwards.
    exponent += LOG_LARGEST_ENTRY
    half = tl.where(exponent > 88.0, float("inf"), root_of_exp(exponent, EXACT) / ROOT_OF_LARGEST_ENTRY)
    return tl.where(t_parent == float("-inf"), 0.0, half)


@triton.jit(do_not_specialize=["width", "words"])
def outside_kernel(
    children,  # [rows, 2, N]
    d_beta,  # [rows - words, N] of all wider widths; not read for whole sentences
    d_children,  # [rows, 2, N], written for this width: D_eta | D_zeta
    scale,  # [rows]
    largest,  # [rows, blocks] fp32: the largest |D| of this block
    root,
    top_sum,  # [sentences]
    offset,
    prefix,
    capacity,
    lengths,
    width,
    words,
    n,
    root_stride,  # from sentence to sentence, 0 if they have one root
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Derivatives of log Z by eta and zeta of every span of a width. Grid: (blocks of N, first words, sentences).

    Span (i, k) is gathered as a left part from the parents (i, j), j > k, and as a right part from (s, k), s < i: with
    `length - width` parents in all, programs of a width do equal work. The root stands for the whole sentence's D.
    """
    block, i, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if i + width > tl.load(capacity + b):
        return
    prefix_b = tl.load(prefix + b)
    length = tl.load(lengths + b).to(tl.int32)
    row = row_of(offset, prefix_b, b, width, i)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    in_row = columns < n
    k = i + width
    t_here = tl.load(scale + row)
    exact: tl.constexpr = children.dtype.element_ty == tl.float32
    steps = tl.arange(0, SPLITS)
    d_eta = tl.zeros([SPLITS, BLOCK], tl.float32)
    d_zeta = tl.zeros([SPLITS, BLOCK], tl.float32)
    no_parent_beyond = tl.where(i == 0, length - 1, length)  # (0, length) is met below
    for first in range(k + 1, no_parent_beyond + 1, SPLITS):
        j = first + steps
        real = j <= no_parent_beyond
        j = tl.where(real, j, k + 1)
        parent = row_of(offset, prefix_b, b, j - i, i)
        sibling = row_of(offset, prefix_b, b, j - k, k)
        half = tl.where(real, flow(scale, t_here, parent, sibling, exact), 0.0)[:, None]
        wanted = real[:, None] & in_row[None, :]
        d = tl.load(d_beta + (parent - words)[:, None] * n + columns[None, :], mask=wanted, other=0.0)
        zeta = tl.load(children + sibling[:, None] * (2 * n) + n + columns[None, :], mask=wanted, other=0.0)
        d_eta += (half * zeta.to(tl.float32)) * (half * d.to(tl.float32))
    parents_before = tl.where(k <= length, i, 0)  # none for a row beyond the words
    first_parent = tl.where(k == length, 1, 0)
    for first in range(first_parent, parents_before, SPLITS):
        s = first + steps
        real = s < parents_before
        s = tl.where(real, s, first_parent)
        parent = row_of(offset, prefix_b, b, k - s, s)
        sibling = row_of(offset, prefix_b, b, i - s, s)
        half = tl.where(real, flow(scale, t_here, parent, sibling, exact), 0.0)[:, None]
        wanted = real[:, None] & in_row[None, :]
        d = tl.load(d_beta + (parent - words)[:, None] * n + columns[None, :], mask=wanted, other=0.0)
        eta = tl.load(children + sibling[:, None] * (2 * n) + columns[None, :], mask=wanted, other=0.0)
        d_zeta += (half * eta.to(tl.float32)) * (half * d.to(tl.float32))
    eta_total, zeta_total = tl.sum(d_eta, 0), tl.sum(d_zeta, 0)

    prefix_of_sentence = (i == 0) & (k < length)
    suffix_of_sentence = (k == length) & (i > 0)
    if prefix_of_sentence | suffix_of_sentence:
        total = tl.load(top_sum + b)
        own_root = root + b.to(tl.int64) * root_stride
        d = tl.load(own_root + columns, mask=in_row, other=0.0).to(tl.float32) * tl.where(total > 0, 1.0 / total, 0.0)
        parent = row_of(offset, prefix_b, b, length, 0)
        if prefix_of_sentence:
            sibling = row_of(offset, prefix_b, b, length - k, k)
            zeta = tl.load(children + sibling * (2 * n) + n + columns, mask=in_row, other=0.0)
            half = flow(scale, t_here, parent, sibling, exact)
            eta_total += (half * zeta.to(tl.float32)) * (half * d)
        else:
            sibling = row_of(offset, prefix_b, b, i, 0)
            eta = tl.load(children + sibling * (2 * n) + columns, mask=in_row, other=0.0)
            half = flow(scale, t_here, parent, sibling, exact)
            zeta_total += (half * eta.to(tl.float32)) * (half * d)
    target = d_children + row * (2 * n) + columns
    tl.store(target, eta_total.to(d_children.dtype.element_ty), mask=in_row)
    tl.store(target + n, zeta_total.to(d_children.dtype.element_ty), mask=in_row)
    both = tl.maximum(nan_to_inf(tl.abs(eta_total)), nan_to_inf(tl.abs(zeta_total)))
    tl.store(largest + row * tl.num_programs(0) + block, tl.max(tl.where(in_row, both, 0.0), 0))
