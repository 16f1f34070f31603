"""What is said of a shard that cannot be read."""

from __future__ import annotations

from pathlib import Path

from lm_pcfg.errors import UserError


class ShardError(UserError):
    """A shard that cannot be read; the message is one line and begins with the file's name."""


def changed(path: Path) -> ShardError:
    return ShardError(f"{path}: is not what it was when this run began (rows are missing or differ); put it back")


def reading_failed(path: Path, error: BaseException) -> ShardError:
    if isinstance(error, FileNotFoundError):
        return ShardError(f"{path}: no such file; it was there when the shards were listed")
    reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
    return ShardError(f"{path}: reading failed ({reason}); is the file whole? Copy it again")
