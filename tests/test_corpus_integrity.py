"""What lies beside shards: damage of a manifest, an index or a shard is told, hostile ones end in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostile_json import nearly
from lm_pcfg.corpus.lengths import Limits
from lm_pcfg.corpus.opening import OpeningOptions, open_streamed
from lm_pcfg.corpus.preparation import prepare as preparing
from lm_pcfg.corpus.preparation.prepare import PrepareOptions, prepare
from lm_pcfg.corpus.shards import parquet, prepared
from lm_pcfg.corpus.shards import raw as raw_corpus
from lm_pcfg.corpus.shards.errors import ShardError
from lm_pcfg.corpus.shards.prepared import PreparedCorpus, PreparedError, read_manifest, verify_all, vocabulary_of
from lm_pcfg.corpus.shards.raw import IndexStore, RawCorpus, RawOptions, build_vocabulary, verify_indexes
from lm_pcfg.corpus.shards.shapes import LinesIndexShape, WordsIndexShape, checksum_of, with_checksum
from lm_pcfg.corpus.vocabulary import VocabularyOptions
from lm_pcfg.errors import UserError
from shards import NUMBERS, random_lines, write_shard

ALL = os.environ.get("LM_PCFG_ALL_FLIPS") == "1"  # half a minute; else two bits of every byte, each in turn


def bits_of(place: int) -> list[int]:
    return list(range(8)) if ALL else [place % 4, place % 4 + 4]


QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small prepared corpus, not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    write_shard(folder / "a.txt", random_lines(60, longest=5))
    prepare([str(folder / "a.txt")], folder / "out", PrepareOptions(shard_lines=40), processes=1)
    return folder / "out"


@pytest.fixture
def corpus(whole, tmp_path):
    """A copy of it, of which the manifest may be replaced."""
    import shutil

    return Path(shutil.copytree(whole, tmp_path / "out"))


def use(folder: Path) -> Any:
    """Do with a prepared corpus what a training and `info` do; return what it holds."""
    manifest = read_manifest(folder)
    prepared.describe(manifest)
    found = PreparedCorpus(folder, vocabulary_of(manifest))
    found.check_sizes("fail")
    return [found.read(block).ids.tolist() for block in range(len(found.blocks))]


def one_line(error: UserError) -> str:
    message = str(error)
    assert "\n" not in message
    assert len(message) < 1000
    return message


# ---- manifests ------------------------------------------------------------------------------------------------------


def test_every_bit_of_a_manifest_counts(corpus):
    file = corpus / "manifest.json"
    right = file.read_bytes()
    content, before = json.loads(right), use(corpus)
    told = 0
    for place in range(len(right)):
        for bit in bits_of(place):
            flipped = bytearray(right)
            flipped[place] ^= 1 << bit
            file.write_bytes(flipped)
            try:
                found = read_manifest(corpus)
            except PreparedError as error:
                told += 1
                one_line(error)
            else:
                found.content["shards"] = [entry.to_json() for entry in found.shards]
                wanted = {key: value for key, value in content.items() if key != "checksum"}
                left = {key: found.content.get(key) for key in wanted}  # a key `chgcksum` more does no harm
                assert left == wanted, (place, bit)
    assert told > 0.95 * sum(len(bits_of(place)) for place in range(len(right)))
    file.write_bytes(right)
    assert use(corpus) == before


def test_a_manifest_of_before_checksums_is_read(corpus):
    before = use(corpus)
    file = corpus / "manifest.json"
    content = json.loads(file.read_bytes())
    assert content.pop("checksum") == checksum_of(content)
    file.write_text(json.dumps(content))
    assert use(corpus) == before
    assert verify_all(corpus) == []


@given(data=st.data(), sign=st.booleans())
@QUICK
def test_hostile_manifests_end_in_one_line(whole, corpus, data, sign):
    for name in ("pipe", "zero"):
        if not (corpus / "shards" / name).exists():
            os.mkfifo(corpus / "shards/pipe") if name == "pipe" else os.symlink("/dev/zero", corpus / "shards/zero")
    content = data.draw(nearly(json.loads((whole / "manifest.json").read_bytes())))
    if sign and isinstance(content, dict):
        content = {**content, "checksum": checksum_of(content)}
    (corpus / "manifest.json").write_text(json.dumps(content))
    for check in (use, lambda folder: prepared.verify(read_manifest(folder))):
        try:
            check(corpus)
        except UserError as error:
            one_line(error)
    for problem in verify_all(corpus):
        assert "\n" not in problem


@pytest.mark.parametrize("name", ["../vocab/words.txt", "/dev/zero", "..", "shards/../x", "a\nb", ""])
def test_names_stay_in_their_folder(corpus, name):
    content = json.loads((corpus / "manifest.json").read_bytes())
    content["shards"][0]["file"] = name
    (corpus / "manifest.json").write_text(json.dumps(with_checksum(content)))
    with pytest.raises(PreparedError, match=r"manifest.json: damaged \(shards.0.file: "):
        read_manifest(corpus)


@pytest.mark.parametrize("what", ["pipe", "device", "huge", "folder", "deep"])
def test_a_manifest_that_is_no_plain_file_is_not_waited_for(corpus, what):
    file = corpus / "manifest.json"
    file.unlink()
    if what == "pipe":
        os.mkfifo(file)
    elif what == "device":
        file.symlink_to("/dev/zero")
    elif what == "huge":
        with file.open("wb") as handle:
            handle.truncate(1 << 40)
    elif what == "folder":
        file.mkdir()
    else:
        file.write_text("[" * 100_000)
    with pytest.raises(PreparedError) as caught:
        read_manifest(corpus)
    why = {"pipe": "not a plain file", "device": "not a plain file", "huge": "larger than", "folder": "directory"}
    assert one_line(caught.value).startswith(str(file))
    assert why.get(what, "damaged") in str(caught.value)


@pytest.mark.parametrize("where", ["vocab/words.txt", "vocab/vocabulary.json", "shards/shard-00000-00000.parquet"])
def test_a_pipe_in_a_corpus_is_not_waited_for(corpus, where):
    (corpus / where).unlink()
    os.mkfifo(corpus / where)
    with pytest.raises(UserError):
        use(corpus)
    assert len(verify_all(corpus)) == 1


@given(data=st.data())
@QUICK
def test_hostile_plans_end_in_one_line(whole, corpus, data):
    plan = json.loads((whole / "prepare.json").read_bytes())
    content = data.draw(nearly(plan))
    (corpus / "prepare.json").write_text(json.dumps(content))
    try:
        assert preparing._is_done(corpus, plan) is True
        assert content == plan
    except UserError as error:
        one_line(error)
    (corpus / "manifest.json").unlink(missing_ok=True)
    assert preparing._is_done(corpus, plan) is False  # and is written anew
    assert json.loads((corpus / "prepare.json").read_bytes()) == plan
    (corpus / "manifest.json").write_bytes((whole / "manifest.json").read_bytes())


def test_shards_of_other_numbers_are_refused(corpus):
    """Ids that are no words would be read far outside of the emission matrix."""
    file = corpus / "shards/shard-00000-00000.parquet"
    table = pq.read_table(file)
    ids = table.column("ids").combine_chunks()
    for kind, change in ((pa.int32(), 10**6), (pa.int32(), -(10**6)), (pa.float32(), 0)):
        values = pa.array(ids.flatten().to_numpy() + change, kind)
        column = pa.ListArray.from_arrays(ids.offsets, values)
        pq.write_table(pa.table({"ids": column}), file, row_group_size=16_384)
        content = json.loads((corpus / "manifest.json").read_bytes())
        content["shards"][0]["size"] = file.stat().st_size
        (corpus / "manifest.json").write_text(json.dumps(with_checksum(content)))
        with pytest.raises(ShardError, match=r"no words of its vocabulary|damaged Parquet"):
            use(corpus)


def test_a_shard_that_stands_for_gigabytes_is_not_read(corpus, monkeypatch):
    monkeypatch.setattr(parquet, "_stream", lambda *arguments: pytest.fail("it was opened"))
    file = corpus / "shards/shard-00000-00000.parquet"
    rows = len(pq.read_table(file))
    lists = pa.ListArray.from_arrays(np.arange(rows + 1) * 100_000, pa.array(np.ones(rows * 100_000, np.int32)))
    pq.write_table(pa.table({"ids": lists}), file, row_group_size=16_384)
    assert file.stat().st_size < 10_000
    found = PreparedCorpus(corpus, vocabulary_of(read_manifest(corpus)))
    with pytest.raises(ShardError, match="is not what it was"):
        found.read(0)


def test_verify_all_names_everything_that_is_damaged(corpus, tmp_path):
    assert verify_all(corpus) == []
    shards = sorted((corpus / "shards").glob("*.parquet"))
    content = bytearray(shards[0].read_bytes())
    content[50] ^= 1
    shards[0].write_bytes(content)
    shards[1].unlink()
    with (corpus / "vocab/words.txt").open("a") as words:
        words.write("more\n")
    (corpus / "prepare.json").write_text("[]")
    problems = verify_all(corpus)
    assert [problem.split(": ")[0] for problem in problems] == [
        str(shards[0]), str(shards[1]), str(corpus / "vocab"), str(corpus / "prepare.json"),
    ]  # fmt: skip
    assert "sha256" in problems[0]
    (corpus / "manifest.json").write_text("{")
    assert len(verify_all(corpus)) == 1
    assert "no such" in verify_all(tmp_path / "gone")[0].lower()


def test_verify_all_compares_the_texts_of_trees(tmp_path):
    (tmp_path / "a.trees").write_text("(S (D the) (N cat))\n(S (D a) (N dog))\n")
    prepare([str(tmp_path / "a.trees")], tmp_path / "out", PrepareOptions(trees=True), processes=1)
    assert verify_all(tmp_path / "out") == []
    (tmp_path / "out/text.txt").write_text("the cat\nthe dog\n")
    (tmp_path / "out/trees.txt").unlink()
    problems = verify_all(tmp_path / "out")
    assert [problem.split(": ")[0] for problem in problems] == [
        str(tmp_path / "out" / name) for name in ("text.txt", "trees.txt")
    ]


# ---- indexes --------------------------------------------------------------------------------------------------------


def indexed(folder: Path, file: Path, on_error: str = "fail") -> RawCorpus:
    return RawCorpus("test", [file], RawOptions("text", 32, on_error), NUMBERS, IndexStore(folder))


@pytest.fixture
def index(tmp_path):
    """A shard, and the folder with both of its indexes: (shard, folder, lines, words)."""
    file = write_shard(tmp_path / "a.txt", random_lines(50, longest=4))
    indexed(tmp_path / "index", file)
    (lines,) = (tmp_path / "index").glob("*.json")
    build_vocabulary([file], RawOptions("text", 32), VocabularyOptions(size=8), IndexStore(tmp_path / "index"))
    (words,) = set((tmp_path / "index").glob("*.json")) - {lines}
    return file, tmp_path / "index", lines, words


def test_every_bit_of_an_index_counts(index):
    _, _, lines, words = index
    for file, shape in ((lines, LinesIndexShape), (words, WordsIndexShape)):
        right = file.read_bytes()
        content = json.loads(right)
        for place in range(len(right)):
            for bit in bits_of(place):
                flipped = bytearray(right)
                flipped[place] ^= 1 << bit
                file.write_bytes(flipped)
                found, problem = raw_corpus._read(file, shape)
                assert (found == content) if problem is None else found is None, (place, bit)
        file.write_bytes(right)


def test_a_damaged_index_is_told_and_made_anew(index, capsys):
    file, folder, lines, words = index
    right = {path: path.read_bytes() for path in (lines, words)}
    fingerprint = indexed(folder, file).fingerprint
    assert verify_indexes(folder) == []
    assert capsys.readouterr().err == ""
    for path in (lines, words):
        path.write_bytes(right[path].replace(b"1", b"2", 1))
    (folder / "old.json").write_text('{"damaged": false, "call": "x"}')  # of a version without checksums
    problems = verify_indexes(folder)
    assert sorted(problem.split(": ")[0] for problem in problems) == sorted([str(lines), str(words)])
    (folder / f"{lines.name}.0123.tmp").write_text("")  # of a process that was killed
    assert indexed(folder, file).fingerprint == fingerprint
    build_vocabulary([file], RawOptions("text", 32), VocabularyOptions(size=8), IndexStore(folder))
    told = capsys.readouterr().err.splitlines()
    assert [line.split(": damaged index (")[0] for line in told] == [f"warning: {path}" for path in (lines, words)]
    for path in (lines, words):
        one, other = json.loads(right[path]), json.loads(path.read_bytes())
        assert {**one, "call": 0, "checksum": 0} == {**other, "call": 0, "checksum": 0}
    assert verify_indexes(folder) == []
    assert not list(folder.glob("*.tmp"))


@given(data=st.data())
@QUICK
def test_hostile_indexes_end_in_one_line(index, data):
    file, folder, lines, words = index
    for path in (lines, words):
        right = path.read_bytes()
        content = data.draw(nearly(json.loads(right)))
        content = {**content, "checksum": checksum_of(content)} if isinstance(content, dict) else content
        path.write_text(json.dumps(content))
        try:
            if path == words:
                build_vocabulary([file], RawOptions("text", 32), VocabularyOptions(size=8), IndexStore(folder))
            else:
                found = indexed(folder, file)
                for block in range(len(found.blocks)):
                    found.read(block)
        except UserError as error:
            one_line(error)
        finally:
            path.write_bytes(right)


# ---- data.verify ----------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """Change a letter of a text, and leave size and time as they were."""
    stat = path.stat()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"w2", b"w3", 1))
    assert path.stat().st_size == stat.st_size
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def opened(names: list[str], folder: Path, verify: str, on_error: str = "fail") -> Any:
    raw = RawOptions("text", 32, on_error)  # type: ignore[arg-type]
    options = OpeningOptions(raw, folder / "index", VocabularyOptions(), verify=verify)  # type: ignore[arg-type]
    return open_streamed([(names, 1)], None, Limits(), options)  # type: ignore[list-item]


@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".parquet"])
def test_changes_of_raw_shards_are_found(tmp_path, kind, monkeypatch):
    file = tmp_path / f"a{kind}"
    if kind == ".parquet":
        table = pa.table({"text": ["w1 w2", "w4"] * 20})
        pq.write_table(table, file, use_dictionary=False, compression="none", write_statistics=False)
    else:
        write_shard(file, ["w1 w2", "w4"] * 20)
    for verify in ("off", "once", "always"):
        opened([str(file)], tmp_path, verify)
    running = opened([str(file)], tmp_path, "always").sources[0].corpus
    assert len(running.read(0).ids) > 0
    flip(file)
    text = opened([str(file)], tmp_path, "off")
    assert sum(len(text.sources[0].corpus.read(k).ids) for k in range(2)) == 60
    for verify in ("once", "always"):
        with pytest.raises(ShardError, match=r"rows 1 to 32 do not match the sha256 of the index"):
            opened([str(file)], tmp_path, verify)
    running._reader = None
    with pytest.raises(ShardError, match="do not match"):
        running.read(0)
    skipped = opened([str(file)], tmp_path, "once", "skip")  # has an index of its own, just made: of what is there now
    assert skipped.damage.files == []
    os.utime(file, ns=(1, 1))
    opened([str(file)], tmp_path, "once", "skip")
    content = file.read_bytes()
    file.write_bytes(content.replace(b"w3", b"w5", 1))
    os.utime(file, ns=(1, 1))
    skipped = opened([str(file)], tmp_path, "once", "skip")
    assert "do not match" in skipped.damage.files[0]
    with pytest.raises(ShardError):
        skipped.sources[0].corpus.read(0)  # lost, and counted, when it is its turn


def test_changes_of_prepared_shards_are_found(corpus, tmp_path):
    opened([str(corpus)], tmp_path, "once")
    running = opened([str(corpus)], tmp_path, "always").sources[0].corpus
    shard = corpus / "shards/shard-00000-00000.parquet"
    content = bytearray(shard.read_bytes())
    content[-30] ^= 1  # in the footer, which has no checksum of its own
    shard.write_bytes(content)
    for verify in ("once", "always"):
        with pytest.raises(ShardError, match="does not match its sha256; put it back"):
            opened([str(corpus)], tmp_path, verify)
    with pytest.raises(ShardError, match="does not match its sha256"):
        running.read(0)
    skipped = opened([str(corpus)], tmp_path, "once", "skip")
    assert [message.split(": ")[0] for message in skipped.damage.files] == [str(shard)]
    with pytest.raises(ShardError):
        skipped.sources[0].corpus.read(0)


# ---- durability of prepare ------------------------------------------------------------------------------------------


def test_prepare_ends_when_all_of_it_is_on_disk(tmp_path, monkeypatch):
    """What was renamed last in a folder is followed by an fsync of that folder, and the manifest comes after that."""
    events: list[tuple[str, str]] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor):
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def replace(one, other):
        events.append(("rename", f"{os.path.abspath(one)}>{os.path.abspath(other)}"))
        real_replace(one, other)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(Path, "replace", lambda path, other: replace(path, other))
    (tmp_path / "a.trees").write_text("(S (D the) (N cat))\n" * 5)
    out = tmp_path / "deep/er/out"
    prepare([str(tmp_path / "a.trees")], out, PrepareOptions(trees=True, shard_lines=2), processes=1)
    for folder in (tmp_path, tmp_path / "deep", tmp_path / "deep/er"):
        assert ("fsync", str(folder)) in events  # each got a new folder
    renames = {place: event[1].split(">") for place, event in enumerate(events) if event[0] == "rename"}
    (manifest,) = [place for place, (_, name) in renames.items() if name == str(out / "manifest.json")]
    assert ("fsync", str(out)) in events[manifest:]
    for place, (before, name) in renames.items():
        assert ("fsync", before) in events[:place], name  # the content comes before the name
        parent = str(Path(name).parent)
        if place < manifest:
            assert ("fsync", parent) in events[place:manifest], name
    kept = {Path(name).name for _, name in renames.values()}
    assert {"words.txt", "vocabulary.json", "text.txt", "trees.txt", "shard-00000-00000.parquet"} <= kept


@pytest.mark.parametrize("name", ["prepare.json.0123abcd.tmp", "manifest.json.0123.tmp", "text.txt.tmp"])
def test_litter_of_a_killed_prepare_is_swept(tmp_path, name):
    write_shard(tmp_path / "a.txt", ["w1 w2"] * 5)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("half")
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", PrepareOptions(), processes=1)
    assert not list((tmp_path / "out").rglob("*.tmp"))
    (tmp_path / "out" / name).write_text("half")
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", PrepareOptions(), processes=1)
    assert not list((tmp_path / "out").rglob("*.tmp"))
