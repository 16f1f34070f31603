"""Raw shards, tokenised as they are read. A first pass counts the lines of every length; its result is kept.

The pass (`index`) is what lets all ranks know, without asking each other, how many batches an epoch has. It also finds
bad shards before training starts. It is stored under `data.index_folder` by name, size and time of change of the files.
It has a checksum, and one of every chunk of rows, with which the shards can be compared (`data.verify`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lm_pcfg.console import progress, warn
from lm_pcfg.corpus.lengths import INVALID, Histogram
from lm_pcfg.corpus.pieces import AnyVocabulary
from lm_pcfg.corpus.sentences import Damage
from lm_pcfg.corpus.shards.blocks import MOST_WORDS, Block, BlockText, ShardedCorpus, fingerprint_of, group_chunks
from lm_pcfg.corpus.shards.errors import ShardError, changed
from lm_pcfg.corpus.shards.files import Chunk, OnError, Row, RowReader, is_parquet, opens_anywhere, scan
from lm_pcfg.corpus.shards.lines import lines_of
from lm_pcfg.corpus.shards.processes import in_processes, worth_using
from lm_pcfg.corpus.shards.shapes import (
    CHECKSUM,
    IndexShape,
    LinesIndexShape,
    ShapeError,
    WordsIndexShape,
    check_checksum,
    checked,
    parse_json,
    with_checksum,
)
from lm_pcfg.corpus.text import read_bounded
from lm_pcfg.corpus.unknown import literals
from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyOptions
from lm_pcfg.errors import UserError
from lm_pcfg.storage.durable import make_folder, replace_file

FORMAT = 3  # indexes of other formats are not looked at, and made anew


@dataclass(frozen=True)
class RawOptions:
    field: str = "text"
    block_lines: int = 16_384
    on_error: OnError = "fail"


# ---- the first pass -------------------------------------------------------------------------------------------------


@dataclass
class ShardIndex:
    """What the first pass finds in one shard."""

    chunks: list[tuple[Chunk, Histogram, str]]  # the last is the sha256 of its rows
    sha256: str  # of its rows
    damage: str | None  # why it could not be read to its end
    words: Counter[str] | None = None


def index_shard(
    path: Path, number: int, options: RawOptions, vocabulary: AnyVocabulary | None, count_words: bool = False
) -> ShardIndex:
    """Count the lines of every length in a shard. vocabulary: None counts words between white space."""
    chunks, digest, damage = [], hashlib.sha256(), None
    words: Counter[str] | None = Counter() if count_words else None
    try:
        for chunk, rows in scan(path, number, options.field, options.block_lines):
            lines = lines_of(rows, chunk, path, options.field, options.on_error)
            content = _bytes_of(rows)
            digest.update(content)
            if words is not None:
                for line in lines:
                    words.update((line or "").split())
            own = hashlib.sha256(content).hexdigest()
            chunks.append((chunk, Histogram.of(_lengths(lines, vocabulary)), own))
    except ShardError as error:
        if options.on_error == "fail":
            raise
        damage = str(error)
    return ShardIndex(chunks, digest.hexdigest(), damage, words)


def _bytes_of(rows: Sequence[Row]) -> bytes:
    """Return what is hashed of some rows."""
    return b"".join(row if isinstance(row, bytes) else f"{row}\0".encode("utf-8", "surrogatepass") for row in rows)


def _lengths(lines: Sequence[str | None], vocabulary: AnyVocabulary | None) -> np.ndarray:
    if vocabulary is None or isinstance(vocabulary, Vocabulary):
        lengths = [INVALID if line is None else len(line.split()) for line in lines]
    else:
        ids = vocabulary.tokenise([line or "" for line in lines])
        lengths = [INVALID if line is None else len(own) for line, own in zip(lines, ids, strict=True)]
    return np.array(lengths, dtype=np.int64)


def _index_one(task: tuple[Path, int, RawOptions, AnyVocabulary | None, bool]) -> ShardIndex:
    return index_shard(*task)


def index_shards(
    files: Sequence[Path],
    options: RawOptions,
    vocabulary: AnyVocabulary | None,
    count_words: bool = False,
) -> list[ShardIndex]:
    by_pieces = None if isinstance(vocabulary, Vocabulary) else vocabulary  # of words only their number is needed
    tasks = [(file, number, options, by_pieces, count_words) for number, file in enumerate(files)]
    with progress("shards read for the index", len(tasks)) as bar:
        result = []
        for index in in_processes(_index_one, tasks, processes=worth_using(files)):
            result.append(index)
            bar.advance(1)
    return result


# ---- kept beside the data -------------------------------------------------------------------------------------------


class IndexStore:
    """Results of the first pass by what they were made of. Ranks that want the same one wait for the first of them.

    A result with damage ("damaged") is for those who waited, and made anew for all others: a disk or mount that failed
    once may be well again, which no name, size or time of a file tells. A file that does not match its checksum is
    told, and made anew.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def get(
        self, key: dict[str, Any], make: Callable[[], dict[str, Any]], shape: type[IndexShape] = IndexShape
    ) -> dict[str, Any]:
        name = hashlib.sha256(json.dumps({"format": FORMAT, **key}, sort_keys=True).encode()).hexdigest()[:24]
        path = self.folder / f"{name}.json"
        try:
            if not self.folder.is_dir():
                make_folder(self.folder)
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be made ({error.strerror}); set data.index_folder=...") from None
        earlier, _ = _read(path, shape)
        if earlier is not None and not earlier["damaged"]:
            return earlier
        with self._alone(name):
            stored, problem = _read(path, shape)
            if stored is not None and (not stored["damaged"] or earlier is None or stored["call"] != earlier["call"]):
                return stored  # made while we waited
            if problem:
                warn(f"{path}: damaged index ({problem}); it is made anew from the shards")
            made = with_checksum(json.loads(json.dumps({**make(), "call": uuid.uuid4().hex})))
            try:
                for file in self.folder.glob(f"{name}.json.*.tmp"):  # of a process that was killed
                    file.unlink(missing_ok=True)
                replace_file(path, (json.dumps(made) + "\n").encode())
            except OSError as error:
                raise UserError(
                    f"{path}: cannot be written ({error.strerror}); set data.index_folder to a place that can"
                ) from None
        return made

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        file = self.folder / f".{name}.lock"
        try:
            lock = file.open("w")
        except OSError as error:
            raise UserError(
                f"{file}: cannot be written ({error.strerror}); set data.index_folder to a place that can"
            ) from None
        with lock:
            with contextlib.suppress(OSError):  # a file system without locks: work is done twice, and no harm
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _read(path: Path, shape: type[IndexShape]) -> tuple[dict[str, Any] | None, str | None]:
    """Return what is stored, or what is wrong with it; neither if there is nothing."""
    try:
        content = parse_json(read_bounded(path))
        check_checksum(content)
        checked(shape, content)
        return content, None
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"cannot be read: {error.strerror}"
    except ShapeError as error:
        return None, str(error)


