"""The inside algorithm of simple PCFGs in scaled linear space: plain PyTorch, any device."""

from flash_inside.scaled.chart import Chart, Weights, leaf_values
from flash_inside.scaled.passes import Result, Root, inside

__all__ = ["Chart", "Result", "Root", "Weights", "inside", "leaf_values"]
