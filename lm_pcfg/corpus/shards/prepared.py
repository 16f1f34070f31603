"""A prepared corpus: a folder with a vocabulary, shards of word ids, and a manifest that knows them all.

    vocab/           words.txt or pieces.model
    shards/*.parquet column `ids` (list of int32), 16,384 lines a row group; with trees also `text` and `tree`
    manifest.json    counts, lengths, hashes, versions; written last, so a folder with a manifest is whole. Its
                     `checksum` is of its own content (manifest.py); manifests of before it had one are read, too.

Shards hold no blank lines and no `<eos>`: that is added when a model wants it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lm_pcfg.corpus.lengths import Histogram
from lm_pcfg.corpus.pieces import AnyVocabulary, load_vocabulary
from lm_pcfg.corpus.sentences import Damage
from lm_pcfg.corpus.shards import parquet
from lm_pcfg.corpus.shards.blocks import BlockText, ShardedCorpus, fingerprint_of, group_chunks
from lm_pcfg.corpus.shards.errors import ShardError, changed
from lm_pcfg.corpus.shards.files import Chunk
from lm_pcfg.corpus.shards.manifest import Manifest, PreparedError, ShardEntry, is_prepared, read_manifest
from lm_pcfg.corpus.shards.shapes import PlanShape, ShapeError, checked, parse_json
from lm_pcfg.corpus.text import read_bounded
from lm_pcfg.errors import UserError

SHARDS = "shards"
VOCABULARY = "vocab"
PLAN = "prepare.json"  # what the folder is being made of
PARTS = "parts"  # what several machines that make it together tell each other
TEXTS = {"text": "text.txt", "tree": "trees.txt"}  # by the column of the shards, where the corpus has trees
IDS = "ids"
ROW_GROUP_LINES = 16_384


def unfinished(path: str | Path) -> bool:
    """Whether `prepare` was stopped in this folder before its end."""
    return (Path(path) / SHARDS).is_dir() and not is_prepared(path)


def vocabulary_of(manifest: Manifest) -> AnyVocabulary:
    vocabulary = load_vocabulary(manifest.folder / VOCABULARY)
    if vocabulary.hash != manifest.content["vocabulary"]["sha256"]:
        raise PreparedError(
            f"{manifest.folder}: its vocabulary is not the one its shards were made with; prepare again"
        )
    return vocabulary


def verify(manifest: Manifest) -> None:
    """Check size and hash of every shard; raise PreparedError for the first that is not as it was."""
    for problem in _problems_of_shards(manifest):
        raise PreparedError(f"{problem}; prepare the corpus again")


def _problems_of_shards(manifest: Manifest) -> Iterator[str]:
    for entry in manifest.shards:
        path = manifest.folder / SHARDS / entry.file
        if problem := problem_with(path, entry):
            yield f"{path}: {problem}"


def verify_all(folder: Path) -> list[str]:
    """Check all that a prepared corpus has: manifest, vocabulary, every shard, texts of trees. Say what is damaged."""
    try:
        manifest = read_manifest(folder)
    except PreparedError as error:
        return [str(error)]
    problems = list(_problems_of_shards(manifest))
    try:
        vocabulary_of(manifest)
    except UserError as error:
        problems.append(str(error))
    try:
        checked(PlanShape, parse_json(read_bounded(folder / PLAN)))
    except OSError as error:
        problems.append(f"{folder / PLAN}: cannot be read ({error.strerror})")
    except ShapeError as error:
        problems.append(f"{folder / PLAN}: damaged ({error})")
    options = manifest.content.get("options")
    if isinstance(options, dict) and options.get("trees") and not problems:
        problems += _problems_of_texts(manifest)
    return problems


def _problems_of_texts(manifest: Manifest) -> Iterator[str]:
    """Compare text.txt and trees.txt with the shards, which hold the same."""
    for column, name in TEXTS.items():
        digest = hashlib.sha256()
        try:
            for shard in (manifest.folder / SHARDS / entry.file for entry in manifest.shards):
                for group in parquet.groups(shard, column):
                    for value in parquet.rows(shard, column, group):
                        digest.update(f"{value}\n".encode())
        except ShardError as error:
            yield str(error)
            continue
        try:
            with (manifest.folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest.hexdigest():
                    yield f"{manifest.folder / name}: is not the text of the shards"
        except OSError as error:
            yield f"{manifest.folder / name}: cannot be read ({error.strerror})"


def problem_with(path: Path, entry: ShardEntry) -> str | None:
    """Say in words what is wrong with a shard; None: nothing."""
    try:
        if path.stat().st_size != entry.size:
            return f"{path.stat().st_size:,} bytes instead of {entry.size:,}"
        if not path.is_file():
            return "not a plain file"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                return "its content does not match its sha256"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def describe(manifest: Manifest) -> dict[str, Any]:
    """Summarise a corpus for `lm_pcfg prepare` and `lm_pcfg info`."""
    content = manifest.content
    lengths = Histogram.sum([group for entry in manifest.shards for group in entry.groups])
    middle = int(np.searchsorted(np.cumsum(lengths.counts), lengths.lines / 2)) if lengths.lines else 0
    return {
        "corpus": str(manifest.folder),
        **manifest.counts,
        "mean_length": lengths.words / max(1, lengths.lines),
        "median_length": int(lengths.lengths[middle]) if lengths.lines else 0,
        "longest": int(lengths.lengths.max(initial=0)),
        "vocabulary": content["vocabulary"]["kind"],
        "types": content["vocabulary"]["types"],
        "vocabulary_hash": content["vocabulary"]["sha256"],
        "shards": len(manifest.shards),
        "bytes_on_disk": sum(entry.size for entry in manifest.shards),
        "damaged_inputs": len(content["damage"]),
        "prepared_with": " ".join(f"{name} {version}" for name, version in content["versions"].items()),
    }


class PreparedCorpus(ShardedCorpus):
    """Blocks are row groups, read in any order. Damage of a page is found by its checksum when it is read."""

    def __init__(self, folder: Path, vocabulary: AnyVocabulary, block_lines: int = ROW_GROUP_LINES):
        """vocabulary: the one that the corpus was prepared with; `<eos>` may have been added."""
        manifest = read_manifest(folder)
        made_with = vocabulary_of(manifest)
        if vocabulary.end_id is not None:
            made_with = made_with.with_end_of_sentence()
        if made_with.hash != vocabulary.hash:
            raise PreparedError(
                f"{folder}: was prepared with another vocabulary than this run has; prepare it with --vocabulary "
                "FOLDER (the other corpus, or the run's vocab/)"
            )
        self._vocabulary = vocabulary
        self.name = str(folder)
        # What `prepare --on-error skip` had to leave out is missing here, too.
        messages = [" ".join(message.split()) for message in manifest.content["damage"]]
        self.damage = Damage(messages, manifest.counts.get("unreadable", 0))
        self._types = len(made_with)
        self._entries = manifest.shards
        self._always, self._compared = False, -1
        self._files = [folder / SHARDS / entry.file for entry in manifest.shards]
        self._words = [[group.words for group in entry.groups] for entry in manifest.shards]
        chunks = []
        for number, entry in enumerate(manifest.shards):
            first_row = 0
            for group, histogram in enumerate(entry.groups):
                chunks.append((Chunk(number, first_row, histogram.lines, start=group), histogram, True))
                first_row += histogram.lines
        self.blocks = group_chunks(chunks, block_lines)
        shards, cuts = [entry.sha256 for entry in manifest.shards], [len(block.chunks) for block in self.blocks]
        self.fingerprint = fingerprint_of([*shards, *cuts])

    def check_sizes(self, on_missing: str) -> None:
        """Find missing or cut shards before the first epoch; reading finds other damage. on_missing: fail | skip."""
        for entry, file in zip(self._entries, self._files, strict=True):
            try:
                size = file.stat().st_size
                problem = None if size == entry.size else f"{size:,} bytes instead of {entry.size:,}"
                problem = problem if file.is_file() else "not a plain file"
            except OSError as error:
                problem = error.strerror or "cannot be read"
            if problem:
                message = f"{file}: {problem}; put it back, or prepare the corpus again"
                if on_missing == "fail":
                    raise ShardError(message)
                self.damage.files.append(message)

    def verify(self, on_error: str, *, always: bool) -> None:
        """Compare all shards with their sha256. always: also whenever one is opened. on_error: fail | skip.

        Under skip, a shard that differs is damage, and its blocks are lost when it is their turn.
        """
        self._always = always or on_error == "skip"
        for number in range(len(self._files)):
            try:
                self._compare(number)
            except ShardError as error:
                if on_error == "fail":
                    raise
                if not any(message.startswith(f"{self._files[number]}: ") for message in self.damage.files):
                    self.damage.files.append(str(error))

    def _compare(self, number: int) -> None:
        if problem := problem_with(self._files[number], self._entries[number]):
            raise ShardError(f"{self._files[number]}: {problem}; put it back, or prepare the corpus again")

    def read(self, block: int) -> BlockText:
        all_ids, lengths, filled = np.empty(0, np.int32), [np.empty(0, np.int64)], 0
        for chunk in self.blocks[block].chunks:
            file = self._files[chunk.shard]
            if self._always and self._compared != chunk.shard:
                self._compare(chunk.shard)
                self._compared = chunk.shard
            rows, words = 0, self._words[chunk.shard][chunk.start]
            for array in parquet.prepared_ids(file, IDS, chunk.start, words, self._entries[chunk.shard].size):
                ids = array.flatten().to_numpy(zero_copy_only=False)
                if not filled:  # not before a shard was seen to have what the manifest says; filled as it is read
                    all_ids = np.empty(self.blocks[block].histogram.words, np.int32)
                if filled + len(ids) > len(all_ids):
                    raise changed(file)
                all_ids[filled : filled + len(ids)] = ids
                lengths.append(array.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64))
                rows, filled = rows + len(array), filled + len(ids)
                del array, ids  # before the next is made
            if rows != chunk.rows:
                raise changed(file)
        all_lengths = np.concatenate(lengths)
        if filled != len(all_ids):
            raise changed(self._files[self.blocks[block].chunks[0].shard])
        if len(all_ids) and not 0 <= all_ids.min() <= all_ids.max() < self._types:
            raise ShardError(f"{file}: has numbers that are no words of its vocabulary; prepare the corpus again")
        if Histogram.of(all_lengths) != self.blocks[block].histogram:
            raise changed(self._files[self.blocks[block].chunks[0].shard])
        first = self.blocks[block].first_line
        return BlockText(
            ids=self._vocabulary.stored(all_ids),
            offsets=np.concatenate([[0], np.cumsum(all_lengths)]),
            lines=np.arange(first, first + len(all_lengths)),
        )
