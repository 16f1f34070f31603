"""Batches: every sentence in one of them, balanced cost, their contents; lengths and their histograms."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lm_pcfg.corpus.batches import (
    BatchOptions,
    batch_hash,
    count_batches,
    describe_lengths,
    empty_batch,
    make_batch,
    plan_batches,
)
from lm_pcfg.corpus.lengths import BLANK, KEPT, TOO_LONG, TOO_SHORT, UNREADABLE, Histogram, Limits, Skipped
from lm_pcfg.corpus.sentences import Sentences

length_lists = st.lists(st.integers(1, 40), min_size=1, max_size=120)
batch_options = st.builds(
    BatchOptions, by=st.sampled_from(["sentences", "cost"]), sentences=st.integers(1, 20),
    cost=st.integers(1, 5000), accumulate=st.integers(1, 4),
)  # fmt: skip


def corpus(lengths: list[int] | np.ndarray, end_of_sentence: bool = False) -> Sentences:
    """Sentences of these chart lengths with distinct ids."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.arange(offsets[-1], dtype=np.int32)
    numbers = np.arange(1, len(offsets), dtype=np.int64)
    return Sentences(ids=ids, offsets=offsets, line_numbers=numbers, end_of_sentence=end_of_sentence)


def ptb_like_lengths(count: int, longest: int) -> np.ndarray:
    """Mean 21 words, standard deviation 10, as in the Penn Treebank."""
    lengths = np.random.default_rng(0).gamma(4.3, 4.9, size=2 * count).round().astype(np.int64)
    return lengths[(lengths >= 1) & (lengths <= longest)][:count]


def costs_of(lengths: np.ndarray, plan: list[np.ndarray]) -> np.ndarray:
    return np.array([(lengths[batch] ** 2).sum() for batch in plan])


# ---- planning an epoch ----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(length_lists, batch_options, st.integers(0, 2**63), st.integers(0, 100), st.booleans())
def test_every_sentence_is_in_one_batch(
    lengths: list[int], options: BatchOptions, seed: int, epoch: int, shuffle: bool
) -> None:
    array = np.array(lengths)
    seeds = (seed, epoch) if shuffle else None
    plan = plan_batches(array, options, seeds)
    assert sorted(np.concatenate(plan).tolist()) == list(range(len(lengths)))
    if options.by == "sentences":
        sizes = sorted((len(batch) for batch in plan), reverse=True)
        assert sizes[:-1] == [options.sentences] * (len(sizes) - 1)
        assert 1 <= sizes[-1] <= options.sentences
    else:
        assert all(len(batch) == 1 or (array[batch] ** 2).sum() <= options.cost for batch in plan)
    # similar lengths: batches do not overlap, except at their ends
    ranges = sorted((int(array[batch].min()), int(array[batch].max())) for batch in plan)
    assert all(before[1] <= after[0] for before, after in pairwise(ranges))
    again = plan_batches(array, options, seeds)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in plan]


@settings(deadline=None)
@given(st.lists(st.integers(1, 12), min_size=5, max_size=120), st.integers(0, 200))
@example([10] * 5, 0)  # the budget takes 4: 3 and 2, not 4 and 1
def test_cost_is_balanced(lengths: list[int], above: int) -> None:
    """Where no sentence costs more than a quarter of the budget, 1.5 x the mean is never exceeded."""
    array = np.array(lengths)
    budget = 4 * max(lengths) ** 2 + above
    costs = costs_of(array, plan_batches(array, BatchOptions(by="cost", cost=budget), (0, 0)))
    assert costs.max() <= 1.5 * costs.mean()
    assert costs.max() <= budget


@pytest.mark.parametrize("budget", [1600, 3200, 6400, 8000, 25_600, 400_000])
@pytest.mark.parametrize("longest", [40, 82])
def test_cost_is_balanced_on_ptb_like_lengths(longest: int, budget: int) -> None:
    lengths = ptb_like_lengths(20_000, longest)
    plan = plan_batches(lengths, BatchOptions(by="cost", cost=budget), (0, 3))
    costs = costs_of(lengths, plan)
    oversized = costs > budget
    assert all(len(batch) == 1 for batch, over in zip(plan, oversized, strict=True) if over)
    within = costs[~oversized]
    assert within.max() <= 1.5 * within.mean()
    if budget >= 6400:
        assert within.max() <= 1.15 * within.mean()
        assert len(plan) <= 1.15 * (lengths**2).sum() / budget + 1  # the budget is used


