"""Derivations drawn from a grammar itself: trees from the root down, with their words.

All derivations grow together, one level at a time. The nodes of a level that have the same label draw from one
cumulative sum in fp64, so the memory is that of some rows of the rules or of the emission, never samples x N or P x V.

A derivation that is known to need more than `max_length` words is cut, since that of a supercritical grammar may never
end. The rest are samples of p(derivation | at most max_length words).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lm_pcfg.errors import UserError
from lm_pcfg.grammar.emission import Emission

LARGEST_BLOCK = 1 << 22  # numbers in some rows of probabilities


class Derivation(NamedTuple):
    """One sample. A derivation that was cut has neither words nor nodes, and NaN for its log-probability."""

    words: list[int]  # ids
    #: (first word, end, label), parents before children, left before right; of a sequence (word, word + 1, state)
    nodes: list[tuple[int, int, int]]
    log_probability: float  # natural, of its root, rules and words
    cut: bool


@dataclass(frozen=True)
class Derivations:
    """All samples, packed one after another. `len` counts them, and iteration takes them apart."""

    words: np.ndarray  # [sum(lengths)] ids
    nodes: np.ndarray  # [sum(2 lengths - 1), 3] (first word, end, label), of cut samples none
    lengths: np.ndarray  # [samples] words of each; 0 where it was cut
    log_probability: np.ndarray  # [samples]; NaN where it was cut
    cut: np.ndarray  # [samples] whether it would have had more words than allowed

    @property
    def number_cut(self) -> int:
        return int(self.cut.sum())

    def __len__(self) -> int:
        return len(self.cut)

    def __iter__(self) -> Iterator[Derivation]:
        words, nodes = self.words.tolist(), list(zip(*self.nodes.T.tolist(), strict=True))
        word = node = 0
        for length, log_probability, cut in zip(
            self.lengths.tolist(), self.log_probability.tolist(), self.cut.tolist(), strict=True
        ):
            count = max(0, 2 * length - 1)
            yield Derivation(words[word : word + length], nodes[node : node + count], log_probability, cut)
            word, node = word + length, node + count


#: (table: numbers of rows -> their probabilities, a row for each draw, options) -> the option of each draw
Draw = Callable[[Callable[[Tensor], Tensor], np.ndarray, int], np.ndarray]


class DrawnGrammar(Protocol):
    """What a grammar has whose trees are drawn."""

    @property
    def root(self) -> Tensor: ...

    @property
    def emission(self) -> Emission: ...

    @property
    def nonterminals(self) -> int: ...

    def draw_children(self, parents: np.ndarray, draw: Draw) -> np.ndarray:
        """Draw the children of some nonterminals: all left ones, then all right ones."""


def sample_derivations(grammar: DrawnGrammar, number: int, *, seed: int, max_length: int) -> Derivations:
    """Draw so many derivations. The same seed draws the same ones.

    Rows of probabilities that do not quite sum to 1 (bf16) are normalised for the draw; log-probabilities are those of
    the rows as they are, as in `Grammar.log_likelihood`.
    """
    if number < 0 or max_length < 1:
        raise ValueError(f"{number} derivations of at most {max_length} words cannot be drawn")
    with torch.no_grad():
        return _Forest(grammar, number, np.random.default_rng(seed), max_length).grow()


def draw_options(
    table: Callable[[Tensor], Tensor], rows: np.ndarray, options: int, random: np.random.Generator, device: torch.device
) -> tuple[np.ndarray, np.ndarray]:
    """Draw an option for each of some rows of a table [?, options]; return the options and their probabilities.

    table: numbers of rows, on the device -> their probabilities
    """
    chosen, probability = np.empty_like(rows), np.empty(len(rows))
    uniform = random.random(len(rows))
    order = np.argsort(rows, kind="stable")
    distinct, first = np.unique(rows[order], return_index=True)
    groups = np.split(order, first[1:])  # those that draw from the same row
    step = max(1, LARGEST_BLOCK // options)
    for start in range(0, len(distinct), step):
        block = torch.from_numpy(distinct[start : start + step]).to(device)
        # On the host one number is added after the other: the sum never falls, nor rises by an option without mass
        probabilities = table(block).double().cpu().numpy()
        sums = probabilities.cumsum(1)
        if not (np.isfinite(sums[:, -1]) & (sums[:, -1] > 0)).all():
            raise UserError(
                "a row of the model's probabilities has NaN or no mass, so nothing can be drawn: training has become "
                "unstable; use an earlier checkpoint"
            )
        for number, nodes in enumerate(groups[start : start + step]):
            chosen[nodes] = np.searchsorted(sums[number], uniform[nodes] * sums[number, -1], side="right")
            probability[nodes] = probabilities[number, chosen[nodes]]
    return chosen, probability


class _Forest:
    """Trees that grow. A node has a row in the arrays of its level; its parent is given by its number among all."""

    def __init__(self, grammar: DrawnGrammar, number: int, random: np.random.Generator, max_length: int):
        self.grammar, self.n = grammar, grammar.nonterminals
        self.number, self.random, self.max_length = number, random, max_length
        self.log_probability = np.zeros(number)
        self.cut = np.zeros(number, dtype=bool)

    def grow(self) -> Derivations:
        sample = np.arange(self.number)
        root = self.grammar.root[None]
        label = self._draw(sample, root.__getitem__, np.zeros_like(sample), root.shape[1])
        parent = np.full_like(sample, -1)
        levels, before = [(sample, label, parent)], 0  # nodes of all levels before this one
        leaves = np.zeros(self.number, dtype=np.int64)
        while True:
            inner = label < self.n
            leaves += np.bincount(sample[~inner], minlength=self.number)
            # A nonterminal has at least two words
            least = leaves + 2 * np.bincount(sample[inner], minlength=self.number)
            self.cut |= least > self.max_length
            inner &= ~self.cut[sample]
            if not inner.any():
                break
            parent = before + np.flatnonzero(inner)
            before += len(label)
            sample, above = sample[inner], label[inner]
            label = self.grammar.draw_children(above, partial(self._draw, sample))
            sample, parent = np.tile(sample, 2), np.tile(parent, 2)  # all left children, then all right ones
            levels.append((sample, label, parent))
        return self._derivations(levels)

    def _draw(
        self, sample: np.ndarray, table: Callable[[Tensor], Tensor], rows: np.ndarray, options: int
    ) -> np.ndarray:
        """Draw an option for each node from its row of a table [?, options], and count it in the log-probability.

        table: numbers of rows -> their probabilities
        """
        chosen, probability = draw_options(table, rows, options, self.random, self.grammar.root.device)
        np.add.at(self.log_probability, sample, np.log(probability))
        return chosen

    def _derivations(self, levels: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Derivations:
        """Find the spans of all nodes, draw the words, and put everything into the order of the text."""
        bounds = np.cumsum([0, *(len(label) for _, label, _ in levels)])
        sample, label, parent = (np.concatenate(arrays) for arrays in zip(*levels, strict=True))
        width = (label >= self.n).astype(np.int64)
        first = np.zeros_like(width)
        below_the_top = list(pairwise(bounds[1:].tolist()))
        for start, end in reversed(below_the_top):  # from the last level up
            np.add.at(width, parent[start:end], width[start:end])
        for start, end in below_the_top:  # and down again
            middle = (start + end) // 2
            first[start:middle] = first[parent[start:middle]]
            first[middle:end] = first[parent[middle:end]] + width[start:middle]
        kept = np.flatnonzero(~self.cut[sample])
        kept = kept[np.lexsort((-width[kept], first[kept], sample[kept]))]
        sample, label, first, width = (array[kept] for array in (sample, label, first, width))
        leaf = label >= self.n
        words = self._words(label[leaf] - self.n, sample[leaf])
        return Derivations(
            words,
            np.stack((first, first + width, label), 1),
            np.bincount(sample[leaf], minlength=self.number),
            np.where(self.cut, np.nan, self.log_probability),
            self.cut,
        )

    def _words(self, preterminals: np.ndarray, sample: np.ndarray) -> np.ndarray:
        emission = self.grammar.emission
        return self._draw(
            sample,
            lambda rows: emission.log_probabilities_of(rows).double().exp(),
            preterminals,
            len(emission.embeddings),
        )
