"""File operations that fail: commands run under file_faults.c, and what is left of a folder after a power cut.

Importing PyTorch takes 4 seconds, so one process imports everything and forks another for each command.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from processes import environment

SOURCE = Path(__file__).with_name("file_faults.c")
_PLAN, _RECORD = struct.Struct("5q"), struct.Struct("6q")

Image = dict[str, bytes | str | None]  # by path: the content of a file, where a link leads to, None for a folder


class Fault(IntEnum):
    NONE = 0
    KILL = 1
    FAIL_ONCE = 2  # EIO
    DISK_FULL = 3  # ENOSPC, from then on


class Operation(IntEnum):
    OPEN = 1
    WRITE = 2
    TRUNCATE = 3
    SYNC = 4
    CHANGE_MODE = 5
    MAKE_FOLDER = 6
    REMOVE = 7
    RENAME = 8
    LINK = 9
    SYMLINK = 10


@dataclass(frozen=True)
class Record:
    """An operation."""

    operation: Operation
    succeeded: bool
    node: int
    number: int  # where it was written, the length, or flags
    path: str
    data: bytes  # what was written, or the second path


@dataclass(frozen=True)
class Result:
    status: int
    said: str  # on standard error
    operations: int


# ---- commands -------------------------------------------------------------------------------------------------------


def compile_library(folder: Path) -> Path:
    """Compile file_faults.c; without a compiler the test is skipped, unless it has to run."""
    if sys.platform != "linux":
        pytest.skip("seccomp, with which file operations are made to fail, is Linux's")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        assert not os.environ.get("LM_PCFG_REQUIRE_SLURM"), "no C compiler: apt-get install gcc libc6-dev"
        pytest.skip("no C compiler (cc, gcc)")
    library = folder / "file_faults.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    return library


class Server:
    """The process that has imported everything, and forks for each command."""

    def __init__(self, library: Path):
        self._process = subprocess.Popen([sys.executable, __file__, str(library)], env=environment(),
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip

    def run(self, arguments: Sequence[str], folder: Path, output: Path) -> int:
        """Run `lm_pcfg ARGUMENTS` in this folder and return its exit status, negative for a signal."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = [list(arguments), str(folder), str(output)]
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Programme:
    """Runs commands in the folder `watched`, and counts what they do there; their inputs lie beside it."""

    def __init__(self, server: Server, folder: Path):
        self.folder, self.watched, self._server = folder, folder / "watched", server

    def run(self, arguments: Sequence[str], fault: Fault = Fault.NONE, at: int = 0, *, reads: bool = True) -> Result:
        """Run `lm_pcfg ARGUMENTS`. at: the operation at which the fault happens; reads: opening to read counts."""
        self._plan.write_bytes(_PLAN.pack(fault, at, reads, 0, 0))
        self._log.unlink(missing_ok=True)
        output = self.folder / "output"
        status = self._server.run(arguments, self.watched, output)
        return Result(status, output.read_text(encoding="utf-8"), _PLAN.unpack(self._plan.read_bytes())[3])

    @property
    def _plan(self) -> Path:
        return self.folder / "watched.plan"

    @property
    def _log(self) -> Path:
        return self.folder / "watched.log"

    def records(self) -> Iterator[Record]:
        """Yield the operations of the last command, but for those that were made to fail."""
        log = self._log.read_bytes()
        place = 0
        while place < len(log):
            operation, result, node, number, path_length, data_length = _RECORD.unpack_from(log, place)
            middle = place + _RECORD.size + path_length
            path, data = log[place + _RECORD.size : middle], log[middle : middle + data_length]
            yield Record(Operation(operation), result >= 0, node, number, os.fsdecode(path), data)
            place = middle + data_length


def serve(library: str) -> None:
    """Fork a process for every line of standard input; return in that process, ready to run the command."""
    for module in (
        "pandas", "pyarrow.parquet", "safetensors.torch", "torch._dynamo", "lm_pcfg.cli", "lm_pcfg.training.loop",
        "lm_pcfg.corpus.preparation.prepare",
    ):  # fmt: skip
        importlib.import_module(module)
    text = importlib.import_module("lm_pcfg.corpus.embedded.files")
    text.generate = functools.cache(text.generate)  # it takes seconds
    text.generate()
    for line in sys.stdin:
        arguments, watched, output = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            os.chdir(watched)
            for descriptor, target in ((0, os.devnull), (1, os.devnull), (2, output)):
                os.dup2(os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666), descriptor)
            os.environ |= {"LD_PRELOAD": library, "FILE_FAULTS": watched}  # for processes that it starts
            os.environ["XDG_CACHE_HOME"] = f"{watched}/cache"
            if ctypes.CDLL(library).watch_folder(os.fsencode(watched)):
                sys.exit("file_faults: seccomp does not work here")
            sys.argv = ["lm_pcfg", *arguments]
            return
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            for _ in range(3000):  # processes that it started end a moment later
                os.killpg(child, 0)
                time.sleep(0.01)
        print(status, flush=True)
    os._exit(0)


