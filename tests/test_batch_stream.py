"""A stream of batches: every sentence once an epoch on any number of ranks, exact resume, curriculum, brackets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_pcfg.corpus.batches import Batch, BatchError, BatchOptions, batch_hash
from lm_pcfg.corpus.sentences import Damage, Sentences
from lm_pcfg.corpus.stream import BatchStream, Losses, TextPlan, left_after, part
from test_batches import batch_options, corpus, length_lists


def stream_of(
    sentences: Sentences, options: BatchOptions, *, rank: int = 0, world_size: int = 1, **arguments: Any
) -> BatchStream:
    return BatchStream(TextPlan(sentences, options, **arguments), rank=rank, world_size=world_size)


def take_epoch(stream: BatchStream) -> list[Batch]:
    epoch, batches = stream.epoch, []
    while stream.epoch == epoch:
        batches.append(next(stream))
    return batches


@settings(deadline=None)
@given(length_lists, batch_options, st.integers(1, 5))
def test_ranks_share_every_epoch(lengths: list[int], options: BatchOptions, world_size: int) -> None:
    sentences = corpus(lengths)
    streams = [stream_of(sentences, options, seed=1, rank=rank, world_size=world_size) for rank in range(world_size)]
    for epoch in range(2):
        count = streams[0].batches_per_epoch(epoch)
        parts = [take_epoch(stream) for stream in streams]
        assert {len(part) for part in parts} == {-(-count // world_size)}  # all ranks take the same number
        lines = [line for part in parts for batch in part for line in batch.lines.tolist()]
        assert sorted(lines) == list(range(len(lengths)))
        empty = sum(batch.n_sentences == 0 for part in parts for batch in part)
        assert empty == -count % world_size
        assert len({json.dumps(stream.state()) for stream in streams}) == 1
        assert all(stream.epoch == epoch + 1 and stream.state()["batch"] == 0 for stream in streams)


@settings(deadline=None)
@given(length_lists, batch_options, st.integers(1, 3))
def test_steps_do_not_cross_epochs(lengths: list[int], options: BatchOptions, world_size: int) -> None:
    sentences = corpus(lengths)
    streams = [stream_of(sentences, options, rank=rank, world_size=world_size) for rank in range(world_size)]
    for epoch in range(2):
        lines: list[int] = []
        for step in range(streams[0].steps_per_epoch(epoch)):
            assert streams[0].epoch == epoch, step
            for stream in streams:
                batches = stream.next_step()
                assert len(batches) == options.accumulate
                lines += [line for batch in batches for line in batch.lines.tolist()]
        assert sorted(lines) == list(range(len(lengths)))
        assert all(stream.state()["batch"] == 0 and stream.epoch == epoch + 1 for stream in streams)


@settings(deadline=None)
@given(st.data(), length_lists, batch_options)
def test_resume_continues_with_the_same_batches(data: st.DataObject, lengths: list[int], options: BatchOptions) -> None:
    sentences = corpus(lengths)

    def curriculum(epoch: int) -> int | None:
        return min(lengths) + 5 * epoch

    def new_stream() -> BatchStream:
        return stream_of(sentences, options, seed=7, curriculum=curriculum)

    total = sum(new_stream().batches_per_epoch(epoch) for epoch in range(3))
    stream, states, hashes = new_stream(), [], []
    for _ in range(total):
        states.append(stream.state())
        hashes.append(batch_hash(next(stream)))
    stop = data.draw(st.integers(0, total - 1))
    resumed = new_stream()
    resumed.restore(json.loads(json.dumps(states[stop])))
    assert resumed.state() == states[stop]
    assert [batch_hash(next(resumed)) for _ in range(stop, total)] == hashes[stop:]


@settings(max_examples=30, deadline=None)
@given(length_lists, batch_options, st.integers(1, 4), st.integers(1, 4), st.integers(0, 10))
def test_resume_at_another_world_size(
    lengths: list[int], options: BatchOptions, before: int, after: int, rounds: int
) -> None:
    sentences = corpus(lengths)
    old = [stream_of(sentences, options, rank=rank, world_size=before) for rank in range(before)]
    rounds = min(rounds, -(-old[0].batches_per_epoch(0) // before) - 1)  # stay within the epoch
    lines = [line for stream in old for _ in range(rounds) for line in next(stream).lines.tolist()]
    new = [stream_of(sentences, options, rank=rank, world_size=after) for rank in range(after)]
    for stream in new:
        stream.restore(old[0].state())
        lines += [line for batch in take_epoch(stream) for line in batch.lines.tolist()]
    assert sorted(lines) == list(range(len(lengths)))


def test_position_of_other_data_is_refused() -> None:
    sentences, options = corpus([3] * 20), BatchOptions(sentences=4)
    stream = stream_of(sentences, options, seed=1)
    next(stream)
    state = stream.state()
    others: list[Callable[[], BatchStream]] = [
        lambda: stream_of(sentences, BatchOptions(sentences=5), seed=1),
        lambda: stream_of(sentences, BatchOptions(by="cost", cost=36), seed=1),
        lambda: stream_of(sentences, options, seed=2),
        lambda: stream_of(corpus([3] * 19 + [4]), options, seed=1),
    ]
    for other in others:
        with pytest.raises(BatchError, match="other data or batch settings"):
            other().restore(state)
    # accumulation only groups batches, and the start of an epoch is the same place in any plan
    stream_of(sentences, BatchOptions(sentences=4, accumulate=3, cost=1), seed=1).restore(state)
    others[0]().restore(stream_of(sentences, options).state())


def test_batches_that_are_left_are_few_intervals() -> None:
    assert left_after(10, [(2, 2)], contiguous=False) == [(4, 10)]
    assert left_after(10, [(2, 2)], contiguous=True) == [(2, 5), (7, 10)]
    assert left_after(10, [(2, 2), (1, 2)], contiguous=True) == [(4, 5), (7, 10)]
    assert left_after(0, [], contiguous=True) == []
    assert part([(0, 2), (5, 9)], 2, 4) == [(5, 7)]
    assert part([(0, 2), (5, 9)], 1, 3) == [(1, 2), (5, 6)]


def test_length_curriculum() -> None:
    sentences = corpus([3, 4, 5, 6], end_of_sentence=True)  # 2 to 5 words
    stream = stream_of(sentences, BatchOptions(sentences=1), curriculum=lambda epoch: 3 + epoch)
    assert [stream.batches_per_epoch(epoch) for epoch in range(4)] == [2, 3, 4, 4]
    for epoch in range(4):
        batches = take_epoch(stream)
        assert len(batches) == stream.batches_per_epoch(epoch)
        assert max(batch.n_words for batch in batches) == min(3 + epoch, 5)
    with pytest.raises(BatchError, match="no sentences of at most 1 words"):
        stream_of(sentences, BatchOptions(), curriculum=lambda epoch: 1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_left_are_those_that_are_taken(world_size: int, accumulate: int) -> None:
    """... whatever was taken before, and however many batches the epochs have."""
    options = BatchOptions(sentences=1, accumulate=accumulate)
    stream = stream_of(
        corpus([3, 3, 4, 5, 5, 6, 6]), options, curriculum=lambda epoch: 3 + epoch, world_size=world_size
    )
    assert [stream.batches_per_epoch(epoch) for epoch in range(5)] == [2, 3, 5, 7, 7]
    expected = [stream.steps_per_epoch(epoch) for epoch in range(5)]
    assert expected == [-(-batches // (world_size * accumulate)) for batches in (2, 3, 5, 7, 7)]
    for epochs in (0, 1, 3, 5):
        assert stream.steps_left(epochs) == sum(expected[:epochs])
    left = sum(expected[:4])
    while stream.epoch < 4:
        assert stream.steps_left(4) == left
        stream.next_step()
        left -= 1
    assert (left, stream.steps_left(4), stream.steps_left(5)) == (0, 0, expected[4])


def test_the_costliest_batches_of_an_epoch() -> None:
    options = BatchOptions(sentences=2, accumulate=2)
    stream = stream_of(corpus([9, 1, 7, 2, 8, 3]), options, curriculum=lambda epoch: 8 + epoch)
    before = stream.state()
    assert [batch.cost for batch in stream.costliest_step(1)] == [64 + 81, 9 + 49]
    assert [sorted(batch.lengths) for batch in stream.costliest_step(0)] == [[7, 8], [2, 3]]
    assert stream.state() == before


@pytest.mark.parametrize("epochs", [None, 0.0, 1.0, 1.5])
def test_brackets_end_within_an_epoch(epochs: float | None) -> None:
    """Of two epochs of four batches, the first ones have brackets: after 1.5 epochs six of them."""
    sentences = corpus([3] * 8)
    sentences = replace(sentences, limits=np.arange(48, dtype=np.int32).reshape(24, 2))
    stream = stream_of(sentences, BatchOptions(sentences=2), bracketed_epochs=epochs)
    first = stream.costliest_step(1)[0]
    assert (first.limits is None) == (epochs in (0.0, 1.0))
    batches = take_epoch(stream) + take_epoch(stream)
    bracketed = 8 if epochs is None else int(4 * epochs)
    assert [batch.limits is not None for batch in batches] == [True] * bracketed + [False] * (8 - bracketed)
    for batch in batches[:bracketed]:
        assert batch.limits is not None
        assert batch.limits[:, 0].tolist() == [2 * word for word in batch.words.tolist()]
    plans = [stream_of(sentences, BatchOptions(), bracketed_epochs=other).plan for other in (None, 0.0, 1.0, 1.5)]
    assert len({plan.fingerprint for plan in plans}) == 4


def test_wrong_arguments() -> None:
    with pytest.raises(BatchError, match="no sentences"):
        stream_of(corpus([]), BatchOptions())
    with pytest.raises(BatchError, match="rank 2 should be between 0 and world_size - 1 = 1"):
        stream_of(corpus([1]), BatchOptions(), rank=2, world_size=2)
    for wrong in ({"by": "words"}, {"sentences": 0}, {"cost": 0}, {"accumulate": 0}):
        with pytest.raises(BatchError):
            BatchOptions(**wrong)  # type: ignore[arg-type]


def test_a_position_of_an_earlier_version_is_restored() -> None:
    """As checkpoints have it: the batches taken so far, and a hash of text, options and seed."""
    sentences, options = corpus([3, 5, 2, 4] * 5), BatchOptions(sentences=4)
    state = {"epoch": 1, "batch": 3, "batches": 5, "plan": "2b4879d3dcf0cb4e"}
    for world_size in (1, 2, 3):
        stream = stream_of(sentences, options, seed=7, world_size=world_size)
        stream.restore(state)
        assert stream.state() == state
        assert batch_hash(next(stream)).startswith("fb8897810e423ae9")


def test_the_costliest_batch_is_that_of_squares() -> None:
    stream = stream_of(corpus([1] * 7 + [5]), BatchOptions(by="cost", cost=25, accumulate=2))
    assert [batch.cost for batch in stream.costliest_step(0)] == [25, 7]


def test_positions_that_were_saved_still_fit() -> None:
    """Positions are saved with this hash; another one would refuse to resume every run there is."""
    assert TextPlan(corpus([3, 4, 5]), BatchOptions(sentences=2), seed=7).fingerprint == "fcec4a555b64b0ba"


def test_ranks_and_seeds_unless_others_are_given() -> None:
    sentences, options = corpus([3, 4, 5]), BatchOptions(sentences=2)
    assert TextPlan(sentences, options).fingerprint == TextPlan(sentences, options, seed=0).fingerprint
    stream = BatchStream(TextPlan(sentences, options))
    assert (stream.rank, stream.world_size, stream.epoch, Losses().lines, Damage().lines) == (0, 1, 0, 0, 0)
    for rank in (-1, 2):
        with pytest.raises(BatchError, match=rf"^rank {rank} should be between 0 and world_size - 1 = 1$"):
            BatchStream(TextPlan(sentences, options), rank=rank, world_size=2)
