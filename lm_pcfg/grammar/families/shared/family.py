"""What a family of models has to offer, and what the forward pass of its module returns.

    settings of the family -> build -> a torch module -> forward -> a `Distribution` over sentences

The trainer, checkpoints and commands know nothing else of a model: what is special to a family is asked of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flash_inside import Prefixes, Statistics
from flash_inside.devices import memory_of
from flash_inside.precision import FORMATS
from lm_pcfg.errors import OutOfMemory
from lm_pcfg.grammar.contexts import EncodedText
from lm_pcfg.grammar.dropout import Dropout
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.settings import ModelSection

BYTES = 4  # of a number in fp32


class Likelihood(Protocol):
    """What gives sentences a probability."""

    def log_likelihood(
        self, words: Tensor, lengths: list[int], *, precision: str, backend: str, statistics: Statistics | None = None
    ) -> Tensor:
        """Natural log-probability of each sentence: [B]. words: [sum(lengths)] ids, sentences one after another."""


class Distribution(Likelihood, Protocol):
    """A distribution over sentences: what the forward pass of a family's module returns, once an optimizer step.

    It is a NamedTuple of tensors (or of NamedTuples): engines look for tensors in tuples. Here is what it must have.
    It may have more, as the `Grammar` does (lm_pcfg/grammar/grammar.py); a command that needs what a distribution
    lacks refuses it in one line:

        log_likelihood_unchecked            checks of the numbers wait until the device has work
        nonterminals                        number of symbols of its chart, whose memory is planned
        span_marginals, last_siblings       trees (`parse`, `evaluate`), the second with explicit ends
        viterbi, sample_trees               labelled trees, and those drawn for a sentence
        word_posteriors                     `tag`
        with_root_over_nonterminals         `--root nonterminals`
        sample                              `sample`: derivations drawn from the model itself
        prefix_model                        `next`, `surprisal`, `score --mix words`: a `PrefixModel`
        sentence_figures                    further figures of sentences, whose mean an evaluation logs
        warning                             what a user should know before figures are believed
    """

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors at which the gradients of the micro-batches enter the graph of the networks."""

    @property
    def penalty(self) -> Tensor | None:
        """A second part of the loss, summed over this process's sentences of the step (a KL term, say); or None.

        It is None on all processes or on none of them. `train/loss` in the metrics is the likelihood alone.
        """

    def detached(self) -> Any:
        """The same values as leaves of a new graph; its `tensors` correspond to those here."""

    def describe(self, thorough: bool = False) -> dict[str, float]:
        """Figures that an evaluation logs, by the names they have in the metrics; thorough: those of `info` too."""


class Growing(Protocol):
    """Prefixes that grow by a word at a time; see `flash_inside.GrowingPrefixes`."""

    begins: Tensor
    ends: Tensor

    def next_preterminals(self) -> Tensor: ...

    def add(self, emissions: Tensor) -> None: ...

    def keep(self, which: Tensor) -> None: ...


class PrefixModel(Protocol):
    """What a distribution says of how sentences begin: the words before a word give each preterminal a probability."""

    emission: Emission
    end_is_a_word: bool  # whether a sentence ends with its first `<eos>`, and nowhere else; `ends` are -inf then

    @property
    def finite_mass(self) -> float:
        """The probability that a sentence ends at all: 1 unless the grammar loses mass."""

    def prefixes(
        self, emissions: Tensor, lengths: list[int], *, precision: str, statistics: Statistics | None = None,
        with_next: bool = False,
    ) -> Prefixes:  # fmt: skip
        """Return log P of all prefixes; see `flash_inside.prefix`."""

    def growing(self, count: int) -> Growing:
        """Return so many prefixes of no word."""

    def memory(self, max_length: int) -> int:
        """Return how many numbers are kept of a prefix of so many words that grows."""


class Family:
    """A family of models. Only `section` and `build` have to be given; the rest has defaults."""

    name: str
    section: type[ModelSection]
    wants_batches = False  # whether `forward` has to see the sentences of a step first: `computation.batches`
    has_trees = False  # whether it has `span_marginals`, and its `log_likelihood` an argument `limits` of brackets
    works_with_weights = False  # whether micro-batches need the weights themselves, which ZeRO 3 takes apart
    sizes: tuple[str, ...] = ()  # settings that make a model smaller, the first one most
    scores_are_bounds = False  # whether log-likelihoods are estimates of a lower bound
    shares_emission = False  # whether processes can share its emission: `computation.shards`

    def build(self, model: Any, words: Sequence[str], seed: int, text: EncodedText | None = None) -> nn.Module:
        """Return a module whose `forward(computation)` returns a `Distribution` (lm_pcfg/grammar/computation.py).

        All its state is in parameters: a module with buffers is refused.
        words: the vocabulary; text: the first sentences of the training text, where `text_wanted` asks for them.
        """
        raise NotImplementedError

    def fewest_symbols(self, model: Any) -> int:
        """Return how many symbols the shortest sentence has that can have a probability."""
        return 1

    def model_memory(self, model: Any, words: int, device: torch.device | str) -> float:
        """Return the bytes that a model takes at least: its weights and, on a CPU, its rules; 0: few."""
        return 0.0

    def check_memory(self, model: Any, words: int, device: torch.device | str, copies: int = 1) -> float:
        """Return the bytes of so many copies of a model, without what `chart_memory` has, or raise OutOfMemory.

        Asked before it is built.
        """
        needed, there = copies * self.model_memory(model, words, device), memory_of()
        if needed > there:
            symbols = ", ".join(f"model.{name}" for name in self.sizes)
            fewer = f"fewer symbols ({symbols}) or " if symbols else ""
            raise OutOfMemory(
                f"not enough memory for such a model; try a larger machine, {fewer}a smaller "
                f"model.dimension (at least {needed / 2**30:,.1f} GiB are needed, and there are {there / 2**30:,.1f})"
            )
        return needed

    def chart_memory(self, model: Any, lengths: Sequence[int], precision: str) -> float:
        """Return the bytes that a batch of sentences of these lengths takes on a CPU; 0: few."""
        return 0.0

    def chart_type(self, model: Any, precision: str) -> torch.dtype:
        """Return the type in which a chart on a GPU is kept: fp32 for "bf16" too, unless a family says otherwise."""
        return FORMATS[precision].compute

    def text_wanted(self, model: Any) -> int:
        """Return how many words of training text `build` wants to see; 0: none."""
        return 0

    def dropout(self, model: Any, *, seed: int, step: int, total_steps: int) -> Dropout:
        """Draw what a step leaves out: a function of its arguments alone, so that all processes agree."""
        return Dropout()

    def cut(
        self, model: Any, tensors: dict[str, Tensor], nonterminals: Tensor, preterminals: Tensor
    ) -> tuple[Any, dict[str, Tensor]] | None:
        """Return settings and weights of the model of these symbols alone; None: its weights cannot be taken apart so.

        nonterminals, preterminals: their numbers, each kind from 0
        """
        return None

    def can_capture(self, model: Any, dropout: Dropout) -> bool:
        """Return whether CUDA graphs may replay the networks: steps have the same shapes, and are small enough to gain.

        Such a distribution has no penalty, and has `resident` (lm_pcfg/grammar/grammar.py).
        """
        return False
