"""The chart of the triton backend: its memory, its tables on the device, and the passes over the widths.

Per width, forward: split sum, (division by the row's maximum,) one product. Per width, backward: gathered derivative,
one product. Nothing here waits for the GPU, so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from flash_inside.packing import Layout
from flash_inside.precision import LARGEST_D_OF_TRITON
from flash_inside.triton import gradient_kernels, kernels
from flash_inside.triton.outside_kernel import outside_kernel
from flash_inside.triton.weights import AnyWeights

#: Programs that look through the derivatives of a sentence's spans of one width.
PARTS_OF_WIDTH = 4

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


def check_sentences(count: int) -> None:
    """Refuse too many sentences: a grid has at most 65,535 programs along its second and third axes."""
    if count > 65_535:
        raise ValueError(f"{count:,} sentences are too many for one launch on a GPU; at most 65,535, split the batch")


def _rows_of_width(leaves: Tensor, beta: Tensor, rows: slice, words: int) -> Tensor:
    return leaves if rows.start < words else beta[rows.start - words : rows.stop - words]


class Launcher:
    """Launches a kernel for width after width. The first launch compiles it, the others call what was compiled.

    They skip Triton's look at every argument, most of the cost of a launch. So arguments must keep their types,
    alignment and divisibility, as they do from width to width.
    """

    def __init__(self, kernel: Any, warps: int, **constants: int | bool):
        self.kernel, self.warps, self.constants = kernel, warps, constants
        self.compiled: Any = None

    def __call__(self, grid: tuple[int, int, int], *arguments: Tensor | int) -> None:
        if self.compiled is None:
            self.compiled = self.kernel[grid](*arguments, **self.constants, num_warps=self.warps)
        else:
            self.compiled[grid](*arguments, *self.constants.values())


class Blocks(NamedTuple):
    """How a kernel over [splits, N] is cut up."""

    columns: int
    splits: int
    warps: int

    def count(self, n: int) -> int:
        return triton.cdiv(n, self.columns)


# Measured on an H200. A program's threads lie along the row, 16 bytes each, so that sums over splits stay in a thread.
def split_sum_blocks(n: int) -> Blocks:
    if n > 1024:
        return Blocks(1024, 1, 4)
    columns = max(16, triton.next_power_of_2(n))
    return Blocks(columns, max(2, min(16, 2048 // columns)), 4 if columns > 128 else 2)


def outside_blocks(n: int) -> Blocks:
    columns = max(16, min(1024, triton.next_power_of_2(n)))
    return Blocks(columns, max(1, min(8, 1024 // columns)), 4 if columns > 128 else 2)


#: Fewer programs than this leave memory idle while each waits for one split after the other: each takes some at a time.
FEW_PROGRAMS, SPLITS_OF_FEW = 1024, 4


class Launchers:
    """A Launcher of a kernel over [SPLITS, BLOCK] for widths with many spans, and one for those with few."""

    def __init__(self, kernel: Any, warps: int, **constants: int | bool):
        splits = constants["SPLITS"]
        self.many = self.few = Launcher(kernel, warps, **constants)
        if splits < SPLITS_OF_FEW:
            self.few = Launcher(kernel, warps, **constants | {"SPLITS": SPLITS_OF_FEW})

    def __call__(self, grid: tuple[int, int, int], *arguments: Tensor | int) -> None:
        launch = self.few if grid[0] * grid[1] * grid[2] < FEW_PROGRAMS else self.many
        launch(grid, *arguments)


def root_stride(root: Tensor) -> int:
    """Return how far the roots of two sentences are apart: 0 if they have one root."""
    return root.stride(0) if root.dim() == 2 else 0


def row_block(columns: int) -> int:
    """Return the block of a kernel that walks along one row."""
    return max(16, min(1024, triton.next_power_of_2(columns)))


class Precise:
    """The sentences of a layout whose rows keep what rounding left (see kernels.py): the last ones, or none."""

    def __init__(self, layout: Layout, first: int):
        self.first = first  # sorted sentence
        self.words_before = int(layout.lengths[:first].sum())
        self.words = layout.words - self.words_before
        self.offset = np.zeros_like(layout.offset)
        if self.words:
            tail = Layout(layout.lengths[first:].tolist()).offset
            self.offset[:] = tail[-1]
            self.offset[: len(tail)] = tail
        self.rows = int(self.offset[-1])

    @classmethod
    def short_sentences(cls, layout: Layout, most_words: int) -> Precise:
        return cls(layout, int(np.searchsorted(-layout.lengths, -most_words)))

    @classmethod
    def none(cls, layout: Layout) -> Precise:
        return cls(layout, len(layout.lengths))

    def span_rows(self, width: int) -> slice:
        return slice(int(self.offset[width]), int(self.offset[width + 1]))


class Tables:
    """The layout as the kernels read it: seven tables of int64 in one buffer, each 16-byte aligned."""

    NAMES = ("offset", "prefix", "capacity", "lengths", "order", "word_of_leaf", "offset_residual")

    def __init__(self, packed: Tensor, sizes: list[int]):
        starts = np.cumsum([0, *(size + size % 2 for size in sizes)])
        self.packed = packed
        self.offset, self.prefix, self.capacity, self.lengths, self.order, self.word_of_leaf, self.offset_residual = (
            packed[start : start + size] for start, size in zip(starts[:-1].tolist(), sizes, strict=True)
        )
        self.limits: Tensor | None = None  # int32 [words, 2], caller's order, where trees have brackets

    @classmethod
    def of(cls, layout: Layout, precise: Precise, device: torch.device) -> Tables:
        """Copy the tables of a layout to the device, all at once and asynchronously."""
        order = np.array(layout.order, dtype=np.int64)
        position = [layout.offset, layout.prefix, layout.lengths, layout.lengths]
        return cls.from_arrays([*position, order, layout.leaf_word, precise.offset], device)

    @classmethod
    def from_arrays(cls, arrays: list[np.ndarray], device: torch.device) -> Tables:
        padded = [np.append(array, 0) if array.size % 2 else array for array in arrays]
        packed = torch.from_numpy(np.concatenate(padded))
        if device.type == "cuda":
            packed = packed.pin_memory().to(device, non_blocking=True)
        return cls(packed, [array.size for array in arrays])

    @property
    def position(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.offset, self.prefix, self.capacity, self.lengths

    @property
    def brackets(self) -> tuple[Tensor, Tensor]:
        """Limits and where to find a word's; without brackets something that is not read."""
        return self.word_of_leaf if self.limits is None else self.limits, self.word_of_leaf


