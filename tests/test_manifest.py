"""The manifest of a prepared corpus is read in little memory; notes on finished shards are trusted if whole."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from lm_pcfg.corpus.lengths import Histogram
from lm_pcfg.corpus.preparation import prepare as preparing
from lm_pcfg.corpus.preparation.parts import Part, prepare_part
from lm_pcfg.corpus.preparation.prepare import PrepareOptions, prepare
from lm_pcfg.corpus.shards import manifest
from lm_pcfg.corpus.shards.manifest import PreparedError, ShardEntry, manifest_text, read_manifest
from lm_pcfg.errors import UserError
from shards import random_lines, write_shard

OPTIONS = PrepareOptions(shard_lines=40)


def entry_of(number: int, lengths: np.ndarray) -> ShardEntry:
    starts = range(0, len(lengths), 16_384)
    groups = tuple(Histogram.of(lengths[start : start + 16_384]) for start in starts)
    return ShardEntry(f"shard-{number:05d}-00000.parquet", "0" * 64, 10_000_000, groups)


def write(folder: Path, entries: list[ShardEntry]) -> int:
    """Write a manifest of these shards; return its bytes."""
    lines, words = (
        sum(group.lines for entry in entries for group in entry.groups),
        sum(entry.words for entry in entries),
    )
    content = {
        "format": 1, "counts": {"lines": lines, "words": words, "tokens": words}, "damage": [], "versions": {},
        "vocabulary": {"kind": "words", "types": 10, "sha256": "0" * 64}, "shards": [one.to_json() for one in entries],
    }  # fmt: skip
    return (folder / "manifest.json").write_text(manifest_text(content))


# ---- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [False, True])
def test_a_manifest_takes_little_more_memory_than_its_bytes(tmp_path, monkeypatch, damaged):
    monkeypatch.setattr(manifest, "MOST_BYTES_OF_A_LINE", 1 << 13)
    size = write(tmp_path, [entry_of(k, np.arange(300 + k, 700 + k)) for k in range(60)])
    assert size > 200_000
    if damaged:
        file = tmp_path / "manifest.json"
        file.write_text(file.read_text().replace('"checksum": "', '"checksum": "0'))
    tracemalloc.start()
    try:
        if damaged:
            with pytest.raises(PreparedError, match="checksum"):
                read_manifest(tmp_path)
        else:
            read_manifest(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 4 * size
    finally:
        tracemalloc.stop()


def test_every_layout_of_a_manifest_holds_the_same(tmp_path):
    write(tmp_path, [entry_of(k, np.arange(1, 20 + k)) for k in range(3)])
    file = tmp_path / "manifest.json"
    first, content = read_manifest(tmp_path), json.loads(file.read_bytes())
    for text in (json.dumps(content), json.dumps(content, indent=1), json.dumps(dict(sorted(content.items())))):
        file.write_text(text)
        assert read_manifest(tmp_path) == first
    for text in (manifest_text(content)[:-3], manifest_text(content) + "{}", manifest_text(content)[2:]):
        file.write_text(text)
        with pytest.raises(PreparedError, match="damaged"):
            read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("limit", "most", "message"),
    [
        ("MOST_BYTES", 1000, "larger than 1,000 bytes"),
        ("MOST_GROUPS", 5, "more than 5 row groups"),
        ("MOST_BYTES_OF_A_LINE", 100, "a line has"),
        ("MOST_BYTES_OF_KEYS", 100, "do not begin in its first"),
    ],
)
def test_a_manifest_has_limits(tmp_path, monkeypatch, limit, most, message):
    write(tmp_path, [entry_of(k, np.arange(1, 200)) for k in range(6)])
    read_manifest(tmp_path)
    if limit == "MOST_BYTES_OF_KEYS":
        monkeypatch.setattr(manifest, "MOST_BYTES_OF_A_LINE", 5000)  # so that it is not read as a whole
    monkeypatch.setattr(manifest, limit, most)
    with pytest.raises(PreparedError, match=message):
        read_manifest(tmp_path)


def test_a_billion_lines_are_far_from_the_limits():
    lengths = np.random.default_rng(0).gamma(4.3, 4.9, size=250_000).round().clip(1, 82)
    entry = entry_of(0, lengths)
    shards = 1_000_000_000 // 250_000
    assert 4 * shards * len(json.dumps(entry.to_json())) < manifest.MOST_BYTES
    assert 4 * shards * len(entry.groups) < manifest.MOST_GROUPS
    documents = np.random.default_rng(0).lognormal(5.7, 1, size=250_000).round().clip(1)
    assert 8 * len(json.dumps(entry_of(0, documents).to_json())) < manifest.MOST_BYTES_OF_A_LINE


# ---- notes on finished shards ---------------------------------------------------------------------------------------


@pytest.fixture
def half_made(tmp_path, monkeypatch):
    """A corpus of three shards that was stopped before its manifest; `whole` beside it was not."""
    write_shard(tmp_path / "a.txt", random_lines(120, longest=5))
    prepare([str(tmp_path / "a.txt")], tmp_path / "whole", OPTIONS, processes=1)
    stop(tmp_path, monkeypatch)
    return tmp_path / "out"


def stop(folder: Path, monkeypatch) -> None:
    def stopped(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparing, "write_manifest", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare([str(folder / "a.txt")], folder / "out", OPTIONS, processes=1)


def go_on(half_made: Path) -> None:
    """Repeat the command; what comes of it is that of one that was not stopped."""
    prepare([str(half_made.parent / "a.txt")], half_made, OPTIONS, processes=1)
    for name in ("manifest.json", "vocab/words.txt", *(f"shards/shard-00000-0000{k}.parquet" for k in range(3))):
        assert (half_made / name).read_bytes() == (half_made.parent / "whole" / name).read_bytes()
    assert len(list((half_made / "shards").iterdir())) == 3


def change(note: Path, how: str) -> None:
    content = json.loads(note.read_bytes())
    if how == "counts":
        content["counts"]["words"] += 1000
    elif how == "lengths":
        content["entry"]["row_groups"][0][0][1] += 1
        content["entry"]["row_groups"][0][1][1] -= 1
    else:
        del content["checksum"]
    note.write_text(json.dumps(content) + "\n")


@pytest.mark.parametrize(
    ("how", "why"),
    [("counts", "its content does not match its checksum"), ("lengths", "its content does not match its checksum"),
     ("an earlier version", "has no checksum")],
)  # fmt: skip
def test_a_note_that_was_changed_is_told_and_its_shard_made_again(half_made, capsys, how, why):
    change(half_made / "shards/shard-00000-00001.parquet.json", how)
    go_on(half_made)
    told = capsys.readouterr().err
    assert f"shard-00000-00001.parquet.json: {why}" in told.replace("\n", " ")
    assert "2 of 3 shards were finished before" in told


def test_whole_notes_are_trusted(half_made, capsys):
    go_on(half_made)
    told = capsys.readouterr().err
    assert "3 of 3 shards were finished before" in told
    assert "warning" not in told


def test_a_changed_note_of_a_part_is_found(tmp_path, capsys):
    for name in ("a", "b"):
        write_shard(tmp_path / f"{name}.txt", random_lines(60, longest=5))
    inputs = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    prepare(inputs, tmp_path / "whole", OPTIONS, processes=1)
    out = tmp_path / "out"
    for number in (1, 2):  # the second has all words, and makes its shards
        prepare_part(inputs, out, OPTIONS, Part(number, 2), processes=1)
    change(min((out / "shards").glob("*.parquet.json")), "counts")
    (out / "parts/encoded-2.json").unlink()
    for number in (1, 2):
        prepare_part(inputs, out, OPTIONS, Part(number, 2), processes=1)
    assert "does not match its checksum" in capsys.readouterr().err
    assert (out / "manifest.json").read_bytes() == (tmp_path / "whole/manifest.json").read_bytes()


# ---- its vocabulary -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["words.txt", "vocabulary.json"])
def test_a_changed_vocabulary_of_a_half_made_corpus_says_what_helps(half_made, file):
    path = half_made / "vocab" / file
    path.write_bytes(path.read_bytes().replace(b"1", b"x", 1))
    with pytest.raises(UserError, match=r"; remove .*out/vocab and run the same command again") as caught:
        go_on(half_made)
    assert "copy" not in str(caught.value)
    shutil.rmtree(half_made / "vocab")
    go_on(half_made)
