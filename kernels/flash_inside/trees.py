"""Labelled trees from a chart in log space, here the best of every sentence; `sampling.py` draws them instead.

For the best tree the sums of the inside algorithm become maxima:

    beta_ij[A] = max_k eta_ik[A] + zeta_kj[A]        eta_ij[A] = max_B log left[A, B] + beta_ij[B]      (zeta: right)

No back-pointers are stored (they would be as large as the chart): a tree has 2l - 1 nodes, and the argmax is found
again at each, from the top down, for all sentences at once. Nothing can underflow, so nothing is ever recomputed.
The score is the sum of the tree's own log-probabilities in fp64; fp32 only decides between trees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from flash_inside.packing import Layout
from flash_inside.rules import Rules, log

LARGEST_BLOCK = 1 << 24  # elements of a temporary [rows, N] x K

Tree = list[tuple[int, int, int]]  # (first word, end, label) of every node, parents before children, left before right


def best_trees(
    rules: Rules, emissions: Tensor, lengths: list[int], dtype: torch.dtype, triton: bool
) -> list[tuple[float, Tree]]:
    """Return (log score, tree) of every sentence, in the caller's order; (-inf, []) where there is no tree."""
    with torch.no_grad(), torch.cuda.device_of(emissions):  # Triton launches on the current device
        found = BestTrees(rules, emissions, Layout(lengths), dtype, triton).trees()
    return [trees[0] if trees else (float("-inf"), []) for trees in found]


