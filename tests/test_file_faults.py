"""A kill, an I/O error, a full disk and a power cut at every file operation: the next command ends as if nothing were.

A sample is in CI, `make chaos` has all of them.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from file_faults import (
    Disk,
    Fault,
    Image,
    Operation,
    Programme,
    Record,
    Result,
    Server,
    compile_library,
    read_image,
    write_image,
)
from lm_pcfg.storage.metrics_file import read_metrics
from shards import random_lines, write_shard
from texts import write_config, write_text

TIMED = ("time", "train/words_per_second", "train/sentences_per_second", "train/seconds", "valid/seconds")
WARNING = re.compile("warning: (?!valid: .* unknown)")  # of unknown words there are many in so small a text
SIGNS_OF_A_BUG = re.compile("Traceback|Exception")


# ---- commands -------------------------------------------------------------------------------------------------------


def small_training(folder: Path) -> list[str]:
    """Four steps, two evaluations, two checkpoints of which one is kept."""
    config = write_config(
        folder, runs_folder="runs", resume="auto", training={"max_steps": 4, "log_every": 1},
        evaluation={"every_steps": 2}, checkpoint={"every_steps": 2, "keep_last": 1}, batch={"sentences": 4},
    )  # fmt: skip
    return ["train", "--config", str(config)]


def training_on_shards(folder: Path) -> list[str]:
    """Their index is made by the first command, and found by the next."""
    raw = folder / "raw"
    raw.mkdir()
    write_shard(raw / "one.txt", random_lines(30, seed=1))
    write_shard(raw / "two.jsonl", random_lines(30, seed=2))
    return [
        *small_training(folder), f"data.train={raw}", "data.index_folder=index", "data.verify=once",
        "training.max_steps=2",
    ]  # fmt: skip


def training_on_the_embedded_text(folder: Path) -> list[str]:
    """It is made in the user's cache, here cache/lm_pcfg/embedded."""
    return [*small_training(folder), "data.train=embedded:valid", "data.valid=null", "training.max_steps=1"]


def preparation(folder: Path) -> list[str]:
    texts = [write_text(folder / name, 35, seed) for seed, name in enumerate(("one.txt", "two.txt"))]
    return ["prepare", *map(str, texts), "--out", "corpora/small", "--shard-lines", "25"]


def preparation_of_pieces(folder: Path) -> list[str]:
    return [*preparation(folder), "--vocabulary", "unigram", "--size", "40"]


def preparation_in_parts(folder: Path) -> list[str]:
    """In one part, which does all that several do."""
    return [*preparation(folder), "--part", "1/1"]


def preparation_of_trees(folder: Path) -> list[str]:
    trees = folder / "some.trees"
    trees.write_text("(S (NP (D the) (N cat)) (VP (V sees) (NP (D a) (N dog))))\n" * 20, encoding="utf-8")
    return ["prepare", str(trees), "--trees", "--out", "trees", "--shard-lines", "12"]


def outcome(watched: Path) -> dict[str, Any]:
    """All files, but for times and speeds. Temporary files would be among them."""
    found: dict[str, Any] = dict(read_image(watched))
    for name in list(found):
        if re.fullmatch(r"runs/small/metrics-\d+\.jsonl", name):  # of a run that began again
            del found[name]
        elif name.endswith("metrics.jsonl"):
            lines = read_metrics(watched / name, warn=pytest.fail)
            found[name] = [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines]
        elif name.endswith("state.json"):
            state = json.loads(found[name])
            del state["checksum"], state["metrics"]["sha256"], state["window"]["seconds"]
            found[name] = state
        elif name.startswith("index/") and name.endswith(".json"):
            found[name] = {k: v for k, v in json.loads(found[name]).items() if k not in ("call", "checksum")}
        elif name.endswith("/.lock"):
            found[name] = None  # which process had it
    return found


# ---- the sweep ------------------------------------------------------------------------------------------------------


