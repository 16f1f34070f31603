"""Files and folders that are complete or absent, and still there after a power cut.

They are written under a temporary name, fsynced and renamed, and the folder that has the name is fsynced; folders are
deleted the other way. A temporary name tells its owner, `.<purpose>-<name>.<host>.<pid>` of a folder or a link,
`<name>.<random>.<host>.<pid>.tmp` of a file, so that a later process can distinguish the work of a living process from
what a dead one left behind. What is read from elsewhere is a regular file of a size that was expected.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import re
import shutil
import socket
import stat
import time
import uuid
from pathlib import Path

_OWNER = r"\.(?P<host>[^.]+)\.(?P<pid>\d+)"
_TEMPORARY_NAME = re.compile(rf"\.(?P<purpose>writing|replaced|deleted)-(?P<name>.+){_OWNER}")
_TEMPORARY_FILE = re.compile(rf".+\.[0-9a-f]{{32}}(?:{_OWNER})?\.tmp")  # those of earlier versions have no owner
# Whether a process on another host lives cannot be asked; a folder untouched for this long is taken for abandoned.
_ABANDONED_AFTER_SECONDS = 3600.0


def temporary_name(final: Path, purpose: str = "writing") -> Path:
    """Return the name in the same folder under which this process writes `final` or deletes it."""
    return final.with_name(f".{purpose}-{final.name}.{_host()}.{os.getpid()}")


def put_in_place(prepared: Path, final: Path) -> None:
    """Give the prepared folder its final name. A folder that had that name ends up under a temporary one."""
    if not os.path.lexists(final):
        os.replace(prepared, final)
    elif not _exchange(prepared, final):
        # The file system cannot swap two names. A crash between the two renames leaves the old folder under the name
        # `.replaced-...`, from which remove_leftovers puts it back.
        set_aside = temporary_name(final, "replaced")
        os.replace(final, set_aside)
        try:
            os.replace(prepared, final)
        except OSError:
            os.replace(set_aside, final)
            raise
        shutil.rmtree(set_aside, ignore_errors=True)
    fsync(final.parent)


def delete(folder: Path) -> None:
    """Rename, then delete: after a crash in between no folder looks complete that is not (see remove_leftovers)."""
    doomed = temporary_name(folder, "deleted")
    os.replace(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
    fsync(folder.parent)  # or a power cut would bring it back, maybe into a run that has ended


def remove_leftovers(parent: Path) -> None:
    """Finish what dead processes began here: put back what they had set aside, delete what they had not completed."""
    for entry in parent.iterdir():
        match = _TEMPORARY_NAME.fullmatch(entry.name) or _TEMPORARY_FILE.fullmatch(entry.name)
        if match is None:
            continue
        found = match.groupdict()
        with contextlib.suppress(FileNotFoundError):  # another rank was quicker
            if _owner_may_live(entry, host=found["host"] or "", pid=int(found["pid"] or 0)):
                continue
            if found.get("purpose") == "replaced" and not os.path.lexists(entry.with_name(found["name"])):
                os.replace(entry, entry.with_name(found["name"]))
            elif entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)  # one that resists costs space only, and is tried again
            else:
                entry.unlink()


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and those above it, if they are not there, durably; return the new ones, inner ones first."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in {folder, *new}:  # the folder itself even if it is there: who made it may not have got so far
        fsync(path.parent)
    return new


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that is complete or absent, and there after a power cut."""
    # Process ids repeat in containers, and threads share one: the random part keeps writers apart.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.{_host()}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def read_file(path: Path, most: int) -> bytes:
    """Read a file of at most so many bytes; others are refused before they are read."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"{size:,} bytes are too many", str(path))
        return file.read(most)


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file to read it. Devices, which may have no end, and pipes, which may never begin, are refused."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def open_lock(path: Path) -> io.TextIOWrapper:
    """Open a file to lock it and to write to it, which is made if need be; what is no regular file is refused."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file (remove it)", str(path))
    return os.fdopen(descriptor, "a")


def reason(error: BaseException) -> str:
    """Return one line that says why; if a library wraps an I/O error, the system's own words."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} (ask its owner for access)" if error.errno == errno.EACCES else error.strerror
    if match := re.search(r"I/O error: (.+?)(?: \(os error \d+\))?$", str(error)):
        return match[1]
    return " ".join(str(error).split()) or type(error).__name__


def fsync(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():  # one may write into a folder that one may not list
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot fsync a folder; for a file it is an error like any other.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step (Linux renameat2); False where kernel or file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_current_folder, rename_exchange = -100, 2
    if renameat2(at_current_folder, os.fsencode(one), at_current_folder, os.fsencode(other), rename_exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _owner_may_live(entry: Path, host: str, pid: int) -> bool:
    if host != _host():
        return time.time() - entry.lstat().st_mtime < _ABANDONED_AFTER_SECONDS
    if pid == os.getpid():  # callers work one at a time, so an earlier process left it (in a container all are pid 1)
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # the second: a number that no process can have
        return False
    except PermissionError:
        return True  # it lives, and is another user's
    return True


def _host() -> str:
    return socket.gethostname().split(".")[0] or "unknown"