class SavedChart(NamedTuple):
    """What the gradients need of a chart."""

    leaves: Tensor
    beta: Tensor
    d_children: Tensor
    top_sum: Tensor
    usable: Tensor


@dataclass
class ChartResults:
    """What a pass leaves behind. Rows are those of the layout, sentences are sorted unless said otherwise."""

    leaves: Tensor  # [words, P] storage type: e~
    beta: Tensor  # [rows - words, N] storage type: beta~
    d_children: Tensor  # [rows below the longest width, 2N] storage type: D_eta | D_zeta for an incoming gradient of 1
    top_sum: Tensor  # [B] root . beta~
    usable: Tensor  # [B] int8: has derivatives
    log_z: Tensor  # [B] fp32, caller's order
    trusted: Tensor  # [B] int8, caller's order
    posterior: Tensor  # [rows] fp32, or empty if it is not wanted

    @classmethod
    def allocate(
        cls, layout: Layout, n: int, p: int, storage: torch.dtype, allocate: Allocate, with_posterior: bool = False
    ) -> ChartResults:
        sentences, words, rows, single = len(layout.lengths), layout.words, layout.rows, torch.float32
        return cls(
            leaves=allocate((words, p), storage),
            beta=allocate((rows - words, n), storage),
            d_children=allocate((int(layout.offset[layout.longest]), 2 * n), storage),
            top_sum=allocate((sentences,), single),
            usable=allocate((sentences,), torch.int8),
            log_z=allocate((sentences,), single),
            trusted=allocate((sentences,), torch.int8),
            posterior=allocate((rows if with_posterior else 0,), single),
        )

    @property
    def saved(self) -> SavedChart:
        return SavedChart(self.leaves, self.beta, self.d_children, self.top_sum, self.usable)


