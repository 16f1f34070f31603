"""Rank PCFG of Yang, Liu and Tu (2022), and what low-rank PCFGs have in common: charts over the rank symbols.

A low-rank PCFG has N nonterminals, P preterminals and r rank symbols. A parent A first draws a rank symbol R, which
then draws the two children independently:

    p(B C | A) = sum over R of U[A, R] V[R, B] W[R, C]        U [N, r], V and W [r, N+P]; all rows sum to 1

A child that is a nonterminal draws a rank symbol in its turn. So a derivation can be told by its rank symbols alone,
with the nonterminals summed out. The rank symbols are the nonterminals of a simple PCFG (paper, section 2):

    root' [r+P]    = [root_N U | root_P]      S draws a nonterminal and this its rank symbol; or S draws a preterminal
    left' [r, r+P] = [V_N U | V_P]            R draws its left child: a nonterminal and this its rank symbol; or a
    right'[r, r+P] = [W_N U | W_P]            preterminal

Its rows sum to 1 because those of U do. Every string has the same probability, and every span the same posterior, as in
the dense grammar with p(B C | A), whose N (N+P)^2 numbers are never made. So MBR trees are those of the dense grammar.
The symbols of Viterbi's trees, of samples and of `info` are rank symbols: N7 is rank symbol 7. Viterbi finds the best
derivation in rank symbols, which may be another tree than the best one of the dense grammar: a rule there sums over the
rank symbols, and a rank symbol here over the nonterminals.

The products V_N U and W_N U are made once a step, with 2 N r^2 multiplications, and three times that with the backward.
Where r is much larger than N the factors are kept instead (`factors_pay`): U is the inner factor of
`flash_inside.FactoredRules`, a span takes 3 N r multiplications instead of 2 r^2, and no [r, r] matrix is made. The two
differ by rounding. Likelihoods, posteriors of spans (so MBR trees) and the figures of an evaluation are computed from
factors; Viterbi's trees, samples and `info` need them multiplied out.

With `networks.precision: bf16` the products behind the rules are in TF32; those of the emission are in bf16.

                    Rank PCFG
        root *      softmax over A of u_A . f1(s)         f1: Linear, Res, Res
        U           softmax over R of relu(L1 E_A) . Q_R
        V           softmax over B of relu(L2 E_B) . Q_R
        W           softmax over C of relu(L3 E_C) . Q_R
        emission    softmax over w of u_w . f5(E_T)       f5: Linear, Res, Res

E are the symbol embeddings, s that of the start symbol, Q [r, d] one table for all three; L1, L2, L3 are linear layers
with biases, Res as in sn_pcfg.py. * The mass of S -> preterminal has a parameter of its own (`root_probabilities`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flash_inside import rules_type
from flash_inside.softmax import product_precision
from lm_pcfg.grammar.computation import EXACT, Computation
from lm_pcfg.grammar.contexts import TEXT_FOR_CONTEXTS, EncodedText, context_vectors
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.families.shared.pcfg import PCFGFamily
from lm_pcfg.grammar.families.shared.sections import RankPCFGSection
from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.grammar.networks import FEW, initialise, residual_network, root_probabilities

#: Factors are kept from so many rank symbols on, if there are so many of them for each nonterminal. On a GPU launches
#: bound the time of smaller charts, and more products are more launches.
FEWEST_OF_FACTORS = {"cpu": 256, "cuda": 6144}
LEAST_RATIO_OF_FACTORS = 3


def factors_pay(nonterminals: int, ranks: int, device: torch.device | str) -> bool:
    """Return whether the inside algorithm is faster with the factors than with the rules over rank symbols."""
    fewest = FEWEST_OF_FACTORS.get(torch.device(device).type, FEWEST_OF_FACTORS["cuda"])
    return ranks >= max(fewest, LEAST_RATIO_OF_FACTORS * nonterminals)


def rank_space(root: Tensor, parents: Tensor, children: Tensor) -> tuple[Tensor, Tensor]:
    """The rules over rank symbols: root [r] or [r+P], and left and right as one tensor [2, r, r+P].

    root      [N] or [N+P] of the dense grammar, fp64
    parents   [N, r] U
    children  [2, r, N+P] V and W
    """
    n = len(parents)
    return rank_root(root, parents), torch.cat((children[:, :, :n] @ parents, children[:, :, n:]), 2)


def rank_root(root: Tensor, parents: Tensor) -> Tensor:
    over_nonterminals, over_preterminals = root.tensor_split([len(parents)])
    return torch.cat(((over_nonterminals[None] @ parents.to(root.dtype))[0], over_preterminals))


class LowRankPCFG(nn.Module):
    """Embeddings, a root and an emission network, and the factors U, V, W of a family -> a `Grammar` over rank symbols.

    State dropout leaves out rank symbols and preterminals, the symbols of the chart; nonterminals all stay.
    """

    def __init__(
        self,
        factors: nn.Module,
        *,
        nonterminals: int,
        preterminals: int,
        words: int,
        dimension: int,
        root_over: str = "all",
        own_tags: bool = False,
        parameterization: str = "paper",
        init: str = "xavier_normal",
        symbol_deviation: float | None = None,
        word_deviation: float | None = None,
        word_vectors: Tensor | None = None,
        seed: int = 0,
    ):
        """factors: (symbol embeddings [N+P, d], N, numbers of the rank symbols that take part) -> U and [V, W].

        own_tags: the emission has embeddings of preterminals that the rules do not see.
        parameterization: "paper", or "bounded", whose residual pairs are bounded (`networks.ResidualPair`).
        The other arguments are those of `SimplePCFG`.
        """
        super().__init__()
        self.nonterminals, self.preterminals = nonterminals, preterminals
        roots = nonterminals + preterminals if root_over == "all" else nonterminals
        self.start = nn.Parameter(torch.empty(1, dimension))
        self.symbols = nn.Parameter(torch.empty(nonterminals + preterminals, dimension))
        self.tags = nn.Parameter(torch.empty(preterminals, dimension)) if own_tags else None
        self.words = nn.Parameter(torch.empty(words, dimension))
        self.factors = factors
        self.root_network = residual_network(dimension, pairs=2)
        self.root_output = nn.Parameter(torch.empty(roots, dimension))
        self.emission_network = residual_network(dimension, pairs=2, bounded=parameterization == "bounded")
        tables = dict.fromkeys(("start", "symbols", "tags", "root_output"), symbol_deviation)
        initialise(self, init, {**tables, "words": word_deviation}, torch.Generator().manual_seed(seed))
        if word_vectors is not None:
            with torch.no_grad():
                self.words.copy_(word_vectors * (word_deviation or 1.0))
        self.one_word = nn.Parameter(torch.tensor([FEW])) if root_over == "all" else None

    def forward(self, computation: Computation = EXACT) -> Grammar:
        """Compute every tensor that micro-batches need: under ZeRO 3 parameters are empty outside of forward."""
        with product_precision(computation.precision):
            return self._grammar(computation)

    def dense(self, ranks: Tensor | slice, tags: Tensor | slice) -> tuple[Tensor, Tensor, Tensor]:
        """Root, U and [V, W] of the dense grammar over these rank symbols and preterminals."""
        nonterminals, preterminals = self.symbols.split([self.nonterminals, self.preterminals])
        symbols = torch.cat((nonterminals, preterminals[tags]))
        parents, children = self.factors(symbols, self.nonterminals, ranks)
        root_output = self.root_output[: self.nonterminals]
        if self.one_word is not None:
            root_output = torch.cat((root_output, self.root_output[self.nonterminals :][tags]))
        root_logits = (root_output @ self.root_network(self.start).T).squeeze(1)
        return root_probabilities(root_logits, self.nonterminals, self.one_word), parents, children

    def _grammar(self, computation: Computation) -> Grammar:
        ranks: Tensor | slice = slice(None)
        tags: Tensor | slice = slice(None)
        if computation.dropout.kept is not None:
            ranks, tags = computation.dropout.kept.to(self.symbols.device)
        root, parents, children = self.dense(ranks, tags)
        narrow = rules_type(computation.charts, parents.shape[1])
        inner = parents if factors_pay(len(parents), parents.shape[1], parents.device) else None
        root, sides = (rank_root(root, parents), children) if inner is not None else rank_space(root, parents, children)
        # Views of one tensor: left and right lie one after the other in memory, and products can take both at once.
        left, right = sides.unbind(0)
        entrances = (left, right) if inner is None else (left, right, inner)
        if narrow is not None:  # autograd would round their gradients, too: those enter at the wide ones
            left, right = sides.detach().to(narrow).unbind(0)
            inner = None if inner is None else inner.detach().to(narrow)
        embeddings = self.symbols[self.nonterminals :] if self.tags is None else self.tags
        features = self.emission_network(embeddings[tags])
        # A view of the word table: the micro-batches' gradients must reach it through this graph alone.
        emission = Emission.of(features, self.words.view_as(self.words), computation.precision, computation.shards)
        return Grammar(root, left, right, emission, entrances, inner=inner)


class SharedProjection(nn.Module):
    """The factors of a Rank PCFG: parents, left and right children are compared with one table of the rank symbols."""

    def __init__(self, dimension: int, rank: int):
        super().__init__()
        self.parent = nn.Linear(dimension, dimension)
        self.left_child = nn.Linear(dimension, dimension)
        self.right_child = nn.Linear(dimension, dimension)
        self.projection = nn.Parameter(torch.empty(rank, dimension))

    def forward(self, symbols: Tensor, nonterminals: int, ranks: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return U [N, r], and V and W [2, r, N+P]."""
        projection = self.projection[ranks]
        parents = torch.relu(self.parent(symbols[:nonterminals])) @ projection.T
        sides = [torch.relu(network(symbols)) for network in (self.left_child, self.right_child)]
        return parents.softmax(1), (projection @ torch.stack(sides).mT).softmax(2)


