"""Small files that stand for gigabytes are refused in one line, in bounded memory, and are not called damaged."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from lm_pcfg.corpus import text
from lm_pcfg.corpus.batches import BatchOptions
from lm_pcfg.corpus.lengths import Histogram
from lm_pcfg.corpus.preparation import hub
from lm_pcfg.corpus.preparation import shards as preparation
from lm_pcfg.corpus.preparation.prepare import PrepareOptions, prepare
from lm_pcfg.corpus.shards import blocks, files, loader, manifest, parquet
from lm_pcfg.corpus.shards.errors import ShardError
from lm_pcfg.corpus.shards.files import Chunk
from lm_pcfg.corpus.shards.manifest import PreparedError, ShardEntry
from lm_pcfg.corpus.shards.prepared import PreparedCorpus, verify_all, vocabulary_of
from lm_pcfg.corpus.shards.raw import IndexStore, RawCorpus, RawOptions
from lm_pcfg.corpus.text import TextError, read_lines
from shards import NUMBERS

REPOSITORY = Path(__file__).resolve().parents[1]
KIND = pa.dictionary(pa.int32(), pa.string())


def write_zst(path: Path, part: bytes, times: int) -> Path:
    with path.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as writer:
        for _ in range(times):
            writer.write(part)
    return path


def write_dictionary(path: Path, value: str, rows: int) -> Path:
    """A Parquet file with one value, and its number in every row."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([value]))
    pq.write_table(pa.table({"text": column}), path, compression="zstd", store_schema=False)
    return path


def write_list(path: Path, words: list[str], rows: int) -> Path:
    pq.write_table(pa.table({"text": [words] * rows}), path, compression="zstd")
    return path


def problem_with(folder: Path, file: Path, **options) -> str:
    with pytest.raises(ShardError) as caught:
        RawCorpus("test", [file], RawOptions(**options), NUMBERS, IndexStore(folder / "index"))
    message = str(caught.value)
    assert message.startswith(str(file))
    assert "\n" not in message
    assert "amaged" not in message
    assert "whole" not in message
    return message


# ---- a line or row without end --------------------------------------------------------------------------------------


@pytest.fixture
def short_lines(monkeypatch):
    for module in (text, parquet, hub):
        monkeypatch.setattr(module, "LONGEST_LINE", 1 << 18)
    monkeypatch.setattr(parquet, "SMALL_BATCH", 1 << 18)


@pytest.mark.parametrize("kind", [".txt", ".txt.gz", ".txt.zst", ".jsonl"])
def test_a_line_without_end_is_named(tmp_path, short_lines, kind):
    content = b"w1 w2\n" * 3 + b"w3 " * 200_000
    file = tmp_path / f"a{kind}"
    if kind.endswith(".gz"):
        file.write_bytes(gzip.compress(content))
    elif kind.endswith(".zst"):
        write_zst(file, content, 1)
    else:
        file.write_bytes(content if kind == ".txt" else content.replace(b"w1 w2", b'{"text": "w1 w2"}'))
    assert "line 4 has more than 0 MiB; break it up" in problem_with(tmp_path, file)
    if kind != ".jsonl":
        with pytest.raises(TextError, match="line 4 has more than"):
            list(read_lines(file))


