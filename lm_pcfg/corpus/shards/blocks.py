"""A corpus as blocks of lines that are read and shuffled together.

Blocks do not depend on seed, epoch, ranks or workers. Each knows how many lines of which length it has, so that every
rank can tell how many batches every block will give, without reading it and without asking another rank.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from lm_pcfg.corpus.lengths import Histogram, Limits, Skipped
from lm_pcfg.corpus.pieces import AnyVocabulary
from lm_pcfg.corpus.sentences import Damage, Sentences, sentences_within
from lm_pcfg.corpus.shards.files import Chunk

MOST_WORDS = 1 << 25  # of a block of several chunks: lines of thousands of words are fewer to a block


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
    literal: np.ndarray | None = None  # int64 [lines]: how many `<unk>` are written in each; None: not known


class ShardedCorpus(ABC):
    """Blocks, and how to read one. Goes to other processes, so it holds no open file until the first read."""

    name: str
    blocks: Sequence[Block]
    fingerprint: str  # of the content
    damage: Damage

    @abstractmethod
    def read(self, block: int) -> BlockText:
        """Read a block; raise ShardError if the shard is not what it was."""

    @property
    def histogram(self) -> Histogram:
        return Histogram.sum([block.histogram for block in self.blocks])

    @property
    def lines(self) -> int:
        return sum(block.histogram.lines for block in self.blocks)


def group_chunks(chunks: Iterable[tuple[Chunk, Histogram, bool]], block_lines: int, first_line: int = 0) -> list[Block]:
    """Group consecutive chunks into blocks of about block_lines lines; small shards share one, for full batches.

    The bool of a chunk: whether it can be opened without reading what comes before it. Blocks of a shard that can only
    be read forward stay together, in their order.
    """
    blocks: list[Block] = []
    waiting: list[tuple[Chunk, Histogram]] = []
    lines = words = 0

    def close() -> None:
        nonlocal waiting, lines, words, first_line
        if waiting:
            blocks.append(Block(tuple(chunk for chunk, _ in waiting), first_line,
                                Histogram.sum([histogram for _, histogram in waiting]), None))  # fmt: skip
            first_line += lines
        waiting, lines, words = [], 0, 0

    for chunk, histogram, opens_here in chunks:
        if lines + histogram.lines > block_lines or words + histogram.words > MOST_WORDS:
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
        words += histogram.words
    close()
    return blocks


def fingerprint_of(parts: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part}\n".encode())
    return digest.hexdigest()


# ---- a text of several corpora --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    corpus: ShardedCorpus
    weight: Fraction = Fraction(1)  # how many times it is read in an epoch


@dataclass(frozen=True)
class StreamedText:
    """A text that stays in its shards; `Sentences` is one in memory, and has the same counts."""

    sources: Sequence[Source]
    vocabulary: AnyVocabulary
    limits: Limits = field(default_factory=Limits)

    @property
    def ends(self) -> bool:
        """Whether sentences end explicitly, with `<eos>`."""
        return self.vocabulary.end_id is not None

    @property
    def remark(self) -> str:
        """What `describe` adds about this kind of text."""
        return f"streamed from {self.names}"

    @property
    def unit(self) -> str:
        """What lengths count: words, or pieces of words."""
        return self.vocabulary.unit

    @property
    def names(self) -> str:
        return ", ".join(source.corpus.name for source in self.sources)

    @cached_property
    def first_lines(self) -> list[int]:
        """The number of the first line of each corpus, counted over all corpora."""
        return np.cumsum([0, *(source.corpus.lines for source in self.sources)]).tolist()

    @cached_property
    def _histogram(self) -> Histogram:
        return Histogram.sum([source.corpus.histogram for source in self.sources])

    @property
    def lines(self) -> int:
        return self._histogram.kept(self.limits, self.ends).lines

    @property
    def words(self) -> int:
        return self._histogram.kept(self.limits, self.ends).words

    def longest(self, count: int) -> list[int]:
        """Return the lengths in the chart, with `<eos>`, of so many of the longest lines."""
        return [length + int(self.ends) for length in self._histogram.kept(self.limits, self.ends).longest(count)]

    @property
    def skipped(self) -> Skipped:
        return self._histogram.skipped(self.limits, self.ends)

    @property
    def damage(self) -> Damage:
        parts = [source.corpus.damage for source in self.sources]
        return Damage([message for part in parts for message in part.files], sum(part.lines for part in parts))

    def in_memory(self) -> Sentences:
        """Read all of it into memory, as validation needs it; every corpus once, whatever its weight."""
        blocks = [
            (source.corpus.read(number), first_line)
            for source, first_line in zip(self.sources, self.first_lines, strict=False)
            for number in range(len(source.corpus.blocks))
        ]
        none = [np.empty(0, np.int64)]
        literal = [block.literal for block, _ in blocks if block.literal is not None]
        sentences = sentences_within(
            self.limits,
            ids=np.concatenate([block.ids for block, _ in blocks] or none),
            lengths=np.concatenate([np.diff(block.offsets) for block, _ in blocks] or none),
            line_numbers=np.concatenate([first_line + block.lines + 1 for block, first_line in blocks] or none),
            vocabulary=self.vocabulary,
            literal=np.concatenate(literal or none) if len(literal) == len(blocks) else None,
        )
        return replace(sentences, skipped=self.skipped)