class LowRankFamily(PCFGFamily):
    """A family of low-rank PCFGs; `factors` makes its U, V and W."""

    own_tags = False
    sizes = ("rank", "preterminals", "nonterminals")

    def factors(self, model: RankPCFGSection) -> nn.Module:
        raise NotImplementedError

    def build(
        self, model: RankPCFGSection, words: Sequence[str], seed: int,
        text: EncodedText | None = None
    ) -> LowRankPCFG:  # fmt: skip
        init = model.init
        return LowRankPCFG(
            self.factors(model),
            nonterminals=model.nonterminals,
            preterminals=model.preterminals,
            words=len(words),
            dimension=model.dimension,
            root_over=model.root,
            own_tags=self.own_tags,
            parameterization=model.parameterization,
            init="xavier_normal" if init.symbols is not None else init.scheme,
            symbol_deviation=init.symbols,
            word_deviation=init.words,
            word_vectors=None if text is None else context_vectors(text, len(words), model.dimension, seed),
            seed=seed,
        )

    def chart_nonterminals(self, model: RankPCFGSection) -> int:
        return model.rank

    def rules_of_a_step(self, model: Any, device: torch.device | str) -> float:
        n, p, ranks = model.nonterminals, model.preterminals, self._most_of_a_step(model)
        if factors_pay(n, ranks, device):
            return 2 * ranks * (n + p) + n * ranks
        return 2 * super().rules_of_a_step(model, device)  # the products, and they again with the preterminals

    def fewest_weights(self, model: RankPCFGSection, words: int) -> int:
        return (model.nonterminals + model.preterminals + model.rank + words) * model.dimension

    def text_wanted(self, model: RankPCFGSection) -> int:
        return TEXT_FOR_CONTEXTS if model.init.scheme == "contexts" else 0


class RankPCFG(LowRankFamily):
    name, section = "rank_pcfg", RankPCFGSection

    def factors(self, model: RankPCFGSection) -> SharedProjection:
        return SharedProjection(model.dimension, model.rank)


FAMILY = RankPCFG()
