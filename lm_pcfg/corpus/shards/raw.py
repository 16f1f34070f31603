"""Raw shards, tokenised as they are read. A first pass counts the lines of every length; its result is kept.

The pass (`index`) is what lets all ranks know, without asking each other, how many batches an epoch has. It also finds
bad shards before training starts. It is stored under `data.index_folder` by name, size and time of change of the files.
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

from lm_pcfg.console import progress
from lm_pcfg.corpus.lengths import INVALID, Histogram
from lm_pcfg.corpus.pieces import AnyVocabulary
from lm_pcfg.corpus.sentences import Damage
from lm_pcfg.corpus.shards.blocks import MOST_WORDS, Block, BlockText, ShardedCorpus, fingerprint_of, group_chunks
from lm_pcfg.corpus.shards.errors import ShardError, changed
from lm_pcfg.corpus.shards.files import Chunk, OnError, RowReader, is_parquet, opens_anywhere, scan
from lm_pcfg.corpus.shards.lines import lines_of
from lm_pcfg.corpus.shards.processes import in_processes, worth_using
from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyOptions
from lm_pcfg.errors import UserError
from lm_pcfg.storage.durable import replace_file

FORMAT = 2


@dataclass(frozen=True)
class RawOptions:
    field: str = "text"
    block_lines: int = 16_384
    on_error: OnError = "fail"


# ---- the first pass -------------------------------------------------------------------------------------------------


@dataclass
class ShardIndex:
    """What the first pass finds in one shard."""

    chunks: list[tuple[Chunk, Histogram]]
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
            for row in rows:
                digest.update(row if isinstance(row, bytes) else f"{row}\0".encode("utf-8", "surrogatepass"))
            if words is not None:
                for line in lines:
                    words.update((line or "").split())
            chunks.append((chunk, Histogram.of(_lengths(lines, vocabulary))))
    except ShardError as error:
        if options.on_error == "fail":
            raise
        damage = str(error)
    return ShardIndex(chunks, digest.hexdigest(), damage, words)


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
    once may be well again, which no name, size or time of a file tells.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def get(self, key: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        name = hashlib.sha256(json.dumps({"format": FORMAT, **key}, sort_keys=True).encode()).hexdigest()[:24]
        path = self.folder / f"{name}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be made ({error.strerror}); set data.index_folder=...") from None
        earlier = _read(path)
        if earlier is not None and not earlier["damaged"]:
            return earlier
        with self._alone(name):
            stored = _read(path)
            if stored is not None and (not stored["damaged"] or earlier is None or stored["call"] != earlier["call"]):
                return stored  # made while we waited
            made = {**make(), "call": uuid.uuid4().hex}
            try:
                replace_file(path, (json.dumps(made) + "\n").encode())
            except OSError as error:
                raise UserError(
                    f"{path}: cannot be written ({error.strerror}); set data.index_folder to a place that can"
                ) from None
        return json.loads(json.dumps(made))

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


def _read(path: Path) -> dict[str, Any] | None:
    try:
        stored = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return stored if isinstance(stored, dict) and {"damaged", "call"} <= stored.keys() else None


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

    stored = store.get({"vocabulary": asdict(vocabulary), **_key(files, options)}, make)
    return Vocabulary(stored["words"], vocabulary, training_words=stored["training_words"],
                      training_unknown=stored["training_unknown"])  # fmt: skip


class RawCorpus(ShardedCorpus):
    def __init__(
        self, name: str, files: Sequence[Path], options: RawOptions, vocabulary: AnyVocabulary, store: IndexStore
    ):
        self.name = name
        self._files, self._options, self._vocabulary = list(files), options, vocabulary
        self._reader: RowReader | None = None

        def make() -> dict[str, Any]:
            found = index_shards(files, options, vocabulary)
            damaged = any(index.damage is not None for index in found)
            return {"shards": [_to_json(index) for index in found], "damaged": damaged}

        unit = "words" if isinstance(vocabulary, Vocabulary) else vocabulary.hash
        shards = store.get({"unit": unit, **_key(files, options)}, make)["shards"]
        self.damage = Damage(files=[shard["damage"] for shard in shards if shard["damage"]])
        chunks = []
        for file, shard in zip(files, shards, strict=True):
            for fields, pairs in shard["chunks"]:
                chunk = Chunk(*fields)
                free = opens_anywhere(file) and (not is_parquet(file) or chunk.skip == 0)
                chunks.append((chunk, Histogram.from_json(pairs), free))
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
        ids, lengths, invalid = (np.concatenate(some) for some in zip(*parts, strict=True))
        if Histogram.of(np.where(invalid, INVALID, lengths)) != self.blocks[block].histogram:
            raise changed(self._files[self.blocks[block].chunks[0].shard])
        full = np.flatnonzero(lengths)
        return BlockText(
            ids=ids,
            offsets=np.concatenate([[0], np.cumsum(lengths[full])]),
            lines=self.blocks[block].first_line + full,
        )

    def _read_chunk(self, chunk: Chunk) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the ids of all lines (int32), how many each has (int64), and which cannot be read (bool)."""
        self._reader = self._reader or RowReader(self._options.field)
        path = self._files[chunk.shard]
        rows = self._reader.read(path, chunk)
        lines = lines_of(rows, chunk, path, self._options.field, self._options.on_error)
        ids = self._vocabulary.tokenise([line or "" for line in lines])
        lengths = np.array([len(own) for own in ids], dtype=np.int64)
        flat = np.fromiter((id for own in ids for id in own), dtype=np.int32, count=int(lengths.sum()))
        return flat, lengths, np.array([line is None for line in lines], dtype=bool)


def _to_json(index: ShardIndex) -> dict[str, Any]:
    chunks = [
        [[chunk.shard, chunk.first_row, chunk.rows, chunk.start, chunk.skip], histogram.to_json()]
        for chunk, histogram in index.chunks
    ]
    return {"chunks": chunks, "sha256": index.sha256, "damage": index.damage}
