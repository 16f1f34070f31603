"""Reading text files, one sentence a line, with errors a user can act on. `.gz` and `.zst` are read as they are."""

from __future__ import annotations

import errno
import io
import math
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from lm_pcfg.errors import UserError

STANDARD_INPUT = "-"
EMBEDDED_PREFIX = "embedded:"

# NUL bytes mark a binary file only near its start: one stray NUL far inside a large corpus is not worth a refusal.
BINARY_CHECK_BYTES = 64 * 1024
UTF8_BOM = b"\xef\xbb\xbf"
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}  # by suffix

# What a file of a few bytes may become. A line of a corpus has some hundred bytes, and text is compressed to a tenth.
LONGEST_LINE = 16 << 20  # bytes
ANY_MAY_BECOME = 16 << 20  # bytes of text, however small the file
MOST_EXPANSION = 200  # times its size, beyond that
LARGEST_FILE = 512 << 20  # bytes of what is read as a whole: a vocabulary, or an index of raw shards

# (first bytes, what the file looks like, what to do about it)
MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b", "gzip-compressed data", "decompress it with gunzip"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed data", "decompress it with zstd -d"),
    (b"\xfd7zXZ\x00", "xz-compressed data", "decompress it with xz -d"),
    (b"BZh91AY&SY", "bzip2-compressed data", "decompress it with bunzip2"),
    (b"PK\x03\x04", "a zip archive", "unpack it with unzip"),
    (b"PAR1", "a Parquet file", "extract its text column to a text file"),
    (b"ARROW1\x00\x00", "an Arrow file", "extract its text column to a text file"),
    (b"\x89PNG", "a PNG image", "give a text file"),
    (b"%PDF-", "a PDF document", "extract its text with pdftotext"),
    (b"\xff\xfe", "UTF-16 text", "convert it with iconv -f utf-16 -t utf-8"),
    (b"\xfe\xff", "UTF-16 text", "convert it with iconv -f utf-16 -t utf-8"),
)


class TextError(UserError, ValueError):
    """A text that cannot be read; the message is one line for the user and says the way out."""


def read_bounded(path: Path, most: int = LARGEST_FILE) -> bytes:
    """Read a plain file; OSError if it is a pipe, a device or larger than this."""
    with open_bounded(path, most) as file:
        return file.read(most)


@contextmanager
def open_bounded(path: Path, most: int) -> Iterator[BinaryIO]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer would wait
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
        yield file


def resolve_source(path_or_name: str | Path) -> Path | str:
    """Turn a path, '-' for standard input, or `embedded:train|valid|test` into what `read_lines` takes."""
    name = str(path_or_name)
    if name == STANDARD_INPUT:
        return STANDARD_INPUT
    if name.startswith(EMBEDDED_PREFIX):
        from lm_pcfg.corpus import embedded  # generates files: only when asked for

        if name.endswith(".trees"):
            raise TextError(f"{name} are bracketed trees, not text; use {name.removesuffix('.trees')}")
        try:
            return embedded.resolve(name)
        except (ValueError, OSError) as error:
            raise TextError(str(error)) from error
    return Path(path_or_name)


def read_words(path_or_name: str | Path) -> Iterator[list[str]]:
    """Yield the words of each line; blank lines give an empty list."""
    source = resolve_source(path_or_name)
    for _, line in read_lines(source, name=display_name(path_or_name)):
        yield line.split()


def display_name(path_or_name: str | Path) -> str:
    """Return the name of a source in messages."""
    return "standard input" if str(path_or_name) == STANDARD_INPUT else str(path_or_name)


