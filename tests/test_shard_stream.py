"""Streams of shards: every line once an epoch on any number of ranks and workers, exact resume, mixtures, even cost."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lm_pcfg.corpus.batches import BatchError, BatchOptions, batch_hash, count_batches, plan_batches
from lm_pcfg.corpus.lengths import INVALID, Histogram, Limits
from lm_pcfg.corpus.shards import loader
from lm_pcfg.corpus.shards.blocks import Source, StreamedText
from lm_pcfg.corpus.shards.plan import Interleaving, ShardPlan
from lm_pcfg.corpus.stream import BatchStream, left_after, size
from shards import NUMBERS, MemoryCorpus, lines_of, take_epoch, threads_as_workers

LIMITS = Limits(10, 2)
corpora = st.builds(
    MemoryCorpus,
    st.lists(st.lists(st.integers(0, 12), max_size=20), min_size=1, max_size=17).filter(
        lambda shards: any(2 <= length <= 10 for lengths in shards for length in lengths)
    ),
    block_lines=st.integers(1, 30),
    forward_only=st.booleans(),
)
batch_options = st.builds(
    BatchOptions, by=st.sampled_from(["sentences", "cost"]), sentences=st.integers(1, 6), cost=st.integers(1, 400),
    accumulate=st.integers(1, 3),
)  # fmt: skip


@pytest.fixture(autouse=True)
def quick_workers(monkeypatch):
    monkeypatch.setattr(loader, "make_pool", threads_as_workers)


def streams_of(corpus, options, ranks: int, workers: int = 0, limits=LIMITS, **arguments) -> list[BatchStream]:
    text = StreamedText(corpus if isinstance(corpus, list) else [Source(corpus)], NUMBERS, limits)
    plans = [ShardPlan(text, options, workers=workers, **arguments) for _ in range(ranks)]
    return [BatchStream(plan, rank=rank, world_size=ranks) for rank, plan in enumerate(plans)]


def expected_lines(corpus: MemoryCorpus, most: int = 10) -> list[int]:
    lengths = [length for shard in corpus.shards for length in shard]
    return [line for line, length in enumerate(lengths) if 2 <= length <= most]


# ---- every line once ------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=120)
@given(corpora, batch_options, st.integers(1, 8), st.integers(0, 3), st.integers(0, 2**40))
def test_every_line_once_an_epoch_and_as_many_steps_on_every_rank(corpus, options, ranks, workers, seed):
    streams = streams_of(corpus, options, ranks, workers, seed=seed)
    for epoch in range(2):
        parts = [take_epoch(stream) for stream in streams]
        assert len({len(part) for part in parts}) == 1
        lines = [line for part in parts for line in lines_of(part)]
        assert sorted(lines) == expected_lines(corpus)
        full = sum(batch.n_sentences > 0 for part in parts for batch in part)
        assert full == streams[0].batches_per_epoch(epoch)
        assert len(parts[0]) == -(-full // ranks)
        assert len({json.dumps(stream.state()) for stream in streams}) == 1
    for stream in streams:
        stream.close()


@settings(deadline=None, max_examples=60)
@given(corpora, batch_options, st.integers(1, 8))
def test_steps_do_not_cross_epochs(corpus, options, ranks):
    streams = streams_of(corpus, options, ranks)
    for epoch in range(2):
        lines: list[int] = []
        for _ in range(streams[0].steps_per_epoch(epoch)):
            steps = [stream.next_step() for stream in streams]
            assert {len(step) for step in steps} == {options.accumulate}
            lines += [line for step in steps for line in lines_of(step)]
        assert sorted(lines) == expected_lines(corpus)
        assert {stream.epoch for stream in streams} == {epoch + 1}


def test_the_words_of_a_batch_are_those_of_its_lines():
    explicit = NUMBERS.with_end_of_sentence()
    for vocabulary in (NUMBERS, explicit):
        corpus = MemoryCorpus([[3, 5, 4], [7]], block_lines=2, vocabulary=vocabulary)
        stream = BatchStream(ShardPlan(StreamedText([Source(corpus)], vocabulary), BatchOptions(sentences=2)))
        for batch in take_epoch(stream):
            at = 0
            for line, length in zip(batch.lines.tolist(), batch.lengths, strict=True):
                ids = batch.words[at : at + length].tolist()
                if vocabulary is explicit:
                    assert ids.pop() == explicit.end_id
                    ids = [id - 1 if id > 1 else id for id in ids]
                assert ids == [(line + k) % 50 for k in range(len(ids))]
                at += length
            assert batch.n_words == at - (len(batch.lengths) if vocabulary is explicit else 0)


def test_a_closed_stream_ends_its_workers(monkeypatch):
    pools = []
    monkeypatch.setattr(loader, "make_pool", lambda *given: pools.append(threads_as_workers(*given)) or pools[-1])
    (stream,) = streams_of(MemoryCorpus([[3, 5, 4] * 8], block_lines=8), BatchOptions(sentences=3), 1, workers=1)
    stream.next_step()
    stream.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pools[0].submit(len, "")


def test_batches_do_not_depend_on_the_workers_and_do_on_seed_and_epoch():
    corpus = MemoryCorpus([[3, 5, 4, 8, 2] * 8] * 5, block_lines=16)
    options = BatchOptions(sentences=3)

    def hashes(workers: int, seed: int = 0) -> list[list[str]]:
        (stream,) = streams_of(corpus, options, 1, workers, seed=seed)
        return [[batch_hash(batch) for batch in take_epoch(stream)] for _ in range(2)]

    first, second = hashes(0)
    assert hashes(1) == hashes(3) == [first, second]
    assert set(first) != set(second)
    assert set(hashes(0, seed=1)[0]) != set(first)


def test_blocks_of_a_shard_that_is_read_forward_keep_their_order():
    corpus = MemoryCorpus([[4] * 40, [4] * 40], block_lines=8, forward_only=True)
    (stream,) = streams_of(corpus, BatchOptions(sentences=8), 1)
    blocks = [min(batch.lines.tolist()) // 8 for batch in take_epoch(stream)]
    assert sorted(blocks) == list(range(10))
    assert [block for block in blocks if block < 5] == [0, 1, 2, 3, 4]
    assert [block for block in blocks if block >= 5] == [5, 6, 7, 8, 9]


# ---- resume ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(st.data(), corpora, batch_options, st.integers(1, 8), st.integers(0, 3))
def test_resume_after_any_batch_continues_with_the_same_hashes(data, corpus, options, ranks, workers):
    def curriculum(epoch: int) -> int:
        return 4 + 3 * epoch if any(2 <= n <= 4 for shard in corpus.shards for n in shard) else 10

    rank = data.draw(st.integers(0, ranks - 1))
    stream = streams_of(corpus, options, ranks, curriculum=curriculum)[rank]
    states, hashes = [], []
    while stream.epoch < 3:
        states.append(stream.state())
        hashes.append(batch_hash(next(stream)))
    stop = data.draw(st.integers(0, len(states) - 1))
    resumed = streams_of(corpus, options, ranks, workers, curriculum=curriculum)[rank]
    resumed.restore(json.loads(json.dumps(states[stop])))
    assert resumed.state() == states[stop]
    assert [batch_hash(next(resumed)) for _ in range(stop, len(states))] == hashes[stop:]
    resumed.close()


@settings(deadline=None, max_examples=80)
@given(corpora, batch_options, st.lists(st.tuples(st.integers(1, 8), st.integers(0, 6)), min_size=1, max_size=4))
def test_nothing_is_lost_or_repeated_when_the_number_of_ranks_changes(corpus, options, dealings):
    lines: list[int] = []
    state = None
    for ranks, rounds in [*dealings, (dealings[0][0], None)]:
        streams = streams_of(corpus, options, ranks)
        if state is not None:
            for stream in streams:
                stream.restore(json.loads(json.dumps(state)))
        if rounds is None:
            lines += [line for stream in streams for line in lines_of(take_epoch(stream))]
            break
        for _ in range(rounds):
            if streams[0].epoch == 0:
                lines += [line for stream in streams for line in lines_of([next(stream)])]
        if streams[0].epoch > 0:
            break
        state = streams[0].state()
        left = left_after(state["batches"], [tuple(pair) for pair in state["dealings"]], contiguous=True)
        assert state["batch"] == state["batches"] - size(left)
    assert sorted(lines) == expected_lines(corpus)


def test_position_of_other_data_is_refused():
    corpus, options = MemoryCorpus([[4] * 20], block_lines=8), BatchOptions(sentences=4)
    (stream,) = streams_of(corpus, options, 1)
    next(stream)
    state = stream.state()
    others = [
        streams_of(corpus, BatchOptions(sentences=5), 1)[0],
        streams_of(corpus, options, 1, seed=3)[0],
        streams_of(MemoryCorpus([[4] * 19 + [5]], block_lines=8), options, 1)[0],
        streams_of([Source(corpus, Fraction(2))], options, 1)[0],
    ]
    for other in others:
        with pytest.raises(BatchError, match="other data or batch settings"):
            other.restore(state)
    streams_of(corpus, BatchOptions(sentences=4, accumulate=3), 1)[0].restore(state)
    others[0].restore(streams_of(corpus, options, 1)[0].state())  # the start of an epoch is the same anywhere


def test_a_position_of_an_earlier_version_is_restored():
    """As checkpoints have it: rounds by number of ranks, and a hash of corpora, weights, limits, options and seed."""
    sources = [Source(MemoryCorpus([[4, 2, 3] * 5], 8)), Source(MemoryCorpus([[5] * 8], 8), Fraction(3, 2))]
    state = {"epoch": 1, "batch": 3, "batches": 7, "dealings": [[2, 1], [1, 1]], "plan": "aafc1051404124d5"}
    (stream,) = streams_of(sources, BatchOptions(sentences=4), 1, seed=7)
    stream.restore(state)
    assert stream.state() == state
    assert batch_hash(next(stream)).startswith("1195c59069f845bc")


# ---- mixtures -------------------------------------------------------------------------------------------------------


def test_a_mixture_reads_each_corpus_as_often_as_its_weight_says():
    corpora = [MemoryCorpus([[4] * 30], 8), MemoryCorpus([[5] * 20], 8), MemoryCorpus([[6] * 40], 8)]
    weights = [Fraction(1), Fraction(2), Fraction(1, 4)]
    sources = [Source(corpus, weight) for corpus, weight in zip(corpora, weights, strict=True)]
    options = BatchOptions(sentences=1)
    streams = streams_of(sources, options, 3)
    seen: Counter[int] = Counter()
    for epoch in range(4):
        lines = [line for stream in streams for line in lines_of(take_epoch(stream))]
        here = Counter(lines)
        assert all(here[line] == 1 for line in range(30))
        assert all(here[line] == 2 for line in range(30, 50))
        assert sum(here[line] for line in range(50, 90)) == 10
        assert streams[0].epoch == epoch + 1
        seen.update(lines)
    assert all(seen[line] == 1 for line in range(50, 90))  # four quarters are a whole
    (alone,) = streams_of(sources, options, 1)
    kinds = [batch.lengths[0] for batch in take_epoch(alone)]
    for start in range(0, 80, 8):  # 30 : 40 : 10 throughout
        assert [Counter(kinds[start : start + 8])[length] for length in (4, 5, 6)] == pytest.approx([3, 4, 1], abs=1)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(corpora, st.fractions(Fraction(1, 5), 3, max_denominator=7)), min_size=1, max_size=3),
       batch_options, st.integers(1, 4), st.integers(0, 12))  # fmt: skip
def test_mixtures_resume_too(weighted, options, ranks, stop):
    sources = [Source(corpus, weight) for corpus, weight in weighted]
    sources.append(Source(MemoryCorpus([[4, 5]], 4)))  # a fifth of one batch is none, and an epoch has some
    streams = streams_of(sources, options, ranks)
    for _ in range(stop):
        for stream in streams:
            next(stream)
    state = json.loads(json.dumps(streams[0].state()))
    for old, new in zip(streams, streams_of(sources, options, ranks), strict=True):
        new.restore(state)
        assert [batch_hash(next(new)) for _ in range(6)] == [batch_hash(next(old)) for _ in range(6)]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any))
def test_interleaving_takes_one_batch_at_a_time_and_all_in_the_end(counts):
    mixed = Interleaving(tuple(counts))
    taken = [mixed.taken(number) for number in range(mixed.total + 1)]
    assert taken[0] == (0,) * len(counts)
    assert taken[-1] == tuple(counts)
    for number, (before, after) in enumerate(pairwise(taken)):
        assert sorted(np.subtract(after, before).tolist()) == [0] * (len(counts) - 1) + [1]
        for own, count in zip(after, counts, strict=True):
            assert abs(own - (number + 1) * count / mixed.total) <= len(counts)


# ---- counts and cost ------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), max_size=120), batch_options, st.booleans())
@example([10] * 5, BatchOptions(by="cost", cost=400), False)
def test_batches_are_counted_without_the_lines(lengths, options, ends):
    array = np.array(lengths, dtype=np.int64)
    plan = plan_batches(array + int(ends), options, (0, 0))
    assert count_batches(Histogram.of(array), options, ends) == len(plan)


def test_step_costs_are_even_on_ptb_like_lengths():
    """The default budget, sentences of up to 40 words, blocks as `prepare` makes them."""
    lengths = np.random.default_rng(0).gamma(4.3, 4.9, size=42_068).round().astype(int).clip(1, 80).tolist()
    corpus = MemoryCorpus([lengths[:30_000], lengths[30_000:]], block_lines=16_384)
    (stream,) = streams_of(corpus, BatchOptions(by="cost"), 1, limits=Limits(40, 1))
    costs = [batch.cost for batch in take_epoch(stream)]
    assert max(costs) <= 1.5 * np.mean(costs)
    assert max(costs) <= 8000


def test_the_costliest_step_is_found_without_reading_all():
    corpus = MemoryCorpus([[3] * 64, [3] * 30 + [9] * 8 + [3] * 20], block_lines=16)
    for options in (BatchOptions(sentences=4, accumulate=2), BatchOptions(by="cost", cost=300, accumulate=2)):
        (stream,) = streams_of(corpus, options, 1)
        before = stream.state()
        step = stream.costliest_step(0)
        assert stream.state() == before
        costs = sorted((batch.cost for batch in take_epoch(stream)), reverse=True)
        assert len(step) == 2
        assert step[0].cost == costs[0] if options.by == "sentences" else step[0].cost >= 0.75 * costs[0]


def test_filtered_lines_are_counted_by_reason():
    histogram = Histogram.of(np.array([0, 1, 1, 5, 11, 12, 13, 3, INVALID]))
    for limits, ends, expected, kept in (
        (Limits(10, 2), False, (1, 3, 2), [3, 5]),
        (Limits(10, 2), True, (1, 3, 0), [1, 3, 5]),
        (Limits(None, 2), False, (1, 0, 2), [3, 5, 11, 12, 13]),
        (Limits(3, 4).at_most(1), False, (1, 5, 2), []),
    ):
        skipped = histogram.skipped(limits, ends)
        assert (skipped.blank, skipped.too_long, skipped.too_short) == expected
        assert histogram.kept(limits, ends).lengths.tolist() == kept
    assert histogram.unreadable == 1
    with pytest.raises(BatchError, match="no sentences"):
        streams_of(MemoryCorpus([[0, 1, 99]], block_lines=4), BatchOptions(), 1)
    with pytest.raises(BatchError, match="at most 5 words"):
        streams_of(MemoryCorpus([[9] * 3], 4), BatchOptions(), 1, curriculum=lambda epoch: 5)
