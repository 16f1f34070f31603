"""The dense inside algorithm in scaled linear space on packed sentences: plain PyTorch, any device.

A row of the chart is divided by its largest entry, whose logarithm goes into the row's scale t, in fp64 (a tilde marks
a stored value). For each width, with c_ikj = exp(t_ik + t_kj - s_ij) and s_ij the largest t_ik + t_kj of all splits k:

    X_ij[B, C] = sum_k c_ikj beta~_ik[B] beta~_kj[C]          batched products [left, splits] x [splits, right]
    v_ij[A]    = sum_BC T[A, B, C] X_ij[B, C]                 ONE product [spans, left x right] x [left x right, N]
    beta~_ij   = v_ij / m_ij,  t_ij = s_ij + log m_ij         m_ij the largest entry of v_ij

X is made for a block of spans at a time, and for each kind of split (see reference.py) on its own. So a sentence takes
one row of N numbers for each span, and never a table of pairs.

The derivatives D = d log Z / d stored value are computed right after the forward pass: they tell which sentences left
the range of the number format, so that a wrong log Z is never returned. A value is lost below 1e-38 in fp32. It may be
an entry of beta~, a coefficient c, an entry of X or a term of v. With G_ij = sum_A D_v[A] T[A] all their D are at most
the sum of G_ij, which is at most sum_A D_v[A], if rows of T sum to 1: this sum is what is compared with the limit.

What stays for the backward are beta~ and D_v. The gradient of T is sum_ij D_v[A] X_ij[B, C], with X made once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flash_inside.brackets import allowed_rows
from flash_inside.dense.reference import PairRules, block_of, kinds_of
from flash_inside.packing import Layout, SplitRows
from flash_inside.precision import FORMATS, LARGEST_D_OF_TORCH, finite, gradient_type, matmul_precision
from flash_inside.scaled import leaf_values

LARGEST_BLOCK = 1 << 24  # numbers of X, or of the parts of its splits, that are made at once: 64 MiB in fp32
MOST_SPLITS_KEPT = 1 << 22  # of a chart, between its passes; the rows of the others are computed block by block
KINDS = ("NN", "NP", "PN", "PP")


class Result(NamedTuple):
    log_z: Tensor  # [B] compute dtype, differentiable
    trusted: Tensor  # [B] bool: False = outside the range of the number format, recompute
    posterior: Tensor  # [rows] of the layout: posterior probability of every span
    before_word: Tensor  # [rows] posterior that the span is there and its right part is one word


def inside(
    rules: PairRules, emissions: Tensor, layout: Layout, precision: str, limits: np.ndarray | None = None
) -> Result:
    """Return log marginals in the caller's order. The gradient of a sentence that is not trusted is zero.

    precision: charts are fp64 for "fp64", else fp32. For "tf32" and "bf16" products are in TF32, where there is TF32.
    limits: see flash_inside/brackets.py
    """
    return Result(*_ScaledInside.apply(*rules, emissions, layout, precision, limits))


def compute_type(precision: str) -> torch.dtype:
    return FORMATS[precision].compute


def _products(precision: str) -> Any:
    return matmul_precision("tf32" if precision == "bf16" else precision)


class _Parts(NamedTuple):
    """The parts of one kind of split of a block of spans."""

    kind: str
    left_rows: Tensor  # [r, k] of the leaves or of beta, as the kind says
    right_rows: Tensor
    left: Tensor  # [r, k, left] beta~
    right: Tensor  # [r, k, right]
    coefficient: Tensor  # [r, k, 1] c

    @property
    def pairs(self) -> Tensor:
        """X: [r, left x right]."""
        return torch.bmm((self.left * self.coefficient).mT, self.right).flatten(1)


@dataclass
class _Chart:
    """What the passes share. Rows are those of the layout; scales are fp64."""

    layout: Layout
    leaves: Tensor  # [words, P] e~
    beta: Tensor  # [rows - words, N] beta~ of the widths from 2 on
    scale: Tensor  # [rows] t, fp64; -inf where a row is zero
    split_scale: Tensor  # [rows] s, fp64
    allowed: Tensor | None  # [rows] bool: spans that cross no bracket; None: all of them
    split_rows: SplitRows

    @property
    def n(self) -> int:
        return self.beta.shape[1]

    def own(self, rows: slice) -> slice:
        """Return the rows of beta that these rows of the chart are."""
        return slice(rows.start - self.layout.words, rows.stop - self.layout.words)

    def blocks(self, width: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield blocks of the spans of a width: rows; rows of left parts, of right parts, log scales, each [r, k]."""
        largest = max(self.n, self.leaves.shape[1])
        step = max(1, LARGEST_BLOCK // (largest * max(largest, width - 1)))
        for rows, left, right in self.split_rows.blocks(width, step):
            log_scale = self.scale[left] + self.scale[right]
            if self.allowed is not None:  # no split of a span that is not allowed counts, so its row is zero
                log_scale.masked_fill_(~self.allowed[rows, None], float("-inf"))
            yield rows, left, right, log_scale

    def parts(self, width: int, left: Tensor, right: Tensor, coefficient: Tensor) -> Iterator[_Parts]:
        """Yield each kind of split of a block. left, right: [r, k] rows of the chart; coefficient: [r, k]."""
        for kind, splits in kinds_of(width):
            rows, values = [], []
            for part, table in zip(kind, (left, right), strict=True):
                numbers = table[:, splits] if part == "P" else table[:, splits] - self.layout.words
                stored = self.leaves if part == "P" else self.beta
                rows.append(numbers)
                values.append(stored.index_select(0, numbers.flatten()).view(*numbers.shape, -1))
            yield _Parts(kind, rows[0], rows[1], values[0], values[1], coefficient[:, splits, None])


def _filled_chart(
    tables: dict[str, Tensor], emissions: Tensor, layout: Layout, precision: str, limits: np.ndarray | None
) -> tuple[_Chart, Tensor]:
    """Do the forward pass: return the chart, and what its rows of widths from 2 on were divided by, [rows - words].

    tables: T of each kind, [N, left x right]
    """
    device, compute, n = emissions.device, compute_type(precision), len(tables["NN"])
    leaf_word = torch.from_numpy(layout.leaf_word).to(device)
    leaves, leaf_scale = leaf_values(emissions, leaf_word, FORMATS["fp64" if compute == torch.float64 else "fp32"])
    scale = torch.zeros(layout.rows, dtype=torch.float64, device=device)
    scale[: layout.words] = leaf_scale
    beta = torch.empty(layout.rows - layout.words, n, dtype=compute, device=device)
    allowed = None if limits is None else torch.from_numpy(allowed_rows(limits, layout)).to(device)
    split_rows = SplitRows(layout, device, MOST_SPLITS_KEPT)
    chart = _Chart(layout, leaves, beta, scale, torch.zeros_like(scale), allowed, split_rows)
    divisors = torch.ones(len(beta), dtype=compute, device=device)
    for width in range(2, layout.longest + 1):
        for rows, left, right, log_scale in chart.blocks(width):
            largest = log_scale.amax(1, keepdim=True)
            largest.masked_fill_(largest == float("-inf"), 0.0)
            coefficient = (log_scale - largest).exp().to(compute)
            value = torch.zeros(len(log_scale), n, dtype=compute, device=device)
            for part in chart.parts(width, left, right, coefficient):
                value.addmm_(part.pairs, tables[part.kind].T)
            divisor = value.amax(1, keepdim=True)
            empty = divisor == 0
            divisor = torch.where(divisor > 0, divisor, 1.0)
            own = chart.own(rows)
            chart.beta[own], divisors[own] = value / divisor, divisor.squeeze(1)
            chart.split_scale[rows] = largest.squeeze(1)
            chart.scale[rows] = (largest + divisor.double().log()).masked_fill_(empty, float("-inf")).squeeze(1)
    return chart, divisors


def _lost_rows(chart: _Chart, tables: dict[str, Tensor], emissions: Tensor) -> Tensor:
    """Find rows that are all zero although the grammar can derive something there: bool [rows].

    No split above has such a row, so no derivative shows the loss. What can be derived is found by the same
    recursion over ones and zeros.
    """
    layout = chart.layout
    words = emissions.index_select(0, torch.from_numpy(layout.leaf_word).to(emissions.device))
    possible = {kind: (table > 0).to(table.dtype) for kind, table in tables.items()}
    yes = _Chart(
        layout, (words > float("-inf")).to(chart.leaves.dtype), torch.zeros_like(chart.beta), chart.scale,
        chart.split_scale, chart.allowed, chart.split_rows,
    )  # fmt: skip
    for width in range(2, layout.longest + 1):
        for rows, left, right, log_scale in yes.blocks(width):
            own, ones = yes.own(rows), torch.ones_like(log_scale, dtype=chart.beta.dtype)
            for part in yes.parts(width, left, right, ones):
                there = (part.pairs > 0).to(chart.beta.dtype) @ possible[part.kind].T > 0
                if chart.allowed is not None:
                    there &= chart.allowed[rows, None]
                yes.beta[own] = torch.maximum(yes.beta[own], there.to(chart.beta.dtype))
    lost = torch.zeros(layout.rows, dtype=torch.bool, device=emissions.device)
    lost[layout.words :] = chart.scale[layout.words :].isinf() & yes.beta.any(1)
    return lost


class _Derivatives(NamedTuple):
    values: Tensor  # [rows - words, N] D_v
    leaves: Tensor  # [words, P] D of e~
    largest: Tensor  # [rows] a bound of |D| of all that is stored or made at this row
    posterior: Tensor  # [rows]
    before_word: Tensor  # [rows]


def _derivatives(
    chart: _Chart, tables: dict[str, Tensor], divisors: Tensor, root: Tensor, top_rows: Tensor, top_sums: Tensor
) -> _Derivatives:
    """Compute D for an incoming gradient of 1 a sentence, from the widest spans down.

    root: fp64; top_rows: [B] rows of whole sentences, top_sums: [B] fp64 root . beta~ (0 = no tree: no gradient)
    """
    layout, compute, n = chart.layout, chart.beta.dtype, chart.n
    totals = {"N": torch.zeros_like(chart.beta), "P": torch.zeros_like(chart.leaves)}
    largest, posterior, before_word = (
        torch.zeros(layout.rows, dtype=compute, device=root.device) for _ in ("largest", "posterior", "before")
    )
    per_sentence = torch.where(top_sums > 0, 1.0 / top_sums, 0.0)
    of_a_parent = sum(table.sum(1) for table in tables.values())
    assert isinstance(of_a_parent, Tensor)
    most_of_a_parent = of_a_parent.amax().clamp(min=1.0)  # 1, if rows sum to 1
    for width in range(layout.longest, 1, -1):
        here = layout.span_rows(width)
        own = chart.own(here)
        d_beta = totals["N"][own]
        longer, ending = layout.alive[width + 1] if width < layout.longest else 0, layout.alive[width]
        if ending > longer:  # sentences of exactly this length get the gradient of the top
            of_tops = (per_sentence[longer:ending, None] * root[:n]).to(compute)
            d_beta.index_add_(0, top_rows[longer:ending] - here.start, of_tops)
        posterior[here] = (chart.beta[own] * d_beta).sum(1)
        largest[here] = d_beta.abs().amax(1)
        d_beta /= divisors[own, None]  # in place: from here on D_v
        largest[here] = torch.maximum(largest[here], d_beta.abs().sum(1) * most_of_a_parent)
        for rows, left, right, log_scale in chart.blocks(width):
            coefficient = (log_scale - chart.split_scale[rows, None]).exp().to(compute)
            for part in chart.parts(width, left, right, coefficient):
                by_pairs = (totals["N"][chart.own(rows)] @ tables[part.kind]).view(  # G
                    len(left), part.left.shape[2], part.right.shape[2]
                )
                d_left = torch.bmm(part.right, by_pairs.mT).mul_(part.coefficient)
                d_right = torch.bmm(part.left, by_pairs).mul_(part.coefficient)
                totals[part.kind[0]].index_add_(0, part.left_rows.flatten(), d_left.flatten(0, 1))
                totals[part.kind[1]].index_add_(0, part.right_rows.flatten(), d_right.flatten(0, 1))
                if part.kind[1] == "P":
                    before_word[rows] = (part.left * d_left).sum((1, 2))
    largest[: layout.words] = totals["P"].abs().amax(1)
    return _Derivatives(totals["N"], totals["P"], largest, posterior, before_word)


class _ScaledInside(torch.autograd.Function):
    """(root, pairs, emissions) -> log Z [B], and what is not differentiable: trusted [B], two posteriors [rows]."""

    @staticmethod
    def forward(
        ctx: Any, root: Tensor, pairs: Tensor, emissions: Tensor, layout: Layout, precision: str,
        limits: np.ndarray | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        n, words, device, compute = len(pairs), layout.words, emissions.device, compute_type(precision)
        tables = {kind: block_of(pairs, kind).to(compute) for kind in KINDS}
        wide_root = root.double()  # a trained root gives one-word sentences 1e-60, and it is only a vector
        with _products(precision):
            chart, divisors = _filled_chart(tables, emissions, layout, precision, limits)
            # root . beta~ of every sorted sentence; the one-word ones are the last
            top_rows = torch.from_numpy(layout.tops()).to(device)
            longer = layout.alive[2] if layout.longest > 1 else 0
            top_sums = torch.zeros(len(layout.lengths), dtype=torch.float64, device=device)
            top_sums[:longer] = chart.beta[top_rows[:longer] - words].double() @ wide_root[:n]
            if len(root) > n:
                top_sums[longer:] = chart.leaves[top_rows[longer:]].double() @ wide_root[n:]
            derivatives = _derivatives(chart, tables, divisors, wide_root, top_rows, top_sums)
        log_z = torch.where(top_sums > 0, top_sums.log() + chart.scale[top_rows], float("-inf"))

        # What can be believed.
        sentence = torch.from_numpy(layout.sentence_of_rows()).to(device)  # [rows]
        largest = torch.zeros_like(top_sums)  # [B] of |D|; a one-word sentence has only that of its leaf
        if len(root) > n:
            largest[longer:] = torch.where(top_sums[longer:] > 0, wide_root[n:].amax() / top_sums[longer:], 0.0)
        largest = largest.scatter_reduce_(0, sentence, derivatives.largest.double(), "amax")
        possible = torch.ones_like(top_sums, dtype=torch.bool)
        leaf_word = torch.from_numpy(layout.leaf_word).to(device)
        nothing = emissions.index_select(0, leaf_word).amax(1) == float("-inf")  # no preterminal has this word
        possible[sentence[:words][nothing]] = False
        if len(root) == n:
            possible[longer:] = False
        in_range = torch.isfinite(top_sums) & (largest <= LARGEST_D_OF_TORCH[compute])
        trusted = torch.where(top_sums > 0, in_range, ~possible)
        empty = chart.scale.isinf() & (trusted & possible)[sentence]
        if chart.allowed is not None:  # the others are meant to be empty
            empty &= chart.allowed
        if empty.any():  # only grammars with zeros come here
            trusted = trusted.index_fill(0, sentence[_lost_rows(chart, tables, emissions)], False)

        believed = trusted & (top_sums > 0)
        of_rows = believed[sentence]
        posterior, before_word = (
            torch.where(of_rows, values, 0.0) for values in (derivatives.posterior, derivatives.before_word)
        )
        posterior[:words] = of_rows[:words].to(compute)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(
                wide_root, chart.leaves, chart.beta, chart.scale, chart.split_scale, derivatives.values,
                derivatives.leaves, top_rows, top_sums, believed,
            )  # fmt: skip
            ctx.layout, ctx.precision, ctx.allowed, ctx.split_rows = layout, precision, chart.allowed, chart.split_rows
            ctx.gradient_types = [gradient_type(tensor) for tensor in (root, pairs, emissions)]
        results = layout.unsort(log_z.to(compute)), layout.unsort(trusted), posterior, before_word
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_log_z: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
        root, leaves, beta, scale, split_scale, d_values, d_leaves, top_rows, top_sums, believed = ctx.saved_tensors
        layout, device, compute = ctx.layout, d_log_z.device, beta.dtype
        n, p, words = beta.shape[1], leaves.shape[1], layout.words
        order = torch.tensor(layout.order, device=device)
        gradient = torch.where(believed, d_log_z[order].to(compute), 0.0)  # [B] sorted
        sentence = torch.from_numpy(layout.sentence_of_rows()).to(device)
        lost = ~believed[sentence]

        def cleared(values: Tensor, rows: slice) -> Tensor:
            """Rows of a sentence that is not trusted may be inf or NaN: 0 x inf must not happen."""
            return values.masked_fill(lost[rows, None] if values.dim() > 1 else lost[rows], 0.0)

        of_words, of_spans, of_all = slice(0, words), slice(words, None), slice(None)
        leaves, beta = cleared(leaves, of_words), cleared(beta, of_spans)
        chart = _Chart(
            layout, leaves, beta, cleared(scale, of_all), cleared(split_scale, of_all), ctx.allowed,
            ctx.split_rows,
        )  # fmt: skip
        weighted = cleared(d_values * gradient[sentence[words:], None], of_spans)
        d_tables: dict[str, Tensor] = {}
        with _products(ctx.precision):
            for width in range(2, layout.longest + 1):
                for rows, left, right, log_scale in chart.blocks(width):
                    coefficient = (log_scale - chart.split_scale[rows, None]).exp().to(compute)
                    for part in chart.parts(width, left, right, coefficient):
                        if part.kind not in d_tables:
                            sizes = (n, part.left.shape[2] * part.right.shape[2])
                            d_tables[part.kind] = torch.zeros(sizes, dtype=compute, device=device)
                        d_tables[part.kind].addmm_(weighted[chart.own(rows)].T, part.pairs)

        d_pairs = torch.zeros(n, n + p, n + p, dtype=compute, device=device)
        for kind, table in d_tables.items():
            first, second = (slice(n, None) if part == "P" else slice(0, n) for part in kind)
            d_pairs[:, first, second] = table.view(n, p if kind[0] == "P" else n, -1)

        per_sentence = torch.where(believed, gradient / top_sums, 0.0)  # [B] fp64
        longer = layout.alive[2] if layout.longest > 1 else 0
        d_root = torch.zeros_like(root)
        d_root[:n] = per_sentence[:longer] @ beta[top_rows[:longer] - words].double()
        d_leaf_rows = cleared(d_leaves * gradient[sentence[:words], None], of_words)
        if len(root) > n:
            one_word = top_rows[longer:]
            d_root[n:] = per_sentence[longer:] @ leaves[one_word].double()
            d_leaf_rows[one_word] += (per_sentence[longer:, None] * root[n:]).to(compute)
        d_emissions = torch.empty_like(d_leaf_rows)
        d_emissions[torch.from_numpy(layout.leaf_word).to(device)] = d_leaf_rows * leaves
        return (*map(finite, (d_root, d_pairs, d_emissions), ctx.gradient_types), None, None, None)
