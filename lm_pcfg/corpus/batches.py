"""Batches of sentences of similar length: how sentences are grouped, and what a batch holds."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from lm_pcfg.corpus.lengths import Histogram
from lm_pcfg.corpus.sentences import Sentences
from lm_pcfg.errors import UserError

BatchBy = Literal["sentences", "cost"]


class BatchError(UserError, ValueError):
    """No batches can be made, or a saved position does not fit; the message is one line for the user."""


@dataclass(frozen=True)
class Batch:
    """Sentences packed one after another. A rank that is out of data gets one with no sentences."""

    words: np.ndarray  # int64 [sum(lengths)]: ids, with <eos> at the end of each sentence if ends are explicit
    lengths: list[int]  # what the chart sees, so with <eos>
    lines: np.ndarray  # int64 [sentences]: indices of the sentences in the corpus
    n_words: int  # without <eos>
    limits: np.ndarray | None = None  # int32 [sum(lengths), 2]: brackets that trees may not cross (flash_inside)

    @property
    def n_sentences(self) -> int:
        return len(self.lengths)

    @property
    def n_tokens(self) -> int:
        """Words + lines: the denominator of perplexity, whether ends are explicit or not."""
        return self.n_words + self.n_sentences

    @property
    def cost(self) -> int:
        return sum(length * length for length in self.lengths)


@dataclass(frozen=True)
class BatchOptions:
    by: BatchBy = "sentences"
    sentences: int = 16  # sentences a batch, if by sentences
    cost: int = 8000  # budget of a batch, if by cost: the sum over its sentences of length squared
    accumulate: int = 1  # micro-batches a rank takes for one optimizer step

    def __post_init__(self) -> None:
        if self.by not in ("sentences", "cost"):
            raise BatchError(f"batch.by {self.by!r} should be 'sentences' or 'cost'")
        for name in ("sentences", "cost", "accumulate"):
            if getattr(self, name) < 1:
                raise BatchError(f"batch.{name} {getattr(self, name)} should be at least 1")

    @property
    def size(self) -> int:
        """The size of a batch, in sentences or in cost as `by` says."""
        return self.sentences if self.by == "sentences" else self.cost


def describe_lengths(lengths: Sequence[int], unit: str = "words") -> str:
    """Say how large a batch is. unit: what lengths count"""
    if not lengths:
        return "a batch without sentences"
    if len(lengths) == 1:
        return f"a batch of one sentence of {lengths[0]:,} {unit}"
    least, most = min(lengths), max(lengths)
    long = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return f"a batch of {len(lengths):,} sentences of {long} {unit}, {sum(lengths):,} in all"


# ---- grouping sentences ---------------------------------------------------------------------------------------------


def plan_batches(lengths: np.ndarray, options: BatchOptions, seeds: Sequence[int] | None = None) -> list[np.ndarray]:
    """Return the indices of the sentences of each batch; every sentence is in exactly one.

    seeds: for the shuffle. Shuffling before a stable sort by length makes new batches of similar lengths with every
    seed, while their number and the lengths in them stay the same. None: batches go from short to long sentences.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    order = np.arange(len(lengths))
    if seeds is not None:
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seeds)))
        order = generator.permutation(len(lengths))
    order = order[np.argsort(lengths[order], kind="stable")]
    if options.by == "sentences":
        cuts = _cut_by_count(len(order), options.sentences)
        if seeds is not None and len(cuts) > 1:
            # The smaller last batch moves to a random place: the longest sentences would get more than their weight.
            sizes = np.diff(cuts)
            place = int(generator.integers(len(sizes)))
            sizes[place], sizes[-1] = sizes[-1], sizes[place]
            cuts = [0, *np.cumsum(sizes).tolist()]
    else:
        cuts = _cut_by_cost(lengths[order] ** 2, options.cost)
    batches = [order[start:end] for start, end in pairwise(cuts)]
    if seeds is not None:
        batches = [batches[k] for k in generator.permutation(len(batches))]
    return batches


def _cut_by_count(total: int, count: int) -> list[int]:
    return [*range(0, total, count), total] if total else [0]


def _cut_by_cost(costs: np.ndarray, budget: int) -> list[int]:
    """Cut ascending costs so that no batch exceeds the budget, except a single sentence that does so alone.

    Make as few batches as the budget allows; then take the smallest limit that needs no more of them, so that there is
    no small remainder: with m the largest cost of a sentence, no batch is above mean + m. So the most expensive batch
    costs at most 1.5 x the mean where m <= budget / 4.
    """
    total = len(costs)
    fitting = int(np.searchsorted(costs, budget, side="right"))  # the others are batches of their own
    sums = [0, *np.cumsum(costs[:fitting]).tolist()]

    def cut(limit: int, at_most: int) -> list[int] | None:
        cuts = [0]
        while cuts[-1] < fitting:
            if len(cuts) > at_most:
                return None
            # the last end with sums[end] - sums[start] <= limit
            cuts.append(bisect_right(sums, sums[cuts[-1]] + limit) - 1)
        return cuts

    best = cut(budget, at_most=fitting) or [0]
    batches = len(best) - 1
    if batches > 1:
        low = max(int(costs[fitting - 1]), -(-sums[-1] // batches))  # below this no cut can do
        high = budget
        while low < high:
            middle = (low + high) // 2
            cuts = cut(middle, at_most=batches)
            if cuts is None:
                low = middle + 1
            else:
                best, high = cuts, middle
    return best + list(range(fitting + 1, total + 1))


def count_batches(kept: Histogram, options: BatchOptions, ends: bool) -> int:
    """How many batches `plan_batches` makes of lines of these lengths; ends: each of them gets an `<eos>`."""
    if options.by == "sentences":
        return -(-kept.lines // options.sentences)
    batches, room = 0, 0  # room: what is left of the budget of the last batch
    for length, count in zip(kept.lengths.tolist(), kept.counts.tolist(), strict=True):
        cost = (length + int(ends)) ** 2
        if cost > options.cost:
            batches += count  # each alone
            continue
        here = min(count, room // cost)
        room -= here * cost
        if left := count - here:
            in_each = options.cost // cost
            opened = -(-left // in_each)
            batches += opened
            room = options.cost - (left - (opened - 1) * in_each) * cost
    return batches


# ---- batches --------------------------------------------------------------------------------------------------------


def make_batch(sentences: Sentences, indices: np.ndarray, *, brackets: bool = True) -> Batch:
    """Pack the sentences with these indices into a batch, with their brackets if these are wanted."""
    positions, lengths = sentences.positions(indices)
    ends = len(indices) if sentences.end_of_sentence else 0
    return Batch(
        words=sentences.ids[positions].astype(np.int64),
        lengths=lengths.tolist(),
        lines=indices,
        n_words=len(positions) - ends,
        limits=sentences.limits[positions] if brackets and sentences.limits is not None else None,
    )


def empty_batch() -> Batch:
    none = np.empty(0, dtype=np.int64)
    return Batch(words=none, lengths=[], lines=none, n_words=0)


def batch_hash(batch: Batch) -> str:
    """Return a hash that is equal for equal batches: same sentences in the same order, same ids."""
    digest = hashlib.sha256()
    for part in (np.asarray(batch.lengths), batch.lines, batch.words):
        digest.update(f"{len(part)} ".encode())
        digest.update(part.astype("<i8").tobytes())
    return digest.hexdigest()
