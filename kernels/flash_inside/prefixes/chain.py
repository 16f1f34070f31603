"""Prefix probabilities on top of a chart of the inside algorithm: one vector a word.

They need eta_ik = left beta_ik of all spans. In P(w_0 .. w_k ...) the
constituents that are still open form a chain: one begins at word 0, the next where the right part of that one begins,
and the last at word k. With start, again, leaves and first of ending.py:

    a_0 = start,   h_k = sum_{i<k} a_i eta_ik,   a_k = h_k again       [N] each, k = 1, 2, ...
    P(w_0 ...) = first . e(w_0);   P(w_0 .. w_k ...) = h_k . (leaves e(w_k))

h_k does not depend on the word k: `leaves^T h_k` is the probability of every preterminal as the next one, together with
the words before. So all next-word distributions of a sentence come from one chart. Rows are held as in
flash_inside/scaled/: values divided by their maximum, and a log scale in fp64.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from flash_inside.packing import Layout
from flash_inside.precision import Format, product
from flash_inside.prefixes.ending import LeftCorners


class Chart(Protocol):
    """What prefixes need of the inside algorithm, whichever backend has computed it. Rows are those of the layout."""

    layout: Layout
    precision: Format
    leaf_word: Tensor  # [words] of the caller's packing at each leaf row
    leaves: Tensor  # [words, P] storage type: e~
    leaf_scale: Tensor  # [words] fp64: log scale of e~
    beta: Tensor  # [rows - words, N] storage type: beta~
    scale: Tensor  # [rows] fp64: log scale of beta~
    eta_scale: Tensor  # [rows below the longest width] or more, fp64: log scale of eta~

    def eta(self, rows: Tensor) -> Tensor:
        """Return eta~ of a table of rows: [r, k] -> [r, k, N] in the compute type."""

    def empty_rows(self) -> Tensor:
        """Return which rows have no eta or no zeta above 0: bool [rows below the longest width] or more."""

    def derivatives(self, d_eta: Tensor, d_beginnings: Tensor) -> tuple[Tensor, Tensor]:
        """Take derivatives down the chart; return those of eta~ | zeta~ [rows, 2N], and the largest |D| of rows [rows].

        d_eta: [rows, N] by eta~
        d_beginnings: [words, N], for each leaf row by beta~ of what its sentence begins with, up to this word
        """


def divided(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each row by its maximum; return the rows and the maxima [..., 1] (1 for a row of zeros)."""
    largest = rows.amax(-1, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    return rows / largest, largest


class Derivatives(NamedTuple):
    """D by stored values, and what the sums of a word's prefix and sentence are multiplied by."""

    children: Tensor  # [rows, 2N]
    a: Tensor  # [B, longest, N]
    next_leaf: Tensor  # [words, N]
    per_prefix: Tensor  # [words] fp64
    per_sentence: Tensor  # [words] fp64
    largest: Tensor  # [B] fp64: the largest |D| of a sentence


class Chain:
    """The vectors of all words. Sentences are sorted; leaf rows are those of the layout: prefix[b] + word."""

    def __init__(self, chart: Chart, root: Tensor, corners: LeftCorners):
        """root: [N] or [N+P] fp64"""
        self.chart, self.layout, self.precision = chart, chart.layout, chart.precision
        layout, compute, storage, device = chart.layout, self.precision.compute, self.precision.storage, root.device
        self.n = n = chart.beta.shape[1]
        self.root, self.root_leaves = root[:n], root[n:]  # [N]; [P], or nothing
        self.first = corners.first
        self.again, self.leaf_matrix = corners.again.to(storage), corners.leaves.to(storage)
        self.next_leaf, self.next_largest = divided(product(chart.leaves, self.leaf_matrix.T, compute))  # [words, N]
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
        self._find_sums()

    def constituents(self, k: int) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
        """Return what ends before word k, which `alive` sentences have: rows of spans (i, k), i < k, [alive, k]; their
        eta~ [alive, k, N]; coefficients of eta~ a~ [alive, k]; and the log of what these were divided by [alive, 1]."""
        layout = self.layout
        alive = layout.alive[k + 1]
        first, sentence = np.arange(k), np.arange(alive)[:, None]
        rows = layout.offset[k - first] + layout.prefix[:alive, None] - sentence * (k - first - 1) + first
        rows_there = torch.from_numpy(rows).to(self.a.device)
        log_scale = self.chart.eta_scale[rows_there] + self.a_scale[:alive, :k]
        largest = log_scale.amax(1, keepdim=True)
        largest = torch.where(largest == float("-inf"), 0.0, largest)
        coefficient = (log_scale - largest).exp().to(self.precision.compute)
        return alive, rows_there, self.chart.eta(rows_there), coefficient, largest

    def _find_sums(self) -> None:
        """Find the sums of stored values that prefixes and sentences come to, by leaf row: [words] fp64."""
        chart, layout, device, words = self.chart, self.layout, self.root.device, self.layout.words
        sentence = np.repeat(np.arange(len(layout.lengths)), layout.lengths)
        place = np.arange(words) - layout.prefix[sentence]  # of the word in its sentence
        self.sentence, self.place = (torch.from_numpy(array).to(device) for array in (sentence, place))
        is_first = self.place == 0
        h = self.h[self.sentence, self.place]  # [words, N]
        later = (h.double() * self.next_leaf.double()).sum(1)
        self.prefix_sum = torch.where(is_first, chart.leaves.double() @ self.first, later)
        scale = self.h_scale[self.sentence, self.place] + self.next_largest.squeeze(1).double().log() + chart.leaf_scale
        self.prefix_scale = torch.where(is_first, chart.leaf_scale, scale)
        # Row of the span that begins the sentence and ends with the word: beta~ of one word is e~.
        width = place + 1
        self.span = torch.from_numpy(layout.offset[width] + layout.prefix[sentence] - sentence * place).to(device)
        longer = ~is_first
        self.sentence_sum = torch.zeros_like(self.prefix_sum)
        self.sentence_sum[longer] = chart.beta[self.span[longer] - words].double() @ self.root
        if len(self.root_leaves):
            self.sentence_sum[is_first] = chart.leaves[is_first].double() @ self.root_leaves
        self.sentence_scale = chart.scale[self.span]

    def next_preterminals(self) -> Tensor:
        """Return log P(words before, preterminal of this word) of every word: [words, P], by leaf row."""
        h = self.h[self.sentence, self.place].to(self.precision.storage)
        values = product(h, self.leaf_matrix, self.precision.compute)
        values = torch.where((self.place == 0)[:, None], self.first.to(values.dtype), values)
        scale = torch.where(self.place == 0, 0.0, self.h_scale[self.sentence, self.place])
        return values.double().log() + scale[:, None]

    def derivatives(self, d_prefix: Tensor, d_sentence: Tensor) -> Derivatives:
        """Compute D of sum(d_prefix log_prefix + d_sentence log_sentence), both [words] fp64 by leaf row."""
        layout, compute, n, device = self.layout, self.precision.compute, self.n, self.root.device
        per_prefix = torch.where(self.prefix_sum > 0, d_prefix / self.prefix_sum, 0.0)  # [words]
        per_sentence = torch.where(self.sentence_sum > 0, d_sentence / self.sentence_sum, 0.0)
        of_chain = torch.where(self.place == 0, 0.0, per_prefix).to(compute)[:, None]
        d_next_leaf = self.h[self.sentence, self.place] * of_chain / self.next_largest  # [words, N]
        d_h = torch.zeros_like(self.h)
        d_h[self.sentence, self.place] = self.next_leaf * of_chain
        d_a = torch.zeros_like(self.a)
        d_eta = torch.zeros(layout.rows, n, dtype=compute, device=device)
        largest = torch.zeros(len(layout.lengths), dtype=torch.float64, device=device)
        for k in range(layout.longest - 1, 0, -1):
            alive, rows, eta, coefficient, _ = self.constituents(k)
            d_a[:alive, k] /= self.a_largest[:alive, k]
            d_h[:alive, k] += product(d_a[:alive, k].to(self.precision.storage), self.again.T, compute)
            d_h[:alive, k] /= self.h_largest[:alive, k]
            flow = coefficient.unsqueeze(2) * d_h[:alive, k].unsqueeze(1)  # [alive, k, N]
            d_a[:alive, :k] += flow * eta
            d_eta[rows.flatten()] = (flow * self.a[:alive, :k]).flatten(0, 1)  # a span ends before one word only
            both = torch.maximum(d_h[:alive, k].abs().amax(1), d_a[:alive, k].abs().amax(1))
            largest[:alive] = torch.maximum(largest[:alive], both.double())
        d_beginnings = (per_sentence[:, None] * self.root).to(compute)
        children, of_rows = self.chart.derivatives(d_eta, d_beginnings)
        rows_sentence = torch.from_numpy(layout.sentence_of_rows()).to(device)
        largest.scatter_reduce_(0, rows_sentence[: len(of_rows)], of_rows.double(), "amax")
        largest.scatter_reduce_(0, self.sentence, d_next_leaf.abs().amax(1).double(), "amax")
        return Derivatives(children, d_a, d_next_leaf, per_prefix, per_sentence, largest)

    def trusted(self, emissions: Tensor, largest_trusted: float) -> Tensor:
        """Return which sentences can be believed: bool [B] sorted. largest_trusted: of |D|.

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
        empty = self.chart.empty_rows()
        empty = empty & ~any_impossible[rows_sentence[: len(empty)]]
        trusted = (largest <= largest_trusted).index_fill(0, self.sentence[~good], False)
        return trusted.index_fill(0, rows_sentence[: len(empty)][empty], False)

    def log_probabilities(self) -> tuple[Tensor, Tensor]:
        """Return log P of prefixes, and of these as sentences, by leaf row: [words] fp64."""
        pairs = (self.prefix_sum, self.prefix_scale), (self.sentence_sum, self.sentence_scale)
        log_prefix, log_sentence = (torch.where(sums > 0, sums.log() + scale, float("-inf")) for sums, scale in pairs)
        return log_prefix, log_sentence

    def in_callers_order(self, rows: Tensor) -> Tensor:
        """Bring values of leaf rows into the caller's order, in the compute type."""
        back = torch.empty_like(self.chart.leaf_word)
        back[self.chart.leaf_word] = torch.arange(self.layout.words, device=back.device)
        return rows[back].to(self.precision.compute)


def add_beginnings(target: Tensor, d_beginnings: Tensor, width: int, layout: Layout) -> None:
    """Add to the derivatives of the rows of a width [R, N] those of its rows that begin a sentence."""
    rows = torch.from_numpy(layout.beginnings(width) - layout.offset[width]).to(target.device)
    words = torch.from_numpy(layout.prefix[: len(rows)] + width - 1).to(target.device)
    target.index_add_(0, rows, d_beginnings[words].to(target.dtype))