def test_a_line_without_end_on_standard_input(short_lines, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w1\n" + b"w2 " * 200_000)))
    with pytest.raises(TextError, match="line 2 has more than"):
        list(read_lines("-"))


@pytest.mark.parametrize("rows", ["text", "large text", "words", "words of another encoding"])
def test_a_row_without_end_is_named(tmp_path, short_lines, rows):
    values = ["w1 w2", None, "w3 " * 200_000, "w4"]
    file = tmp_path / "a.parquet"
    lists = [value and value.split() for value in values]
    column = pa.array(lists) if "words" in rows else pa.array(values, pa.large_string() if "large" in rows else None)
    other = {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"} if "another" in rows else {}
    pq.write_table(pa.table({"text": column}), file, **other)
    assert "row 3 has more than" in problem_with(tmp_path, file)


def test_what_comes_before_a_line_without_end_is_kept(tmp_path, short_lines):
    (tmp_path / "a.txt").write_bytes(b"w1 w2\n" * 50 + b"w3 " * 200_000)
    corpus = RawCorpus(
        "test", [tmp_path / "a.txt"], RawOptions(on_error="skip"), NUMBERS, IndexStore(tmp_path / "index")
    )
    assert corpus.lines == 50
    assert "line 51" in corpus.damage.files[0]


# ---- texts in the hub's layout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "txt", "txt.gz", "csv", "json"])
def test_a_row_without_end_in_the_hubs_layout_is_named(tmp_path, short_lines, kind):
    """Those of a csv or a .json come through `datasets`, the others are read as files are."""
    folder, values = tmp_path / "hub", ["w1 w2", "w3 " * 200_000, "w4"]
    folder.mkdir()
    file = folder / f"train.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"text": values}), file)
    elif kind in ("jsonl", "json"):
        file.write_text("".join(f'{{"text": "{value}"}}\n' for value in values))
    else:
        content = "".join(f"{value}\n" for value in values).encode()
        file.write_bytes(gzip.compress(content) if kind == "txt.gz" else b"text\n" * (kind == "csv") + content)
    with pytest.raises(ShardError, match=r"(row|line) 2 has more than 0 MiB; break it up"):
        prepare([str(folder)], tmp_path / "out", PrepareOptions(split="train"), processes=1)


def test_rows_of_the_hub_are_gathered_by_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "BYTES_AT_A_TIME", 1000)
    monkeypatch.setattr(preparation, "rows_of_split", lambda *arguments: iter(["w " * 100] * 20))
    source = preparation.Input(0, "some/text", split="train")
    assert [len(rows) for rows in preparation.rows_of(source, preparation.ReadOptions())] == [5] * 4


def test_a_damaged_file_in_the_hubs_layout_is_one_line(tmp_path):
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.csv").write_text('text,more\nw1,w2\nw1,w2,w3,w4\n"')
    with pytest.raises(ShardError, match="hub: reading failed after row 0") as caught:
        prepare([str(tmp_path / "hub")], tmp_path / "out", PrepareOptions(split="train"), processes=1)
    assert "\n" not in str(caught.value)


# ---- more text than a file can have ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [".gz", ".zst"])
def test_a_compressed_text_may_become_so_much(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(text, "ANY_MAY_BECOME", 1 << 20)
    content = b"w1 w2 w3\n" * 200_000
    file = tmp_path / f"a.txt{kind}"
    file.write_bytes(gzip.compress(content) if kind == ".gz" else zstandard.compress(content))
    if kind == ".gz":
        monkeypatch.setattr(text, "MOST_EXPANSION", 100)
    assert "becomes more than 1 MiB of text" in problem_with(tmp_path, file)
    with pytest.raises(TextError, match=r"becomes more than .* decompress it first"):
        list(read_lines(file))
    monkeypatch.setattr(text, "MOST_EXPANSION", 100_000)
    assert RawCorpus("test", [file], RawOptions(), NUMBERS, IndexStore(tmp_path / "index")).lines == 200_000


@pytest.mark.parametrize(("value", "rows"), [("w1 w2 w3", 200_000), ("w1 w2 " * 1000, 200)])
def test_a_parquet_file_may_become_so_much(tmp_path, monkeypatch, value, rows):
    monkeypatch.setattr(text, "ANY_MAY_BECOME", 1 << 20)
    monkeypatch.setattr(files, "BYTES_AT_A_TIME", 1 << 18)
    file = write_dictionary(tmp_path / "a.parquet", value, rows)
    assert "becomes more than 1 MiB of text" in problem_with(tmp_path, file)


def test_batches_of_parquet_are_bounded_by_bytes(tmp_path, monkeypatch):
    file = write_dictionary(tmp_path / "a.parquet", "w1 w2 " * 10_000, 200)
    taken = []
    original = parquet._texts
    monkeypatch.setattr(parquet, "_texts", lambda array, *rest: taken.append(array.nbytes) or original(array, *rest))
    with monkeypatch.context() as patch:
        patch.setattr(parquet, "BYTES_AT_A_TIME", 1 << 20)
        rows = list(parquet.rows(file, "text", 0))
    assert rows == ["w1 w2 " * 10_000] * 200
    assert max(taken) <= 1 << 20
    taken.clear()
    short = tmp_path / "b.parquet"
    pq.write_table(pa.table({"text": [f"w{k}" for k in range(10_000)]}), short)
    assert len(list(parquet.rows(short, "text", 0))) == 10_000
    assert len(taken) <= 4  # the dictionary of ordinary text is no reason for small batches


def test_blocks_are_bounded_by_words(monkeypatch):
    chunks = [(Chunk(0, k, 1), Histogram.of(np.array([1000])), True) for k in range(100)]
    assert len(blocks.group_chunks(chunks, 1000)) == 1
    monkeypatch.setattr(blocks, "MOST_WORDS", 10_000)
    assert [block.histogram.words for block in blocks.group_chunks(chunks, 1000)] == [10_000] * 10


def varint(value: int, width: int = 0) -> bytes:
    """An integer as Thrift writes it, zigzag; width: with leading zeros, which every reader takes."""
    parts = [(2 * value) >> shift & 0x7F for shift in range(0, 7 * width or max(7, (2 * value).bit_length()), 7)]
    return bytes([part | 0x80 for part in parts[:-1]] + parts[-1:])


def test_the_size_of_a_page_is_looked_up_where_the_metadata_lie(tmp_path, monkeypatch):
    file = write_dictionary(tmp_path / "a.parquet", "w1 w2 " * 400_000, 3)
    column = pq.read_metadata(file).row_group(0).column(0)
    true, content = varint(column.total_uncompressed_size), file.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    assert true in content[start:]
    file.write_bytes(content[:start] + content[start:].replace(true, varint(100, len(true))))
    assert pq.read_metadata(file).row_group(0).column(0).total_uncompressed_size == 100
    assert next(parquet.rows(file, "text", 0)) == "w1 w2 " * 400_000
    monkeypatch.setattr(text, "ANY_MAY_BECOME", 1 << 20)
    with pytest.raises(ShardError, match="becomes more than 1 MiB of text"):
        next(parquet.rows(file, "text", 0))


# ---- prepared corpora -----------------------------------------------------------------------------------------------


def prepared_of(folder: Path, length: int, lines: int, **options) -> Path:
    """A prepared corpus whose only shard says one word again and again; options: of how it is written."""
    shard = folder / "shards" / "shard-00000.parquet"
    shard.parent.mkdir(parents=True)
    NUMBERS.save(folder / "vocab")
    offsets = pa.array(np.arange(0, lines * length + 1, length, dtype=np.int32))
    ids = pa.ListArray.from_arrays(offsets, pa.array(np.ones(lines * length, np.int32)))
    pq.write_table(pa.table({"ids": ids}), shard, write_page_checksum=True, **options)
    sha256 = hashlib.sha256(shard.read_bytes()).hexdigest()
    write_manifest(folder, ShardEntry(shard.name, sha256, shard.stat().st_size, (Histogram.of([length] * lines),)))
    return folder


def write_manifest(folder: Path, entry: ShardEntry) -> None:
    counts = {"lines": sum(group.lines for group in entry.groups), "words": entry.words, "tokens": entry.words}
    vocabulary = {"kind": "words", "types": len(NUMBERS), "sha256": NUMBERS.hash}
    content = {"format": 1, "counts": counts, "vocabulary": vocabulary, "damage": [], "versions": {}}
    (folder / "prepare.json").write_text('{"format": 1, "inputs": [], "options": {}}')
    (folder / "manifest.json").write_text(manifest.manifest_text({**content, "shards": [entry.to_json()]}))


def test_a_shard_of_more_words_than_its_bytes_can_stand_for_is_refused(tmp_path):
    folder = prepared_of(tmp_path / "out", 1000, 5000, compression="zstd")
    assert (folder / "shards/shard-00000.parquet").stat().st_size < 2000
    with pytest.raises(PreparedError, match=r"5,000,000 words in [0-9,]+ bytes, .* prepare the corpus again") as caught:
        PreparedCorpus(folder, NUMBERS)
    assert verify_all(folder) == [str(caught.value)]
    assert "damaged" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_large_row_group_takes_a_shard_with_a_bit_a_word(tmp_path, monkeypatch):
    one = prepared_of(tmp_path / "one", 1000, 40, compression="zstd")
    other = prepared_of(tmp_path / "other", 1000, 40, compression="none", use_dictionary=False)
    for folder in (one, other):
        assert len(PreparedCorpus(folder, NUMBERS).read(0).ids) == 40_000
    monkeypatch.setattr(manifest, "MOST_WORDS_OF_A_GROUP", 39_999)
    assert len(PreparedCorpus(other, NUMBERS).read(0).ids) == 40_000  # earlier versions made such of long lines
    with pytest.raises(PreparedError, match=r"a row group of shard-00000\.parquet has too many words"):
        PreparedCorpus(one, NUMBERS)


def test_a_shard_that_is_smaller_than_its_manifest_says_is_not_read(tmp_path):
    folder = prepared_of(tmp_path / "out", 10, 40)
    (entry,) = manifest.read_manifest(folder).shards
    write_manifest(folder, replace(entry, size=entry.size + 1))
    with pytest.raises(ShardError, match="is not what it was"):
        PreparedCorpus(folder, NUMBERS).read(0)


@pytest.mark.parametrize("of_groups", [False, True])
def test_text_that_repeats_itself_is_prepared_so_that_it_is_read(tmp_path, monkeypatch, of_groups):
    monkeypatch.setattr(manifest, "MOST_WORDS_OF_A_GROUP", 1000 if of_groups else 1 << 25)
    monkeypatch.setattr(manifest, "MOST_EXPANSION", 1000 if of_groups else 200)
    monkeypatch.setattr(text, "ANY_MAY_BECOME", 1000)
    (tmp_path / "a.txt").write_text("w1 w1 w1 w1 w1 w1 w1 w1 w1 w1\n" * 20_000)
    found = prepare([str(tmp_path / "a.txt")], tmp_path / "out", PrepareOptions(), processes=1)
    assert found.shards[0].size > 4 * 200_000
    corpus = PreparedCorpus(tmp_path / "out", vocabulary_of(found))
    assert sum(len(corpus.read(block).ids) for block in range(len(corpus.blocks))) == 200_000


def test_ordinary_shards_are_compressed(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"w{k % 7} w{k % 13} w{k % 17}\n" for k in range(20_000)))
    found = prepare([str(tmp_path / "a.txt")], tmp_path / "out", PrepareOptions(), processes=1)
    assert found.shards[0].size < 60_000


def test_large_blocks_are_gathered_in_parts(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("".join(f"{'w1 ' * (1 + k % 5)}w{k % 13}\n" for k in range(500)))
    found = prepare([str(tmp_path / "a.txt")], tmp_path / "out", PrepareOptions(), processes=1)
    vocabulary = vocabulary_of(found).with_end_of_sentence()
    streamed = blocks.StreamedText([blocks.Source(PreparedCorpus(tmp_path / "out", vocabulary))], vocabulary)
    maker = loader.BlockMaker(streamed, BatchOptions(), 0, "fail")
    whole = maker.make(loader.Request(0, 0, 0, None))
    monkeypatch.setattr(loader, "GATHERED_AT_A_TIME", 50)
    parts = maker.make(loader.Request(0, 0, 0, None))
    assert len(whole.words) == 500 * 5
    assert whole.words.tolist() == parts.words.tolist()
    assert whole.lengths.tolist() == parts.lengths.tolist()


# ---- memory ---------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, tempfile
from pathlib import Path
import datasets, pyarrow.parquet
from lm_pcfg.corpus.preparation.prepare import PrepareOptions, prepare
from lm_pcfg.corpus.shards.raw import IndexStore, RawOptions, build_vocabulary
from lm_pcfg.corpus.vocabulary import VocabularyOptions
from lm_pcfg.errors import UserError

def most_memory():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 2**20

before = most_memory()
for file in sys.argv[1:]:
    split = "train" if Path(file).is_dir() else None
    for use in (lambda: prepare([file], Path(tempfile.mkdtemp()), PrepareOptions(split=split), processes=1),
                lambda: build_vocabulary([Path(file)], RawOptions(), VocabularyOptions(), IndexStore(Path(tempfile.mkdtemp())))):
        try:
            use()
        except UserError as error:
            print(error)
print(most_memory() - before)
"""  # noqa: E501


@pytest.mark.long
def test_bombs_take_no_gigabytes(tmp_path):
    bombs = [
        write_zst(tmp_path / "line.txt.zst", b"a" * (1 << 20), 2600),
        write_dictionary(tmp_path / "rows.parquet", "x" * (1 << 20), 4096),
        write_list(tmp_path / "words.parquet", ["x" * 1000] * 20_000, 100),
    ]
    assert all(bomb.stat().st_size < 100_000 for bomb in bombs)
    for name in ("rows.parquet", "line.txt.zst"):
        bombs.append(tmp_path / name.partition(".")[0])
        bombs[-1].mkdir()
        shutil.copy(tmp_path / name, bombs[-1] / name.replace(bombs[-1].name, "train"))
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, bombs)], capture_output=True, text=True, timeout=120,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'kernels'}"},
    )  # fmt: skip
    *messages, gigabytes = result.stdout.splitlines()
    assert len(messages) == 10, result.stderr
    assert not any("amaged" in message for message in messages)
    assert float(gigabytes) < 0.9
