"""The files of a corpus in many pieces: text, JSON lines or Parquet, each of them read a range of rows at a time.

A row of a text is a line; a row of JSON lines or Parquet holds a text in one field, which may have several lines.
Plain text and Parquet can be opened in the middle; a compressed text is read from its start, so best forward.
"""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lm_pcfg.console import say
from lm_pcfg.corpus.shards import parquet
from lm_pcfg.corpus.shards.errors import ShardError, changed, reading_failed
from lm_pcfg.corpus.text import (
    BINARY_CHECK_BYTES,
    COMPRESSION,
    EMBEDDED_PREFIX,
    TextError,
    check_binary,
    most_text,
    open_text,
    resolve_source,
    too_much_text,
)

JSON_SUFFIXES = {".jsonl", ".ndjson", ".json"}
TEXT_SUFFIXES = {".txt", ".text", ".tokens", ".raw"}  # what a folder is searched for; a file given by name may have any
PARQUET_SUFFIXES = {".parquet", ".pq"}
TREE_SUFFIXES = {".trees", ".mrg", ".ptb", ".txt", ".brackets"}
BYTES_AT_A_TIME = 64 << 20  # a chunk of long rows has fewer of them

OnError = Literal["fail", "skip"]
Row = bytes | str | None  # bytes of a text or JSON line, or the value of a Parquet field


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a shard, and how to get there."""

    shard: int  # number of the file
    first_row: int  # in the file, from 0
    rows: int
    start: int = 0  # where to open it: byte of a plain text, row group of Parquet, 0 of a compressed text
    skip: int = 0  # rows from there to the first one


# ---- which files ----------------------------------------------------------------------------------------------------


def find_shards(inputs: Sequence[str], *, trees: bool = False, out: Path | None = None) -> list[Path]:
    """Return the files of inputs: files, folders, glob patterns and `embedded:` names. Those of each input are sorted.

    Folders are searched with their subfolders, without what is hidden or was made by `prepare`. Nothing below `out`
    is an input.
    """
    # A .json beside the shards is often about them; as a shard it is given by name or pattern.
    suffixes = TREE_SUFFIXES if trees else TEXT_SUFFIXES | PARQUET_SUFFIXES | (JSON_SUFFIXES - {".json"})
    files: list[Path] = []
    for name in inputs:
        if name.startswith(EMBEDDED_PREFIX):
            files.append(_embedded(name) if trees else Path(resolve_source(name)))
            continue
        path = Path(name)
        if path.is_dir():
            found = sorted(file for file in files_below(path, out) if _suffix(file) in suffixes and file.is_file())
            if not found:
                kinds = "bracketed trees" if trees else "text, JSON lines or Parquet"
                raise TextError(f"{name}: no file of {kinds} in this folder ({', '.join(sorted(suffixes))})")
            files += found
        elif not path.exists() and glob.has_magic(name):
            matches = sorted(Path(match) for match in glob.glob(name, recursive=True))
            found = [match for match in matches if match.is_file() and not _is_below(match, out)]
            if not found:
                raise TextError(f"{name}: no file matches this pattern (it starts at {Path.cwd()})")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise TextError(f"{name}: no such file; check the path (relative paths start at {Path.cwd()})")
    twice = {file for file in files if files.count(file) > 1} if len(set(files)) < len(files) else set()
    if twice:
        raise TextError(f"{min(twice)}: given twice; its lines would count twice")
    return files


def files_below(folder: Path, out: Path | None) -> Iterator[Path]:
    """Yield the files below a folder, except what is hidden, was made by `prepare`, or is in `out`."""
    for root, folders, files in os.walk(folder):
        for name in list(folders):
            below = Path(root, name)
            made = not name.startswith(".") and _made_by_prepare(below)
            if made and not _is_below(below, out):
                say(f"{below} was made by lm_pcfg prepare; it is no input for {folder}, and left out")
            if name.startswith(".") or made or _is_same(below, out):
                folders.remove(name)
        yield from (Path(root, name) for name in files if not name.startswith("."))


def _made_by_prepare(folder: Path) -> bool:
    """Whether `prepare` made the folder, finished or not. A manifest.json alone might be of another program."""
    return (folder / "shards").is_dir() and (
        (folder / "prepare.json").is_file() or ((folder / "manifest.json").is_file() and (folder / "vocab").is_dir())
    )


def _is_same(path: Path, out: Path | None) -> bool:
    return out is not None and path.resolve() == out.resolve()


def _is_below(path: Path, out: Path | None) -> bool:
    return out is not None and path.resolve().is_relative_to(out.resolve())


def _suffix(path: Path) -> str:
    """Return the suffix in lower case, without that of a compression."""
    if path.suffix.lower() in COMPRESSION:
        path = path.with_suffix("")
    return path.suffix.lower()


def _embedded(name: str) -> Path:
    from lm_pcfg.corpus import embedded

    try:
        return embedded.resolve(name)
    except (ValueError, OSError) as error:
        raise TextError(str(error)) from error


def has_known_suffix(name: str) -> bool:
    known = TEXT_SUFFIXES | JSON_SUFFIXES | PARQUET_SUFFIXES | TREE_SUFFIXES
    return _suffix(Path(name)) in known or Path(name).suffix.lower() in COMPRESSION


def is_parquet(path: Path) -> bool:
    return path.suffix.lower() in PARQUET_SUFFIXES


def is_json(path: Path) -> bool:
    return _suffix(path) in JSON_SUFFIXES


def opens_anywhere(path: Path) -> bool:
    return path.suffix.lower() not in COMPRESSION


# ---- rows -----------------------------------------------------------------------------------------------------------


def scan(path: Path, shard: int, field: str, rows: int) -> Iterator[tuple[Chunk, list[Row]]]:
    """Read a shard from start to end, `rows` at a time; raise ShardError where it is damaged or empty.

    What was read before the damage is given out first.
    """
    first_row = size = 0
    most = None
    for start, content in _pieces(path, field):
        skip = 0
        while part := _take(content, rows, path):
            if isinstance(start, _ByteCount):
                place = start.bytes_before
                start.bytes_before += sum(map(len, part.rows))  # type: ignore[arg-type]
                yield Chunk(shard, first_row, len(part.rows), place), part.rows
            else:
                yield Chunk(shard, first_row, len(part.rows), start, skip), part.rows
            first_row += len(part.rows)
            skip += len(part.rows)
            if part.damage is not None:
                raise part.damage
            if is_parquet(path):  # a text sees to it itself
                size, most = size + part.size, most or most_text(path.stat().st_size)
                if size > most:
                    raise ShardError(too_much_text(str(path), most, parquet.WAY_OUT))
    if first_row == 0:
        raise ShardError(f"{path}: is empty; remove it, or pass over bad shards with on_error: skip")


class _ByteCount:
    """Where the next chunk of a plain text starts."""

    bytes_before = 0


@dataclass
class _Part:
    rows: list[Row]
    damage: ShardError | None
    size: int = 0  # bytes or characters

    def __bool__(self) -> bool:
        return bool(self.rows) or self.damage is not None


def _take(content: Iterator[Row], count: int, path: Path) -> _Part:
    rows: list[Row] = []
    damage, size = None, 0
    try:
        for row in itertools.islice(content, count):
            rows.append(row)  # what came before an error is kept
            size += len(row or "")
            if size >= BYTES_AT_A_TIME:
                break
    except ShardError as error:
        damage = error
    except (OSError, EOFError) as error:
        damage = reading_failed(path, error)
    if damage is not None and not rows:
        raise damage
    return _Part(rows, damage, size)


def _pieces(path: Path, field: str) -> Iterator[tuple[Any, Iterator[Row]]]:
    """Yield (place to open it, rows from there) for the row groups of Parquet, or for a text as a whole."""
    if is_parquet(path):
        for group in parquet.groups(path, field):
            yield group, rows_from(path, field, group)
    else:
        yield (_ByteCount() if opens_anywhere(path) else 0), rows_from(path, field, 0)


def rows_from(path: Path, field: str, start: int) -> Iterator[Row]:
    """Yield the rows from a place where the shard can be opened; of Parquet, those of one row group."""
    if is_parquet(path):
        yield from parquet.rows(path, field, start)
        return
    try:
        with open_text(path, str(path)) as handle:
            if handle.seekable() and opens_anywhere(path):
                if start == 0:
                    check_binary(handle.read(BINARY_CHECK_BYTES), str(path), start=True)
                handle.seek(start)
            first = next(handle, b"")
            if first and not opens_anywhere(path):
                check_binary(first[:BINARY_CHECK_BYTES], str(path), start=True)
            if first:
                yield first
            yield from handle
    except TextError as error:
        raise ShardError(str(error)) from None


class RowReader:
    """Reads chunks. The last stream stays open, so that the next chunk of the same shard costs no second start."""

    def __init__(self, field: str):
        self.field = field
        self._place: tuple[Path, int] | None = None
        self._stream: Iterator[Row] = iter(())
        self._passed = 0  # rows of the stream that were given out or skipped

    def read(self, path: Path, chunk: Chunk) -> list[Row]:
        place = (path, chunk.start)
        if self._place != place or self._passed > chunk.skip:
            self._stream, self._place, self._passed = rows_from(path, self.field, chunk.start), place, 0
        try:
            for _ in itertools.islice(self._stream, chunk.skip - self._passed):
                pass
            rows = list(itertools.islice(self._stream, chunk.rows))
        except (OSError, EOFError) as error:
            self._place = None
            raise reading_failed(path, error) from None
        except ShardError:
            self._place = None
            raise
        self._passed = chunk.skip + len(rows)
        if len(rows) != chunk.rows:
            self._place = None
            raise changed(path)
        return rows
