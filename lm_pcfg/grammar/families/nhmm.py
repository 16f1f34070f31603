"""NHMM: the neural hidden Markov model, after Chiu and Rush (2020), with a full matrix of transitions.

With E the embeddings of states as predecessors, F those as successors (start and emission: hmm.py):

    transition   T[s, s'] = softmax over s' of E_s . F_s'

The logits have rank `dimension`, the matrix itself has any. It is [S, S]: 64 MiB at 4,096 states in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lm_pcfg.grammar.contexts import EncodedText
from lm_pcfg.grammar.families.shared.hmm import ChainOfStates, HMMFamily, NeuralHMM
from lm_pcfg.grammar.families.shared.sections import HMMSection


class FullHMM(NeuralHMM):
    """Transitions from every state to every state, each with a logit of its own."""

    predecessors: Tensor
    successors: Tensor

    def chain(self, states: Tensor | slice, features: Tensor | slice) -> ChainOfStates:
        transition = (self.predecessors[states] @ self.successors[states].T).softmax(1)
        return ChainOfStates(self.first(states), (transition,), self.emitting[states])


class NHMM(HMMFamily):
    name, section = "nhmm", HMMSection

    def build(self, model: HMMSection, words: Sequence[str], seed: int, text: EncodedText | None = None) -> FullHMM:
        tables = dict.fromkeys(("predecessors", "successors"), (model.states, model.dimension))
        return FullHMM(
            states=model.states, words=len(words), dimension=model.dimension, init=model.init, seed=seed, tables=tables
        )

    def transition_numbers(self, model: HMMSection) -> int:
        return model.states**2


FAMILY = NHMM()
