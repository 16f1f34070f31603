"""How the processes of a run find each other, also after a launcher has restarted some of them.

The store in which they leave their addresses may be the launcher's, and outlive them. Those who come after a restart
would take the addresses of the killed for those of the living; on several hosts, where each launcher restarts its own
processes in its own time, again and again. So they first agree on who they are.
"""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store

_LONGEST_PAUSE = 0.25  # seconds between two looks


def meet(store: Store, rank: int, world_size: int, patience: timedelta) -> Store:
    """A part of the store for exactly these processes, once all of them are there.

    Rank 0 opens a round and names it, the others put their own names down in it, and rank 0 closes it with the names it
    found. Whoever is not among them (its predecessor was) waits for the next round: rank 0 will notice that a process
    is gone, and be restarted, too.
    """
    own = uuid.uuid4().hex
    store.set_timeout(patience)
    if rank == 0:
        store.set("round", own)
        names = [own, *(store.get(f"{own}/{other}").decode() for other in range(1, world_size))]
        store.set(f"{own}/all", json.dumps(names))
        return PrefixStore(own, store)
    deadline = time.monotonic() + patience.total_seconds()
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
