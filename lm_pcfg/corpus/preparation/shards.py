"""Making the shards of a prepared corpus: each is whole or absent, and what is finished is never made again.

A shard is written beside, made durable and renamed; then, in the same way, a note: a small file with its counts and
hash, and a checksum of these. A shard counts as finished if its note is there and both are right.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lm_pcfg.corpus.lengths import Histogram
from lm_pcfg.corpus.pieces import AnyVocabulary
from lm_pcfg.corpus.preparation.hub import rows_of_split
from lm_pcfg.corpus.shards.errors import ShardError
from lm_pcfg.corpus.shards.files import BYTES_AT_A_TIME, Chunk, OnError, Row, scan
from lm_pcfg.corpus.shards.lines import lines_of
from lm_pcfg.corpus.shards.manifest import MANIFEST, MOST_BYTES_OF_A_LINE, ShardEntry
from lm_pcfg.corpus.shards.prepared import IDS, PLAN, ROW_GROUP_LINES, SHARDS, TEXTS, problem_with
from lm_pcfg.corpus.shards.shapes import (
    CHECKSUM,
    FinishedShape,
    NoteShape,
    ShapeError,
    check_checksum,
    checked,
    parse_json,
    with_checksum,
)
from lm_pcfg.corpus.text import TextError, read_bounded, read_lines
from lm_pcfg.corpus.treebank import TreeError, bracketed, read_tree, read_trees
from lm_pcfg.storage.durable import reason, replace_file

ROWS_AT_A_TIME = 16_384
SHARD_BYTES = 64 << 20  # of text: long lines make shards of fewer


@dataclass(frozen=True)
class Input:
    """A file, or one split of a text on the hub or of a folder in its layout."""

    number: int
    name: str
    split: str | None = None  # of the hub
    configuration: str | None = None
    size: int = 0  # of the file, or of all files of the folder
    changed: int = 0  # when, in nanoseconds; of a folder, a hash of the names, sizes and times of its files


@dataclass(frozen=True)
class ReadOptions:
    field: str = "text"
    trees: bool = False
    on_error: OnError = "fail"


@dataclass
class Counts:
    lines: int = 0  # in the shards
    words: int = 0  # between white space
    tokens: int = 0  # words or pieces of the vocabulary
    unknown: int = 0
    bytes: int = 0  # of the words joined by single spaces
    blank: int = 0  # lines left out
    unreadable: int = 0  # lines left out: invalid UTF-8 or JSON

    def add(self, other: Counts) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True)
class Task:
    """The rows of which one shard is to be made."""

    input: Input
    part: int  # of its input
    rows: list[Row]
    first_row: int

    @property
    def file(self) -> str:
        return f"shard-{self.input.number:05d}-{self.part:05d}.parquet"


@dataclass
class Finished:
    entry: ShardEntry
    counts: Counts
    rows: int
    fresh: bool = True  # made now, not found
    why: str = ""  # why it was made again, if that should be told

    def to_json(self) -> dict[str, Any]:
        return {"entry": self.entry.to_json(), "counts": asdict(self.counts), "rows": self.rows}

    @classmethod
    def of(cls, shape: FinishedShape) -> Finished:
        return cls(ShardEntry.of(shape.entry), Counts(**shape.counts.model_dump()), shape.rows, fresh=False)


@dataclass
class Reading:
    """What was found while the inputs were read."""

    damage: dict[int, str] = field(default_factory=dict)  # by the number of the input
    rows: dict[str, int] = field(default_factory=dict)  # by input


# ---- reading --------------------------------------------------------------------------------------------------------


def rows_of(source: Input, options: ReadOptions) -> Iterator[list[Row]]:
    """Yield some rows at a time (of a treebank, a tree a row); raise ShardError where the input is damaged."""
    if source.split is not None:
        texts: Iterator[Row] = rows_of_split(source.name, source.split, (options.field,), source.configuration)
    elif options.trees:
        texts = _trees(source)
    else:
        for _, part in scan(Path(source.name), source.number, options.field, ROWS_AT_A_TIME):
            yield part
        return
    rows: list[Row] = []
    size = 0
    try:
        for row in texts:
            rows.append(row)
            size += len(row or "")
            if len(rows) == ROWS_AT_A_TIME or size >= BYTES_AT_A_TIME:
                yield rows
                rows, size = [], 0
    except ShardError:
        if rows:
            yield rows  # what came before the damage is not lost
        raise
    if rows:
        yield rows


def _trees(source: Input) -> Iterator[Row]:
    try:
        trees = read_trees(line for _, line in read_lines(Path(source.name)))
        yield from (bracketed(tree) for tree in trees if tree.words)
    except (TreeError, TextError) as error:
        message = str(error)
        raise ShardError(message if message.startswith(source.name) else f"{source.name}: {message}") from None


def lines_of_rows(task: Task, options: ReadOptions) -> list[str | None]:
    source, rows = task.input, task.rows
    if options.trees:
        return [" ".join(read_tree(str(tree)).words) for tree in rows]
    if source.split is not None:
        return [line for row in rows for line in str(row or "").removesuffix("\n").split("\n")]
    chunk = Chunk(source.number, task.first_row, len(rows))
    return lines_of(rows, chunk, Path(source.name), options.field, options.on_error)


def tasks_of(source: Input, options: ReadOptions, shard_lines: int, reading: Reading) -> Iterator[Task]:
    """Divide the rows of an input into tasks of one shard each."""
    waiting: list[Row] = []
    part = first_row = 0
    try:
        for rows in rows_of(source, options):
            waiting += rows
            while len(waiting) >= shard_lines or sum(len(row or "") for row in waiting) >= SHARD_BYTES:
                task = Task(source, part, waiting[:shard_lines], first_row)
                yield task
                waiting, part, first_row = waiting[shard_lines:], part + 1, first_row + len(task.rows)
    except ShardError as error:
        if options.on_error == "fail":
            raise
        reading.damage[source.number] = str(error)
    if waiting:
        yield Task(source, part, waiting, first_row)
    reading.rows[source.name] = first_row + len(waiting)


# ---- writing --------------------------------------------------------------------------------------------------------


def _made_of(task: Task, options: ReadOptions, vocabulary: AnyVocabulary) -> dict[str, Any]:
    """Return what the content of a shard depends on."""
    return {
        "input": asdict(task.input), "first_row": task.first_row, "rows": len(task.rows), "field": options.field,
        "trees": options.trees, "vocabulary": vocabulary.hash,
    }  # fmt: skip


def finished_or_made(task: Task, folder: Path, options: ReadOptions, vocabulary: AnyVocabulary) -> Finished:
    """Return the shard that an earlier call made of these rows, if it is whole; else make it."""
    try:
        found, why = _finished(folder, task, options, vocabulary), ""
    except (OSError, ShapeError) as error:
        found, why = None, f"{_note(folder, task.file)}: {reason(error)}"  # the manifest would sign what it says
        why = "" if isinstance(error, FileNotFoundError) else why
    return found or replace(write_shard(folder, task, options, vocabulary), why=why)


def _finished(folder: Path, task: Task, options: ReadOptions, vocabulary: AnyVocabulary) -> Finished | None:
    content = parse_json(read_bounded(_note(folder, task.file), MOST_BYTES_OF_A_LINE))
    if CHECKSUM not in content:
        raise ShapeError("has no checksum, as those of earlier versions")
    check_checksum(content)
    note = checked(NoteShape, content)
    found = Finished.of(note)
    if note.made_of != _made_of(task, options, vocabulary) or found.entry.file != task.file:
        return None
    if problem_with(folder / SHARDS / task.file, found.entry) is not None:
        return None
    if found.counts.unreadable and options.on_error == "fail":
        return None  # made with on_error: skip; now it should be an error
    return found


def _note(folder: Path, file: str) -> Path:
    return folder / SHARDS / f"{file}.json"


def write_shard(folder: Path, task: Task, options: ReadOptions, vocabulary: AnyVocabulary) -> Finished:
    lines = lines_of_rows(task, options)
    columns: dict[str, list] = {"text": lines, "tree": task.rows} if options.trees else {}
    counts = Counts(unreadable=sum(line is None for line in lines))
    ids = vocabulary.tokenise([line or "" for line in lines])
    full = [k for k, own in enumerate(ids) if own]
    counts.blank = len(lines) - len(full) - counts.unreadable
    lengths = np.array([len(ids[k]) for k in full], dtype=np.int64)
    flat = np.fromiter((id for k in full for id in ids[k]), dtype=np.int32, count=int(lengths.sum()))
    counts.lines, counts.tokens = len(full), len(flat)
    counts.unknown = int(np.count_nonzero(flat == vocabulary.unknown_id))
    for k in full:
        words = (lines[k] or "").split()
        counts.words += len(words)
        counts.bytes += len(" ".join(words).encode("utf-8", "surrogatepass"))
    entry = write_ids(
        folder / SHARDS / task.file,
        lengths,
        flat,
        {name: [values[k] for k in full] for name, values in columns.items()},
    )
    result = Finished(entry, counts, len(task.rows))
    note = {**result.to_json(), "made_of": _made_of(task, options, vocabulary)}
    replace_file(_note(folder, task.file), (json.dumps(with_checksum(note)) + "\n").encode())
    return result


def write_ids(path: Path, lengths: np.ndarray, ids: np.ndarray, columns: dict[str, list] | None = None) -> ShardEntry:
    """Write a shard that is complete or absent: under a temporary name first, fsynced, then renamed."""
    import pyarrow
    import pyarrow.parquet

    offsets = np.concatenate([[0], np.cumsum(lengths)])
    table = pyarrow.table({
        IDS: pyarrow.LargeListArray.from_arrays(offsets, ids).cast(pyarrow.list_(pyarrow.int32())),
        **{name: pyarrow.array(values, pyarrow.string()) for name, values in (columns or {}).items()},
    })  # fmt: skip
    starts = range(0, len(lengths), ROW_GROUP_LINES)
    groups = tuple(Histogram.of(lengths[start : start + ROW_GROUP_LINES]) for start in starts)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    write = partial(
        pyarrow.parquet.write_table, table, beside, row_group_size=ROW_GROUP_LINES, write_page_checksum=True
    )
    write(compression="zstd")
    if ShardEntry(path.name, "", beside.stat().st_size, groups).is_dense:  # text that repeats itself; not to be refused
        write(compression="none", use_dictionary=False)
    with beside.open("rb") as file:
        os.fsync(file.fileno())
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    os.replace(beside, path)
    return ShardEntry(path.name, sha256, path.stat().st_size, groups)


def remove_leftovers_of(folder: Path, inputs: Sequence[Input]) -> None:
    """Remove the shards of these inputs that a killed call was writing: other calls may be writing others."""
    for item in inputs:
        for file in (folder / SHARDS).glob(f"*shard-{item.number:05d}-*.tmp"):
            file.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the files that a killed call was writing."""
    ours = [name for pattern in (".*.tmp", "*.tmp") for name in (folder / SHARDS).glob(pattern)]
    for name in (PLAN, MANIFEST, *TEXTS.values()):
        ours += folder.glob(f"{name}.*tmp")
    for file in ours:
        file.unlink(missing_ok=True)


def forget_notes(folder: Path) -> None:
    """Remove the notes on finished shards, once the manifest holds all of it."""
    for file in (folder / SHARDS).glob("*.parquet.json"):
        file.unlink(missing_ok=True)
