"""Batches of sentences of similar length, epoch after epoch, with a position that can be saved and restored."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np

from lm_pcfg.corpus.sentences import Sentences
from lm_pcfg.errors import UserError

BatchBy = Literal["sentences", "cost"]


class BatchError(UserError, ValueError):
    """No batches can be made, or a saved position does not fit; the message is one line for the user."""


@dataclass(frozen=True)
class Batch:
    """Sentences packed one after another. A rank that is out of data gets one with no sentences."""

    words: np.ndarray  # int64 [sum(lengths)]: ids, with <eos> at the end of each sentence if ends are explicit
    lengths: list[int]  # what the chart sees, so with <eos>
    lines: np.ndarray  # int64 [sentences]: indices of the sentences in the corpus
    n_words: int  # without <eos>

    @property
    def n_sentences(self) -> int:
        return len(self.lengths)

    @property
    def n_tokens(self) -> int:
        """Words + lines: the denominator of perplexity, whether ends are explicit or not."""
        return self.n_words + self.n_sentences

    @property
    def cost(self) -> int:
        return sum(length * length for length in self.lengths)


@dataclass(frozen=True)
class BatchOptions:
    by: BatchBy = "sentences"
    sentences: int = 16  # sentences a batch, if by sentences
    cost: int = 8000  # budget of a batch, if by cost: the sum over its sentences of length squared
    accumulate: int = 1  # micro-batches a rank takes for one optimizer step

    def __post_init__(self) -> None:
        if self.by not in ("sentences", "cost"):
            raise BatchError(f"batch.by {self.by!r} should be 'sentences' or 'cost'")
        for name in ("sentences", "cost", "accumulate"):
            if getattr(self, name) < 1:
                raise BatchError(f"batch.{name} {getattr(self, name)} should be at least 1")


class BatchSource(Protocol):
    """What training needs of its data: `BatchStream` over a corpus in memory, or a stream of shards."""

    @property
    def epoch(self) -> int:
        """Of the next batch, from 0."""

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of one optimizer step; as many on every rank, empty ones where data ran out."""

    def steps_per_epoch(self, epoch: int) -> int:
        """Optimizer steps."""

    def batches_per_epoch(self, epoch: int) -> int:
        """Over all ranks."""

    def steps_left(self, epochs: int) -> int:
        """Optimizer steps from here to the end of so many epochs, at this number of ranks."""

    def costliest_step(self, epoch: int) -> list[Batch]:
        """The `accumulate` most expensive batches of an epoch, as one step; the position stays where it is."""

    def state(self) -> dict[str, Any]:
        """The position, as JSON: at least `epoch` and `batch`, the batches of it that were given out to all ranks."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""


# ---- planning an epoch ----------------------------------------------------------------------------------------------


def plan_epoch(
    lengths: np.ndarray,
    *,
    by: BatchBy = "sentences",
    sentences: int = 16,
    cost: int = 8000,
    seed: int = 0,
    epoch: int = 0,
    block: tuple[int, ...] = (),
    shuffle: bool = True,
) -> list[np.ndarray]:
    """Indices of the sentences of each batch; every sentence is in exactly one. Seeded by (seed, epoch, *block).

    Shuffling before a stable sort by length makes new batches of similar lengths each epoch. The number of batches and
    the lengths in them do not depend on seed and epoch. Without shuffling, batches go from short to long sentences.
    """
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch, *block])))
    lengths = np.asarray(lengths, dtype=np.int64)
    order = generator.permutation(len(lengths)) if shuffle else np.arange(len(lengths))
    order = order[np.argsort(lengths[order], kind="stable")]
    if by == "sentences":
        cuts = _cut_by_count(len(order), sentences)
        if shuffle and len(cuts) > 1:
            # The smaller last batch moves to a random place: the longest sentences would get more than their weight.
            sizes = np.diff(cuts)
            place = int(generator.integers(len(sizes)))
            sizes[place], sizes[-1] = sizes[-1], sizes[place]
            cuts = [0, *np.cumsum(sizes).tolist()]
    else:
        cuts = _cut_by_cost(lengths[order] ** 2, cost)
    batches = [order[start:end] for start, end in pairwise(cuts)]
    if shuffle:
        batches = [batches[k] for k in generator.permutation(len(batches))]
    return batches


def _cut_by_count(total: int, count: int) -> list[int]:
    return [*range(0, total, count), total] if total else [0]


def _cut_by_cost(costs: np.ndarray, budget: int) -> list[int]:
    """Where to cut ascending costs so that no batch costs more than the budget, except one sentence that alone does.

    As few batches as the budget allows; then the smallest limit that needs no more of them, so that there is no small
    remainder: with m the largest cost of a sentence, no batch is above mean + m. So the most expensive batch costs
    at most 1.5 x the mean where m <= budget / 4.
    """
    total = len(costs)
    fitting = int(np.searchsorted(costs, budget, side="right"))  # the others are batches of their own
    sums = [0, *np.cumsum(costs[:fitting]).tolist()]

    def cut(limit: int, at_most: int) -> list[int] | None:
        cuts = [0]
        while cuts[-1] < fitting:
            if len(cuts) > at_most:
                return None
            # the last end with sums[end] - sums[start] <= limit
            cuts.append(bisect_right(sums, sums[cuts[-1]] + limit) - 1)
        return cuts

    best = cut(budget, at_most=fitting) or [0]
    batches = len(best) - 1
    if batches > 1:
        low = max(int(costs[fitting - 1]), -(-sums[-1] // batches))  # below this no cut can do
        high = budget
        while low < high:
            middle = (low + high) // 2
            cuts = cut(middle, at_most=batches)
            if cuts is None:
                low = middle + 1
            else:
                best, high = cuts, middle
    return best + list(range(fitting + 1, total + 1))


# ---- streaming batches ----------------------------------------------------------------------------------------------


class BatchStream:
    """Batches of a corpus, epoch after epoch without end, dealt out to ranks.

    Every rank computes the same plan. Batches are taken in rounds of one a rank: rank r gets batch `position + r` of
    the epoch, or an empty one past its end, and a round never crosses into the next epoch. The saved position counts
    the batches of all ranks, so it can be restored at another world size.
    """

    def __init__(
        self,
        sentences: Sentences,
        options: BatchOptions,
        *,
        seed: int = 0,
        max_length_for_epoch: Callable[[int], int | None] | None = None,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
    ) -> None:
        """max_length_for_epoch: length curriculum, the most words (without `<eos>`) of a sentence in an epoch."""
        if not 0 <= rank < world_size:
            raise BatchError(f"rank {rank} should be between 0 and world_size - 1 = {world_size - 1}")
        if len(sentences) == 0:
            raise BatchError("there are no sentences to make batches of; check the text and data.max_length")
        self.sentences = sentences
        self.options = options
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self._max_length_for_epoch = max_length_for_epoch or (lambda epoch: None)
        self._lengths = sentences.lengths
        self._word_lengths = sentences.word_lengths
        self._batch_counts: dict[int | None, int] = {}  # by maximum length
        self._epoch = 0
        self._position = 0  # batches of this epoch that were given out, over all ranks
        self._plan: list[np.ndarray] | None = None  # of this epoch; made when needed

    @property
    def epoch(self) -> int:
        """Of the next batch, from 0."""
        return self._epoch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """This rank's next batch."""
        if self._plan is None:
            self._plan = self._plan_of(self._epoch)
        mine = self._position + self.rank
        indices = self._plan[mine] if mine < len(self._plan) else np.empty(0, dtype=np.int64)
        self._position += self.world_size
        if self._position >= len(self._plan):
            self._epoch, self._position, self._plan = self._epoch + 1, 0, None
        return make_batch(self.sentences, indices)

    def next_step(self) -> list[Batch]:
        """`accumulate` batches for one optimizer step; at the end of an epoch the missing ones are empty."""
        epoch = self._epoch
        batches = [next(self)]
        while len(batches) < self.options.accumulate:
            batches.append(next(self) if self._epoch == epoch else make_batch(self.sentences, np.empty(0, np.int64)))
        return batches

    def costliest_step(self, epoch: int) -> list[Batch]:
        """The `accumulate` most expensive batches of an epoch, as one step; the position stays where it is."""
        plan = sorted(self._plan_of(epoch), key=lambda indices: -int((self._lengths[indices] ** 2).sum()))
        return [make_batch(self.sentences, indices) for indices in plan[: self.options.accumulate]]

    def batches_per_epoch(self, epoch: int) -> int:
        """Over all ranks."""
        max_length = self._max_length_for_epoch(epoch)
        if max_length not in self._batch_counts:
            self._batch_counts[max_length] = len(self._plan_of(epoch))
        return self._batch_counts[max_length]

    def steps_per_epoch(self, epoch: int) -> int:
        """Optimizer steps."""
        return -(-self.batches_per_epoch(epoch) // (self.world_size * self.options.accumulate))

    def steps_left(self, epochs: int) -> int:
        """Optimizer steps from here to the end of so many epochs, at this number of ranks."""
        if self._epoch >= epochs:
            return 0
        left = self.batches_per_epoch(self._epoch) - self._position
        steps = -(-left // (self.world_size * self.options.accumulate))
        return steps + sum(self.steps_per_epoch(epoch) for epoch in range(self._epoch + 1, epochs))

    def state(self) -> dict[str, Any]:
        """The position, as JSON: the same on every rank, and good for any world size."""
        return {
            "epoch": self._epoch,
            "batch": self._position,
            "batches": self.batches_per_epoch(self._epoch),
            "plan": self._plan_fingerprint(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken: the same sentences, options and seed, any world size."""
        epoch, batch = int(state["epoch"]), int(state["batch"])
        if batch:  # the start of an epoch is the same place in any plan
            same_plan = state["plan"] == self._plan_fingerprint()
            if not same_plan or state["batches"] != self.batches_per_epoch(epoch):
                raise BatchError(
                    f"the saved position (epoch {epoch}, batch {batch}) belongs to other data or batch settings: "
                    "resume with the data, vocabulary, seed, curriculum and batch settings of the run, or start anew"
                )
        self._epoch, self._position, self._plan = epoch, batch, None

    def _plan_of(self, epoch: int) -> list[np.ndarray]:
        max_length = self._max_length_for_epoch(epoch)
        if max_length is None:
            kept = np.arange(len(self._lengths))
        else:
            kept = np.flatnonzero(self._word_lengths <= max_length)
            if len(kept) == 0:
                raise BatchError(
                    f"epoch {epoch} has no sentences of at most {max_length} words (the shortest has "
                    f"{int(self._word_lengths.min())}); raise data.curriculum.start"
                )
        options = self.options
        plan = plan_epoch(
            self._lengths[kept], by=options.by, sentences=options.sentences, cost=options.cost,
            seed=self.seed, epoch=epoch, shuffle=self.shuffle,
        )  # fmt: skip
        return [kept[indices] for indices in plan]

    def _plan_fingerprint(self) -> str:
        """Of what the plan of an epoch depends on, except the curriculum. `accumulate` only groups batches."""
        options = self.options
        size = options.sentences if options.by == "sentences" else options.cost
        text = f"{self.sentences.fingerprint} {options.by} {size} {self.seed} {self.shuffle}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_batch(sentences: Sentences, indices: np.ndarray) -> Batch:
    """The sentences with these indices."""
    words, lengths = sentences.gather(indices)
    ends = len(indices) if sentences.end_of_sentence else 0
    return Batch(words=words, lengths=lengths.tolist(), lines=indices, n_words=len(words) - ends)


def batch_hash(batch: Batch) -> str:
    """Equal for equal batches: same sentences in the same order, same ids."""
    digest = hashlib.sha256()
    for part in (np.asarray(batch.lengths), batch.lines, batch.words):
        digest.update(f"{len(part)} ".encode())
        digest.update(part.astype("<i8").tobytes())
    return digest.hexdigest()
