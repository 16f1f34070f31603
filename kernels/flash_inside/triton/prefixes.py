"""Prefix probabilities on a GPU: the chart and its derivatives by the Triton kernels, the chain of vectors in PyTorch.

Without gradients: they tell only which sentences can be trusted. Charts are fp32, and products TF32 for "tf32" and
"bf16": a prefix of one word is a short sentence, and short sentences do not bear bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_inside.packing import Layout
from flash_inside.precision import FORMATS, LARGEST_D_OF_TRITON, full_matmul_precision
from flash_inside.prefixes.chain import Chain, add_beginnings
from flash_inside.prefixes.ending import LeftCorners
from flash_inside.prefixes.scaled import Result
from flash_inside.rules import Rules
from flash_inside.triton.chart import Chart, ChartResults, Launchers, Precise, Tables, check_sentences, outside_blocks
from flash_inside.triton.outside_kernel import outside_kernel
from flash_inside.triton.weights import Weights


@torch.no_grad()
def prefix(
    rules: Rules, corners: LeftCorners, emissions: Tensor, lengths: list[int], precision: str, with_next: bool = False
) -> Result:
    """Return log probabilities in the caller's order; see `flash_inside.prefixes.scaled.prefix`."""
    check_sentences(len(lengths))
    layout = Layout(lengths)
    with torch.cuda.device_of(emissions), full_matmul_precision("tf32" if precision == "bf16" else precision):
        chart = _PrefixChart(rules, emissions, layout)
        found = Chain(chart, rules.root.double(), corners)
        trusted = found.trusted(emissions, LARGEST_D_OF_TRITON)
        log_next = found.in_callers_order(found.next_preterminals()) if with_next else corners.first.new_zeros(0, 0)
    log_prefix, log_sentence = map(found.in_callers_order, found.log_probabilities())
    return Result(log_prefix, log_sentence, layout.unsort(trusted), log_next)


class _PrefixChart:
    """The chart of the triton backend with what prefixes ask of it, see flash_inside/prefixes/chain.py."""

    def __init__(self, rules: Rules, emissions: Tensor, layout: Layout):
        self.layout, self.precision = layout, FORMATS["fp32"]
        self.n, device = rules.nonterminals, emissions.device
        precise = Precise.none(layout)
        self.tables = Tables.of(layout, precise, device)

        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        place = ChartResults.allocate(layout, self.n, emissions.shape[1], self.precision.storage, allocate)
        self.chart = chart = Chart.around(place, layout, precise, allocate)
        self.weights, self.root = Weights(rules.left, rules.right, self.precision.storage), rules.root.float()
        chart.inside(self.weights, self.root.contiguous(), emissions.float().contiguous(), layout, self.tables)
        self.leaf_word = self.tables.word_of_leaf
        self.leaves, self.beta, self.scale = chart.leaves, chart.beta, chart.scale
        self.eta_scale, self.leaf_scale = chart.scale, chart.scale[: layout.words]

    def eta(self, rows: Tensor) -> Tensor:
        return self.chart.children[:, : self.n][rows]

    def empty_rows(self) -> Tensor:
        return (self.chart.children.view(-1, 2, self.n).amax(2) <= 0).any(1)

    def derivatives(self, d_eta: Tensor, d_beginnings: Tensor) -> tuple[Tensor, Tensor]:
        """Do as chain.py says. The kernel adds the derivative of whole sentences itself, as of log Z: with factor 1."""
        chart, layout, n, words, longest = self.chart, self.layout, self.n, self.layout.words, self.layout.longest
        blocks = outside_blocks(n)
        outside = Launchers(outside_kernel, blocks.warps, BLOCK=blocks.columns, SPLITS=blocks.splits)
        root = self.root.contiguous()
        for width in range(longest - 1, 0, -1):
            here = layout.span_rows(width)
            outside(
                (blocks.count(n), longest - width + 1, layout.alive[width]),
                chart.children, chart.d_beta, chart.d_children, chart.scale, chart.largest, root, chart.top_sum,
                *self.tables.position, width, words, n, 0,
            )  # fmt: skip
            chart.d_children[here, :n] += d_eta[here]
            if width > 1:
                target = chart.d_beta[here.start - words : here.stop - words]
                self.weights.from_children(chart.d_children[here], target, width)
                add_beginnings(target, d_beginnings, width, layout)
        largest = chart.d_children.abs().amax(1)
        # Of beta~, and of beta before its division: there too something may be lost.
        of_spans = chart.d_beta.abs().amax(1)
        divisor = chart.row_largest[words : len(largest)]
        of_spans = torch.maximum(of_spans, of_spans / torch.where(divisor > 0, divisor, 1.0))
        largest[words:] = torch.maximum(largest[words:], of_spans)
        return chart.d_children, largest.nan_to_num(float("inf"), float("inf"))
