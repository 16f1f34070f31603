"""`lm_pcfg bench data`: one epoch through the batcher, without a model."""

from __future__ import annotations

import os
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lm_pcfg.console import progress
from lm_pcfg.corpus.batches import BatchOptions
from lm_pcfg.corpus.lengths import Histogram, Limits
from lm_pcfg.corpus.opening import OpeningOptions, open_streamed
from lm_pcfg.corpus.preparation.shards import write_ids
from lm_pcfg.corpus.shards.manifest import FORMAT, MANIFEST, ShardEntry, manifest_text
from lm_pcfg.corpus.shards.plan import ShardPlan
from lm_pcfg.corpus.shards.prepared import SHARDS, VOCABULARY, PreparedCorpus
from lm_pcfg.corpus.shards.raw import RawOptions
from lm_pcfg.corpus.stream import BatchStream
from lm_pcfg.corpus.vocabulary import UNKNOWN, Vocabulary, VocabularyOptions

WORDS = 10_000
SHARD_LINES = 250_000
FIRST_BLOCKS = 8  # memory is measured from here on


def measure(
    inputs: list[str],
    *,
    lines: int,
    sentencepiece: Path | None = None,
    field: str = "text",
    by: Literal["cost", "sentences"] = "cost",
    max_length: int | None = 40,
    workers: int = 0,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lm_pcfg_bench_") as scratch:
        if not inputs:
            make_up(Path(scratch) / "corpus", lines)
            inputs = [str(Path(scratch) / "corpus")]
        began = time.perf_counter()
        options = OpeningOptions(
            RawOptions(field), Path(scratch) / "index", VocabularyOptions(size=WORDS), sentencepiece
        )
        text = open_streamed([(inputs, Fraction(1))], None, Limits(max_length), options)
        opened = time.perf_counter() - began
        plan = ShardPlan(text, BatchOptions(by=by), workers=workers)
        began = time.perf_counter()
        next(BatchStream(plan))  # libraries are imported, processes start, a block is read
        first = time.perf_counter() - began
        (source,) = text.sources
        unit = "words" if isinstance(text.vocabulary, Vocabulary) else "pieces"
        report = {
            "first_batch_seconds": round(first, 2),
            **_one_epoch(BatchStream(plan), len(source.corpus.blocks), unit),
        }
        plan.close()
    kind = "prepared" if isinstance(source.corpus, PreparedCorpus) else "raw"
    return {"corpus": text.names, "kind": kind, "workers": workers, "open_seconds": round(opened, 2), **report}


def _one_epoch(stream: BatchStream, blocks: int, unit: str) -> dict[str, Any]:
    batches = stream.batches_per_epoch(0)
    settled = min(batches - 1, batches * FIRST_BLOCKS // blocks)
    words = sentences = largest = total = 0
    early = peak = 0.0
    began = time.perf_counter()
    with progress("batches", batches) as bar:
        for number in range(batches):
            batch = next(stream)
            words, sentences = words + batch.n_words, sentences + batch.n_sentences
            total += batch.cost
            if len(batch.lengths) > 1:  # a single sentence may be above the budget
                largest = max(largest, batch.cost)
            if number == settled:
                early = _resident_megabytes()
            if number % 1000 == 0:
                peak = max(peak, _resident_megabytes())
                bar.advance(min(1000, batches - number))
    seconds = time.perf_counter() - began
    peak = max(peak, _resident_megabytes())
    return {
        "lines": sentences,
        unit: words,
        "batches": batches,
        "seconds": round(seconds, 2),
        f"{unit}_per_second": round(words / seconds),
        "largest_cost_over_mean": round(largest / (total / batches), 4),
        "resident_mb_after_first_blocks": round(early, 1),
        "resident_mb_most_after": round(peak, 1),
        "resident_mb_growth": round(peak - early, 1),
    }


def _resident_megabytes() -> float:
    """Return the resident memory of this process, without its workers, which hold a block each."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def make_up(folder: Path, lines: int, seed: int = 0) -> None:
    """Write a prepared corpus of random words: PTB's lengths (mean 21, standard deviation 10), Zipf's frequencies."""
    (folder / SHARDS).mkdir(parents=True)
    words = [UNKNOWN, *(f"w{k}" for k in range(1, WORDS))]
    vocabulary = Vocabulary(words, VocabularyOptions(size=WORDS))
    vocabulary.save(folder / VOCABULARY)
    cumulative = np.cumsum(1.0 / np.arange(1, WORDS + 1))
    entries: list[ShardEntry] = []
    with progress("lines made up", lines) as bar:
        for number, first in enumerate(range(0, lines, SHARD_LINES)):
            count = min(SHARD_LINES, lines - first)
            generator = np.random.default_rng([seed, number])
            lengths = generator.gamma(4.3, 4.9, size=count).round().astype(np.int64).clip(1, 82)
            draws = generator.random(int(lengths.sum())) * cumulative[-1]
            ids = np.searchsorted(cumulative, draws).astype(np.int32)
            entries.append(write_ids(folder / SHARDS / f"shard-{number:05d}.parquet", lengths, ids))
            bar.advance(count)
    histogram = Histogram.sum([group for entry in entries for group in entry.groups])
    manifest = {
        "format": FORMAT,
        "counts": {"lines": lines, "words": histogram.words, "tokens": histogram.words, "unknown": 0},
        "vocabulary": {"kind": "words", "types": WORDS, "sha256": vocabulary.hash},
        "damage": [],
        "versions": {},
        "shards": [entry.to_json() for entry in entries],
    }
    (folder / MANIFEST).write_text(manifest_text(manifest))
