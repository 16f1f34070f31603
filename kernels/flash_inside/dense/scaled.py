"""The dense inside algorithm in scaled linear space on packed sentences: plain PyTorch, any device.

A row of the chart is divided by its largest entry, whose logarithm goes into the row's scale t, in fp64 (a tilde marks
a stored value). For each width, with c_ikj = exp(t_ik + t_kj - s_ij) and s_ij the largest t_ik + t_kj of all splits k:

    X_ij[B, C] = sum_k c_ikj beta~_ik[B] beta~_kj[C]          batched products [left, splits] x [splits, right]
    v_ij[A]    = sum_BC T[A, B, C] X_ij[B, C]                 ONE product [spans, left x right] x [left x right, N]
                                                              (rules per sentence: one batched product, tables.py)
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
from flash_inside.dense.reference import PairRules, kinds_of
from flash_inside.dense.tables import PairTables
from flash_inside.packing import Layout, SplitRows
from flash_inside.precision import FORMATS, LARGEST_D_OF_TORCH, finite, gradient_type, matmul_precision
from flash_inside.scaled import Root, leaf_values

LARGEST_BLOCK = 1 << 24  # numbers of X, or of the parts of its splits, that are made at once: 64 MiB in fp32
MOST_SPLITS_KEPT = 1 << 22  # of a chart, between its passes; the rows of the others are computed block by block


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
    tables: PairTables, emissions: Tensor, layout: Layout, precision: str, limits: np.ndarray | None
) -> tuple[_Chart, Tensor]:
    """Do the forward pass: return the chart, and what its rows of widths from 2 on were divided by, [rows - words]."""
    device, compute, n = emissions.device, compute_type(precision), tables.n
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
                tables.add_parents(part.kind, part.pairs, value, width, rows)
            divisor = value.amax(1, keepdim=True)
            empty = divisor == 0
            divisor = torch.where(divisor > 0, divisor, 1.0)
            own = chart.own(rows)
            chart.beta[own], divisors[own] = value / divisor, divisor.squeeze(1)
            chart.split_scale[rows] = largest.squeeze(1)
            chart.scale[rows] = (largest + divisor.double().log()).masked_fill_(empty, float("-inf")).squeeze(1)
    return chart, divisors


def _lost_rows(chart: _Chart, tables: PairTables, emissions: Tensor) -> Tensor:
    """Find rows that are all zero although the grammar can derive something there: bool [rows].

    No split above has such a row, so no derivative shows the loss. What can be derived is found by the same
    recursion over ones and zeros.
    """
    layout = chart.layout
    words = emissions.index_select(0, torch.from_numpy(layout.leaf_word).to(emissions.device))
    possible = tables.possible()
    yes = _Chart(
        layout, (words > float("-inf")).to(chart.leaves.dtype), torch.zeros_like(chart.beta), chart.scale,
        chart.split_scale, chart.allowed, chart.split_rows,
    )  # fmt: skip
    for width in range(2, layout.longest + 1):
        for rows, left, right, log_scale in yes.blocks(width):
            own, ones = yes.own(rows), torch.ones_like(log_scale, dtype=chart.beta.dtype)
            for part in yes.parts(width, left, right, ones):
                ways = torch.zeros_like(yes.beta[own])
                possible.add_parents(part.kind, (part.pairs > 0).to(ways.dtype), ways, width, rows)
                there = ways > 0
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
    chart: _Chart, tables: PairTables, divisors: Tensor, root: Root, top_rows: Tensor, top_sums: Tensor
) -> _Derivatives:
    """Compute D for an incoming gradient of 1 a sentence, from the widest spans down.

    top_rows: [B] rows of whole sentences, top_sums: [B] fp64 root . beta~ (0 = no tree: no gradient)
    """
    layout, compute, n = chart.layout, chart.beta.dtype, chart.n
    totals = {"N": torch.zeros_like(chart.beta), "P": torch.zeros_like(chart.leaves)}
    largest, posterior, before_word = (
        torch.zeros(layout.rows, dtype=compute, device=top_sums.device) for _ in ("largest", "posterior", "before")
    )
    per_sentence = torch.where(top_sums > 0, 1.0 / top_sums, 0.0)
    most_of_a_parent = tables.most_of_a_parent()  # 1, if rows sum to 1
    if tables.per_sentence:
        most_of_a_parent = most_of_a_parent[torch.from_numpy(layout.sentence_of_rows()).to(top_sums.device)]  # [rows]
    for width in range(layout.longest, 1, -1):
        here = layout.span_rows(width)
        own = chart.own(here)
        d_beta = totals["N"][own]
        longer, ending = layout.alive[width + 1] if width < layout.longest else 0, layout.alive[width]
        if ending > longer:  # sentences of exactly this length get the gradient of the top
            of_tops = (per_sentence[longer:ending, None] * root.of(slice(longer, ending), slice(0, n))).to(compute)
            d_beta.index_add_(0, top_rows[longer:ending] - here.start, of_tops)
        posterior[here] = (chart.beta[own] * d_beta).sum(1)
        largest[here] = d_beta.abs().amax(1)
        d_beta /= divisors[own, None]  # in place: from here on D_v
        most_here = most_of_a_parent[here] if tables.per_sentence else most_of_a_parent
        largest[here] = torch.maximum(largest[here], d_beta.abs().sum(1) * most_here)
        for rows, left, right, log_scale in chart.blocks(width):
            coefficient = (log_scale - chart.split_scale[rows, None]).exp().to(compute)
            for part in chart.parts(width, left, right, coefficient):
                by_pairs = tables.by_pairs(part.kind, totals["N"][chart.own(rows)], width, rows)  # G
                by_pairs = by_pairs.view(len(left), part.left.shape[2], part.right.shape[2])
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
        words, device, compute = layout.words, emissions.device, compute_type(precision)
        tables = PairTables.cut(pairs, layout, compute)
        n, one_word = tables.n, root.shape[-1] > tables.n
        wide_root = Root.sorted(root, layout)
        with _products(precision):
            chart, divisors = _filled_chart(tables, emissions, layout, precision, limits)
            # root . beta~ of every sorted sentence; the one-word ones are the last
            top_rows = torch.from_numpy(layout.tops()).to(device)
            longer = layout.alive[2] if layout.longest > 1 else 0
            top_sums = torch.zeros(len(layout.lengths), dtype=torch.float64, device=device)
            tops, single = slice(0, longer), slice(longer, None)
            nonterminals, preterminals = slice(0, n), slice(n, None)
            top_sums[tops] = wide_root.products(chart.beta[top_rows[tops] - words], tops, nonterminals)
            if one_word:
                top_sums[single] = wide_root.products(chart.leaves[top_rows[single]], single, preterminals)
            derivatives = _derivatives(chart, tables, divisors, wide_root, top_rows, top_sums)
        log_z = torch.where(top_sums > 0, top_sums.log() + chart.scale[top_rows], float("-inf"))

        # What can be believed.
        sentence = torch.from_numpy(layout.sentence_of_rows()).to(device)  # [rows]
        largest = torch.zeros_like(top_sums)  # [B] of |D|; a one-word sentence has only that of its leaf
        if one_word:
            most = wide_root.of(single, preterminals).amax(-1)
            largest[single] = torch.where(top_sums[single] > 0, most / top_sums[single], 0.0)
        largest = largest.scatter_reduce_(0, sentence, derivatives.largest.double(), "amax")
        possible = torch.ones_like(top_sums, dtype=torch.bool)
        leaf_word = torch.from_numpy(layout.leaf_word).to(device)
        nothing = emissions.index_select(0, leaf_word).amax(1) == float("-inf")  # no preterminal has this word
        possible[sentence[:words][nothing]] = False
        if not one_word:
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
                wide_root.values, chart.leaves, chart.beta, chart.scale, chart.split_scale, derivatives.values,
                derivatives.leaves, top_rows, top_sums, believed,
            )  # fmt: skip
            ctx.per_sentence = tables.per_sentence
            ctx.layout, ctx.precision, ctx.allowed, ctx.split_rows = layout, precision, chart.allowed, chart.split_rows
            ctx.gradient_types = [gradient_type(tensor) for tensor in (root, pairs, emissions)]
        results = layout.unsort(log_z.to(compute)), layout.unsort(trusted), posterior, before_word
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_log_z: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
        wide_root, leaves, beta, scale, split_scale, d_values, d_leaves, top_rows, top_sums, believed = (
            ctx.saved_tensors
        )
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
        d_tables = PairTables(layout, ctx.per_sentence)
        with _products(ctx.precision):
            for width in range(2, layout.longest + 1):
                for rows, left, right, log_scale in chart.blocks(width):
                    coefficient = (log_scale - chart.split_scale[rows, None]).exp().to(compute)
                    for part in chart.parts(width, left, right, coefficient):
                        d_tables.add_counts(part.kind, weighted[chart.own(rows)], part.pairs, width, rows)

        per_sentence = torch.where(believed, gradient / top_sums, 0.0)  # [B] fp64
        longer = layout.alive[2] if layout.longest > 1 else 0
        tops, single, nonterminals, preterminals = slice(0, longer), slice(longer, None), slice(0, n), slice(n, None)
        root, d_root = Root(wide_root), Root(torch.zeros_like(wide_root))
        d_root.write_sums(per_sentence[tops], beta[top_rows[tops] - words], tops, nonterminals)
        d_leaf_rows = cleared(d_leaves * gradient[sentence[:words], None], of_words)
        if root.values.shape[-1] > n:
            one_word = top_rows[single]
            d_root.write_sums(per_sentence[single], leaves[one_word], single, preterminals)
            d_leaf_rows[one_word] += (per_sentence[single, None] * root.of(single, preterminals)).to(compute)
        d_emissions = torch.empty_like(d_leaf_rows)
        d_emissions[torch.from_numpy(layout.leaf_word).to(device)] = d_leaf_rows * leaves
        d_root_given = layout.unsort(d_root.values) if ctx.per_sentence else d_root.values
        d_pairs = d_tables.joined(n, p, beta)
        return (*map(finite, (d_root_given, d_pairs, d_emissions), ctx.gradient_types), None, None, None)
