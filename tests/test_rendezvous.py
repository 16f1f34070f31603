"""Processes meet in a store that outlives them: the dead are never taken for the living."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from lm_pcfg.distributed.engine import rendezvous

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
