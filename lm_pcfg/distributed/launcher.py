"""The process that started this one, `accelerate launch`, torchrun or a search: a worker tells it why it fails, and
does not outlive it. Linux tells of its death by a signal, if asked to; elsewhere the parent's number changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

# What only `accelerate launch` and torchrun set, which are Python programs.
_OF_PROGRAMS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")
#: Set for the runs that a search trains at once.
OF_A_SEARCH = "LM_PCFG_SEARCH"
_started_by: int | None = None  # the launcher's process, as it was when this one began
_started_with: list[str] = []  # the launcher's command


class LauncherGone(SystemExit):
    """Raised when the launcher is gone before there is anything to save."""


def has_launcher() -> bool:
    """Whether a launcher started this process (as far as the environment tells)."""
    return any(name in os.environ for name in ("LOCAL_RANK", OF_A_SEARCH, *_OF_PROGRAMS))


def is_gone() -> bool:
    """Whether this process had a launcher that is gone now."""
    return _started_by is not None and has_launcher() and os.getppid() != _started_by


def follow() -> None:
    """Have the system send this process a SIGTERM when its launcher dies (Linux). Call it as early as can be.

    If it died even earlier, no signal comes: then this process has another parent already, and leaves.
    """
    global _started_by, _started_with
    if not has_launcher():
        return
    first = _started_by is None
    if _started_by is None:
        _started_by = os.getppid()
        _started_with = _command_of(_started_by)
    if not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if first and (_took_over(_started_by) or is_gone()):
        print("lm_pcfg: the launcher of this process is gone, it leaves, too", file=sys.stderr, flush=True)
        raise LauncherGone(1)


def _took_over(parent: int) -> bool:
    """Whether the parent is no launcher, but init or whoever takes in orphans (systemd, a container's tini, ...).

    Only its looks tell: launchers are Python; a wrapper between them and this process (a shell script) has their
    variables. A process started in another way (LOCAL_RANK alone) may have any parent.
    """
    if not any(name in os.environ for name in _OF_PROGRAMS):
        return False
    try:
        program = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")[0]
        if os.path.basename(program).startswith((b"python", b"pypy", b"accelerate", b"torchrun")):
            return False
        variables = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
    except PermissionError:  # another user's: init, or what started a container
        return parent == 1
    except OSError:  # outside of this container, or it has just died
        return False
    if variables == [b""]:  # it dies, or the system is still loading its program: nothing to tell it by
        return parent == 1
    return not any(line.startswith(name.encode() + b"=") for line in variables for name in _OF_PROGRAMS)


def identity() -> str:
    """Identify the process that started this one by host, number and age, so that no other is taken for it."""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:  # no Linux: without its age
        started = ""
    return f"{socket.gethostname()} {parent} {started}".strip()


def command_line() -> list[str]:
    """Return the words that started this process's launcher; none without one, or where the system does not say."""
    return _started_with


def _command_of(process: int) -> list[str]:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return []
    return [os.fsdecode(word) for word in words]


def tell_failure(line: str) -> None:
    """Leave a line for torchrun's summary of a failed job, which shows that of the process that failed first."""
    named = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not named:
        return
    # As torch.distributed.elastic reads it; without a call stack it shows the message.
    content = {"message": {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}}
    beside = Path(f"{named}.{os.getpid()}")
    with contextlib.suppress(OSError):  # what was said on standard error has to do
        beside.write_text(json.dumps(content), encoding="utf-8")
        os.replace(beside, named)  # never half of it, should the launcher end this process meanwhile
