"""The plan of a streamed text: which batches an epoch has, known from the lengths of the lines without reading them.

An epoch reads every corpus `weight` times (once, unless there is a mixture). Its batches are numbered: the blocks of a
pass are put in an order seeded by (seed, pass), the lines of each are shuffled and batched by (seed, pass, block), and
several corpora are merged in proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from lm_pcfg.corpus.batches import Batch, BatchError, BatchOptions, count_batches, empty_batch
from lm_pcfg.corpus.lengths import Histogram
from lm_pcfg.corpus.shards.blocks import Block, StreamedText, fingerprint_of
from lm_pcfg.corpus.shards.files import OnError
from lm_pcfg.corpus.shards.loader import BlockLoader, BlockMaker, Request
from lm_pcfg.corpus.stream import Curriculum, Interval, Losses, Plan

Place = tuple[int, int]  # pass, batch of that pass


@dataclass(frozen=True)
class Interleaving:
    """Batches of several corpora merged evenly: after any number of them, each has had its proportion, up to rounding.

    Corpus 0 takes its proportion of all, corpus 1 its proportion of the rest, and so on.
    """

    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.counts)

    def taken(self, number: int) -> tuple[int, ...]:
        """Return how many batches of each corpus are among the first `number`."""
        result, left, rest = [], number, self.total
        for count in self.counts:
            own = left * count // rest if rest else 0
            result.append(own)
            left, rest = left - own, rest - count
        return tuple(result)


class ShardPlan(Plan):
    """Plans a streamed text. Ranks take contiguous shares, to read different blocks. `workers` changes no batch."""

    contiguous = True

    def __init__(
        self,
        text: StreamedText,
        options: BatchOptions,
        *,
        seed: int = 0,
        curriculum: Curriculum | None = None,
        workers: int = 0,
        on_error: OnError = "fail",
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        if not text.lines:
            raise BatchError(
                f"{text.names}: there are no sentences to make batches of; check the text and data.max_length"
            )
        self.text, self.options, self.seed = text, options, seed
        self.losses: Losses = Losses()
        self._warn = warn
        self._curriculum = curriculum or (lambda epoch: None)
        self._maker = BlockMaker(text, options, seed, on_error)
        self._loader = BlockLoader(self._maker, workers)
        self._block_batches = lru_cache(maxsize=8)(self._count_block_batches)
        self._interleaving = lru_cache(maxsize=4)(self._interleaving_of)
        self._pass_order = lru_cache(maxsize=2 * len(text.sources))(self._order_of_pass)

    # ---- numbers of batches -----------------------------------------------------------------------------------------

    def _epoch_of_pass(self, source: int, number_of_pass: int) -> int:
        """Return the epoch in which a pass begins."""
        return int(number_of_pass / self.text.sources[source].weight)

    def _max_length_of_pass(self, source: int, number_of_pass: int) -> int | None:
        """Return the limit of the curriculum; None once it is over, so that later passes are alike."""
        most, longest = self._curriculum(self._epoch_of_pass(source, number_of_pass)), self.text.limits.max_length
        over = most is not None and longest is not None and most >= longest
        return None if over else most

    def _count_block_batches(self, source: int, max_length: int | None) -> np.ndarray:
        """Count the batches of each block: int64 [blocks]."""
        blocks, ends = self.text.sources[source].corpus.blocks, self.text.ends
        counts = [count_batches(self._kept(block, max_length), self.options, ends) for block in blocks]
        return np.array(counts, dtype=np.int64)

    def _kept(self, block: Block, max_length: int | None) -> Histogram:
        """Return the histogram of the lines of a block that come into batches."""
        return block.histogram.kept(self.text.limits.at_most(max_length), self.text.ends)

    def _pass_size(self, source: int, number_of_pass: int) -> int:
        return int(self._block_batches(source, self._max_length_of_pass(source, number_of_pass)).sum())

    def _order_of_pass(self, source: int, number_of_pass: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks in their order, and the number of the first batch of each, then the count of all."""
        blocks = self.text.sources[source].corpus.blocks
        # What can be opened anywhere is shuffled block by block, a shard that is read forward as a whole.
        units: dict[Any, list[int]] = {}
        for number, block in enumerate(blocks):
            key = (number,) if block.in_order_with is None else block.in_order_with
            units.setdefault(key, []).append(number)
        groups = list(units.values())
        # 2**32: no block has this number, so the order of blocks has a seed of its own
        seeds = np.random.SeedSequence([self.seed, number_of_pass, source, 2**32])
        shuffled = np.random.Generator(np.random.PCG64(seeds)).permutation(len(groups))
        order = np.array([number for k in shuffled for number in groups[k]], dtype=np.int64)
        counts = self._block_batches(source, self._max_length_of_pass(source, number_of_pass))
        return order, np.concatenate([[0], np.cumsum(counts[order])])

    def _place(self, source: int, epoch: int) -> Place:
        """Return (pass, batch in it) at which a source is when an epoch begins."""
        passes = epoch * self.text.sources[source].weight
        whole = int(passes)
        return whole, int((passes - whole) * self._pass_size(source, whole))

    def _batches_between(self, source: int, start: Place, stop: Place) -> int:
        between = sum(self._pass_size(source, number) for number in range(start[0], stop[0]))
        return between - start[1] + stop[1]

    def _interleaving_of(self, epoch: int) -> Interleaving:
        counts = [
            self._batches_between(source, self._place(source, epoch), self._place(source, epoch + 1))
            for source in range(len(self.text.sources))
        ]
        if not any(counts):
            max_length = self._curriculum(epoch)
            if max_length is not None:
                raise BatchError(
                    f"epoch {epoch} has no sentences of at most {max_length} words; raise data.curriculum.start"
                )
            raise BatchError(f"epoch {epoch} has no batches; raise the weights of the corpora")
        return Interleaving(tuple(counts))

    def count(self, epoch: int) -> int:
        return self._interleaving(epoch).total

    @cached_property
    def fingerprint(self) -> str:
        text, options = self.text, self.options
        # True: see TextPlan.fingerprint
        parts: list[Any] = [options.by, options.size, self.seed, True, text.limits, text.ends]
        parts += [f"{source.weight} {source.corpus.fingerprint}" for source in text.sources]
        return fingerprint_of(parts)[:16]

    # ---- batches by their numbers -----------------------------------------------------------------------------------

    def batches(self, epoch: int, intervals: Sequence[Interval]) -> Iterator[Batch]:
        mixed = self._interleaving(epoch)
        feeds = [self._feed(source, epoch, intervals) for source in range(len(self.text.sources))]
        for start, stop in intervals:
            before = mixed.taken(start)
            for number in range(start, stop):
                after = mixed.taken(number + 1)
                source = next(k for k, (one, other) in enumerate(zip(before, after, strict=True)) if one != other)
                yield next(feeds[source])
                before = after

    def _feed(self, source: int, epoch: int, intervals: Sequence[Interval]) -> Iterator[Batch]:
        """Yield the batches of a corpus. A lost block gives empty ones, so that all ranks still take the same steps."""
        taken = self._interleaving(epoch).taken
        segments = [
            segment
            for start, stop in intervals
            for segment in self._segments(source, epoch, taken(start)[source], taken(stop)[source])
        ]
        requests = (request for request, _, _ in segments)
        for (request, first, last), block in zip(segments, self._loader.stream(requests), strict=True):
            if block.lost is not None:
                self._lose(request, block.lost, first, last)
            for number in range(first, last):
                yield empty_batch() if block.lost is not None else block.batch(number)

    def _segments(self, source: int, epoch: int, start: int, stop: int) -> Iterator[tuple[Request, int, int]]:
        """Yield (block, first, end of its batches) for the start-th to stop-th batch of a corpus in an epoch."""
        number_of_pass, offset = self._place(source, epoch)
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
        block = self.text.sources[request.source].corpus.blocks[request.block]
        lines = self._kept(block, request.max_length).lines
        batches = int(self._block_batches(request.source, request.max_length)[request.block])
        self.losses.lines += lines * last // batches - lines * first // batches  # the ranks' parts add up to all lines
        name = why.split(": ")[0]
        if name not in self.losses.files:
            self.losses.files.append(name)
            self._warn(f"{why}; its lines are left out (on_error: skip)")

    def costliest(self, epoch: int, most: int) -> list[Batch]:
        """Look in the blocks whose batches can be most expensive, without reading the others."""
        candidates = []
        for source, item in enumerate(self.text.sources):
            number_of_pass, _ = self._place(source, epoch)
            max_length = self._max_length_of_pass(source, number_of_pass)
            for number, block in enumerate(item.corpus.blocks):
                kept = self._kept(block, max_length)
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
        """Return the largest cost of a batch of these lines: exactly for batches by sentences, nearly by cost."""
        ends = int(self.text.ends)
        costs = np.repeat((kept.lengths[::-1] + ends) ** 2, kept.counts[::-1])
        if self.options.by == "sentences":
            return int(costs[: self.options.sentences].sum())
        return max(int(costs[0]), min(self.options.cost, int(costs.sum())))

    def close(self) -> None:
        self._loader.close()
