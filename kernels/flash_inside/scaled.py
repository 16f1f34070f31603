"""The inside algorithm in scaled linear space on packed sentences: plain PyTorch, any device.

A row of the chart holds linear values and a natural-log scale each for beta, eta and zeta (the derivation is in
docs/kernels.md; a tilde marks a stored value):

    eta~ = eta / mL, tL = t + log mL      mL = max over A;    zeta~, mR, tR likewise
    c_ikj = exp(tL_ik + tR_kj - t_ij)
    beta~_ij = sum_k c_ikj eta~_ik zeta~_kj        t_ij such that the largest entry is 1

One exp per split and plain multiplications per symbol, where log space needs an exp and a log per symbol.

The derivatives D = d log Z / d stored value are computed right after the forward pass, for two reasons: they tell which
sentences left the range of the number format (see `trusted`), so a wrong log Z is never returned; and eta, zeta can be
dropped at once. What stays for the backward are beta~ and D (3N values a row); e~ and c are recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flash_inside.brackets import allowed_rows
from flash_inside.packing import Layout, SplitRows, Squares
from flash_inside.precision import (
    LARGEST_D_OF_TORCH,
    Format,
    chart_format,
    finite,
    gradient_type,
    matmul_precision,
    product,
)
from flash_inside.rules import Rules

LARGEST_BLOCK = 1 << 22  # elements of a temporary [rows, splits, N] (measured on a CPU: larger ones leave the cache)
MOST_SPLITS_KEPT = 1 << 22  # of a chart, between its passes; the rows of the others are computed block by block
#: Numbers of eta~ and zeta~ in squares, at most (256 MiB in fp32): half of a square is empty.
LARGEST_SQUARES = 1 << 26
#: Up to so many nonterminals sums over splits are rounded as they always were, on every device: the runs of small
#: models can be repeated bit for bit. Above, a CPU sums in an order that it is faster in.
LARGEST_AS_EVER = 64


class Result(NamedTuple):
    log_z: Tensor  # [B] compute dtype, differentiable
    trusted: Tensor  # [B] bool: False = outside the range of the number format, recompute
    posterior: Tensor  # [rows] of the layout: posterior probability of every span


def inside(rules: Rules, emissions: Tensor, layout: Layout, precision: str, limits: np.ndarray | None = None) -> Result:
    """Return log marginals in the caller's order. The gradient of a sentence that is not trusted is zero."""
    root, left, right = rules
    log_z, trusted, posterior = _ScaledInside.apply(root, left, right, emissions, layout, precision, limits)
    return Result(log_z, trusted, posterior)


@dataclass
class Root:
    """Root probabilities: one vector for all sentences, or one of every sorted sentence.

    They are fp64: a trained root gives one-word sentences 1e-60, and it is only a vector.
    """

    values: Tensor  # [N] or [N+P], or [B, ...] fp64

    @classmethod
    def sorted(cls, root: Tensor, layout: Layout) -> Root:
        return cls((layout.sort(root) if root.dim() == 2 else root).double())

    def of(self, sentences: slice, columns: slice) -> Tensor:
        """Return these symbols of some sentences: [K] or [sentences, K], which broadcasts against their rows."""
        return self.values[sentences, columns] if self.values.dim() == 2 else self.values[columns]

    def products(self, rows: Tensor, sentences: slice, columns: slice) -> Tensor:
        """root . row of some sentences: [sentences, K] -> [sentences] fp64."""
        part = self.of(sentences, columns)
        return (rows.double() * part).sum(1) if part.dim() == 2 else rows.double() @ part

    def write_sums(self, weights: Tensor, rows: Tensor, sentences: slice, columns: slice) -> None:
        """Write sum_b weight_b row_b, or the term of each sentence. weights: [sentences]; rows: [sentences, K]"""
        rows = rows.double()
        self.of(sentences, columns).copy_(weights[:, None] * rows if self.values.dim() == 2 else weights @ rows)