# ---- what a power cut leaves ----------------------------------------------------------------------------------------


@dataclass
class Node:
    """A file, a folder or a link: as it is, and as it is on disk for certain."""

    now: Any  # bytearray, dict of nodes by name, or str
    on_disk: Any = field(init=False)

    def __post_init__(self) -> None:
        self.on_disk = type(self.now)()  # an empty one, until it is fsynced
        if isinstance(self.now, str):
            self.sync()  # a link comes with its name

    def sync(self) -> None:
        self.on_disk = type(self.now)(self.now)


class Disk:
    """A folder whose operations are repeated in memory."""

    def __init__(self, folder: Path):
        self.folder, self._nodes = folder, dict[int, Node]()
        self.root = self._load(folder)

    def _load(self, path: Path) -> Node:
        if path.is_symlink():
            return Node(os.readlink(path))
        node = Node({entry.name: self._load(entry) for entry in path.iterdir()} if path.is_dir()
                    else bytearray(path.read_bytes()))  # fmt: skip
        node.sync()
        self._nodes[path.stat().st_ino] = node
        return node

    def _parent(self, path: str) -> tuple[dict[str, Node], str]:
        """Return the entries of the folder that has this name, and the name in it."""
        *above, name = Path(path).relative_to(self.folder).parts or ("",)
        entries = {"": self.root} if not name else self.root.now
        for part in above:
            entries = entries[part].now
        return entries, name

    def apply(self, record: Record) -> None:
        operation = record.operation
        if not record.succeeded:
            return
        if operation is Operation.WRITE:
            content = self._nodes[record.node].now
            content.extend(bytes(max(0, record.number - len(content))))
            content[record.number : record.number + len(record.data)] = record.data
        elif operation is Operation.TRUNCATE:
            content = self._nodes[record.node].now
            content.extend(bytes(max(0, record.number - len(content))))
            del content[record.number :]
        elif operation is Operation.SYNC:
            self._nodes[record.node].sync()
        elif operation is Operation.OPEN:
            self._open(record)
        elif operation is not Operation.CHANGE_MODE:
            self._rename(record)

    def _open(self, record: Record) -> None:
        if not record.number & (os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_RDWR):
            return
        entries, name = self._parent(record.path)
        if name not in entries:
            entries[name] = self._nodes[record.node] = Node(bytearray())
        if record.number & os.O_TRUNC:
            entries[name].now.clear()

    def _rename(self, record: Record) -> None:
        entries, name = self._parent(record.path)
        if record.operation is Operation.REMOVE:
            del entries[name]
        elif record.operation is Operation.SYMLINK:
            entries[name] = Node(os.fsdecode(record.data))
        elif record.operation is Operation.MAKE_FOLDER:
            entries[name] = self._nodes[record.node] = Node({})
        else:
            others, other = self._parent(os.fsdecode(record.data))
            if record.operation is Operation.LINK:
                others[other] = entries[name]
            elif record.number == 2:  # RENAME_EXCHANGE
                entries[name], others[other] = others[other], entries[name]
            else:
                others[other] = entries.pop(name)

    def now(self) -> Image:
        return _image(self.root, "now", "now")

    def after_power_cut(self, *, names_kept: bool = False) -> Image:
        """What was not fsynced is lost. names_kept: some file systems write names long before the content."""
        return _image(self.root, "now" if names_kept else "on_disk", "on_disk")


def _image(root: Node, names: str, contents: str) -> Image:
    image: Image = {}

    def visit(node: Node, path: str) -> None:
        if not isinstance(node.now, dict):
            image[path] = node.now if isinstance(node.now, str) else bytes(getattr(node, contents))
            return
        if path:
            image[path] = None
        for name, entry in getattr(node, names).items():
            visit(entry, f"{path}/{name}" if path else name)

    visit(root, "")
    return image


def read_image(folder: Path) -> Image:
    image: Image = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            image[name] = os.readlink(path)
        else:
            image[name] = None if path.is_dir() else path.read_bytes()
    return image


def write_image(folder: Path, image: Image) -> None:
    """Make the folder anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in sorted(image.items()):
        path = folder / name
        if content is None:
            path.mkdir()
        elif isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)


def run_command() -> None:
    """Run the command and end as the interpreter does, but leave its memory to the system, which is much faster."""
    from lm_pcfg import cli

    status: Any = 0
    try:
        cli.main()
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1])
    run_command()