class Sweep:
    """Tries faults with one command, which begins in one state of the watched folder."""

    def __init__(self, programme: Programme, arguments: Sequence[str], begin: Image | None = None, reads: bool = True):
        """reads: whether opening a file to read it is an operation, too; False for a command of several processes."""
        self.programme, self.arguments, self.begin, self.reads = programme, arguments, begin or {}, reads
        self.tried: Counter[str] = Counter()
        self.wrong: list[str] = []
        write_image(programme.watched, self.begin)
        self.disk = Disk(programme.watched)
        whole = self._try()
        assert whole.status == 0, whole.said
        self.records = list(programme.records())
        assert len(self.records) == whole.operations
        self.wanted, self.end = outcome(programme.watched), read_image(programme.watched)

    def _try(self, fault: Fault = Fault.NONE, at: int = 0) -> Result:
        return self.programme.run(self.arguments, fault, at, reads=self.reads)

    def run(self, share: float = 1.0) -> None:
        self.faults(share)
        self.power_cuts(share)
        tried = ", ".join(f"{count} {what}" for what, count in sorted(self.tried.items()))
        print(f"{len(self.records)} operations of {' '.join(self.arguments)}: {tried}; {len(self.wrong)} wrong")
        assert not self.wrong, f"{len(self.wrong)} are wrong:\n" + "\n".join(self.wrong)

    def faults(self, share: float) -> None:
        """Try each fault at each operation at which it can happen, or at a share of them."""
        for fault in (Fault.KILL, Fault.FAIL_ONCE, Fault.DISK_FULL):
            possible = [at for at, record in enumerate(self.records, start=1) if makes_a_difference(fault, record)]
            for at in spread(possible, share):
                write_image(self.programme.watched, self.begin)
                result = self._try(fault, at)
                what = f"{fault.name} at {self._describe(at)}"
                self._look(what, fault, result)
                self._run_again(f"{what}: {result.said}")

    def power_cuts(self, share: float) -> None:
        """Lose all that was not fsynced; or only contents, but no names. Equal states are tried once."""
        states: dict[str, Image] = {}
        for number, record in enumerate(self.records, start=1):
            self.disk.apply(record)
            for which in ("power cut", "power cut that spares names"):
                state = self.disk.after_power_cut(names_kept=which.endswith("names"))
                if state not in states.values():
                    states[f"{which} after {self._describe(number)}"] = state
        assert self.disk.now() == self.end  # no operation was missed
        lasting = self.disk.after_power_cut()
        lost = [name for name in self.end if not name.endswith(".lock") and lasting.get(name, ()) != self.end[name]]
        assert not lost, f"a command that has ended did not make them durable: {lost}"
        for what in spread(list(states), share):
            self.tried["power cut"] += 1
            write_image(self.programme.watched, states[what])
            self._run_again(what)

    def _note(self, wrong: str) -> None:
        print(wrong)  # at once: the whole takes long
        self.wrong.append(wrong)

    def _describe(self, number: int) -> str:
        record = self.records[number - 1]
        return f"{number}, {record.operation.name} {Path(record.path).relative_to(self.programme.watched)}"

    def _look(self, what: str, fault: Fault, result: Result) -> None:
        """Look at what the command said: one that could not do its work says so in one line."""
        self.tried[f"{fault.name} with status {result.status}"] += 1
        lines = result.said.splitlines()
        errors = [line for line in lines if line.startswith("lm_pcfg: error: ")]
        killed = fault is Fault.KILL and result.status == -signal.SIGKILL
        refused = result.status == 1 and len(errors) == 1  # after a kill, too: of a process that it started
        if not (killed or refused or (result.status == 0 and not errors)) or SIGNS_OF_A_BUG.search(result.said):
            self._note(f"{what}: status {result.status}: {result.said}")

    def _run_again(self, what: str) -> None:
        """Run the same command undisturbed: it ends as if nothing had been, and has nothing to complain about."""
        result = self._try()
        found = outcome(self.programme.watched) if result.status == 0 else {}
        differing = [name for name in {**self.wanted, **found} if self.wanted.get(name, ()) != found.get(name, ())]
        if result.status != 0 or differing or SIGNS_OF_A_BUG.search(result.said) or WARNING.search(result.said):
            self._note(f"{what}, then status {result.status}: {result.said} {differing=}")


