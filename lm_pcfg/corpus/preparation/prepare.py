"""`lm_pcfg prepare` makes a prepared corpus of text of many kinds. The same call finishes what was interrupted."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import platform
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lm_pcfg.console import Progress, progress, say
from lm_pcfg.corpus import pieces
from lm_pcfg.corpus.lengths import Histogram
from lm_pcfg.corpus.pieces import AnyVocabulary, load_vocabulary
from lm_pcfg.corpus.preparation.hub import looks_like_hub_name
from lm_pcfg.corpus.preparation.shards import (
    Counts,
    Finished,
    Input,
    Reading,
    ReadOptions,
    Task,
    finished_or_made,
    forget_notes,
    lines_of_rows,
    remove_leftovers,
    tasks_of,
)
from lm_pcfg.corpus.shards.files import OnError, files_below, find_shards
from lm_pcfg.corpus.shards.manifest import FORMAT, MANIFEST, Manifest, is_prepared, manifest_text, read_manifest
from lm_pcfg.corpus.shards.prepared import PARTS, PLAN, SHARDS, TEXTS, VOCABULARY, verify
from lm_pcfg.corpus.shards.processes import in_processes, usable_cores, worth_using
from lm_pcfg.corpus.shards.shapes import PlanShape, ShapeError, checked, parse_json
from lm_pcfg.corpus.text import read_bounded
from lm_pcfg.corpus.vocabulary import DESCRIPTION_FILE, Vocabulary, VocabularyError, VocabularyOptions
from lm_pcfg.errors import UserError
from lm_pcfg.storage.durable import fsync, replace_file

COUNTED_AT_A_TIME = 50_000
PIECES_TRAINED_ON = 2_000_000  # lines, drawn from all of them
Kind = Literal["words", "unigram", "bpe"]


@dataclass(frozen=True)
class PrepareOptions:
    text_field: str = "text"
    trees: bool = False
    split: str | None = None  # of a text on the hub, or of a folder in its layout
    configuration: str | None = None
    kind: Kind = "words"  # not used with `existing`
    words: VocabularyOptions = field(default_factory=VocabularyOptions)  # kind: words
    pieces: int = 8000  # kind: unigram, bpe
    byte_fallback: bool = False
    existing: str | None = None  # a SentencePiece model, a vocab folder or a prepared corpus
    shard_lines: int = 250_000
    on_error: OnError = "fail"


def prepare(inputs: Sequence[str], out: Path, options: PrepareOptions, *, processes: int | None = None) -> Manifest:
    """Prepare a corpus and return its manifest. processes: None decides by the size of the inputs."""
    found = find_inputs(inputs, options, out)
    processes = processes or processes_for(found)
    plan = plan_of(found, options)
    with alone(out):
        remove_leftovers(out)
        if _is_done(out, plan):
            manifest = read_manifest(out)
            verify(manifest)
            tidy(out, manifest)  # a call that was killed may not have got so far
            say(f"{out} was prepared before, and is whole")
            return manifest
        (out / SHARDS).mkdir(exist_ok=True)
        read = ReadOptions(options.text_field, options.trees, options.on_error)
        vocabulary = _vocabulary(found, read, out, options, processes)
        reading = Reading()
        made = make_shards(found, read, out, options, vocabulary, processes, reading)
        manifest = write_manifest(out, found, options, vocabulary, made, reading)
        tidy(out, manifest)
        return manifest


def processes_for(inputs: Sequence[Input]) -> int:
    """Decide by the size of the inputs."""
    on_hub = any(item.split for item in inputs)
    return usable_cores() if on_hub else worth_using(Path(item.name) for item in inputs)


def find_inputs(inputs: Sequence[str], options: PrepareOptions, out: Path) -> list[Input]:
    if any(name == "-" for name in inputs):
        raise UserError("prepare reads its inputs more than once, so they cannot be standard input (-); save a file")
    for name in inputs:
        if is_prepared(name):
            raise UserError(f"{name}: is a prepared corpus already; train with data.train={name}")
    on_hub = [name for name in inputs if options.split is not None or looks_like_hub_name(name)]
    files = find_shards([name for name in inputs if name not in on_hub], trees=options.trees, out=out)
    if on_hub and options.trees:
        raise UserError(f"{on_hub[0]}: --trees reads files of bracketed trees, not texts of the hub")
    names = [(str(file), None) for file in files] + [(name, options.split or "train") for name in on_hub]
    found = []
    for number, (name, split) in enumerate(names):
        size, changed = _size_and_change(Path(name), out)
        found.append(Input(number, name, split, options.configuration, size, changed))
    return found


def _size_and_change(path: Path, out: Path) -> tuple[int, int]:
    """Return two numbers by which a change of an input is noticed; for a text of the hub, (0, 0)."""
    if path.is_dir():
        stats = sorted(
            (str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns)
            for file in files_below(path, out) if file.is_file()
        )  # fmt: skip
        digest = hashlib.sha256(json.dumps(stats).encode()).digest()
        return sum(size for _, size, _ in stats), int.from_bytes(digest[:8])
    if not path.exists():
        return 0, 0
    return path.stat().st_size, path.stat().st_mtime_ns


# ---- one folder, one corpus -----------------------------------------------------------------------------------------


def plan_of(inputs: Sequence[Input], options: PrepareOptions) -> dict[str, Any]:
    """Return what the content of the folder depends on, as JSON."""
    content = {"format": FORMAT, "inputs": [asdict(item) for item in inputs], "options": asdict(options)}
    if options.existing is not None:
        content["vocabulary"] = existing_vocabulary(options.existing).hash
    return json.loads(json.dumps(content))


def _is_done(out: Path, plan: dict[str, Any]) -> bool:
    """Whether the corpus is finished. Refuse a folder with other content; drop a vocabulary of another plan."""
    file = out / PLAN
    if not file.exists():
        strangers = [entry.name for entry in out.iterdir() if entry.name != ".lock"]
        if strangers:
            raise UserError(f"{out}: is not empty (it has {strangers[0]}); choose another --out")
        stored: dict[str, Any] | None = plan
    else:
        stored = None
        with contextlib.suppress(OSError, ShapeError):
            content = parse_json(read_bounded(file))
            checked(PlanShape, content)
            stored = content
    if is_prepared(out):
        if stored != plan:
            raise UserError(
                f"{out}: holds a corpus made of other inputs or options ({difference(stored, plan)}); choose another "
                "--out, or remove the folder"
            )
        return True
    if stored is None or _without_on_error(stored) != _without_on_error(plan):
        say(f"{out} was begun with other inputs or options ({difference(stored, plan)}); what does not fit is redone")
        shutil.rmtree(out / VOCABULARY, ignore_errors=True)
    replace_file(file, (json.dumps(plan, indent=2) + "\n").encode())
    return False


def _without_on_error(plan: dict[str, Any]) -> dict[str, Any]:
    """Blank on_error: it decides whether a call fails, not what a finished vocabulary or shard holds."""
    return {**plan, "options": {**plan["options"], "on_error": None}}


def difference(stored: dict[str, Any] | None, plan: dict[str, Any]) -> str:
    if stored is None:
        return "unreadable"
    differing = [key for key in plan["options"] if stored["options"].get(key) != plan["options"][key]]
    return f"{', '.join(differing)} changed" if differing else "the input files changed"


@contextlib.contextmanager
def alone(out: Path, *, shared: bool = False) -> Iterator[None]:
    """Make the folder and hold its lock. shared: others who share it may work in the folder at the same time."""
    try:
        new = [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
        for folder in new:
            fsync(folder.parent)
        with (out / ".lock").open("w") as lock:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            yield  # the file stays: another call may have it open, and would hold the lock of a file without a name
    except BlockingIOError:
        raise UserError(f"{out}: another lm_pcfg prepare is at work in it") from None
    except FileExistsError:
        raise UserError(f"{out}: is a file; --out should be a folder") from None
    except OSError as error:
        raise UserError(f"{out}: {error.strerror or error}") from None


# ---- vocabulary -----------------------------------------------------------------------------------------------------


def _vocabulary(
    inputs: Sequence[Input], read: ReadOptions, out: Path, options: PrepareOptions, processes: int
) -> AnyVocabulary:
    if (vocabulary := saved_vocabulary(out)) is not None:
        return vocabulary
    if options.existing is not None:
        vocabulary = existing_vocabulary(options.existing)
    elif options.kind == "words":
        vocabulary = word_vocabulary(count_words(inputs, read, processes), options)
    else:
        with progress("lines read for the vocabulary", None) as bar:
            vocabulary = pieces.train_pieces(
                _all_lines(inputs, read, bar), kind=options.kind, size=options.pieces, lines_used=PIECES_TRAINED_ON,
                byte_fallback=options.byte_fallback, threads=processes, say=say,
            )  # fmt: skip
    vocabulary.save(out / VOCABULARY)
    return vocabulary


def saved_vocabulary(out: Path) -> AnyVocabulary | None:
    """Load the vocabulary of the corpus, if it is there; remove half of one."""
    folder = out / VOCABULARY
    if (folder / DESCRIPTION_FILE).exists():  # it is written last
        try:
            return load_vocabulary(folder)
        except VocabularyError as error:
            problem = str(error).split("; ")[0]  # it goes on with what helps in the folder of a run
            raise UserError(f"{problem}; remove {folder} and run the same command again, which makes it anew") from None
    if folder.exists():
        shutil.rmtree(folder)
    return None


def word_vocabulary(counts: Counter[str], options: PrepareOptions) -> Vocabulary:
    try:
        return Vocabulary.from_counts(counts, options.words)
    except VocabularyError as error:
        raise UserError(str(error).replace("check data.train", "check the inputs")) from None


def existing_vocabulary(name: str) -> AnyVocabulary:
    """Load the vocabulary of a SentencePiece model, of the vocab folder of a run, or of a prepared corpus."""
    path = Path(name)
    if path.is_dir():
        path = path / VOCABULARY if (path / VOCABULARY).is_dir() else path
        vocabulary = load_vocabulary(path)
        if vocabulary.end_id is not None:
            raise UserError(f"{name}: its sentences end explicitly (eos: explicit); give one made with eos: implicit")
        return vocabulary
    if not path.exists():
        raise UserError(
            f"--vocabulary {name}: should be words, unigram, bpe, or the path of a SentencePiece model, of a prepared "
            "corpus or of a vocab folder"
        )
    return pieces.open_model(path)


def _counting_tasks(inputs: Sequence[Input], read: ReadOptions) -> Iterator[Task]:
    for item in inputs:
        yield from tasks_of(item, read, COUNTED_AT_A_TIME, Reading())


def _words_of_task(task: Task, read: ReadOptions) -> tuple[Counter[str], int]:
    counts: Counter[str] = Counter()
    for line in lines_of_rows(task, read):
        if line:
            counts.update(line.split())
    return counts, len(task.rows)


def count_words(inputs: Sequence[Input], read: ReadOptions, processes: int) -> Counter[str]:
    total: Counter[str] = Counter()
    with progress("lines read for the vocabulary", None) as bar:
        for counts, rows in in_processes(
            partial(_words_of_task, read=read), _counting_tasks(inputs, read), processes=processes
        ):
            total.update(counts)
            bar.advance(rows)
    return total


def _all_lines(inputs: Sequence[Input], read: ReadOptions, bar: Progress) -> Iterator[str]:
    for task in _counting_tasks(inputs, read):
        yield from (line for line in lines_of_rows(task, read) if line)
        bar.advance(len(task.rows))


# ---- shards and manifest --------------------------------------------------------------------------------------------


def make_shards(
    inputs: Sequence[Input], read: ReadOptions, out: Path, options: PrepareOptions, vocabulary: AnyVocabulary,
    processes: int, reading: Reading,
) -> list[Finished]:  # fmt: skip
    tasks = (task for item in inputs for task in tasks_of(item, read, options.shard_lines, reading))
    work = partial(finished_or_made, folder=out, options=read, vocabulary=vocabulary)
    made: list[Finished] = []
    with progress("lines prepared", None) as bar:
        for result in in_processes(work, tasks, processes=processes):
            made.append(result)
            bar.advance(result.rows, f"{len(made)} shards")
    for why in (item.why for item in made if item.why):
        say(f"warning: {why}; its shard was made again")
    for message in reading.damage.values():
        say(f"warning: {message}; what came before it is kept (--on-error skip)")
    kept = sum(not item.fresh for item in made)
    if kept:
        say(f"{kept} of {len(made)} shards were finished before, and whole")
    return made


def write_manifest(
    out: Path, inputs: Sequence[Input], options: PrepareOptions, vocabulary: AnyVocabulary, made: Sequence[Finished],
    reading: Reading,
) -> Manifest:  # fmt: skip
    counts = Counts()
    for item in made:
        counts.add(item.counts)
    if counts.lines == 0:
        raise UserError("the inputs have no line with words; nothing was prepared")
    entries = [item.entry for item in made if item.entry.groups]
    content = {
        "format": FORMAT,
        "counts": asdict(counts),
        "vocabulary": {
            "kind": "words" if isinstance(vocabulary, Vocabulary) else pieces.KIND,
            "types": len(vocabulary),
            "sha256": vocabulary.hash,
        },
        "options": asdict(options),
        "inputs": [{"name": item.name, "split": item.split, "rows": reading.rows.get(item.name)} for item in inputs],
        "damage": [reading.damage[number] for number in sorted(reading.damage)],
        "lengths": Histogram.sum([group for entry in entries for group in entry.groups]).to_json(),
        "versions": versions(),
        "shards": [entry.to_json() for entry in entries],
    }
    if options.trees:
        _write_texts(out, [entry.file for entry in entries])
    for folder in (out / VOCABULARY, out / SHARDS, out):  # the names of what a manifest lists come before its own
        fsync(folder)
    replace_file(out / MANIFEST, manifest_text(content).encode())
    fsync(out)
    return read_manifest(out)


def _write_texts(out: Path, files: Sequence[str]) -> None:
    """Write text.txt and trees.txt; line k of one belongs to line k of the other."""
    import pyarrow.parquet

    for column, name in TEXTS.items():
        beside = out / f"{name}.tmp"
        with beside.open("w", encoding="utf-8") as text:
            for file in files:
                values = pyarrow.parquet.read_table(out / SHARDS / file, columns=[column]).column(column).to_pylist()
                text.writelines(f"{value}\n" for value in values)
        fsync(beside)
        beside.replace(out / name)


def tidy(out: Path, manifest: Manifest) -> None:
    """Remove notes, shards without a line, and those of an earlier call that cut the inputs in other places."""
    shutil.rmtree(out / PARTS, ignore_errors=True)  # of calls with --part
    ours = {entry.file for entry in manifest.shards}
    for file in (out / SHARDS).glob("*.parquet"):
        if file.name not in ours:
            file.unlink(missing_ok=True)
    forget_notes(out)


def versions() -> dict[str, str]:
    packages = ("lm_pcfg", "pyarrow", "datasets", "sentencepiece", "numpy")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}
