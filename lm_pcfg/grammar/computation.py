"""How a module computes its distribution once a step, and how the micro-batches' gradients come back to it.

Micro-batches work on a detached copy of its tensors and accumulate gradients there; one backward pass then takes those
through the networks (`backward_through`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm_pcfg.corpus.batches import Batch
from lm_pcfg.grammar.dropout import Dropout
from lm_pcfg.grammar.emission import EmissionShards
from lm_pcfg.grammar.families.shared.family import Distribution


class Computation(NamedTuple):
    """The options of a forward pass. The default is exact: what scoring uses."""

    precision: str = "fp32"  # of the products of the networks and softmaxes: "fp32", "tf32" or "bf16" (fp64 stays fp64)
    charts: str = "fp32"  # precision of the inside algorithm; for "bf16" the rules may be made in bf16
    shards: EmissionShards | None = None  # None: every process computes all normalisers of the emission
    dropout: Dropout = Dropout()  # what this step leaves out
    batches: Sequence[Batch] = ()  # of this step, for models that look at the sentences first


EXACT = Computation()


def backward_through(grammar: Distribution, leaves: Distribution) -> Tensor:
    """Return a scalar whose backward pass takes the gradients on `leaves` through the graph of `grammar`.

    Its value means nothing.
    """
    tensors, gathered = grammar.tensors, leaves.tensors
    # A tensor no micro-batch has touched (no data on this rank) still takes part, so that all ranks do the same work.
    gradients = [
        torch.zeros_like(tensor) if leaf.grad is None else leaf.grad
        for tensor, leaf in zip(tensors, gathered, strict=True)
    ]
    return _Delivery.apply(gradients, *tensors)


class _Delivery(torch.autograd.Function):
    """Delivers gradients to tensors. sum(tensor * gradient) does so, too, with three more passes over the rules."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        torch._assert_async(scale == 1.0, "an engine that scales its loss would go unheard here")
        return None, *ctx.gradients