def makes_a_difference(fault: Fault, record: Record) -> bool:
    """Whether to try it. A kill before an operation that changes nothing is like one before the next operation."""
    opens, syncs = record.operation is Operation.OPEN, record.operation is Operation.SYNC
    creates = opens and bool(record.number & os.O_CREAT)
    if fault is Fault.KILL:
        return record.succeeded and not syncs and (creates or not opens)
    if fault is Fault.DISK_FULL:  # an fsync fails where space is looked for only then
        return creates or record.operation in (Operation.WRITE, Operation.MAKE_FOLDER, Operation.SYMLINK) or syncs
    return True


def spread(items: list, share: float) -> list:
    """Return a share of the items, from all parts of the list, always the same."""
    count = max(1, round(share * len(items)))
    return [items[(2 * k + 1) * len(items) // (2 * count)] for k in range(count)]


# ---- tests ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    server = Server(compile_library(tmp_path_factory.mktemp("library")))
    yield server
    server.close()


@pytest.fixture
def programme(server, tmp_path) -> Programme:
    return Programme(server, tmp_path)


def test_the_disk_of_these_tests_loses_what_was_not_fsynced(tmp_path):
    disk = Disk(tmp_path)

    def do(operation: Operation, name: str, *, node: int = 0, number: int = 0, data: bytes = b"") -> None:
        disk.apply(Record(operation, True, node, number, str(tmp_path / name), data))

    do(Operation.OPEN, "new", node=1, number=os.O_CREAT)
    do(Operation.WRITE, "new", node=1, data=b"content")
    assert disk.now() == {"new": b"content"}
    assert disk.after_power_cut() == {}
    assert disk.after_power_cut(names_kept=True) == {"new": b""}
    do(Operation.SYNC, "", node=tmp_path.stat().st_ino)
    assert disk.after_power_cut() == {"new": b""}
    do(Operation.SYNC, "new", node=1)
    do(Operation.RENAME, "new", data=os.fsencode(tmp_path / "final"))
    assert disk.after_power_cut() == {"new": b"content"}
    assert disk.after_power_cut(names_kept=True) == {"final": b"content"}


SAMPLE_OR_ALL = pytest.mark.parametrize(
    "share", [pytest.param(0.01, marks=pytest.mark.long), pytest.param(1.0, marks=pytest.mark.chaos)]
)


@SAMPLE_OR_ALL
@pytest.mark.parametrize(
    "command",
    [
        small_training, training_on_shards, training_on_the_embedded_text, preparation, preparation_of_pieces,
        preparation_of_trees, preparation_in_parts,
    ],
)  # fmt: skip
def test_after_a_fault_a_command_ends_as_if_nothing_had_been(programme, command, share):
    Sweep(programme, command(programme.folder)).run(share)


@SAMPLE_OR_ALL
def test_after_two_faults_a_training_ends_as_if_nothing_had_been(programme, share):
    """The first is a kill while a checkpoint is written."""
    first = Sweep(programme, small_training(programme.folder))
    for record in first.records:
        first.disk.apply(record)
        if record.operation is Operation.RENAME and re.search(b"-00000004.*/optimizer.safetensors$", record.data):
            break
    second = Sweep(programme, first.arguments, begin=first.disk.now())
    assert second.wanted == first.wanted
    second.run(share)


@SAMPLE_OR_ALL
def test_after_a_fault_a_resume_with_other_settings_ends_as_if_nothing_had_been(programme, share):
    """The earlier settings are kept beside the new ones, once."""
    arguments = small_training(programme.folder)
    write_image(programme.watched, {})
    assert programme.run([*arguments, "training.max_steps=2"]).status == 0
    sweep = Sweep(programme, [*arguments, "optimizer.learning_rate=0.01"], begin=read_image(programme.watched))
    assert b"max_steps: 2" in sweep.end["runs/small/config.1.yaml"]
    sweep.run(share)


@pytest.mark.chaos
def test_after_a_fault_a_preparation_by_several_processes_ends_as_if_nothing_had_been(programme):
    """A part of the operations: processes take seconds to start."""
    Sweep(programme, [*preparation(programme.folder), "--processes", "2"], reads=False).run(0.1)
