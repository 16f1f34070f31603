"""Gradients of the inputs from a finished chart: the products that are left once the incoming gradient is known."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from flash_inside.packing import Layout
from flash_inside.triton import gradient_kernels as kernels
from flash_inside.triton.chart import Allocate, SavedChart, Tables, root_stride, row_block
from flash_inside.triton.weights import AnyWeights, FactoredWeights

RuleMemory = tuple[Tensor, Tensor]


class Gradients(NamedTuple):
    root: Tensor | None
    left: Tensor | None
    right: Tensor | None
    emissions: Tensor | None
    inner: Tensor | None = None  # of `FactoredRules`


class Wanted(NamedTuple):
    """Which gradients to compute, in which types."""

    root: torch.dtype | None
    rules: torch.dtype | None
    emissions: torch.dtype | None


def computed_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type to compute in: fp32 for fp16 tensors, as counts over small probabilities leave its range."""
    return torch.float32 if dtype == torch.float16 else dtype


def gradients(
    chart: SavedChart,
    weights: AnyWeights,
    root: Tensor,
    d_log_z: Tensor,
    words_given: int,
    layout: Layout,
    tables: Tables,
    wanted: Wanted,
    allocate: Allocate,
    allocate_working: Allocate,
    memory: RuleMemory | None = None,
) -> Gradients:
    """Compute the gradients of the inputs.

    root: [N] or [N+P] fp32, or [B, ...] of sorted sentences; d_log_z: [B] fp32 in the caller's order; words_given: rows
    of the emissions.
    memory: where the gradients of left and right are to lie, if not in new memory.
    """
    n, p, words, sentences = weights.n, chart.leaves.shape[1], layout.words, len(layout.lengths)
    longest, storage, one_word = layout.longest, chart.leaves.dtype, root.shape[-1] > n
    grammars = tuple(root.shape[:-1])  # one for all, or [B]
    d_root = d_emissions = None
    d_rules: list[Tensor | None] = [None, None]
    if wanted.rules is not None:
        of_rules = [*(memory or (allocate((*grammars, n, weights.middle + p), wanted.rules) for _ in range(2)))]
        if isinstance(weights, FactoredWeights):
            of_rules.append(allocate((weights.middle, n), wanted.rules))
        d_rules = [*of_rules]
        leaves = _weigh(chart.leaves, 1, 1, d_log_z, chart.usable, layout, tables, allocate_working)
        beta = _weigh(chart.beta, 2, longest - 1, d_log_z, chart.usable, layout, tables, allocate_working)
        weights.write_counts(chart.d_children, leaves, beta, of_rules)
    if wanted.emissions is not None:
        d_leaves = allocate_working((words, p), storage)
        if longest > 1:
            weights.from_children(chart.d_children[:words], d_leaves, 1)
        d_emissions = allocate((words_given, p), wanted.emissions)
        kernels.emission_gradient_kernel[(longest, sentences)](
            d_leaves, chart.leaves, root, chart.top_sum, chart.usable, d_log_z, d_emissions,
            tables.word_of_leaf, tables.prefix, tables.lengths, tables.order, n, p,
            root_stride(root), ONE_WORD=one_word, BLOCK=row_block(p),
        )  # fmt: skip
    if wanted.root is not None:
        size = root.shape[-1]
        d_root = allocate((*grammars, size), wanted.root)
        kernels.root_gradient_kernel[(triton.cdiv(size, 128), *grammars)](
            chart.beta, chart.leaves, chart.top_sum, chart.usable, d_log_z, d_root, tables.offset, tables.prefix,
            tables.lengths, tables.order, sentences, words, n, p, size, PER_SENTENCE=bool(grammars), BLOCK=128,
        )  # fmt: skip
    d_left, d_right, *d_inner = d_rules
    return Gradients(d_root, d_left, d_right, d_emissions, *d_inner)


def _weigh(
    rows: Tensor,
    first_width: int,
    widths: int,
    d_log_z: Tensor,
    usable: Tensor,
    layout: Layout,
    tables: Tables,
    allocate: Allocate,
) -> Tensor:
    """Multiply chart rows [R, K] from a width on by the incoming gradient of their sentence."""
    weighted = allocate(tuple(rows.shape), rows.dtype)
    if rows.shape[0]:
        kernels.weigh_kernel[(widths, layout.longest - first_width + 1, len(layout.lengths))](
            rows, weighted, usable, d_log_z, tables.offset, tables.prefix, tables.capacity, tables.order,
            layout.span_rows(first_width).start, rows.shape[1], FIRST=first_width, BLOCK=row_block(rows.shape[1]),
        )  # fmt: skip
    return weighted
