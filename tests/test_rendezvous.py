"""Processes meet in a store that outlives them: the dead are never taken for the living."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from lm_pcfg.distributed import rendezvous as module
from lm_pcfg.distributed.rendezvous import meet, on_one_host, rendezvous
from lm_pcfg.errors import UserError

TIMEOUT = timedelta(seconds=20)


def test_those_who_meet_share_a_part_of_the_store_that_no_other_round_has():
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):  # restarts of all
            parts = list(pool.map(lambda rank: rendezvous(store, rank, 3, TIMEOUT), (2, 1, 0)))
            assert not parts[0].check(["address"])
            parts[0].set("address", "here")
            assert [part.get("address") for part in parts] == [b"here"] * 3


def test_a_restarted_process_waits_until_rank_0_is_restarted_too():
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        first = [pool.submit(rendezvous, store, rank, 2, TIMEOUT) for rank in (0, 1)]
        first[0].result().set("address", "of the dead")
        first[1].result()
        again = pool.submit(rendezvous, store, 1, 2, TIMEOUT)
        with pytest.raises(TimeoutError):  # while rank 0 is still in the round before
            again.result(timeout=1)
        rank_0 = pool.submit(rendezvous, store, 0, 2, TIMEOUT)
        assert not rank_0.result().check(["address"])
        again.result().set("address", "of the living")
        assert rank_0.result().get("address") == b"of the living"


def test_waiting_ends():
    store = HashStore()
    with pytest.raises(RuntimeError):
        rendezvous(store, 1, 2, timedelta(seconds=0.3))  # no rank 0 at all
    store.set("round", "of the dead")
    with pytest.raises(TimeoutError, match="Timed out"):
        rendezvous(store, 1, 2, timedelta(seconds=0.3))
    with pytest.raises(RuntimeError):
        rendezvous(store, 0, 2, timedelta(seconds=0.3))


# ---- one host -------------------------------------------------------------------------------------------------------

LISTENING = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
from lm_pcfg.distributed.rendezvous import meet
store, rank, size = meet(timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
dist.barrier()
own = set()
for number in os.listdir("/proc/self/fd"):
    try:
        own.add(os.readlink(f"/proc/self/fd/{number}"))
    except OSError:
        pass
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/self/net/{table}").read().splitlines()[1:]:
        columns = line.split()
        if columns[3] == "0A" and f"socket:[{columns[9]}]" in own:
            print(columns[1].split(":")[0], flush=True)
dist.barrier()
"""


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_processes_of_one_host_listen_on_the_loopback_interface_alone(tmp_path):
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment = {**os.environ, **launch, "TMPDIR": str(tmp_path)}  # nothing listens on this port
    for _ in range(2):  # a second launcher with the same port
        running = [
            subprocess.Popen([sys.executable, "-c", LISTENING], stdout=subprocess.PIPE, text=True,
                             env=environment | {"RANK": rank, "LOCAL_RANK": rank})
            for rank in "01"
        ]  # fmt: skip
        addresses = {line for one in running for line in one.communicate(timeout=120)[0].split()}
        assert [one.returncode for one in running] == [0, 0]
        assert addresses == {"0100007F"}  # 127.0.0.1
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("variables", "one"),
    [({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, True), ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, False),
     ({"WORLD_SIZE": "2"}, False)],
)  # fmt: skip
def test_what_the_launcher_says_of_hosts(monkeypatch, variables, one):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "MASTER_PORT": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    assert on_one_host() == one


def test_a_folder_that_others_can_use_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"lm_pcfg-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"lm_pcfg-{os.getuid()}").chmod(0o777)
    for name, value in {"RANK": "0", "MASTER_PORT": "1", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="not a folder that only you can use"):
        meet(TIMEOUT)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems name it otherwise")
@pytest.mark.parametrize("chosen", [None, "eth9"])
def test_gloo_and_nccl_are_told_of_the_loopback_interface_unless_the_user_chose_another(monkeypatch, tmp_path, chosen):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, chosen or "")  # so that it is as before afterwards
        if chosen is None:
            monkeypatch.delenv(name)
    for name, value in {"RANK": "0", "MASTER_PORT": "1", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    meet(TIMEOUT)
    assert [os.environ[name] for name in names] == [chosen or "lo"] * 2


@pytest.mark.parametrize(("rank", "size", "lines"), [("0", "2", 1), ("1", "2", 0), ("0", "1", 0)])
def test_the_launchers_open_store_is_told_by_one_process(monkeypatch, tmp_path, capsys, rank, size, lines):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "rendezvous", lambda store, *given: store)
    for name, value in {"RANK": rank, "MASTER_PORT": "77", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}.items():
        monkeypatch.setenv(name, value)
    meet(TIMEOUT)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    assert all("listens on port 77 of all interfaces: shield it (docs/clusters.md)" in line for line in said)
