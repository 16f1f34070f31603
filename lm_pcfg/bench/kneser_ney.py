"""Interpolated modified Kneser-Ney n-grams (Chen and Goodman, 1998): the plain baseline on exactly our tokens.

Words and one end of sentence a line are predicted, from a context that begins with one start of sentence, which itself
is never predicted. The types are those of a vocabulary and the end: probabilities over them sum to 1.

    p_k(w | h) = (a(hw) - D(a(hw))) / a(h.) + gamma(h) p_k-1(w | h without its first word)      h unseen: p_k-1 alone
    gamma(h)   = sum over w of D(a(hw)) / a(h.)
    p_1(w)     = (a(w) - D(a(w))) / a(.) + gamma / vocabulary

a is the count at the highest order, and for n-grams that begin with the start of the sentence; elsewhere it is the
number of different words that precede the n-gram. D is 0, D1, D2, D3+ for a = 0, 1, 2, 3 or more, one set an order.
Order 1 alone is the unigram model of relative frequencies, if every type has been seen; else it is discounted, too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from lm_pcfg.corpus.sentences import Sentences

FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)  # where a text is too small to estimate them


class _Order(NamedTuple):
    """The n-grams of one order, in the order of their keys."""

    keys: np.ndarray  # [n-grams] context * types + last word
    terms: np.ndarray  # [n-grams] (a - D(a)) / a(context .)
    gamma: np.ndarray  # [contexts] what the context leaves to the lower order


class KneserNey:
    def __init__(self, text: Sentences, order: int, unknown_is_known: bool = True, ids: int | None = None):
        """Smooth the n-grams of a text with explicit ends.

        unknown_is_known: whether <unk>, which has id 0, is one of the types; ids: how many the vocabulary and the end
        have; None: those of the text.
        """
        self._first_id = 0 if unknown_is_known else 1
        self.types = (int(text.ids.max()) + 1 if ids is None else ids) - self._first_id
        self.order = order
        counted = _count(*self._stream(text), order, self.types)
        self.discounts: list[tuple[float, float, float]] = []  # D1, D2, D3+ of each order
        self.orders_with_fallback: list[int] = []
        self._orders = [self._smooth(k, counted) for k in range(1, order + 1)]

    def _stream(self, text: Sentences) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids, each sentence after its start (id: types), and the place of each in its sentence, from 0."""
        ids = np.insert(text.ids.astype(np.int64) - self._first_id, text.offsets[:-1], self.types)
        starts = text.offsets[:-1] + np.arange(len(text))
        return ids, np.arange(len(ids)) - np.repeat(starts, np.diff(text.offsets) + 1)

    def _smooth(self, k: int, counted: list[_Counts]) -> _Order:
        keys, counts, _ = counted[k - 1]
        if k < self.order:  # nothing precedes the start of a sentence: what begins there keeps its count
            preceding = np.bincount(counted[k].shorter, minlength=len(keys))[: len(keys)]
            counts = np.where(preceding > 0, preceding, counts)
        relative = self.order == 1 and len(keys) == self.types  # frequencies: no type needs what discounts leave
        discounts = (0.0, 0.0, 0.0) if relative else self._estimate_discounts(k, counts)
        self.discounts.append(discounts)
        discount = np.array([0.0, *discounts])[np.minimum(counts, 3)]
        contexts = keys // self.types
        totals = np.bincount(contexts, weights=counts)
        with np.errstate(invalid="ignore"):  # a context that is none, such as one with an end in it
            gamma = np.bincount(contexts, weights=discount) / totals
        return _Order(keys, (counts - discount) / totals[contexts], gamma)

    def _estimate_discounts(self, k: int, counts: np.ndarray) -> tuple[float, float, float]:
        n1, n2, n3, n4 = (int(np.count_nonzero(counts == count)) for count in (1, 2, 3, 4))
        if n1 and n2 and n3 and n4:
            y = n1 / (n1 + 2 * n2)
            estimates = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
            if all(0 <= discount <= count for count, discount in enumerate(estimates, start=1)):
                return estimates
        self.orders_with_fallback.append(k)
        return FALLBACK_DISCOUNTS

    def probabilities(self, text: Sentences) -> np.ndarray:
        """Return the probability of every word and end of a text given what precedes it in its line: fp64 [tokens]."""
        ids, place = self._stream(text)
        predicted = place >= 1
        probability = np.full(len(ids), 1.0 / self.types)
        grams = np.zeros(len(ids), dtype=np.int64)  # of the n-gram that ends here; -1: unseen, or no longer in its line
        for k, (keys, terms, gamma) in enumerate(self._orders, start=1):
            context = _contexts(grams, place, k)
            known = np.flatnonzero(predicted & (context >= 0))
            key = context[known] * self.types + ids[known]
            found = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
            seen = keys[found] == key
            probability[known] = gamma[context[known]] * probability[known] + np.where(seen, terms[found], 0.0)
            grams = np.full(len(ids), -1)
            grams[known[seen]] = found[seen]
            if k == 1:
                grams[~predicted] = self.types
        return probability[predicted]

    def nll(self, text: Sentences) -> float:
        """Return the total negative log-likelihood, natural logarithm."""
        return -math.fsum(np.log(self.probabilities(text)).tolist())


class _Counts(NamedTuple):
    keys: np.ndarray  # [n-grams] sorted: number of the context among the n-grams one shorter * types + last word
    counts: np.ndarray  # [n-grams]
    shorter: np.ndarray  # [n-grams] number, one order below, of the n-gram without its first word


def _count(ids: np.ndarray, place: np.ndarray, order: int, types: int) -> list[_Counts]:
    """Count the n-grams of orders 1 to `order`; none reaches over the beginning of its line."""
    counted = []
    grams = np.zeros(len(ids), dtype=np.int64)
    for k in range(1, order + 1):
        context = _contexts(grams, place, k)
        here = np.flatnonzero((place >= 1) & (context >= 0))
        keys, first, numbers, counts = np.unique(
            context[here] * types + ids[here], return_index=True, return_inverse=True, return_counts=True
        )
        counted.append(_Counts(keys, counts, grams[here[first]]))
        grams = np.full(len(ids), -1)
        grams[here] = numbers
        if k == 1:
            grams[place == 0] = types  # the start of a sentence is a context, though never predicted
    return counted


def _contexts(grams: np.ndarray, place: np.ndarray, k: int) -> np.ndarray:
    """Return the context of each n-gram of order k: the shorter n-gram that ends just before it, -1 for none."""
    if k == 1:
        return np.zeros_like(grams)
    return np.where(place >= 1, np.roll(grams, 1), -1)
