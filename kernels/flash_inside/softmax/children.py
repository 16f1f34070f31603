"""Probabilities of left and right children: softmaxes of products of parents and children."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_inside.precision import product_precision
from flash_inside.softmax import rows
from flash_inside.softmax.products import LARGEST_BLOCK, add, blocks, check_wide, multiply, operand


def child_probabilities(
    parents: Tensor,
    left_children: Tensor,
    right_children: Tensor,
    dtype: torch.dtype | None = None,
    precision: str = "fp32",
    largest_block: int = LARGEST_BLOCK,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """left[A, B] = softmax over B of parents_A . left_children_B; right likewise: [N, d], [S, d] twice -> [N, S] twice.

    dtype      of the probabilities; by default that of the parents
    precision  of the products, as for `log_normalizers`

    Returns left, right, and where their gradients enter the graph. Autograd rounds a gradient to the type of its
    tensor. So where the probabilities are narrower than the networks, they are not differentiable themselves: each
    comes with an entrance, a tensor of the same shape in the wide type that takes no memory and has no meaning but its
    gradient. Else the entrances are left and right themselves.

    No logits are kept: the backward needs the probabilities alone. left and right lie one after the other in memory,
    so that products can take both at once.
    """
    dtype = dtype or parents.dtype
    tables = (parents, left_children, right_children)
    check_wide(*tables)
    left, right, *entrances = _ChildProbabilities.apply(*tables, dtype, precision, largest_block)
    return (left, right, *entrances) if entrances else (left, right, left, right)


class _ChildProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        parents: Tensor,
        left_children: Tensor,
        right_children: Tensor,
        dtype: torch.dtype,
        precision: str,
        largest_block: int,
    ) -> tuple[Tensor, ...]:
        ctx.precision, ctx.largest_block = precision, largest_block
        ctx.set_materialize_grads(False)
        n, symbols, wide = len(parents), len(left_children), parents.dtype
        a = operand(parents, precision)
        both = torch.empty(2, n, symbols, dtype=dtype, device=parents.device)
        with product_precision(precision):
            for children, probabilities in zip((left_children, right_children), both, strict=True):
                b = operand(children, precision)
                for block in blocks(n, symbols, largest_block):
                    rows.softmax(multiply(a[block], b.T, wide), probabilities[block])
        left, right = both
        ctx.save_for_backward(parents, left_children, right_children, left, right)
        if dtype == wide:
            ctx.first_entrance = 0
            return left, right
        ctx.mark_non_differentiable(left, right)
        ctx.first_entrance = 2
        entrances = (parents.new_zeros(()).expand(n, symbols) for _ in range(2))
        return left, right, *entrances

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        parents, left_children, right_children, left, right = ctx.saved_tensors
        wide, precision = parents.dtype, ctx.precision
        a = operand(parents, precision)
        d_parents: Tensor | None = None
        d_children = []
        gradients = incoming[ctx.first_entrance : ctx.first_entrance + 2]
        with product_precision(precision):
            for children, probabilities, gradient in zip(
                (left_children, right_children), (left, right), gradients, strict=True
            ):
                if gradient is None:
                    d_children.append(torch.zeros_like(children))
                    continue
                d_table: Tensor | None = None
                of_parents = torch.empty_like(parents)
                b = operand(children, precision)
                for block in blocks(len(a), len(b), ctx.largest_block):
                    d_logits = torch.empty(probabilities[block].shape, dtype=a.dtype, device=a.device)
                    rows.softmax_gradient(probabilities[block], gradient[block].contiguous(), d_logits)
                    of_parents[block] = multiply(d_logits, b, wide)
                    d_table = add(multiply(d_logits.T, a[block], wide), d_table)
                    del d_logits  # before the next block is made
                d_children.append(torch.zeros_like(children) if d_table is None else d_table)
                d_parents = add(of_parents, d_parents)
        return d_parents, *d_children, None, None, None