def test_sentence_above_the_budget_is_alone() -> None:
    plan = plan_batches(np.array([50, 3, 3, 3, 60]), BatchOptions(by="cost", cost=100))
    assert [batch.tolist() for batch in plan] == [[1, 2, 3], [0], [4]]


def test_a_batch_in_words() -> None:
    assert describe_lengths([]) == "a batch without sentences"
    assert describe_lengths([1200]) == "a batch of one sentence of 1,200 words"
    assert describe_lengths([7, 7], "pieces") == "a batch of 2 sentences of 7 pieces, 14 in all"
    assert describe_lengths([9, 1000, 30]) == "a batch of 3 sentences of 9 to 1,000 words, 1,039 in all"


def test_blank_and_unreadable_lines_of_a_histogram() -> None:
    histogram = Histogram.of(np.array([3, -1, 0, 3, -1, 0, 5, 1]))
    assert (histogram.lines, histogram.words, histogram.unreadable) == (8, 12, 2)
    limits = Limits(max_length=4, min_length=2)
    assert histogram.kept(limits, ends=True).to_json() == [[1, 1], [3, 2]]
    assert histogram.kept(limits, ends=False).to_json() == [[3, 2]]
    assert histogram.skipped(limits, ends=False) == Skipped(blank=2, too_long=1, too_short=1)
    assert histogram.skipped(limits, ends=False).total == 4
    assert Histogram.from_json(histogram.to_json()) == histogram
    assert Limits(4, 2).at_most(3) == Limits(3, 2) == Limits(3, 2).at_most(None)
    assert Limits().at_most(7) == Limits(7)
    assert Limits().judge(np.array([-1, 0, 1, 10**6]), ends=False).tolist() == [1, 2, 0, 0]


def test_the_longest_lines_of_a_histogram() -> None:
    histogram = Histogram.of(np.array([3, 9, 9, 1, 9, 4]))
    assert [histogram.longest(count) for count in (0, 1, 4, 5, 99)] == [
        [], [9], [9, 9, 9, 4], [9, 9, 9, 4, 3], [9, 9, 9, 4, 3, 1],
    ]  # fmt: skip


def test_sums_of_histograms() -> None:
    one, other = Histogram.of(np.array([3, 1, 3])), Histogram.of(np.array([2, 3]))
    assert Histogram.sum([]) == Histogram.of(np.array([], dtype=np.int64))
    assert Histogram.sum([one]) == one
    assert Histogram.sum([one, other]).to_json() == [[1, 1], [2, 1], [3, 3]]


def test_sentences_by_their_numbers() -> None:
    sentences = corpus([2, 1, 3])
    assert [sentences[k].tolist() for k in (0, 2, -1, -3)] == [[0, 1], [3, 4, 5], [3, 4, 5], [0, 1]]
    for beyond in (3, -4):
        with pytest.raises(IndexError, match=f"sentence {beyond} of 3"):
            sentences[beyond]
    assert sentences.skipped == Skipped(blank=0, too_long=0, too_short=0)
    assert (sentences.damage.lines, sentences.unknown_id) == (0, 0)


def test_shuffling() -> None:
    lengths = ptb_like_lengths(1000, 40)

    def plan(seed: int, epoch: int) -> list[list[int]]:
        return [batch.tolist() for batch in plan_batches(lengths, BatchOptions(), (seed, epoch))]

    plans = [plan(0, 0), plan(0, 1), plan(1, 0)]
    assert plans[0] != plans[1]
    assert {frozenset(batch) for batch in plans[0]} != {frozenset(batch) for batch in plans[1]}  # new mixtures
    assert plans[0] != plans[2]
    means = [np.mean(lengths[batch]) for batch in plans[0]]
    assert means != sorted(means)  # batches in random order
    partial = [min(plan(0, epoch), key=len) for epoch in range(10)]
    assert all(len(batch) == 1000 % 16 for batch in partial)
    assert len({int(lengths[batch].max()) for batch in partial}) > 3  # not always the longest sentences
    in_order = plan_batches(lengths, BatchOptions())
    assert lengths[np.concatenate(in_order)].tolist() == sorted(lengths)


