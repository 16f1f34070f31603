"""How the processes of a run find each other: through a store of names and addresses that outlives none of its rounds.

Processes of one host meet in a file that only their user can read, and talk over the loopback interface. Processes of
several hosts meet in the launcher's store, which listens on all interfaces and asks for no password: docs/clusters.md
says what a network must shield.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import stat
import tempfile
import time
import uuid
from datetime import timedelta
from pathlib import Path

import torch.distributed
from torch.distributed import FileStore, PrefixStore, Store

from lm_pcfg.console import warn
from lm_pcfg.errors import UserError

_LONGEST_PAUSE = 0.25  # seconds between two looks into the store
_LOOPBACK = "lo"
_OLD = 7 * 24 * 3600.0  # seconds after which a file is taken for a dead launcher's


def meet(timeout: timedelta) -> tuple[Store, int, int]:
    """Wait for the other processes of the launcher; return a store of theirs alone, the rank and the world size."""
    store: Store
    if on_one_host():
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = FileStore(str(_file()), world_size)
        use_loopback()
    else:
        store, rank, world_size = next(torch.distributed.rendezvous("env://", timeout=timeout))
    if rank == 0 and world_size > 1:
        port = os.environ.get("MASTER_PORT", "?")
        warn(f"the launcher's store listens on port {port} of all interfaces: shield it (docs/clusters.md)")
    return rendezvous(store, rank, world_size, timeout), rank, world_size


def on_one_host() -> bool:
    """Whether the launcher says that all processes are on this host."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    return all(name in os.environ for name in names) and os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]


def use_loopback() -> None:
    """Have gloo and NCCL listen on the loopback interface alone, unless the user chose another; macOS has no `lo`."""
    if _LOOPBACK in [name for _, name in socket.if_nameindex()]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK)


def _file() -> Path:
    """Name a file that all processes of this launcher agree on, in a folder of this user.

    The launcher holds its port while it lives. A file that an earlier one with this port left behind does no harm: see
    `rendezvous`.
    """
    folder = Path(tempfile.gettempdir()) / f"lm_pcfg-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    mode = folder.lstat()
    if not stat.S_ISDIR(mode.st_mode) or mode.st_uid != os.getuid() or mode.st_mode & 0o077:
        raise UserError(f"{folder} is not a folder that only you can use; remove it, or set TMPDIR")
    for old in folder.iterdir():  # of processes that were killed
        with contextlib.suppress(FileNotFoundError):
            if time.time() - old.stat().st_mtime > _OLD:
                old.unlink()
    try:
        network = os.readlink("/proc/self/ns/net")  # two containers may share a folder, and have the same port
    except OSError:
        network = ""
    launch = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "WORLD_SIZE")]
    return folder / hashlib.sha256(json.dumps([*launch, socket.gethostname(), network]).encode()).hexdigest()[:32]


def rendezvous(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Wait until all processes are there, and return a part of the store that is theirs alone.

    The store may be the launcher's, and outlive the processes. Those that a launcher starts again would take the
    addresses of the killed for those of the living; on several hosts, where each launcher restarts its own processes in
    its own time, again and again. So they first agree on who they are: rank 0 opens a round and names it, the others
    put their own names down in it, and rank 0 closes it with the names it found. Whoever is not among them (its
    predecessor was) waits for the next round: rank 0 will notice that a process is gone, and be restarted, too.
    """
    own = uuid.uuid4().hex
    store.set_timeout(timeout)
    if rank == 0:
        store.set("round", own)
        names = [own, *(store.get(f"{own}/{other}").decode() for other in range(1, world_size))]
        store.set(f"{own}/all", json.dumps(names))
        return PrefixStore(own, store)
    deadline = time.monotonic() + timeout.total_seconds()
    entered, pause = "", 0.01
    while time.monotonic() < deadline:
        current = store.get("round").decode()
        if current != entered:
            store.set(f"{current}/{rank}", own)
            entered, pause = current, 0.01
        elif store.check([f"{current}/all"]) and own in json.loads(store.get(f"{current}/all")):
            return PrefixStore(current, store)
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
    raise TimeoutError("Timed out: rank 0 and the others did not meet")
