"""Split rows of shards into lines of text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lm_pcfg.corpus.shards.errors import ShardError
from lm_pcfg.corpus.shards.files import Chunk, OnError, Row, is_json, is_parquet
from lm_pcfg.corpus.text import UTF8_BOM


def lines_of(rows: Sequence[Row], chunk: Chunk, path: Path, field: str, on_error: OnError) -> list[str | None]:
    """Return the lines of a chunk; None is a line that cannot be read (invalid UTF-8 or JSON) under on_error: skip."""
    if is_parquet(path):
        return [line for row in rows for line in _split(str(row or ""))]
    lines = _decoded(rows, chunk, path, on_error)
    if not is_json(path):
        return lines
    return [line for number, text in enumerate(lines) for line in _of_json(text, chunk, number, path, field, on_error)]


def _split(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n")


def _decoded(rows: Sequence[Row], chunk: Chunk, path: Path, on_error: OnError) -> list[str | None]:
    raw: list[bytes] = list(rows)  # type: ignore[arg-type]
    if chunk.first_row == 0 and raw and raw[0].startswith(UTF8_BOM):
        raw[0] = raw[0][len(UTF8_BOM) :]
    with suppress(UnicodeDecodeError):
        lines: list[str | None] = [*b"".join(raw).decode("utf-8").split("\n")]
        if raw and raw[-1].endswith(b"\n"):
            lines.pop()
        if len(lines) == len(raw):
            return lines
    lines = []
    for number, row in enumerate(raw, start=chunk.first_row + 1):
        try:
            lines.append(row.decode("utf-8").removesuffix("\n"))
        except UnicodeDecodeError as error:
            if on_error == "fail":
                raise ShardError(
                    f"{path}: line {number} is not valid UTF-8 (byte 0x{row[error.start]:02x}); if it is Latin-1, "
                    "convert it with iconv -f latin1 -t utf-8, or leave such lines out with on_error: skip"
                ) from None
            lines.append(None)
    return lines


def _check_characters(text: str) -> None:
    """Refuse half a character (a lone surrogate), which JSON can spell, but which is no text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"has half a character (\\u{ord(text[error.start]):04x}) in its text") from None


def _of_json(
    text: str | None, chunk: Chunk, number: int, path: Path, field: str, on_error: OnError
) -> list[str] | list[None]:
    if text is None:
        return [None]
    if not text.strip():
        return [""]
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("not an object")
        if field not in value:
            raise ValueError(
                f"has no field {field!r}; its fields: {', '.join(value) or 'none'} (choose one with field)"
            )
        content = value[field]
        if isinstance(content, list) and all(isinstance(word, str) for word in content):
            content = " ".join(content)
        if content is not None and not isinstance(content, str):
            raise ValueError(f"field {field!r} holds {type(content).__name__}, not text")
        _check_characters(content or "")
    except (ValueError, RecursionError) as error:
        if on_error == "skip":
            return [None]
        reason = "invalid JSON" if isinstance(error, json.JSONDecodeError) else " ".join(str(error).split())
        raise ShardError(f"{path}: line {chunk.first_row + number + 1}: {reason}") from None
    return _split(content or "")