class LogChart:
    """Log values of every span, packed, and trees taken from them. Index arrays of nodes are NumPy, one entry a node.

    Three methods say what the values are and which of them a tree takes: `_over_children`, `_over_splits`, `_choose`.
    """

    def __init__(self, rules: Rules, emissions: Tensor, layout: Layout, dtype: torch.dtype, trees_each: int = 1):
        self.layout, self.n, self.device, self.trees_each = layout, rules.nonterminals, emissions.device, trees_each
        self.rules = rules
        #: [N] or [N+P]; rules per sentence: [B, ...], sorted
        self.root = log(layout.sort(rules.root) if rules.per_sentence else rules.root, dtype)
        self.leaves = emissions[torch.from_numpy(layout.leaf_word).to(self.device)].to(dtype).contiguous()  # [words, P]
        rows = int(layout.offset[layout.longest])
        self.children = torch.empty(rows, 2 * self.n, dtype=dtype, device=self.device)  # eta | zeta
        self.beta = torch.empty(layout.rows - layout.words, self.n, dtype=dtype, device=self.device)

    def _over_children(self, values: Tensor, columns: slice, out: Tensor, sentences: slice) -> None:
        """Write eta | zeta [R, 2N] of spans whose values [R, K] belong to these K columns of the rules.

        Rules per sentence: [sentences, R, 2N] of [sentences, R, K]. sentences: which these are, sorted
        """
        raise NotImplementedError

    def _over_splits(self, values: Tensor) -> Tensor:
        """[r, splits, N] -> [r, N]."""
        raise NotImplementedError

    def _choose(self, values: Tensor) -> Tensor:
        """Return which of the options each tree takes: [nodes, options] log values -> [nodes]."""
        raise NotImplementedError

    def _fill(self) -> None:
        layout = self.layout
        if layout.longest > 1:
            self._fill_children(1, self.leaves, slice(self.n, None))
        for width in range(2, layout.longest + 1):
            self._fill_width(width)
            if width < layout.longest:
                here = layout.span_rows(width)
                values = self.beta[here.start - layout.words : here.stop - layout.words]
                self._fill_children(width, values, slice(0, self.n))

    def _fill_children(self, width: int, values: Tensor, columns: slice) -> None:
        out = self.children[self.layout.span_rows(width)]
        if not self.rules.per_sentence:
            self._over_children(values, columns, out, slice(0, self.layout.alive[width]))
            return
        for run in self.layout.runs(width):
            self._over_children(run.of(values), columns, run.of(out), run.sentences)

    def _fill_width(self, width: int) -> None:
        here = self.layout.span_rows(width)
        first, spans = here.start - self.layout.words, here.stop - here.start
        step = max(1, LARGEST_BLOCK // (self.n * (width - 1)))
        for start in range(0, spans, step):
            block = slice(start, min(start + step, spans))
            left, right = (self._tensor(rows) for rows in self.layout.splits(width, block))  # [r, splits]
            sums = self.children[left, : self.n] + self.children[right, self.n :]  # [r, splits, N]
            self.beta[first + block.start : first + block.stop] = self._over_splits(sums)

    def trees(self) -> list[list[tuple[float, Tree]]]:
        """Return (log score, tree) of every tree of every sentence, in the caller's order; [] where there is none."""
        layout, each = self.layout, self.trees_each
        scores = np.zeros(len(layout.order) * each)
        nodes = self._tops()
        of_tops = self._entries(self.rules.root, nodes[:, 0] // each, nodes[:, 3])
        np.add.at(scores, nodes[:, 0], of_tops.double().log().cpu().numpy())
        levels = [nodes]
        while True:  # one level of all trees at a time; columns: tree, start, end, label
            inner = nodes[nodes[:, 2] - nodes[:, 1] > 1]
            if not len(inner):
                break
            tree, start, end, label = inner.T
            (middle,) = self._in_blocks(self._middles, tree // each, start, end, label)
            sides = []
            for rule, first, last in ((self.rules.left, start, middle), (self.rules.right, middle, end)):
                child, log_rule = self._in_blocks(partial(self._children, rule), tree // each, first, last, label)
                np.add.at(scores, tree, log_rule)
                sides.append(np.stack((tree, first, last, child), 1))
            nodes = np.concatenate(sides)
            levels.append(nodes)
        nodes = np.concatenate(levels)
        tree, start, _, label = nodes[nodes[:, 2] - nodes[:, 1] == 1].T
        emitted = self.leaves[self._tensor(layout.prefix[tree // each] + start), self._tensor(label - self.n)]
        np.add.at(scores, tree, emitted.double().cpu().numpy())
        return self._by_sentence(nodes, scores.tolist())

    def _entries(self, rule: Tensor, sentence: np.ndarray, label: np.ndarray) -> Tensor:
        """Return what the rules of each node's sentence say of its label: [nodes, ...]. sentence: sorted"""
        labels = self._tensor(label)
        if not self.rules.per_sentence:
            return rule[labels]
        return rule[self._tensor(np.array(self.layout.order, dtype=np.int64)[sentence]), labels]

    def _by_sentence(self, nodes: np.ndarray, scores: list[float]) -> list[list[tuple[float, Tree]]]:
        tree, start, end, label = nodes[np.lexsort((-nodes[:, 2], nodes[:, 1], nodes[:, 0]))].T
        every_node = list(zip(start.tolist(), end.tolist(), label.tolist(), strict=True))
        bounds = np.searchsorted(tree, np.arange(len(scores) + 1)).tolist()
        results: list[list[tuple[float, Tree]]] = [[] for _ in self.layout.order]
        for number, score in enumerate(scores):
            if bounds[number] < bounds[number + 1]:
                sentence = self.layout.order[number // self.trees_each]
                results[sentence].append((score, every_node[bounds[number] : bounds[number + 1]]))
        return results

    def _tops(self) -> np.ndarray:
        """Return the top nodes of all trees, [trees, 4]: none of a sentence that the grammar cannot generate."""
        layout, n, each = self.layout, self.n, self.trees_each
        longer = layout.alive[2] if layout.longest > 1 else 0
        tops, found = layout.tops(), [np.empty((0, 4), dtype=np.int64)]
        for sentences, columns, values, first_row in (
            (slice(0, longer), slice(0, n), self.beta, layout.words),
            (slice(longer, len(tops)), slice(n, None), self.leaves, 0),
        ):
            root = self.root[sentences, columns] if self.rules.per_sentence else self.root[columns]
            if sentences.start == sentences.stop or not root.shape[-1]:
                continue
            scores = root + values[self._tensor(tops[sentences] - first_row)]
            possible = np.repeat(np.flatnonzero((scores.amax(1) > float("-inf")).cpu().numpy()), each)
            (label,) = self._in_blocks(partial(self._labels, scores), possible)
            sentence = sentences.start + possible
            tree = sentence * each + np.arange(len(possible)) % each
            ends = layout.lengths[sentence]
            found.append(np.stack((tree, np.zeros_like(tree), ends, columns.start + label), 1))
        return np.concatenate(found)

    def _labels(self, scores: Tensor, rows: np.ndarray) -> tuple[np.ndarray]:
        return (self._choose(scores[self._tensor(rows)]).cpu().numpy(),)

    def _middles(self, b: np.ndarray, start: np.ndarray, end: np.ndarray, label: np.ndarray) -> tuple[np.ndarray]:
        """Choose k by eta_ik[A] + zeta_kj[A]."""
        most = int((end - start).max()) - 1
        middle = start[:, None] + 1 + np.arange(most)[None, :]  # [nodes, splits]
        real = middle < end[:, None]
        middle = np.where(real, middle, start[:, None] + 1)
        left = self._tensor(self._rows(b[:, None], start[:, None], middle - start[:, None]))
        right = self._tensor(self._rows(b[:, None], middle, end[:, None] - middle))
        labels, mask = self._tensor(label[:, None]), self._tensor(real)
        value = self.children[left, labels] + self.children[right, self.n + labels]
        return (start + 1 + self._choose(value.masked_fill(~mask, float("-inf"))).cpu().numpy(),)

    def _children(
        self, rule: Tensor, b: np.ndarray, start: np.ndarray, end: np.ndarray, label: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Choose B by log rule[A, B] + value of B at the span; return it, and log rule[A, B] in fp64."""
        child, log_rule = np.empty_like(label), np.empty(len(label))
        row = self._rows(b, start, end - start)
        for leaf in (False, True):
            mine = (end - start == 1) == leaf
            if not mine.any():
                continue
            columns = slice(self.n, None) if leaf else slice(0, self.n)
            values = self.leaves if leaf else self.beta
            rows = self._tensor(row[mine] - (0 if leaf else self.layout.words))
            probabilities = self._entries(rule[..., columns], b[mine], label[mine])  # [nodes, N or P]
            chosen = self._choose(log(probabilities, values.dtype) + values[rows])[:, None]
            child[mine] = chosen.squeeze(1).cpu().numpy() + columns.start
            log_rule[mine] = probabilities.gather(1, chosen).squeeze(1).double().log().cpu().numpy()
        return child, log_rule

    def _in_blocks(self, function: Callable[..., tuple[np.ndarray, ...]], *nodes: np.ndarray) -> list[np.ndarray]:
        """Call it with some nodes at a time, and put its results together."""
        step = max(1, LARGEST_BLOCK // max(self.rules.left.shape[-1], self.layout.longest))
        starts = range(0, max(1, len(nodes[0])), step)
        parts = [function(*(array[start : start + step] for array in nodes)) for start in starts]
        return [np.concatenate(results) for results in zip(*parts, strict=True)]

    def _rows(self, sentence: np.ndarray, start: np.ndarray, width: np.ndarray) -> np.ndarray:
        return self.layout.offset[width] + self.layout.prefix[sentence] - sentence * (width - 1) + start

    def _tensor(self, indices: np.ndarray) -> Tensor:
        return torch.from_numpy(indices).to(self.device)


class BestTrees(LogChart):
    """Values are maxima, and a tree takes the largest."""

    def __init__(self, rules: Rules, emissions: Tensor, layout: Layout, dtype: torch.dtype, triton: bool):
        super().__init__(rules, emissions, layout, dtype)
        # Both sides next to each other and children first: [N+P, 2N], so that neighbours read neighbours
        both = torch.cat((rules.left, rules.right), dim=-2).mT
        self.by_child = log(layout.sort(both) if rules.per_sentence else both, dtype).contiguous()
        self.max_plus: Callable[[Tensor, Tensor, Tensor], None] = max_plus
        self.split_maximum: Callable[[int], None] = super()._fill_width
        if triton:
            from flash_inside.triton import viterbi as triton_viterbi  # imported where it is used: needs triton

            self.max_plus = triton_viterbi.max_plus
            self.split_maximum = triton_viterbi.SplitMaximum(self.children, self.beta, layout)
        self._fill()

    def _over_children(self, values: Tensor, columns: slice, out: Tensor, sentences: slice) -> None:
        by_child = self.by_child[sentences] if self.rules.per_sentence else self.by_child
        self.max_plus(values, by_child[..., columns, :], out)

    def _fill_width(self, width: int) -> None:
        self.split_maximum(width)

    def _over_splits(self, values: Tensor) -> Tensor:
        return values.amax(1)

    def _choose(self, values: Tensor) -> Tensor:
        return values.argmax(1)


def max_plus(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    """out[r, a] = max_k rows[r, k] + weight[k, a]: [R, K], [K, A] -> [R, A], or a batch of these."""
    step = max(1, LARGEST_BLOCK // max(1, weight.numel()))
    for start in range(0, rows.shape[-2], step):
        block = rows[..., start : start + step, :, None]  # [r, K, 1]
        out[..., start : start + step, :] = (block + weight[..., None, :, :]).amax(-2)
