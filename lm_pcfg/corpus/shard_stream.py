"""Batches of corpora in shards, epoch after epoch, for any number of ranks and workers, from a place one can save.

An epoch reads every corpus `weight` times (once, unless there is a mixture). Its batches are numbered: the blocks of a
pass are put in an order seeded by (seed, pass), the lines of each are shuffled and batched by (seed, pass, block), and
several corpora are merged in proportion. Each rank gets one contiguous part of these numbers (`dealing.py`). All of it
follows from the index, so that all ranks agree without a word, and take the same number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from lm_pcfg.corpus import dealing
from lm_pcfg.corpus.batches import Batch, BatchError, BatchOptions
from lm_pcfg.corpus.block_loader import BlockBatches, BlockLoader, BlockMaker, Request
from lm_pcfg.corpus.blocks import Histogram, ShardedCorpus, count_batches, fingerprint_of, kept_of
from lm_pcfg.corpus.sentences import Limits
from lm_pcfg.corpus.shard_files import OnError
from lm_pcfg.corpus.vocabularies import AnyVocabulary

Place = tuple[int, int]  # pass, batch of that pass


@dataclass(frozen=True)
class Source:
    corpus: ShardedCorpus
    weight: Fraction = Fraction(1)  # how many times it is read in an epoch


@dataclass
class Losses:
    """What this rank should have given out and could not, under on_error: skip."""

    lines: int = 0
    files: list[str] = field(default_factory=list)


class ShardStream:
    """See `BatchSource`. Batches do not depend on `workers`; their sum over the ranks does not depend on the ranks."""

    def __init__(
        self,
        sources: Sequence[Source],
        vocabulary: AnyVocabulary,
        options: BatchOptions,
        limits: Limits | None = None,
        *,
        seed: int = 0,
        max_length_for_epoch: Callable[[int], int | None] | None = None,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        workers: int = 0,
        on_error: OnError = "fail",
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise BatchError(f"rank {rank} should be between 0 and world_size - 1 = {world_size - 1}")
        self.sources, self.options, self.limits = list(sources), options, limits or Limits()
        self.seed, self.rank, self.world_size, self.shuffle = seed, rank, world_size, shuffle
        self.losses = Losses()
        self._warn = warn
        self._max_length_for_epoch = max_length_for_epoch or (lambda epoch: None)
        first_lines = np.cumsum([0, *(source.corpus.lines for source in self.sources)]).tolist()
        corpora = [source.corpus for source in self.sources]
        self._maker = BlockMaker(corpora, first_lines, vocabulary, options, self.limits, seed, shuffle, on_error)
        self._loader = BlockLoader(self._maker, workers)
        self._block_batches = lru_cache(maxsize=8)(self._count_block_batches)
        self._interleaving = lru_cache(maxsize=4)(self._interleaving_of)
        self._pass_order = lru_cache(maxsize=2 * len(self.sources))(self._order_of_pass)
        if not any(kept_of(corpus.histogram, self.limits, self._maker.ends).lines for corpus in corpora):
            names = ", ".join(corpus.name for corpus in corpora)
            raise BatchError(f"{names}: there are no sentences to make batches of; check the text and data.max_length")
        self._epoch = 0
        self._dealings: list[dealing.Dealing] = []  # of this epoch, at other numbers of ranks
        self._round = 0  # of this dealing
        self._begin()

    # ---- what is in an epoch ----------------------------------------------------------------------------------------

    def _epoch_of_pass(self, source: int, number_of_pass: int) -> int:
        """In which a pass begins."""
        return int(number_of_pass / self.sources[source].weight)

    def _max_length_of_pass(self, source: int, number_of_pass: int) -> int | None:
        """Of the curriculum; None once it is over, so that later passes are alike."""
        most = self._max_length_for_epoch(self._epoch_of_pass(source, number_of_pass))
        over = most is not None and self.limits.max_length is not None and most >= self.limits.max_length
        return None if over else most

    def _count_block_batches(self, source: int, max_length: int | None) -> np.ndarray:
        """int64 [blocks]: the batches of each."""
        limits, ends = self._maker.limits_of(max_length), self._maker.ends
        blocks = self.sources[source].corpus.blocks
        counts = [count_batches(kept_of(block.histogram, limits, ends), self.options, ends) for block in blocks]
        return np.array(counts, dtype=np.int64)

    def _pass_size(self, source: int, number_of_pass: int) -> int:
        return int(self._block_batches(source, self._max_length_of_pass(source, number_of_pass)).sum())

    def _order_of_pass(self, source: int, number_of_pass: int) -> tuple[np.ndarray, np.ndarray]:
        """(blocks in their order, number of the first batch of each and, last, of all batches)."""
        blocks = self.sources[source].corpus.blocks
        # What can be opened anywhere is shuffled block by block, a shard that is read forward as a whole.
        units: dict[Any, list[int]] = {}
        for number, block in enumerate(blocks):
            key = (number,) if block.in_order_with is None else block.in_order_with
            units.setdefault(key, []).append(number)
        groups = list(units.values())
        if self.shuffle:
            # 2**32: no block has this number, so the order of blocks has a seed of its own
            seeds = np.random.SeedSequence([self.seed, number_of_pass, source, 2**32])
            generator = np.random.Generator(np.random.PCG64(seeds))
            groups = [groups[k] for k in generator.permutation(len(groups))]
        order = np.array([number for group in groups for number in group], dtype=np.int64)
        counts = self._block_batches(source, self._max_length_of_pass(source, number_of_pass))
        return order, np.concatenate([[0], np.cumsum(counts[order])])

    def _place(self, source: int, epoch: int) -> Place:
        """Where a source stands at the beginning of an epoch."""
        passes = epoch * self.sources[source].weight
        whole = int(passes)
        return whole, int((passes - whole) * self._pass_size(source, whole))

    def _batches_between(self, source: int, start: Place, stop: Place) -> int:
        between = sum(self._pass_size(source, number) for number in range(start[0], stop[0]))
        return between - start[1] + stop[1]

    def _interleaving_of(self, epoch: int) -> dealing.Interleaving:
        counts = [
            self._batches_between(source, self._place(source, epoch), self._place(source, epoch + 1))
            for source in range(len(self.sources))
        ]
        if not any(counts):
            max_length = self._max_length_for_epoch(epoch)
            if max_length is not None:
                raise BatchError(
                    f"epoch {epoch} has no sentences of at most {max_length} words; raise data.curriculum.start"
                )
            raise BatchError(f"epoch {epoch} has no batches; raise the weights of the corpora")
        return dealing.Interleaving(tuple(counts))

    # ---- this rank's batches ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Deal out what is left of the epoch."""
        mixed = self._interleaving(self._epoch)
        left = dealing.left_after(mixed.total, self._dealings)
        self._left = dealing.size(left)  # batches that this dealing gives out
        own = dealing.share(left, self.rank, self.world_size)
        own = dealing.part(own, self._round, dealing.size(own))
        self._own = self._batches(mixed, own)

    def _batches(self, mixed: dealing.Interleaving, intervals: list[dealing.Interval]) -> Iterator[Batch]:
        feeds = [self._feed(source, mixed, intervals) for source in range(len(self.sources))]
        for start, stop in intervals:
            before = mixed.taken(start)
            for number in range(start, stop):
                after = mixed.taken(number + 1)
                source = next(k for k, (one, other) in enumerate(zip(before, after, strict=True)) if one != other)
                yield next(feeds[source])
                before = after

    def _feed(self, source: int, mixed: dealing.Interleaving, intervals: list[dealing.Interval]) -> Iterator[Batch]:
        """This rank's batches of one corpus."""
        segments = [
            segment
            for start, stop in intervals
            for segment in self._segments(source, mixed.taken(start)[source], mixed.taken(stop)[source])
        ]
        requests = (request for request, _, _ in segments)
        for (request, first, last), block in zip(segments, self._loader.stream(requests), strict=True):
            yield from self._batches_of_block(request, block, first, last)

    def _batches_of_block(self, request: Request, block: BlockBatches, first: int, last: int) -> Iterator[Batch]:
        if block.lost is not None:
            self._lose(request, block.lost, first, last)
            for _ in range(first, last):
                yield empty_batch()
        else:
            for number in range(first, last):
                yield block.batch(number)

    def _segments(self, source: int, start: int, stop: int) -> Iterator[tuple[Request, int, int]]:
        """(block, its batches from .. to) for the start-th to stop-th batch of a corpus in this epoch."""
        number_of_pass, offset = self._place(source, self._epoch)
        position, target = offset + start, offset + stop  # counted from the start of the pass
        while position < target:
            order, starts = self._pass_order(source, number_of_pass)
            size = int(starts[-1])
            if position >= size:
                position, target, number_of_pass = position - size, target - size, number_of_pass + 1
                continue
            max_length = self._max_length_of_pass(source, number_of_pass)
            place = int(np.searchsorted(starts, position, side="right")) - 1
            while position < min(target, size):
                last = min(target, int(starts[place + 1]))
                if last > position:
                    request = Request(source, number_of_pass, int(order[place]), max_length)
                    yield request, position - int(starts[place]), last - int(starts[place])
                    position = last
                place += 1

    def _lose(self, request: Request, why: str, first: int, last: int) -> None:
        corpus = self.sources[request.source].corpus
        limits = self._maker.limits_of(request.max_length)
        lines = kept_of(corpus.blocks[request.block].histogram, limits, self._maker.ends).lines
        batches = int(self._block_batches(request.source, request.max_length)[request.block])
        self.losses.lines += lines * last // batches - lines * first // batches  # the ranks' parts add up to all lines
        name = why.split(": ")[0]
        if name not in self.losses.files:
            self.losses.files.append(name)
            self._warn(f"{why}; its lines are left out (on_error: skip)")

    # ---- BatchSource ------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Of the next batch, from 0."""
        return self._epoch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """This rank's next batch; empty where its part is at an end and another's is not."""
        batch = next(self._own, None) or empty_batch()
        self._round += 1
        if self._round >= -(-self._left // self.world_size):
            self._epoch, self._dealings, self._round = self._epoch + 1, [], 0
            self._begin()
        return batch

    def next_step(self) -> list[Batch]:
        """`accumulate` batches for one optimizer step; at the end of an epoch the missing ones are empty."""
        epoch = self._epoch
        batches = [next(self)]
        while len(batches) < self.options.accumulate:
            batches.append(next(self) if self._epoch == epoch else empty_batch())
        return batches

    def batches_per_epoch(self, epoch: int) -> int:
        """Over all ranks."""
        return self._interleaving(epoch).total

    def steps_per_epoch(self, epoch: int) -> int:
        """Optimizer steps, at this number of ranks."""
        return -(-self.batches_per_epoch(epoch) // (self.world_size * self.options.accumulate))

    def steps_left(self, epochs: int) -> int:
        """Optimizer steps from here to the end of so many epochs, at this number of ranks."""
        if self._epoch >= epochs:
            return 0
        rounds = -(-self._left // self.world_size) - self._round
        steps = -(-rounds // self.options.accumulate)
        return steps + sum(self.steps_per_epoch(epoch) for epoch in range(self._epoch + 1, epochs))

    def costliest_step(self, epoch: int) -> list[Batch]:
        """Of the blocks with the longest sentences, without reading the others."""
        most = self.options.accumulate
        candidates = []
        for source, item in enumerate(self.sources):
            number_of_pass, _ = self._place(source, epoch)
            max_length = self._max_length_of_pass(source, number_of_pass)
            limits = self._maker.limits_of(max_length)
            for number, block in enumerate(item.corpus.blocks):
                kept = kept_of(block.histogram, limits, self._maker.ends)
                if kept.lines:
                    candidates.append((self._largest_cost(kept), Request(source, number_of_pass, number, max_length)))
        batches: list[Batch] = []
        for _, request in sorted(candidates, key=lambda item: -item[0]):
            if len(batches) >= most:
                break
            made = self._maker.make(request)
            batches += [made.batch(number) for number in range(len(made.cuts) - 1)]
            batches = sorted(batches, key=lambda batch: -batch.cost)[:most]
        return batches

    def _largest_cost(self, kept: Histogram) -> int:
        """Of a batch of these lines: exactly by sentences, nearly by cost."""
        ends = int(self._maker.ends)
        costs = np.repeat((kept.lengths[::-1] + ends) ** 2, kept.counts[::-1])
        if self.options.by == "sentences":
            return int(costs[: self.options.sentences].sum())
        return max(int(costs[0]), min(self.options.cost, int(costs.sum())))

    def state(self) -> dict[str, Any]:
        """The position, as JSON: the same on every rank, and good for any number of ranks."""
        batches = self.batches_per_epoch(self._epoch)
        dealings = [*self._dealings, (self.world_size, self._round)] if self._round else self._dealings
        return {
            "epoch": self._epoch,
            "batch": batches - self._left + min(self._left, self._round * self.world_size),
            "batches": batches,
            "dealings": [list(pair) for pair in dealings],
            "plan": self._fingerprint,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken: the same corpora, options and seed, any number of ranks or workers."""
        epoch, dealings = (
            int(state["epoch"]),
            [(int(ranks), int(rounds)) for ranks, rounds in state.get("dealings", [])],
        )
        if state["batch"]:  # the start of an epoch is the same place in any plan
            same = "dealings" in state and state["plan"] == self._fingerprint
            if not same or state["batches"] != self.batches_per_epoch(epoch):
                raise BatchError(
                    f"the saved position (epoch {epoch}, batch {state['batch']}) belongs to other data or batch "
                    "settings: resume with the data, vocabulary, seed, curriculum and batch settings of the run, "
                    "or start anew"
                )
        self._epoch, self._round = epoch, 0
        if dealings and dealings[-1][0] == self.world_size:
            _, self._round = dealings.pop()
        self._dealings = dealings
        self._begin()

    @cached_property
    def _fingerprint(self) -> str:
        options = self.options
        size = options.sentences if options.by == "sentences" else options.cost
        parts: list[Any] = [options.by, size, self.seed, self.shuffle, self.limits, self._maker.ends]
        parts += [f"{source.weight} {source.corpus.fingerprint}" for source in self.sources]
        return fingerprint_of(parts)[:16]

    def close(self) -> None:
        self._loader.close()


def empty_batch() -> Batch:
    none = np.empty(0, dtype=np.int64)
    return Batch(words=none, lengths=[], lines=none, n_words=0)
