"""Who gets which batches: whole numbers only, so that every rank comes to the same answer by itself.

The batches of an epoch are numbered. A dealing gives each rank one contiguous part of what is left; the parts differ by
one batch at most. After some rounds (one batch a rank) with one number of ranks, what is left is dealt out anew to
another number: nothing is lost and nothing comes twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Interval = tuple[int, int]  # first batch, batch after the last
Dealing = tuple[int, int]  # number of ranks, rounds taken


def size(intervals: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in intervals)


def part(intervals: Sequence[Interval], start: int, stop: int) -> list[Interval]:
    """The start-th to stop-th of the numbers in the intervals."""
    result, before = [], 0
    for first, last in intervals:
        low, high = max(start - before, 0), min(stop - before, last - first)
        if low < high:
            result.append((first + low, first + high))
        before += last - first
    return result


def share(intervals: Sequence[Interval], rank: int, ranks: int) -> list[Interval]:
    total = size(intervals)
    return part(intervals, rank * total // ranks, (rank + 1) * total // ranks)


def left_after(batches: int, dealings: Sequence[Dealing]) -> list[Interval]:
    """What nobody has taken yet."""
    left: list[Interval] = [(0, batches)] if batches else []
    for ranks, rounds in dealings:
        shares = [share(left, rank, ranks) for rank in range(ranks)]
        left = _merged([interval for own in shares for interval in part(own, rounds, size(own))])
    return left


def _merged(intervals: Sequence[Interval]) -> list[Interval]:
    result: list[Interval] = []
    for start, stop in intervals:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return result


@dataclass(frozen=True)
class Interleaving:
    """Batches of several corpora merged evenly: after any number of them, each has had its proportion, up to rounding.

    Corpus 0 takes its proportion of all, corpus 1 its proportion of the rest, and so on.
    """

    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.counts)

    def taken(self, number: int) -> tuple[int, ...]:
        """How many of each corpus are among the first `number`."""
        result, left, rest = [], number, self.total
        for count in self.counts:
            own = left * count // rest if rest else 0
            result.append(own)
            left, rest = left - own, rest - count
        return tuple(result)
