"""Exact string probabilities of a WordPCFG: CKY over all its rules, many sentences at once.

The grammar is sparse and so is its chart (most spans are no constituent), so a width keeps only its spans with a
symbol, as rows of a matrix [spans, symbols], and a map from the position of a span's first word to its row. A span of
width w is then one gather per split: rows of the left part, rows of the right part, a product per rule, a sum per
parent.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lm_pcfg.corpus.embedded.templates import WordPCFG

# Each word's probability is multiplied by this power of two, which no rounding sees, so that a long sentence does not
# underflow: a word of the source costs about log 16 nats.
_WORD_SCALE = 16.0
_WORDS_PER_CHUNK = 16_384  # bounds the memory of a chart
_ROWS_PER_PRODUCT = 4_096  # a block of [rows, rules] stays in the cache

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class SourceScore:
    """perplexity = exp(nll / tokens), tokens = words + lines; natural logarithms."""

    nll: float
    words: int
    lines: int

    @property
    def tokens(self) -> int:
        return self.words + self.lines

    @property
    def ppl(self) -> float:
        if not self.tokens:
            return math.nan
        return math.exp(self.nll / self.tokens) if self.nll < math.inf else math.inf


class InsideScorer:
    """log p(sentence) of whole sentences, summed over all derivations, in double precision."""

    def __init__(self, grammar: WordPCFG) -> None:
        symbols = {symbol: index for index, symbol in enumerate(grammar.symbols)}
        self._word_ids = {word: index for index, word in enumerate(grammar.vocabulary)}
        self._start = symbols[grammar.start]

        unary = np.zeros((len(symbols), len(symbols)))  # [parent, child]
        binary: list[tuple[int, int, int, float]] = []
        for rule, probability in grammar.rule_probabilities():
            if len(rule.children) == 1:
                unary[symbols[rule.parent], symbols[rule.children[0]]] += probability
            else:
                left, right = (symbols[child] for child in rule.children)
                binary.append((symbols[rule.parent], left, right, probability))
        # [child, ancestor]: the total probability of all unary chains from ancestor down to child
        self._unary_chains = _sum_of_powers(unary).T.copy()

        emission = np.zeros((len(self._word_ids), len(symbols)))
        for preterminal in grammar.preterminals:
            for word, probability in grammar.word_probabilities(preterminal).items():
                emission[self._word_ids[word], symbols[preterminal]] = probability * _WORD_SCALE
        self._word_rows = emission @ self._unary_chains  # [vocabulary, symbols]

        binary.sort()  # by parent, so that the rules of a parent are one block
        parents = np.array([parent for parent, *_ in binary], dtype=np.int64)
        self._left = np.array([left for _, left, _, _ in binary], dtype=np.int64)
        self._right = np.array([right for _, _, right, _ in binary], dtype=np.int64)
        self._probability = np.array([probability for *_, probability in binary])
        self._parents, self._first_rule = np.unique(parents, return_index=True)
        self._chains_of_parents = self._unary_chains[self._parents]  # [parents of binary rules, symbols]

    def log_probabilities(self, sentences: Sequence[Sequence[str]]) -> Floats:
        """One natural logarithm per sentence, in order; -inf outside the language. Equal sentences cost once."""
        unique: dict[tuple[str, ...], int] = {}
        index = np.array([unique.setdefault(tuple(words), len(unique)) for words in sentences], dtype=np.int64)
        result = np.full(len(unique), -np.inf)
        known = [(words, row) for words, row in unique.items() if words and all(w in self._word_ids for w in words)]
        known.sort(key=lambda item: len(item[0]))  # equal widths end together
        start = 0
        while start < len(known):
            stop, total = start, 0
            while stop < len(known) and (stop == start or total + len(known[stop][0]) <= _WORDS_PER_CHUNK):
                total += len(known[stop][0])
                stop += 1
            rows = np.array([row for _, row in known[start:stop]])
            result[rows] = self._score_chunk([words for words, _ in known[start:stop]])
            start = stop
        return result[index]

    def _score_chunk(self, sentences: list[tuple[str, ...]]) -> Floats:
        lengths = np.array([len(words) for words in sentences], dtype=np.int64)
        text = np.array([self._word_ids[word] for words in sentences for word in words], dtype=np.int64)
        first = np.cumsum(lengths) - lengths  # [sentences] position of each first word in the packed text
        room = np.repeat(first + lengths, lengths) - np.arange(len(text))  # [words] words from here to the end
        row_at: list[Integers] = [np.empty(0, dtype=np.int64), text]  # width -> [words] row of that span, or -1
        rows: list[Floats] = [np.empty((0, 0)), self._word_rows]  # width -> [spans, symbols]
        result = np.full(len(sentences), -np.inf)
        for width in range(1, int(lengths.max()) + 1):
            if width > 1:
                spans, values = self._spans_of_width(width, row_at, rows, room)
                row_of_start = np.full(len(text), -1, dtype=np.int64)
                row_of_start[spans] = np.arange(len(spans))
                row_at.append(row_of_start)
                rows.append(values)
            finished = np.flatnonzero(lengths == width)
            top = row_at[width][first[finished]]
            finished, top = finished[top >= 0], top[top >= 0]
            with np.errstate(divide="ignore"):
                result[finished] = np.log(rows[width][top, self._start]) - width * math.log(_WORD_SCALE)
        return result

    def _spans_of_width(
        self, width: int, row_at: list[Integers], rows: list[Floats], room: Integers
    ) -> tuple[Integers, Floats]:
        """Start positions and rows [spans, symbols] of the spans of this width that some symbol derives."""
        starts = np.flatnonzero(room >= width)
        inside = np.zeros((len(starts), len(self._parents)))
        for left_width in range(1, width):
            left = row_at[left_width][starts]
            right = row_at[width - left_width][starts + left_width]
            both = np.flatnonzero((left >= 0) & (right >= 0))
            for block in range(0, len(both), _ROWS_PER_PRODUCT):
                span = both[block : block + _ROWS_PER_PRODUCT]
                products = rows[left_width][left[span]][:, self._left]  # [spans, rules]
                products *= rows[width - left_width][right[span]][:, self._right]
                products *= self._probability
                inside[span] += np.add.reduceat(products, self._first_rule, axis=1)
        derived = np.flatnonzero(inside.any(axis=1))
        return starts[derived], inside[derived] @ self._chains_of_parents


def _sum_of_powers(unary: Floats) -> Floats:
    """I + U + U^2 + ..., a finite sum: the unary rules must not form a cycle."""
    total = power = np.eye(len(unary))
    for _ in range(len(unary)):
        power = power @ unary
        if not power.any():
            return total
        total = total + power
    raise ValueError("the unary rules of the grammar form a cycle")


def score(scorer: InsideScorer, lines: Iterable[Sequence[str]]) -> SourceScore:
    sentences = list(lines)
    nll = -math.fsum(scorer.log_probabilities(sentences))
    return SourceScore(nll=nll, words=sum(map(len, sentences)), lines=len(sentences))
