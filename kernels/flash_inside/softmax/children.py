"""Probabilities of left and right children: softmaxes of products of parents and children."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flash_inside.devices import in_triton
from flash_inside.precision import product_precision
from flash_inside.softmax import rows
from flash_inside.softmax.products import (
    LARGEST_BLOCK,
    add,
    blocks,
    check_tables,
    multiply,
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

    Tables with a leading dimension, one for each sentence, give probabilities with it: [B, N, d] -> [B, N, S].

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
        symbols, wide = left_children.shape[-2], wide_type(parents)
        a = of_logits(_of_sentences(parents), precision)
        both = torch.empty(2, *parents.shape[:-1], symbols, dtype=dtype, device=parents.device)
        left, right = both
        with product_precision(precision):
            for children, probabilities in ((left_children, left), (right_children, right)):
                b, out = of_logits(_of_sentences(children), precision), _of_sentences(probabilities)
                for some, block in _blocks(out, largest_block * wide.itemsize // _logits_type(a).itemsize):
                    logits = multiply(a[some, block], b[some].mT, _logits_type(a))
                    rows.softmax(logits.flatten(0, 1), out[some, block].flatten(0, 1))
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
        a = operand(_of_sentences(parents), precision)
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
                of_parents = torch.empty_like(parents)
                parts: list[Tensor] = []  # of the gradient by the children: some sentences each
                b, p, g = operand(_of_sentences(children), precision), *map(_of_sentences, (probabilities, gradient))
                pieces = list(_blocks(p, largest_block))
                summed = wide if any(block.start for _, block in pieces) else children.dtype
                for some, block in pieces:
                    d_logits = torch.empty(p[some, block].shape, dtype=a.dtype, device=a.device)
                    rows.softmax_gradient(
                        p[some, block].flatten(0, 1), g[some, block].flatten(0, 1).contiguous(), d_logits.flatten(0, 1)
                    )
                    _of_sentences(of_parents)[some, block] = multiply(d_logits, b[some], parents.dtype)
                    of_block = multiply(d_logits.mT, a[some, block], summed)
                    if block.start:  # more rows of the same sentence
                        parts[-1].add_(of_block)
                    else:
                        parts.append(of_block)
                    del d_logits, of_block  # before the next block is made
                whole = (
                    parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.zeros_like(b, dtype=summed)
                )
                d_children.append(whole.view(children.shape).to(children.dtype))
                d_parents = add(of_parents, d_parents)
        return d_parents, *d_children, None, None, None


def _logits_type(factor: Tensor) -> torch.dtype:
    """Return the type of logits: fp16 for fp16 factors, half the bytes to write and to read again.

    A logit of 16 is then off by 0.004 at most. Rows still sum to one, since they are normalised from these very numbers
    (the emission's are not: its columns are computed anew). PyTorch's passes would also sum in fp16.
    """
    return factor.dtype if in_triton(factor) else wide_type(factor)


def _of_sentences(table: Tensor) -> Tensor:
    """Return a table as that of one sentence, unless each sentence has its own."""
    return table if table.dim() == 3 else table[None]


def _blocks(probabilities: Tensor, largest: int) -> Iterator[tuple[slice, slice]]:
    """Yield sentences and rows whose logits are made at a time: all rows of some sentences, or some rows of one."""
    sentences, parents, symbols = probabilities.shape
    for some in blocks(sentences, parents * symbols, largest):
        for block in blocks(parents, (some.stop - some.start) * symbols, largest):
            yield some, block
