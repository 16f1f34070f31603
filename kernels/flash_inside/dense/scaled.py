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

The two passes here never wait for the device and copy nothing to it, so that graphs.py can capture them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_inside.dense.plan import Block, Plan
from flash_inside.dense.tables import PairTables
from flash_inside.precision import FORMATS, LARGEST_D_OF_TORCH, matmul_precision
from flash_inside.scaled import Root, leaf_values

LARGEST_BLOCK = 1 << 24  # numbers of X, or of the parts of its splits, that are made at once: 64 MiB in fp32


class Inputs(NamedTuple):
    """What the forward pass reads. Sentences are sorted; emissions are as the caller packed them."""

    tables: PairTables
    root: Tensor  # [N] or [N+P], or [B, ...] fp64
    emissions: Tensor  # [words, P]
    allowed: Tensor | None  # [rows] bool: spans that cross no bracket; None: all of them


class Saved(NamedTuple):
    """What the backward pass reads."""

    leaves: Tensor  # [words, P] e~
    beta: Tensor  # [rows - words, N] beta~ of the widths from 2 on
    scale: Tensor  # [rows] t, fp64; -inf where a row is zero
    split_scale: Tensor  # [rows] s, fp64
    coefficients: Tensor  # [splits] c; of a long sentence none, they are computed again
    d_values: Tensor  # [rows - words, N] D_v
    d_leaves: Tensor  # [words, P] D of e~
    top_sums: Tensor  # [B] fp64 root . beta~


class Found(NamedTuple):
    """What the forward pass tells, of sorted sentences."""

    log_z: Tensor  # [B] fp64
    trusted: Tensor  # [B] bool; but see `empty`
    posterior: Tensor  # [rows]
    before_word: Tensor  # [rows]
    empty: Tensor  # bool: whether a row of a trusted sentence is zero, so that `lost_rows` has to look at it


