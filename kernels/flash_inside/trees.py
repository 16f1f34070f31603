"""The best labelled tree of every sentence, in log space: sums of the inside algorithm become maxima.

    beta_ij[A] = max_k eta_ik[A] + zeta_kj[A]        eta_ij[A] = max_B log left[A, B] + beta_ij[B]      (zeta: right)

No back-pointers are stored (they would be as large as the chart): a tree has 2l - 1 nodes, and the argmax is found
again at each, from the top down, for all sentences at once. Nothing can underflow, so nothing is ever recomputed.
The score is the sum of the tree's own log-probabilities in fp64; fp32 only decides between trees.
"""

from __future__ import annotations

from collections.abc import Callable

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
        return _Chart(rules, emissions, Layout(lengths), dtype, triton).trees()


class _Chart:
    """Log values of every span, packed. Index arrays of nodes are NumPy; one entry a node."""

    def __init__(self, rules: Rules, emissions: Tensor, layout: Layout, dtype: torch.dtype, triton: bool):
        self.layout, self.n, self.device = layout, rules.nonterminals, emissions.device
        self.rules, self.root = rules, log(rules.root, dtype)
        self.leaves = emissions[torch.from_numpy(layout.leaf_word).to(self.device)].to(dtype).contiguous()  # [words, P]
        # Both sides next to each other and children first: [N+P, 2N], so that neighbours read neighbours
        by_child = log(torch.cat((rules.left, rules.right)).T, dtype).contiguous()
        n, words, longest = self.n, layout.words, layout.longest
        self.children = torch.empty(int(layout.offset[longest]), 2 * n, dtype=dtype, device=self.device)  # eta | zeta
        self.beta = torch.empty(layout.rows - words, n, dtype=dtype, device=self.device)
        best_child: Callable[[Tensor, Tensor, Tensor], None] = max_plus
        best_split: Callable[[int], None] = self._best_split
        if triton:
            from flash_inside.triton import viterbi as triton_viterbi  # imported where it is used: needs triton

            best_child = triton_viterbi.max_plus
            best_split = triton_viterbi.SplitMaximum(self.children, self.beta, layout)
        if longest > 1:
            best_child(self.leaves, by_child[n:], self.children[:words])
        for width in range(2, longest + 1):
            best_split(width)
            if width < longest:
                here = layout.span_rows(width)
                best_child(self.beta[here.start - words : here.stop - words], by_child[:n], self.children[here])

    def _best_split(self, width: int) -> None:
        left, right = (torch.from_numpy(rows).to(self.device) for rows in self.layout.splits(width))  # [R, splits]
        first = self.layout.span_rows(width).start - self.layout.words
        step = max(1, LARGEST_BLOCK // (self.n * left.shape[1]))
        for start in range(0, left.shape[0], step):
            block = slice(start, min(start + step, left.shape[0]))
            sums = self.children[left[block], : self.n] + self.children[right[block], self.n :]  # [r, splits, N]
            self.beta[first + block.start : first + block.stop] = sums.amax(1)

    def rows(self, sentence: np.ndarray, start: np.ndarray, width: np.ndarray) -> np.ndarray:
        return self.layout.offset[width] + self.layout.prefix[sentence] - sentence * (width - 1) + start

    def trees(self) -> list[tuple[float, Tree]]:
        layout, n = self.layout, self.n
        scores, nodes = self._tops()
        trees: list[Tree] = [[] for _ in layout.order]
        leaves = [nodes[:0]]
        while nodes.size:  # one level of all trees at a time; columns: sorted sentence, start, end, label
            for b, start, end, label in nodes.tolist():
                trees[b].append((start, end, label))
            is_leaf = nodes[:, 2] - nodes[:, 1] == 1
            leaves.append(nodes[is_leaf])
            inner = nodes[~is_leaf]
            if not len(inner):
                break
            b, start, end, label = inner.T
            middle = self._best_middles(b, start, end, label)
            sides = []
            for side, first, last in ((0, start, middle), (1, middle, end)):
                child, log_rule = self._best_children(side, b, first, last, label)
                np.add.at(scores, b, log_rule)
                sides.append(np.stack((b, first, last, child), 1))
            nodes = np.concatenate(sides)
        b, start, _, label = np.concatenate(leaves).T
        row, column = (torch.from_numpy(index).to(self.device) for index in (layout.prefix[b] + start, label - n))
        np.add.at(scores, b, self.leaves[row, column].double().cpu().numpy())
        results: list[tuple[float, Tree]] = [(float("-inf"), [])] * len(trees)
        for b, sentence in enumerate(layout.order):
            if trees[b]:
                results[sentence] = (float(scores[b]), sorted(trees[b], key=lambda node: (node[0], -node[1])))
        return results

    def _tops(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probability of the best root [B], and the top nodes [at most B, 4] of those with a tree."""
        layout, n = self.layout, self.n
        longer = layout.alive[2] if layout.longest > 1 else 0
        tops = torch.from_numpy(layout.tops()).to(self.device)
        value = torch.full((len(layout.order),), float("-inf"), dtype=self.root.dtype, device=self.device)
        label = torch.zeros(len(layout.order), dtype=torch.int64, device=self.device)
        if longer:
            value[:longer], label[:longer] = (self.root[:n] + self.beta[tops[:longer] - layout.words]).max(1)
        if longer < len(layout.order) and self.root.shape[0] > n:
            value[longer:], label[longer:] = (self.root[n:] + self.leaves[tops[longer:]]).max(1)
            label[longer:] += n
        possible = (value > float("-inf")).cpu().numpy()
        nodes = np.stack(
            (np.arange(len(layout.order)), np.zeros_like(layout.lengths), layout.lengths, label.cpu().numpy()), 1
        )
        return self.rules.root[label].double().log().cpu().numpy(), nodes[possible]

    def _best_middles(self, b: np.ndarray, start: np.ndarray, end: np.ndarray, label: np.ndarray) -> np.ndarray:
        """Return argmax_k eta_ik[A] + zeta_kj[A]."""
        most = int((end - start).max()) - 1
        middle = start[:, None] + 1 + np.arange(most)[None, :]  # [nodes, splits]
        real = middle < end[:, None]
        middle = np.where(real, middle, start[:, None] + 1)
        left = self.rows(b[:, None], start[:, None], middle - start[:, None])
        right = self.rows(b[:, None], middle, end[:, None] - middle)
        left_rows, right_rows, labels, mask = (
            torch.from_numpy(array).to(self.device) for array in (left, right, label[:, None], real)
        )
        value = self.children[left_rows, labels] + self.children[right_rows, self.n + labels]
        best = value.masked_fill(~mask, float("-inf")).argmax(1).cpu().numpy()
        return start + 1 + best

    def _best_children(
        self, side: int, b: np.ndarray, start: np.ndarray, end: np.ndarray, label: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return argmax_B log rule[A, B] + value of B at the span, and the log-probability of that rule in fp64."""
        child, log_rule = np.empty_like(label), np.empty(len(label))
        rule = self.rules.right if side else self.rules.left
        row = self.rows(b, start, end - start)
        for leaf in (False, True):
            mine = (end - start == 1) == leaf
            if not mine.any():
                continue
            columns = slice(self.n, None) if leaf else slice(0, self.n)
            values = self.leaves if leaf else self.beta
            rows = torch.from_numpy(row[mine] - (0 if leaf else self.layout.words)).to(self.device)
            probabilities = rule[torch.from_numpy(label[mine]).to(self.device)][:, columns]  # [nodes, N or P]
            best = (log(probabilities, values.dtype) + values[rows]).argmax(1, keepdim=True)
            child[mine] = best.squeeze(1).cpu().numpy() + (self.n if leaf else 0)
            log_rule[mine] = probabilities.gather(1, best).squeeze(1).double().log().cpu().numpy()
        return child, log_rule


def max_plus(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    """out[r, a] = max_k rows[r, k] + weight[k, a]: [R, K], [K, A] -> [R, A]."""
    step = max(1, LARGEST_BLOCK // max(1, weight.numel()))
    for start in range(0, rows.shape[0], step):
        out[start : start + step] = (rows[start : start + step, :, None] + weight).amax(1)
