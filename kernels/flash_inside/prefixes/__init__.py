"""Prefix probabilities of simple PCFGs: how a sentence may go on, exactly."""

from flash_inside.prefixes.ending import LeftCorners, ending_probabilities
from flash_inside.prefixes.incremental import GrowingPrefixes
from flash_inside.prefixes.interface import Prefixes, prefix

__all__ = ["GrowingPrefixes", "LeftCorners", "Prefixes", "ending_probabilities", "prefix"]
