"""What the families of hidden Markov models have in common: start, emission, state dropout.

With a the start embedding, A the embeddings of states as first ones, B those as emitting ones, u those of words:

    start      softmax over states of a . A_s
    emission   softmax over words of u_w . B_s

A family adds the transition, from tables of its own. The tables of states are separate: a state may follow others, be
followed by others and emit words in three unrelated ways.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flash_inside.precision import chart_format
from flash_inside.softmax import product_precision
from lm_pcfg.grammar.computation import EXACT, Computation
from lm_pcfg.grammar.dropout import Dropout, draw_states, kept_of
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.families.shared.family import BYTES, Family
from lm_pcfg.grammar.families.shared.sections import HMMSection, Init
from lm_pcfg.grammar.markov import HiddenMarkovModel
from lm_pcfg.grammar.networks import initialise


class ChainOfStates(NamedTuple):
    """What a family computes of the states that take part in a step."""

    start: Tensor  # [S]
    transition: tuple[Tensor, ...]  # as in `HiddenMarkovModel`
    emitting: Tensor  # [S, d]


class NeuralHMM(nn.Module):
    """Embeddings of states and words -> a `HiddenMarkovModel`. A subclass has the transition."""

    def __init__(
        self, *, states: int, words: int, dimension: int, init: Init, seed: int, emitting: int | None = None,
        tables: dict[str, tuple[int, int]],
    ):  # fmt: skip
        """emitting: how many emit words, where it is not the states; tables: name and shape of those of transitions."""
        super().__init__()
        self.start = nn.Parameter(torch.empty(1, dimension))
        self.first_states = nn.Parameter(torch.empty(states, dimension))
        self.emitting = nn.Parameter(torch.empty(emitting or states, dimension))
        self.words = nn.Parameter(torch.empty(words, dimension))
        for name, shape in tables.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        deviations = dict.fromkeys(("start", "first_states", "emitting", *tables), init.symbols) | {"words": init.words}
        scheme = init.scheme if init.symbols is None else "xavier_normal"
        initialise(self, scheme, deviations, torch.Generator().manual_seed(seed))

    def forward(self, computation: Computation = EXACT) -> HiddenMarkovModel:
        """Compute every tensor that micro-batches need: under ZeRO 3 parameters are empty outside of forward.

        With state dropout, a model over the kept states, renumbered in their order.
        """
        every = slice(None)
        states: Tensor | slice = every
        features: Tensor | slice = every
        if computation.dropout.states is not None:
            kept = computation.dropout.states.to(self.words.device)
            states, features = kept.states, kept.features
        with product_precision(computation.precision):
            start, transition, emitting = self.chain(states, features)
            # A view of the word table: the micro-batches' gradients must reach it through this graph alone.
            words = self.words.view_as(self.words)
            emission = Emission.of(emitting, words, computation.precision, computation.shards)
        return HiddenMarkovModel(start, transition, emission)

    def chain(self, states: Tensor | slice, features: Tensor | slice) -> ChainOfStates:
        """Compute the chain of some states, with some features of transitions."""
        raise NotImplementedError

    def first(self, states: Tensor | slice) -> Tensor:
        """p(first state): fp64 [S]."""
        return (self.first_states[states] @ self.start.T).squeeze(1).double().softmax(0)


class HMMFamily(Family):
    """A family whose modules make a `HiddenMarkovModel`."""

    shares_emission = True
    sizes = ("states",)

    def model_memory(self, model: HMMSection, words: int, device: torch.device | str) -> float:
        """Count the weights, and on a CPU the transitions of a step."""
        of_a_step = self.transition_numbers(model) if torch.device(device).type == "cpu" else 0
        weights = (2 * model.states + words) * model.dimension
        return BYTES * (weights + of_a_step * (1.0 - model.state_dropout) ** 2)

    def chart_type(self, model: HMMSection, precision: str) -> torch.dtype:
        """Return bf16 for "bf16" if there are many states."""
        return chart_format(precision, self.chain_states(model)).storage

    def chain_states(self, model: Any) -> int:
        """Return the states of the chain of a step."""
        return kept_of(model.states, model.state_dropout)

    def transition_numbers(self, model: Any) -> int:
        """Return how many numbers the transitions have."""
        raise NotImplementedError

    def dropout(self, model: HMMSection, *, seed: int, step: int, total_steps: int) -> Dropout:
        return Dropout(states=draw_states(model.states, model.state_dropout, seed=seed, step=step))
