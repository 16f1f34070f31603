"""Lengths of real sentences, to measure with where the text itself is not at hand."""

from __future__ import annotations

import numpy as np

#: Lines of 1, 2, ... words of the training text of the Penn Treebank (language-modelling split of Mikolov et al.).
PTB_LINES = (
    *(137, 282, 309, 434, 504, 630, 739, 929, 992, 1101, 1226, 1508, 1457, 1540, 1529, 1640, 1616, 1714, 1580, 1666),
    *(1599, 1566, 1566, 1393, 1452, 1365, 1245, 1146, 1102, 1031, 881, 768, 696, 581, 548, 483, 441, 384, 352, 263),
    *(252, 237, 184, 159, 121, 99, 89, 74, 58, 56, 62, 40, 27, 29, 27, 19, 28, 9, 14, 17, 13, 9, 8, 2, 1, 2, 2, 5, 6),
    *(2, 1, 1, 6, 1, 3, 1, 3, 2, 0, 2, 1, 1),
)  # fmt: skip


def ptb_lengths(count: int, seed: int = 0, at_most: int = 40) -> list[int]:
    """Drawn from those of the Penn Treebank."""
    lines = np.array(PTB_LINES[:at_most], dtype=float)
    return (np.random.default_rng(seed).choice(len(lines), count, p=lines / lines.sum()) + 1).tolist()
