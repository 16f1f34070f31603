"""Lengths of sentences: which are kept, why the others are left out, and how many there are of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

INVALID = -1  # the "length" of a line that cannot be read
KEPT, UNREADABLE, BLANK, TOO_LONG, TOO_SHORT = range(5)  # what `Limits.judge` says of a line


@dataclass(frozen=True)
class Limits:
    """Which sentences are kept."""

    max_length: int | None = None  # most words, not counting <eos>
    min_length: int = 1  # fewest symbols in the chart, counting <eos>: 2 where the grammar cannot emit a single one

    def judge(self, lengths: np.ndarray, ends: bool) -> np.ndarray:
        """Return KEPT or the reason why not for each of these lengths in words; ends: lines get an `<eos>` as well."""
        most = np.inf if self.max_length is None else self.max_length
        tests = [lengths < 0, lengths == 0, lengths > most, lengths + int(ends) < self.min_length]
        return np.select(tests, [UNREADABLE, BLANK, TOO_LONG, TOO_SHORT], KEPT)

    def at_most(self, max_length: int | None) -> Limits:
        """Add another upper limit to these (None: no other)."""
        both = [most for most in (self.max_length, max_length) if most is not None]
        return Limits(min(both, default=None), self.min_length)


@dataclass(frozen=True)
class Skipped:
    """How many lines the limits leave out, by reason. Unreadable lines are damage, and counted there."""

    blank: int = 0
    too_long: int = 0
    too_short: int = 0

    @property
    def total(self) -> int:
        return self.blank + self.too_long + self.too_short


@dataclass(frozen=True)
class Histogram:
    """How many lines have which number of words (or pieces); 0 words: blank."""

    lengths: np.ndarray  # int64 [distinct], ascending
    counts: np.ndarray  # int64 [distinct]

    @classmethod
    def of(cls, lengths: np.ndarray) -> Histogram:
        values, counts = np.unique(np.asarray(lengths, dtype=np.int64), return_counts=True)
        return cls(values, counts.astype(np.int64))

    @classmethod
    def sum(cls, parts: Sequence[Histogram]) -> Histogram:
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls.of(np.empty(0, np.int64))
        values, places = np.unique(np.concatenate([part.lengths for part in parts]), return_inverse=True)
        counts = np.bincount(places, weights=np.concatenate([part.counts for part in parts]), minlength=len(values))
        return cls(values, counts.astype(np.int64))

    @classmethod
    def from_json(cls, pairs: Sequence[Sequence[int]]) -> Histogram:
        array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return cls(array[:, 0], array[:, 1])

    def to_json(self) -> list[list[int]]:
        return [[length, count] for length, count in zip(self.lengths.tolist(), self.counts.tolist(), strict=True)]

    @property
    def lines(self) -> int:
        return int(self.counts.sum())

    @property
    def words(self) -> int:
        return int((self.counts * np.maximum(self.lengths, 0)).sum())

    @property
    def unreadable(self) -> int:
        return int(self.counts[self.lengths == INVALID].sum())

    def kept(self, limits: Limits, ends: bool) -> Histogram:
        """Return the histogram of the lines within the limits."""
        kept = limits.judge(self.lengths, ends) == KEPT
        return Histogram(self.lengths[kept], self.counts[kept])

    def longest(self, count: int) -> list[int]:
        """Return the lengths of so many of the longest lines, or of all where there are fewer."""
        taken = np.minimum(self.counts[::-1], np.maximum(0, count - (np.cumsum(self.counts[::-1]) - self.counts[::-1])))
        return np.repeat(self.lengths[::-1], taken).tolist()

    def skipped(self, limits: Limits, ends: bool) -> Skipped:
        """Count the lines that the limits leave out."""
        why = limits.judge(self.lengths, ends)
        return Skipped(*(int(self.counts[why == reason].sum()) for reason in (BLANK, TOO_LONG, TOO_SHORT)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        return np.array_equal(self.lengths, other.lengths) and np.array_equal(self.counts, other.counts)

    __hash__ = None  # type: ignore[assignment]
