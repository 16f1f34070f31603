"""Products of the tables, and how their rows are cut into blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from flash_inside.scaled import matmul_precision, product

#: Logits of a block, at most: 512 MiB in fp32.
LARGEST_BLOCK = 1 << 27


def product_precision(precision: str) -> AbstractContextManager[None]:
    """For fp32 tensors: "fp32" is true fp32, everything below it may use TF32."""
    return matmul_precision("tf32" if precision == "bf16" else precision)


def operand(table: Tensor, precision: str) -> Tensor:
    """The table as a factor of large products: in bf16 if asked for, else as it is (fp64 stays fp64)."""
    return table.to(torch.bfloat16) if precision == "bf16" and table.dtype == torch.float32 else table


def multiply(a: Tensor, b: Tensor, result: torch.dtype) -> Tensor:
    """a @ b, accumulated and returned in `result`."""
    return product(a, b, result)


def blocks(rows: int, columns: int, largest: int) -> Iterator[slice]:
    """As few blocks of rows as fit, all of about the same size."""
    count = max(1, -(-rows * columns // largest))
    step = max(1, -(-rows // count))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))
