"""Speed and memory of the data path, as `lm_pcfg bench data` measures them (`make bench-data`: 10 million lines)."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm_pcfg.bench.data import measure
from lm_pcfg.corpus.preparation.prepare import PrepareOptions, prepare
from shards import random_lines, write_shard


@pytest.mark.long
def test_two_million_lines_in_bounded_memory():
    report = measure([], lines=2_000_000)
    assert report["lines"] > 1_800_000  # the others have more than 40 words
    assert report["resident_mb_growth"] < 200
    assert report["words_per_second"] >= 300_000
    assert report["largest_cost_over_mean"] <= 1.5


@pytest.mark.long
def test_raw_text_with_pieces_is_quick_enough(tmp_path: Path):
    lines = random_lines(60_000, longest=40)
    files = [write_shard(tmp_path / f"{k}.txt", lines[k::2]) for k in range(2)]
    options = PrepareOptions(kind="unigram", pieces=120, shard_lines=30_000)
    prepare([str(files[0])], tmp_path / "prepared", options)
    model = tmp_path / "prepared/vocab/pieces.model"
    report = measure([str(file) for file in files], lines=0, sentencepiece=model, max_length=None)
    words = sum(len(line.split()) for line in lines)
    assert report["kind"] == "raw"
    assert report["lines"] == sum(bool(line) for line in lines)
    assert report["pieces"] > words
    assert words / report["seconds"] >= 100_000


@pytest.mark.parametrize("by", ["cost", "sentences"])
def test_the_embedded_corpus(by, tmp_path, monkeypatch):
    """Even batches on a corpus whose lengths nobody chose for it."""
    monkeypatch.chdir(tmp_path)
    report = measure(["embedded:train"], lines=0, by=by, max_length=None, workers=1)
    assert report["workers"] == 1
    if by == "cost":
        assert report["largest_cost_over_mean"] <= 1.5