def verify_indexes(folder: Path) -> list[str]:
    """Check every index of a folder, and say which are damaged. One without a checksum is of an earlier version."""
    problems = []
    for path in sorted(folder.glob("*.json")):
        _, problem = _read(path, IndexShape)
        with contextlib.suppress(OSError, ShapeError):
            if problem and CHECKSUM not in parse_json(read_bounded(path)):
                continue
        if problem:
            problems.append(f"{path}: {problem}; remove it, it is made anew")
    return problems


def _key(files: Sequence[Path], options: RawOptions) -> dict[str, Any]:
    try:
        stats = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    except OSError as error:
        raise ShardError(f"{error.filename}: no such file; it was there when the shards were listed") from None
    return {"files": stats, "options": asdict(options)}


def build_vocabulary(
    files: Sequence[Path], options: RawOptions, vocabulary: VocabularyOptions, store: IndexStore
) -> Vocabulary:
    """Build the word vocabulary of the shards."""

    def make() -> dict[str, Any]:
        counts: Counter[str] = Counter()
        damaged = False
        for index in index_shards(files, options, None, count_words=True):
            counts.update(index.words or {})
            damaged |= index.damage is not None
        made = Vocabulary.from_counts(counts, vocabulary)
        numbers = {"training_words": made.training_words, "training_unknown": made.training_unknown}
        return {"words": list(made.words), **numbers, "damaged": damaged}

    stored = store.get({"vocabulary": asdict(vocabulary), **_key(files, options)}, make, WordsIndexShape)
    return Vocabulary(stored["words"], vocabulary, training_words=stored["training_words"],
                      training_unknown=stored["training_unknown"])  # fmt: skip


