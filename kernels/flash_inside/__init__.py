"""FlashInside: sentence log marginals, span posteriors, best trees, drawn trees and prefix probabilities of
simple PCFGs.

Tensors only: charts, scales, autograd. Nothing here knows about models, text or training.
"""

from flash_inside.brackets import span_limits
from flash_inside.interface import (
    BACKENDS,
    free_memory,
    inside,
    inside_unchecked,
    last_siblings,
    sample_trees,
    span_marginals,
    viterbi,
)
from flash_inside.mbr import mbr
from flash_inside.precision import PRECISIONS, rules_type
from flash_inside.prefixes import GrowingPrefixes, LeftCorners, Prefixes, prefix
from flash_inside.recomputation import Statistics
from flash_inside.rules import FactoredRules, ResidentRules, Rules

__all__ = [
    "BACKENDS",
    "PRECISIONS",
    "FactoredRules",
    "GrowingPrefixes",
    "LeftCorners",
    "Prefixes",
    "ResidentRules",
    "Rules",
    "Statistics",
    "free_memory",
    "inside",
    "inside_unchecked",
    "last_siblings",
    "mbr",
    "prefix",
    "rules_type",
    "sample_trees",
    "span_limits",
    "span_marginals",
    "viterbi",
]
