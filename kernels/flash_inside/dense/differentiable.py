"""The passes of scaled.py as one function of autograd: launched, or replayed by graphs.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flash_inside.brackets import allowed_rows
from flash_inside.dense import graphs
from flash_inside.dense.plan import Plan
from flash_inside.dense.reference import PairRules
from flash_inside.dense.scaled import Incoming, Inputs, Saved, backward_pass, compute_type, forward_pass, lost_rows
from flash_inside.dense.tables import PairTables
from flash_inside.precision import finite, gradient_type


class Result(NamedTuple):
    log_z: Tensor  # [B] compute dtype, differentiable
    trusted: Tensor  # [B] bool: False = outside the range of the number format, recompute
    posterior: Tensor  # [rows] of the layout: posterior probability of every span
    before_word: Tensor  # [rows] posterior that the span is there and its right part is one word


def inside(rules: PairRules, emissions: Tensor, plan: Plan, precision: str, limits: np.ndarray | None = None) -> Result:
    """Return log marginals in the caller's order. The gradient of a sentence that is not trusted is zero.

    precision: charts are fp64 for "fp64", else fp32. For "tf32" and "bf16" products are in TF32, where there is TF32.
    limits: see flash_inside/brackets.py
    """
    return Result(*_Inside.apply(*rules, emissions, plan, precision, limits))


class _Inside(torch.autograd.Function):
    """(root, pairs, emissions) -> log Z [B], and what is not differentiable: trusted [B], two posteriors [rows]."""

    @staticmethod
    def forward(
        ctx: Any, root: Tensor, pairs: Tensor, emissions: Tensor, plan: Plan, precision: str,
        limits: np.ndarray | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        words, compute = plan.layout.words, compute_type(precision)
        wide_root = (plan.sort(root) if root.dim() == 2 else root).double()
        allowed = None
        if limits is not None:
            allowed = torch.from_numpy(allowed_rows(limits, plan.layout)).to(emissions.device)
        held = graphs.run(plan, wide_root, pairs, emissions, allowed, precision)
        if held is None:
            inputs = Inputs(PairTables.cut(pairs, plan, compute), wide_root, emissions, allowed)
            saved, found = forward_pass(plan, inputs, precision)
        else:
            inputs, (saved, found) = held.graph.inputs, held.graph.results
        trusted = found.trusted
        if found.empty:  # only grammars with zeros come here; the one place where the host waits
            trusted = trusted.index_fill(0, plan.sentence[lost_rows(plan, inputs, saved)], False)

        believed = trusted & (saved.top_sums > 0)
        of_rows = believed[plan.sentence]
        posterior, before_word = (torch.where(of_rows, values, 0.0) for values in (found.posterior, found.before_word))
        posterior[:words] = of_rows[:words].to(compute)
        if any(ctx.needs_input_grad):
            ctx.held = held  # what it holds is not saved here: the next batch may need the memory
            ctx.save_for_backward(wide_root, believed, *(() if held is not None else saved))
            ctx.plan, ctx.precision, ctx.allowed = plan, precision, allowed
            ctx.n, ctx.p = pairs.shape[-3], emissions.shape[1]
            ctx.gradient_types = [gradient_type(tensor) for tensor in (root, pairs, emissions)]
        results = plan.unsort(found.log_z.to(compute)), plan.unsort(trusted), posterior, before_word
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_log_z: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
        plan, (wide_root, believed, *saved) = ctx.plan, ctx.saved_tensors
        incoming = Incoming(wide_root, ctx.allowed, believed, d_log_z)
        if ctx.held is None:
            found = backward_pass(plan, Saved(*saved), incoming, ctx.precision)
        else:
            found = ctx.held.gradients(incoming)
        d_root = plan.unsort(found.root) if wide_root.dim() == 2 else found.root
        d_pairs = found.tables.joined(ctx.n, ctx.p, found.emissions)
        return (*map(finite, (d_root, d_pairs, found.emissions), ctx.gradient_types), None, None, None)
