"""TN-PCFG of Yang, Zhao and Tu (2021): a low-rank PCFG whose three factors have networks of their own.

    p(B C | A) = sum over R of U[A, R] V[R, B] W[R, C]        U [N, r], V and W [r, N+P]; all rows sum to 1

Charts are over the rank symbols R, as rank_pcfg.py explains, with what this means for trees and symbols. Here

        root *      softmax over A of u_A . f1(s)              f1: Linear, Res, Res
        U           softmax over R of (K1 relu(L1 E_A))_R
        V           softmax over B of (K2 relu(L2 E_B))_R
        W           softmax over C of (K3 relu(L3 E_C))_R
        emission    softmax over w of u_w . f5(E'_T)           f5: Linear, Res, Res

L1, L2, L3 and K1 are linear layers with biases. K2 and K3 have none: one number added to the logits of all symbols B of
a rank symbol would change nothing. E are the embeddings of symbols in rules. E' are those of preterminals in the
emission, a table of its own, as in the authors' code. * as in rank_pcfg.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lm_pcfg.grammar.families.rank_pcfg import LowRankFamily
from lm_pcfg.grammar.families.shared.sections import RankPCFGSection, TNPCFGSection


class SeparateNetworks(nn.Module):
    """The factors of a TN-PCFG: three networks of two layers, from symbol embeddings to logits of the rank symbols."""

    def __init__(self, dimension: int, rank: int):
        super().__init__()
        self.parent = nn.Linear(dimension, dimension)
        self.left_child = nn.Linear(dimension, dimension)
        self.right_child = nn.Linear(dimension, dimension)
        self.parent_output = nn.Linear(dimension, rank)
        self.left_output = nn.Linear(dimension, rank, bias=False)
        self.right_output = nn.Linear(dimension, rank, bias=False)

    def forward(self, symbols: Tensor, nonterminals: int, ranks: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return U [N, r], and V and W [2, r, N+P]."""
        parents = self.parent_output(torch.relu(self.parent(symbols[:nonterminals])))  # [N, all r]
        left = self.left_output(torch.relu(self.left_child(symbols)))  # [N+P, all r]
        right = self.right_output(torch.relu(self.right_child(symbols)))
        return parents[:, ranks].softmax(1), torch.stack((left.T[ranks], right.T[ranks])).softmax(2)


class TNPCFG(LowRankFamily):
    name, section = "tn_pcfg", TNPCFGSection
    own_tags = True

    def factors(self, model: RankPCFGSection) -> SeparateNetworks:
        return SeparateNetworks(model.dimension, model.rank)


FAMILY = TNPCFG()
