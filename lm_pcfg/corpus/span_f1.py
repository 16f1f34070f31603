"""How well predicted trees agree with gold trees: F1 of unlabelled spans, and what trees without a parser reach.

A span is (first word, end). Spans of one word and of the whole sentence are left out, since every tree has them, and a
span counts once, however many nodes have it. With h spans in both trees, g in the gold tree and p in the predicted one,
precision is h / p, recall h / g, and F1, their harmonic mean, is 2 h / (g + p). A sentence without a gold span has
recall 1, and precision 1 if nothing was predicted, otherwise 0; one without a predicted span has precision 0 if there
was something to find. In one rule: F1 is 1 if g + p = 0, else 2 h / (g + p).

S-F1 is the mean of the F1 of sentences, corpus F1 that of all spans together. Both are percentages. Sentences of less
than two words are skipped and counted. Punctuation is the caller's: `treebank.without` takes it away.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lm_pcfg.corpus.treebank import Tree, plain_label

Span = tuple[int, int]
LENGTHS = ((2, 10), (11, 20), (21, 30), (31, 40), (41, None))  # of sentences, in words
SEEDS = (1, 2, 3, 4, 5)  # of random trees


def counted_spans(spans: Iterable[Span], words: int) -> set[Span]:
    """Leave out duplicates, and spans of one word or of the whole sentence. ValueError: no span of it."""
    different = set(spans)
    for i, j in different:
        if not 0 <= i < j <= words:
            raise ValueError(f"({i}, {j}) is no span of {words} words")
    return {(i, j) for i, j in different if 1 < j - i < words}


def labelled_spans(tree: Tree) -> set[tuple[Span, str]]:
    """Return the spans that count, each with its label or labels, without function tags."""
    words = len(tree.words)
    return {((i, j), plain_label(label)) for i, j, label in tree.nodes if 1 < j - i < words}


class Sums(NamedTuple):
    """What S-F1 and corpus F1 are made of: plain numbers, so that processes can add up theirs, field by field."""

    f1: float = 0.0  # sum over sentences, each from 0 to 1
    sentences: int = 0
    hits: int = 0  # spans in both trees
    gold: int = 0
    predicted: int = 0

    @property
    def s_f1(self) -> float | None:
        """None: no sentence."""
        return 100 * self.f1 / self.sentences if self.sentences else None

    @property
    def corpus_f1(self) -> float | None:
        return 100 * _f1(self.hits, self.gold, self.predicted) if self.sentences else None

    @property
    def precision(self) -> float | None:
        """None: no span was predicted."""
        return 100 * self.hits / self.predicted if self.predicted else None

    @property
    def recall(self) -> float | None:
        return 100 * self.hits / self.gold if self.gold else None


def _f1(hits: int, gold: int, predicted: int) -> float:
    return 2 * hits / (gold + predicted) if gold + predicted else 1.0


def sentence_f1(gold: Tree, predicted: Iterable[Span]) -> float:
    """Return the F1 of one sentence, from 0 to 1."""
    words = len(gold.words)
    theirs, ours = counted_spans(((i, j) for i, j, _ in gold.nodes), words), counted_spans(predicted, words)
    return _f1(len(theirs & ours), len(theirs), len(ours))


@dataclass
class Tally:
    """The spans of some sentences. The F1 of each is kept, so that their sum does not depend on the order."""

    f1: list[float] = field(default_factory=list)
    hits: int = 0
    gold: int = 0
    predicted: int = 0

    def add(self, gold: set[Span], predicted: set[Span]) -> None:
        hits = len(gold & predicted)
        self.f1.append(_f1(hits, len(gold), len(predicted)))
        self.hits += hits
        self.gold += len(gold)
        self.predicted += len(predicted)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.f1 + other.f1, self.hits + other.hits, self.gold + other.gold, self.predicted + other.predicted
        )

    @property
    def sums(self) -> Sums:
        return Sums(math.fsum(self.f1), len(self.f1), self.hits, self.gold, self.predicted)


# ---- scoring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelRecall:
    label: str  # without function tags
    recall: float
    spans: int  # gold ones with this label


@dataclass(frozen=True)
class LengthF1:
    shortest: int
    longest: int | None  # None: no limit
    sentences: int
    s_f1: float | None
    corpus_f1: float | None


@dataclass(frozen=True)
class SpanReport:
    """Percentages, and the counts they are made of. None where there is nothing to divide by."""

    s_f1: float | None
    corpus_f1: float | None
    precision: float | None  # of all spans together, as recall
    recall: float | None
    sentences: int  # scored
    skipped: int  # of less than two words
    hits: int
    gold: int
    predicted: int
    by_label: tuple[LabelRecall, ...]  # the most frequent first
    by_length: tuple[LengthF1, ...]


class SpanScore:
    """Takes sentences one by one; `+` joins the scores of parts of a corpus, to the same figures as in one go."""

    def __init__(self) -> None:
        self.skipped = 0
        self._lengths = [Tally() for _ in LENGTHS]
        self._labels: Counter[str] = Counter()  # gold spans with a label
        self._found: Counter[str] = Counter()  # those of them that were predicted

    def add(self, gold: Tree, predicted: Iterable[Span]) -> None:
        """Compare a predicted tree over the same words: its spans, in any order and with or without those of a word."""
        words = len(gold.words)
        if words < 2:
            self.skipped += 1
            return
        predicted = counted_spans(predicted, words)
        labelled = labelled_spans(gold)
        self._lengths[_length_group(words)].add({span for span, _ in labelled}, predicted)
        for span, label in labelled:
            self._labels[label] += 1
            self._found[label] += span in predicted

    def __add__(self, other: SpanScore) -> SpanScore:
        both = SpanScore()
        both.skipped = self.skipped + other.skipped
        both._lengths = [mine + theirs for mine, theirs in zip(self._lengths, other._lengths, strict=True)]
        for score in (self, other):
            both._labels.update(score._labels)
            both._found.update(score._found)
        return both

    @property
    def sums(self) -> Sums:
        return sum(self._lengths, Tally()).sums

    def report(self) -> SpanReport:
        sums = self.sums
        by_label = [
            LabelRecall(label, 100 * self._found[label] / count, count) for label, count in self._labels.items()
        ]
        groups = [(group, tally.sums) for group, tally in zip(LENGTHS, self._lengths, strict=True)]
        return SpanReport(
            s_f1=sums.s_f1,
            corpus_f1=sums.corpus_f1,
            precision=sums.precision,
            recall=sums.recall,
            sentences=sums.sentences,
            skipped=self.skipped,
            hits=sums.hits,
            gold=sums.gold,
            predicted=sums.predicted,
            by_label=tuple(sorted(by_label, key=lambda row: (-row.spans, row.label))),
            by_length=tuple(LengthF1(*group, own.sentences, own.s_f1, own.corpus_f1) for group, own in groups),
        )


def _length_group(words: int) -> int:
    return next(group for group, (_, longest) in enumerate(LENGTHS) if longest is None or words <= longest)


# ---- baselines ------------------------------------------------------------------------------------------------------


def left_branching(words: int) -> list[Span]:
    """Return the spans of two words or more of ((a b) c), as the three below do."""
    return [(0, end) for end in range(2, words + 1)]


def right_branching(words: int) -> list[Span]:
    return [(start, words) for start in range(words - 1)]


def random_branching(words: int, source: random.Random) -> list[Span]:
    """Draw a binary tree: each span is divided at a place that is uniform among its own."""
    spans = []
    waiting = [(0, words)]
    while waiting:
        start, end = waiting.pop()
        if end - start > 1:
            spans.append((start, end))
            middle = start + 1 + int(source.random() * (end - start - 1))
            waiting += ((start, middle), (middle, end))
    return spans


def best_binary(tree: Tree) -> list[Span]:
    """Return the spans of a binary tree that has all those of this one. ValueError: nodes that cross.

    Where a node has more than two children, they are joined from the right. Any other way would score the same, since
    all binary trees over as many words have as many spans.
    """
    words = len(tree.words)
    if words < 2:
        return []
    end_of = list(range(1, words + 1))  # of the span that begins here and is in no other yet; 0: there is none
    spans = []
    given = {(i, j) for i, j, _ in tree.nodes if j - i > 1} | {(0, words)}
    for start, end in sorted(given, key=lambda span: span[1] - span[0]):
        children = [start]
        while 0 < end_of[children[-1]] < end:
            children.append(end_of[children[-1]])
        if end_of[children[-1]] != end:
            raise ValueError(f"({start}, {end}) crosses another node")
        spans += [(child, end) for child in children[:-1]]
        for child in children:
            end_of[child] = 0
        end_of[start] = end
    return spans


@dataclass(frozen=True)
class Baseline:
    s_f1: float | None
    corpus_f1: float | None


def baselines(trees: Iterable[Tree]) -> dict[str, Baseline]:
    """Return what trees reach that need no parser, and the most that a binary tree can reach.

    "random" is the mean of five seeds, with trees drawn in the order of the sentences.
    """
    left, right, best = Tally(), Tally(), Tally()
    drawn = [(random.Random(seed), Tally()) for seed in SEEDS]
    for tree in trees:
        words = len(tree.words)
        if words < 2:
            continue
        gold = counted_spans(((i, j) for i, j, _ in tree.nodes), words)
        left.add(gold, set(left_branching(words)[:-1]))  # without the whole sentence
        right.add(gold, set(right_branching(words)[1:]))
        best.add(gold, set(best_binary(tree)) - {(0, words)})
        for source, tally in drawn:
            tally.add(gold, set(random_branching(words, source)[1:]))
    sums = [tally.sums for _, tally in drawn]
    return {
        "left-branching": Baseline(left.sums.s_f1, left.sums.corpus_f1),
        "right-branching": Baseline(right.sums.s_f1, right.sums.corpus_f1),
        "random": Baseline(_mean([own.s_f1 for own in sums]), _mean([own.corpus_f1 for own in sums])),
        "best binary": Baseline(best.sums.s_f1, best.sums.corpus_f1),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
