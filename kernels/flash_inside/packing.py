"""Where the chart row of a span lives when sentences of any lengths are packed without padding.

Sentences are sorted by decreasing length, so that those alive at width w (length >= w) are a prefix. The rows of one
width are consecutive, which makes the product with the rules ONE matrix product per width over all sentences:

    row(w, b, i) = offset[w] + prefix[b] - b (w - 1) + i          b: sorted sentence, i: first word of the span

with prefix[b] the words of the earlier sentences, offset[1] = 0, offset[w+1] = offset[w] + rows of width w.

Where each sentence has rules of its own, sentences of one length are consecutive and have equally many rows of a width:
these rows are a view [sentences, spans, symbols], and the product is one batched product for each length (a `Run`).

A hidden Markov model has a row for every word, not for every span: `Steps`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flash_inside.devices import copy_to_device

#: Steps of the last batches of up to so many words are kept, for passes over sentences of the same lengths.
MOST_WORDS_KEPT, TABLES_KEPT = 1 << 16, 16


class Run(NamedTuple):
    """Consecutive sorted sentences that have equally many rows each, one sentence's after another's."""

    sentences: slice
    rows: slice
    each: int  # rows of a sentence

    def of(self, rows: Tensor) -> Tensor:
        """View these rows of a tensor [R, ...] as [sentences, each, ...]."""
        return rows[self.rows].unflatten(0, (-1, self.each))


def runs(counts: np.ndarray) -> list[Run]:
    """Return the runs of rows, given how many of them each sentence has; those without any are left out."""
    ends = np.cumsum(counts)
    bounds = [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(counts)]
    return [
        Run(slice(first, last), slice(int(ends[first] - counts[first]), int(ends[last - 1])), int(counts[first]))
        for first, last in itertools.pairwise(bounds)
        if last > first and counts[first]
    ]


class Padding(NamedTuple):
    """Rows of some runs as one batch: each sentence has as many as the one with most, its first one repeated."""

    sentences: slice
    each: int
    there: np.ndarray  # [sentences x each] which row it is
    back: np.ndarray  # [rows] where it went

    @classmethod
    def of(cls, runs: list[Run]) -> Padding:
        counts = np.concatenate([np.full(run.sentences.stop - run.sentences.start, run.each) for run in runs])
        first, position = np.cumsum(counts) - counts, np.arange(counts.max())[None, :]
        real = position < counts[:, None]  # [sentences, each]
        there = first[:, None] + np.where(real, position, 0)
        sentences = slice(runs[0].sentences.start, runs[-1].sentences.stop)
        return cls(sentences, position.size, there.ravel(), np.flatnonzero(real))


class Layout:
    """Numbers the rows of the packed chart of some sentences. All index arrays are int64."""

    def __init__(self, lengths: Sequence[int]):
        given = np.asarray(lengths, dtype=np.int64)
        order = np.argsort(-given, kind="stable")
        self.order: list[int] = order.tolist()
        self.lengths = given[order]  # [B], decreasing
        ends = np.cumsum(self.lengths)
        self.prefix = ends - self.lengths  # [B]
        self.words = int(ends[-1])
        self.longest = int(self.lengths[0])
        widths = np.arange(1, self.longest + 1)
        alive = np.searchsorted(-self.lengths, -widths, side="right")  # sentences with length >= width
        #: alive[w] sentences have a span of width w; index 0 is unused
        self.alive: list[int] = [0, *alive.tolist()]
        rows = ends[alive - 1] - alive * (widths - 1)  # spans of each width
        #: offset[w] is the first row of width w; offset[longest + 1] the number of rows
        self.offset = np.concatenate(([0, 0], np.cumsum(rows)))
        self.rows = int(self.offset[-1])
        # The word of the caller's packing at each leaf row: [words]
        first_word = (np.cumsum(given) - given)[order]
        self.leaf_word = np.arange(self.words) + np.repeat(first_word - self.prefix, self.lengths)

    def span_rows(self, width: int) -> slice:
        return slice(int(self.offset[width]), int(self.offset[width + 1]))

    def spans(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sorted sentence b and first word i of every span of this width, in row order: two arrays [R]."""
        counts = self.lengths[: self.alive[width]] - width + 1
        sentence = np.repeat(np.arange(len(counts)), counts)
        position = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return sentence, position

    def runs(self, width: int, block: slice | None = None) -> list[Run]:
        """Return the runs of the spans of a width, or of a block of them. block: rows of the chart; runs begin there.

        All sentences of one length are one run, unless a block ends within one of them.
        """
        counts = self.lengths[: self.alive[width]] - width + 1
        if block is not None:
            ends = self.offset[width] + np.cumsum(counts)
            counts = (np.minimum(ends, block.stop) - np.maximum(ends - counts, block.start)).clip(min=0)
        return runs(counts)

    def by_sentence(self) -> tuple[np.ndarray, list[Run]]:
        """Return the rows of the widths from 2 on, one sentence's after another's, and their runs.

        Those of whole sentences are left out: they are nobody's children.
        """
        sentence = self.sentence_of_rows()
        sentence[: self.words], sentence[self.tops()] = -1, -1
        order = np.argsort(sentence, kind="stable")
        counts = (self.lengths * (self.lengths - 1) // 2 - 1).clip(min=0)
        return order[len(order) - counts.sum() :], runs(counts)

    @property
    def sorted(self) -> bool:
        """Whether the caller's sentences came in this order."""
        return self.order == list(range(len(self.order)))

    def sort(self, values: Tensor) -> Tensor:
        """Bring values of the caller's sentences into the order of the layout; no copy where it is the same."""
        return values if self.sorted else values[torch.tensor(self.order, device=values.device)]

    def splits(self, width: int, block: slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the left and right parts of all splits of spans of a width: two arrays [R, width - 1].

        block: of which spans, in row order; by default all. For one width no row occurs twice in either array (a left
        part fixes its width, sentence and first word, a right part its width, sentence and last word), so adding at
        these rows has no conflicts.
        """
        sentence, position = (array[block, None] for array in self.spans(width))
        start = self.prefix[sentence] + position  # [R, 1]
        left_width = np.arange(1, width)[None, :]  # [1, width - 1]
        right_width = width - left_width
        left = self.offset[left_width] + start - sentence * (left_width - 1)
        right = self.offset[right_width] + start + left_width - sentence * (right_width - 1)
        return left, right

    def sentence_of_rows(self) -> np.ndarray:
        """Return the sorted sentence of every row of the chart: [rows]."""
        return np.concatenate([self.spans(width)[0] for width in range(1, self.longest + 1)])

    def tops(self) -> np.ndarray:
        """Return the row of the whole sentence for every sorted sentence: [B]."""
        sentence = np.arange(len(self.lengths))
        return self.offset[self.lengths] + self.prefix - sentence * (self.lengths - 1)

    def beginnings(self, width: int) -> np.ndarray:
        """Return the row of the first `width` words of every sorted sentence that has so many: [alive]."""
        sentence = np.arange(self.alive[width])
        return self.offset[width] + self.prefix[: len(sentence)] - sentence * (width - 1)

    def unsort(self, values: Tensor) -> Tensor:
        """Bring values of sorted sentences into the caller's order, along the first dimension."""
        inverse = torch.empty(len(self.order), dtype=torch.int64)
        inverse[torch.tensor(self.order)] = torch.arange(len(self.order))
        return values[inverse.to(values.device)]

    def square_tables(self, row_values: Tensor) -> list[Tensor]:
        """Turn one value a row into a table [l+1, l+1] a sentence, in the caller's order; entry (i, j) is span i..j."""
        tables = [row_values.new_zeros(int(length) + 1, int(length) + 1) for length in self.lengths]
        for width in range(1, self.longest + 1):
            values = row_values[self.span_rows(width)]
            counts = (self.lengths[: self.alive[width]] - width + 1).tolist()
            for table, part in zip(tables, values.split(counts), strict=False):  # tables of dead sentences are left out
                table.diagonal(width).copy_(part)
        result: list[Tensor] = [row_values] * len(tables)
        for table, sentence in zip(tables, self.order, strict=True):
            result[sentence] = table
        return result


class SplitRows:
    """The rows of the parts of splits on a device, for a block of spans at a time.

    Those of the first widths are kept for the next pass over the chart: up to `most_kept` splits.
    """

    def __init__(self, layout: Layout, device: torch.device, most_kept: int):
        self.layout, self.device, self.most_kept = layout, device, most_kept
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._count = 0

    def blocks(self, width: int, step: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield blocks of `step` spans of a width: their rows; rows of left parts and of right parts, each [r, k]."""
        here = self.layout.span_rows(width)
        spans = here.stop - here.start
        kept = self._kept.get(width)
        if kept is None and self._count + spans * (width - 1) <= self.most_kept:
            self._count += spans * (width - 1)
            kept = self._kept[width] = self._of(width, slice(0, spans))
        for start in range(0, spans, step):
            block = slice(start, min(start + step, spans))
            left, right = self._of(width, block) if kept is None else (kept[0][block], kept[1][block])
            yield slice(here.start + block.start, here.start + block.stop), left, right

    def _of(self, width: int, block: slice) -> tuple[Tensor, Tensor]:
        left, right = self.layout.splits(width, block)
        return torch.from_numpy(left).to(self.device), torch.from_numpy(right).to(self.device)


class Squares:
    """Values of all spans, [rows, 2, ...], where those of the parts of a span's splits lie one after another.

    No part has to be looked up by the number of its row: the parts of many spans are one view. For sentences of one
    length L (a run), with b the sentence among them,

        left[b, i, w - 1]    has the first value of the span of w words that begins at word i,
        right[b, j, L - w]   the second value of the span of w words that ends at word j.

    The span of w words at i has the left parts left[b, i, :w-1] and the right parts right[b, i+w-1, L-w+1:]. Half of a
    square is empty.
    """

    def __init__(self, layout: Layout, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.runs = [(run.sentences.stop - run.sentences.start, run.each) for run in layout.runs(1)]
        self.left, self.right = (
            [torch.zeros(count, length, length, *shape, dtype=dtype, device=device) for count, length in self.runs]
            for _ in range(2)
        )

    @staticmethod
    def numbers(layout: Layout) -> int:
        """Return how many values of spans the squares have room for."""
        return 2 * int((layout.lengths**2).sum())

    def _alive(self, width: int) -> Iterator[tuple[slice, int, int, Tensor, Tensor]]:
        """Yield the runs that have spans of a width: rows (of this width), sentences, spans of each, both squares."""
        first = 0
        for (count, length), left, right in zip(self.runs, self.left, self.right, strict=True):
            if length < width:
                return
            spans = length - width + 1
            yield slice(first, first + count * spans), count, spans, left, right
            first += count * spans

    def write(self, width: int, values: Tensor) -> None:
        """Write the values of the spans of a width: [R, 2, ...]."""
        for rows, count, spans, left, right in self._alive(width):
            new = values[rows].view(count, spans, *values.shape[1:])
            left[:, :spans, width - 1] = new[:, :, 0]
            right[:, width - 1 :, spans - 1] = new[:, :, 1]

    def read(self, width: int) -> Tensor:
        """Return the values of the spans of a width: [R, 2, ...], a copy."""
        parts = [
            torch.stack((left[:, :spans, width - 1], right[:, width - 1 :, spans - 1]), 2).flatten(0, 1)
            for _, _, spans, left, right in self._alive(width)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def parts(self, width: int, largest: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield the parts of all splits of the spans of a width, of some sentences at a time: `largest` splits or one.

        Rows (of this width), left parts and right parts: views [sentences, spans, width - 1, ...].
        """
        for rows, count, spans, left, right in self._alive(width):
            step = max(1, largest // (spans * (width - 1)))
            for some in range(0, count, step):
                to = min(some + step, count)
                here = slice(rows.start + some * spans, rows.start + to * spans)
                yield here, left[some:to, :spans, : width - 1], right[some:to, width - 1 :, spans:]


class Steps:
    """Rows of the forward algorithm: of the first step of all sorted sentences, then of the second of all alive..."""

    def __init__(self, lengths: Sequence[int], device: torch.device):
        layout = Layout(lengths)
        self.lengths = layout.lengths  # [B], decreasing
        self.alive = layout.alive[1:]  # sentences at each step
        self.begin = np.concatenate(([0], np.cumsum(self.alive)))
        sentence = np.concatenate([np.arange(count) for count in self.alive])
        step = np.repeat(np.arange(layout.longest), self.alive)
        word = layout.leaf_word[layout.prefix[sentence] + step]
        before = self.begin[np.maximum(step - 1, 0)] + sentence
        end = self.begin[layout.lengths - 1] + np.arange(len(layout.lengths))
        tables = sentence, step, word, before, end, np.array(layout.order), np.argsort(layout.order)
        # One copy, for which the host does not wait
        packed = copy_to_device(np.concatenate(tables), device).to(device).split([len(table) for table in tables])
        self.sentence, self.step, self.word, self.before = packed[:4]  # each [rows]; before: row of the step before
        self.end = packed[4]  # [B] row of the last step
        self.order, self.inverse = packed[5:]  # [B] the caller's number of a sorted sentence; the other way round
        self.shape = layout.longest, len(layout.lengths)

    def rows(self, step: int) -> slice:
        return slice(int(self.begin[step]), int(self.begin[step + 1]))

    def by_sentence(self, values: Tensor) -> Tensor:
        """[rows] -> [steps, B], with zeros after the ends of sentences."""
        table = values.new_zeros(self.shape)
        table[self.step, self.sentence] = values
        return table


def steps_of(lengths: tuple[int, ...], device: torch.device) -> Steps:
    return _kept_steps(lengths, device) if sum(lengths) <= MOST_WORDS_KEPT else Steps(lengths, device)


@lru_cache(maxsize=TABLES_KEPT)
def _kept_steps(lengths: tuple[int, ...], device: torch.device) -> Steps:
    with torch.inference_mode(False):  # for any later use
        return Steps(lengths, device)


def taken(packed: np.ndarray, lengths: Sequence[int], sentences: Sequence[int]) -> np.ndarray:
    """Return the rows of some sentences of a packed array [sum(lengths), ...]."""
    parts = np.split(packed, np.cumsum(lengths)[:-1])
    return np.concatenate([parts[sentence] for sentence in sentences])


def side_by_side(lengths: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield, for each place in sentences that grow together, how many are so long, and where their symbols are.

    The longest come first, so that those which go on are always the first ones.
    """
    order = sorted(range(len(lengths)), key=lambda sentence: -lengths[sentence])
    first = np.cumsum([0, *lengths]).tolist()
    for place in range(max(lengths, default=0)):
        rows = [first[sentence] + place for sentence in order if lengths[sentence] > place]
        yield len(rows), rows
