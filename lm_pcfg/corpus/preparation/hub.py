"""Texts of the Hugging Face hub, or of a local folder in its layout, through `datasets`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_pcfg.console import say
from lm_pcfg.corpus.shards import parquet
from lm_pcfg.corpus.shards.errors import ShardError
from lm_pcfg.corpus.shards.files import has_known_suffix, is_json, is_parquet, scan
from lm_pcfg.corpus.shards.lines import lines_of
from lm_pcfg.corpus.text import LONGEST_LINE, too_long
from lm_pcfg.errors import UserError

# Older texts on the hub are scripts, which `datasets` no longer runs; the hub keeps them as Parquet on this branch.
PARQUET_BRANCH = "refs/convert/parquet"
ROWS_AT_A_TIME = 256  # of a batch, whose rows may be long


def looks_like_hub_name(name: str) -> bool:
    """Whether the name is `owner/name`, is no existing file and has no suffix of a text file."""
    return (
        not Path(name).exists()
        and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None
        and not has_known_suffix(name)
    )


def splits_of(name: str) -> list[str]:
    import datasets

    return list(_asked(name, datasets.get_dataset_split_names))


def rows_of_split(name: str, split: str, fields: Sequence[str], configuration: str | None = None) -> Iterator[str]:
    """Yield the texts of a split, from the first of these fields that it has. Rows are bounded as those of files are.

    Files of a folder here, text, JSON lines or Parquet, are read as any others are; the rest comes through `datasets`.
    """
    import datasets

    def load(name: str, **arguments: Any) -> Any:
        builder = datasets.load_dataset_builder(name, configuration, **arguments)
        if hasattr(builder.config, "batch_size"):  # of Parquet: else a batch is a row group, however long its rows are
            builder.config.batch_size = ROWS_AT_A_TIME
        return builder.config, builder.as_streaming_dataset(split=split)

    config, stream = _asked(name, load)
    if files := _readable_files(config, split):
        for file in files:
            yield from _rows_of_file(name, file, fields)
        return
    number = 0
    try:
        for table in stream.with_format("arrow").iter(batch_size=ROWS_AT_A_TIME):
            field = _field(name, fields, table.column_names)
            for value in table.column(field).to_pylist():
                number += 1
                text = " ".join(map(str, value)) if isinstance(value, list) else str(value or "")
                if len(text) > LONGEST_LINE:
                    raise ShardError(too_long(name, f"row {number}"))
                yield text
    except (UserError, MemoryError):
        raise
    except Exception as error:  # what it raises differs from version to version, and from one kind of file to another
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ShardError(f"{name}: reading failed after row {number} ({type(error).__name__}: {reason})") from None


def _field(name: str, fields: Sequence[str], there: Sequence[str]) -> str:
    field = next((field for field in fields if field in there), None)
    if field is None:
        columns = ", ".join(there)
        raise ShardError(f"{name}: has no field {' or '.join(fields)}; its fields: {columns} (choose one with --field)")
    return field


def _readable_files(config: Any, split: str) -> list[Path]:
    """Return the files of a split if all of them are here and of a kind that is read without `datasets`; else none."""
    files = [Path(file) for file in (getattr(config, "data_files", None) or {}).get(split, [])]
    plain = getattr(config, "sample_by", "line") == "line" and getattr(config, "field", None) is None
    # A .json may be one large array.
    ours = all(file.is_file() and has_known_suffix(file.name) and ".json" not in file.suffixes for file in files)
    return files if plain and ours else []


def _rows_of_file(name: str, file: Path, fields: Sequence[str]) -> Iterator[str]:
    if is_parquet(file):
        field = _field(name, fields, parquet.columns(file))
        if not parquet.groups(file, field):
            return  # a split may have a shard without rows
    elif not file.stat().st_size:
        return
    else:
        field = fields[0] if is_json(file) else _field(name, fields, ["text"])
    for chunk, rows in scan(file, 0, field, ROWS_AT_A_TIME):
        for line in lines_of(rows, chunk, file, field, "fail"):
            yield line or ""


def _asked(name: str, question: Any) -> Any:
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    huggingface_hub.logging.set_verbosity_error()
    if not Path(name).exists():
        say(f"asking the Hugging Face hub for {name} ...")
    try:
        return question(name)
    except Exception as error:  # what it raises differs from version to version
        if "script" in str(error).lower() and not Path(name).exists():
            try:
                return question(name, revision=PARQUET_BRANCH)
            except Exception as other:
                error = other
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        what = (
            "cannot be opened" if Path(name).exists() else "is neither a file or folder here nor reachable on the hub"
        )
        raise UserError(f"{name}: {what} ({type(error).__name__}: {reason})") from None
