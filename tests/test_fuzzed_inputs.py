"""Fuzzed configs, overrides, states, manifests, indexes, vocabularies and shards, through the commands that read them.

Whatever such a file holds, a command succeeds or says in one line what is wrong: no traceback, no more than 10 seconds,
no more than 1 GB above an ordinary run, and nothing written outside of the folder it works in. `make test` takes a few
examples of each kind, `make chaos` 5,000 in all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from command_line import lm_pcfg as command
from hostile_json import ANYTHING, nearly
from lm_pcfg.corpus.shards.shapes import checksum_of
from lm_pcfg.settings_file import dump_yaml, load_settings
from lm_pcfg.storage.state_file import state_bytes
from shards import random_lines, write_shard
from texts import write_config

MOST_SECONDS, MOST_BYTES = 10.0, 1 << 30  # of the processor; no more than six times that by the clock
FEW, MANY = 6, 715  # examples of each of seven kinds
SUFFIXES = [".txt", ".txt.gz", ".txt.zst", ".jsonl", ".parquet", ".trees"]
HOSTILE_BYTES = st.sampled_from(
    [b"", b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\n" * 50, b"[" * 5000, b"(" * 5000, b"9" * 5000, b'{"text": 1}\n',
     b"\x1f\x8b", b"PAR1", b"\xef\xbb\xbf", b"&a [*a, *a]\n", b"<unk>\n", b" ", b"\r", b"\xe2\x80\xa8", b"-" * 300]
)  # fmt: skip
VALUES = st.one_of(
    ANYTHING.map(json.dumps),
    st.text(max_size=12),
    st.sampled_from(
        ["", "~", "[", "&a [*a]", "!!python/name:os.system", "9" * 5000, "1e300", "-1e300", "2147483647", "0x7fffffff",
         "normal(1, 1)", "normal(1e400, -1)", "uniform(1)", "auto", "fail", "skip", "always", "/dev/zero", "/dev/null",
         "/proc/self/mem", "../x", "../../x", "x" * 300, "embedded:train", "embedded:nosuch", "*.txt", "**", "hub/x y",
         "true", "yes", ".nan", ".inf", "2024-01-01", "1:30", "bf16", "cuda", "cost", "explicit", "tables"]
    ),
)  # fmt: skip

USUAL = st.sampled_from(["0", "1", "2", "3", "0.5", "1e-3", "true", "false", "null", "[0.5, 0.9]", "auto", "adam"])


# ---- what is right --------------------------------------------------------------------------------------------------


@dataclass
class Place:
    """A folder with a run, corpora, an index and vocabularies, all of them right; examples work on copies in `work`."""

    outside: Path

    @property
    def right(self) -> Path:
        return self.outside / "right"

    @property
    def work(self) -> Path:
        return self.outside / "a" / "b" / "work"

    @property
    def config(self) -> Path:
        return self.right / "small.yaml"

    def train(self, *changes: str) -> list[str]:
        """A training of one step that leaves its files in the folder it is called from."""
        here = ["runs_folder=runs", "data.index_folder=index", "training.max_steps=1", "data.workers=0"]
        return ["train", "--config", str(self.config), *changes, *here]

    def streamed(self, *changes: str) -> list[str]:
        shards = [str(self.right / f"shard{suffix}") for suffix in (".txt", ".jsonl", ".parquet")]
        return self.train(f"data.train={json.dumps(shards)}", "data.valid=null", "data.block_lines=32", *changes)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    place = Place(tmp_path_factory.mktemp("fuzzed") / "outside")
    right, lines = place.right, random_lines(60, longest=5)
    right.mkdir(parents=True)
    place.work.mkdir(parents=True)
    config = write_config(right, data={"vocabulary": {"size": None}})
    ran(["train", "--config", str(config), "training.max_steps=2", "name=run"], right)
    shutil.copytree(right / "runs/run", right / "run")
    for suffix in SUFFIXES[:-1]:
        write_shard(right / f"shard{suffix}", lines)
    (right / "shard.trees").write_text("(S (D the) (N cat))\n(S (NP (D a) (N dog)) (V runs))\n" * 5)
    (right / "text").write_text("the cat sees a dog\n\nzebra\n")
    ran(["prepare", str(right / "shard.txt"), "--out", "corpus", "--shard-lines", "40", "--processes", "1"], right)
    shutil.copytree(right / "corpus/vocab", right / "words")
    (right / "pieces").mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(right / "pieces/spm"), vocab_size=25, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    ran([*place.streamed(), "--dry-run"], right)
    assert list((right / "index").glob("*.json"))
    return place


def ran(arguments: list[str], cwd: Path) -> None:
    result = command(*arguments, cwd=cwd)
    assert result.returncode == 0, (arguments, result.stderr.decode())


# ---- what is nearly right -------------------------------------------------------------------------------------------


@st.composite
def damaged(draw: Any, right: bytes) -> bytes:
    """Draw bytes that differ in one to three places."""
    content = bytearray(right)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(0, len(content) - 1)))
        change = draw(st.sampled_from(["flip", "insert", "delete", "cut", "all"]))
        if change == "flip" and content:
            content[start] ^= 1 << draw(st.integers(0, 7))
        elif change == "insert":
            content[start:start] = draw(HOSTILE_BYTES)
        elif change == "delete":
            del content[start : start + draw(st.integers(1, 40))]
        elif change == "cut":
            del content[start:]
        elif change == "all" and draw(st.integers(0, 9)) == 0:
            content[:] = draw(HOSTILE_BYTES | st.binary(max_size=60))
    return bytes(content)


def config(draw: Callable[[Any], Any], place: Place) -> list[str]:
    content = yaml.safe_load(place.config.read_text())
    file = place.work / "fuzzed.yaml"
    if draw(st.booleans()):
        file.write_bytes(draw(damaged(place.config.read_bytes())))
    else:
        file.write_text(json.dumps(draw(nearly(content))))
    arguments = place.train()
    arguments[arguments.index("--config") + 1] = str(file)
    return draw(st.sampled_from([[*arguments, "--print-config"], [*arguments, "--dry-run"], arguments]))


def override(draw: Callable[[Any], Any], place: Place) -> list[str]:
    def keys(content: dict[str, Any], above: str = "") -> Iterator[str]:
        for key, value in content.items():
            yield f"{above}{key}"
            if isinstance(value, dict):
                yield from keys(value, f"{above}{key}.")

    known = list(keys(yaml.safe_load(dump_yaml(load_settings(place.config)))))
    strange = st.text(max_size=8) | st.sampled_from(["model", "model.x.y", "", ".", "a.b=c"])
    changes = []
    for _ in range(draw(st.integers(1, 2))):
        name = draw(strange if draw(st.integers(0, 9)) == 0 else st.sampled_from(known))
        changes.append(f"{name}={draw(USUAL if draw(st.booleans()) else VALUES)}")
    changes = [change for change in changes if not change.startswith("-")]  # an option of the command
    arguments = place.train(*changes)
    return draw(st.sampled_from([[*arguments, "--print-config"], [*arguments, "--dry-run"], arguments]))


def uses_of_run(draw: Callable[[Any], Any], place: Place) -> list[str]:
    text, one = str(place.right / "text"), str(max(place.work.glob("run/checkpoints/step-*")))
    resume = place.train("name=run", "resume=auto")
    return draw(
        st.sampled_from([
            ["info", "--checkpoint", "run"], ["info", "--checkpoint", one], ["score", text, "--checkpoint", "run"],
            ["score", text, "--checkpoint", one], ["verify", "run"],
            ["parse", text, "--checkpoint", "run"], ["report", "run"],
            [*resume, "runs_folder=.", "training.max_steps=3"],
        ])
    )  # fmt: skip


def state(draw: Callable[[Any], Any], place: Place) -> list[str]:
    run = Path(shutil.copytree(place.right / "run", place.work / "run", symlinks=True))
    file = max(run.glob("checkpoints/step-*/state.json"))
    right = file.read_bytes()
    if draw(st.integers(0, 4)) == 0:
        file.write_bytes(draw(damaged(right)))
    else:
        content = draw(nearly(json.loads(right)))
        try:
            file.write_bytes(state_bytes(content))
        except (AttributeError, ValueError):  # no object, or NaN: it cannot be signed
            file.write_text(json.dumps(content))
    return uses_of_run(draw, place)


def uses_of_corpus(draw: Callable[[Any], Any], place: Place) -> list[str]:
    skip = draw(st.sampled_from(["fail", "skip"]))
    verify = draw(st.sampled_from(["off", "once", "always"]))
    training = place.train("data.train=corpus", "data.valid=null", f"data.verify={verify}", f"data.on_error={skip}")
    again = ["prepare", str(place.right / "shard.txt"), "--out", "corpus", "--shard-lines", "40", "--processes", "1"]
    return draw(st.sampled_from([["info", "corpus"], ["verify", "corpus"], again, training, [*training, "--dry-run"]]))


def manifest(draw: Callable[[Any], Any], place: Place) -> list[str]:
    corpus = Path(shutil.copytree(place.right / "corpus", place.work / "corpus"))
    file = corpus / draw(st.sampled_from(["manifest.json"] * 4 + ["prepare.json"]))
    os.mkfifo(corpus / "shards/pipe")
    os.symlink("/dev/zero", corpus / "shards/zero")
    if draw(st.integers(0, 4)) == 0:
        file.write_bytes(draw(damaged(file.read_bytes())))
    else:
        content = draw(nearly(json.loads(file.read_bytes())))
        sign = isinstance(content, dict) and file.name == "manifest.json" and draw(st.integers(0, 4)) > 0
        file.write_text(json.dumps({**content, "checksum": checksum_of(content)} if sign else content))
    return uses_of_corpus(draw, place)


def index(draw: Callable[[Any], Any], place: Place) -> list[str]:
    folder = Path(shutil.copytree(place.right / "index", place.work / "index"))
    for file in sorted(folder.glob("*.json")):
        if draw(st.booleans()):
            continue
        if draw(st.integers(0, 4)) == 0:
            file.write_bytes(draw(damaged(file.read_bytes())))
        else:
            content = draw(nearly(json.loads(file.read_bytes())))
            signed = {**content, "checksum": checksum_of(content)} if isinstance(content, dict) else content
            file.write_text(json.dumps(signed))
    verify = draw(st.sampled_from(["off", "once", "always"]))
    training = place.streamed(f"data.verify={verify}", f"data.on_error={draw(st.sampled_from(['fail', 'skip']))}")
    return draw(st.sampled_from([training, [*training, "--dry-run"]]))


def vocabulary(draw: Callable[[Any], Any], place: Place) -> list[str]:
    kind = draw(st.sampled_from(["words", "pieces", "run"]))
    if kind == "run":
        run = Path(shutil.copytree(place.right / "run", place.work / "run", symlinks=True))
        folder = max(run.glob("checkpoints/step-*"))
        file = folder / "vocab" / draw(st.sampled_from(["words.txt", "vocabulary.json"]))
    else:
        folder = Path(shutil.copytree(place.right / kind, place.work / kind))
        file = folder / (draw(st.sampled_from(["words.txt", "vocabulary.json"])) if kind == "words" else "spm.model")
    right = file.read_bytes()
    if file.suffix == ".json" and draw(st.booleans()):
        file.write_text(json.dumps(draw(nearly(json.loads(right)))))
    else:
        file.write_bytes(draw(damaged(right)))
    if kind == "run":  # with a right hash
        content = json.loads((folder / "state.json").read_bytes())
        entry = {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "size": file.stat().st_size}
        content["files"][file.relative_to(folder).as_posix()] = entry
        (folder / "state.json").write_bytes(state_bytes(content))
        return uses_of_run(draw, place)
    name = str(file if kind == "pieces" else folder)
    uses = [["prepare", str(place.right / "shard.txt"), "--out", "out", "--vocabulary", name, "--processes", "1"]]
    if kind == "pieces":
        uses.append([*place.train(f"data.sentencepiece={name}"), "--dry-run"])
    return draw(st.sampled_from(uses))


def shard(draw: Callable[[Any], Any], place: Place) -> list[str]:
    skip, run = draw(st.sampled_from(["fail", "skip"])), str(place.right / "run")
    if draw(st.integers(0, 4)) == 0:
        corpus = Path(shutil.copytree(place.right / "corpus", place.work / "corpus"))
        file = draw(st.sampled_from(sorted((corpus / "shards").iterdir())))
        file.write_bytes(draw(damaged(file.read_bytes())))
        return uses_of_corpus(draw, place)
    suffix = draw(st.sampled_from(SUFFIXES))
    file = place.work / f"fuzzed{suffix}"
    right = (place.right / f"shard{suffix}").read_bytes()
    if suffix == ".jsonl" and draw(st.booleans()):
        some = [json.loads(line) for line in right.splitlines()[:3]]
        file.write_text("".join(json.dumps(draw(nearly(line))) + "\n" for line in some))
    else:
        file.write_bytes(draw(damaged(right)))
    preparing = ["prepare", str(file), "--out", "out", "--on-error", skip, "--processes", "1"]
    if suffix == ".trees":
        return draw(st.sampled_from([[*preparing, "--trees"], ["evaluate", str(file), "--checkpoint", run]]))
    uses = [preparing, place.train(f"data.train={file}", "data.streaming=auto", f"data.on_error={skip}")]
    if suffix.startswith(".txt"):
        uses += [[name, str(file), "--checkpoint", run] for name in ("score", "parse")]
    return draw(st.sampled_from(uses))


KINDS: dict[str, Callable[[Any, Place], list[str]]] = {
    "config": config, "override": override, "state": state, "manifest": manifest, "index": index,
    "vocabulary": vocabulary, "shard": shard,
}  # fmt: skip


# ---- what happens ---------------------------------------------------------------------------------------------------


@dataclass
class Counts:
    """What became of the examples of a kind."""

    accepted: int = 0
    refused: int = 0
    told: int = 0  # refused, or accepted with a warning
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    memory: int = 0  # above an ordinary run

    @property
    def examples(self) -> int:
        return self.accepted + self.refused


def most_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def files_outside(place: Place) -> dict[str, tuple[int, int]]:
    """All that lies around the folder that examples work in, with sizes and times of change."""
    found = {}
    for root, folders, files in os.walk(place.outside):
        if Path(root) == place.work:
            folders.clear()
            continue
        for name in [*folders, *files]:
            path = Path(root, name)
            if path not in (place.work, place.work.parent):
                seen = path.lstat()
                found[str(path)] = (seen.st_size, seen.st_mtime_ns)
    return found


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def try_out(arguments: list[str], place: Place, counts: Counts, ordinary: int) -> str | None:
    """Run a command on an example; return what is wrong with what it did."""
    began = time.process_time()  # others may take most of the machine
    try:
        with interrupted_after(6 * MOST_SECONDS):
            result = command(*arguments, cwd=place.work)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        counts.refused += 1
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
    seconds = time.process_time() - began
    counts.slowest, counts.memory = max(counts.slowest, seconds), max(counts.memory, most_memory() - ordinary)
    counts.accepted += result.returncode == 0
    counts.refused += result.returncode != 0
    said = result.stderr.decode("utf-8", "replace")
    counts.told += result.returncode != 0 or "warning: " in said
    if seconds > MOST_SECONDS:
        return f"{seconds:.1f} seconds"
    if counts.memory > MOST_BYTES:
        return f"{counts.memory / 2**30:.2f} GiB above an ordinary run"
    if result.returncode not in (0, 1, 2) or "Traceback" in said:
        return f"status {result.returncode}: {said[-300:]}"
    if result.returncode == 1 and arguments[0] != "verify":
        errors = [line for line in said.splitlines() if line.startswith("lm_pcfg: error: ")]
        if len(errors) != 1 or not said.rstrip("\n").endswith(errors[0]):
            return f"not one line: {said[-300:]!r}"
    return None


@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=[pytest.mark.chaos])])
@pytest.mark.parametrize("kind", KINDS)
def test_fuzzed_inputs_end_well(place, kind, examples, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # names that nobody has are not looked for in the network
    counts, around = Counts(), files_outside(place)
    ran(["score", str(place.right / "text"), "--checkpoint", str(place.right / "run")], place.right)
    ordinary = most_memory()

    @given(data=st.data())
    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def check(data: Any) -> None:
        shutil.rmtree(place.work)
        place.work.mkdir()
        arguments = KINDS[kind](data.draw, place)
        problem = try_out(arguments, place, counts, ordinary)
        if problem is None and files_outside(place) != around:
            problem = "something changed outside"
        if problem is not None:
            counts.wrong.append(f"{problem} <- {' '.join(arguments)[:400]}")
            if keep := os.environ.get("LM_PCFG_KEEP_FUZZED"):  # a folder for the examples that show a fault
                shutil.copytree(place.work, Path(keep, f"{kind}-{len(counts.wrong)}"), symlinks=True)

    check()
    print(
        f"{kind}: {counts.examples} examples: {counts.accepted} accepted, {counts.refused} refused (or with a warning: "
        f"{counts.told}), {len(counts.wrong)} wrong; {counts.slowest:.1f} s, {counts.memory / 2**20:.0f} MiB above"
    )
    assert counts.wrong == []
    assert counts.examples >= examples
    assert counts.told > examples // 4