class Gradients(NamedTuple):
    root: Tensor  # as of the inputs, fp64
    tables: PairTables
    emissions: Tensor  # [words, P]


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
    """What the passes share; its tensors are those of `Saved` and `Inputs`."""

    plan: Plan
    leaves: Tensor
    beta: Tensor
    scale: Tensor
    split_scale: Tensor
    coefficients: Tensor
    allowed: Tensor | None

    @property
    def n(self) -> int:
        return self.beta.shape[1]

    def own(self, rows: slice) -> slice:
        """Return the rows of beta that these rows of the chart are."""
        return slice(rows.start - len(self.leaves), rows.stop - len(self.leaves))

    def blocks(self, width: int) -> Iterator[Block]:
        """Yield blocks of the spans of a width."""
        largest = max(self.n, self.leaves.shape[1])
        return self.plan.blocks(width, max(1, LARGEST_BLOCK // (largest * max(largest, width - 1))))

    def log_scale(self, block: Block) -> Tensor:
        """Return t_ik + t_kj of each split: [r, k]."""
        log_scale = self.scale[block.left] + self.scale[block.right]
        if self.allowed is not None:  # no split of a span that is not allowed counts, so its row is zero
            log_scale.masked_fill_(~self.allowed[block.rows, None], float("-inf"))
        return log_scale

    def coefficient(self, block: Block) -> Tensor:
        """Return c of each split, once the rows of the block are there: [r, k]."""
        if len(self.coefficients):
            return self.coefficients[block.splits].view(block.left.shape)
        return (self.log_scale(block) - self.split_scale[block.rows, None]).exp().to(self.beta.dtype)

    def parts(self, block: Block, coefficient: Tensor) -> Iterator[_Parts]:
        """Yield each kind of split of a block. coefficient: [r, k]"""
        for kind, which, left_rows, right_rows in block.kinds:
            stored = [self.leaves if part == "P" else self.beta for part in kind]
            left, right = (
                values.index_select(0, numbers.flatten()).view(*numbers.shape, -1)
                for values, numbers in zip(stored, (left_rows, right_rows), strict=True)
            )
            yield _Parts(kind, left_rows, right_rows, left, right, coefficient[:, which, None])


def _filled_chart(plan: Plan, inputs: Inputs, compute: torch.dtype) -> tuple[_Chart, Tensor]:
    """Fill the chart; also return what its rows of widths from 2 on were divided by, [rows - words]."""
    layout, tables, emissions = plan.layout, inputs.tables, inputs.emissions
    device, n = emissions.device, tables.n
    leaves, leaf_scale = leaf_values(emissions, plan.leaf_word, FORMATS["fp64" if compute == torch.float64 else "fp32"])
    scale = torch.zeros(layout.rows, dtype=torch.float64, device=device)
    scale[: layout.words] = leaf_scale
    beta = torch.empty(layout.rows - layout.words, n, dtype=compute, device=device)
    coefficients = torch.empty(plan.splits_kept, dtype=compute, device=device)
    chart = _Chart(plan, leaves, beta, scale, torch.zeros_like(scale), coefficients, inputs.allowed)
    divisors = torch.ones(len(beta), dtype=compute, device=device)
    for width in range(2, layout.longest + 1):
        for block in chart.blocks(width):
            rows, own, log_scale = block.rows, chart.own(block.rows), chart.log_scale(block)
            largest = log_scale.amax(1, keepdim=True)
            largest.masked_fill_(largest == float("-inf"), 0.0)
            chart.split_scale[rows] = largest.squeeze(1)
            coefficient = log_scale.sub_(largest).exp_()
            if plan.splits_kept:
                coefficients[block.splits].view(coefficient.shape).copy_(coefficient)
                coefficient = chart.coefficient(block)
            value = torch.zeros(len(coefficient), n, dtype=compute, device=device)
            for part in chart.parts(block, coefficient.to(compute)):
                tables.add_parents(part.kind, part.pairs, value, width, rows)
            divisor = value.amax(1, keepdim=True)
            empty = divisor == 0
            divisor = torch.where(divisor > 0, divisor, 1.0)
            divisors[own] = divisor.squeeze(1)
            torch.div(value, divisor, out=beta[own])
            torch.add(largest, divisor.double().log_(), out=scale[rows, None]).masked_fill_(empty, float("-inf"))
    return chart, divisors


def lost_rows(plan: Plan, inputs: Inputs, saved: Saved) -> Tensor:
    """Find rows that are all zero although the grammar can derive something there: bool [rows].

    No split above has such a row, so no derivative shows the loss. What can be derived is found by the same
    recursion over ones and zeros.
    """
    layout, allowed, compute = plan.layout, inputs.allowed, saved.beta.dtype
    words = inputs.emissions.index_select(0, plan.leaf_word)
    possible = inputs.tables.possible()
    yes = _Chart(
        plan,
        (words > float("-inf")).to(compute),
        torch.zeros_like(saved.beta),
        saved.scale,
        saved.split_scale,
        saved.coefficients,
        allowed,
    )
    for width in range(2, layout.longest + 1):
        for block in yes.blocks(width):
            rows, own, ones = block.rows, yes.own(block.rows), torch.ones_like(block.left, dtype=compute)
            for part in yes.parts(block, ones):
                ways = torch.zeros_like(yes.beta[own])
                possible.add_parents(part.kind, (part.pairs > 0).to(ways.dtype), ways, width, rows)
                there = ways > 0
                if allowed is not None:
                    there &= allowed[rows, None]
                yes.beta[own] = torch.maximum(yes.beta[own], there.to(compute))
    lost = torch.zeros(layout.rows, dtype=torch.bool, device=words.device)
    lost[layout.words :] = saved.scale[layout.words :].isinf() & yes.beta.any(1)
    return lost


class _Derivatives(NamedTuple):
    values: Tensor  # [rows - words, N] D_v
    leaves: Tensor  # [words, P] D of e~
    largest: Tensor  # [rows] a bound of |D| of all that is stored or made at this row
    posterior: Tensor  # [rows]
    before_word: Tensor  # [rows]


def _derivatives(chart: _Chart, tables: PairTables, divisors: Tensor, root: Root, top_sums: Tensor) -> _Derivatives:
    """Compute D for an incoming gradient of 1 a sentence, from the widest spans down.

    top_sums: [B] fp64 root . beta~ (0 = no tree: no gradient)
    """
    plan, layout, compute, n = chart.plan, chart.plan.layout, chart.beta.dtype, chart.n
    totals = {"N": torch.zeros_like(chart.beta), "P": torch.zeros_like(chart.leaves)}
    largest, posterior, before_word = (
        torch.zeros(layout.rows, dtype=compute, device=top_sums.device) for _ in ("largest", "posterior", "before")
    )
    per_sentence = torch.where(top_sums > 0, 1.0 / top_sums, 0.0)
    most_of_a_parent = tables.most_of_a_parent()  # 1, if rows sum to 1
    if tables.per_sentence:
        most_of_a_parent = most_of_a_parent[plan.sentence]  # [rows]
    for width in range(layout.longest, 1, -1):
        here = layout.span_rows(width)
        own = chart.own(here)
        d_beta = totals["N"][own]
        longer, ending = layout.alive[width + 1] if width < layout.longest else 0, layout.alive[width]
        if ending > longer:  # sentences of exactly this length get the gradient of the top
            of_tops = (per_sentence[longer:ending, None] * root.of(slice(longer, ending), slice(0, n))).to(compute)
            d_beta.index_add_(0, plan.top_rows[longer:ending] - here.start, of_tops)
        torch.sum(chart.beta[own] * d_beta, 1, out=posterior[here])
        most_of_d = torch.amax(d_beta.abs(), 1, out=largest[here])
        d_beta /= divisors[own, None]  # in place: from here on D_v
        most_here = most_of_a_parent[here] if tables.per_sentence else most_of_a_parent
        torch.maximum(most_of_d, d_beta.abs().sum(1).mul_(most_here), out=most_of_d)
        for block in chart.blocks(width):
            rows = block.rows
            for part in chart.parts(block, chart.coefficient(block)):
                by_pairs = tables.by_pairs(part.kind, totals["N"][chart.own(rows)], width, rows)  # G
                by_pairs = by_pairs.view(len(part.left), part.left.shape[2], part.right.shape[2])
                d_left = torch.bmm(part.right, by_pairs.mT).mul_(part.coefficient)
                d_right = torch.bmm(part.left, by_pairs).mul_(part.coefficient)
                totals[part.kind[0]].index_add_(0, part.left_rows.flatten(), d_left.flatten(0, 1))
                totals[part.kind[1]].index_add_(0, part.right_rows.flatten(), d_right.flatten(0, 1))
                if part.kind[1] == "P":
                    torch.sum(part.left * d_left, (1, 2), out=before_word[rows])
    largest[: layout.words] = totals["P"].abs().amax(1)
    return _Derivatives(totals["N"], totals["P"], largest, posterior, before_word)


def forward_pass(plan: Plan, inputs: Inputs, precision: str) -> tuple[Saved, Found]:
    layout, words, compute = plan.layout, plan.layout.words, compute_type(precision)
    tables, emissions, top_rows, sentence = inputs.tables, inputs.emissions, plan.top_rows, plan.sentence
    n, root = tables.n, Root(inputs.root)
    one_word = inputs.root.shape[-1] > n
    with _products(precision):
        chart, divisors = _filled_chart(plan, inputs, compute)
        # root . beta~ of every sorted sentence; the one-word ones are the last
        longer = layout.alive[2] if layout.longest > 1 else 0
        top_sums = torch.zeros(len(plan.lengths), dtype=torch.float64, device=emissions.device)
        tops, single = slice(0, longer), slice(longer, None)
        nonterminals, preterminals = slice(0, n), slice(n, None)
        top_sums[tops] = root.products(chart.beta[top_rows[tops] - words], tops, nonterminals)
        if one_word:
            top_sums[single] = root.products(chart.leaves[top_rows[single]], single, preterminals)
        derivatives = _derivatives(chart, tables, divisors, root, top_sums)
    log_z = torch.where(top_sums > 0, top_sums.log() + chart.scale[top_rows], float("-inf"))

    # What can be believed.
    largest = torch.zeros_like(top_sums)  # [B] of |D|; a one-word sentence has only that of its leaf
    if one_word:
        most = root.of(single, preterminals).amax(-1)
        largest[single] = most / top_sums[single]  # read only where top_sums > 0
    largest = largest.scatter_reduce_(0, sentence, derivatives.largest.double(), "amax")
    nothing = emissions.index_select(0, plan.leaf_word).amax(1) == float("-inf")  # no preterminal has this word
    unknown_words = torch.zeros_like(sentence[: len(top_sums)]).index_add_(0, sentence[:words], nothing.long())
    possible = unknown_words == 0  # [B]
    if not one_word:
        possible[longer:] = False
    in_range = torch.isfinite(top_sums) & (largest <= LARGEST_D_OF_TORCH[compute])
    trusted = torch.where(top_sums > 0, in_range, ~possible)
    empty = chart.scale.isinf() & (trusted & possible)[sentence]
    if inputs.allowed is not None:  # the others are meant to be empty
        empty &= inputs.allowed
    saved = Saved(
        chart.leaves,
        chart.beta,
        chart.scale,
        chart.split_scale,
        chart.coefficients,
        derivatives.values,
        derivatives.leaves,
        top_sums,
    )
    return saved, Found(log_z, trusted, derivatives.posterior, derivatives.before_word, empty.any())


class Incoming(NamedTuple):
    """What the backward pass reads besides `Saved`."""

    root: Tensor  # as of the inputs
    allowed: Tensor | None
    believed: Tensor  # [B] bool, sorted: trusted, and with a tree
    d_log_z: Tensor  # [B], caller's order


def backward_pass(
    plan: Plan, saved: Saved, incoming: Incoming, precision: str, memory: dict[str, Tensor] | None = None
) -> Gradients:
    """Compute the gradients. memory: see `PairTables`"""
    layout, sentence, top_rows = plan.layout, plan.sentence, plan.top_rows
    believed, root = incoming.believed, Root(incoming.root)
    leaves, beta, top_sums, compute = saved.leaves, saved.beta, saved.top_sums, saved.beta.dtype
    n, words = beta.shape[1], layout.words
    gradient = torch.where(believed, incoming.d_log_z[plan.order].to(compute), 0.0)  # [B] sorted
    lost = ~believed[sentence]

    def cleared(values: Tensor, rows: slice) -> Tensor:
        """Rows of a sentence that is not trusted may be inf or NaN: 0 x inf must not happen."""
        return values.masked_fill(lost[rows, None] if values.dim() > 1 else lost[rows], 0.0)

    of_words, of_spans = slice(0, words), slice(words, None)
    leaves, beta = cleared(leaves, of_words), cleared(beta, of_spans)
    chart = _Chart(plan, leaves, beta, saved.scale, saved.split_scale, saved.coefficients, incoming.allowed)
    weighted = cleared(saved.d_values * gradient[sentence[words:], None], of_spans)
    d_tables = PairTables(plan, root.values.dim() == 2, memory)
    with _products(precision):
        for width in range(2, layout.longest + 1):
            for block in chart.blocks(width):
                rows = block.rows
                for part in chart.parts(block, cleared(chart.coefficient(block), rows)):
                    d_tables.add_counts(part.kind, weighted[chart.own(rows)], part.pairs, width, rows)

    per_sentence = torch.where(believed, gradient / top_sums, 0.0)  # [B] fp64
    longer = layout.alive[2] if layout.longest > 1 else 0
    tops, single, nonterminals, preterminals = slice(0, longer), slice(longer, None), slice(0, n), slice(n, None)
    d_root = Root(torch.zeros_like(root.values))
    d_root.write_sums(per_sentence[tops], beta[top_rows[tops] - words], tops, nonterminals)
    d_leaf_rows = cleared(saved.d_leaves * gradient[sentence[:words], None], of_words)
    if root.values.shape[-1] > n:
        one_word = top_rows[single]
        d_root.write_sums(per_sentence[single], leaves[one_word], single, preterminals)
        d_leaf_rows[one_word] += (per_sentence[single, None] * root.of(single, preterminals)).to(compute)
    d_emissions = torch.empty_like(d_leaf_rows)
    d_emissions[plan.leaf_word] = d_leaf_rows * leaves
    return Gradients(d_root.values, d_tables, d_emissions)
