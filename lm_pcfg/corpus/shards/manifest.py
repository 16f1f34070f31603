"""manifest.json of a prepared corpus: what it knows of each shard, how it is written, and how it is read.

A key or a shard has a line of its own, and of a line the numbers are kept before the next is read: a manifest that is
parsed as a whole takes thirty times its bytes. A shard of 250,000 sentences takes 12 kB, so a billion of them 50 MB.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lm_pcfg.corpus.lengths import Histogram
from lm_pcfg.corpus.shards.shapes import (
    CHECKSUM,
    ManifestShape,
    ShapeError,
    ShardShape,
    canonical,
    checked,
    parse_json,
    with_checksum,
)
from lm_pcfg.corpus.text import MOST_EXPANSION, most_text, open_bounded
from lm_pcfg.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
MOST_BYTES = 256 << 20  # of a manifest: five billion lines
MOST_BYTES_OF_A_LINE = 16 << 20  # a shard has at most 144 MiB of text: 2 MB where no two lines have the same length
MOST_BYTES_OF_KEYS = 32 << 20  # all that comes before the shards: the names of 300,000 inputs
MOST_GROUPS = 1 << 19  # a row group has 16,384 lines, or is the last of its shard
BYTES_OF_A_WORD = 4
MOST_WORDS_OF_A_GROUP = 1 << 25  # 16,384 lines of 2,048 words; more only of a shard that has a bit for each


class PreparedError(UserError):
    """A prepared corpus that cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class ShardEntry:
    """What the manifest knows of a shard."""

    file: str
    sha256: str
    size: int
    groups: tuple[Histogram, ...]  # one a row group

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "sha256": self.sha256,
            "size": self.size,
            "lines": sum(group.lines for group in self.groups),
            "row_groups": [group.to_json() for group in self.groups],
        }

    @classmethod
    def of(cls, shape: ShardShape) -> ShardEntry:
        return cls(shape.file, shape.sha256, shape.size, tuple(map(Histogram.from_json, shape.row_groups)))

    @property
    def words(self) -> int:
        return sum(group.words for group in self.groups)

    @property
    def has_dense_group(self) -> bool:
        """Whether a row group has more words than are read at once, and the shard not a bit for each of them."""
        return any(group.words > max(MOST_WORDS_OF_A_GROUP, 8 * self.size) for group in self.groups)

    @property
    def is_dense(self) -> bool:
        """Whether it has more words than its bytes may stand for."""
        return self.has_dense_group or self.words * BYTES_OF_A_WORD > MOST_EXPANSION * self.size


@dataclass(frozen=True)
class Manifest:
    folder: Path
    content: dict[str, Any]  # without the shards
    shards: tuple[ShardEntry, ...]

    @property
    def counts(self) -> dict[str, int]:
        return self.content["counts"]


def is_prepared(path: str | Path) -> bool:
    return (Path(path) / MANIFEST).is_file()


def manifest_text(content: dict[str, Any]) -> str:
    """Format a manifest as JSON, with a key or a shard on each line, and a checksum."""
    content = with_checksum(content)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items() if key != "shards"]
    shards = ",\n".join(json.dumps(shard) for shard in content["shards"])
    return "{\n" + ",\n".join([*lines, f'"shards": [\n{shards}\n]']) + "\n}\n"


def read_manifest(folder: Path) -> Manifest:
    file = folder / MANIFEST
    try:
        with open_bounded(file, MOST_BYTES) as opened:
            try:
                manifest = _manifest(folder, _keys(opened), _shards(opened))
            except ShapeError:
                if os.fstat(opened.fileno()).st_size > MOST_BYTES_OF_A_LINE:
                    raise
                opened.seek(0)  # of another layout, or damaged: small enough to be seen as a whole
                keys = parse_json(opened.read(MOST_BYTES_OF_A_LINE))
                manifest = _manifest(folder, keys, _listed(keys.pop("shards", None)))
    except OSError as error:
        raise PreparedError(f"{file}: cannot be read ({error.strerror}); make it with lm_pcfg prepare") from None
    except ShapeError as error:
        raise PreparedError(f"{file}: damaged ({error}); make the corpus again with lm_pcfg prepare") from None
    if problem := _problem_of_density(manifest.shards):
        raise PreparedError(
            f"{file}: {problem}, which no text becomes; if it is meant, remove the folder and prepare the corpus again "
            "with this version, which writes such shards without compression"
        )
    return manifest