def read_lines(source: Path | str, *, name: str | None = None) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its ending) for each line of a file, or of standard input for '-'.

    Only \\n and \\r\\n end a line. (str.splitlines would also split at U+2028, U+0085, form feeds and others, and line
    numbers would differ from every other tool's.) A last line without a newline counts; a byte order mark is dropped.
    The file is streamed. `name` is what error messages call it.
    """
    name = name or display_name(source)
    with open_text(source, name) as handle:
        if str(source) != STANDARD_INPUT and handle.seekable():
            # A file is judged before its first line is given out; a stream only line by line, so as not to wait.
            check_binary(handle.read(BINARY_CHECK_BYTES), name, start=True)
            handle.seek(0)
        offset = 0  # bytes before the line
        for number, raw in enumerate(_raw_lines(handle, name), start=1):
            if offset < BINARY_CHECK_BYTES:
                check_binary(raw[: BINARY_CHECK_BYTES - offset], name, start=offset == 0)
            content, content_offset = raw, offset
            if offset == 0 and content.startswith(UTF8_BOM):
                content, content_offset = content[len(UTF8_BOM) :], len(UTF8_BOM)
            try:
                line = content.decode("utf-8")
            except UnicodeDecodeError as error:
                byte = content[error.start]
                raise TextError(
                    f"{name}: line {number} is not valid UTF-8 (byte 0x{byte:02x} at offset "
                    f"{content_offset + error.start}); if it is Latin-1, convert it with iconv -f latin1 -t utf-8"
                ) from None
            offset += len(raw)
            if line.endswith("\n"):
                line = line[:-2] if line.endswith("\r\n") else line[:-1]
            yield number, line


def open_text(source: Path | str, name: str) -> AbstractContextManager[BinaryIO]:
    """Open the bytes of a text, decompressed if its name says so."""
    if str(source) == STANDARD_INPUT:
        if sys.stdin is None:
            raise TextError("standard input is closed; give a file, or pipe text into the command")
        return nullcontext(sys.stdin.buffer)  # not ours to close
    try:
        handle: Any = open(source, "rb", buffering=0)  # noqa: SIM115 - the caller closes what it gets
        most = math.inf
        if (codec := COMPRESSION.get(Path(source).suffix.lower())) is not None:
            import pyarrow  # says so when a stream ends too early, which Python's zstd readers do not

            most = most_text(os.fstat(handle.fileno()).st_size)
            handle = pyarrow.CompressedInputStream(handle, codec)
        return io.BufferedReader(_Bounded(handle, name, most), 1 << 17)
    except FileNotFoundError:
        raise _no_such_file(name) from None
    except IsADirectoryError:
        raise TextError(f"{name}: is a folder; give a text file inside it") from None
    except PermissionError:
        raise TextError(f"{name}: no permission to read it; check with ls -l, allow it with chmod +r") from None
    except (OSError, ValueError) as error:  # a name too long, a NUL in it, a broken mount
        reason = getattr(error, "strerror", None) or error
        raise TextError(f"{name}: cannot be opened ({reason}); check the path") from None


def _no_such_file(name: str) -> TextError:
    return TextError(f"{name}: no such file; check the path (relative paths start at {Path.cwd()})")


def check_there(path_or_name: str | Path) -> None:
    """Raise TextError if there is no such file. It is not opened: what is read from a pipe is read only once."""
    source = resolve_source(path_or_name)
    if source != STANDARD_INPUT:
        try:
            os.stat(source)
        except FileNotFoundError:
            raise _no_such_file(display_name(path_or_name)) from None
        except (OSError, ValueError):
            pass  # who opens it says why it cannot be


def most_text(size: int) -> int:
    """Return how many bytes of text a file of this size may become; more is taken for a bomb."""
    return max(ANY_MAY_BECOME, MOST_EXPANSION * size)


def too_much_text(name: str, most: float, way_out: str) -> str:
    return (
        f"{name}: becomes more than {most / 2**20:,.0f} MiB of text, {MOST_EXPANSION} times its size or more; if that "
        f"is meant, {way_out}"
    )


def too_long(name: str, what: str) -> str:
    return f"{name}: {what} has more than {LONGEST_LINE >> 20} MiB; break it up into sentences, or leave it out"


class _Bounded(io.RawIOBase):
    """The bytes of a text, until a line or what is decompressed has no measure. It costs nothing for single lines."""

    def __init__(self, stream: Any, name: str, most: float) -> None:
        self._stream, self._name, self._most = stream, name, most
        self._total = self._line_bytes = self._ends = 0
        self._from_start = True

    def readinto(self, buffer: Any) -> int:
        count = self._stream.readinto(buffer) or 0
        part = bytes(memoryview(buffer)[:count])
        self._total += count
        self._ends += part.count(b"\n")
        last = part.rfind(b"\n")
        self._line_bytes = count - last - 1 if last >= 0 else self._line_bytes + count
        if self._line_bytes > LONGEST_LINE:
            raise TextError(too_long(self._name, f"line {self._ends + 1}" if self._from_start else "a line"))
        if self._total > self._most:
            raise TextError(too_much_text(self._name, self._most, "decompress it first (gunzip, zstd -d)"))
        return count

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._stream.seekable()

    def seek(self, offset: int, whence: int = 0) -> int:
        place = self._stream.seek(offset, whence)
        self._total = self._line_bytes = self._ends = 0
        self._from_start = place == 0
        return place

    def tell(self) -> int:
        return self._stream.tell()

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def _raw_lines(handle: BinaryIO, name: str) -> Iterator[bytes]:
    try:
        if handle is not getattr(sys.stdin, "buffer", None):
            yield from handle  # binary files split at \n only
            return
        number = 0
        while line := handle.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise TextError(too_long(name, f"line {number}"))
            yield line
    except OSError as error:
        what = f"{name}: reading failed ({error.strerror or error})"
        if Path(name).suffix.lower() in COMPRESSION:
            raise TextError(f"{what}; is the file whole? Copy or compress it again") from None
        raise TextError(f"{what}; check the disk or the pipe") from None


def check_binary(head: bytes, name: str, *, start: bool) -> None:
    """Refuse what is not text; `start`: head begins where the file does."""
    if start:
        for magic, looks_like, way_out in MAGIC:
            if not head.startswith(magic):
                continue
            # A sentence could begin with "PAR1"; in a Parquet file a control byte follows.
            if magic == b"PAR1" and len(head) > 4 and (head[4] >= 0x20 or head[4] in b"\t\r\n"):
                continue
            raise TextError(f"{name}: looks like {looks_like}, not text; {way_out} first")
    if b"\0" in head:
        raise TextError(f"{name}: looks like a binary file (it has NUL bytes), not text; give a UTF-8 text file")
