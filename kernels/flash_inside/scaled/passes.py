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

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flash_inside.packing import Layout
from flash_inside.precision import LARGEST_D_OF_TORCH, chart_format, finite, gradient_type, matmul_precision
from flash_inside.rules import AnyRules, FactoredRules, Rules
from flash_inside.scaled.chart import Chart, SquareChart, Weights, leaf_values


class Result(NamedTuple):
    log_z: Tensor  # [B] compute dtype, differentiable
    trusted: Tensor  # [B] bool: False = outside the range of the number format, recompute
    posterior: Tensor  # [rows] of the layout: posterior probability of every span


def inside(
    rules: AnyRules, emissions: Tensor, layout: Layout, precision: str, limits: np.ndarray | None = None
) -> Result:
    """Return log marginals in the caller's order. The gradient of a sentence that is not trusted is zero."""
    inner = rules.inner if isinstance(rules, FactoredRules) else None
    log_z, trusted, posterior = _ScaledInside.apply(*rules[:3], emissions, inner, layout, precision, limits)
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


def _rules(root: Tensor, left: Tensor, right: Tensor, inner: Tensor | None) -> AnyRules:
    return Rules(root, left, right) if inner is None else FactoredRules(root, left, right, inner)


class _ScaledInside(torch.autograd.Function):
    """(root, left, right, emissions, inner) -> log Z [B], trusted [B], posterior [rows]; the last two have no gradient.

    inner: of `FactoredRules`, or None
    """

    @staticmethod
    def forward(
        ctx: Any, root: Tensor, left: Tensor, right: Tensor, emissions: Tensor, inner: Tensor | None, layout: Layout,
        precision_name: str, limits: np.ndarray | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        rules, device = _rules(root, left, right, inner), emissions.device
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
        limit = LARGEST_D_OF_TORCH[precision.compute] / weights.reach
        in_range = torch.isfinite(top_sums) & (largest <= limit)
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
                root, left, right, inner, emissions, chart.beta, derivatives.children, top_rows, top_sums, trusted
            )
            ctx.layout, ctx.precision, ctx.precision_name = layout, precision, precision_name
            inputs = (root, left, right, emissions, inner)
            ctx.gradient_types = [None if tensor is None else gradient_type(tensor) for tensor in inputs]
        results = layout.unsort(log_z), layout.unsort(trusted), posterior
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_log_z: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
        root, left, right, inner, emissions, beta, d_children, top_rows, top_sums, trusted = ctx.saved_tensors
        layout, precision = ctx.layout, ctx.precision
        rules, words = _rules(root, left, right, inner), layout.words
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
            d_both, d_inner = weights.counts(weighted, leaves, beta)  # [2N, N+P], or [2N, M+P] and [M, N]
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
        found = (d_root_given, d_both[..., :n, :], d_both[..., n:, :], d_emissions, d_inner)
        types = zip(found, ctx.gradient_types, strict=True)
        return (*(None if gradient is None else finite(gradient, dtype) for gradient, dtype in types), None, None, None)
