"""Log-normalisers of a softmax over words, without keeping the logits of states x words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_inside.precision import product, product_precision
from flash_inside.softmax import rows
from flash_inside.softmax.products import (
    LARGEST_BLOCK,
    add,
    blocks,
    check_tables,
    factors_of_logits,
    operand,
    operand_type,
    whole_lines,
)

#: Bytes of probabilities that are kept for the backward pass, at most, instead of making the logits again.
KEPT_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
#: Fewer than a million take no time on a CPU, and are made again: so runs of small models can be repeated bit for bit.
KEPT_FROM = {"cpu": 1 << 20, "cuda": 1}


def log_normalizers(
    features: Tensor, embeddings: Tensor, precision: str = "fp32", largest_block: int = LARGEST_BLOCK, keep: bool = True
) -> Tensor:
    """log sum_v exp(features_p . embeddings_v): [P, d], [V, d] -> [P], differentiable once.

    precision      of the products of fp32 tables: "fp32" | "tf32" | "bf16" (behind logits in fp16, behind gradients in
                   bf16); fp64 tables are computed in fp64
    largest_block  logits that exist at a time; PyTorch's own passes, where Triton's do not run, need as much again
    keep           whether the P x V probabilities, in the type of the products' operands, may be kept for the backward
                   pass, if they take no more than KEPT_BYTES

    Arithmetic: 2PVd forward; 4PVd backward if the probabilities are kept, else 6PVd: the logits are made again.
    """
    check_tables(features, embeddings)
    differentiated = torch.is_grad_enabled() and (features.requires_grad or embeddings.requires_grad)
    if keep and differentiated and may_be_kept(features, embeddings, precision):
        return _KeptLogNormalizers.apply(features, embeddings, precision, largest_block)
    return _LogNormalizers.apply(features, embeddings, precision, largest_block)


def may_be_kept(features: Tensor, embeddings: Tensor, precision: str) -> bool:
    device, number = features.device.type, len(features) * len(embeddings)
    size = number * operand_type(features, precision).itemsize
    return device in KEPT_FROM and KEPT_FROM[device] <= number and size <= KEPT_BYTES[device]


def _factors(features: Tensor, embeddings: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    of_features, of_embeddings = factors_of_logits(features, embeddings, precision)
    return of_features, whole_lines(of_embeddings)


class _LogNormalizers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, embeddings: Tensor, precision: str, largest_block: int) -> Tensor:
        ctx.precision, ctx.largest_block = precision, largest_block
        a, b = _factors(features, embeddings, precision)
        result = torch.empty(len(a), dtype=features.dtype, device=a.device)
        with product_precision(precision):
            for block in blocks(len(a), len(b), largest_block):
                rows.log_sum_exp(product(a[block], b.T, features.dtype), len(embeddings), result[block])
        ctx.save_for_backward(features, embeddings, result)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features, embeddings, normalizers = ctx.saved_tensors
        wide, precision = features.dtype, ctx.precision
        a, b = operand(features, precision), whole_lines(operand(embeddings, precision))
        of_a, of_b = _factors(features, embeddings, precision)
        gradient, words = gradient.contiguous(), len(embeddings)
        d_features, d_embeddings = torch.empty_like(features), None
        with product_precision(precision):
            for block in blocks(len(a), len(b), ctx.largest_block):
                logits = product(of_a[block], of_b.T, wide)
                d_logits = logits if a.dtype == wide else torch.empty_like(logits, dtype=a.dtype)
                rows.scaled_exp(logits, words, normalizers[block], gradient[block], out=d_logits)
                del logits
                d_features[block] = product(d_logits, b, wide)
                d_embeddings = add(product(d_logits.T, a[block], wide), d_embeddings)
                del d_logits  # before the next block is made
        d_embeddings = torch.zeros_like(embeddings) if d_embeddings is None else d_embeddings[:words]
        return d_features, d_embeddings, None, None


class _KeptLogNormalizers(torch.autograd.Function):
    """The same with the probabilities p kept: for g, the gradient of the normalisers, diag(g) p E and p^T diag(g) F."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, embeddings: Tensor, precision: str, largest_block: int) -> Tensor:
        a, b = _factors(features, embeddings, precision)
        result = torch.empty(len(a), dtype=features.dtype, device=a.device)
        narrow, wide = operand_type(features, precision), features.dtype
        in_place = narrow == wide and len(a) * len(b) <= largest_block
        with product_precision(precision):
            # [P, V and some zeros]; where nothing else is needed, in the memory of the logits
            probabilities = product(a, b.T, wide) if in_place else a.new_empty(len(a), len(b), dtype=narrow)
            for block in blocks(len(a), len(b), largest_block):
                logits = probabilities if in_place else product(a[block], b.T, wide)
                rows.softmax_and_log_sum_exp(logits, len(embeddings), probabilities[block], result[block])
        ctx.precision = precision
        ctx.save_for_backward(features, embeddings, probabilities)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features, embeddings, probabilities = ctx.saved_tensors
        wide, precision, of_rows = features.dtype, ctx.precision, gradient[:, None]
        b = whole_lines(operand(embeddings, precision))
        scaled = torch.mul(features, of_rows, out=torch.empty_like(features, dtype=probabilities.dtype))
        with product_precision(precision):
            d_features = product(probabilities, b, wide).mul_(of_rows)
            d_embeddings = product(probabilities.T, scaled, wide)
        return d_features, d_embeddings[: len(embeddings)], None, None
