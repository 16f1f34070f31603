"""F1 of unlabelled spans: by hand, against a second implementation, in parts; and the trees that need no parser."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from fractions import Fraction

import numpy as np
import pytest

from lm_pcfg.corpus.span_f1 import (
    Baseline,
    LengthF1,
    SpanScore,
    Sums,
    baselines,
    best_binary,
    left_branching,
    random_branching,
    right_branching,
)
from lm_pcfg.corpus.treebank import PENN_PUNCTUATION, Tree, plain_label, read_tree, without
from trees import random_tree

CAT = read_tree(
    "(S (NP-SBJ (DT the) (NN cat)) (VP (VBD sat) (PP (IN on) (NP (PRP it)))))"
)  # gold: (0, 2), (2, 5), (3, 5)


def scored(*pairs) -> SpanScore:
    score = SpanScore()
    for gold, predicted in pairs:
        score.add(gold, predicted)
    return score


def flat(words: int) -> Tree:
    return Tree(("w",) * words, ("T",) * words, ((0, words, "S"),) if words else ())


# ---- by hand --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gold", "predicted", "f1"),
    [
        (CAT, [(0, 2), (2, 5), (3, 5), (0, 5)], 1),
        (CAT, left_branching(5), Fraction(1, 3)),  # (0, 2) of three, among (0, 2), (0, 3), (0, 4)
        (CAT, right_branching(5), Fraction(2, 3)),
        (CAT, [], 0),  # nothing predicted: precision 0
        (CAT, [(0, 5), (0, 1), (4, 5)], 0),  # nothing that counts
        (CAT, [(0, 2), (0, 2), (0, 2)], Fraction(1, 2)),  # duplicates are one: precision 1, recall 1/3
        (flat(5), [], 1),  # nothing to find, nothing predicted
        (flat(5), [(0, 5), (3, 4)], 1),
        (flat(5), [(0, 2)], 0),  # recall 1, precision 0
        (flat(2), [(0, 2)], 1),  # two words have no span that counts
        (read_tree("(S (NP (NP (NP (A a) (B b)))) (C c))"), [(0, 2)], 1),  # a chain of nodes is one span
        (read_tree("(S (VP (A a) (B b) (C c)))"), [(0, 3)], 1),  # and so it is over the whole sentence
    ],
)
def test_a_sentence(gold, predicted, f1):
    assert scored((gold, predicted)).report().s_f1 == 100 * float(f1)


def test_a_report():
    report = scored((CAT, [(0, 2), (1, 3)]), (flat(2), []), (flat(11), [(0, 3)]), (flat(1), []), (flat(0), [])).report()
    assert (report.sentences, report.skipped) == (3, 2)
    assert (report.hits, report.gold, report.predicted) == (1, 3, 3)
    assert report.s_f1 == 100 * math.fsum([2 / 5, 1, 0]) / 3
    assert report.corpus_f1 == 100 * (2 / 6)
    assert report.precision == report.recall == 100 / 3
    assert [(row.label, row.recall, row.spans) for row in report.by_label] == [
        ("NP", 100, 1), ("PP", 0, 1), ("VP", 0, 1),
    ]  # fmt: skip
    assert report.by_length == (
        LengthF1(2, 10, 2, 100 * (2 / 5 + 1) / 2, 100 * (2 / 5)),
        LengthF1(11, 20, 1, 0.0, 0.0),
        LengthF1(21, 30, 0, None, None),
        LengthF1(31, 40, 0, None, None),
        LengthF1(41, None, 0, None, None),
    )


def test_labels_are_plain_and_count_a_span_once():
    gold = read_tree("(S (NP-SBJ (NP=1 (A a) (B b))) (VP (NP (C c) (D d))) (NP (E e)))")
    report = scored((gold, [(0, 2)])).report()
    assert [(row.label, row.recall, row.spans) for row in report.by_label] == [("NP", 50, 2), ("VP", 0, 1)]


@pytest.mark.parametrize(
    ("words", "row"), [(2, 0), (10, 0), (11, 1), (20, 1), (21, 2), (31, 3), (40, 3), (41, 4), (99, 4)]
)
def test_groups_of_lengths(words, row):
    rows = scored((flat(words), [])).report().by_length
    assert [own.sentences for own in rows] == [int(k == row) for k in range(5)]


def test_nothing_was_scored():
    report = scored((flat(1), [])).report()
    assert (report.s_f1, report.corpus_f1, report.precision, report.recall, report.skipped) == (None,) * 4 + (1,)
    assert set(baselines([flat(1)]).values()) == {Baseline(None, None)}


@pytest.mark.parametrize("span", [(-1, 2), (0, 6), (3, 3), (4, 2), (7, 8)])
def test_spans_outside_of_the_sentence(span):
    with pytest.raises(ValueError, match="is no span of 5 words"):
        scored((CAT, [(0, 2), span]))


# ---- a second implementation ----------------------------------------------------------------------------------------


def by_the_book(pairs):
    """The convention in other words: tables of zeros and ones; precision and recall as fractions, and their mean."""
    values, total, by_label, by_length = [], np.zeros(3, int), defaultdict(lambda: [0, 0]), defaultdict(list)
    for gold, predicted in pairs:
        n = len(gold.words)
        if n <= 1:
            continue
        counts = np.triu(np.ones((n + 1, n + 1), bool), 2)
        counts[0, n] = False
        tables = {label: np.zeros_like(counts) for label in {plain_label(node[2]) for node in gold.nodes}}
        for start, end, label in gold.nodes:
            tables[plain_label(label)][start, end] = True
        guess = np.zeros_like(counts)
        for span in predicted:
            guess[span] = True
        truth, guess = np.any(list(tables.values()), axis=0) & counts, guess & counts
        of_all = np.array([(truth & guess).sum(), truth.sum(), guess.sum()])
        hits, relevant, retrieved = map(int, of_all)
        recall = Fraction(hits, relevant) if relevant else Fraction(1)
        precision = Fraction(hits, retrieved) if retrieved else Fraction(int(relevant == 0))
        value = 2 * precision * recall / (precision + recall) if precision + recall else Fraction(0)
        values.append(float(value))
        by_length[min((n - 1) // 10, 4)].append(float(value))
        total += of_all
        for label, table in tables.items():
            by_label[label][0] += int((table & guess).sum())
            by_label[label][1] += int((table & counts).sum())
    return values, total.tolist(), by_label, by_length


def random_pairs(count: int, seed: int):
    source = random.Random(seed)
    for _ in range(count):
        gold = random_tree(source, source.choice([0, 1, 2, 3, 5, 8, 13, 21, 31, 41, 50]))
        kind = source.random()
        if kind < 0.1:
            predicted = []
        elif kind < 0.5:
            other = random_tree(source, len(gold.words))
            predicted = [(i, j) for i, j, _ in other.nodes]
        else:
            predicted = [node[:2] for node in gold.nodes if source.random() < 0.7]
            predicted += random_branching(len(gold.words), source)[: source.randint(0, 20)]
        yield gold, predicted


def test_against_a_second_implementation():
    pairs = list(random_pairs(1000, seed=1))
    report = scored(*pairs).report()
    values, (right, truth, guess), by_label, by_length = by_the_book(pairs)
    assert report.s_f1 == 100 * math.fsum(values) / len(values)
    assert report.corpus_f1 == 100 * float(Fraction(2 * right, truth + guess))
    assert (report.hits, report.gold, report.predicted) == (right, truth, guess)
    assert (report.sentences, report.skipped) == (len(values), 1000 - len(values))
    assert {row.label: [row.recall, row.spans] for row in report.by_label} == {
        label: [100 * found / count, count] for label, (found, count) in by_label.items()
    }
    assert [row.spans for row in report.by_label] == sorted((row.spans for row in report.by_label), reverse=True)
    assert [(row.sentences, row.s_f1) for row in report.by_length] == [
        (len(by_length[k]), 100 * math.fsum(by_length[k]) / len(by_length[k])) for k in range(5)
    ]


def test_parts_make_the_whole():
    pairs = list(random_pairs(300, seed=2))
    whole, parts = scored(*pairs), [scored(*pairs[k::7]) for k in range(7)]
    assert sum(parts, SpanScore()).report() == whole.report()
    assert scored(*reversed(pairs)).report() == whole.report()
    added = Sums(*(sum(column) for column in zip(*(part.sums for part in parts), strict=True)))
    assert added[1:] == whole.sums[1:]
    assert added.s_f1 == pytest.approx(whole.report().s_f1, rel=1e-14)
    assert (added.corpus_f1, added.precision) == (whole.report().corpus_f1, whole.report().precision)


# ---- baselines ------------------------------------------------------------------------------------------------------


def test_branching():
    assert set(left_branching(4)) == {(0, 2), (0, 3), (0, 4)}
    assert set(right_branching(4)) == {(0, 4), (1, 4), (2, 4)}
    assert left_branching(1) == right_branching(1) == random_branching(1, random.Random(1)) == []
    assert left_branching(0) == right_branching(0) == random_branching(0, random.Random(1)) == []


def binary_trees(start: int, end: int):
    if end - start == 1:
        yield frozenset()
    for middle in range(start + 1, end):
        for left, right in itertools.product(binary_trees(start, middle), binary_trees(middle, end)):
            yield left | right | {(start, end)}


def first_split(spans, words: int) -> int:
    (split,) = (k for k in range(1, words) if {(0, k), (k, words)} <= {*spans, (0, 1), (words - 1, words)})
    return split


def test_random_trees_are_binary_and_their_splits_uniform():
    source = random.Random(3)
    drawn = [random_branching(5, source) for _ in range(4000)]
    assert {frozenset(spans) for spans in drawn} == set(binary_trees(0, 5))
    splits = Counter(first_split(spans, 5) for spans in drawn)
    assert all(abs(splits[k] / 4000 - 1 / 4) < 0.03 for k in (1, 2, 3, 4))
    assert random_branching(30, random.Random(1)) == random_branching(30, random.Random(1))


def test_the_best_binary_tree():
    source = random.Random(4)
    for _ in range(300):
        tree = without(random_tree(source, source.randint(0, 30)), PENN_PUNCTUATION)
        words, spans = len(tree.words), best_binary(tree)
        assert len(spans) == len(set(spans)) == max(words - 1, 0)
        assert {node[:2] for node in tree.nodes if node[1] - node[0] > 1} <= set(spans)
        assert not any(
            i < k < j < m for i, j in spans for k, m in spans
        )  # as many spans, none that cross: a binary tree
    for crossing in (((0, 2, "X"), (1, 3, "Y")), ((1, 4, "X"), (0, 2, "Y")), ((0, 3, "X"), (1, 2, "Y"), (2, 4, "Z"))):
        with pytest.raises(ValueError, match="crosses"):
            best_binary(Tree(("w",) * 4, ("T",) * 4, crossing))


def test_baselines_are_the_scores_of_their_trees():
    source = random.Random(5)
    trees = [random_tree(source, source.randint(0, 25)) for _ in range(200)]
    found = baselines(iter(trees))
    assert list(found) == ["left-branching", "right-branching", "random", "best binary"]
    for name, tree_of in (("left-branching", left_branching), ("right-branching", right_branching)):
        report = scored(*((tree, tree_of(len(tree.words))) for tree in trees)).report()
        assert (found[name].s_f1, found[name].corpus_f1) == (report.s_f1, report.corpus_f1)
    best = scored(*((tree, best_binary(tree)) for tree in trees)).report()
    assert (found["best binary"].s_f1, best.recall) == (best.s_f1, 100)
    drawn = []
    for seed in range(1, 6):
        own = random.Random(seed)
        score = scored(*((tree, random_branching(len(tree.words), own)) for tree in trees if len(tree.words) > 1))
        drawn.append(score.report().s_f1)
    assert found["random"].s_f1 == math.fsum(drawn) / 5
    assert found == baselines(trees)
