"""The dense inside algorithm: rules are over pairs of children, and do not factor into a left and a right one."""

from flash_inside.dense.interface import BACKENDS, inside, inside_unchecked, last_siblings, span_marginals
from flash_inside.dense.reference import PairRules

__all__ = ["BACKENDS", "PairRules", "inside", "inside_unchecked", "last_siblings", "span_marginals"]
