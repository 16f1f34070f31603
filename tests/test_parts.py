"""`lm_pcfg prepare --part`: machines make together what one would make, byte for byte, also when a part is killed."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from command_line import lm_pcfg
from lm_pcfg.corpus import vocabulary as vocabulary_room
from lm_pcfg.corpus.preparation import parts as parts_room
from lm_pcfg.corpus.preparation import prepare as prepare_room
from lm_pcfg.corpus.preparation import shards as shards_room
from lm_pcfg.corpus.preparation.parts import Part, Unfinished, deal, prepare_part
from lm_pcfg.corpus.preparation.prepare import PrepareOptions, alone, prepare
from lm_pcfg.corpus.preparation.shards import Input
from lm_pcfg.corpus.shards.prepared import Manifest
from lm_pcfg.corpus.vocabulary import VocabularyOptions
from lm_pcfg.errors import UserError
from processes import environment
from shards import random_lines, write_shard

OPTIONS = PrepareOptions(words=VocabularyOptions(size=30), shard_lines=40, on_error="skip")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Inputs of every kind and size, two of them damaged."""
    for number, kind in enumerate((".txt", ".txt.gz", ".jsonl", ".parquet", ".txt.zst")):
        write_shard(tmp_path / f"in-{number}{kind}", random_lines(30 + 50 * number, seed=number), row_group=30)
    whole = gzip.compress("\n".join(random_lines(5_000, seed=9)).encode())
    (tmp_path / "in-5.txt.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "in-6.txt").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def one_machine(out: str = "one", options: PrepareOptions = OPTIONS) -> Path:
    prepare(["in-*"], Path(out), options, processes=1)
    return Path(out)


def part(number: int, of: int, out: str = "many", options: PrepareOptions = OPTIONS) -> Manifest | Unfinished:
    return prepare_part(["in-*"], Path(out), options, Part(number, of), processes=1)


def content_of(folder: Path) -> dict[str, bytes]:
    """All files, by their names."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# ---- the same corpus ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_parts_make_the_corpus_of_one_machine(folder, parts):
    order = [(number * 5) % parts + 1 for number in range(parts)]
    states = [part(number, parts) for number in order]
    assert all(isinstance(state, Unfinished) for state in states[:-1])
    if parts > 1:
        assert states[0] == Unfinished(Path("many"), Part(order[0], parts), counted=1, encoded=0)
        states = [part(number, parts) for number in order[:-1]]  # the last one had all words, and made its shards
    assert isinstance(states[-1], Manifest)
    assert content_of(Path("many")) == content_of(one_machine())
    assert len(states[-1].content["damage"]) == 2
    assert isinstance(part(1, parts), Manifest)  # once more changes nothing
    assert content_of(Path("many")) == content_of(Path("one"))


def test_with_a_vocabulary_that_exists_once_is_enough(folder, tmp_path):
    (tmp_path / "sample.txt").write_text("\n".join(random_lines(300, seed=3)))
    prepare([str(tmp_path / "sample.txt")], Path("pieces"), PrepareOptions(kind="bpe", pieces=40), processes=1)
    options = PrepareOptions(existing="pieces", shard_lines=40, on_error="skip")
    for number in (1, 2):
        state = part(number, 2, options=options)
    assert isinstance(state, Manifest)
    assert content_of(Path("many")) == content_of(one_machine(options=options))


def test_treebanks_in_parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        Path(f"in-{number}.mrg").write_text("(S (NP (DT the) (NN cat)) (VP (VBZ runs)))\n" * (number + 1))
    options = PrepareOptions(trees=True, shard_lines=2)
    for number in (2, 1, 2):
        part(number, 2, options=options)
    assert content_of(Path("many")) == content_of(one_machine(options=options))


@pytest.mark.parametrize("where", ["saved_vocabulary", "vocabulary", "encode", "merge"])
def test_a_part_is_repeated_while_the_last_one_makes_the_corpus_whole(folder, monkeypatch, where):
    for number in (2, 1):  # part 1 found all words, and has made its shards
        part(number, 2)
    method, calls = getattr(parts_room._Work, where), []

    def meanwhile(work, *arguments):
        calls.append(work.part.number)
        if calls == [1]:
            assert isinstance(part(2, 2), Manifest)
            assert not Path("many/parts").exists()
        return method(work, *arguments)

    monkeypatch.setattr(parts_room._Work, where, meanwhile)
    assert isinstance(part(1, 2), Manifest)
    assert calls[0] == 1
    assert content_of(Path("many")) == content_of(one_machine())


def test_one_machine_finishes_what_parts_began(folder):
    for number in (1, 2, 1):
        assert isinstance(part(number, 3), Unfinished)
    prepare(["in-*"], Path("many"), OPTIONS, processes=1)
    assert content_of(Path("many")) == content_of(one_machine())


def test_inputs_are_dealt_by_size():
    inputs = [Input(number, str(number), size=size) for number, size in enumerate([10, 90, 20, 30, 0, 40])]
    assert [[item.size for item in own] for own in deal(inputs, 2)] == [[10, 90], [20, 30, 0, 40]]
    assert [len(own) for own in deal([Input(number, str(number)) for number in range(6)], 3)] == [2, 2, 2]


# ---- a part that dies -----------------------------------------------------------------------------------------------


class Killed(BaseException):
    """What no code handles."""


def test_a_part_may_die_at_any_write_and_be_repeated(tmp_path, monkeypatch):
    """Each write of each part fails once, before or after it is done; then the part is run again."""
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        write_shard(tmp_path / f"in-{number}.txt", random_lines(50, seed=number))
    expected = content_of(one_machine())
    writes, deadly, after = 0, -1, False
    replace_file, write_ids = shards_room.replace_file, shards_room.write_ids

    def dying(write):
        def wrapped(*arguments: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes - 1 == deadly and not after:
                raise Killed
            result = write(*arguments)
            if writes - 1 == deadly:
                raise Killed
            return result

        return wrapped

    for room in (parts_room, prepare_room, shards_room, vocabulary_room):
        monkeypatch.setattr(room, "replace_file", dying(replace_file))
    monkeypatch.setattr(shards_room, "write_ids", dying(write_ids))
    deaths = 0
    while True:
        deadly, after, writes = deadly + 1, not after, 0
        out = f"many-{deadly}"
        died = False
        for number in (1, 2, 3, 1, 2):
            try:
                part(number, 3, out)
            except Killed:
                died = True
                part(number, 3, out)
        part(1, 3, out)
        assert content_of(Path(out)) == expected
        if not died:
            break
        deaths += 1
    assert deaths > 20


# ---- what is refused ------------------------------------------------------------------------------------------------


def refused(number: int, of: int, options: PrepareOptions = OPTIONS) -> str:
    with pytest.raises(UserError) as error:
        part(number, of, options=options)
    return str(error.value)


def test_parts_of_another_corpus_are_refused(folder, monkeypatch):
    part(1, 3)
    assert "many: was begun in 3 parts; use --part K/3" in refused(2, 4)
    other = PrepareOptions(words=VocabularyOptions(size=31), shard_lines=40, on_error="skip")
    assert "is made of other inputs or options (words changed)" in refused(2, 3, other)
    with monkeypatch.context() as patch:
        newer = {**prepare_room.versions(), "pyarrow": "99.0"}
        patch.setattr(parts_room, "versions", lambda: newer)
        assert f"was begun with pyarrow {prepare_room.versions()['pyarrow']}, and here is 99.0" in refused(2, 3)
    times = Path("in-3.parquet").stat()
    os.utime("in-3.parquet", ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert "the input files changed" in refused(2, 3)
    os.utime("in-3.parquet", ns=(times.st_atime_ns, times.st_mtime_ns))
    for number in (2, 3, 1, 2):
        state = part(number, 3)
    assert isinstance(state, Manifest)
    assert "is made of other inputs or options (words changed)" in refused(2, 3, other)


def test_what_cannot_be_done_in_parts_is_refused(folder):
    assert "make one of a sample first" in refused(1, 2, PrepareOptions(kind="bpe"))
    assert "--part 1/8: there are 7 input files, and a part has at least one" in refused(1, 8)
    for wrong in ("0/3", "4/3", "3", "1/0", "a/b", "-1/2"):
        with pytest.raises(UserError, match="should be K/N"):
            Part.parse(wrong)
    Path("many").mkdir()
    Path("many/mine.txt").touch()
    assert "many: is not empty (it has mine.txt)" in refused(1, 2)
    assert not Path("many/parts").exists()


def test_two_calls_do_not_make_the_same_part(folder):
    part(1, 3)
    with alone(Path("many")):
        assert "another lm_pcfg prepare is at work in it" in refused(2, 3)
    work = parts_room._Work(Path("many"), [], OPTIONS, Part(2, 3), 1)
    with alone(Path("many"), shared=True), work.locked("part-2"):
        assert "another lm_pcfg prepare makes part 2/3" in refused(2, 3)
        with pytest.raises(UserError, match="another lm_pcfg prepare is at work"):
            prepare(["in-*"], Path("many"), OPTIONS, processes=1)
        assert isinstance(part(3, 3), Unfinished)


@pytest.mark.parametrize("kind", ["counted", "encoded"])
def test_a_damaged_or_foreign_record_of_another_part_is_named(folder, kind):
    for number in (1, 2) if kind == "counted" else (1, 2, 3, 1):
        part(number, 3)
    record = Path(f"many/parts/{kind}-1.json")
    content = record.read_bytes()
    record.write_bytes(content.replace(b'"begun"', b'"begyn"'))
    last = 3 if kind == "counted" else 2
    assert f"{record}: damaged (its content does not match its checksum); run part 1/3 again" in refused(last, 3)
    foreign = json.loads(content) | {"begun": "0" * 64}
    record.write_text(json.dumps(parts_room.with_checksum(foreign)))
    assert f"{record}: it is of other inputs, options or versions; run part 1/3 again" in refused(last, 3)
    for number in (1, 2, 3, 1, 2):
        part(number, 3)
    assert content_of(Path("many")) == content_of(one_machine())


def test_a_shard_that_went_missing_is_named_and_made_again(folder):
    for number in (1, 2, 3, 1):
        part(number, 3)
    shard = next(Path("many/shards").glob("shard-*.parquet"))
    shard.unlink()
    message = refused(2, 3)
    assert f"{shard}: is missing or cut; run part" in message
    part(int(message.split("run part ")[1].split("/")[0]), 3)
    assert content_of(Path("many")) == content_of(one_machine())


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_says_how_far_the_parts_are(folder):
    arguments = ["prepare", "in-0.txt", "in-1.txt.gz", "--out", "many", "--json", "--part"]
    first = lm_pcfg(*arguments, "1/2", cwd=folder)
    assert json.loads(first.stdout) == {"corpus": "many", "part": "1/2", "counted": 1, "encoded": 0}
    assert b"run it again when those of all parts are" in first.stderr
    second = lm_pcfg(*arguments, "2/2", cwd=folder)
    assert json.loads(second.stdout) == {"corpus": "many", "part": "2/2", "counted": 2, "encoded": 1}
    assert json.loads(lm_pcfg(*arguments, "1/2", cwd=folder).stdout)["shards"] == 2
    wrong = lm_pcfg(*arguments, "3/2", cwd=folder)
    assert (wrong.returncode, wrong.stderr.count(b"\n")) == (1, 1)
    assert lm_pcfg("prepare", "ptb", "--source", ".", "--part", "1/2", cwd=folder).returncode == 2


@pytest.mark.long
def test_parts_at_the_same_time_one_of_them_killed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        write_shard(tmp_path / f"in-{number}.txt", random_lines(15_000, seed=number))
    options = PrepareOptions(words=VocabularyOptions(size=10_000), shard_lines=500)
    command = [sys.executable, "-m", "lm_pcfg", "prepare", "in-*", "--out", "many", "--shard-lines", "500", "--part"]

    def start(number: int) -> subprocess.Popen:
        return subprocess.Popen([*command, f"{number}/3"], env=environment(), stdout=subprocess.DEVNULL)

    assert [process.wait(60) for process in [start(number) for number in (1, 2, 3)]] == [0, 0, 0]
    second = {number: start(number) for number in (1, 2, 3) if not Path(f"many/parts/encoded-{number}.json").exists()}
    victim = min(second)
    first_input = 0 if victim == 1 else victim - 1
    deadline = time.monotonic() + 60
    while len(list(Path("many/shards").glob(f"shard-{first_input:05d}-*.json"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    second.pop(victim).send_signal(signal.SIGKILL)
    assert [process.wait(60) for process in second.values()] == [0] * len(second)
    assert not Path("many/manifest.json").exists()
    assert start(victim).wait(60) == 0
    assert content_of(Path("many")) == content_of(one_machine(options=options))
