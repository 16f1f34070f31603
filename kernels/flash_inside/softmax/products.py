"""Products of the tables, and how their rows are cut into blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

#: Logits of a block, at most: 512 MiB in fp32.
LARGEST_BLOCK = 1 << 27
#: In fp16, which ends at 65,504, features are counted in this unit and words in its inverse: logits are the same.
#: Features are what a network makes, and where a training is unstable they exceed that for some steps. Words, which are
#: weights, end at 1,023.
FEATURE_UNIT = 64.0


def check_tables(*tables: Tensor, narrowest: torch.dtype = torch.float32) -> None:
    """Refuse other types than fp32 and fp64, and `narrowest`."""
    for table in tables:
        if table.dtype not in (torch.float32, torch.float64, narrowest):
            raise ValueError(
                f"tables should be float32 or float64, not {table.dtype}; precision='bf16' multiplies in 16 bits"
            )
    if len({table.dtype for table in tables}) > 1:
        raise ValueError(f"tables should have one type, not {', '.join(str(table.dtype) for table in tables)}")


def wide_type(table: Tensor) -> torch.dtype:
    """Return the type in which products of the table are summed: at least fp32."""
    return torch.promote_types(table.dtype, torch.float32)


def operand_type(table: Tensor, precision: str) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16" and table.dtype == torch.float32 else table.dtype


def operand(table: Tensor, precision: str) -> Tensor:
    """Return the table as a factor of large products: in bf16 if asked for, else as it is (fp64 stays fp64)."""
    return table.to(operand_type(table, precision))


def of_logits(table: Tensor, precision: str) -> Tensor:
    """Return the table as a factor of logits: as `operand`, but in fp16 instead of bf16.

    Both have 16 bits. Logits need the three more digits of fp16, and gradients, which may be tiny, the range of bf16.
    """
    narrow = operand_type(table, precision) == torch.bfloat16
    return table.to(torch.float16) if narrow else table


def factors_of_logits(features: Tensor, embeddings: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Return features [.., d] and embeddings of words [.., d] as factors of logits: where they are fp16, in units."""
    if operand_type(features, precision) == features.dtype:
        return features, embeddings
    return _to_fp16(features, 1 / FEATURE_UNIT), _to_fp16(embeddings, FEATURE_UNIT)


def rounded_factors(features: Tensor, embeddings: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Return the values of `factors_of_logits` in the type of the tables: products of them equal those of the factors.

    Autograd's own derivative of rounding would round the gradient as well, batch by batch.
    """
    if operand_type(features, precision) == features.dtype:
        return features, embeddings
    return _Rounded.apply(features, 1 / FEATURE_UNIT), _Rounded.apply(embeddings, FEATURE_UNIT)


def _to_fp16(table: Tensor, factor: float) -> Tensor:
    """Multiply by a power of two, in one pass: only rounding to fp16 changes digits."""
    return torch.mul(table, factor, out=torch.empty_like(table, dtype=torch.float16))


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, factor: float) -> Tensor:
        return _to_fp16(table, factor).to(table.dtype).mul_(1 / factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def whole_lines(table: Tensor) -> Tensor:
    """Add rows of zeros to the table, up to a multiple of 16.

    Every row of a matrix with so many columns begins at a multiple of 16 bytes. PTB has 9,999 words: without this the
    products of the emission took twice as long on an H200, 3.0 ms of a step at N 4096 instead of 1.0.
    """
    missing = -len(table) % 16
    return functional.pad(table, (0, 0, 0, missing)) if missing else table


def add(part: Tensor, to: Tensor | None) -> Tensor:
    """Add a part to the sum so far, which is None before the first part."""
    return part if to is None else to.add_(part)


def blocks(rows: int, columns: int, largest: int) -> Iterator[slice]:
    """Yield as few blocks of rows as `largest` allows (one row at least), all of about the same size."""
    most = max(1, largest // max(1, columns))
    step = max(1, -(-rows // max(1, -(-rows // most))))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))
