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
            # Of spans (i, j): eta~, zeta~ divided by their maxima, and log scales. They grow when they are full.
            self._values = torch.zeros(count, 0, 0, 2, n, dtype=torch.float64, device=device)
            self._scales = torch.zeros(count, 0, 0, 2, dtype=torch.float64, device=device)
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

        # The new column, from its narrowest span to the whole prefix. Span (i, j) is at [:, i, j - 1].
        self._make_room(k + 1)
        beta = leaves
        for first in range(k, -1, -1):
            if first < k:  # splits at first + 1 .. k
                left, right = self._values[:, first, first:k, 0], self._values[:, first + 1 : k + 1, k, 1]
                left_scale, right_scale = self._scales[:, first, first:k, 0], self._scales[:, first + 1 : k + 1, k, 1]
                beta, scale = _sum_of(left * right, left_scale + right_scale)
            both = beta @ (self.weights[:, n:] if first == k else self.weights[:, :n]).T
            child, largest = divided(both.view(-1, 2, n))
            child_scale = scale[:, None] + largest.squeeze(2).log()
            self._values[:, first, k] = child
            self._scales[:, first, k] = child_scale.masked_fill((child == 0).all(2), float("-inf"))
        root = self.rules.root[:n] if k else self.rules.root[n:]
        self.ends = (beta @ root).log() + scale if len(root) else torch.full_like(self.begins, float("-inf"))

        # What an open constituent that ends here is followed by.
        a, a_scale = torch.stack(self._a, 1), torch.stack(self._a_scale, 1)  # [S, k+1, N], [S, k+1]
        eta, eta_scale = self._values[:, : k + 1, k, 0], self._scales[:, : k + 1, k, 0]
        self._h, self._h_scale = _sum_of(eta * a, eta_scale + a_scale)
        following, largest = divided(self._h @ self.corners.again)
        self._a.append(following)
        self._a_scale.append(self._h_scale + largest.squeeze(1).log())
        self.words += 1
        if torch.cat((self.begins, self.ends)).isnan().any():
            raise ArithmeticError("prefix probabilities left the range of fp64: the rules are too extreme")

    def _make_room(self, words: int) -> None:
        there = self._values.shape[1]
        if words > there:
            size = max(8, 2 * there)
            values, scales = self._values, self._scales
            self._values = values.new_zeros(len(values), size, size, *values.shape[3:])
            self._scales = scales.new_zeros(len(scales), size, size, 2)
            self._values[:, :there, :there], self._scales[:, :there, :there] = values, scales

    def keep(self, which: Tensor) -> None:
        """Go on with some of the prefixes, in this order; numbers may repeat."""
        self.begins, self.ends = self.begins[which], self.ends[which]
        self._h, self._h_scale = self._h[which], self._h_scale[which]
        self._values, self._scales = self._values[which], self._scales[which]
        self._a, self._a_scale = [a[which] for a in self._a], [scale[which] for scale in self._a_scale]


def _sum_of(products: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Sum rows [S, k, N] of log scales [S, k]; return [S, N] of maximum 1, and its log scale [S]."""
    largest = log_scale.amax(1)
    largest = torch.where(largest == float("-inf"), 0.0, largest)
    coefficient = (log_scale - largest[:, None]).exp()
    total, divisor = divided(torch.einsum("sk,skn->sn", coefficient, products))
    return total, largest + divisor.squeeze(1).log()
