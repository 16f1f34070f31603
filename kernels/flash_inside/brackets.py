"""Sentences whose trees are partly known: a tree that crosses one of their brackets does not count.

The brackets of a sentence may be few or many; without any, all trees count. Training on such sentences is what Pereira
and Schabes (1992) did. A span (i, j) crosses a bracket (a, b) if just one of its ends lies strictly inside of it:

    a < i < b < j   or   i < a < j < b

So a span is allowed where j <= latest_end[i] and i >= earliest_start[j], and two numbers a word tell all of a sentence:

    latest_end[i]      the smallest b of all brackets with a < i < b; without one, the number of words
    earliest_start[j]  the largest a of all brackets with a < j < b; without one, 0

They are kept as int32 [words, 2]: latest_end of the span that begins with the word, earliest_start of the one that ends
with it. The rows of spans that are not allowed are zero, in every backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from flash_inside.packing import Layout


def span_limits(brackets: Iterable[tuple[int, int]], length: int) -> np.ndarray:
    """Return the limits of a sentence: int32 [length, 2]. A bracket (a, b) is around the words a..b-1.

    Brackets that cross each other are refused: together they would leave no tree, or trees that nobody means.
    """
    limits = np.empty((length, 2), dtype=np.int32)
    limits[:, 0], limits[:, 1] = length, 0
    for start, end in sorted(set(brackets), key=lambda bracket: bracket[0] - bracket[1]):  # the widest first
        if not 0 <= start < end <= length:
            raise ValueError(f"bracket ({start}, {end}) of a sentence of {length} words")
        if end > limits[start, 0] or start < limits[end - 1, 1]:
            raise ValueError(f"bracket ({start}, {end}) crosses another one")
        limits[start + 1 : end, 0] = end  # of spans that begin strictly inside
        limits[start : end - 1, 1] = start  # ... that end strictly inside
    return limits


def check_limits(limits: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Return the limits of packed sentences as the backends read them: int32 [sum(lengths), 2], contiguous."""
    if limits.shape != (sum(lengths), 2):
        raise ValueError(f"limits have the shape {tuple(limits.shape)}, but should have ({sum(lengths)}, 2)")
    return np.ascontiguousarray(limits, dtype=np.int32)


def allowed_spans(limits: np.ndarray) -> np.ndarray:
    """Return which spans of one sentence are allowed: bool [l+1, l+1], entry (i, j) for the words i..j-1."""
    length = len(limits)
    allowed = np.zeros((length + 1, length + 1), dtype=bool)
    start, end = np.triu_indices(length + 1, 1)
    allowed[start, end] = (end <= limits[start, 0]) & (start >= limits[end - 1, 1])
    return allowed


def allowed_rows(limits: np.ndarray, layout: Layout) -> np.ndarray:
    """Return which rows of a packed chart are allowed: bool [rows]."""
    sorted_limits = limits[layout.leaf_word]
    parts = []
    for width in range(1, layout.longest + 1):
        sentence, start = layout.spans(width)
        first, end = layout.prefix[sentence], start + width
        parts.append((end <= sorted_limits[first + start, 0]) & (start >= sorted_limits[first + end - 1, 1]))
    return np.concatenate(parts)
