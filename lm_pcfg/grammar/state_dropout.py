"""State dropout: each optimizer step keeps a random subset of the symbols, and the softmaxes run over the kept ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Kept(NamedTuple):
    """Sorted numbers of the symbols that take part in a step."""

    nonterminals: Tensor  # [kept N] of 0..N-1
    preterminals: Tensor  # [kept P] of 0..P-1

    def to(self, device: torch.device) -> Kept:
        return Kept(*(numbers.to(device, non_blocking=True) for numbers in self))


def draw_kept(nonterminals: int, preterminals: int, rate: float, *, seed: int, step: int) -> Kept | None:
    """The subset of a step: a function of (seed, step) alone, so it is the same on every rank. None = all symbols.

    Of 256 symbols and more the nearest multiple of 16 is kept: rows of any other length begin at odd addresses, and
    products of them are several times slower on a GPU.
    """
    if rate <= 0.0:
        return None
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, step, 0xD809])))

    def subset(size: int) -> Tensor:
        count = max(1, round(size * (1.0 - rate)))
        if size >= 256 and count < size:
            count = min(max(16, round(count / 16) * 16), (size - 1) // 16 * 16)
        # Those with the smallest random numbers: half the time of generator.choice.
        return torch.from_numpy(np.sort(np.argpartition(generator.random(size), count - 1)[:count]))

    return Kept(subset(nonterminals), subset(preterminals))
