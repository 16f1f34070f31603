"""LHMM: a hidden Markov model whose transitions are products of features, after Chiu, Deng and Rush (2021).

With E the embeddings of states as predecessors, F those as successors, and a matrix Omega [dimension, features]
(start and emission: hmm.py):

    phi = exp(E Omega)    psi = exp(F Omega)    T[s, s'] = phi_s . psi_s' / sum over s'' of phi_s . psi_s''

T is the product of two matrices whose rows sum to 1, so it is never made, and no exp leaves the range:

    U[s, f] = softmax over f of (E_s Omega_f + log sum_s' psi[s', f])        V[f, s'] = softmax over s' of F_s' Omega_f

A step of the forward algorithm takes 2 S features multiplications instead of S^2.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lm_pcfg.grammar.contexts import EncodedText
from lm_pcfg.grammar.dropout import Dropout, draw_states
from lm_pcfg.grammar.families.shared.hmm import ChainOfStates, HMMFamily, NeuralHMM
from lm_pcfg.grammar.families.shared.sections import HMMSection, LHMMSection


class FeatureHMM(NeuralHMM):
    """Transitions by way of features."""

    predecessors: Tensor
    successors: Tensor
    projection: Tensor  # Omega

    def chain(self, states: Tensor | slice, features: Tensor | slice) -> ChainOfStates:
        projection = self.projection[:, features]
        log_phi, log_psi = (table[states] @ projection for table in (self.predecessors, self.successors))  # [S, F]
        to_features = (log_phi + log_psi.logsumexp(0)).softmax(1)
        to_states = log_psi.T.softmax(1)  # [F, S]
        return ChainOfStates(self.first(states), (to_features, to_states), self.emitting[states])


class LHMM(HMMFamily):
    name, section = "lhmm", LHMMSection

    def build(
        self, model: LHMMSection, words: Sequence[str], seed: int, text: EncodedText | None = None
    ) -> FeatureHMM:  # fmt: skip
        tables = dict.fromkeys(("predecessors", "successors"), (model.states, model.dimension))
        return FeatureHMM(
            states=model.states, words=len(words), dimension=model.dimension, init=model.init, seed=seed,
            tables={**tables, "projection": (model.dimension, model.features)},
        )  # fmt: skip

    def transition_numbers(self, model: LHMMSection) -> int:
        return 2 * model.states * model.features

    def dropout(self, model: HMMSection, *, seed: int, step: int, total_steps: int) -> Dropout:
        assert isinstance(model, LHMMSection)
        rates = model.states, model.state_dropout, model.features, model.feature_dropout
        return Dropout(states=draw_states(*rates, seed=seed, step=step))


FAMILY = LHMM()
