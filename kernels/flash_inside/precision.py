"""Number formats: which there are, how products use them, which results can be trusted, how far results may be off.

Tolerances and the limits that a number format sets are here, apart from constants of the kernels (triton/kernels.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Format(NamedTuple):
    compute: torch.dtype  # sums, scales of rows, what comes out
    storage: torch.dtype  # chart rows and operands of the matrix products


FORMATS = {
    "fp64": Format(torch.float64, torch.float64),
    "fp32": Format(torch.float32, torch.float32),
    "tf32": Format(torch.float32, torch.float32),
    "bf16": Format(torch.float32, torch.bfloat16),
}
PRECISIONS = tuple(FORMATS)
#: All but fp64, which has no Triton kernels: the others are checked against it.
FAST_PRECISIONS = ("fp32", "tf32", "bf16")

#: Up to this many nonterminals "bf16" keeps the chart in fp32: the products cost nothing there, and with few symbols
#: rounding errors of bf16 do not average out (two words, 16 symbols: 4 times the error allowed to bf16).
LARGEST_FP32_CHART = 256
#: Nor do they average out in sentences of up to this many words. The torch backend computes a batch that has such a
#: sentence in fp32 as a whole; the triton backend keeps what rounding left of its rows.
MOST_WORDS_OF_SHORT = 16

#: A sentence is recomputed if |D|, the derivative of log Z by a stored value, is larger than this. A value lost below
#: the smallest number of the format (1e-38 in fp32) matters to log Z only if D at its place is of the order of its
#: inverse. The rows of the torch backend have entries of up to 1, and the limit has ten decades of margin.
LARGEST_D_OF_TORCH = {torch.float32: 1e28, torch.float64: 1e298}
#: The rows of the triton backend have entries of up to 2^40, and sums of D times such entries, the gradients of the
#: rules, must not leave the range of fp32 either.
LARGEST_D_OF_TRITON = 1e23

#: How far results may be from fp64 on the same rounded tensors: log Z, relative to max(|log Z|, words); expected
#: counts, relative in norm.
TOLERANCE = {"fp64": (1e-12, 1e-10), "fp32": (1e-6, 1e-5), "tf32": (1e-4, 2e-3), "bf16": (3e-4, 2.5e-2)}
#: Of a best tree's log score, relative to max(|log score|, words): values are fp32.
TOLERANCE_OF_TREES = 1e-6
#: Of the emission's log-normalisers (absolute) and of their gradients (relative in norm).
TOLERANCE_OF_NORMALIZERS = {"fp32": (1e-4, 1e-4), "tf32": (5e-2, 2e-2), "bf16": (2e-1, 5e-2)}


def check_precision(name: str) -> None:
    if name not in FORMATS:
        raise ValueError(f"unknown precision {name!r}: use one of {', '.join(PRECISIONS)}")


def chart_format(precision: str, nonterminals: int, shortest: int | None = None) -> Format:
    """Return the format of the chart. shortest: words of the shortest sentence, if a short one makes all of it fp32."""
    short = shortest is not None and shortest <= MOST_WORDS_OF_SHORT
    return FORMATS["fp32" if precision == "bf16" and (short or nonterminals <= LARGEST_FP32_CHART) else precision]


def most_words_of_short(storage: torch.dtype) -> int:
    """Return up to how many words a sentence needs more than the storage type gives: 0 for all but bf16."""
    return MOST_WORDS_OF_SHORT if storage == torch.bfloat16 else 0


def rules_type(precision: str, nonterminals: int) -> torch.dtype | None:
    """Return the narrowest type of left and right that loses nothing in this precision; None: any."""
    return torch.bfloat16 if chart_format(precision, nonterminals).storage == torch.bfloat16 else None


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Use TF32 products only where they were asked for, whatever the process-wide settings are: fp32 means fp32."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):  # to leave it takes time that a small grammar's step has not
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        settings.fp32_precision = before


@contextmanager
def full_matmul_precision(precision: str) -> Iterator[None]:
    """Do as `matmul_precision`, and sum products of 16-bit operands in fp32."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = settings.allow_fp16_reduced_precision_reduction = False
    try:
        with matmul_precision(precision):
            yield
    finally:
        settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction = before


def product_precision(precision: str) -> AbstractContextManager[None]:
    """Set the precision of the networks' products: of fp32 tensors "fp32" is true fp32, and lower ones may use TF32.

    For "bf16" products of bf16 tensors are summed in fp32.
    """
    check_precision(precision)
    return full_matmul_precision("tf32") if precision == "bf16" else matmul_precision(precision)


def product(a: Tensor, b: Tensor, compute: torch.dtype) -> Tensor:
    """Return a @ b, or a batch of these: operands in the storage type, accumulated and returned in the compute type."""
    if a.dtype == compute:
        return a @ b
    if a.is_cuda:
        return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=compute)
    return a.to(compute) @ b.to(compute)


def gradient_type(tensor: Tensor) -> torch.dtype:
    """Return the type of a tensor's gradient: a leaf may ask for a wider one than its own (`grad_dtype`)."""
    return (tensor.grad_dtype or tensor.dtype) if tensor.is_leaf else tensor.dtype


def largest_gradient(dtype: torch.dtype) -> float:
    """Return the limit to which gradients are clamped.

    The derivative by a probability is (expected count) / probability: for a needed rule of probability 1e-40 it is
    finite in fp64 and infinite in fp32.
    """
    return torch.finfo(dtype).max / 64


def finite(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient in this type, clamped if it comes from a wider one."""
    limit = largest_gradient(dtype)
    if torch.finfo(gradient.dtype).max > limit * 64:
        gradient = gradient.clamp(-limit, limit)
    return gradient.to(dtype)


def upcast(tensor: Tensor, index: Tensor | None = None) -> Tensor:
    """Convert to fp64, or these rows of it, with a backward that cannot overflow on the way back to a smaller type."""
    if tensor.dtype == torch.float64:
        return tensor if index is None else tensor[index]
    return _Upcast.apply(tensor, index)


class _Upcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, index: Tensor | None) -> Tensor:
        ctx.gradient_type, ctx.index, ctx.shape = gradient_type(tensor), index, tensor.shape
        return (tensor if index is None else tensor[index]).to(torch.float64)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        limit = largest_gradient(ctx.gradient_type)
        gradient = gradient.clamp(-limit, limit).to(ctx.gradient_type)
        if ctx.index is not None:
            gradient = gradient.new_zeros(ctx.shape).index_copy_(0, ctx.index, gradient)
        return gradient, None
