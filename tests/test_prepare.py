"""`lm_pcfg prepare`: every kind of input, vocabularies, kills, damage, mistakes on the command line."""

from __future__ import annotations

import fcntl
import gzip
import json
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from lm_pcfg.cli import app
from lm_pcfg.corpus import embedded
from lm_pcfg.corpus.batches import BatchOptions
from lm_pcfg.corpus.lengths import Limits
from lm_pcfg.corpus.pieces import PieceVocabulary, load_vocabulary, open_model
from lm_pcfg.corpus.sentences import encode_sentences
from lm_pcfg.corpus.shards.blocks import Source, StreamedText
from lm_pcfg.corpus.shards.errors import ShardError
from lm_pcfg.corpus.shards.plan import ShardPlan
from lm_pcfg.corpus.shards.prepared import PreparedCorpus, PreparedError, read_manifest, verify, vocabulary_of
from lm_pcfg.corpus.stream import BatchStream
from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyError, VocabularyOptions
from lm_pcfg.errors import UserError
from prepared import COMMAND, ENVIRONMENT, command, made, one_line_error, sentences
from shards import random_lines, take_epoch, write_shard

# ---- inputs and vocabularies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "processes"), [(".txt", 1), (".txt.gz", 2), (".txt.zst", 1), (".jsonl", 1), (".parquet", 1)]
)
def test_every_kind_of_input_gives_the_same_corpus(tmp_path, kind, processes):
    lines = random_lines(500, seed=4)
    for k in range(3):
        write_shard(tmp_path / f"in-{k}{kind}", lines[k * 200 : (k + 1) * 200], row_group=60)
    words = VocabularyOptions(size=30)
    folder = made(tmp_path / "out", tmp_path / f"in-*{kind}", processes=processes, shard_lines=90, words=words)
    vocabulary = Vocabulary.build((line.split() for line in lines), words)
    assert load_vocabulary(folder / "vocab") == vocabulary
    assert sentences(folder) == vocabulary.tokenise([line for line in lines if line.split()])
    manifest = read_manifest(folder)
    verify(manifest)
    counts = manifest.counts
    assert counts["lines"] == sum(bool(line) for line in lines)
    assert counts["blank"] == sum(not line for line in lines) > 0
    assert counts["words"] == counts["tokens"] == sum(len(line.split()) for line in lines)
    assert counts["bytes"] == sum(len(line.encode()) for line in lines)
    assert counts["unknown"] == vocabulary.training_unknown > 0
    histogram = dict(manifest.content["lengths"])
    assert sum(histogram.values()) == counts["lines"]
    assert manifest.content["versions"]["pyarrow"]
    assert len(manifest.shards) == 3 * 3 - 1  # 90, 90, 20 of 200 lines; 90, 10 of the last 100
    assert not list((folder / "shards").glob("*.json")) + list(folder.rglob("*.tmp"))


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_pieces_trained_here_round_trip(tmp_path, kind):
    text = embedded.resolve("embedded:valid", tmp_path / "embedded").read_text().splitlines()
    (tmp_path / "a.txt").write_text("\n".join(f"{line} <unk> naïve" for line in text))
    folder = made(tmp_path / "out", tmp_path / "a.txt", kind=kind, pieces=200)
    vocabulary = load_vocabulary(folder / "vocab")
    assert isinstance(vocabulary, PieceVocabulary)
    stored = sentences(folder)
    assert [vocabulary.decode(ids) for ids in stored] == [f"{line} <unk> naïve" for line in text]
    counts = read_manifest(folder).counts
    assert counts["words"] == sum(len(line.split()) + 2 for line in text)
    assert counts["tokens"] == sum(map(len, stored)) > counts["words"]
    assert counts["unknown"] == 0  # a literal <unk> is a word like others
    again = made(tmp_path / "again", tmp_path / "a.txt", existing=str(folder / "vocab" / "pieces.model"))
    assert sentences(again) == stored
    third = made(tmp_path / "third", tmp_path / "a.txt", existing=str(folder))
    assert sentences(third) == stored
    assert load_vocabulary(third / "vocab") == vocabulary


def test_piece_vocabularies(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 20 + "a dog ran\n" * 20)
    vocabulary = load_vocabulary(made(tmp_path / "out", tmp_path / "a.txt", kind="bpe", pieces=40) / "vocab")
    explicit = vocabulary.with_end_of_sentence()
    assert len(explicit) == len(vocabulary) + 1
    assert explicit.hash != vocabulary.hash
    explicit.save(tmp_path / "saved")
    assert load_vocabulary(tmp_path / "saved") == explicit
    encoded = encode_sentences([(1, "the  cat"), (2, " "), (3, "zebra")], explicit, Limits(max_length=3))
    assert encoded[0].tolist()[-1] == explicit.end_id
    assert (encoded.skipped.blank, encoded.skipped.too_long) == (1, 1)
    model = tmp_path / "saved" / "pieces.model"
    model.write_bytes(model.read_bytes()[:-1])
    with pytest.raises(VocabularyError, match=r"changed since|not a SentencePiece"):
        load_vocabulary(tmp_path / "saved")
    with pytest.raises(VocabularyError, match="not a SentencePiece model"):
        open_model(tmp_path / "a.txt")


