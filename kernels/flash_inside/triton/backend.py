"""The inside algorithm and its derivatives on a GPU: Triton kernels between cuBLAS products, one product per width.

The contract is that of scaled/ (log Z, trusted, posterior). What differs, and why:

    one scale a row       eta | zeta are stored as the product leaves them, in the storage type: no pass over them
    no copy of the rules  products read left and right where they are, and write the gradients where they belong
    short sentences       in bf16 keep what rounding left of their rows, instead of a chart in fp32
    gathered derivatives  every row sums over its parents in a fixed order: no atomics, bitwise reproducible
    CUDA graphs           where launching the kernels would take longer than running them; not for rules per sentence,
                          nor for factored ones
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flash_inside.devices import copy_to_device
from flash_inside.packing import Layout
from flash_inside.precision import chart_format, finite, full_matmul_precision, gradient_type, most_words_of_short
from flash_inside.rules import AnyRules, FactoredRules, ResidentRules, Rules
from flash_inside.scaled import Result
from flash_inside.triton import graphs
from flash_inside.triton.chart import Chart, ChartResults, Precise, SavedChart, Tables, check_sentences
from flash_inside.triton.gradients import RuleMemory, Wanted, computed_type, gradients
from flash_inside.triton.weights import AnyWeights, FactoredWeights, SentenceWeights, Weights


def inside(
    rules: AnyRules,
    emissions: Tensor,
    lengths: Sequence[int],
    precision: str,
    layout: Layout | None = None,
    limits: np.ndarray | None = None,
) -> Result:
    """Return log marginals in the caller's order. The gradient of a sentence that is not trusted is zero.

    Give a layout to get the posterior of its rows. Without one the posterior is empty, and a CUDA graph may be used.
    Gradients of `ResidentRules` are written into their memory if it has the right types and they have none yet.
    """
    check_sentences(len(lengths))
    with torch.cuda.device_of(emissions):  # Triton launches on the current device
        inner = rules.inner if isinstance(rules, FactoredRules) else None
        return Result(*_TritonInside.apply(*rules[:3], emissions, inner, lengths, precision, layout, rules, limits))


class _TritonInside(torch.autograd.Function):
    """(root, left, right, emissions, inner) -> log Z [B], trusted [B], posterior [rows]; the last two have no gradient.

    inner: of `FactoredRules`, or None
    """

    @staticmethod
    def forward(
        ctx: Any,
        root: Tensor,
        left: Tensor,
        right: Tensor,
        emissions: Tensor,
        inner: Tensor | None,
        lengths: Sequence[int],
        precision: str,
        layout: Layout | None,
        rules: AnyRules,
        limits: np.ndarray | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        n, p = left.shape[-2], emissions.shape[1]
        storage, device = chart_format(precision, n).storage, emissions.device
        ctx.precision, ctx.words = precision, emissions.shape[0]
        inputs = (root, left, right, emissions, inner)
        ctx.gradient_types = [None if tensor is None else gradient_type(tensor) for tensor in inputs]
        ctx.held = None
        ctx.memory = _gradient_memory(rules, ctx.gradient_types[1:3])
        with full_matmul_precision(precision):
            graph = None
            # Batches without gradients, of an evaluation say, rarely come again; their graphs would crowd others out.
            # Rules per sentence would have to be copied into a graph's memory; of factored ones products are small.
            again = any(ctx.needs_input_grad) or n <= graphs.LARGEST_LAUNCH_BOUND_N
            if layout is None and isinstance(rules, Rules) and not rules.per_sentence and again:
                precise = min(lengths) <= most_words_of_short(storage)
                graph = graphs.find(rules, emissions, lengths, precision, storage, precise, limits is not None)
            if graph is not None:
                held = graph.run(root, left, right, emissions, lengths, limits)
                results = held.results(len(lengths))
                if any(ctx.needs_input_grad):
                    ctx.held = held
                    ctx.save_for_backward(root, left, right, None)
            else:
                with_posterior, layout = layout is not None, layout or Layout(lengths)
                short = Precise.short_sentences(layout, most_words_of_short(storage))
                tables = Tables.of(layout, short, device)
                tables.limits = None if limits is None else copy_to_device(limits, device)
                allocate = _allocator(device)
                place = ChartResults.allocate(layout, n, p, storage, allocate, with_posterior)
                chart = Chart.around(place, layout, short, allocate)
                weights, sorted_root = _weights_and_root(root, left, right, inner, storage, layout, tables)
                chart.compute(weights, sorted_root, emissions.contiguous(), layout, tables)
                results = chart.log_z, chart.trusted.bool(), chart.posterior
                if any(ctx.needs_input_grad):
                    ctx.save_for_backward(root, left, right, inner, *chart.saved)
                    ctx.layout, ctx.tables = layout, tables
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_log_z: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
        root, left, right, inner, *saved = ctx.saved_tensors
        needs = ctx.needs_input_grad
        types = [None if dtype is None else computed_type(dtype) for dtype in ctx.gradient_types]
        wanted = Wanted(
            types[0] if needs[0] else None,
            types[1] if needs[1] or needs[2] or needs[4] else None,
            types[3] if needs[3] else None,
        )
        d_log_z = d_log_z.float().contiguous()
        with full_matmul_precision(ctx.precision):
            if ctx.held is not None:
                found = ctx.held.gradients(root, left, right, d_log_z, ctx.words, wanted, ctx.memory)
            else:
                chart = SavedChart(*saved)
                storage, layout, tables = chart.leaves.dtype, ctx.layout, ctx.tables
                weights, sorted_root = _weights_and_root(root, left, right, inner, storage, layout, tables)
                allocate = _allocator(d_log_z.device)
                found = gradients(
                    chart, weights, sorted_root, d_log_z, ctx.words, layout, tables, wanted, allocate,
                    allocate, ctx.memory,
                )  # fmt: skip
        if found.right is not None:  # the rules may have several types; their gradients are computed in that of left
            found = found._replace(right=found.right.to(types[2]))
        if found.inner is not None:
            found = found._replace(inner=found.inner.to(types[4]))
        if torch.float16 in ctx.gradient_types:
            found = type(found)(*map(_in_type, found, ctx.gradient_types))
        if ctx.memory is not None and found.left is not None and found.right is not None:
            # Another tensor over the same memory: one that is held elsewhere autograd would copy.
            found = found._replace(left=found.left.detach(), right=found.right.detach())
        return (*found, None, None, None, None, None)


def _weights_and_root(
    root: Tensor, left: Tensor, right: Tensor, inner: Tensor | None, storage: torch.dtype, layout: Layout,
    tables: Tables,
) -> tuple[AnyWeights, Tensor]:  # fmt: skip
    """Return the rules as products and kernels read them; those of sentences in the order of the layout."""
    root = root.float().contiguous()
    if inner is not None:
        return FactoredWeights(left, right, inner, storage), root
    if left.dim() == 2:
        return Weights(left, right, storage), root
    return SentenceWeights(left, right, storage, layout, tables.order), root[tables.order]


def _gradient_memory(rules: AnyRules, types: Sequence[torch.dtype]) -> RuleMemory | None:
    """Return memory that the gradients of left and right can be written into, in their types; None: there is none."""
    if not isinstance(rules, ResidentRules) or rules.have_gradients or rules.per_sentence:
        return None
    fits = all(
        memory.dtype == wanted and wanted != torch.float16 and memory.is_contiguous()
        for memory, wanted in zip(rules.gradient_memory, types, strict=True)
    )
    return rules.gradient_memory if fits else None


def _in_type(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if gradient is None or dtype is None else finite(gradient, dtype)


def _allocator(device: torch.device) -> Any:
    return lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device)
