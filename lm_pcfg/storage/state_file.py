"""state.json of a checkpoint: where its training stood, and the hashes of the other files, its own included.

Whoever made the file, what `read_state` returns has the shape that training and scoring rely on: every known key has
its type and its limits, and the names of files cannot leave the folder. Checkpoints of earlier versions lack some keys.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lm_pcfg.errors import UserError
from lm_pcfg.storage import durable

FORMAT = 1
_MOST_BYTES = 1 << 20  # 2 KB are usual, 40 KB with 1,000 former bests, 1,000 skipped steps and a ranking of 100

Count = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
#: A name in the checkpoint's folder, or in a folder in it: vocab/words.txt.
FileName = Annotated[
    str, Field(pattern=r"^(?:[0-9A-Za-z][0-9A-Za-z._-]*/)?[0-9A-Za-z][0-9A-Za-z._-]*$", max_length=100)
]


class CheckpointError(UserError):
    """A checkpoint that cannot be written, found or trusted; the message is one line for the user."""


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True)


class FileEntry(_Shape):
    sha256: Sha256
    size: Count


class MetricsEntry(_Shape):
    """The lines of metrics.jsonl up to this step."""

    lines: Count
    sha256: Sha256


class DataEntry(_Shape):
    """The place in the data: what corpus/stream.py saves."""

    epoch: Count
    batch: Count
    batches: Count
    plan: str
    dealings: list[Annotated[list[Count], Field(min_length=2, max_length=2)]] = []

    @model_validator(mode="after")
    def dealings_fit(self) -> DataEntry:
        """Each dealing has given so many ranks so many batches; more than there are would take for ever to deal."""
        if not all(map(all, self.dealings)) or sum(ranks * rounds for ranks, rounds in self.dealings) > self.batches:
            raise ValueError("deals out more batches than there are")
        return self


class WindowEntry(_Shape):
    """Sums since the last line of metrics: Window of training/position.py."""

    model_config = ConfigDict(strict=True, extra="forbid")
    steps: Count = 0
    nll: Number = 0.0
    sentences: Number = 0.0
    words: Number = 0.0
    gradient_norm: Number = 0.0
    skipped: Count = 0
    recomputed: Number = 0.0
    seconds: Number = 0.0


class State(_Shape):
    """All of state.json, but what nobody reads back. Defaults are for checkpoints that were written without a key."""

    format: Literal[1]
    step: Count
    files: dict[FileName, FileEntry] = Field(max_length=1000)
    checksum: str
    best_nll: Number | None = None
    best_impossible: Count = 0
    best_step: Count | None = None
    best_s_f1: Number | None = None
    validated: str = Field(default="", max_length=1000)
    former_bests: list[Count] = Field(default=[], max_length=1000)
    evaluation_pending: bool = False
    evaluations_since_best: Count = 0
    skipped: Count = 0
    skipped_in_a_row: Count = 0
    skipped_steps: list[Count] = Field(default=[], max_length=1000)
    evaluated_step: Count = 0
    diverged: str = Field(default="", max_length=1000)
    ema_updates: Count = 0
    ranking: list[Annotated[list[Number], Field(min_length=3, max_length=3)]] = Field(default=[], max_length=10_000)
    window: WindowEntry | None = None
    data: DataEntry | None = None
    epoch: Count = 0
    vocabulary_hash: str = ""
    valid_unknown_share: Number | None = None  # of the words of the validation text
    metrics: MetricsEntry | None = None


def state_bytes(content: dict[str, Any]) -> bytes:
    """Format the state, with a `checksum` of its own: this file holds the hashes of the others."""
    unsigned = {key: value for key, value in content.items() if key != "checksum"}
    content = json.loads(json.dumps(unsigned, allow_nan=False))  # as it will be read: keys are strings, no tuples
    content["checksum"] = _checksum(content)
    return _formatted(content)


def _checksum(content: dict[str, Any]) -> str:
    unsigned = {key: value for key, value in content.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(unsigned, allow_nan=False).encode()).hexdigest()


def _formatted(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def read_state(path: Path) -> dict[str, Any]:
    """Read a state.json that is whole and has the right shape; an error says in one line what is wrong with it."""
    try:
        written = durable.read_file(path, _MOST_BYTES)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {durable.reason(error)}") from error
    try:
        state = json.loads(written)
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError
        raise CheckpointError(f"{path} is truncated or damaged: not JSON ({durable.reason(error)})") from error
    if not isinstance(state, dict) or "format" not in state:
        raise CheckpointError(f"{path} is not the state of a checkpoint: no format version in it")
    if state["format"] != FORMAT:
        version = repr(state["format"])[:40]
        raise CheckpointError(f"{path} has the unknown format {version}; this version reads format {FORMAT}")
    try:
        intact = state.get("checksum") == _checksum(state) and written == _formatted(state)  # the second takes longer
    except (ValueError, RecursionError):  # NaN, which Python reads but save never writes
        intact = False
    if not intact:
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum")
    try:
        State.model_validate(state)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part)[:40] for part in first["loc"])
        raise CheckpointError(
            f"{path} is not the state of a checkpoint: {key!r}: {' '.join(first['msg'].split())}"
        ) from None
    return state
