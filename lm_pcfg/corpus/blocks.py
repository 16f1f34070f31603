"""A corpus as blocks of lines that are read and shuffled together.

Blocks do not depend on seed, epoch, ranks or workers. Each knows how many lines of which length it has, so that every
rank can tell how many batches every block will give, without reading it and without asking another rank.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lm_pcfg.corpus.batches import BatchOptions
from lm_pcfg.corpus.sentences import Limits, Sentences, Skipped
from lm_pcfg.corpus.shard_files import Chunk
from lm_pcfg.corpus.vocabularies import AnyVocabulary

INVALID = -1  # the "length" of a line that cannot be read


@dataclass(frozen=True)
class Histogram:
    """How many lines have which number of words (or pieces); 0 words: blank."""

    lengths: np.ndarray  # int64 [distinct], ascending
    counts: np.ndarray  # int64 [distinct]

    @classmethod
    def of(cls, lengths: np.ndarray) -> Histogram:
        values, counts = np.unique(np.asarray(lengths, dtype=np.int64), return_counts=True)
        return cls(values, counts.astype(np.int64))

    @classmethod
    def sum(cls, parts: Sequence[Histogram]) -> Histogram:
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls.of(np.empty(0, np.int64))
        values, places = np.unique(np.concatenate([part.lengths for part in parts]), return_inverse=True)
        counts = np.bincount(places, weights=np.concatenate([part.counts for part in parts]), minlength=len(values))
        return cls(values, counts.astype(np.int64))

    @classmethod
    def from_json(cls, pairs: Sequence[Sequence[int]]) -> Histogram:
        array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return cls(array[:, 0], array[:, 1])

    def to_json(self) -> list[list[int]]:
        return [[length, count] for length, count in zip(self.lengths.tolist(), self.counts.tolist(), strict=True)]

    @property
    def lines(self) -> int:
        return int(self.counts.sum())

    @property
    def words(self) -> int:
        return int((self.counts * np.maximum(self.lengths, 0)).sum())

    def between(self, fewest: int, most: int | None) -> Histogram:
        kept = self.lengths >= fewest
        if most is not None:
            kept &= self.lengths <= most
        return Histogram(self.lengths[kept], self.counts[kept])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        return np.array_equal(self.lengths, other.lengths) and np.array_equal(self.counts, other.counts)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Block:
    chunks: tuple[Chunk, ...]
    first_line: int  # number of its first line in the corpus
    histogram: Histogram
    in_order_with: int | None  # the shard, if its blocks are best read one after another


@dataclass(frozen=True)
class BlockText:
    """The lines of a block that can be read and are not blank: line k is ids[offsets[k] : offsets[k + 1]]."""

    ids: np.ndarray  # int32, without ends of sentences
    offsets: np.ndarray  # int64 [lines + 1]
    lines: np.ndarray  # int64 [lines]: numbers of the lines in the corpus


@dataclass
class Damage:
    """What could not be read."""

    files: list[str] = field(default_factory=list)  # one message a file, each beginning with its name
    lines: int = 0  # single lines (invalid UTF-8 or JSON)


class ShardedCorpus(ABC):
    """Blocks, and how to read one. Goes to other processes, so it holds no open file until the first read."""

    name: str
    blocks: Sequence[Block]
    fingerprint: str  # of the content
    damage: Damage
    stores_ids: bool  # as `prepare` made them, which know no <eos>; else they are the vocabulary's own

    @abstractmethod
    def read(self, block: int) -> BlockText:
        """Raises ShardError if the shard is not what it was."""

    @property
    def histogram(self) -> Histogram:
        return Histogram.sum([block.histogram for block in self.blocks])

    @property
    def lines(self) -> int:
        return sum(block.histogram.lines for block in self.blocks)


def group_chunks(chunks: Iterable[tuple[Chunk, Histogram, bool]], block_lines: int, first_line: int = 0) -> list[Block]:
    """Consecutive chunks into blocks of about so many lines: small shards share a block, so that batches are full.

    The bool of a chunk: it can be opened without reading what comes before it. Blocks of a shard that is read forward
    only keep together, in their order.
    """
    blocks: list[Block] = []
    waiting: list[tuple[Chunk, Histogram]] = []
    lines = 0

    def close() -> None:
        nonlocal waiting, lines, first_line
        if waiting:
            blocks.append(Block(tuple(chunk for chunk, _ in waiting), first_line,
                                Histogram.sum([histogram for _, histogram in waiting]), None))  # fmt: skip
            first_line += lines
        waiting, lines = [], 0

    for chunk, histogram, opens_here in chunks:
        if lines + histogram.lines > block_lines:
            close()
        if not opens_here and chunk.first_row > 0:
            close()
            if blocks and blocks[-1].in_order_with is None and blocks[-1].chunks[-1].shard == chunk.shard:
                last = blocks[-1]
                blocks[-1] = Block(last.chunks, last.first_line, last.histogram, chunk.shard)
            blocks.append(Block((chunk,), first_line, histogram, chunk.shard))
            first_line += histogram.lines
            continue
        waiting.append((chunk, histogram))
        lines += histogram.lines
    close()
    return blocks


def in_memory(corpus: ShardedCorpus, vocabulary: AnyVocabulary, limits: Limits) -> Sentences:
    """All of it at once: for validation texts."""
    ends = vocabulary.end_id is not None
    fewest, most = bounds(limits, ends)
    ids, lengths, numbers = [], [], []
    for number in range(len(corpus.blocks)):
        text = corpus.read(number)
        plain = np.diff(text.offsets)
        kept = (plain >= fewest) & (plain <= (most or plain.max(initial=0)))
        words = text.ids[np.repeat(kept, plain)]
        if corpus.stores_ids:
            words = vocabulary.stored(words)
        if vocabulary.end_id is not None:
            words = np.insert(words, np.cumsum(plain[kept]), vocabulary.end_id)
        ids.append(words.astype(np.int32))
        lengths.append(plain[kept] + int(ends))
        numbers.append(text.lines[kept] + 1)
    none = [np.empty(0, np.int64)]
    return Sentences(
        ids=np.concatenate(ids or none).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(np.concatenate(lengths or none))]).astype(np.int64),
        line_numbers=np.concatenate(numbers or none),
        end_of_sentence=ends,
        unknown_id=vocabulary.unknown_id,
        skipped=filtered_of(corpus.histogram, limits, ends),
    )


# ---- how many batches -----------------------------------------------------------------------------------------------


def bounds(limits: Limits, ends: bool) -> tuple[int, int | None]:
    """Fewest and most words of a line that is kept; limits.min_length counts the end, where there is one."""
    return max(1, limits.min_length - int(ends)), limits.max_length


def kept_of(histogram: Histogram, limits: Limits, ends: bool) -> Histogram:
    """The lines that are neither blank, unreadable, too long nor too short."""
    return histogram.between(*bounds(limits, ends))


def filtered_of(histogram: Histogram, limits: Limits, ends: bool) -> Skipped:
    """The others, by reason; unreadable lines are damage and counted there."""
    fewest, most = bounds(limits, ends)
    too_long = 0 if most is None else histogram.between(most + 1, None).lines
    short = fewest - 1 if most is None else min(fewest - 1, most)
    return Skipped(blank=histogram.between(0, 0).lines, too_long=too_long, too_short=histogram.between(1, short).lines)


def count_batches(kept: Histogram, options: BatchOptions, ends: bool) -> int:
    """How many batches `plan_epoch` will make of these lines."""
    if options.by == "sentences":
        return -(-kept.lines // options.sentences)
    batches, room = 0, 0  # room: what is left of the budget of the last batch
    for length, count in zip(kept.lengths.tolist(), kept.counts.tolist(), strict=True):
        cost = (length + int(ends)) ** 2
        if cost > options.cost:
            batches += count  # each alone
            continue
        here = min(count, room // cost)
        room -= here * cost
        if left := count - here:
            in_each = options.cost // cost
            opened = -(-left // in_each)
            batches += opened
            room = options.cost - (left - (opened - 1) * in_each) * cost
    return batches


def fingerprint_of(parts: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part}\n".encode())
    return digest.hexdigest()
