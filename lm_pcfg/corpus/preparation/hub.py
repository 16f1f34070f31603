"""Texts of the Hugging Face hub, or of a local folder in its layout, through `datasets`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_pcfg.console import say
from lm_pcfg.corpus.shards.errors import ShardError
from lm_pcfg.corpus.shards.files import has_known_suffix
from lm_pcfg.errors import UserError

# Older texts on the hub are scripts, which `datasets` no longer runs; the hub keeps them as Parquet on this branch.
PARQUET_BRANCH = "refs/convert/parquet"
ROWS_AT_A_TIME = 4096


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


def open_split(name: str, split: str, configuration: str | None = None) -> Any:
    """Open a split as a stream of Arrow tables."""
    import datasets

    def load(name: str, **arguments: Any) -> Any:
        return datasets.load_dataset(name, configuration, split=split, streaming=True, **arguments)

    return _asked(name, load).with_format("arrow")


def rows_of_split(name: str, split: str, fields: Sequence[str], configuration: str | None = None) -> Iterator[str]:
    """Yield the texts of a split, from the first of these fields that it has."""
    stream = open_split(name, split, configuration)
    for table in stream.iter(batch_size=ROWS_AT_A_TIME):
        field = next((field for field in fields if field in table.column_names), None)
        if field is None:
            columns = ", ".join(table.column_names)
            raise ShardError(
                f"{name}: has no field {' or '.join(fields)}; its fields: {columns} (choose one with --field)"
            )
        for value in table.column(field).to_pylist():
            yield " ".join(value) if isinstance(value, list) else str(value or "")


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