def test_explicit_ends_are_added_to_prepared_ids(tmp_path):
    lines = ["a b", "b a a", "c"]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    folder = made(tmp_path / "out", tmp_path / "a.txt")
    explicit = vocabulary_of(read_manifest(folder)).with_end_of_sentence()
    assert explicit == Vocabulary.build(
        (line.split() for line in lines), VocabularyOptions(size=None, end_of_sentence=True)
    )
    expected = [[*ids, explicit.end_id] for ids in explicit.tokenise(lines)]
    text = StreamedText([Source(PreparedCorpus(folder, explicit))], explicit)
    loaded = text.in_memory()
    assert [loaded[k].tolist() for k in range(3)] == expected
    (batch,) = take_epoch(BatchStream(ShardPlan(text, BatchOptions())))
    at = np.cumsum([0, *batch.lengths])
    assert [batch.words[at[k] : at[k + 1]].tolist() for k in range(3)] == [expected[line] for line in batch.lines]


# ---- kills and damage -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_killed_prepare_goes_on_where_it_was(tmp_path):
    lines = random_lines(60_000, seed=1)
    write_shard(tmp_path / "a.txt.gz", lines[:40_000])
    write_shard(tmp_path / "b.txt", lines[40_000:])
    arguments = ["a.txt.gz", "b.txt", "--out", "out", "--shard-lines", "2000", "--processes", "2"]
    process = subprocess.Popen([*COMMAND, *arguments], cwd=tmp_path, env=ENVIRONMENT,
                               stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)  # fmt: skip
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("out/shards/*.parquet.json"))) < 4:
        assert time.monotonic() < deadline
        assert process.poll() is None, "it was quicker than the test"
        time.sleep(0.005)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert workers
    process.kill()
    process.wait()
    assert not (tmp_path / "out/manifest.json").exists()
    finished = {path.name.removesuffix(".json"): path.stat().st_mtime_ns
                for path in tmp_path.glob("out/shards/*.parquet.json")}  # fmt: skip
    for name in list(finished)[1:]:  # whatever has its name is whole
        assert pq.ParquetFile(tmp_path / "out/shards" / name).metadata.num_rows > 0
    for _ in range(100):  # its workers do not outlive it
        if not any(Path(f"/proc/{pid}").exists() for pid in workers):
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"workers {workers} are still there")
    spoilt = tmp_path / "out/shards" / min(finished)
    spoilt.write_bytes(spoilt.read_bytes()[:-1])  # a finished shard that a disk damaged since
    (tmp_path / "out/shards/.shard-00001-00003.parquet.123.tmp").write_bytes(b"half")
    result = command(*arguments, "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    kept = int(next(line for line in result.stderr.splitlines() if "finished before" in line).split()[0])
    assert kept >= len(finished) - 1 > 0
    whole = made(tmp_path / "whole", tmp_path / "a.txt.gz", tmp_path / "b.txt", shard_lines=2000,
                 words=VocabularyOptions(size=10_000))  # fmt: skip
    one, other = (read_manifest(folder) for folder in (tmp_path / "out", whole))
    assert one.shards == other.shards
    assert one.counts == other.counts
    assert not list((tmp_path / "out").rglob("*.tmp"))
    again = command(*arguments, cwd=tmp_path)
    assert again.returncode == 0
    assert "was prepared before" in again.stderr


def test_another_corpus_does_not_go_into_the_same_folder(tmp_path):
    write_shard(tmp_path / "a.txt", ["a b"] * 10)
    made(tmp_path / "out", tmp_path / "a.txt")
    with pytest.raises(UserError, match="shard_lines changed"):
        made(tmp_path / "out", tmp_path / "a.txt", shard_lines=3)
    write_shard(tmp_path / "a.txt", ["a b c"] * 10)
    with pytest.raises(UserError, match="input files changed"):
        made(tmp_path / "out", tmp_path / "a.txt")
    with pytest.raises(UserError, match="is not empty"):
        made(tmp_path, tmp_path / "a.txt")
    with pytest.raises(UserError, match="is a file"):
        made(tmp_path / "a.txt", tmp_path / "a.txt")
    with pytest.raises(UserError, match="is a prepared corpus already"):
        made(tmp_path / "twice", tmp_path / "out")


def test_what_prepare_made_is_no_input(tmp_path, capsys):
    (tmp_path / "in/deep").mkdir(parents=True)
    write_shard(tmp_path / "in/a.txt", ["a b"] * 10)
    write_shard(tmp_path / "in/deep/b.txt", ["c"] * 10)
    (tmp_path / "in/deep/manifest.json").write_text("{}")  # of someone else
    folder = tmp_path / "in/prepared"
    for _ in range(2):
        made(folder, tmp_path / "in")
        assert [Path(item["name"]).name for item in read_manifest(folder).content["inputs"]] == ["a.txt", "b.txt"]
    told = capsys.readouterr().err
    assert "was prepared before" in told
    assert "left out" not in told
    (folder / "manifest.json").unlink()  # as if it was killed
    assert read_manifest(made(folder, tmp_path / "in")).counts["lines"] == 20
    other = made(tmp_path / "in/other", tmp_path / "in")
    assert f"{folder} was made by lm_pcfg prepare" in capsys.readouterr().err
    assert read_manifest(other).counts["lines"] == 20
    (tmp_path / "in/t.trees").write_text("(S (NN a))")
    for _ in range(2):
        made(tmp_path / "in/trees", tmp_path / "in/**/*t*.t*", trees=True)  # its trees.txt would match
    with pytest.raises(UserError, match="is not empty"):
        made(tmp_path / "in", tmp_path / "in")


def test_one_prepare_at_a_time(tmp_path):
    write_shard(tmp_path / "a.txt", ["a b"] * 10)
    made(tmp_path / "out", tmp_path / "a.txt")
    lock = tmp_path / "out/.lock"
    with lock.open("w") as held:  # it stays when a call ends, so that all calls lock the same file
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another lm_pcfg prepare"):
            made(tmp_path / "out", tmp_path / "a.txt")
    made(tmp_path / "out", tmp_path / "a.txt")


def test_after_a_failure_the_input_can_be_mended_or_passed_over(tmp_path, capsys):
    (tmp_path / "v.txt").write_text("a b c")
    existing = str(made(tmp_path / "vocabulary", tmp_path / "v.txt"))
    write_shard(tmp_path / "a.txt", ["a b"] * 10)
    (tmp_path / "b.txt").write_bytes(b"a b\nc\xe9\n")
    inputs = [tmp_path / "a.txt", tmp_path / "b.txt"]
    with pytest.raises(ShardError, match=r"b\.txt: line 2"):
        made(tmp_path / "out", *inputs, existing=existing)
    skipped = made(tmp_path / "out", *inputs, existing=existing, on_error="skip")
    assert "1 of 2 shards were finished before" in capsys.readouterr().err
    assert read_manifest(skipped).counts["lines"] == 11
    with pytest.raises(ShardError, match=r"b\.txt: line 2"):
        made(tmp_path / "out2", *inputs, existing=existing)
    (tmp_path / "b.txt").write_bytes(b"a b\nc b\n")
    mended = made(tmp_path / "out2", *inputs, existing=existing)
    told = capsys.readouterr().err
    assert "the input files changed" in told
    assert "1 of 2 shards were finished before" in told
    assert read_manifest(mended).counts["lines"] == 12


def test_bad_inputs_are_named_or_left_out_and_counted(tmp_path):
    write_shard(tmp_path / "good.txt", ["a b c"] * 30)
    (tmp_path / "latin.txt").write_bytes(b"a b\ncaf\xe9 b\nc a\n")
    (tmp_path / "empty.txt").write_bytes(b"")
    long = gzip.compress("\n".join(f"{random.Random(k).random()} b" for k in range(20_000)).encode())
    (tmp_path / "cut.txt.gz").write_bytes(long[: len(long) // 2])
    for name, what in (("latin.txt", "line 2 is not valid UTF-8"), ("empty.txt", "is empty"), ("cut.txt.gz", "failed")):
        with pytest.raises(ShardError, match=what) as caught:
            made(tmp_path / f"out-{name}", tmp_path / "good.txt", tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert not (tmp_path / f"out-{name}" / "manifest.json").exists()
    folder = made(
        tmp_path / "out", *(tmp_path / n for n in ("good.txt", "latin.txt", "empty.txt", "cut.txt.gz")), on_error="skip"
    )
    manifest = read_manifest(folder)
    assert manifest.counts["unreadable"] == 1
    assert [Path(message.split(": ")[0]).name for message in manifest.content["damage"]] == ["empty.txt", "cut.txt.gz"]
    assert 32 + 5_000 < manifest.counts["lines"] < 32 + 15_000
    (tmp_path / "blank.txt").write_text("\n \n")
    with pytest.raises(UserError, match="no words"):
        made(tmp_path / "nothing", tmp_path / "blank.txt")


def test_long_rows_make_smaller_shards(tmp_path, monkeypatch):
    from lm_pcfg.corpus.preparation import shards
    from lm_pcfg.corpus.shards import files

    monkeypatch.setattr(shards, "SHARD_BYTES", 2000)
    monkeypatch.setattr(files, "BYTES_AT_A_TIME", 500)
    lines = random_lines(300, longest=30, blank=0)
    folder = made(tmp_path / "out", write_shard(tmp_path / "a.txt", lines), write_shard(tmp_path / "b.parquet", lines))
    assert len(read_manifest(folder).shards) > 4
    vocabulary = vocabulary_of(read_manifest(folder))
    assert sentences(folder) == vocabulary.tokenise(lines) * 2


def test_a_damaged_manifest_or_shard_is_found(tmp_path):
    write_shard(tmp_path / "a.txt", random_lines(50))
    folder = made(tmp_path / "out", tmp_path / "a.txt")
    (shard,) = (folder / "shards").glob("*.parquet")
    content = bytearray(shard.read_bytes())
    content[-20] ^= 1
    shard.write_bytes(content)
    with pytest.raises(PreparedError, match="sha256"):
        verify(read_manifest(folder))
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(PreparedError, match="format"):
        read_manifest(folder)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["ptb"], 1, "--source DIR"),
        (["a.txt"], 2, "--out FOLDER is missing"),
        (["a.txt", "--source", "x", "--out", "out"], 2, "--source belongs to"),
        (["gone.txt", "--out", "out"], 1, "gone.txt: no such file"),
        (["*.csv", "--out", "out"], 1, "no file matches"),
        (["-", "--out", "out"], 1, "standard input"),
        (["a.txt", "--out", "out", "--vocabulary", "none.model"], 1, "should be words, unigram, bpe"),
        (["a.txt", "--out", "out", "--vocabulary", "a.txt"], 1, "not a SentencePiece model"),
        (["a.txt", "--out", "out", "--vocabulary", "unigram", "--size", "3"], 1, "larger --size"),
        (["a.jsonl", "--out", "out", "--field", "body"], 1, "no field 'body'; its fields: text"),
        (["a.txt", "--out", "a.txt"], 1, "is a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_mistakes_get_one_line(arguments, status, message, tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat\n" * 5)
    (tmp_path / "a.jsonl").write_text('{"text": "the cat"}\n')
    assert message in one_line_error(command(*arguments, cwd=tmp_path), status)


@pytest.mark.parametrize(
    ("vocabulary", "options", "named"),
    [
        ("unigram", ["--lowercase"], "--lowercase"),
        ("bpe", ["--min-count", "2", "--fold-numbers"], "--min-count, --fold-numbers"),
        ("bpe", ["--config", "c.yaml"], "--config"),
        ("bpe", ["--size", "0"], "--size 0"),
        ("words", ["--byte-fallback"], "--byte-fallback"),
        ("some.model", ["--size", "5", "--byte-fallback"], "--size, --byte-fallback"),
        ("some.model", ["--lowercase"], "--lowercase"),
    ],
)
def test_options_that_would_not_be_heeded_are_refused(vocabulary, options, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("the cat\n")
    result = CliRunner().invoke(app, ["prepare", "a.txt", "--out", "out", "--vocabulary", vocabulary, *options],
                                env={"COLUMNS": "300", "TERM": "dumb"})  # fmt: skip
    assert result.exit_code == 2
    assert named in result.output
    assert not Path("out").exists()


def test_options_of_words_from_a_config(tmp_path):
    (tmp_path / "a.txt").write_text("The cat ate 3 mice\nthe dog ate 14 mice\n")
    (tmp_path / "c.yaml").write_text(
        "data: {train: a.txt, vocabulary: {size: 4, lowercase: true, fold_numbers: true}}\nmodel: {nonterminals: 2}\n"
    )
    result = command("a.txt", "--out", "out", "--config", "c.yaml", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["types"] == 4
    assert set(load_vocabulary(tmp_path / "out/vocab").words) <= {"<unk>", "N", "ate", "mice", "the"}


def test_an_interrupted_prepare_leaves_with_one_line(tmp_path):
    write_shard(tmp_path / "a.txt", random_lines(100_000, seed=2) * 10)
    process = subprocess.Popen(
        [*COMMAND, "a.txt", "--out", "out", "--processes", "2"], cwd=tmp_path, env=ENVIRONMENT,
        stderr=subprocess.PIPE, text=True,
        # Tests begun in the background of a shell script ignore Ctrl-C, and would hand that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while not (tmp_path / "out/prepare.json").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "interrupted" in errors
