"""Prefixes that grow by a word at a time: the charts are kept, and a new word adds one column to them.

For programmes that choose the next word by what the model says: several prefixes of the same number of words grow side
by side. Adding word number k costs k products with the rules and k^2 N multiplications, for each prefix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_inside.precision import matmul_precision, upcast
from flash_inside.prefixes.chain import divided
from flash_inside.prefixes.ending import LeftCorners
from flash_inside.rules import Rules


class GrowingPrefixes:
    """S prefixes of k words each, in fp64 throughout. It begins with no word.

    begins   [S] log P(a sentence begins with these words); that of no word is the mass of finite sentences
    ends     [S] log P(a sentence is just these words); -inf without a word
    """

    def __init__(self, rules: Rules, count: int = 1, corners: LeftCorners | None = None):
        if rules.per_sentence:
            raise ValueError("prefixes need one grammar for all sentences, not one each")
        with torch.no_grad():
            self.corners = LeftCorners.of(Rules(*rules)) if corners is None else corners
            self.rules = Rules(*(upcast(tensor.detach()) for tensor in rules))
            n, device = rules.nonterminals, rules.left.device
            self.weights = torch.cat((self.rules.left, self.rules.right))  # [2N, N+P]
            self.words = 0
            self.begins = self.corners.finite_mass(rules.root).log().expand(count).clone()
            self.ends = torch.full((count,), float("-inf"), dtype=torch.float64, device=device)
            # Of spans (i, j), by j and then i: eta~ and zeta~ divided by their maxima, and log scales.
            self._columns: list[tuple[Tensor, Tensor]] = []  # [S, j, 2, N], [S, j, 2]
            start, largest = divided(self.corners.start)
            self._a = [start.expand(count, n)]  # a~ of each word, [S, N]
            self._a_scale = [largest.log().expand(count)]  # [S]
            self._h = torch.zeros(count, n, dtype=torch.float64, device=device)
            self._h_scale = torch.zeros(count, dtype=torch.float64, device=device)

    def next_preterminals(self) -> Tensor:
        """Return log P(the words so far, and a word of this preterminal next): [S, P]."""
        if not self.words:
            return self.corners.first.log().expand(len(self.begins), -1)
        return (self._h @ self.corners.leaves).log() + self._h_scale[:, None]

    @torch.no_grad()
    def add(self, emissions: Tensor) -> None:
        """Append a word to each prefix. emissions: [S, P] log p(word | preterminal)."""
        with matmul_precision("fp64"):
            self._add(upcast(emissions))

    def _add(self, emissions: Tensor) -> None:
        n, k = self.rules.nonterminals, self.words
        scale = emissions.amax(1)
        scale = torch.where(scale == float("-inf"), 0.0, scale)
        leaves = (emissions - scale[:, None]).exp()  # [S, P]
        self.begins = torch.logsumexp(self.next_preterminals() + emissions, dim=1)

        # The new column, from its narrowest span to the whole prefix.
        children: list[Tensor] = []  # of spans (i, k+1), i = k, k-1, ..., 0
        scales: list[Tensor] = []
        beta = leaves
        for first in range(k, -1, -1):
            if first < k:
                left = torch.stack([self._columns[split - 1][0][:, first, 0] for split in range(first + 1, k + 1)], 1)
                left_scale = torch.stack(
                    [self._columns[split - 1][1][:, first, 0] for split in range(first + 1, k + 1)], 1
                )
                right = torch.stack([child[:, 1] for child in reversed(children)], 1)  # [S, splits, N]
                right_scale = torch.stack([one[:, 1] for one in reversed(scales)], 1)
                beta, scale = _sum_of(left * right, left_scale + right_scale)
            both = beta @ (self.weights[:, n:] if first == k else self.weights[:, :n]).T
            child, largest = divided(both.view(-1, 2, n))
            child_scale = scale[:, None] + largest.squeeze(2).log()
            children.append(child)
            scales.append(child_scale.masked_fill((child == 0).all(2), float("-inf")))
        root = self.rules.root[:n] if k else self.rules.root[n:]
        self.ends = (beta @ root).log() + scale if len(root) else torch.full_like(self.begins, float("-inf"))
        self._columns.append((torch.stack(children[::-1], 1), torch.stack(scales[::-1], 1)))

        # What an open constituent that ends here is followed by.
        column, column_scale = self._columns[-1]
        a, a_scale = torch.stack(self._a, 1), torch.stack(self._a_scale, 1)  # [S, k+1, N], [S, k+1]
        self._h, self._h_scale = _sum_of(column[:, :, 0] * a, column_scale[:, :, 0] + a_scale)
        following, largest = divided(self._h @ self.corners.again)
        self._a.append(following)
        self._a_scale.append(self._h_scale + largest.squeeze(1).log())
        self.words += 1

    def keep(self, which: Tensor) -> None:
        """Go on with some of the prefixes, in this order; numbers may repeat."""
        self.begins, self.ends = self.begins[which], self.ends[which]
        self._h, self._h_scale = self._h[which], self._h_scale[which]
        self._columns = [(values[which], scales[which]) for values, scales in self._columns]
        self._a, self._a_scale = [a[which] for a in self._a], [scale[which] for scale in self._a_scale]


def _sum_of(products: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Sum rows [S, k, N] of log scales [S, k]; return [S, N] of maximum 1, and its log scale [S]."""
    largest = log_scale.amax(1)
    largest = torch.where(largest == float("-inf"), 0.0, largest)
    coefficient = (log_scale - largest[:, None]).exp()
    total, divisor = divided(torch.einsum("sk,skn->sn", coefficient, products))
    return total, largest + divisor.squeeze(1).log()
