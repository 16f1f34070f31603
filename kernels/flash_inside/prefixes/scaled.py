"""Prefix probabilities in scaled linear space on packed sentences: plain PyTorch, any device.

They need the chart of the inside algorithm (eta_ik = left beta_ik), and one vector a word. In P(w_0 .. w_k ...) the
constituents that are still open form a chain: one begins at word 0, the next where the right part of that one begins,
and the last at word k. With start, again, leaves and first of ending.py:

    a_0 = start,   h_k = sum_{i<k} a_i eta_ik,   a_k = h_k again       [N] each, k = 1, 2, ...
    P(w_0 ...) = first . e(w_0);   P(w_0 .. w_k ...) = h_k . (leaves e(w_k))

h_k does not depend on the word k: `leaves^T h_k` is the probability of every preterminal as the next one, together with
the words before. So all next-word distributions of a sentence come from one chart. Rows are held as in
flash_inside/scaled.py: values divided by their maximum, and a log scale in fp64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
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
from flash_inside.prefixes.ending import LeftCorners
from flash_inside.rules import Rules
from flash_inside.scaled import _Chart, _Weights, leaf_values


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


def divided(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each row by its maximum; return the rows and the maxima [..., 1] (1 for a row of zeros)."""
    largest = rows.amax(-1, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    return rows / largest, largest


class _Prefixes:
    """The vectors of all words. Sentences are sorted; leaf rows are those of the layout: prefix[b] + word."""

    def __init__(self, rules: Rules, corners: LeftCorners, emissions: Tensor, layout: Layout, precision: Format):
        self.layout, self.precision = layout, precision
        compute, storage, device = precision.compute, precision.storage, emissions.device
        self.weights = _Weights.of(rules, precision)
        self.chart = _Chart(self.weights, emissions, layout, precision)
        self.n = n = rules.nonterminals
        self.root_leaves = self.weights.root[n:]  # [P], or nothing
        self.first = corners.first
        self.again, self.leaf_matrix = corners.again.to(storage), corners.leaves.to(storage)
        self.leaves, self.leaf_scale = leaf_values(emissions, self.chart.leaf_word, precision)  # [words, P], [words]
        self.next_leaf, self.next_largest = divided(product(self.leaves, self.leaf_matrix.T, compute))  # [words, N]
        sentences, longest = len(layout.lengths), layout.longest
        #: a~ and h~ [B, longest, N] with what they were divided by and their log scales [B, longest]
        self.a = torch.zeros(sentences, longest, n, dtype=compute, device=device)
        self.h = torch.zeros_like(self.a)
        self.a_largest = torch.ones(sentences, longest, 1, dtype=compute, device=device)
        self.h_largest = torch.ones_like(self.a_largest)
        self.a_scale = torch.zeros(sentences, longest, dtype=torch.float64, device=device)
        self.h_scale = torch.full_like(self.a_scale, float("-inf"))
        start, start_largest = divided(corners.start)
        self.a[:, 0], self.a_largest[:, 0], self.a_scale[:, 0] = start.to(compute), 1.0, start_largest.log()
        self.start_largest = start_largest
        for k in range(1, longest):
            alive, _, eta, coefficient, largest = self.constituents(k)
            h, self.h_largest[:alive, k] = divided(torch.bmm(coefficient.unsqueeze(1), eta * self.a[:alive, :k])[:, 0])
            self.h[:alive, k] = h
            self.h_scale[:alive, k] = (largest + self.h_largest[:alive, k].double().log()).squeeze(1)
            a, self.a_largest[:alive, k] = divided(product(h.to(storage), self.again, compute))
            self.a[:alive, k] = a
            self.a_scale[:alive, k] = self.h_scale[:alive, k] + self.a_largest[:alive, k, 0].double().log()
        self._find_sums(emissions, rules)

    def constituents(self, k: int) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
        """Return what ends before word k, which `alive` sentences have: rows of spans (i, k), i < k, [alive, k]; their
        eta~ [alive, k, N]; coefficients of eta~ a~ [alive, k]; and the log of what these were divided by [alive, 1]."""
        layout = self.layout
        alive = layout.alive[k + 1]
        first, sentence = np.arange(k), np.arange(alive)[:, None]
        rows = layout.offset[k - first] + layout.prefix[:alive, None] - sentence * (k - first - 1) + first
        rows_there = torch.from_numpy(rows).to(self.a.device)
        log_scale = self.chart.child_scale[:, 0][rows_there] + self.a_scale[:alive, :k]
        largest = log_scale.amax(1, keepdim=True)
        largest = torch.where(largest == float("-inf"), 0.0, largest)
        coefficient = (log_scale - largest).exp().to(self.precision.compute)
        return alive, rows_there, self.chart.gather(rows_there, 0), coefficient, largest

    def _find_sums(self, emissions: Tensor, rules: Rules) -> None:
        """Find the sums of stored values that prefixes and sentences come to, by leaf row: [words] fp64."""
        layout, device, words, n = self.layout, emissions.device, self.layout.words, self.n
        sentence = np.repeat(np.arange(len(layout.lengths)), layout.lengths)
        place = np.arange(words) - layout.prefix[sentence]  # of the word in its sentence
        self.sentence, self.place = (torch.from_numpy(array).to(device) for array in (sentence, place))
        is_first = self.place == 0
        h = self.h[self.sentence, self.place]  # [words, N]
        later = (h.double() * self.next_leaf.double()).sum(1)
        self.prefix_sum = torch.where(is_first, self.leaves.double() @ self.first, later)
        scale = self.h_scale[self.sentence, self.place] + self.next_largest.squeeze(1).double().log() + self.leaf_scale
        self.prefix_scale = torch.where(is_first, self.leaf_scale, scale)
        # Row of the span that begins the sentence and ends with the word: beta~ of one word is e~.
        width = place + 1
        self.span = torch.from_numpy(layout.offset[width] + layout.prefix[sentence] - sentence * place).to(device)
        longer = ~is_first
        self.sentence_sum = torch.zeros_like(self.prefix_sum)
        self.sentence_sum[longer] = self.chart.beta[self.span[longer] - words].double() @ self.weights.root[:n]
        if len(self.root_leaves):
            self.sentence_sum[is_first] = self.leaves[is_first].double() @ self.root_leaves
        self.sentence_scale = self.chart.scale[self.span]

    def next_preterminals(self) -> Tensor:
        """Return log P(words before, preterminal of this word) of every word: [words, P], by leaf row."""
        h = self.h[self.sentence, self.place].to(self.precision.storage)
        values = product(h, self.leaf_matrix, self.precision.compute)
        values = torch.where((self.place == 0)[:, None], self.first.to(values.dtype), values)
        scale = torch.where(self.place == 0, 0.0, self.h_scale[self.sentence, self.place])
        return values.double().log() + scale[:, None]

    def derivatives(self, d_prefix: Tensor, d_sentence: Tensor) -> _Derivatives:
        """Compute D of sum(d_prefix log_prefix + d_sentence log_sentence), both [words] fp64 by leaf row."""
        chart, layout, compute, n = self.chart, self.layout, self.precision.compute, self.n
        per_prefix = torch.where(self.prefix_sum > 0, d_prefix / self.prefix_sum, 0.0)  # [words]
        per_sentence = torch.where(self.sentence_sum > 0, d_sentence / self.sentence_sum, 0.0)
        is_first = self.place == 0
        of_chain = torch.where(is_first, 0.0, per_prefix).to(compute)[:, None]
        d_next_leaf = self.h[self.sentence, self.place] * of_chain / self.next_largest  # [words, N]
        d_h = torch.zeros_like(self.h)
        d_h[self.sentence, self.place] = self.next_leaf * of_chain
        d_a = torch.zeros_like(self.a)
        totals = torch.zeros(layout.rows, 2, n, dtype=compute, device=self.a.device)
        largest = torch.zeros(layout.rows, dtype=compute, device=self.a.device)
        of_chain_largest = torch.zeros(len(layout.lengths), dtype=compute, device=self.a.device)
        for k in range(layout.longest - 1, 0, -1):
            alive, rows, eta, coefficient, _ = self.constituents(k)
            d_a[:alive, k] /= self.a_largest[:alive, k]
            d_h[:alive, k] += product(d_a[:alive, k].to(self.precision.storage), self.again.T, compute)
            d_h[:alive, k] /= self.h_largest[:alive, k]
            flow = coefficient.unsqueeze(2) * d_h[:alive, k].unsqueeze(1)  # [alive, k, N]
            d_a[:alive, :k] += flow * eta
            totals[:, 0].index_add_(0, rows.flatten(), (flow * self.a[:alive, :k]).flatten(0, 1))
            both = torch.maximum(d_h[:alive, k].abs().amax(1), d_a[:alive, k].abs().amax(1))
            of_chain_largest[:alive] = torch.maximum(of_chain_largest[:alive], both)

        for width in range(layout.longest, 0, -1):
            here = layout.span_rows(width)
            totals[here] /= chart.largest[here]
            largest[here] = totals[here].abs().flatten(1).amax(1)
            if width == 1:
                break
            d_beta = product(totals[here].to(self.precision.storage).flatten(1), self.weights.children, compute)
            tops = self.place == width - 1  # the words that end a span of this width from the beginning
            d_beta.index_add_(
                0, self.span[tops] - here.start, (per_sentence[tops, None] * self.weights.root[:n]).to(compute)
            )
            largest_here = d_beta.abs().amax(1)
            largest_here = torch.maximum(largest_here, largest_here / chart.divisor[here])
            largest[here] = torch.maximum(largest[here], largest_here)
            for block, left, right, log_scale in chart.splits(width):
                coefficient = (log_scale - chart.scale[block, None]).exp().to(compute)
                flow = coefficient.unsqueeze(2) * d_beta[block.start - here.start : block.stop - here.start, None]
                totals[:, 0].index_add_(0, left.flatten(), (chart.gather(right, 1) * flow).flatten(0, 1))
                totals[:, 1].index_add_(0, right.flatten(), (chart.gather(left, 0) * flow).flatten(0, 1))
        of_sentences = of_chain_largest.double()
        rows_sentence = torch.from_numpy(layout.sentence_of_rows()).to(self.a.device)
        of_sentences.scatter_reduce_(0, rows_sentence, largest.double(), "amax")
        of_sentences.scatter_reduce_(0, self.sentence, d_next_leaf.abs().amax(1).double(), "amax")
        return _Derivatives(totals.flatten(1), d_h, d_a, d_next_leaf, per_prefix, per_sentence, of_sentences)

    def trusted(self, emissions: Tensor) -> Tensor:
        """Return which sentences can be believed: bool [B] sorted.

        Zeros that are not plainly right (a word that no preterminal emits, one word under a root over nonterminals)
        count as lost, so a grammar with many structural zeros is computed again in log space.
        """
        ones = torch.ones_like(self.prefix_sum)
        largest = self.derivatives(ones, ones).largest
        impossible = (emissions.index_select(0, self.chart.leaf_word).amax(1) == float("-inf")).double()
        before = impossible.cumsum(0)
        starts = torch.from_numpy(self.layout.prefix).to(before.device)[self.sentence]
        impossible = before - before[starts] + impossible[starts] > 0  # this word, or one before it
        no_sentence = impossible if len(self.root_leaves) else impossible | (self.place == 0)
        good = torch.where(impossible, self.prefix_sum == 0, self.prefix_sum > 0) & self.prefix_sum.isfinite()
        good &= torch.where(no_sentence, self.sentence_sum == 0, self.sentence_sum > 0) & self.sentence_sum.isfinite()
        rows_sentence = torch.from_numpy(self.layout.sentence_of_rows()).to(before.device)
        any_impossible = torch.zeros_like(largest).scatter_reduce_(0, self.sentence, impossible.double(), "amax") > 0
        empty = self.chart.child_scale.isinf().any(1) & ~any_impossible[rows_sentence]
        trusted = largest <= LARGEST_D_OF_TORCH[self.precision.compute]
        trusted = trusted.index_fill(0, self.sentence[~good], False)
        return trusted.index_fill(0, rows_sentence[empty], False)


class _Derivatives(NamedTuple):
    """D by stored values, and what sums of a word's prefix and sentence are multiplied by."""

    children: Tensor  # [rows, 2N]
    h: Tensor  # [B, longest, N]
    a: Tensor  # [B, longest, N]
    next_leaf: Tensor  # [words, N]
    per_prefix: Tensor  # [words] fp64
    per_sentence: Tensor  # [words] fp64
    largest: Tensor  # [B] fp64: the largest |D| of a sentence


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
            found = _Prefixes(Rules(root, left, right), corners, emissions, layout, precision)
            trusted = found.trusted(emissions)
            log_next = found.next_preterminals() if with_next else first.new_zeros(0, 0)
        log_prefix = found.prefix_sum.log() + found.prefix_scale
        log_sentence = found.sentence_sum.log() + found.sentence_scale
        log_sentence = torch.where(found.sentence_sum > 0, log_sentence, float("-inf"))
        log_prefix = torch.where(found.prefix_sum > 0, log_prefix, float("-inf"))
        back = torch.empty_like(found.chart.leaf_word)
        back[found.chart.leaf_word] = torch.arange(layout.words, device=back.device)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(emissions)
            ctx.found, ctx.trusted, ctx.precision_name = found, trusted, precision_name
            ctx.gradient_types = [gradient_type(tensor) for tensor in inputs]
        results = [tensor[back].to(precision.compute) for tensor in (log_prefix, log_sentence)]
        log_next = log_next[back].to(precision.compute) if with_next else log_next
        ctx.mark_non_differentiable(trusted, log_next)
        return results[0], results[1], layout.unsort(trusted), log_next

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_prefix: Tensor, d_sentence: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
        found: _Prefixes = ctx.found
        chart, layout, compute, n = found.chart, found.layout, found.precision.compute, found.n
        words, storage = layout.words, found.precision.storage
        believed = ctx.trusted[found.sentence]  # [words]
        d_prefix, d_sentence = (
            torch.where(believed, tensor[chart.leaf_word].double(), 0.0) for tensor in (d_prefix, d_sentence)
        )
        with matmul_precision(ctx.precision_name):
            d = found.derivatives(d_prefix, d_sentence)
            children = d.children.nan_to_num_(0.0, 0.0, 0.0).to(storage)
            d_leaf_weights = product(children[:words].T, found.leaves, compute)  # [2N, P]
            d_weights = product(children[words:].T, chart.beta, compute)  # [2N, N]
            d_leaf_rows = product(children[:words], found.weights.leaves, compute)  # [words, P]
            next_leaf = d.next_leaf.to(storage)
            d_leaf_rows += product(next_leaf, found.leaf_matrix, compute)
            d_leaves = product(next_leaf.T, found.leaves, compute)  # [N, P]
            d_a = d.a[:, 1:].reshape(-1, n).to(storage)
            d_again = product(found.h[:, 1:].reshape(-1, n).to(storage).T, d_a, compute)  # [N, N]
        is_first = found.place == 0
        d_start = d.a[:, 0].double().sum(0) / found.start_largest
        d_first = d.per_prefix[is_first] @ found.leaves[is_first].double()
        d_leaf_rows[is_first] += (d.per_prefix[is_first, None] * found.first).to(compute)
        d_root = torch.zeros_like(found.weights.root)
        d_root[:n] = d.per_sentence[~is_first] @ chart.beta[found.span[~is_first] - words].double()
        if len(found.root_leaves):
            d_root[n:] = d.per_sentence[is_first] @ found.leaves[is_first].double()
            d_leaf_rows[is_first] += (d.per_sentence[is_first, None] * found.root_leaves).to(compute)
        d_emissions = torch.empty_like(d_leaf_rows)
        d_emissions[chart.leaf_word] = d_leaf_rows * found.leaves.to(compute)
        d_both = torch.cat((d_weights, d_leaf_weights), dim=1)
        gradients = (d_root, d_both[:n], d_both[n:], d_start, d_first, d_again, d_leaves, d_emissions)
        return (*map(finite, gradients, ctx.gradient_types), None, None, None)
