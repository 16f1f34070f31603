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

#: Logits that a CPU keeps for the backward pass, at most: 256 MiB in fp32. To make them again takes a third of the time.
MOST_KEPT = 1 << 26


def log_normalizers(
    features: Tensor, embeddings: Tensor, precision: str = "fp32", largest_block: int = LARGEST_BLOCK
) -> Tensor:
    """log sum_v exp(features_p . embeddings_v): [P, d], [V, d] -> [P], differentiable once.

    precision      of the products of fp32 tables: "fp32" | "tf32" | "bf16"; fp64 tables are computed in fp64
    largest_block  logits that exist at a time; PyTorch's own passes, where Triton's do not run, need as much again

    Arithmetic: 2PVd forward; 6PVd backward, of which 2PVd are the same logits again. A CPU, whose memory is larger
    and whose products are slower, keeps up to MOST_KEPT logits instead.
    """
    check_wide(features, embeddings)
    return _LogNormalizers.apply(features, embeddings, precision, largest_block)


class _LogNormalizers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, embeddings: Tensor, precision: str, largest_block: int) -> Tensor:
        ctx.precision, ctx.largest_block = precision, largest_block
        wide = features.dtype
        a, b = operand(features, precision), whole_lines(operand(embeddings, precision))
        result = torch.empty(len(a), dtype=wide, device=a.device)
        keep = a.device.type == "cpu" and len(a) * len(b) <= MOST_KEPT and any(ctx.needs_input_grad)
        ctx.kept = []  # the logits of each block
        with product_precision(precision):
            for block in blocks(len(a), len(b), largest_block):
                logits = multiply(a[block], b.T, wide)
                rows.log_sum_exp(logits, len(embeddings), result[block])
                if keep:
                    ctx.kept.append(logits)
                del logits  # before the next block is made
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
                logits = ctx.kept.pop(0) if ctx.kept else multiply(a[block], b.T, wide)
                d_logits = logits if a.dtype == wide else torch.empty_like(logits, dtype=a.dtype)
                rows.scaled_exp(logits, words, normalizers[block], gradient[block], out=d_logits)
                del logits
                d_features[block] = multiply(d_logits, b, wide)
                d_embeddings = add(multiply(d_logits.T, a[block], wide), d_embeddings)
                del d_logits  # before the next block is made
        d_embeddings = torch.zeros_like(embeddings) if d_embeddings is None else d_embeddings[:words]
        return d_features, d_embeddings, None, None