@dataclass
class Weights:
    """[left; right] as ordinary linear-layer weights, in the storage type. Rules per sentence: [B, ...], sorted.

    Products with these are batched, one for each run of sentences of one length (packing.py).
    """

    children: Tensor  # [2N, N]   nonterminal children
    leaves: Tensor  # [2N, P]   preterminal children
    of_children: Tensor  # [N, 2N]   the same transposed
    of_leaves: Tensor  # [P, 2N]
    layout: Layout
    compute: torch.dtype

    @classmethod
    def of(cls, rules: Rules, layout: Layout, precision: Format) -> Weights:
        both = torch.cat((rules.left, rules.right), dim=-2).to(precision.storage)  # [2N, N+P]
        if rules.per_sentence:
            both = layout.sort(both)
        n = rules.nonterminals
        children, leaves = both[..., :n].contiguous(), both[..., n:].contiguous()
        if n <= LARGEST_AS_EVER or both.device.type != "cpu":
            return cls(children, leaves, children.mT, leaves.mT, layout, precision.compute)
        # A product with a transposed matrix goes to another library on ARM, which takes 0.2 ms to begin.
        return cls(children, leaves, children.mT.contiguous(), leaves.mT.contiguous(), layout, precision.compute)

    @property
    def per_sentence(self) -> bool:
        return self.children.dim() == 3

    def possible(self) -> Weights:
        """Return ones where a rule is possible, and zeros, in the compute type."""
        children, leaves = ((matrix > 0).to(self.compute) for matrix in (self.children, self.leaves))
        return Weights(children, leaves, children.mT, leaves.mT, self.layout, self.compute)

    def to_children(self, rows: Tensor, width: int, block: slice | None = None) -> Tensor:
        """[eta | zeta] = rows [left; right]^T of a width's spans, or of a block of them: [R, N or P] -> [R, 2N]."""
        return self._product(rows, self.of_leaves if width == 1 else self.of_children, width, block)

    def from_children(self, d_children: Tensor, width: int) -> Tensor:
        """D by the rows of a width = D_eta left + D_zeta right: [R, 2N] -> [R, N or P]."""
        return self._product(d_children, self.leaves if width == 1 else self.children, width)

    def _product(self, rows: Tensor, matrix: Tensor, width: int, block: slice | None = None) -> Tensor:
        if not self.per_sentence:
            return product(rows, matrix, self.compute)
        runs = self.layout.runs(width, block)
        parts = [product(run.of(rows), matrix[run.sentences], self.compute).flatten(0, 1) for run in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def counts(self, d_children: Tensor, leaves: Tensor, beta: Tensor) -> Tensor:
        """Sum D^T row over all spans, or over those of each sentence: [2N, N+P], or [B, 2N, N+P] in caller's order.

        d_children: [rows, 2N]; leaves: [words, P]; beta: [rows - words, N]
        """
        n, words, compute, layout = beta.shape[1], len(leaves), self.compute, self.layout
        if not self.per_sentence:
            d_leaves = product(d_children[:words].T, leaves, compute)  # [2N, P]
            d_weights = product(d_children[words:].T, beta, compute)  # [2N, N]: ONE product over all spans
            return torch.cat((d_weights, d_leaves), dim=1)
        out = d_children.new_zeros(len(layout.lengths), 2 * n, n + leaves.shape[1], dtype=compute)
        for run in layout.runs(1):
            out[run.sentences, :, n:] = product(run.of(d_children[:words]).mT, run.of(leaves), compute)
        order, runs = layout.by_sentence()
        rows = torch.from_numpy(order).to(beta.device)
        d_spans, spans = d_children[rows], beta[rows - words]  # one sentence after another
        for run in runs:  # ONE product for all sentences of a length
            out[run.sentences, :, :n] = product(run.of(d_spans).mT, run.of(spans), compute)
        return layout.unsort(out)


class Chart:
    """Forward pass. Rows are those of the layout; scales are fp64, because fp32 scales cap the accuracy at 1e-6."""

    def __init__(
        self, weights: Weights, emissions: Tensor, layout: Layout, precision: Format, limits: np.ndarray | None = None
    ):
        self.weights, self.layout, self.precision = weights, layout, precision
        #: [rows] bool: spans that cross no bracket; None: all of them
        self.allowed = None
        if limits is not None:
            self.allowed = torch.from_numpy(allowed_rows(limits, layout)).to(emissions.device)
        self.n = weights.children.shape[-1]
        device, rows = emissions.device, layout.rows
        self.device, self.as_ever = device, device.type != "cpu" or self.n <= LARGEST_AS_EVER
        self.split_rows = SplitRows(layout, device, MOST_SPLITS_KEPT)
        self.leaf_word = torch.from_numpy(layout.leaf_word).to(device)
        self._make_room()
        self.largest = torch.empty(rows, 2, 1, dtype=precision.compute, device=device)  # mL, mR
        self.beta = torch.empty(rows - layout.words, self.n, dtype=precision.storage, device=device)  # widths > 1
        self.divisor = torch.ones(rows, dtype=precision.compute, device=device)  # of beta
        self.scale = torch.empty(rows, dtype=torch.float64, device=device)  # t
        self.child_scale = torch.empty(rows, 2, dtype=torch.float64, device=device)  # tL, tR

        leaves, self.scale[: layout.words] = leaf_values(emissions, self.leaf_word, precision)
        self._store_children(1, weights.to_children(leaves, 1))
        for width in range(2, layout.longest + 1):
            self._split_sum(width)
            self._store_children(width, weights.to_children(self.beta_rows(width), width))

    def _make_room(self) -> None:
        """Make room for eta~ and zeta~."""
        self.eta_zeta = torch.empty(self.layout.rows, 2, self.n, dtype=self.precision.storage, device=self.device)

    def beta_rows(self, width: int) -> Tensor:
        rows = self.layout.span_rows(width)
        return self.beta[rows.start - self.layout.words : rows.stop - self.layout.words]

    def row_numbers(self, width: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield blocks of the spans of a width: rows; rows of left parts, of right parts, each [r, k]."""
        return self.split_rows.blocks(width, max(1, LARGEST_BLOCK // (self.n * (width - 1))))

    def splits(self, width: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield the same, and log scales: [r, k]."""
        for rows, left, right in self.row_numbers(width):
            yield rows, left, right, self._allowed(rows, self.child_scale[:, 0][left] + self.child_scale[:, 1][right])

    def _allowed(self, rows: slice, log_scale: Tensor) -> Tensor:
        if self.allowed is not None:  # no split of a span that is not allowed counts, so its row is zero
            log_scale.masked_fill_(~self.allowed[rows, None], float("-inf"))
        return log_scale

    def gather(self, rows: Tensor, side: int) -> Tensor:
        """Gather eta~ (side 0) or zeta~ (side 1) of a table of rows: [r, k] -> [r, k, N] in the compute type."""
        return self.eta_zeta[:, side].index_select(0, rows.flatten()).to(self.precision.compute).view(*rows.shape, -1)

    def _split_sum(self, width: int) -> None:
        for rows, left, right, log_scale in self.splits(width):
            largest = log_scale.amax(1, keepdim=True)
            largest.masked_fill_(largest == float("-inf"), 0.0)
            coefficient = (log_scale - largest).exp().to(self.precision.compute)  # [r, k]
            products = self._products(left, right)  # [r, k, N]
            if self.as_ever:
                beta = torch.bmm(coefficient.unsqueeze(1), products).squeeze(1)  # [r, N]
            else:  # on a CPU the batched product goes from row to row
                beta = products.mul_(coefficient.unsqueeze(2)).sum(1)
            # Divided by its maximum, the symbol that dominates a row is 1 and has no rounding error in bf16.
            divisor = beta.amax(1, keepdim=True)
            divisor = torch.where(divisor > 0, divisor, 1.0)
            self.divisor[rows] = divisor.squeeze(1)
            self.scale[rows] = (largest + divisor.double().log()).squeeze(1)
            self.beta[rows.start - self.layout.words : rows.stop - self.layout.words] = beta / divisor

    def _products(self, left: Tensor, right: Tensor) -> Tensor:
        """Return eta~ x zeta~ of the splits that `splits` yields: [r, k, N] in the compute type."""
        return self.gather(left, 0).mul_(self.gather(right, 1))

    def flow(self, rows: slice, log_scale: Tensor, d_beta: Tensor) -> Tensor:
        """Return c x D_beta~ of splits: [r, k], [r, N] -> [r, k, N]."""
        coefficient = (log_scale - self.scale[rows, None]).exp().to(self.precision.compute)
        return coefficient.unsqueeze(2) * d_beta.unsqueeze(1)

    def add_to_parts(self, width: int, d_beta: Tensor, totals: Tensor) -> None:
        """Add to D_eta~ and D_zeta~ of the parts of a width's spans. d_beta: [R, N]; totals: [rows, 2, N]"""
        here = self.layout.span_rows(width)
        for block, left, right, log_scale in self.splits(width):
            flow = self.flow(block, log_scale, d_beta[block.start - here.start : block.stop - here.start])
            totals[:, 0].index_add_(0, left.flatten(), (self.gather(right, 1) * flow).flatten(0, 1))
            totals[:, 1].index_add_(0, right.flatten(), (self.gather(left, 0) * flow).flatten(0, 1))

    def collect(self, width: int, totals: Tensor) -> None:
        """Bring what was added for the spans of a width to their rows of the totals: it is there already."""

    def _store_children(self, width: int, eta_zeta: Tensor) -> None:
        """Rescale [eta | zeta] of a width, each by its own maximum; an all-zero row gets scale -inf and a divisor 1."""
        rows = self.layout.span_rows(width)
        eta_zeta = eta_zeta.view(-1, 2, self.n)
        largest = eta_zeta.amax(2, keepdim=True)
        self.child_scale[rows] = self.scale[rows, None] + largest.squeeze(2).double().log()
        largest = torch.where(largest > 0, largest, 1.0)
        self.largest[rows] = largest
        self._store(width, (eta_zeta / largest).to(self.precision.storage))

    def _store(self, width: int, eta_zeta: Tensor) -> None:
        """Store eta~ and zeta~ of a width, whose scales are known: [R, 2, N]."""
        self.eta_zeta[self.layout.span_rows(width)] = eta_zeta


class SquareChart(Chart):
    """The same on a CPU without a table of row numbers: parts of splits are views of squares (packing.Squares)."""

    @staticmethod
    def fits(layout: Layout, nonterminals: int, device: torch.device) -> bool:
        """Whether a chart of squares is not too large, nor the temporaries of one sentence."""
        largest = layout.longest**2 // 4 * nonterminals
        numbers = Squares.numbers(layout) * nonterminals
        return device.type == "cpu" and numbers <= LARGEST_SQUARES and largest <= LARGEST_BLOCK

    def _make_room(self) -> None:
        self.values = Squares(self.layout, (self.n,), self.precision.storage, self.device)
        self.scales = Squares(self.layout, (), torch.float64, self.device)
        self.log_scales: dict[int, Tensor] = {}  # of splits, by the first row of their block, for the second pass
        self.totals: Squares | None = None  # D_eta~ and D_zeta~, when they are asked for

    def _store(self, width: int, eta_zeta: Tensor) -> None:
        self.values.write(width, eta_zeta)
        self.scales.write(width, self.child_scale[self.layout.span_rows(width)])

    def splits(self, width: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield blocks of spans: rows; left and right parts [sentences, spans, k, N]; log scales [r, k]."""
        here, largest = self.layout.span_rows(width), LARGEST_BLOCK // self.n
        if here.start not in self.log_scales:
            for some, left, right in self.scales.parts(width, largest):
                rows = slice(here.start + some.start, here.start + some.stop)
                self.log_scales[rows.start] = self._allowed(rows, (left + right).flatten(0, 1))
        for some, left, right in self.values.parts(width, largest):
            rows = slice(here.start + some.start, here.start + some.stop)
            yield rows, left, right, self.log_scales[rows.start]

    def _products(self, left: Tensor, right: Tensor) -> Tensor:
        compute = self.precision.compute
        return (left.to(compute) * right.to(compute)).flatten(0, 1)

    def add_to_parts(self, width: int, d_beta: Tensor, totals: Tensor) -> None:
        compute, first = self.precision.compute, self.layout.span_rows(width).start
        if self.totals is None:
            self.totals = Squares(self.layout, (self.n,), compute, self.device)
        both = zip(self.splits(width), self.totals.parts(width, LARGEST_BLOCK // self.n), strict=True)
        for (rows, left, right, log_scale), (_, d_left, d_right) in both:
            flow = self.flow(rows, log_scale, d_beta[rows.start - first : rows.stop - first]).view(left.shape)
            for d_part, other in ((d_left, right), (d_right, left)):
                if self.as_ever:
                    d_part.add_(other.to(compute) * flow)
                else:  # rounded once
                    d_part.addcmul_(other.to(compute), flow)

    def collect(self, width: int, totals: Tensor) -> None:
        if self.totals is not None:
            totals[self.layout.span_rows(width)] = self.totals.read(width)


def leaf_values(emissions: Tensor, leaf_word: Tensor, precision: Format) -> tuple[Tensor, Tensor]:
    """Return e~ = exp(emission - max) [words, P] in leaf-row order, and its scale [words]. All -inf: zeros, scale 0."""
    wide = torch.promote_types(emissions.dtype, precision.compute)
    rows = emissions.index_select(0, leaf_word).to(wide)
    scale = rows.amax(1, keepdim=True)
    scale = torch.where(scale == float("-inf"), 0.0, scale)
    return (rows - scale).exp().to(precision.storage), scale.squeeze(1).double()


def _lost_rows(chart: Chart, emissions: Tensor) -> Tensor:
    """Find rows of eta or zeta that are all zero although the grammar can derive something there: bool [rows].

    Nothing above such a row has it in its splits, so no derivative shows the loss. What can be derived is found by
    the same recursion over booleans.
    """
    layout, possible, compute = chart.layout, chart.weights.possible(), chart.precision.compute
    yes = torch.empty(layout.rows, 2, chart.n, dtype=torch.bool, device=chart.device)
    words_yes = emissions.index_select(0, chart.leaf_word) > float("-inf")
    yes[: layout.words] = (possible.to_children(words_yes.to(compute), 1) > 0).view(-1, 2, chart.n)
    for width in range(2, layout.longest + 1):
        for rows, left, right in chart.row_numbers(width):
            beta_yes = (yes[:, 0][left] & yes[:, 1][right]).any(1)  # [r, N]
            if chart.allowed is not None:
                beta_yes &= chart.allowed[rows, None]
            yes[rows] = (possible.to_children(beta_yes.to(compute), width, rows) > 0).view(-1, 2, chart.n)
    return (chart.child_scale.isinf() & yes.any(2)).any(1)


class _Derivatives(NamedTuple):
    children: Tensor  # [rows, 2N] storage type: D_eta~ / mL | D_zeta~ / mR
    largest: Tensor  # [rows] the largest |D| of the row
    posterior: Tensor  # [rows]


def _derivatives(chart: Chart, root: Root, top_rows: Tensor, top_sums: Tensor) -> _Derivatives:
    """Compute D for an incoming gradient of 1 a sentence, from the widest spans down.

    top_rows: [B] rows of whole sentences, top_sums: [B] fp64 root . beta~ (0 = no tree: no gradient).
    """
    layout, weights, compute, n = chart.layout, chart.weights, chart.precision.compute, chart.n
    rows, device = layout.rows, chart.scale.device
    # The rows of wider spans add to these: for one width no row is met twice, so the sums have one fixed order.
    totals = torch.zeros(rows, 2, n, dtype=compute, device=device)
    largest = torch.empty(rows, dtype=compute, device=device)
    posterior = torch.empty(rows, dtype=compute, device=device)
    per_sentence = torch.where(top_sums > 0, 1.0 / top_sums, 0.0)  # [B]

    for width in range(layout.longest, 0, -1):
        here = layout.span_rows(width)
        chart.collect(width, totals)
        totals[here] /= chart.largest[here]
        largest[here] = totals[here].abs().flatten(1).amax(1)
        if width == 1:
            break
        d_beta = weights.from_children(totals[here].to(chart.precision.storage).flatten(1), width)  # [R, N]
        longer, ending = layout.alive[width + 1] if width < layout.longest else 0, layout.alive[width]
        if ending > longer:  # sentences of exactly this length get the gradient of the top
            of_tops = (per_sentence[longer:ending, None] * root.of(slice(longer, ending), slice(0, n))).to(compute)
            d_beta.index_add_(0, top_rows[longer:ending] - here.start, of_tops)
        # Of beta~, and of beta before its division: there too something may be lost.
        largest_here = d_beta.abs().amax(1)
        largest_here = torch.maximum(largest_here, largest_here / chart.divisor[here])
        largest[here] = torch.maximum(largest[here], largest_here)
        posterior[here] = (chart.beta_rows(width).to(compute) * d_beta).sum(1)
        chart.add_to_parts(width, d_beta, totals)
    return _Derivatives(totals.to(chart.precision.storage).flatten(1), largest, posterior)


class _ScaledInside(torch.autograd.Function):
    """(root, left, right, emissions) -> log Z [B], trusted [B], posterior [rows]; the last two not differentiable."""

    @staticmethod
    def forward(
        ctx: Any, root: Tensor, left: Tensor, right: Tensor, emissions: Tensor, layout: Layout, precision_name: str,
        limits: np.ndarray | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        rules, device = Rules(root, left, right), emissions.device
        n, words = rules.nonterminals, layout.words
        precision = chart_format(precision_name, n, shortest=int(layout.lengths[-1]))
        wide_root, one_word = Root.sorted(root, layout), root.shape[-1] > n
        nonterminals, preterminals = slice(0, n), slice(n, None)
        with matmul_precision(precision_name):
            weights = Weights.of(rules, layout, precision)
            kind = SquareChart if SquareChart.fits(layout, n, device) else Chart
            chart = kind(weights, emissions, layout, precision, limits)

            # root . beta~ of every sorted sentence; the one-word ones are the last and use e~ and the preterminal part
            top_rows = torch.from_numpy(layout.tops()).to(device)  # [B]
            longer = layout.alive[2] if layout.longest > 1 else 0
            top_sums = torch.zeros(len(layout.lengths), dtype=torch.float64, device=device)
            tops, single = slice(0, longer), slice(longer, None)
            top_sums[tops] = wide_root.products(chart.beta[top_rows[tops] - words], tops, nonterminals)
            if one_word and longer < len(top_sums):
                leaves, _ = leaf_values(emissions, chart.leaf_word[top_rows[single]], precision)
                top_sums[single] = wide_root.products(leaves, single, preterminals)
            derivatives = _derivatives(chart, wide_root, top_rows, top_sums)
        log_z = top_sums.log() + chart.scale[top_rows]

        # What can be believed. A row of an impossible word (all -inf) has child scales -inf.
        sentence = torch.from_numpy(layout.sentence_of_rows()).to(device)  # [rows]
        largest = torch.zeros_like(top_sums)  # [B] of |D|; a one-word sentence has only that of its leaf
        if one_word:
            most = wide_root.of(single, preterminals).amax(-1)
            largest[single] = most / top_sums[single]  # read only where top_sums > 0
        largest = largest.scatter_reduce_(0, sentence, derivatives.largest.double(), "amax")
        possible = torch.ones_like(top_sums, dtype=torch.bool)
        nothing = emissions.index_select(0, chart.leaf_word).amax(1) == float("-inf")  # [words]; NaN is not nothing
        possible[sentence[:words][nothing]] = False
        if not one_word:
            possible[single] = False
        in_range = torch.isfinite(top_sums) & (largest <= LARGEST_D_OF_TORCH[precision.compute])
        trusted = torch.where(top_sums > 0, in_range, ~possible)
        empty = chart.child_scale.isinf().any(1) & (trusted & possible)[sentence]
        if chart.allowed is not None:  # the others are meant to be empty
            empty &= chart.allowed
        if empty.any():  # only grammars with zeros come here
            trusted = trusted.index_fill(0, sentence[_lost_rows(chart, emissions)], False)
        log_z = torch.where(top_sums > 0, log_z, float("-inf")).to(precision.compute)

        believed = (trusted & (top_sums > 0))[sentence]  # [rows]
        posterior = torch.where(believed, derivatives.posterior, 0.0)
        posterior[:words] = believed[:words].to(posterior.dtype)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(
                root, left, right, emissions, chart.beta, derivatives.children, top_rows, top_sums, trusted
            )
            ctx.layout, ctx.precision, ctx.precision_name = layout, precision, precision_name
            ctx.gradient_types = [gradient_type(tensor) for tensor in (root, left, right, emissions)]
        results = layout.unsort(log_z), layout.unsort(trusted), posterior
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_log_z: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
        root, left, right, emissions, beta, d_children, top_rows, top_sums, trusted = ctx.saved_tensors
        layout, precision = ctx.layout, ctx.precision
        rules, words = Rules(root, left, right), layout.words
        n, compute = rules.nonterminals, precision.compute
        order = torch.tensor(layout.order, device=d_log_z.device)
        believed = trusted & (top_sums > 0)  # [B] sorted
        gradient = torch.where(believed, d_log_z[order].to(compute), 0.0)
        sentence = torch.from_numpy(layout.sentence_of_rows()).to(d_log_z.device)
        # D of an untrusted or impossible sentence may be inf or NaN: 0 x inf must not happen, so its rows are cleared.
        weighted = (d_children.to(compute) * gradient[sentence, None]).masked_fill_(~believed[sentence, None], 0.0)
        weighted = weighted.to(precision.storage)  # [rows, 2N]

        with matmul_precision(ctx.precision_name):
            weights = Weights.of(rules, layout, precision)
            leaf_word = torch.from_numpy(layout.leaf_word).to(d_log_z.device)
            leaves, _ = leaf_values(emissions, leaf_word, precision)
            d_both = weights.counts(weighted, leaves, beta)  # [2N, N+P]
            d_leaf_rows = weights.from_children(weighted[:words], 1)  # [words, P]

        per_sentence = torch.where(top_sums > 0, gradient / top_sums, 0.0)  # [B] fp64
        longer = layout.alive[2] if layout.longest > 1 else 0
        tops, single, nonterminals, preterminals = slice(0, longer), slice(longer, None), slice(0, n), slice(n, None)
        wide_root = Root.sorted(root, layout)
        d_root = Root(torch.zeros_like(wide_root.values))
        d_root.write_sums(per_sentence[tops], beta[top_rows[tops] - words], tops, nonterminals)
        one_word = top_rows[single]
        if root.shape[-1] > n and len(one_word):
            d_root.write_sums(per_sentence[single], leaves[one_word], single, preterminals)
            d_leaf_rows[one_word] += (per_sentence[single, None] * wide_root.of(single, preterminals)).to(compute)

        d_emissions = torch.empty_like(d_leaf_rows)
        d_emissions[leaf_word] = d_leaf_rows * leaves.to(compute)
        d_root_given = layout.unsort(d_root.values) if rules.per_sentence else d_root.values
        gradients = (d_root_given, d_both[..., :n, :], d_both[..., n:, :], d_emissions)
        return (*map(finite, gradients, ctx.gradient_types), None, None, None)
