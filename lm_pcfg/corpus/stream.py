"""The stream of batches: epoch after epoch, dealt to any number of ranks, from a position that can be saved.

A plan knows the batches of every epoch by their numbers: `TextPlan` those of a text in memory, `ShardPlan`
(shards/plan.py) those of corpora in shards. Every rank computes the same plan, and deals with whole numbers only, so
that all ranks agree without a message and take the same number of steps.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from lm_pcfg.corpus.batches import Batch, BatchError, BatchOptions, empty_batch, make_batch, plan_batches
from lm_pcfg.corpus.lengths import KEPT, Limits
from lm_pcfg.corpus.sentences import Sentences

Interval = tuple[int, int]  # first batch, batch after the last
Dealing = tuple[int, int]  # number of ranks, rounds of one batch a rank that they have taken
Curriculum = Callable[[int], int | None]  # epoch -> most words (without <eos>) of a sentence in it; None: no limit


# ---- who gets which batches -----------------------------------------------------------------------------------------


def size(intervals: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in intervals)


def part(intervals: Sequence[Interval], start: int, stop: int) -> list[Interval]:
    """Return the start-th to stop-th of the numbers in the intervals."""
    result, before = [], 0
    for first, last in intervals:
        low, high = max(start - before, 0), min(stop - before, last - first)
        if low < high:
            result.append((first + low, first + high))
        before += last - first
    return result


def share(left: Sequence[Interval], rank: int, ranks: int, contiguous: bool) -> list[Interval]:
    """Return a rank's share of the batches left: neighbours, or every ranks-th. Shares differ by one batch at most."""
    if contiguous:
        total = size(left)
        return part(left, rank * total // ranks, (rank + 1) * total // ranks)
    numbers = [number for start, stop in left for number in range(start, stop)]
    return [(number, number + 1) for number in numbers[rank::ranks]]


def left_after(batches: int, dealings: Sequence[Dealing], contiguous: bool) -> list[Interval]:
    """Return the batches not taken yet. Each dealing shares out what the one before left: none is lost or repeated."""
    left: list[Interval] = [(0, batches)] if batches else []
    for ranks, rounds in dealings:
        shares = [share(left, rank, ranks, contiguous) for rank in range(ranks)]
        left = _merged(sorted(interval for own in shares for interval in part(own, rounds, size(own))))
    return left


def _merged(intervals: Sequence[Interval]) -> list[Interval]:
    result: list[Interval] = []
    for start, stop in intervals:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return result


# ---- what is in an epoch --------------------------------------------------------------------------------------------


@dataclass
class Losses:
    """What this rank should have given out and could not, under on_error: skip."""

    lines: int = 0
    files: list[str] = field(default_factory=list)


class Plan(ABC):
    """The batches of every epoch, numbered from 0: the same on every rank."""

    options: BatchOptions
    contiguous: bool  # ranks take neighbouring batches, so that each reads other blocks; otherwise they take turns
    losses: Losses | None = None  # None: nothing can get lost

    @abstractmethod
    def count(self, epoch: int) -> int:
        """How many batches an epoch has; an epoch without any is an error."""

    @abstractmethod
    def batches(self, epoch: int, intervals: Sequence[Interval]) -> Iterator[Batch]:
        """Yield the batches with these numbers."""

    @abstractmethod
    def costliest(self, epoch: int, most: int) -> list[Batch]:
        """Return up to `most` batches of an epoch, the most expensive ones, in order of decreasing cost."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of what the batches depend on, except the curriculum. `accumulate` only groups batches."""

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End the processes that read ahead, if there are any."""


class TextPlan(Plan):
    """Plans a text in memory. Batches of an epoch are seeded by (seed, epoch), and ranks take turns."""

    contiguous = False

    def __init__(
        self, sentences: Sentences, options: BatchOptions, *, seed: int = 0, curriculum: Curriculum | None = None,
        bracketed_epochs: float | None = None,
    ) -> None:  # fmt: skip
        """bracketed_epochs: for so many epochs batches have the brackets of the sentences; None: always."""
        if len(sentences) == 0:
            raise BatchError("there are no sentences to make batches of; check the text and data.max_length")
        self.sentences, self.options, self.seed = sentences, options, seed
        self._curriculum = curriculum or (lambda epoch: None)
        self._bracketed_epochs = bracketed_epochs
        self._counts: dict[int | None, int] = {}  # by maximum length

    def _indices(self, epoch: int) -> list[np.ndarray]:
        """Return the indices of the sentences of each batch."""
        max_length, sentences = self._curriculum(epoch), self.sentences
        kept = np.flatnonzero(Limits(max_length).judge(sentences.word_lengths, sentences.end_of_sentence) == KEPT)
        if len(kept) == 0:
            raise BatchError(
                f"epoch {epoch} has no sentences of at most {max_length} words (the shortest has "
                f"{int(sentences.word_lengths.min())}); raise data.curriculum.start"
            )
        plan = plan_batches(sentences.lengths[kept], self.options, (self.seed, epoch))
        return [kept[indices] for indices in plan]

    def count(self, epoch: int) -> int:
        max_length = self._curriculum(epoch)
        if max_length not in self._counts:
            self._counts[max_length] = len(self._indices(epoch))
        return self._counts[max_length]

    def batches(self, epoch: int, intervals: Sequence[Interval]) -> Iterator[Batch]:
        plan = self._indices(epoch)
        for start, stop in intervals:
            for number in range(start, stop):
                yield make_batch(self.sentences, plan[number], brackets=self._bracketed(epoch + number / len(plan)))

    def _bracketed(self, epochs: float) -> bool:
        """Return whether batches have brackets after so many epochs."""
        return self._bracketed_epochs is None or epochs < self._bracketed_epochs

    def costliest(self, epoch: int, most: int) -> list[Batch]:
        lengths = self.sentences.lengths
        plan = sorted(self._indices(epoch), key=lambda indices: -int((lengths[indices] ** 2).sum()))
        return [make_batch(self.sentences, indices, brackets=self._bracketed(epoch)) for indices in plan[:most]]

    @cached_property
    def fingerprint(self) -> str:
        # True: older versions had a switch `shuffle` here, and positions that were saved must still fit.
        text = f"{self.sentences.fingerprint} {self.options.by} {self.options.size} {self.seed} True"
        if self.sentences.limits is not None:
            brackets = hashlib.sha256(np.ascontiguousarray(self.sentences.limits, dtype="<i4").data)
            text += f" {brackets.hexdigest()} {self._bracketed_epochs}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- the stream -----------------------------------------------------------------------------------------------------


class BatchStream:
    """One rank's batches, epoch after epoch without end.

    Ranks take batches in rounds of one each, so that all take equally many: a rank whose share is used up before
    another's gets an empty batch. A round never crosses into the next epoch.
    """

    def __init__(self, plan: Plan, *, rank: int = 0, world_size: int = 1) -> None:
        if not 0 <= rank < world_size:
            raise BatchError(f"rank {rank} should be between 0 and world_size - 1 = {world_size - 1}")
        self.plan, self.rank, self.world_size = plan, rank, world_size
        self._epoch = self._round = self._left = 0
        self._earlier: list[Dealing] = []
        self._own: Iterator[Batch] = iter(())
        self._deal(epoch=0)

    def _deal(self, epoch: int, dealings: Sequence[Dealing] = ()) -> None:
        """Share out what is left of an epoch after some dealings, of which the last may still be under way."""
        self._epoch, self._earlier, self._round = epoch, list(dealings), 0
        if self._earlier and self._earlier[-1][0] == self.world_size:
            _, self._round = self._earlier.pop()
        left = left_after(self.plan.count(epoch), self._earlier, self.plan.contiguous)
        self._left = size(left)  # batches that this dealing gives out, over all ranks
        own = share(left, self.rank, self.world_size, self.plan.contiguous)
        self._own = self.plan.batches(epoch, part(own, self._round, size(own)))

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._epoch

    @property
    def _rounds_left(self) -> int:
        return -(-self._left // self.world_size) - self._round

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return this rank's next batch."""
        batch = next(self._own, None) or empty_batch()
        self._round += 1
        if self._rounds_left <= 0:
            self._deal(self._epoch + 1)
        return batch

    def next_step(self) -> list[Batch]:
        """Return `accumulate` batches for one optimizer step; at the end of an epoch the missing ones are empty."""
        epoch = self._epoch
        batches = [next(self)]
        while len(batches) < self.plan.options.accumulate:
            batches.append(next(self) if self._epoch == epoch else empty_batch())
        return batches

    def costliest_step(self, epoch: int) -> list[Batch]:
        """Return the `accumulate` most expensive batches of an epoch as one step; the position does not move."""
        return self.plan.costliest(epoch, self.plan.options.accumulate)

    def batches_per_epoch(self, epoch: int) -> int:
        """How many batches an epoch has, over all ranks."""
        return self.plan.count(epoch)

    def steps_per_epoch(self, epoch: int) -> int:
        """How many optimizer steps an epoch has, at this number of ranks."""
        return -(-self.plan.count(epoch) // (self.world_size * self.plan.options.accumulate))

    def steps_left(self, epochs: int) -> int:
        """How many optimizer steps are left to the end of `epochs` epochs, at this number of ranks."""
        if self._epoch >= epochs:
            return 0
        steps = -(-self._rounds_left // self.plan.options.accumulate)
        return steps + sum(self.steps_per_epoch(epoch) for epoch in range(self._epoch + 1, epochs))

    def state(self) -> dict[str, Any]:
        """Return the position as JSON: the same on every rank, and valid for any number of ranks.

        batch: how many batches of the epoch all ranks together were given. Where ranks take turns, this is enough;
        contiguous shares also need the dealings they come from.
        """
        batches = self.plan.count(self._epoch)
        taken = batches - self._left + min(self._left, self._round * self.world_size)
        state: dict[str, Any] = {"epoch": self._epoch, "batch": taken, "batches": batches}
        if self.plan.contiguous:
            dealings = [*self._earlier, (self.world_size, self._round)] if self._round else self._earlier
            state["dealings"] = [list(dealing) for dealing in dealings]
        return {**state, "plan": self.plan.fingerprint}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken: the same text, options and seed, any number of ranks or workers."""
        epoch, batch = int(state["epoch"]), int(state["batch"])
        mine = {"plan": self.plan.fingerprint, "batches": self.plan.count(epoch)}
        if batch and any(state[key] != mine[key] for key in mine):  # any plan has the start of an epoch
            raise BatchError(
                f"the saved position (epoch {epoch}, batch {batch}) belongs to other data or batch settings: "
                "resume with the data, brackets, vocabulary, seed, curriculum and batches of the run, or start anew"
            )
        # Batches that were taken in turns leave the same as if one rank had taken them all.
        dealings = state.get("dealings", [(1, batch)]) if batch else []
        self._deal(epoch, [(int(ranks), int(rounds)) for ranks, rounds in dealings])

    def close(self) -> None:
        self.plan.close()
