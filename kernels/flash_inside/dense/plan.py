"""What depends on the lengths of a batch alone, on its device: made once, and kept for the next batch like it.

Without it every pass would copy tables of row numbers to the GPU, and wait for each of these copies. Batches have
sentences of similar length, so that the same lengths come again and again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flash_inside.dense.reference import kinds_of
from flash_inside.packing import Layout, Run, SplitRows

MOST_SPLITS_KEPT = 1 << 22  # of a chart; the rows of the others are computed block by block in each pass
MOST_BYTES = 1 << 27  # of the plans that are kept, all together


class Splits(NamedTuple):
    """One kind of split of a block of spans."""

    kind: str
    which: slice  # of all splits of a span
    left: Tensor  # [r, k] rows of the leaves or of beta, as the kind says
    right: Tensor


class Block(NamedTuple):
    """Some spans of a width."""

    rows: slice  # of the chart
    left: Tensor  # [r, width - 1] rows of the left parts of all splits
    right: Tensor
    splits: slice  # all these, among the splits of the chart
    kinds: list[Splits]


class Plan:
    """The layout of a batch, and its tables as tensors. `size` is how many bytes they take."""

    def __init__(self, lengths: Sequence[int], device: torch.device):
        self.layout, self.lengths, self.device = Layout(lengths), tuple(lengths), device
        layout = self.layout
        self.leaf_word = self._there(layout.leaf_word)  # [words] in the caller's packing
        self.sentence = self._there(layout.sentence_of_rows())  # [rows]
        self.top_rows = self._there(layout.tops())  # [B]
        order = np.array(layout.order)
        self.order = self._there(order)  # [B] the caller's number of a sorted sentence
        self.inverse = self._there(np.argsort(order))
        self.sorted = layout.sorted
        self.split_rows = SplitRows(layout, device, MOST_SPLITS_KEPT)
        of_widths = np.diff(layout.offset[1:]) * np.arange(layout.longest)  # how many splits there are
        self._first_split = np.concatenate(([0, 0], np.cumsum(of_widths)))  # of each width
        splits = int(of_widths.sum())
        self.complete = splits <= MOST_SPLITS_KEPT  # from the second pass on the host computes no rows
        self.splits_kept = splits if self.complete else 0  # of which passes keep what they computed
        self.size = (32 * splits if self.complete else 16 * MOST_SPLITS_KEPT) + 8 * (
            layout.rows + layout.words + 3 * len(order)
        )
        self.met: set[object] = set()  # which computations there were with these lengths (graphs.py)
        self._runs: dict[tuple[int, int, int], list[Run]] = {}
        self._blocks: dict[tuple[int, int], list[Block]] = {}

    def _there(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def blocks(self, width: int, step: int) -> Iterator[Block]:
        """Yield blocks of `step` spans of a width; they are kept if the plan is complete."""
        if not self.complete:
            yield from self._made(width, step)
            return
        if (width, step) not in self._blocks:
            with torch.inference_mode(False), torch.no_grad():
                self._blocks[width, step] = list(self._made(width, step))
        yield from self._blocks[width, step]

    def _made(self, width: int, step: int) -> Iterator[Block]:
        words = self.layout.words
        for rows, left, right in self.split_rows.blocks(width, step):
            kinds = []
            for kind, which in kinds_of(width):
                own = (table[:, which] for table in (left, right))
                numbers = (n.contiguous() if of == "P" else n - words for of, n in zip(kind, own, strict=True))
                kinds.append(Splits(kind, which, *numbers))
            first = int(self._first_split[width] + (rows.start - self.layout.offset[width]) * (width - 1))
            yield Block(rows, left, right, slice(first, first + left.numel()), kinds)

    def runs(self, width: int, rows: slice) -> list[Run]:
        """Return the runs of a block of the spans of a width: see `Layout.runs`."""
        key = width, rows.start, rows.stop
        if key not in self._runs:
            self._runs[key] = self.layout.runs(width, rows)
        return self._runs[key]

    def sort(self, values: Tensor) -> Tensor:
        """Bring values of the caller's sentences into the order of the layout; no copy where it is the same."""
        return values if self.sorted else values[self.order]

    def unsort(self, values: Tensor) -> Tensor:
        """Bring values of sorted sentences into the caller's order: a copy."""
        return values[self.inverse]


_plans: OrderedDict[tuple[tuple[int, ...], torch.device], Plan] = OrderedDict()


def plan_of(lengths: Sequence[int], device: torch.device) -> Plan:
    """Return the plan of a batch: the one of an earlier batch with these lengths, if it is still there."""
    key = tuple(lengths), device
    if key in _plans:
        _plans.move_to_end(key)
        return _plans[key]
    with torch.inference_mode(False), torch.no_grad():  # the next batch may need gradients
        plan = Plan(lengths, device)
    if plan.size <= MOST_BYTES:
        _plans[key] = plan
        while sum(kept.size for kept in _plans.values()) > MOST_BYTES:
            _plans.popitem(last=False)
    return plan


def clear() -> None:
    """Give back the memory of all plans."""
    _plans.clear()
