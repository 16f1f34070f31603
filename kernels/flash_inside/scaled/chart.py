"""The chart of the inside algorithm in scaled linear space (passes.py has the equations), filled from width to width.

`Chart` looks up the parts of splits by the numbers of their rows; `SquareChart` keeps them side by side, on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flash_inside.brackets import allowed_rows
from flash_inside.packing import Layout, SplitRows, Squares
from flash_inside.precision import Format, product
from flash_inside.rules import AnyRules, FactoredRules

LARGEST_BLOCK = 1 << 22  # elements of a temporary [rows, splits, N] (measured on a CPU: larger ones leave the cache)
MOST_SPLITS_KEPT = 1 << 22  # of a chart, between its passes; the rows of the others are computed block by block
#: Numbers of eta~ and zeta~ in squares, at most (256 MiB in fp32): half of a square is empty.
LARGEST_SQUARES = 1 << 26
#: Up to so many nonterminals sums over splits are rounded as they always were, on every device: the runs of small
#: models can be repeated bit for bit. Above, a CPU sums in an order that it is faster in.
LARGEST_AS_EVER = 64
#: Up to LARGEST_AS_EVER nonterminals squares pay only for so few lengths, as batches of training have: their views are
#: small, and each length has its own.
FEW_LENGTHS = 2


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
    def of(cls, rules: AnyRules, layout: Layout, precision: Format) -> Weights:
        if isinstance(rules, FactoredRules):
            return FactoredWeights.of_factors(rules, layout, precision)
        both = torch.cat((rules.left, rules.right), dim=-2).to(precision.storage)  # [2N, N+P]
        if rules.per_sentence:
            both = layout.sort(both)
        n = rules.nonterminals
        children, leaves = both[..., :n].contiguous(), both[..., n:].contiguous()
        if n <= LARGEST_AS_EVER or both.device.type != "cpu":
            return cls(children, leaves, children.mT, leaves.mT, layout, precision.compute)
        # A product with a transposed matrix goes to another library on ARM, which takes 0.2 ms to begin.
        return cls(children, leaves, children.mT.contiguous(), leaves.mT.contiguous(), layout, precision.compute)

    #: D of any value that products make on their way is at most so many times the largest D of the chart.
    reach = 1

    @property
    def n(self) -> int:
        return self.children.shape[-2] // 2

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

    def counts(self, d_children: Tensor, leaves: Tensor, beta: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sum D^T row over all spans, or over those of each sentence: [2N, N+P], or [B, 2N, N+P] in caller's order.

        d_children: [rows, 2N]; leaves: [words, P]; beta: [rows - words, N]. Also returns the gradient of the inner
        factor, where there is one.
        """
        n, words, compute, layout = self.n, len(leaves), self.compute, self.layout
        if not self.per_sentence:
            d_leaves = product(d_children[:words].T, leaves, compute)  # [2N, P]
            d_weights = product(d_children[words:].T, beta, compute)  # [2N, N]: ONE product over all spans
            return torch.cat((d_weights, d_leaves), dim=1), None
        out = d_children.new_zeros(len(layout.lengths), 2 * n, n + leaves.shape[1], dtype=compute)
        for run in layout.runs(1):
            out[run.sentences, :, n:] = product(run.of(d_children[:words]).mT, run.of(leaves), compute)
        order, runs = layout.by_sentence()
        rows = torch.from_numpy(order).to(beta.device)
        d_spans, spans = d_children[rows], beta[rows - words]  # one sentence after another
        for run in runs:  # ONE product for all sentences of a length
            out[run.sentences, :, :n] = product(run.of(d_spans).mT, run.of(spans), compute)
        return layout.unsort(out), None


@dataclass
class FactoredWeights(Weights):
    """Those of `FactoredRules`: children are [2N, M] here, and the M middle values of a row are made on the way."""

    inner: Tensor  # [M, N]
    of_inner: Tensor  # [N, M]   the same transposed

    @classmethod
    def of_factors(cls, rules: FactoredRules, layout: Layout, precision: Format) -> FactoredWeights:
        both = torch.cat((rules.left, rules.right)).to(precision.storage)  # [2N, M+P]
        children, leaves = (part.contiguous() for part in both.tensor_split([len(rules.inner)], 1))
        inner = rules.inner.to(precision.storage).contiguous()
        of_children, of_leaves, of_inner = (matrix.T.contiguous() for matrix in (children, leaves, inner))
        return cls(children, leaves, of_children, of_leaves, layout, precision.compute, inner, of_inner)

    @property
    def reach(self) -> int:  # type: ignore[override]
        """D of a middle value is a sum of 2N entries of D times probabilities."""
        return 2 * self.n

    def possible(self) -> FactoredWeights:
        plain, inner = super().possible(), (self.inner > 0).to(self.compute)
        return FactoredWeights(**vars(plain), inner=inner, of_inner=inner.T)

    def to_children(self, rows: Tensor, width: int, block: slice | None = None) -> Tensor:
        return super().to_children(rows if width == 1 else self._middle(rows), width, block)

    def from_children(self, d_children: Tensor, width: int) -> Tensor:
        d_rows = super().from_children(d_children, width)
        return d_rows if width == 1 else product(d_rows.to(self.inner.dtype), self.inner, self.compute)

    def counts(self, d_children: Tensor, leaves: Tensor, beta: Tensor) -> tuple[Tensor, Tensor | None]:
        both, _ = super().counts(d_children, leaves, self._middle(beta))
        d_middle = super().from_children(d_children[len(leaves) :], 2).to(self.inner.dtype)  # [rows - words, M]
        return both, product(d_middle.T, beta, self.compute)

    def _middle(self, rows: Tensor) -> Tensor:
        """Values of the middle symbols: [R, N] -> [R, M]."""
        return product(rows, self.of_inner, self.compute).to(self.inner.dtype)


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
        self.n = weights.n
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
        """Whether a chart of squares is quicker and not too large, nor the temporaries of one sentence.

        With few symbols and many lengths, as in scoring, one table of row numbers for all lengths is quicker: by 30 %
        with 64 symbols, and the results are the same to the last digit.
        """
        largest = layout.longest**2 // 4 * nonterminals
        numbers = Squares.numbers(layout) * nonterminals
        quick = nonterminals > LARGEST_AS_EVER or len(layout.runs(1)) <= FEW_LENGTHS
        return device.type == "cpu" and quick and numbers <= LARGEST_SQUARES and largest <= LARGEST_BLOCK

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
