"""Trees drawn exactly from p(tree | sentence): the chart of the inside algorithm in log space, and draws from it.

    beta_ij[A] = log sum_k exp(eta_ik[A] + zeta_kj[A])
    eta_ij[A]  = log sum_B left[A, B] exp(beta_ij[B])                                                   (zeta: right)

From the top down each node of a tree draws its split given its label, in proportion to exp(eta_ik[A] + zeta_kj[A]),
then the label of either child, in proportion to left[A, B] exp(beta_ik[B]). All trees of all sentences draw one level
at a time. One uniform number in fp64 decides each draw (inverse of the cumulative sum).

The sum over children is a matrix product, after the largest value of the row is taken out. What is lost there lies
below the smallest number of the format. A sum so small that this could matter is computed again in log space, so the
values are right for any rules.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flash_inside import trees
from flash_inside.packing import Layout
from flash_inside.precision import matmul_precision
from flash_inside.rules import Rules, log
from flash_inside.trees import LogChart, Tree


def sampled_trees(
    rules: Rules, emissions: Tensor, lengths: list[int], samples: int, dtype: torch.dtype, generator: torch.Generator
) -> list[list[tuple[float, Tree]]]:
    """Return (log p(tree, sentence), tree) of the samples of every sentence, in the caller's order."""
    with torch.no_grad(), matmul_precision("fp32"):
        return SampledTrees(rules, emissions, Layout(lengths), dtype, samples, generator).trees()


def last_siblings(rules: Rules, emissions: Tensor, lengths: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Return where the sibling of the last word begins: the posterior of each place, [l - 1] a sentence.

    The last word is the right child of one node, (i, l), and its sibling is (i, l - 1). The outside values of the nodes
    that end with the sentence follow from each other: o_0 = root, o_k[C] = sum_i<k sum_A o_i[A] eta_ik[A] right[A, C].
    A sentence that the grammar cannot generate has zeros.
    """
    with torch.no_grad(), matmul_precision("fp32"):
        chart = SampledTrees(rules, emissions, Layout(lengths), dtype, 0, torch.default_generator)
        layout, n = chart.layout, chart.n
        right = rules.right[:, :n].to(dtype)
        results: list[Tensor] = [emissions.new_zeros(max(0, length - 1), dtype=dtype) for length in lengths]
        for b, sentence in enumerate(layout.order):
            length = lengths[sentence]
            outside = [chart.root[:n]]
            for k in range(1, length - 1):
                start = np.arange(k)
                rows = chart._tensor(layout.offset[k - start] + layout.prefix[b] - b * (k - start - 1) + start)
                above = torch.logsumexp(torch.stack(outside) + chart.children[rows, :n], 0)  # [N]
                largest = above.max().clamp_min(torch.finfo(dtype).min)
                outside.append(((above - largest).exp() @ right).log() + largest)
            if length > 1:
                start = np.arange(length - 1)
                width = length - 1 - start
                rows = chart._tensor(layout.offset[width] + layout.prefix[b] - b * (width - 1) + start)
                last = chart.children[int(layout.prefix[b]) + length - 1, n:]
                parts = torch.logsumexp(torch.stack(outside) + chart.children[rows, :n] + last, 1)  # [l - 1]
                if parts.max() > float("-inf"):  # they sum to p(sentence)
                    results[sentence] = parts.softmax(0)
        return results


class SampledTrees(LogChart):
    """Values are sums, and a tree takes one in proportion to its part. One grammar for all sentences."""

    def __init__(
        self, rules: Rules, emissions: Tensor, layout: Layout, dtype: torch.dtype, samples: int,
        generator: torch.Generator,
    ):  # fmt: skip
        super().__init__(rules, emissions, layout, dtype, trees_each=samples)
        self.generator = generator
        self.weights = torch.cat((rules.left, rules.right)).to(dtype)  # [2N, N+P]
        self._fill()

    def _over_children(self, values: Tensor, columns: slice, out: Tensor, sentences: slice) -> None:
        step = max(1, trees.LARGEST_BLOCK // max(values.shape[1], out.shape[1]))
        for rows, part in zip(values.split(step), out.split(step), strict=True):
            largest = rows.amax(1, keepdim=True)
            largest = torch.where(largest == float("-inf"), 0.0, largest)
            sums = (rows - largest).exp_() @ self.weights[:, columns].T  # [r, 2N]
            torch.add(sums.log(), largest, out=part)
            self._repair(rows, columns, sums, part)

    def _repair(self, values: Tensor, columns: slice, sums: Tensor, out: Tensor) -> None:
        """Compute in log space what is so small that a lost child could have a part in it."""
        limits, options = torch.finfo(sums.dtype), values.shape[1]
        faint = sums < options * limits.tiny / limits.eps
        if not faint.any():
            return
        given = torch.cat((self.rules.left[:, columns], self.rules.right[:, columns]))  # as wide as they are
        faint &= (values > float("-inf")).to(sums.dtype) @ (given > 0).to(sums.dtype).T > 0  # not zero for good
        for block in faint.nonzero().split(max(1, trees.LARGEST_BLOCK // options)):
            row, parent = block.T
            out[row, parent] = torch.logsumexp(values[row] + log(given[parent], values.dtype), 1)

    def _over_splits(self, values: Tensor) -> Tensor:
        return torch.logsumexp(values, 1)

    def _choose(self, values: Tensor) -> Tensor:
        wide = values.double()
        parts = (wide - wide.amax(1, keepdim=True)).exp_()
        # A parallel sum may fall by rounding, or rise where nothing is added: an option without a part is never reached
        reached = parts.cumsum(1).masked_fill_(parts == 0, 0.0)
        uniform = torch.rand(
            len(wide), 1, dtype=torch.float64, generator=self.generator, device=self.generator.device
        ).to(self.device)
        return (reached > uniform * reached.amax(1, keepdim=True)).byte().argmax(1)
