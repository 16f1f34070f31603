"""Nothing that tests start outlives them, even if they are killed.

Each process that runs tests writes a mark of its own into its environment, which all that it starts inherit, and has a
watchdog: a small process that waits for its end, then kills whatever still has the mark, in whatever session or process
group it is. Linux only: elsewhere nothing is started. A forked process that runs no other programme has no mark.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MARK = "LM_PCFG_TESTS"  # /<of the outermost process>/<of one that it started>/..., so that each can end its own


def start() -> None:
    """Have everything killed that this process starts from now on, once it has ended."""
    if not hasattr(os, "pidfd_open"):
        return
    os.environ[MARK] = f"{os.environ.get(MARK, '')}/{uuid.uuid4().hex}"
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), os.environ[MARK]]
    nothing = subprocess.DEVNULL
    # Without a mark, so that no watchdog kills another; in a session of its own, so that no Ctrl-C reaches it.
    subprocess.Popen(command, env={}, cwd="/", stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)


def watch(process: int, mark: str) -> None:
    descriptor = os.pidfd_open(process)
    if os.getppid() == process:  # else it has ended already, and its number may be another's
        select.select([descriptor], [], [])
    deadline = time.monotonic() + 10
    while (found := marked(mark)) and time.monotonic() < deadline:  # again: one may have started another meanwhile
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """Return the living processes that were started with this mark, or with one below it."""
    wanted, found = f"\0{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in b"\0" + (folder / "environ").read_bytes():  # empty of a zombie
                found.append(int(folder.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2])
