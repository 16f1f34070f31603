"""Products of the tables, and how their rows are cut into blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flash_inside.scaled import matmul_precision, product

#: Logits of a block, at most: 512 MiB in fp32.
LARGEST_BLOCK = 1 << 27


PRECISIONS = ("fp64", "fp32", "tf32", "bf16")


def product_precision(precision: str) -> AbstractContextManager[None]:
    """For fp32 tensors: "fp32" is true fp32, everything below it may use TF32."""
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: use one of {', '.join(PRECISIONS)}")
    return matmul_precision("tf32" if precision == "bf16" else precision)


def check_wide(*tables: Tensor) -> None:
    """Logits have the type of the tables, and in a narrower one than fp32 they would be wrong by tenths."""
    for table in tables:
        if table.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"tables should be float32 or float64, not {table.dtype}; precision='bf16' multiplies in bf16"
            )


def _is_narrowed(table: Tensor, precision: str) -> bool:
    return precision == "bf16" and table.dtype == torch.float32


def operand(table: Tensor, precision: str) -> Tensor:
    """The table as a factor of large products: in bf16 if asked for, else as it is (fp64 stays fp64)."""
    return table.to(torch.bfloat16) if _is_narrowed(table, precision) else table


def rounded(table: Tensor, precision: str) -> Tensor:
    """The values of `operand` in the type of the table: products of them equal those of the operands."""
    return _Rounded.apply(table) if _is_narrowed(table, precision) else table


class _Rounded(torch.autograd.Function):
    """To bf16 and back. Autograd's own derivative of that would round the gradient as well, batch by batch."""

    @staticmethod
    def forward(ctx: Any, table: Tensor) -> Tensor:
        return table.to(torch.bfloat16).to(table.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def whole_lines(table: Tensor) -> Tensor:
    """The table with rows of zeros added up to a multiple of 16.

    Every row of a matrix with so many columns begins at a multiple of 16 bytes. PTB has 9,999 words: without this the
    products of the emission took twice as long on an H200, 3.0 ms of a step at N 4096 instead of 1.0.
    """
    missing = -len(table) % 16
    return functional.pad(table, (0, 0, 0, missing)) if missing else table


def multiply(a: Tensor, b: Tensor, result: torch.dtype) -> Tensor:
    """a @ b, accumulated and returned in `result`."""
    return product(a, b, result)


def add(part: Tensor, to: Tensor | None) -> Tensor:
    """The sum so far: None before the first part."""
    return part if to is None else to.add_(part)


def blocks(rows: int, columns: int, largest: int) -> Iterator[slice]:
    """As few blocks of rows as fit (one row at least), all of about the same size."""
    most = max(1, largest // max(1, columns))
    step = max(1, -(-rows // max(1, -(-rows // most))))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))
