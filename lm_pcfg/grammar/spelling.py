"""Parts of the embeddings of words that come from how they are written, shared by all words written alike.

Half of the 10,000 words of the Penn Treebank occur 15 times or fewer: too few to learn 512 numbers each, but enough to
see what words in "-ing" or "-ed" do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

LENGTHS = range(2, 7)  # of a part, in characters; those of two only at the ends of a word


class Spelling(nn.Module):
    """table: one row for each part that occurs in `least` words or more; it begins as 0, so words begin as without.

    A word has the sum of its parts' rows over the square root of their number.
    """

    def __init__(self, words: Sequence[str], dimension: int, least: int):
        super().__init__()
        parts = [parts_of(word) for word in words]
        counts = Counter(part for of_word in parts for part in of_word)
        rows = {part: row for row, part in enumerate(sorted(part for part, n in counts.items() if n >= least))}
        numbers = [sorted(rows[part] for part in of_word if part in rows) for of_word in parts]
        self.table = nn.Parameter(torch.zeros(len(rows), dimension))
        # Plain attributes: they follow from the words, so that no checkpoint holds them and no `to(...)` moves them.
        self._rows = torch.tensor([row for of_word in numbers for row in of_word], dtype=torch.int64)
        counted = torch.tensor([len(of_word) for of_word in numbers])
        self._starts = counted.cumsum(0) - counted
        self._scale = counted.clamp(min=1).double().rsqrt()[:, None]
        self._matrices: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def forward(self) -> Tensor:
        """[words, dimension]"""
        table = self.table
        if table.device.type == "cpu":
            summed = functional.embedding_bag(self._rows, table, self._starts, mode="sum")
            return summed * self._scale.to(table.dtype)
        # A product with zeros and ones: 0.1 ms for 10,000 words of 3,000 parts, and the gradient of a part that
        # thousands of words have is summed in one order.
        key = table.device, table.dtype
        if key not in self._matrices:
            self._matrices[key] = self._matrix(*key)
        return self._matrices[key] @ table

    def _matrix(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """[words, parts]"""
        words = len(self._starts)
        ends = torch.cat((self._starts[1:], torch.tensor([len(self._rows)])))
        of_words = torch.repeat_interleave(torch.arange(words), ends - self._starts)
        matrix = torch.zeros(words, len(self.table), dtype=dtype)
        matrix[of_words, self._rows] = self._scale.to(dtype)[of_words, 0]
        return matrix.to(device)


def parts_of(word: str) -> set[str]:
    """ "cats" -> "<c", "s>", "<ca", "cat", "ats", "ts>", ..., "<cats>" """
    if word.startswith("<") and word.endswith(">"):  # <unk>, <eos>: not how anything is written
        return set()
    marked = f"<{word}>"
    parts = {marked[first : first + n] for n in LENGTHS for first in range(len(marked) - n + 1)}
    return {part for part in parts if len(part) > LENGTHS[0] or part[0] == "<" or part[-1] == ">"}
