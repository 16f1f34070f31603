"""Rank HMM: a hidden Markov model of low rank in rank space, after Yang, Liu and Tu (2022) and Liu et al. (2023).

Between two states there is a rank variable of r values, and it emits the words. With E and F the embeddings of states,
and one matrix Q [dimension, r] for both (start and emission: hmm.py):

    U[s, r] = softmax over r of E_s Q_r        V[r, s] = softmax over s of F_s Q_r

A state draws r from U, r emits a word and draws the next state from V. Nothing is observed at a state, so it can be
summed out: what is left is a hidden Markov model whose states are the values of the rank variable,

    start'[r] = sum_s start[s] U[s, r]        transition'[r, r'] = sum_s V[r, s] U[s, r']

and the forward algorithm runs over r of them, however many states there are. The product of V and U is made once an
optimizer step. In samples and posteriors, "state" means a value of the rank variable.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lm_pcfg.grammar.contexts import EncodedText
from lm_pcfg.grammar.families.shared.hmm import ChainOfStates, HMMFamily, NeuralHMM
from lm_pcfg.grammar.families.shared.sections import RankHMMSection


class RankSpaceHMM(NeuralHMM):
    """A chain over the values of the rank variable."""

    predecessors: Tensor
    successors: Tensor
    ranks: Tensor  # Q

    def chain(self, states: Tensor | slice, features: Tensor | slice) -> ChainOfStates:
        to_ranks = (self.predecessors[states] @ self.ranks).softmax(1)  # U [S, r]
        to_states = (self.ranks.T @ self.successors[states].T).softmax(1)  # V [r, S]
        first = self.first(states)
        start = (first.to(to_ranks.dtype) @ to_ranks).double()
        return ChainOfStates(start, (to_states @ to_ranks,), self.emitting.view_as(self.emitting))


class RankHMM(HMMFamily):
    name, section = "rank_hmm", RankHMMSection

    def build(
        self, model: RankHMMSection, words: Sequence[str], seed: int, text: EncodedText | None = None
    ) -> RankSpaceHMM:  # fmt: skip
        tables = dict.fromkeys(("predecessors", "successors"), (model.states, model.dimension))
        return RankSpaceHMM(
            states=model.states, words=len(words), dimension=model.dimension, init=model.init, seed=seed,
            emitting=model.rank, tables={**tables, "ranks": (model.dimension, model.rank)},
        )  # fmt: skip

    def chain_states(self, model: RankHMMSection) -> int:
        return model.rank

    def transition_numbers(self, model: RankHMMSection) -> int:
        return 2 * model.states * model.rank


FAMILY = RankHMM()
