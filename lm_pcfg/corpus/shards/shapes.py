"""The JSON files beside shards: how they are read, what they may hold, and the checksum that each carries.

A manifest may come from anywhere. It is a plain file of a bounded size, numbers in it are small enough to compute with,
and its names stay in their folder. The checksum is of the content as canonical JSON: damage is told, not computed with.
"""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

CHECKSUM = "checksum"


class ShapeError(ValueError):
    """A file that does not hold what it should; the message says why, without its name."""


def parse_json(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:  # also invalid UTF-8, and a number of thousands of digits
        raise ShapeError(" ".join(str(error).split())[:100] or "not JSON") from None
    if not isinstance(value, dict):
        raise ShapeError("not an object")
    return value


# ---- checksums ------------------------------------------------------------------------------------------------------


def canonical(value: Any) -> bytes:
    """Format JSON so that the same content has the same bytes: keys sorted, no white space."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def checksum_of(content: dict[str, Any]) -> str:
    """Return the sha256 of a JSON object without its checksum."""
    return hashlib.sha256(canonical({key: value for key, value in content.items() if key != CHECKSUM})).hexdigest()


def with_checksum(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, CHECKSUM: checksum_of(json.loads(json.dumps(content)))}


def check_checksum(content: dict[str, Any]) -> None:
    if content.get(CHECKSUM) != checksum_of(content):
        raise ShapeError("its content does not match its checksum")


# ---- shapes ---------------------------------------------------------------------------------------------------------


def _name(value: str) -> str:
    if value in (".", "..") or "/" in value or not value.isprintable():
        raise ValueError("should be the name of a file in its folder")
    return value


def _ascending(pairs: list[list[int]]) -> list[list[int]]:
    if any(one[0] >= other[0] for one, other in pairwise(pairs)):
        raise ValueError("lengths should ascend")
    if any(count < 1 for _, count in pairs):
        raise ValueError("no line has such a length")
    if sum(count for _, count in pairs) > MOST_LINES or sum(length * count for length, count in pairs) > MOST_WORDS:
        raise ValueError("has too many lines or words")
    return pairs


MOST_LINES = 1 << 28  # of a row group or chunk
MOST_WORDS = 1 << 40
MOST_GROUPS = 1 << 16  # of a shard: a billion lines
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(min_length=1, max_length=255), AfterValidator(_name)]
Length = Annotated[int, Field(ge=-1, lt=1 << 31)]
Pair = Annotated[list[Length], Field(min_length=2, max_length=2)]  # length, number of lines
Pairs = Annotated[list[Pair], AfterValidator(_ascending)]


class Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, defer_build=True)


class ShardShape(Shape):
    file: FileName
    sha256: Sha256
    size: Count
    lines: Count | None = None
    row_groups: Annotated[list[Annotated[Pairs, Field(min_length=1)]], Field(max_length=MOST_GROUPS)]

    @model_validator(mode="after")
    def _adds_up(self) -> ShardShape:
        if self.lines not in (None, sum(count for group in self.row_groups for _, count in group)):
            raise ValueError("its row groups have another number of lines")
        if any(group[0][0] < 1 for group in self.row_groups):
            raise ValueError("a row group has blank lines")
        return self


class CountsShape(Shape):
    lines: Count
    words: Count
    tokens: Count
    unknown: Count = 0
    bytes: Count = 0
    blank: Count = 0
    unreadable: Count = 0


class VocabularyShape(Shape):
    kind: Annotated[str, Field(max_length=100)]
    types: Count
    sha256: Sha256


class ManifestShape(Shape):
    """manifest.json of a prepared corpus, without its shards (manifest.py)."""

    counts: CountsShape
    vocabulary: VocabularyShape
    damage: list[str]
    versions: dict[str, str]


class PlanShape(Shape):
    """prepare.json: what a prepared corpus is made of."""

    format: int
    inputs: list[dict[str, Any]]
    options: dict[str, Any]


class FinishedShape(Shape):
    """A finished shard."""

    entry: ShardShape
    counts: CountsShape
    rows: Count


class NoteShape(FinishedShape):
    """What is noted of a finished shard until there is a manifest."""

    made_of: dict[str, Any]


class BegunShape(Shape):
    """What all parts of a corpus have in common (preparation/parts.py)."""

    plan: Sha256
    parts: Count
    versions: dict[str, str]


class CountedShape(Shape):
    """The words of the inputs of a part. begun: the checksum of what it has in common with the others."""

    begun: Sha256
    words: dict[str, Count]


class EncodedShape(Shape):
    """The shards of a part, in their order; rows by the name of an input, damage by its number."""

    begun: Sha256
    vocabulary: Sha256
    shards: list[FinishedShape]
    rows: dict[str, Count]
    damage: dict[str, str]


class ChunkShape(Shape):
    """shard, first row, number of rows, start, skip; lines by length; sha256 of the rows."""

    place: Annotated[list[Count], Field(min_length=5, max_length=5)]
    lengths: Pairs
    sha256: Sha256


class IndexedShardShape(Shape):
    chunks: list[ChunkShape]
    sha256: Sha256
    damage: str | None


class IndexShape(Shape):
    """What all results of a first pass over raw shards have."""

    damaged: bool
    call: str


class LinesIndexShape(IndexShape):
    shards: list[IndexedShardShape]


class WordsIndexShape(IndexShape):
    words: list[str]
    training_words: Count
    training_unknown: Count


AnyShape = TypeVar("AnyShape", bound=Shape)


def checked(shape: type[AnyShape], content: dict[str, Any]) -> AnyShape:
    """Return the content as this shape; ShapeError says what is wrong first."""
    try:
        return shape.model_validate(content)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in problem["loc"])[:80]
        message = problem["msg"].removeprefix("Value error, ")
        raise ShapeError(" ".join(f"{where}: {message}".removeprefix(": ").split())[:200]) from None