def test_no_sentences() -> None:
    for options in (BatchOptions(by="sentences"), BatchOptions(by="cost")):
        for seeds in (None, (0, 0)):
            assert plan_batches(np.array([], dtype=np.int64), options, seeds) == []


# ---- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("explicit", [False, True], ids=["implicit", "explicit"])
def test_batch_contents(explicit: bool) -> None:
    sentences = corpus([2, 3, 4], end_of_sentence=explicit)
    batch = make_batch(sentences, np.array([2, 0]))
    assert batch.words.tolist() == [5, 6, 7, 8, 0, 1]
    assert batch.words.dtype == np.int64
    assert batch.lengths == [4, 2]
    assert batch.lines.tolist() == [2, 0]
    assert batch.n_words == (4 if explicit else 6)
    assert batch.n_tokens == (6 if explicit else 8)
    assert batch.n_sentences == 2
    assert batch.cost == 20
    empty = make_batch(sentences, np.empty(0, dtype=np.int64))
    assert (empty.n_sentences, empty.n_words, empty.cost, len(empty.words)) == (0, 0, 0, 0)
    assert empty.words.dtype == np.int64


def test_hash_tells_batches_apart() -> None:
    sentences = corpus([2, 2, 4])
    orders = [[0, 1], [1, 0], [0], [2], []]
    hashes = {batch_hash(make_batch(sentences, np.array(order, dtype=np.int64))) for order in orders}
    assert len(hashes) == len(orders)
    assert batch_hash(make_batch(sentences, np.array([2]))) in hashes


def test_batches_unless_something_else_is_said() -> None:
    assert BatchOptions() == BatchOptions(by="sentences", sentences=16, cost=8000, accumulate=1)
    assert (Limits(), Skipped()) == (Limits(None, 1), Skipped(0, 0, 0))


def test_lines_are_judged_by_their_length() -> None:
    lengths = np.array([-1, 0, 1, 5, 6])
    assert Limits(5).judge(lengths, ends=False).tolist() == [UNREADABLE, BLANK, KEPT, KEPT, TOO_LONG]
    assert Limits(5, 2).judge(lengths, ends=False).tolist() == [UNREADABLE, BLANK, TOO_SHORT, KEPT, TOO_LONG]
    assert Limits(5, 2).judge(lengths, ends=True).tolist() == [UNREADABLE, BLANK, KEPT, KEPT, TOO_LONG]
    histogram = Histogram.of(np.array([-1, -1, 0, 2, 3, 3]))
    assert (histogram.lines, histogram.words, histogram.unreadable) == (6, 8, 2)
    assert [histogram.longest(count) for count in (0, 1, 3, 9)] == [[], [3], [3, 3, 2], [3, 3, 2, 0, -1, -1]]
    assert Histogram.sum([]).lines == 0


def test_batches_of_the_cheapest_lines_and_of_none() -> None:
    by_cost = BatchOptions(by="cost", cost=2)
    assert [count_batches(Histogram.of(np.ones(n)), by_cost, ends=False) for n in (0, 1, 2, 3, 4)] == [0, 1, 1, 2, 2]
    assert plan_batches(np.array([]), BatchOptions(), seeds=(0,)) == []
    nothing = empty_batch()
    assert (len(nothing.words), nothing.n_words, nothing.n_tokens, nothing.cost) == (0, 0, 0, 0)


def test_sentences_by_number() -> None:
    sentences = corpus([3, 4])
    assert (sentences.unknown_id, sentences.literal_unknown) == (0, 0)
    first, second = [0, 1, 2], [3, 4, 5, 6]
    assert [sentences[index].tolist() for index in (0, 1, -1, -2)] == [first, second, second, first]
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"^sentence {index} of 2$"):
            sentences[index]
    for literal, count in ((None, 1), (0, 1), (1, 0)):  # id 0 is there once
        assert replace(sentences, literal_unknown=literal).unknown_words.count == count
