"""What is measured: sizes of grammars and batches, sentences as long as real ones, and random tensors of a size."""

from __future__ import annotations

import argparse
import math
import re
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flash_inside.devices import check_memory

#: Lines of 1, 2, ... words of the training text of the Penn Treebank (language-modelling split of Mikolov et al.).
PTB_LINES = (
    *(137, 282, 309, 434, 504, 630, 739, 929, 992, 1101, 1226, 1508, 1457, 1540, 1529, 1640, 1616, 1714, 1580, 1666),
    *(1599, 1566, 1566, 1393, 1452, 1365, 1245, 1146, 1102, 1031, 881, 768, 696, 581, 548, 483, 441, 384, 352, 263),
    *(252, 237, 184, 159, 121, 99, 89, 74, 58, 56, 62, 40, 27, 29, 27, 19, 28, 9, 14, 17, 13, 9, 8, 2, 1, 2, 2, 5, 6),
    *(2, 1, 1, 6, 1, 3, 1, 3, 2, 0, 2, 1, 1),
)  # fmt: skip


def ptb_lengths(count: int, seed: int = 0, at_most: int = 40) -> list[int]:
    """Draw lengths of sentences from those of the Penn Treebank."""
    lines = np.array(PTB_LINES[:at_most], dtype=float)
    return (np.random.default_rng(seed).choice(len(lines), count, p=lines / lines.sum()) + 1).tolist()


class Size(NamedTuple):
    nonterminals: int
    words: int | str  # of every sentence, or "ptb"
    sentences: int

    @property
    def lengths(self) -> list[int]:
        return ptb_lengths(self.sentences) if isinstance(self.words, str) else [self.words] * self.sentences

    @property
    def spans(self) -> int:
        """The number of spans of two words or more."""
        return sum(length * (length - 1) // 2 for length in self.lengths)

    @property
    def flops(self) -> float:
        """The operations of the matrix products, forward and backward: three products for the spans (also for whole
        sentences, though they need fewer), three for the words."""
        n = self.nonterminals
        return 3 * 2 * 2 * n * (n * self.spans + 2 * n * sum(self.lengths))


def parse_grid(text: str) -> list[Size]:
    sizes = []
    for part in text.split(","):
        size = re.fullmatch(r"0*([1-9]\d*)x0*([1-9]\d*|ptb)x0*([1-9]\d*)", part)
        if size is None or size[2] == "1":
            raise argparse.ArgumentTypeError(
                f"{part!r}: sizes are NxWORDSxSENTENCES, with at least two words (or `ptb`)"
            )
        sizes.append(Size(int(size[1]), "ptb" if size[2] == "ptb" else int(size[2]), int(size[3])))
    return sizes


def make_inputs(size: Size, precision: str, device: torch.device, per_sentence: bool = False) -> list[Tensor]:
    """Return root, left, right, emissions of a random grammar; the rules in the type the precision works in.

    per_sentence: of as many grammars as there are sentences
    """
    generator = torch.Generator(device).manual_seed(1)
    n, rules_type = size.nonterminals, torch.bfloat16 if precision == "bf16" else torch.float32
    chart = size.spans * 3 * n * rules_type.itemsize  # beta, eta and zeta: there is more
    grammars = (size.sentences,) if per_sentence else ()
    check_memory(
        math.prod(grammars) * 2 * 3 * n * n * rules_type.itemsize + sum(size.lengths) * 2 * n * 4 + chart, device
    )

    def softmax(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).softmax(-1)

    root, left, right = (
        softmax(*grammars, n if size.words != "ptb" else 3 * n),
        softmax(*grammars, n, 3 * n).to(rules_type),
        softmax(*grammars, n, 3 * n).to(rules_type),
    )
    emissions = torch.randn(sum(size.lengths), 2 * n, device=device, generator=generator) - 8
    return [tensor.requires_grad_() for tensor in (root, left, right, emissions)]
