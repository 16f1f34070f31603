"""Prefix probabilities in scaled linear space on packed sentences: plain PyTorch, any device, differentiable.

The chart is that of flash_inside/scaled/chart.py, the chain of vectors that of chain.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_inside.packing import Layout
from flash_inside.precision import (
    LARGEST_D_OF_TORCH,
    Format,
    chart_format,
    finite,
    gradient_type,
    matmul_precision,
    product,
)
from flash_inside.prefixes.chain import Chain, add_beginnings
from flash_inside.prefixes.ending import LeftCorners
from flash_inside.rules import Rules
from flash_inside.scaled import Chart, Weights, leaf_values


class Result(NamedTuple):
    log_prefix: Tensor  # [words] log P of every prefix, differentiable
    log_sentence: Tensor  # [words] log P of every prefix as a whole sentence, differentiable
    trusted: Tensor  # [B] bool: False = outside the range of the number format, recompute
    log_next: Tensor  # [words, P] log P of the words before each word and of the preterminal that it has; or empty


def prefix(
    rules: Rules, corners: LeftCorners, emissions: Tensor, lengths: list[int], precision: str, with_next: bool = False
) -> Result:
    """Return log probabilities in the caller's order. A sentence that is not trusted has no gradient."""
    return Result(*_ScaledPrefix.apply(*rules, *corners.tensors, emissions, Layout(lengths), precision, with_next))


class _PrefixChart(Chart):
    """The chart with what prefixes ask of it, see chain.py."""

    def __init__(self, rules: Rules, emissions: Tensor, layout: Layout, precision: Format):
        super().__init__(Weights.of(rules, layout, precision), emissions, layout, precision)
        self.leaves, self.leaf_scale = leaf_values(emissions, self.leaf_word, precision)
        self.eta_scale = self.child_scale[:, 0]

    def eta(self, rows: Tensor) -> Tensor:
        return self.gather(rows, 0)

    def empty_rows(self) -> Tensor:
        return self.child_scale.isinf().any(1)

    def derivatives(self, d_eta: Tensor, d_beginnings: Tensor) -> tuple[Tensor, Tensor]:
        layout, compute = self.layout, self.precision.compute
        totals = torch.stack((d_eta, torch.zeros_like(d_eta)), dim=1)  # [rows, 2, N]
        largest = torch.zeros(layout.rows, dtype=compute, device=d_eta.device)
        for width in range(layout.longest, 0, -1):
            here = layout.span_rows(width)
            totals[here] /= self.largest[here]
            largest[here] = totals[here].abs().flatten(1).amax(1)
            if width == 1:
                break
            d_beta = self.weights.from_children(totals[here].to(self.precision.storage).flatten(1), width)
            add_beginnings(d_beta, d_beginnings, width, layout)
            largest_here = d_beta.abs().amax(1)
            largest_here = torch.maximum(largest_here, largest_here / self.divisor[here])
            largest[here] = torch.maximum(largest[here], largest_here)
            self.add_to_parts(width, d_beta, totals)
        return totals.flatten(1), largest


class _ScaledPrefix(torch.autograd.Function):
    """(root, left, right, start, first, again, leaves, emissions) -> the fields of `Result`."""

    @staticmethod
    def forward(
        ctx: Any, root: Tensor, left: Tensor, right: Tensor, start: Tensor, first: Tensor, again: Tensor,
        leaves: Tensor, emissions: Tensor, layout: Layout, precision_name: str, with_next: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        # A prefix of one word is a short sentence, whatever the whole has: see `chart_format`.
        precision = chart_format(precision_name, left.shape[0], shortest=1)
        inputs = (root, left, right, start, first, again, leaves, emissions)
        corners = LeftCorners(start, start, first, again, leaves)
        with matmul_precision(precision_name):
            chart = _PrefixChart(Rules(root, left, right), emissions, layout, precision)
            found = Chain(chart, root.double(), corners)
            trusted = found.trusted(emissions, LARGEST_D_OF_TORCH[precision.compute])
            log_next = found.in_callers_order(found.next_preterminals()) if with_next else first.new_zeros(0, 0)
        log_prefix, log_sentence = map(found.in_callers_order, found.log_probabilities())
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(emissions)
            ctx.found, ctx.chart, ctx.trusted, ctx.precision_name = found, chart, trusted, precision_name
            ctx.gradient_types = [gradient_type(tensor) for tensor in inputs]
        ctx.mark_non_differentiable(trusted, log_next)
        return log_prefix, log_sentence, layout.unsort(trusted), log_next

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_prefix: Tensor, d_sentence: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
        found: Chain = ctx.found
        chart: _PrefixChart = ctx.chart
        layout, compute, n = found.layout, found.precision.compute, found.n
        words, storage = layout.words, found.precision.storage
        believed = ctx.trusted[found.sentence]  # [words]
        d_prefix, d_sentence = (
            torch.where(believed, tensor[chart.leaf_word].double(), 0.0) for tensor in (d_prefix, d_sentence)
        )
        with matmul_precision(ctx.precision_name):
            d = found.derivatives(d_prefix, d_sentence)
            children = d.children.nan_to_num_(0.0, 0.0, 0.0).to(storage)
            d_leaf_weights = product(children[:words].T, chart.leaves, compute)  # [2N, P]
            d_weights = product(children[words:].T, chart.beta, compute)  # [2N, N]
            d_leaf_rows = product(children[:words], chart.weights.leaves, compute)  # [words, P]
            next_leaf = d.next_leaf.to(storage)
            d_leaf_rows += product(next_leaf, found.leaf_matrix, compute)
            d_leaves = product(next_leaf.T, chart.leaves, compute)  # [N, P]
            d_a = d.a[:, 1:].reshape(-1, n).to(storage)
            d_again = product(found.h[:, 1:].reshape(-1, n).to(storage).T, d_a, compute)  # [N, N]
        is_first = found.place == 0
        d_start = d.a[:, 0].double().sum(0) / found.start_largest
        d_first = d.per_prefix[is_first] @ chart.leaves[is_first].double()
        d_leaf_rows[is_first] += (d.per_prefix[is_first, None] * found.first).to(compute)
        d_root = torch.zeros(n + len(found.root_leaves), dtype=torch.float64, device=d_prefix.device)
        d_root[:n] = d.per_sentence[~is_first] @ chart.beta[found.span[~is_first] - words].double()
        if len(found.root_leaves):
            d_root[n:] = d.per_sentence[is_first] @ chart.leaves[is_first].double()
            d_leaf_rows[is_first] += (d.per_sentence[is_first, None] * found.root_leaves).to(compute)
        d_emissions = torch.empty_like(d_leaf_rows)
        d_emissions[chart.leaf_word] = d_leaf_rows * chart.leaves.to(compute)
        d_both = torch.cat((d_weights, d_leaf_weights), dim=1)
        gradients = (d_root, d_both[:n], d_both[n:], d_start, d_first, d_again, d_leaves, d_emissions)
        return (*map(finite, gradients, ctx.gradient_types), None, None, None)