@dataclass
class Chart(ChartResults):
    """A pass over the widths: its results, and working memory that is free again once the pass is over."""

    children: Tensor  # like d_children: eta | zeta
    d_beta: Tensor  # [rows below the longest width - words, N] storage type
    scale: Tensor  # [rows] fp64: t
    row_largest: Tensor  # [rows] fp32: what beta~ was divided by
    unscaled: Tensor  # [spans of two words, N] fp32: a width's rows before the division
    block_largest: Tensor  # [spans of two words, blocks] fp32
    largest: Tensor  # [rows below the longest width, blocks] fp32: largest |D|
    largest_of_width: Tensor  # [widths, parts, B] fp32
    # What rounding left of the rows of precise sentences, laid out as `precise` says:
    leaves_residual: Tensor
    beta_residual: Tensor
    children_residual: Tensor
    # ... and for products of them: all rows of a width, then the residuals of the precise ones
    factors: Tensor  # [(words + precise words) max(N, P)] storage type
    products: Tensor  # [words + precise words, 2N] fp32
    precise: Precise

    @classmethod
    def around(cls, results: ChartResults, layout: Layout, precise: Precise, allocate: Allocate) -> Chart:
        """Make the chart that writes these results."""
        p, n, storage = results.leaves.shape[1], results.beta.shape[1], results.leaves.dtype
        sentences, words, rows, longest = len(layout.lengths), layout.words, layout.rows, layout.longest
        below_longest = int(layout.offset[longest])
        two_words = int(layout.offset[3] - layout.offset[2]) if longest > 1 else 0
        split_blocks, single = split_sum_blocks(n).count(n), torch.float32
        in_products = words + precise.words if precise.words else 0
        return cls(
            **vars(results),
            children=allocate((below_longest, 2 * n), storage),
            d_beta=allocate((max(below_longest - words, 0), n), storage),
            scale=allocate((rows,), torch.float64),
            row_largest=allocate((rows,), single),
            unscaled=allocate((two_words if split_blocks > 1 else 0, n), single),
            block_largest=allocate((two_words, split_blocks), single),
            largest=allocate((below_longest, outside_blocks(n).count(n)), single),
            largest_of_width=allocate((longest, PARTS_OF_WIDTH, sentences), single),
            leaves_residual=allocate((precise.words, p), storage),
            beta_residual=allocate((precise.rows - precise.words, n), storage),
            children_residual=allocate((precise.rows, 2 * n), storage),
            factors=allocate((in_products * max(n, p),), storage),
            products=allocate((in_products, 2 * n), single),
            precise=precise,
        )

    def compute(self, weights: AnyWeights, root: Tensor, emissions: Tensor, layout: Layout, tables: Tables) -> None:
        """Fill the chart.

        root: [N] or [N+P] fp32, or [B, ...] of sorted sentences; emissions: [words, P] contiguous, caller's order
        """
        self.inside(weights, root, emissions, layout, tables)
        self.outside(weights, root, layout, tables)
        self._judge(root.shape[-1] > weights.n, LARGEST_D_OF_TRITON / weights.reach, layout, tables)

    def inside(self, weights: AnyWeights, root: Tensor, emissions: Tensor, layout: Layout, tables: Tables) -> None:
        n, p, words, longest = weights.n, emissions.shape[1], layout.words, layout.longest
        precise, any_precise = self.precise, self.precise.words > 0
        kernels.leaf_kernel[(words,)](
            emissions, tables.word_of_leaf, self.leaves, self.leaves_residual, self.scale, p, precise.words_before,
            PRECISE=any_precise, BLOCK=row_block(p),
        )  # fmt: skip
        unite = Launcher(kernels.unite_kernel, 4, BLOCK=1024)
        if longest > 1:
            self._to_children(weights, 1, layout, unite)
        blocks = split_sum_blocks(n)
        count = blocks.count(n)
        split_sum = Launchers(
            kernels.split_sum_kernel, blocks.warps, BRACKETED=tables.limits is not None, PRECISE=any_precise,
            BLOCK=blocks.columns, SPLITS=blocks.splits, SCALES=64, ONE_BLOCK=count == 1,
        )  # fmt: skip
        blocks_there = triton.next_power_of_2(count)
        normalise = Launcher(kernels.normalise_kernel, 4, PRECISE=any_precise, BLOCK=1024, BLOCKS=blocks_there)
        for width in range(2, longest + 1):
            here = layout.span_rows(width)
            split_sum(
                (count, longest - width + 1, layout.alive[width]),
                self.children, self.children_residual, self.scale, self.beta, self.beta_residual, self.unscaled,
                self.block_largest, self.row_largest, *tables.position, tables.offset_residual, *tables.brackets, width,
                words, precise.first, precise.words_before, n,
            )  # fmt: skip
            if count > 1:
                residual, spans = precise.span_rows(width), here.stop - here.start
                normalise(
                    (spans, triton.cdiv(n, 1024), 1),
                    self.unscaled, self.block_largest, self.beta, self.beta_residual, self.scale, self.row_largest,
                    here.start, words, n, count, spans - (residual.stop - residual.start),
                    residual.start - precise.words,
                )  # fmt: skip
            if width < longest:
                self._to_children(weights, width, layout, unite)
        kernels.top_kernel[(len(layout.lengths),)](
            self.beta, self.leaves, self.beta_residual, self.leaves_residual, root, self.top_sum,
            tables.offset, tables.prefix, tables.lengths, tables.offset_residual, words, precise.first,
            precise.words_before, n, p, root_stride(root),
            ONE_WORD=root.shape[-1] > n, PRECISE=any_precise, BLOCK=row_block(n),
        )  # fmt: skip

    def _to_children(self, weights: AnyWeights, width: int, layout: Layout, unite: Launcher) -> None:
        """Compute eta | zeta of a width, and their residuals."""
        here, residual = layout.span_rows(width), self.precise.span_rows(width)
        rows = _rows_of_width(self.leaves, self.beta, here, layout.words)
        residuals = _rows_of_width(self.leaves_residual, self.beta_residual, residual, self.precise.words)
        count, precise_count = rows.shape[0], residuals.shape[0]
        if not precise_count:
            weights.to_children(rows, self.children[here], width)
            return
        weights.with_residuals(rows, residuals, self.factors, self.products, width)
        unite(
            (count, triton.cdiv(2 * weights.n, 1024), 1), self.products, self.children, self.children_residual,
            here.start, residual.start, count, count - precise_count, weights.n,
        )  # fmt: skip

    def outside(self, weights: AnyWeights, root: Tensor, layout: Layout, tables: Tables) -> None:
        """Compute derivatives for an incoming gradient of 1 a sentence, from the widest spans down."""
        n, words, longest, stride = weights.n, layout.words, layout.longest, root_stride(root)
        blocks = outside_blocks(n)
        outside = Launchers(outside_kernel, blocks.warps, BLOCK=blocks.columns, SPLITS=blocks.splits)
        for width in range(longest - 1, 0, -1):
            here = layout.span_rows(width)
            outside(
                (blocks.count(n), longest - width + 1, layout.alive[width]),
                self.children, self.d_beta, self.d_children, self.scale, self.largest, root, self.top_sum,
                *tables.position, width, words, n, stride,
            )  # fmt: skip
            if width > 1:
                target = self.d_beta[here.start - words : here.stop - words]
                weights.from_children(self.d_children[here], target, width)

    def _judge(self, one_word: bool, largest_d: float, layout: Layout, tables: Tables) -> None:
        """Compute posteriors if wanted, log Z, and which sentences are trusted; the others lose their derivatives."""
        n, longest, sentences = self.beta.shape[1], layout.longest, len(layout.lengths)
        with_posterior = self.posterior.shape[0] > 0
        count = outside_blocks(n).count(n)
        gradient_kernels.posterior_kernel[(longest, PARTS_OF_WIDTH, sentences)](
            self.beta, self.d_beta, self.largest, self.row_largest, self.scale, self.posterior, self.largest_of_width,
            *tables.position, *tables.brackets, layout.words, n, count, BRACKETED=tables.limits is not None,
            POSTERIOR=with_posterior, PARTS=PARTS_OF_WIDTH, BLOCK=row_block(n), BLOCKS=triton.next_power_of_2(count),
        )  # fmt: skip
        gradient_kernels.verdict_kernel[(sentences,)](
            self.top_sum, self.scale, self.largest_of_width, self.log_z, self.trusted, self.usable, tables.offset,
            tables.prefix, tables.lengths, tables.order, self.row_largest, largest_d,
            ONE_WORD=one_word, PARTS=PARTS_OF_WIDTH, BLOCK=64,
        )  # fmt: skip
        gradient_kernels.clear_kernel[(longest, sentences)](
            self.d_children, self.usable, self.posterior, tables.offset, tables.prefix, tables.capacity, n,
            POSTERIOR=with_posterior, BLOCK=row_block(2 * n),
        )  # fmt: skip
