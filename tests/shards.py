"""Small corpora in shards, for tests."""

from __future__ import annotations

import copy
import gzip
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from lm_pcfg.corpus.batches import Batch
from lm_pcfg.corpus.lengths import Histogram
from lm_pcfg.corpus.sentences import Damage
from lm_pcfg.corpus.shards.blocks import BlockText, ShardedCorpus, fingerprint_of, group_chunks
from lm_pcfg.corpus.shards.files import Chunk
from lm_pcfg.corpus.stream import BatchStream
from lm_pcfg.corpus.vocabulary import UNKNOWN, Vocabulary, VocabularyOptions

NUMBERS = Vocabulary([UNKNOWN, *(f"w{k}" for k in range(1, 50))], VocabularyOptions())


class MemoryCorpus(ShardedCorpus):
    """Shards of lines of given lengths; word k of line n has id (n + k) % 50, so that a batch tells what it holds."""

    def __init__(self, shards: list[list[int]], block_lines: int, forward_only: bool = False, vocabulary=NUMBERS):
        self.name, self.damage = "memory", Damage()
        self.shards, self.vocabulary = shards, vocabulary
        self.fingerprint = fingerprint_of([shards, block_lines])
        chunks = []
        for number, lengths in enumerate(shards):
            for first in range(0, len(lengths), block_lines):
                some = lengths[first : first + block_lines]
                chunk = Chunk(number, first, len(some), skip=first)
                chunks.append((chunk, Histogram.of(np.array(some)), not forward_only))
        self.blocks = group_chunks(chunks, block_lines)

    def read(self, block: int) -> BlockText:
        parts = [self.shards[c.shard][c.first_row : c.first_row + c.rows] for c in self.blocks[block].chunks]
        lengths = np.array([length for part in parts for length in part])
        numbers = self.blocks[block].first_line + np.arange(len(lengths))
        kept = lengths > 0
        lengths, numbers = lengths[kept], numbers[kept]
        ids = [(number + k) % 50 for number, length in zip(numbers, lengths, strict=True) for k in range(length)]
        packed = self.vocabulary.stored(np.array(ids, np.int32))
        return BlockText(packed, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), numbers)


def take_epoch(stream: BatchStream) -> list[Batch]:
    epoch, batches = stream.epoch, []
    while stream.epoch == epoch:
        batches.append(next(stream))
    return batches


def lines_of(batches: list[Batch]) -> list[int]:
    return [line for batch in batches for line in batch.lines.tolist()]


def threads_as_workers(processes, initializer, arguments):
    """In place of `make_pool`: the same code paths without the time that processes take to start.

    One thread, and a copy of what it works with, as a process would have: open files are not shared.
    """
    return ThreadPoolExecutor(1, initializer=initializer, initargs=copy.deepcopy(arguments))


def random_lines(count: int, seed: int = 0, longest: int = 12, blank: float = 0.02) -> list[str]:
    generator = random.Random(seed)
    lines = []
    for _ in range(count):
        words = [f"w{min(49, int(generator.expovariate(0.15)))}" for _ in range(generator.randint(1, longest))]
        lines.append("" if generator.random() < blank else " ".join(words))
    return lines


def write_shard(path: Path, lines: list[str], *, row_group: int | None = None) -> Path:
    """As its name says: .txt, .txt.gz, .txt.zst, .jsonl, .parquet"""
    text = "".join(f"{line}\n" for line in lines).encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text))
    elif path.suffix == ".zst":
        path.write_bytes(zstandard.ZstdCompressor().compress(text))
    elif path.suffix == ".jsonl":
        import json

        path.write_text("".join(json.dumps({"id": k, "text": line}) + "\n" for k, line in enumerate(lines)))
    elif path.suffix == ".parquet":
        table = pa.table({"id": list(range(len(lines))), "text": lines})
        pq.write_table(table, path, row_group_size=row_group or max(1, len(lines)))
    else:
        path.write_bytes(text)
    return path