class RawCorpus(ShardedCorpus):
    def __init__(
        self, name: str, files: Sequence[Path], options: RawOptions, vocabulary: AnyVocabulary, store: IndexStore
    ):
        self.name = name
        self._files, self._options, self._vocabulary = list(files), options, vocabulary
        self._reader: RowReader | None = None

        self._fresh = False  # whether the shards were read to their ends just now
        self._always = False

        def make() -> dict[str, Any]:
            found = index_shards(files, options, vocabulary)
            self._fresh = True
            damaged = any(index.damage is not None for index in found)
            return {"shards": [_to_json(index) for index in found], "damaged": damaged}

        unit = "words" if isinstance(vocabulary, Vocabulary) else vocabulary.hash
        shards = store.get({"unit": unit, **_key(files, options)}, make, LinesIndexShape)["shards"]
        places = [chunk["place"][0] for shard in shards for chunk in shard["chunks"]]
        if len(shards) != len(files) or any(place >= len(files) for place in places):
            raise UserError(f"{store.folder}: has an index that does not fit the shards; remove this folder")
        self.damage = Damage(files=[shard["damage"] for shard in shards if shard["damage"]])
        chunks = []
        self._sha256: dict[Chunk, str] = {}
        for file, shard in zip(files, shards, strict=True):
            for stored in shard["chunks"]:
                chunk = Chunk(*stored["place"])
                free = opens_anywhere(file) and (not is_parquet(file) or chunk.skip == 0)
                chunks.append((chunk, Histogram.from_json(stored["lengths"]), free))
                self._sha256[chunk] = stored["sha256"]
        self.blocks: list[Block] = group_chunks(chunks, options.block_lines)
        self.damage.lines = self.histogram.unreadable
        # Cuts by words are part of it; those by lines are not, for the sake of older runs.
        by_words = any(block.histogram.words > MOST_WORDS // 2 for block in self.blocks)
        cuts = [len(block.chunks) for block in self.blocks] if by_words else []
        self.fingerprint = fingerprint_of([options.block_lines, unit, *(shard["sha256"] for shard in shards), *cuts])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}  # another process opens its own

    def read(self, block: int) -> BlockText:
        parts = [self._read_chunk(chunk) for chunk in self.blocks[block].chunks]  # the text of one at a time
        ids, lengths, literal, invalid = (np.concatenate(some) for some in zip(*parts, strict=True))
        if Histogram.of(np.where(invalid, INVALID, lengths)) != self.blocks[block].histogram:
            raise changed(self._files[self.blocks[block].chunks[0].shard])
        full = np.flatnonzero(lengths)
        return BlockText(
            ids=ids,
            offsets=np.concatenate([[0], np.cumsum(lengths[full])]),
            lines=self.blocks[block].first_line + full,
            literal=literal[full],
        )

    def verify(self, *, always: bool) -> None:
        """Compare all rows with the index; raise ShardError for the first that differ. always: also as they are read.

        Under on_error: skip, a shard that differs is damage, and its blocks are lost when it is their turn.
        """
        self._always = always or self._options.on_error == "skip"
        if self._fresh:
            return
        reader, told = RowReader(self._options.field), set()
        for chunk in self._sha256:
            if chunk.shard in told:
                continue
            try:
                self._compare(chunk, reader.read(self._files[chunk.shard], chunk))
            except ShardError as error:
                if self._options.on_error == "fail":
                    raise
                self.damage.files.append(str(error))
                told.add(chunk.shard)

    def _compare(self, chunk: Chunk, rows: Sequence[Row]) -> None:
        if hashlib.sha256(_bytes_of(rows)).hexdigest() != self._sha256[chunk]:
            raise ShardError(
                f"{self._files[chunk.shard]}: rows {chunk.first_row + 1:,} to {chunk.first_row + chunk.rows:,} do not "
                "match the sha256 of the index; put the file back, or `touch` it if it was meant to change"
            )

    def _read_chunk(self, chunk: Chunk) -> tuple[np.ndarray, ...]:
        """Return the ids of all lines (int32); how many each has, and how many `<unk>` are written in it (int64).

        Last come those that cannot be read (bool).
        """
        self._reader = self._reader or RowReader(self._options.field)
        path = self._files[chunk.shard]
        rows = self._reader.read(path, chunk)
        if self._always:
            self._compare(chunk, rows)
        lines = lines_of(rows, chunk, path, self._options.field, self._options.on_error)
        ids = self._vocabulary.tokenise([line or "" for line in lines])
        lengths = np.array([len(own) for own in ids], dtype=np.int64)
        flat = np.fromiter((id for own in ids for id in own), dtype=np.int32, count=int(lengths.sum()))
        literal = np.array([literals(line or "", self._vocabulary) for line in lines], dtype=np.int64)
        return flat, lengths, literal, np.array([line is None for line in lines], dtype=bool)


def _to_json(index: ShardIndex) -> dict[str, Any]:
    chunks = [
        {
            "place": [chunk.shard, chunk.first_row, chunk.rows, chunk.start, chunk.skip],
            "lengths": histogram.to_json(),
            "sha256": sha256,
        }
        for chunk, histogram, sha256 in index.chunks
    ]
    return {"chunks": chunks, "sha256": index.sha256, "damage": index.damage}
