"""Processes that share the batches of a text: `accelerate launch -m lm_pcfg score ...`, and `parse` and `evaluate`.

Rank 0 reads the text, prints and writes. All ranks form the same batches, each computes some of them, and all get all
results: what follows is what one process would do, to the last digit. Every step of theirs begins with `agree`, so
that a rank can tell the others at any time that it has failed.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed

from flash_inside import Statistics
from lm_pcfg import console
from lm_pcfg.distributed import launcher
from lm_pcfg.distributed.collectives import Collectives, lost_contact_reported
from lm_pcfg.distributed.rendezvous import meet
from lm_pcfg.errors import FailedElsewhere, LostContact, UserError

Item = TypeVar("Item")
Value = TypeVar("Value")

TIME_TO_MEET = timedelta(minutes=10)
#: For the slowest rank's share of a block. A rank that dies is noticed at once; this is for a host that falls silent.
TIME_TO_ANSWER = timedelta(hours=1)
_FAILED, _ENOUGH = "failed", "enough"


class Ranks(Collectives):
    """The processes that share the work. One process alone does all of it, and waits for nobody."""

    def __init__(self, rank: int = 0, world_size: int = 1):
        super().__init__(rank, world_size, torch.device("cpu"))
        self._over = False  # all know that one has failed

    def agree(self, failure: Exception | None = None) -> None:
        """As of all collectives; and once a reader has had enough of the output, all end without an error."""
        if self.world_size == 1 and failure is None:
            return
        own = "" if failure is None else _ENOUGH if isinstance(failure, BrokenPipeError) else _FAILED
        states = super().all_gather(own)
        first = next((rank for rank, state in enumerate(states) if state), None)
        if first is None:
            return
        self._over = True
        if first == self.rank and failure is not None:
            raise failure
        if states[first] == _ENOUGH:  # whoever reads the output has had enough of it
            raise SystemExit(0)
        raise FailedElsewhere("another process failed")

    def all_gather(self, value: Value) -> list[Value]:
        self.agree()
        return super().all_gather(value)

    def on_main(self, action: Callable[[], Value]) -> Value:
        """Run the action on the main process and send its result to all."""
        result = self.on_all(action if self.is_main else lambda: None)
        return self.broadcast(result)  # type: ignore[return-value]

    def share(
        self, items: Sequence[Item], compute: Callable[[Item], Value], on_done: Callable[[Item], None] | None = None
    ) -> list[Value]:
        """Return what `compute` makes of every item, in their order. Each rank takes every world_size-th item.

        on_done: called with an item when it is done, here or (as a guess, until the end) on another rank.
        """

        def own() -> list[Value]:
            values = []
            for first in range(0, len(items), self.world_size):
                if first + self.rank < len(items):
                    values.append(compute(items[first + self.rank]))
                for item in items[first : first + self.world_size]:
                    if on_done is not None:
                        on_done(item)
            return values

        values: list[Any] = [None] * len(items)
        for rank, some in enumerate(super().all_gather(self.on_all(own))):
            values[rank :: self.world_size] = some
        return values

    def summed(self, compute: Callable[[], np.ndarray]) -> np.ndarray:
        """Sum what each rank computes, fp64. It is exact where all ranks but one have 0."""
        own = self.on_all(compute)
        return self.all_reduce(torch.from_numpy(own)).numpy()

    def least(self, value: float) -> float:
        """The least of all ranks' values: what fits into the memory of every host, say."""
        return min(self.all_gather(value))

    def add_up(self, statistics: Statistics) -> None:
        """Make the counts of this rank those of all. Call it once, at the end."""
        for field in fields(statistics):
            setattr(statistics, field.name, sum(self.all_gather(getattr(statistics, field.name))))


ALONE = Ranks()


@contextmanager
def shared_work() -> Iterator[Ranks]:
    """Meet the other processes of the launcher, if there are any, and end together with them."""
    launcher.follow()
    broken = None
    with lost_contact_reported():
        ranks = _join()
        try:
            yield ranks
            ranks.agree()
            atexit.register(_leave)  # not after a failure: others might not answer
        except (FailedElsewhere, LostContact):
            raise
        except BrokenPipeError as error:  # of standard output; not a lost contact
            broken = error
            _tell(ranks, error)
        except (UserError, OSError) as error:
            _tell(ranks, error)
            raise
    if broken is not None:
        raise broken


def _tell(ranks: Ranks, error: Exception) -> None:
    """Tell the others of an error between two steps, unless they know or are gone."""
    if ranks.world_size == 1 or ranks._over:
        return
    try:
        ranks.agree(error)
    except FailedElsewhere:  # the same error, and another rank says it
        raise
    except Exception:  # the error itself, or a lost contact, which says less
        return


def _join() -> Ranks:
    world_size = os.environ.get("WORLD_SIZE", "1")
    if "LOCAL_RANK" not in os.environ:
        if world_size != "1":
            raise UserError(
                f"WORLD_SIZE says that this is one of {world_size} processes, but LOCAL_RANK does not say which; use "
                "accelerate launch or torchrun, or unset it for one process"
            )
        return ALONE
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if world_size == "1":
        return ALONE
    store, rank, size = meet(TIME_TO_MEET)
    # Results travel through the memory of the hosts, wherever they were computed.
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIME_TO_ANSWER)
    if rank:
        console.leave_to_main()
    return Ranks(rank, size)


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
