"""Probabilities of left and right children: softmaxes of products of parents and children."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_inside.devices import in_triton
from flash_inside.precision import product, product_precision
from flash_inside.softmax import rows
from flash_inside.softmax.products import (
    LARGEST_BLOCK,
    add,
    blocks,
    check_tables,
    of_logits,
    operand,
    wide_type,
)


def child_probabilities(
    parents: Tensor,
    left_children: Tensor,
    right_children: Tensor,
    dtype: torch.dtype | None = None,
    precision: str = "fp32",
    largest_block: int = LARGEST_BLOCK,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """left[A, B] = softmax over B of parents_A . left_children_B; right likewise: [N, d], [S, d] twice -> [N, S] twice.

    Parents of each sentence, [B, N, d], give probabilities of each, [B, N, S], over the same children.

    parents and children are of one type: fp64, fp32 or bf16, whose sums are wider.

    dtype          of the probabilities; by default that of the parents, or fp32 if it is wider
    precision      of the products, as for `log_normalizers`; in 16 bits the logits are in fp16, too, where Triton runs
    largest_block  so many numbers in the type of sums, or more narrower ones, exist at a time

    Returns left, right, and where their gradients enter the graph. Autograd rounds a gradient to the type of its
    tensor. So probabilities narrower than fp32 are not differentiable themselves: each comes with an entrance, a
    tensor of the same shape in the wide type that takes no memory and has no meaning but its gradient. Else the
    entrances are left and right themselves.

    No logits are kept: the backward needs the probabilities alone. left and right lie one after the other in memory,
    so that products can take both at once.
    """
    dtype = dtype or wide_type(parents)
    tables = (parents, left_children, right_children)
    check_tables(*tables, narrowest=torch.bfloat16)
    if left_children.dim() != 2 or right_children.dim() != 2:
        raise ValueError("children should be [S, d]: the same for all sentences")
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
        symbols, wide = len(left_children), wide_type(parents)
        a = of_logits(parents.flatten(0, -2), precision)
        both = torch.empty(2, *parents.shape[:-1], symbols, dtype=dtype, device=parents.device)
        left, right = both
        with product_precision(precision):
            for children, probabilities in ((left_children, left), (right_children, right)):
                b, out = of_logits(children, precision), probabilities.flatten(0, -2)
                for block in blocks(len(a), symbols, largest_block * wide.itemsize // _logits_type(a).itemsize):
                    logits = product(a[block], b.T, _logits_type(a))
                    rows.softmax(logits, out[block])
                    del logits  # before the next block is made
        ctx.save_for_backward(parents, left_children, right_children, left, right)
        if dtype == wide:
            ctx.first_entrance = 0
            return left, right
        ctx.mark_non_differentiable(left, right)
        ctx.first_entrance = 2
        entrances = (parents.new_zeros((), dtype=wide).expand(left.shape) for _ in range(2))
        return left, right, *entrances

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        parents, left_children, right_children, left, right = ctx.saved_tensors
        wide, precision = wide_type(parents), ctx.precision
        a = operand(parents.flatten(0, -2), precision)
        largest_block = ctx.largest_block * wide.itemsize // a.itemsize  # as many bytes as wide logits take
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
                of_parents, of_children = torch.empty_like(a, dtype=parents.dtype), None
                b, p, g = operand(children, precision), probabilities.flatten(0, -2), gradient.flatten(0, -2)
                pieces = list(blocks(len(p), p.shape[-1], largest_block))
                summed = wide if len(pieces) > 1 else children.dtype
                for block in pieces:
                    d_logits = torch.empty(p[block].shape, dtype=a.dtype, device=a.device)
                    rows.softmax_gradient(p[block], g[block].contiguous(), d_logits)
                    of_parents[block] = product(d_logits, b, parents.dtype)
                    of_children = add(product(d_logits.T, a[block], summed), of_children)
                    del d_logits  # before the next block is made
                d_children.append(torch.zeros_like(children) if of_children is None else of_children.to(children.dtype))
                d_parents = add(of_parents, d_parents)
                del g  # a copy, where a backend's gradients are slices
        return None if d_parents is None else d_parents.view(parents.shape), *d_children, None, None, None


def _logits_type(factor: Tensor) -> torch.dtype:
    """Return the type of logits: fp16 for fp16 factors, half the bytes to write and to read again.

    A logit of 16 is then off by 0.004 at most. Rows still sum to one, since they are normalised from these very numbers
    (the emission's are not: its columns are computed anew). PyTorch's passes would also sum in fp16.
    """
    return factor.dtype if in_triton(factor) else wide_type(factor)
