"""Rows of Parquet files, a row group at a time, in batches that are bounded by bytes.

A file of a few hundred bytes can stand for gigabytes: pages are compressed, and a long value is stored once in a
dictionary and named in every row. Both sizes are looked up before anything is decoded.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from lm_pcfg.corpus.shards.errors import ShardError, changed, reading_failed
from lm_pcfg.corpus.text import LONGEST_LINE, most_text, too_long, too_much_text

Row = str | None

ROWS_AT_A_TIME = 4096
BYTES_AT_A_TIME = 256 << 20  # however small the file: fewer rows where a value may be long
SMALL_BATCH = LONGEST_LINE  # bytes
MOST_WORDS_OF_A_GROUP = 1 << 27  # of a column of lists, in a row group
# With these a value takes no more bytes than its page has, once that is decompressed.
PLAIN_ENCODINGS = {"PLAIN", "RLE", "BIT_PACKED", "PLAIN_DICTIONARY", "RLE_DICTIONARY", "DELTA_LENGTH_BYTE_ARRAY"}
WAY_OUT = "write it again without compression and dictionaries"


def columns(path: Path) -> list[str]:
    """Return the names of the columns of a Parquet file."""
    return _columns_and_groups(path)[0]


def _columns_and_groups(path: Path) -> tuple[list[str], list[int]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            metadata = file.metadata
            full = [group for group in range(file.num_row_groups) if metadata.row_group(group).num_rows]
            return file.schema_arrow.names, full
    except MemoryError:
        raise
    except (OSError, pyarrow.ArrowException) as error:
        raise _damaged(path, error) from None


def groups(path: Path, field: str) -> list[int]:
    """Return the row groups of a Parquet file that have rows, after checking that it has the field."""
    names, full = _columns_and_groups(path)
    if field not in names:
        raise ShardError(f"{path}: has no column {field!r}; its columns: {', '.join(names)} (choose one with field)")
    return full


def _damaged(path: Path, error: BaseException) -> ShardError:
    if isinstance(error, FileNotFoundError):
        return reading_failed(path, error)
    reason = " ".join(str(error).split())[:200]
    return ShardError(f"{path}: damaged Parquet file ({reason}); copy or make it again")


def rows(path: Path, field: str, group: int) -> Iterator[Row]:
    """Yield the texts of one row group; a batch takes a bounded number of bytes, whatever the file says of itself."""
    from pyarrow import ArrowException  # a name of its own: modules are empty when Python ends with this in mid-file
    from pyarrow.parquet import ParquetFile, read_metadata

    try:
        metadata = read_metadata(path)
        leaf = next(k for k in range(metadata.num_columns) if _is_of(metadata.schema.column(k).path, field))
        is_list = metadata.schema.column(leaf).max_repetition_level > 0
        column = metadata.row_group(group).column(leaf)
        longest = _longest_value(path, column)
        plain = set(column.encodings) <= PLAIN_ENCODINGS
        if is_list and column.num_values > MOST_WORDS_OF_A_GROUP:
            raise ShardError(f"{path}: row group {group} has {column.num_values:,} words; write smaller row groups")
        if is_list and plain:
            longest = 1  # words stay numbers of a dictionary until their row is put together
        number = sum(metadata.row_group(before).num_rows for before in range(group))
        with ParquetFile(
            path, metadata=metadata, read_dictionary=[metadata.schema.column(leaf).path] if is_list and plain else None,
            page_checksum_verification=True, pre_buffer=False, buffer_size=1 << 20,
        ) as file:  # fmt: skip
            at_a_time = max(1, min(ROWS_AT_A_TIME, BYTES_AT_A_TIME // max(1, longest)))
            for batch in file.iter_batches(batch_size=at_a_time, row_groups=[group], columns=[field]):
                yield from _texts(batch.column(0), path, field, number)
                number += len(batch)
    except MemoryError:
        raise
    except UnicodeDecodeError:
        raise ShardError(f"{path}: column {field!r} has text that is not valid UTF-8; make the file again") from None
    except (OSError, ValueError, IndexError, OverflowError, StopIteration, ArrowException) as error:
        if not path.exists():
            raise reading_failed(path, FileNotFoundError()) from None
        raise _damaged(path, error) from None


def _is_of(column: str, field: str) -> bool:
    return column == field or column.startswith(f"{field}.")


def _longest_value(path: Path, column: Any) -> int:
    """Return how many bytes a value may have: of a dictionary, those of its page; else those of the whole column."""
    size, most = column.total_uncompressed_size, most_text(path.stat().st_size)
    if size > most:
        raise ShardError(too_much_text(str(path), most, WAY_OUT))
    if not set(column.encodings) <= PLAIN_ENCODINGS:
        return size
    start = column.data_page_offset
    if column.has_dictionary_page:
        start = min(start, column.dictionary_page_offset)
    kind, page = _page(path, start)
    if page > most:
        raise ShardError(too_much_text(str(path), most, WAY_OUT))
    return page if kind == 2 else 1  # without a dictionary all values together have no more bytes than the column


def _page(path: Path, start: int) -> tuple[int, int]:
    """Return the kind of a page (2: dictionary) and its bytes once decompressed, which its header begins with.

    The header is in Thrift's compact protocol: 0x15 is the next field, an int32, whose value is a zigzag varint.
    """
    with path.open("rb") as file:
        file.seek(start)
        head = iter(file.read(16))
    values = []
    for _ in range(2):
        value = shift = 0
        if next(head, None) != 0x15:
            raise ValueError("a page has no header")
        while (byte := next(head, 0)) & 0x80:
            value, shift = value | (byte & 0x7F) << shift, shift + 7
        value |= byte << shift
        values.append((value >> 1) ^ -(value & 1))
    return values[0], values[1]


def _texts(array: Any, path: Path, field: str, number: int) -> Iterator[Row]:
    """Yield the texts of some rows, of which the first has this number in the file."""
    import pyarrow

    kind = array.type
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        if pyarrow.types.is_dictionary(kind.value_type) and pyarrow.types.is_string(kind.value_type.value_type):
            yield from _joined(array, path, field, number)
            return
    elif pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        if (size := array.nbytes) <= SMALL_BATCH:
            yield from array.to_pylist()
            return
        import pyarrow.compute

        lengths = pyarrow.compute.binary_length(array).fill_null(0).to_numpy()
        if lengths.max() > LONGEST_LINE:
            raise ShardError(too_long(str(path), f"row {number + int((lengths > LONGEST_LINE).argmax()) + 1}"))
        some = max(1, len(array) * SMALL_BATCH // size)  # so that they are not all there twice
        for start in range(0, len(array), some):
            yield from array.slice(start, some).to_pylist()
        return
    for place, value in enumerate(array.to_pylist(), start=number + 1):
        if isinstance(value, list) and all(isinstance(word, str) for word in value):
            value = " ".join(value)  # a text that was tokenised
        if value is not None and not isinstance(value, str):
            raise _not_text(path, field, value)
        if value is not None and len(value) > LONGEST_LINE:
            raise ShardError(too_long(str(path), f"row {place}"))
        yield value


def _joined(array: Any, path: Path, field: str, number: int) -> Iterator[Row]:
    """Yield the texts of rows that are lists of words, each word a number of a dictionary."""
    words = array.values.dictionary.to_pylist()
    sizes = [len(word or "") + 1 for word in words]
    for place, row in enumerate(array, start=number + 1):
        if not row.is_valid:
            yield None
            continue
        ids = row.values.indices.to_pylist()
        if None in ids or any(words[id] is None for id in ids):
            raise _not_text(path, field, [])
        if sum(sizes[id] for id in ids) > LONGEST_LINE:
            raise ShardError(too_long(str(path), f"row {place}"))
        yield " ".join([words[id] for id in ids])


def _not_text(path: Path, field: str, value: Any) -> ShardError:
    return ShardError(f"{path}: column {field!r} holds {type(value).__name__}, not text; choose another field")


# ---- Parquet of our own, through datasets ---------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _stream(path: Path, field: str, size: int, changed: int) -> Any:
    """Open a `datasets` stream of Arrow tables, a shard for each row group. size, changed: keys of the cache."""
    import datasets
    import pyarrow.dataset

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what fails is raised, and reported in one line
    verified = pyarrow.dataset.ParquetFragmentScanOptions(page_checksum_verification=True)
    stream = datasets.load_dataset(
        "parquet", data_files={"train": [glob.escape(str(path.absolute()))]}, split="train", streaming=True,
        columns=[field], fragment_scan_options=verified,
    )  # fmt: skip
    return stream.with_format("arrow").reshard()


@lru_cache(maxsize=8)
def _values_of_groups(path: Path, field: str, size: int, changed: int) -> list[int]:
    """Return how many values each row group has in the lists of a column. size, changed: keys of the cache."""
    from pyarrow.parquet import read_metadata

    metadata = read_metadata(path)
    leaf = next(k for k in range(metadata.num_columns) if _is_of(metadata.schema.column(k).path, field))
    return [metadata.row_group(group).column(leaf).num_values for group in range(metadata.num_row_groups)]


def prepared_ids(path: Path, field: str, group: int, values: int, size: int) -> Iterator[Any]:
    """Yield Arrow arrays of lists of numbers that are a row group of a shard that `prepare` made.

    values, size: how many numbers the row group should have, and bytes the file; else it is not what was made, and is
    not read. How many numbers so many bytes may stand for is up to the manifest.
    """
    import pyarrow  # its exceptions have a name of their own: modules are empty when Python ends with this in mid-file
    from pyarrow import ArrowException

    try:
        stat = path.stat()
        if stat.st_size != size or _values_of_groups(path, field, size, stat.st_mtime_ns)[group] != values:
            raise changed(path)
        stream = _stream(path, field, stat.st_size, stat.st_mtime_ns)
        for table in stream.shard(stream.num_shards, group).iter(batch_size=ROWS_AT_A_TIME):
            array = table.column(field).combine_chunks()
            if array.type != pyarrow.list_(pyarrow.int32()) or array.null_count or array.flatten().null_count:
                raise ValueError(f"{array.type} where lists of word ids should be")
            yield array
    except MemoryError:
        raise
    except (OSError, ValueError, IndexError, OverflowError, StopIteration, ArrowException) as error:
        _stream.cache_clear()
        _values_of_groups.cache_clear()
        if not path.exists():
            raise reading_failed(path, FileNotFoundError()) from None
        raise _damaged(path, error) from None
