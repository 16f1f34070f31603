"""Blocks made into batches, here or ahead of time in worker processes: the same batches either way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

import numpy as np

from lm_pcfg.corpus.batches import Batch, BatchOptions, plan_epoch
from lm_pcfg.corpus.blocks import ShardedCorpus, bounds
from lm_pcfg.corpus.processes import make_pool
from lm_pcfg.corpus.sentences import Limits, Sentences
from lm_pcfg.corpus.shard_files import OnError, ShardError
from lm_pcfg.corpus.vocabularies import AnyVocabulary
from lm_pcfg.errors import UserError


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
    """Reads a block, leaves out what is too long or too short, and cuts the rest into batches."""

    corpora: Sequence[ShardedCorpus]
    first_lines: Sequence[int]  # number of the first line of each corpus among all
    vocabulary: AnyVocabulary
    options: BatchOptions
    limits: Limits
    seed: int
    shuffle: bool
    on_error: OnError

    @property
    def ends(self) -> bool:
        return self.vocabulary.end_id is not None

    def limits_of(self, max_length: int | None) -> Limits:
        both = [most for most in (self.limits.max_length, max_length) if most is not None]
        return Limits(min(both) if both else None, self.limits.min_length)

    def make(self, request: Request) -> BlockBatches:
        try:
            text = self.corpora[request.source].read(request.block)
        except ShardError as error:
            if self.on_error == "fail":
                raise
            none = np.empty(0, np.int64)
            return BlockBatches(none, none, none, np.zeros(1, np.int64), self.ends, lost=str(error))
        ids, offsets = text.ids, text.offsets
        word_lengths = np.diff(offsets)
        fewest, most = bounds(self.limits_of(request.max_length), self.ends)
        indices = np.flatnonzero((word_lengths >= fewest) & (word_lengths <= (most or word_lengths.max(initial=0))))
        lengths = word_lengths[indices] + int(self.ends)
        plan = plan_epoch(
            lengths, by=self.options.by, sentences=self.options.sentences, cost=self.options.cost, seed=self.seed,
            epoch=request.number_of_pass, block=(request.source, request.block), shuffle=self.shuffle,
        )  # fmt: skip
        order = indices[np.concatenate(plan)] if plan else indices
        unended = Sentences(ids=ids, offsets=offsets, line_numbers=text.lines, end_of_sentence=False)
        words, plain_lengths = unended.gather(order)
        if self.corpora[request.source].stores_ids:
            words = self.vocabulary.stored(words)
        if self.vocabulary.end_id is not None:
            words = np.insert(words, np.cumsum(plain_lengths), self.vocabulary.end_id)
        return BlockBatches(
            words=words.astype(np.int32),
            lengths=plain_lengths + int(self.ends),
            lines=self.first_lines[request.source] + text.lines[order],
            cuts=np.concatenate([[0], np.cumsum([len(batch) for batch in plan])]).astype(np.int64),
            ends=self.ends,
        )


class BlockLoader:
    """Makes blocks, up to `workers` at a time ahead of their use. `workers` changes the speed, never the batches."""

    def __init__(self, maker: BlockMaker, workers: int):
        self.maker, self.workers = maker, workers
        self._pool: Executor | None = None

    def stream(self, requests: Iterator[Request]) -> Iterator[BlockBatches]:
        """The blocks of these requests, in their order."""
        if self.workers == 0:
            yield from map(self.maker.make, requests)
            return
        if self._pool is None:
            self._pool = make_pool(self.workers, _keep_maker, (id(self), self.maker))
        waiting: deque[Future[BlockBatches]] = deque()
        try:
            for request in requests:
                waiting.append(self._pool.submit(_make, id(self), request))
                if len(waiting) > self.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise UserError("a process that reads data was killed (out of memory?); try data.workers=0") from None
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


_makers: dict[int, BlockMaker] = {}  # of a worker process, by the loader it works for


def _keep_maker(loader: int, maker: BlockMaker) -> None:
    _makers[loader] = maker


def _make(loader: int, request: Request) -> BlockBatches:
    return _makers[loader].make(request)
