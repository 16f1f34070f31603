"""FlashInside: sentence log marginals, span posteriors and best trees of simple PCFGs.

Tensors only: charts, scales, autograd. Nothing here knows about models, text or training.
"""

from flash_inside.interface import (
    BACKENDS,
    PRECISIONS,
    Statistics,
    free_memory,
    inside,
    inside_unchecked,
    rules_type,
    span_marginals,
    viterbi,
)
from flash_inside.mbr import mbr
from flash_inside.rules import Rules

__all__ = [
    "BACKENDS",
    "PRECISIONS",
    "Rules",
    "Statistics",
    "free_memory",
    "inside",
    "inside_unchecked",
    "mbr",
    "rules_type",
    "span_marginals",
    "viterbi",
]
