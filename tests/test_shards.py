"""Shards as files: every kind gives the same lines, bad ones are named and counted, nothing is silently lost."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm_pcfg.corpus.batches import BatchOptions, batch_hash
from lm_pcfg.corpus.lengths import Limits
from lm_pcfg.corpus.preparation.prepare import PrepareOptions, prepare
from lm_pcfg.corpus.shards import loader
from lm_pcfg.corpus.shards.blocks import Source, StreamedText
from lm_pcfg.corpus.shards.errors import ShardError
from lm_pcfg.corpus.shards.files import find_shards
from lm_pcfg.corpus.shards.plan import ShardPlan
from lm_pcfg.corpus.shards.prepared import PreparedCorpus, read_manifest, vocabulary_of
from lm_pcfg.corpus.shards.processes import make_pool
from lm_pcfg.corpus.shards.raw import IndexStore, RawCorpus, RawOptions, build_vocabulary
from lm_pcfg.corpus.stream import BatchStream
from lm_pcfg.corpus.text import TextError
from lm_pcfg.corpus.vocabulary import VocabularyOptions
from lm_pcfg.errors import UserError
from shards import NUMBERS, lines_of, random_lines, take_epoch, threads_as_workers, write_shard

KINDS = [".txt", ".txt.gz", ".txt.zst", ".jsonl", ".jsonl.gz", ".parquet"]


@pytest.fixture(autouse=True)
def quick_workers(monkeypatch):
    monkeypatch.setattr(loader, "make_pool", threads_as_workers)


def write_kind(path: Path, lines: list[str]) -> Path:
    if path.name.endswith(".jsonl.gz"):
        import gzip

        plain = write_shard(path.with_suffix(""), lines)
        path.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
        return path
    return write_shard(path, lines, row_group=70)


def raw(
    folder: Path, files: list[Path], *, block_lines: int = 32, on_error: str = "fail", vocabulary=NUMBERS
) -> RawCorpus:
    return RawCorpus("test", files, RawOptions("text", block_lines, on_error), vocabulary, IndexStore(folder / "index"))


def stream_of(corpus, ranks: int = 1, **arguments) -> list[BatchStream]:
    text = StreamedText([Source(corpus)], NUMBERS, Limits(10, 2))
    plans = [ShardPlan(text, BatchOptions(sentences=4), **arguments) for _ in range(ranks)]
    return [BatchStream(plan, rank=rank, world_size=ranks) for rank, plan in enumerate(plans)]


def prepared(folder: Path) -> PreparedCorpus:
    return PreparedCorpus(folder, vocabulary_of(read_manifest(folder)))


def words_by_line(streams: list[BatchStream]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for stream in streams:
        for batch in take_epoch(stream):
            ends = np.cumsum(batch.lengths)
            for line, end, length in zip(batch.lines.tolist(), ends, batch.lengths, strict=True):
                assert line not in found
                found[line] = batch.words[end - length : end].tolist()
    return found


def expected(lines: list[str]) -> dict[int, list[int]]:
    ids = NUMBERS.tokenise(lines)
    return {number: own for number, own in enumerate(ids) if 2 <= len(own) <= 10}


# ---- every kind -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shards", "ranks", "workers"), [(1, 1, 0), (1, 5, 2), (3, 2, 1), (7, 3, 0)])
def test_every_kind_of_shard_gives_every_line_once(tmp_path, kind, shards, ranks, workers):
    lines = random_lines(200, seed=shards)
    parts = [lines[k * 200 // shards : (k + 1) * 200 // shards] for k in range(shards)]
    files = [write_kind(tmp_path / f"part-{k}{kind}", part) for k, part in enumerate(parts)]
    streams = stream_of(raw(tmp_path, files), ranks, workers=workers)
    assert words_by_line(streams) == expected(lines)
    assert words_by_line(streams) == expected(lines)  # the second epoch
    for stream in streams:
        stream.close()


def test_lines_are_what_the_rest_of_the_house_takes_for_lines(tmp_path):
    text = "\ufeffw1 w2\r\nw3 w4\u2028w5 w6\n\n w7\u00a0w8 \r\nw9\x0cw10\x85w11 w12"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert words_by_line(stream_of(raw(tmp_path, [tmp_path / "a.txt"]))) == {
        0: [1, 2], 1: [3, 4, 5, 6], 3: [7, 8], 4: [9, 10, 11, 12],
    }  # fmt: skip


def test_a_row_with_several_lines_and_one_with_words(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "w1 w2\\nw3 w4\\n"}\n\n{"text": null}\n{"text": ["w5", "w6"]}\n')
    assert list(words_by_line(stream_of(raw(tmp_path, [tmp_path / "a.jsonl"]))).values()) != []
    found = words_by_line(stream_of(raw(tmp_path, [tmp_path / "a.jsonl"])))
    assert sorted(found.values()) == [[1, 2], [3, 4], [5, 6]]
    pq.write_table(pa.table({"text": [["w1", "w2"], ["w3", "w4"]]}), tmp_path / "a.parquet")
    assert sorted(words_by_line(stream_of(raw(tmp_path, [tmp_path / "a.parquet"]))).values()) == [[1, 2], [3, 4]]


def test_a_huge_line_is_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("w1 w2\n" + "w3 " * 1_000_000 + "\nw4 w5")
    corpus = raw(tmp_path, [tmp_path / "a.txt"])
    assert corpus.histogram.lengths.tolist() == [2, 1_000_000]
    assert words_by_line(stream_of(corpus)) == {0: [1, 2], 2: [4, 5]}


def test_worker_processes_give_the_same_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "make_pool", make_pool)
    files = [write_kind(tmp_path / f"{k}.txt.gz", random_lines(100, seed=k)) for k in range(2)]
    corpus = raw(tmp_path, files)
    (here,), (elsewhere,) = stream_of(corpus), stream_of(corpus, workers=2)
    hashes = [[batch_hash(batch) for batch in take_epoch(stream)] for stream in (here, elsewhere)]
    assert hashes[0] == hashes[1]
    elsewhere.close()


def test_finding_shards(tmp_path):
    for name in ("b.txt", "a.txt.gz", "deep/c.jsonl", ".hidden/d.txt", "notes.md", "[1].txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    names = [str(path.relative_to(tmp_path)) for path in find_shards([str(tmp_path)])]
    assert names == ["[1].txt", "a.txt.gz", "b.txt", "deep/c.jsonl"]
    assert find_shards([str(tmp_path / "*.txt")]) == [tmp_path / "[1].txt", tmp_path / "b.txt"]
    assert find_shards([str(tmp_path / "[1].txt")]) == [tmp_path / "[1].txt"]
    assert find_shards([str(tmp_path / "notes.md")]) == [tmp_path / "notes.md"]
    for wrong, message in (("gone.txt", "no such file"), ("*.csv", "no file matches"), (".hidden/../deep/..", "twice")):
        with pytest.raises(TextError, match=message):
            find_shards([str(tmp_path / "b.txt"), str(tmp_path / wrong), str(tmp_path / "b.txt")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(TextError, match="no file of text"):
        find_shards([str(tmp_path / "empty")])


def test_a_parquet_file_with_brackets_in_its_name(tmp_path):
    lines = random_lines(20)
    assert words_by_line(stream_of(raw(tmp_path, [write_shard(tmp_path / "part[0]*.parquet", lines)]))) == expected(
        lines
    )


@pytest.mark.parametrize("sizes", [(0, 30), (20, 0, 0, 10), (30, 0), (15, 15)])
def test_empty_row_groups_of_parquet_are_no_damage(tmp_path, sizes):
    lines = random_lines(30)
    table = pa.table({"text": lines})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        at = 0
        for size in sizes:
            writer.write_table(table.slice(at, size))
            at += size
    groups = pq.ParquetFile(tmp_path / "a.parquet").metadata
    assert [groups.row_group(k).num_rows for k in range(groups.num_row_groups)] == list(sizes)
    assert words_by_line(stream_of(raw(tmp_path, [tmp_path / "a.parquet"], block_lines=8))) == expected(lines)


def test_a_parquet_file_that_was_written_anew_is_read_anew(tmp_path):
    for lines in (random_lines(100, seed=1), random_lines(300, seed=2)):  # 2 row groups, then 5
        file = write_kind(tmp_path / "a.parquet", lines)
        assert words_by_line(stream_of(raw(tmp_path, [file]))) == expected(lines)


def test_vocabulary_of_many_shards(tmp_path):
    lines = random_lines(120)
    files = [write_kind(tmp_path / f"{k}{kind}", lines[20 * k : 20 * k + 20]) for k, kind in enumerate(KINDS)]
    options, store = VocabularyOptions(size=20), IndexStore(tmp_path / "index")
    built = build_vocabulary(files, RawOptions(), options, store)
    from lm_pcfg.corpus.vocabulary import Vocabulary

    one = Vocabulary.build((line.split() for line in lines), options)
    assert (built, built.training_words, built.training_unknown) == (one, one.training_words, one.training_unknown)
    assert build_vocabulary(files, RawOptions(), options, store) == one  # as it was kept


# ---- the index ------------------------------------------------------------------------------------------------------


def test_the_index_is_kept_and_made_anew_when_a_file_changes(tmp_path, monkeypatch):
    from lm_pcfg.corpus.shards import raw as raw_corpus

    calls = []
    original = raw_corpus.index_shard
    monkeypatch.setattr(raw_corpus, "index_shard", lambda *a: calls.append(a[0].name) or original(*a))
    file = write_shard(tmp_path / "a.txt", ["w1 w2"] * 10)
    first = raw(tmp_path, [file])
    assert raw(tmp_path, [file]).fingerprint == first.fingerprint
    assert calls == ["a.txt"]
    write_shard(file, ["w1 w2"] * 11)
    assert raw(tmp_path, [file]).fingerprint != first.fingerprint
    assert calls == ["a.txt"] * 2
    for stored in (tmp_path / "index").glob("*.json"):
        stored.write_text("{")  # half of it: as good as none
    raw(tmp_path, [file])
    assert calls == ["a.txt"] * 3


def test_an_index_with_damage_is_made_anew(tmp_path, monkeypatch):
    """A disk that failed once: the file is as it was, so its name, size and time say nothing."""
    from lm_pcfg.corpus.shards import raw as raw_corpus

    file = write_shard(tmp_path / "a.txt", ["w1 w2"] * 40)
    options, store = RawOptions("text", 32, "skip"), IndexStore(tmp_path / "index")

    def failing(*arguments):
        yield from list(original(*arguments))[:1]
        raise ShardError(f"{file}: reading failed")

    original = raw_corpus.scan
    with monkeypatch.context() as patch:
        patch.setattr(raw_corpus, "scan", failing)
        for _ in range(2):
            assert raw(tmp_path, [file], on_error="skip").damage.files == [f"{file}: reading failed"]
        assert build_vocabulary([file], options, VocabularyOptions(), store).training_words == 64
    assert raw(tmp_path, [file], on_error="skip").damage.files == []
    calls = []
    monkeypatch.setattr(raw_corpus, "index_shard", lambda *a: calls.append(a))
    assert raw(tmp_path, [file], on_error="skip").damage.files == []
    assert calls == []  # what has no damage is kept
    monkeypatch.undo()
    assert build_vocabulary([file], options, VocabularyOptions(), store).training_words == 80


def test_an_index_folder_that_cannot_be_written_is_one_line():
    with pytest.raises(UserError, match=r"^/proc/\S+: cannot be written \(.*\); set data.index_folder"):
        IndexStore(Path("/proc")).get({}, dict)


def test_ranks_that_waited_share_an_index_with_damage(tmp_path):
    from concurrent.futures import ThreadPoolExecutor
    from threading import Event

    store, begun, calls = IndexStore(tmp_path / "index"), Event(), []

    def make():
        calls.append(1)
        begun.set()
        time.sleep(0.5)
        return {"damaged": True}

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(store.get, {}, make)
        assert begun.wait(10)
        others = [pool.submit(store.get, {}, make) for _ in range(2)]
    assert [other.result() for other in others] == [first.result()] * 2
    assert len(calls) == 1
    store.get({}, make)
    assert len(calls) == 2


# ---- bad shards -----------------------------------------------------------------------------------------------------


def damaged(folder: Path, kind: str) -> Path:
    """A shard of 200 lines with something wrong with it."""
    lines = [f"w{k % 50} w1 w2" for k in range(200)]
    if kind in ("truncated gzip", "truncated zstd"):
        # incompressible words, so that the cut is in the middle
        lines = [
            " ".join(f"{word:x}" for word in np.random.default_rng(k).integers(0, 2**40, 3)) for k in range(20_000)
        ]
        path = write_shard(folder / ("bad.txt.gz" if "gzip" in kind else "bad.txt.zst"), lines)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif kind == "corrupt Parquet":
        path = write_shard(folder / "bad.parquet", lines)
        content = bytearray(path.read_bytes())
        path.write_bytes(content[: len(content) // 2])
    elif kind == "invalid UTF-8":
        path = write_shard(folder / "bad.txt", lines)
        path.write_bytes(path.read_bytes().replace(b"w7 ", b"caf\xe9 ", 1))
    elif kind == "invalid JSON":
        path = write_shard(folder / "bad.jsonl", lines)
        path.write_bytes(path.read_bytes() + b'{"text": "w1 w2\n')
    elif kind == "wrong field":
        path = folder / "bad.jsonl"
        path.write_text('{"content": "w1 w2"}\n')
    elif kind == "binary":
        path = folder / "bad.txt"
        path.write_bytes(b"\x00\x01\x02" * 50)
    else:
        path = folder / "bad.txt"
        path.write_bytes(b"")
    return path


BAD = {
    "truncated gzip": "reading failed", "truncated zstd": "reading failed", "corrupt Parquet": "damaged Parquet",
    "invalid UTF-8": "line 8 is not valid UTF-8", "invalid JSON": "invalid JSON", "wrong field": "no field 'text'",
    "binary": "binary", "empty": "is empty",
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_shard_stops_the_start_and_is_named(tmp_path, kind):
    bad, good = damaged(tmp_path, kind), write_shard(tmp_path / "good.txt", ["w1 w2 w3"] * 50)
    with pytest.raises(ShardError) as caught:
        raw(tmp_path, [good, bad])
    message = str(caught.value)
    assert message.startswith(str(bad))
    assert BAD[kind] in message
    assert "\n" not in message


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_shard_can_be_left_out_and_is_counted(tmp_path, kind):
    bad, good = damaged(tmp_path, kind), write_shard(tmp_path / "good.txt", ["w1 w2 w3"] * 50)
    corpus = raw(tmp_path, [bad, good], on_error="skip")
    found = words_by_line(stream_of(corpus, 2, on_error="skip"))
    assert list(found.values()).count([1, 2, 3]) >= 50
    whole_lines = kind in ("invalid UTF-8", "invalid JSON", "wrong field")
    assert corpus.damage.lines == int(whole_lines)
    assert len(corpus.damage.files) == int(not whole_lines)
    assert all(message.startswith(str(bad)) for message in corpus.damage.files)
    kept = {"invalid UTF-8": 199, "invalid JSON": 200}.get(kind, 0)
    if kind.startswith("truncated"):
        kept = corpus.lines - 50
        assert 5_000 < kept < 15_000  # what comes before the damage is not lost
    assert len(found) == kept + 50


def test_corruption_inside_a_prepared_shard_is_found_by_its_checksum(tmp_path):
    write_shard(tmp_path / "a.txt", random_lines(3000, seed=3))
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", PrepareOptions(), processes=1)
    shard = next((tmp_path / "out/shards").glob("*.parquet"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0xFF
    shard.write_bytes(content)
    corpus = prepared(tmp_path / "out")
    with pytest.raises(ShardError, match="damaged Parquet") as caught:
        take_epoch(stream_of(corpus)[0])
    assert str(shard) in str(caught.value)
    warnings: list[str] = []
    (skipping,) = stream_of(corpus, on_error="skip", warn=warnings.append)
    assert lines_of(take_epoch(skipping)) == []
    assert len(warnings) == 1
    assert skipping.plan.losses.lines == sum(2 <= len(line.split()) <= 10 for line in random_lines(3000, seed=3))


@pytest.mark.parametrize("kind", [".txt", ".txt.gz", ".parquet"])
@pytest.mark.parametrize("what", ["removed", "changed"])
def test_a_shard_that_goes_bad_in_the_middle_of_an_epoch(tmp_path, kind, what):
    files = [write_kind(tmp_path / f"{k}{kind}", [f"w{k} w1 w2"] * 140) for k in range(4)]

    def begin(on_error: str, warnings: list[str]) -> tuple[list[BatchStream], list]:
        for k, file in enumerate(files):
            write_kind(file, [f"w{k} w1 w2"] * 140)
        corpus = raw(tmp_path, files, block_lines=70, on_error=on_error)
        streams = stream_of(corpus, 2, on_error=on_error, warn=warnings.append)
        batches = [next(stream) for stream in streams for _ in range(3)]
        for file in files[1:]:
            if what == "removed":
                file.unlink()
            else:
                write_kind(file, ["w9"] * 5)
        return streams, batches

    streams, _ = begin("fail", [])
    with pytest.raises(ShardError, match=r"no such file|is not what it was|damaged Parquet") as caught:
        [take_epoch(stream) for stream in streams]
    assert any(str(caught.value).startswith(str(file)) for file in files[1:])
    warnings: list[str] = []
    streams, batches = begin("skip", warnings)
    rest = [take_epoch(stream) for stream in streams]
    assert len(rest[0]) == len(rest[1])  # the same number of steps, whatever is lost
    lines = lines_of(batches) + [line for part in rest for line in lines_of(part)]
    assert len(set(lines)) == len(lines)
    lost = sum(stream.plan.losses.lines for stream in streams)
    assert len(lines) + lost == 560
    assert 0 < lost <= 420
    assert {message.split(": ")[0] for message in warnings} <= {str(file) for file in files[1:]}


def test_a_missing_or_cut_shard_of_a_prepared_corpus_is_named_at_the_start(tmp_path):
    write_shard(tmp_path / "a.txt", random_lines(300))
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", PrepareOptions(shard_lines=100), processes=1)
    shards = sorted((tmp_path / "out/shards").glob("*.parquet"))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-5])
    corpus = prepared(tmp_path / "out")
    with pytest.raises(ShardError, match=r"No such file"):
        corpus.check_sizes("fail")
    corpus.check_sizes("skip")
    assert [message.split(": ")[0] for message in corpus.damage.files] == [str(path) for path in shards[:2]]


def test_manifest_lines_are_json_and_shards_a_line(tmp_path):
    write_shard(tmp_path / "a.txt", random_lines(300))
    manifest = prepare([str(tmp_path / "a.txt")], tmp_path / "out", PrepareOptions(shard_lines=100), processes=1)
    text = (tmp_path / "out/manifest.json").read_text()
    assert json.loads(text) == {**manifest.content, "shards": [entry.to_json() for entry in manifest.shards]}
    assert sum(line.startswith('{"file"') for line in text.splitlines()) == 3