def _manifest(folder: Path, keys: dict[str, Any], shards: Iterable[Any]) -> Manifest:
    """Check all that a manifest holds. shards: as JSON, of which each is forgotten before the next is asked for."""
    if keys.get("format") != FORMAT:
        found = reprlib.repr(keys.get("format"))
        raise PreparedError(f"{folder / MANIFEST}: format {found}; this version reads {FORMAT}")
    shape = checked(ManifestShape, keys)
    entries: list[ShardEntry] = []
    groups = 0
    digest = hashlib.sha256(b"{")  # becomes checksum_of(all of it)
    for place, key in enumerate(sorted({*keys, "shards"} - {CHECKSUM})):
        digest.update(b"," * (place > 0) + canonical(key) + b":")
        if key != "shards":
            digest.update(canonical(keys[key]))
            continue
        digest.update(b"[")
        for number, shard in enumerate(shards):
            entries.append(_entry(number, shard))
            digest.update(b"," * (number > 0) + canonical(shard))
            groups += len(entries[-1].groups)
            if groups > MOST_GROUPS:
                raise ShapeError(f"has more than {MOST_GROUPS:,} row groups")
        digest.update(b"]")
    digest.update(b"}")
    if CHECKSUM in keys and keys[CHECKSUM] != digest.hexdigest():
        raise ShapeError("its content does not match its checksum")
    if len({entry.file for entry in entries}) < len(entries):
        raise ShapeError("a shard is listed twice")
    lines = sum(group.lines for entry in entries for group in entry.groups)
    if lines != shape.counts.lines:
        raise ShapeError(f"its shards have {lines:,} lines, and its counts {shape.counts.lines:,}")
    return Manifest(folder, keys, tuple(entries))


def _entry(number: int, shard: Any) -> ShardEntry:
    try:
        return ShardEntry.of(checked(ShardShape, shard))
    except ShapeError as error:
        raise ShapeError(f"shards.{number}.{error}") from None


def _listed(shards: Any) -> Iterator[Any]:
    if not isinstance(shards, list):
        raise ShapeError("has no list of shards")
    yield from shards


def _keys(file: BinaryIO) -> dict[str, Any]:
    """Read what comes before the shards, a key a line."""
    keys: dict[str, Any] = {}
    if _line(file) != b"{\n":
        raise ShapeError("has no key on its second line")
    while (line := _line(file)) != b'"shards": [\n':
        if not line.endswith(b",\n") or file.tell() > MOST_BYTES_OF_KEYS:
            raise ShapeError(f"its shards do not begin in its first {MOST_BYTES_OF_KEYS >> 20} MiB")
        keys |= parse_json(b"{" + line.removesuffix(b",\n") + b"}")
    if "shards" in keys:
        raise ShapeError("has shards twice")
    return keys


def _shards(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """Read the shards, one a line, and what closes the list."""
    more = True
    while more:
        line = _line(file)
        more = line.endswith(b",\n")
        yield parse_json(line.removesuffix(b"\n").removesuffix(b","))
    if file.read(5) != b"]\n}\n":
        raise ShapeError("is cut, or goes on after its end")


def _line(file: BinaryIO) -> bytes:
    line = file.readline(MOST_BYTES_OF_A_LINE)
    if len(line) == MOST_BYTES_OF_A_LINE:
        raise ShapeError(f"a line has {MOST_BYTES_OF_A_LINE >> 20} MiB")
    return line


def _problem_of_density(shards: Sequence[ShardEntry]) -> str | None:
    """Say where shards have more words than their bytes can stand for. `prepare` writes none such."""
    words, size = sum(entry.words for entry in shards), sum(entry.size for entry in shards)
    if words * BYTES_OF_A_WORD > most_text(size):
        return f"its shards have {words:,} words in {size:,} bytes"
    dense = next((entry for entry in shards if entry.has_dense_group), None)
    return f"a row group of {dense.file} has too many words for its {dense.size:,} bytes" if dense else None
