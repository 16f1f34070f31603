"""Blocks made into batches, here or ahead of time in worker processes: the same batches either way."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from lm_pcfg.corpus.batches import Batch, BatchOptions, plan_batches
from lm_pcfg.corpus.lengths import KEPT
from lm_pcfg.corpus.sentences import Sentences, with_ends
from lm_pcfg.corpus.shards.blocks import StreamedText
from lm_pcfg.corpus.shards.errors import ShardError
from lm_pcfg.corpus.shards.files import OnError
from lm_pcfg.corpus.shards.processes import in_order, make_pool

GATHERED_AT_A_TIME = 1 << 22  # words


@dataclass(frozen=True)
class Request:
    """One block of one pass over one corpus."""

    source: int
    number_of_pass: int
    block: int
    max_length: int | None  # of the curriculum


@dataclass(frozen=True)
class BlockBatches:
    """All batches of a block, one after another; a block that was lost has none, and says why."""

    words: np.ndarray  # int32, with <eos> where ends are explicit
    lengths: np.ndarray  # int64 [sentences]: what the chart sees
    lines: np.ndarray  # int64 [sentences]
    cuts: np.ndarray  # int64 [batches + 1]: sentence k is in batch b if cuts[b] <= k < cuts[b + 1]
    ends: bool
    lost: str | None = None
    offsets: np.ndarray = field(init=False)  # int64 [sentences + 1], into words

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64))

    def batch(self, number: int) -> Batch:
        first, last = int(self.cuts[number]), int(self.cuts[number + 1])
        words = self.words[self.offsets[first] : self.offsets[last]].astype(np.int64)
        return Batch(
            words=words,
            lengths=self.lengths[first:last].tolist(),
            lines=self.lines[first:last],
            n_words=len(words) - (last - first if self.ends else 0),
        )


@dataclass
class BlockMaker:
    """Reads a block, leaves out what is too long or too short, and groups the rest into batches."""

    text: StreamedText
    options: BatchOptions
    seed: int
    on_error: OnError

    def make(self, request: Request) -> BlockBatches:
        ends = self.text.ends
        try:
            block = self.text.sources[request.source].corpus.read(request.block)
        except ShardError as error:
            if self.on_error == "fail":
                raise
            none = np.empty(0, np.int64)
            return BlockBatches(none, none, none, np.zeros(1, np.int64), ends, lost=str(error))
        word_lengths = np.diff(block.offsets)
        limits = self.text.limits.at_most(request.max_length)
        indices = np.flatnonzero(limits.judge(word_lengths, ends) == KEPT)
        seeds = (self.seed, request.number_of_pass, request.source, request.block)
        plan = plan_batches(word_lengths[indices] + int(ends), self.options, seeds)
        order = indices[np.concatenate(plan)] if plan else indices
        sentences = Sentences(ids=block.ids, offsets=block.offsets, line_numbers=block.lines, end_of_sentence=False)
        lengths = word_lengths[order] + int(ends)
        words, filled = np.empty(int(lengths.sum()), np.int32), 0
        for some in _in_parts(order, lengths):
            own, _ = with_ends(*sentences.gather(some), self.text.vocabulary.end_id)
            words[filled : filled + len(own)] = own
            filled += len(own)
        return BlockBatches(
            words=words,
            lengths=lengths,
            lines=self.text.first_lines[request.source] + block.lines[order],
            cuts=np.concatenate([[0], np.cumsum([len(batch) for batch in plan])]).astype(np.int64),
            ends=ends,
        )


def _in_parts(order: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Divide sentences into parts of about so many words: where they are takes many times the memory of the words."""
    ends = np.cumsum(lengths)
    limits = np.arange(GATHERED_AT_A_TIME, ends[-1] if len(ends) else 0, GATHERED_AT_A_TIME)
    return np.split(order, np.unique(np.searchsorted(ends, limits)))


class BlockLoader:
    """Makes blocks, up to `workers` at a time ahead of their use. `workers` changes the speed, never the batches."""

    def __init__(self, maker: BlockMaker, workers: int):
        self.maker, self.workers = maker, workers
        self._pool: Executor | None = None

    def stream(self, requests: Iterator[Request]) -> Iterator[BlockBatches]:
        """Yield the blocks of these requests, in their order."""
        if self.workers == 0:
            yield from map(self.maker.make, requests)
            return
        if self._pool is None:
            self._pool = make_pool(self.workers, _keep_maker, (id(self), self.maker))
        make = partial(_make, id(self))
        yield from in_order(self._pool, make, requests, ahead=self.workers, way_out="try data.workers=0")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


_makers: dict[int, BlockMaker] = {}  # of a worker process, by the loader it works for


def _keep_maker(loader: int, maker: BlockMaker) -> None:
    _makers[loader] = maker


def _make(loader: int, request: Request) -> BlockBatches:
    return _makers[loader].make(request)
