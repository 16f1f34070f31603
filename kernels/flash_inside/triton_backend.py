"""The inside algorithm and its derivatives on a GPU: Triton kernels between cuBLAS products, one product per width.

The contract is that of scaled.py (log Z, trusted, posterior). What differs, and why:

    one scale a row       eta | zeta are stored as the product leaves them, in the storage type: no pass over them
    no copy of the rules  products read left and right where they are, and write the gradients where they belong
    short sentences       in bf16 keep what rounding left of their rows, instead of a chart in fp32
    gathered derivatives  every row sums over its parents in a fixed order: no atomics, bitwise reproducible
    CUDA graphs           where launching the kernels would take longer than running them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_inside import triton_graphs
from flash_inside.packing import Layout
from flash_inside.rules import Rules, gradient_type
from flash_inside.scaled import LARGEST_FP32_CHART, MOST_WORDS_OF_PRECISE, Result, finite
from flash_inside.triton_chart import Chart, Kept, Precise, Tables, Weights, check_sentences, product_precision
from flash_inside.triton_gradients import RuleMemory, Wanted, computed_type, gradients

PRECISIONS = ("fp32", "tf32", "bf16")


def inside(
    rules: Rules,
    emissions: Tensor,
    lengths: Sequence[int],
    precision: str,
    layout: Layout | None = None,
    of_rules: RuleMemory | None = None,
    rules_stay: bool = False,
) -> Result:
    """Log marginals in the caller's order. The gradient of a sentence that is not trusted is zero.

    Give a layout to get the posterior of its rows. Without one the posterior is empty, and a CUDA graph may be used.
    of_rules: memory for the gradients of left and right, if it is of their types.
    rules_stay: later calls will have rules in the same memory.
    """
    check_sentences(len(lengths))
    with torch.cuda.device_of(emissions):  # Triton launches on the current device
        return Result(*_TritonInside.apply(*rules, emissions, lengths, precision, layout, of_rules, rules_stay))


def storage_type(precision: str, n: int) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16" and n > LARGEST_FP32_CHART else torch.float32


def most_words_of_precise(storage: torch.dtype) -> int:
    return MOST_WORDS_OF_PRECISE if storage == torch.bfloat16 else 0


class _TritonInside(torch.autograd.Function):
    """(root, left, right, emissions) -> log Z [B], trusted [B], posterior [rows]; the last two not differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        root: Tensor,
        left: Tensor,
        right: Tensor,
        emissions: Tensor,
        lengths: Sequence[int],
        precision: str,
        layout: Layout | None,
        of_rules: RuleMemory | None,
        rules_stay: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        n, p = left.shape[0], emissions.shape[1]
        storage, device = storage_type(precision, n), emissions.device
        ctx.precision, ctx.words = precision, emissions.shape[0]
        ctx.gradient_types = [gradient_type(tensor) for tensor in (root, left, right, emissions)]
        ctx.held = None
        if of_rules is not None and any(
            memory.dtype != wanted or wanted == torch.float16 or not memory.is_contiguous()
            for memory, wanted in zip(of_rules, ctx.gradient_types[1:3], strict=True)
        ):
            of_rules = None
        ctx.of_rules = of_rules
        with product_precision(precision):
            graph = None
            # Batches without gradients, of an evaluation say, rarely come again; their graphs would crowd others out.
            if layout is None and (any(ctx.needs_input_grad) or n <= triton_graphs.LARGEST_LAUNCH_BOUND_N):
                rules = Rules(root, left, right)
                precise = min(lengths) <= most_words_of_precise(storage)
                graph = triton_graphs.find(rules, emissions, lengths, precision, storage, precise, rules_stay)
            if graph is not None:
                held = graph.run(root, left, right, emissions, lengths)
                results = held.results(len(lengths))
                if any(ctx.needs_input_grad):
                    ctx.held = held
                    ctx.save_for_backward(root, left, right)
            else:
                with_posterior, layout = layout is not None, layout or Layout(lengths)
                short = Precise.short_sentences(layout, most_words_of_precise(storage))
                tables = Tables.of(layout, short, device)
                chart = Chart.allocate(layout, short, n, p, storage, _allocator(device), with_posterior)
                weights = Weights(left, right, storage)
                chart.compute(weights, root.float().contiguous(), emissions.contiguous(), layout, tables)
                results = chart.log_z, chart.trusted.bool(), chart.posterior
                if any(ctx.needs_input_grad):
                    ctx.save_for_backward(root, left, right, *chart.kept)
                    ctx.layout, ctx.tables = layout, tables
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_log_z: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
        root, left, right, *kept = ctx.saved_tensors
        needs = ctx.needs_input_grad
        types = [computed_type(dtype) for dtype in ctx.gradient_types]
        wanted = Wanted(
            types[0] if needs[0] else None,
            types[1] if needs[1] or needs[2] else None,
            types[3] if needs[3] else None,
        )
        d_log_z = d_log_z.float().contiguous()
        with product_precision(ctx.precision):
            if ctx.held is not None:
                found = ctx.held.gradients(root, left, right, d_log_z, ctx.words, wanted, ctx.of_rules)
            else:
                chart = Kept(*kept)
                weights = Weights(left, right, chart.leaves.dtype)
                allocate = _allocator(d_log_z.device)
                found = gradients(
                    chart, weights, root.float().contiguous(), d_log_z, ctx.words, ctx.layout, ctx.tables, wanted,
                    allocate, allocate, ctx.of_rules,
                )  # fmt: skip
        if found.right is not None:  # the rules may have two types; their gradients are computed in that of left
            found = found._replace(right=found.right.to(types[2]))
        if torch.float16 in ctx.gradient_types:
            found = type(found)(*map(_in_type, found, ctx.gradient_types))
        if ctx.of_rules is not None and found.left is not None and found.right is not None:
            # Another tensor over the same memory: one that is held elsewhere autograd would copy.
            found = found._replace(left=found.left.detach(), right=found.right.detach())
        return (*found, None, None, None, None, None)


def _in_type(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if gradient is None else finite(gradient, dtype)


def _allocator(device: torch.device) -> Any:
    return lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device)
