"""Log-normalisers of a softmax over words, without the matrix of states x words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_inside.precision import product_precision
from flash_inside.softmax import rows
from flash_inside.softmax.products import (
    LARGEST_BLOCK,
    add,
    blocks,
    check_wide,
    multiply,
    operand,
    whole_lines,
)

#: How many logits a CPU keeps for the backward pass, instead of making them again: at most 256 MiB of fp32. Fewer than
#: a million take no time, and are made again: so the runs of small models can be repeated bit for bit.
KEPT_FROM, KEPT_TO = 1 << 20, 1 << 26


def log_normalizers(
    features: Tensor, embeddings: Tensor, precision: str = "fp32", largest_block: int = LARGEST_BLOCK
) -> Tensor:
    """log sum_v exp(features_p . embeddings_v): [P, d], [V, d] -> [P], differentiable once.

    precision      of the products of fp32 tables: "fp32" | "tf32" | "bf16"; fp64 tables are computed in fp64
    largest_block  logits that exist at a time; PyTorch's own passes, where Triton's do not run, need as much again

    Arithmetic: 2PVd forward; 6PVd backward, of which 2PVd are the same logits again. A CPU, whose products are slow
    and whose memory is large, spares itself those.
    """
    check_wide(features, embeddings)
    differentiated = torch.is_grad_enabled() and (features.requires_grad or embeddings.requires_grad)
    number = len(features) * len(embeddings)
    if differentiated and features.device.type == "cpu" and KEPT_FROM <= number <= min(KEPT_TO, largest_block):
        return _KeptLogNormalizers.apply(features, embeddings, precision)
    return _LogNormalizers.apply(features, embeddings, precision, largest_block)


class _LogNormalizers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, embeddings: Tensor, precision: str, largest_block: int) -> Tensor:
        ctx.precision, ctx.largest_block = precision, largest_block
        wide = features.dtype
        a, b = operand(features, precision), whole_lines(operand(embeddings, precision))
        result = torch.empty(len(a), dtype=wide, device=a.device)
        with product_precision(precision):
            for block in blocks(len(a), len(b), largest_block):
                rows.log_sum_exp(multiply(a[block], b.T, wide), len(embeddings), result[block])
        ctx.save_for_backward(features, embeddings, result)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features, embeddings, normalizers = ctx.saved_tensors
        wide, precision = features.dtype, ctx.precision
        a, b = operand(features, precision), whole_lines(operand(embeddings, precision))
        gradient, words = gradient.contiguous(), len(embeddings)
        d_features, d_embeddings = torch.empty_like(features), None
        with product_precision(precision):
            for block in blocks(len(a), len(b), ctx.largest_block):
                logits = multiply(a[block], b.T, wide)
                d_logits = logits if a.dtype == wide else torch.empty_like(logits, dtype=a.dtype)
                rows.scaled_exp(logits, words, normalizers[block], gradient[block], out=d_logits)
                del logits
                d_features[block] = multiply(d_logits, b, wide)
                d_embeddings = add(multiply(d_logits.T, a[block], wide), d_embeddings)
                del d_logits  # before the next block is made
        d_embeddings = torch.zeros_like(embeddings) if d_embeddings is None else d_embeddings[:words]
        return d_features, d_embeddings, None, None


class _KeptLogNormalizers(torch.autograd.Function):
    """The same in one block, whose exponentials stay for the backward pass: neither products nor exp a second time."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, embeddings: Tensor, precision: str) -> Tensor:
        a, b = operand(features, precision), operand(embeddings, precision)
        with product_precision(precision):
            logits = multiply(a, b.T, features.dtype)  # [P, V]
        largest = logits.amax(1)
        exponentials = logits.sub_(largest[:, None]).exp_()
        sums = exponentials.sum(1)
        ctx.precision = precision
        ctx.save_for_backward(features, embeddings, exponentials, sums)
        return largest + sums.log()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features, embeddings, exponentials, sums = ctx.saved_tensors
        wide, precision = features.dtype, ctx.precision
        a, b = operand(features, precision), operand(embeddings, precision)
        d_logits = operand(exponentials * (gradient / sums)[:, None], precision)
        with product_precision(precision):
            return multiply(d_logits, b, wide), multiply(d_logits.T, a, wide), None
