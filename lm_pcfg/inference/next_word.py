"""What comes next: probabilities of prefixes and of next words, and completions drawn from them, all exact.

A simple PCFG and a hidden Markov model look alike from here: the words before a word give every preterminal (or state)
a probability, and the preterminal gives every word one. `NextWords` is that view of a model.

Several models are an even mixture (`Mix`):

    sentences   the mean of their probabilities of sentences, and so of prefixes: a grammar again, whose root first
                chooses one of them
    words       the mean of their probabilities of each word given those before it, and likewise of the end, over the
                models that give the words before a probability above 0: no grammar any more
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from flash_inside import Prefixes, Statistics
from flash_inside.packing import side_by_side
from flash_inside.softmax import product_precision
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.families.shared.family import Growing, PrefixModel
from lm_pcfg.grammar.generation import draw_options
from lm_pcfg.inference.trained import TrainedGrammar

Mix = Literal["sentences", "words"]
LARGEST_BLOCK = 1 << 24  # numbers of a table [prefixes, words]
LARGEST_CHARTS = 1 << 27  # numbers in the charts of prefixes that grow together: 1 GiB
LITTLE_LOST = 1e-6  # mass of derivations without end that nobody need be told of


class NextWords:
    """What a trained model says of prefixes. Words are ids, with `<eos>` as one of them where ends are explicit."""

    def __init__(self, trained: TrainedGrammar):
        self.trained, model = trained, trained.grammar
        if not hasattr(model, "prefix_model"):
            raise UserError(
                f"{trained.checkpoint}: a model of family {trained.settings.model.family} has no next-word "
                "probabilities; simple PCFGs, rank PCFGs, TN-PCFGs and HMMs have"
            )
        self.model: PrefixModel = model.prefix_model()
        self.emission = self.model.emission

    @property
    def finite_mass(self) -> float:
        """The probability that a sentence ends at all: 1 unless the grammar loses mass."""
        return self.model.finite_mass

    def warning(self) -> str | None:
        """Say how much mass is lost, if that is worth telling."""
        lost = 1.0 - self.finite_mass
        if lost <= LITTLE_LOST:
            return None
        return (
            f"{self.trained.checkpoint}: {lost:.2%} of the probability is that of derivations that never end, and no "
            "sentence has it"
        )

    @torch.no_grad()
    def prefixes(
        self, words: Tensor, lengths: list[int], *, precision: str, statistics: Statistics | None = None,
        with_next: bool = False,
    ) -> Prefixes:  # fmt: skip
        """Return log P of all prefixes, see `flash_inside.prefix`. words: [sum(lengths)] ids."""
        with product_precision("fp32"):
            emissions = self.emission.log_probabilities(words)
        found = self.model.prefixes(emissions, lengths, precision=precision, statistics=statistics, with_next=with_next)
        end_id = self.trained.vocabulary.end_id
        if not self.model.end_is_a_word or end_id is None:
            return found
        is_end = words.to(found.begins.device).eq(end_id)
        return found._replace(ends=torch.where(is_end, found.begins, -math.inf))

    @torch.no_grad()
    def words_after(self, preterminals: Tensor) -> Tensor:
        """Turn log P(words before, next preterminal) [R, P] into log P(words before, next word): fp64 [R, V]."""
        scale = preterminals.amax(1, keepdim=True)
        scale = torch.where(scale == -math.inf, 0.0, scale)
        shares = (preterminals - scale).double().exp()
        total = shares.new_zeros(len(shares), len(self.emission.embeddings))
        step = max(1, LARGEST_BLOCK // total.shape[1])
        with product_precision("fp32"):
            for first in range(0, shares.shape[1], step):
                block = torch.arange(first, min(first + step, shares.shape[1]), device=shares.device)
                total += shares[:, block] @ self.emission.log_probabilities_of(block).double().exp()
        return total.log() + scale

    @torch.no_grad()
    def closings(self, words: Tensor, lengths: list[int], ends: Tensor) -> Tensor | None:
        """Return log P(the symbols before this one, and then the end of the sentence) for every symbol, in fp64.

        ends: of `prefixes`. None: the end is just `<eos>`, as in a hidden Markov model, so `following` knows it.
        """
        end_id = self.trained.vocabulary.end_id
        if self.model.end_is_a_word:
            return None
        if end_id is None:
            return before_each(ends.double(), lengths, -math.inf)  # a sentence has a word
        closings = torch.empty(len(words), dtype=torch.float64, device=ends.device)
        emissions, growing = self.emissions_of(words.cpu().numpy()), self.model.growing(len(lengths))
        for alive, rows in side_by_side(lengths):
            growing.keep(torch.arange(alive, device=ends.device))
            closings[rows] = self.closing(growing, alive).to(closings.device)
            growing.add(emissions[rows])
        return closings

    def closing(self, growing: Growing, count: int) -> Tensor:
        """Return log P(these words, then `<eos>`, and no more) of each prefix."""
        ended = copy.copy(growing)
        ended.keep(torch.arange(count, device=growing.begins.device))  # the tables of the others stay as they are
        ended.add(self.emissions_of(np.full(count, self.trained.vocabulary.end_id)))
        return ended.ends

    def following(self, preterminals: Tensor, closing: Tensor | None) -> Tensor:
        """Return log P(words before, what comes next): of every word and, last, of the end, fp64 [R, V + 1].

        preterminals [R, P] as for `words_after`, closing [R] of `closings`. `<eos>` is no word: its own entry is -inf.
        """
        joint, end_id = self.words_after(preterminals), self.trained.vocabulary.end_id
        if closing is None:
            assert end_id is not None
            closing = joint[:, end_id].clone()
        if end_id is not None:
            joint[:, end_id] = -math.inf
        return torch.cat((joint, closing.to(joint)[:, None]), dim=1)

    # ---- completions ------------------------------------------------------------------------------------------------

    def log_begins(self, begun: Sequence[int]) -> float:
        """Return log P(a sentence begins with these words); of no word it is that of the mass of finite sentences."""
        if not begun:
            mass = self.finite_mass
            return math.log(mass) if mass > 0.0 else -math.inf
        return self.prefixes(torch.tensor(begun), [len(begun)], precision="fp64").begins[-1].item()

    @torch.no_grad()
    def complete(
        self, begun: Sequence[int], number: int, *, random: np.random.Generator, max_length: int
    ) -> list[list[int] | None]:
        """Draw sentences that begin with these words, from p(sentence | its first words); None: it became too long.

        Ends that are explicit are part of the sentence.
        """
        results: list[list[int] | None] = []
        step = max(1, LARGEST_CHARTS // self.model.memory(max_length))
        start = self.model.growing(1)
        for word in begun:
            start.add(self.emissions_of(np.array([word])))
        if start.begins[0] == -math.inf:
            raise UserError("these words begin no sentence: their probability is 0")
        for first in range(0, number, step):
            results += self._complete(begun, start, min(step, number - first), random, max_length)
        return results

    def _complete(
        self, begun: Sequence[int], start: Growing, number: int, random: np.random.Generator, max_length: int
    ) -> list[list[int] | None]:
        results: list[list[int] | None] = [None] * number
        sentences = [list(begun) for _ in range(number)]
        growing = self._copied(start, number)
        going, length = np.arange(number), len(begun)
        while len(going):
            ends = (growing.ends - growing.begins).exp().cpu().numpy() if length else np.zeros(len(going))
            ended = random.random(len(going)) < ends
            if self.model.end_is_a_word and length:
                ended = np.array([sentences[sample][-1] == self.trained.vocabulary.end_id for sample in going])
            for sample in going[ended]:
                results[sample] = sentences[sample]
            if ended.any():
                growing.keep(torch.from_numpy(np.flatnonzero(~ended)).to(growing.begins.device))
                going = going[~ended]
            if length >= max_length or not len(going):
                break
            words = self._next(growing, random)
            for sample, word in zip(going.tolist(), words.tolist(), strict=True):
                sentences[sample].append(word)
            growing.add(self.emissions_of(words))
            length += 1
        return results

    def _next(self, growing: Growing, random: np.random.Generator) -> np.ndarray:
        """Draw a preterminal for each prefix, then its word."""
        rows = growing.next_preterminals()
        rows = (rows - rows.amax(1, keepdim=True)).exp()
        device = rows.device
        preterminals, _ = draw_options(rows.__getitem__, np.arange(len(rows)), rows.shape[1], random, device)

        def words_of(some: Tensor) -> Tensor:
            return self.emission.log_probabilities_of(some).double().exp()

        words, _ = draw_options(words_of, preterminals, len(self.emission.embeddings), random, device)
        return words

    def emissions_of(self, words: np.ndarray) -> Tensor:
        with product_precision("fp32"):
            return self.emission.log_probabilities(torch.from_numpy(words))

    @staticmethod
    def _copied(start: Growing, number: int) -> Any:
        growing = copy.copy(start)
        growing.keep(torch.zeros(number, dtype=torch.int64, device=start.begins.device))
        return growing


@torch.no_grad()
def log_probabilities_after(models: Sequence[NextWords], begun: Sequence[int]) -> np.ndarray:
    """Return log p(what comes next | words) in the even mixture of some models: fp64 [V + 1], as `GrowingSentence`.

    It computes the words together, which is much quicker than to let a sentence grow.
    """
    joint, log_begun = [], []
    for model in models:
        end_id = model.trained.vocabulary.end_id
        # What comes next does not depend on the symbol that is there: any will do, but the end is read off <eos>.
        words = [*begun, *(begun[-1:] or [0] if end_id is None else [end_id])]
        found = model.prefixes(torch.tensor(words), [len(words)], precision="fp64", with_next=True)
        assert found.next is not None
        log_begun.append(found.begins[-2] if begun else found.begins.new_zeros(()))
        closing = None
        if end_id is not None and not model.model.end_is_a_word:
            closing = found.ends[-1:]
        elif end_id is None:
            closing = found.ends[-2:-1] if begun else found.ends.new_full((1,), -math.inf)
        joint.append(model.following(found.next[-1:], closing)[0])
    return _given(mean_probability(joint), mean_probability(log_begun))


def _given(joint: Tensor, log_begun: Tensor) -> np.ndarray:
    if log_begun.item() == -math.inf:
        raise UserError("these words begin no sentence: their probability is 0")
    return (joint - log_begun).cpu().numpy()


class GrowingSentence:
    """A sentence that grows by a word at a time, and what comes next in the even mixture of some models."""

    def __init__(self, models: Sequence[NextWords], begun: Sequence[int] = ()):
        self.words: list[int] = []
        self._models = [(model, model.model.growing(1)) for model in models]
        for word in begun:
            self.add(word)

    def add(self, word: int) -> None:
        self.words.append(word)
        for model, growing in self._models:
            growing.add(model.emissions_of(np.array([word])))

    @torch.no_grad()
    def log_probabilities(self) -> np.ndarray:
        """Return log p(what comes next | words), for every word of the vocabulary and, last, the end: fp64 [V + 1].

        Where ends are explicit, the end is `<eos>` with nothing after it, and the entry of `<eos>` itself is -inf.
        Without words before it, they sum to the mass of finite sentences. See `Model.log_probabilities`.
        """
        joint = []
        for model, growing in self._models:
            closing = growing.ends if model.trained.vocabulary.end_id is None else None
            if closing is None and not model.model.end_is_a_word:
                closing = model.closing(growing, 1)
            joint.append(model.following(growing.next_preterminals(), closing)[0])
        begins = [growing.begins[0] if self.words else growing.begins.new_zeros(()) for _, growing in self._models]
        return _given(mean_probability(joint), mean_probability(begins))


def complete(
    models: Sequence[NextWords], begun: Sequence[int], number: int, *, seed: int, max_length: int
) -> list[list[int] | None]:
    """Draw sentences that begin with these words from the even mixture of some models; see `NextWords.complete`."""
    random = np.random.default_rng(seed)
    if len(models) == 1:
        return models[0].complete(begun, number, random=random, max_length=max_length)
    weights = np.array([model.log_begins(begun) for model in models])
    if weights.max() == -math.inf:
        raise UserError("these words begin no sentence: their probability is 0")
    shares = np.exp(weights - weights.max())
    chosen = random.choice(len(models), size=number, p=shares / shares.sum())
    made = [
        iter(model.complete(begun, int((chosen == place).sum()), random=random, max_length=max_length))
        for place, model in enumerate(models)
        if (chosen == place).any()
    ]
    places = {place: index for index, place in enumerate(sorted(set(chosen.tolist())))}
    return [next(made[places[place]]) for place in chosen.tolist()]


# ---- mixtures -------------------------------------------------------------------------------------------------------


def check_mix(mix: str) -> None:
    """Refuse what is no mixture."""
    if mix not in get_args(Mix):
        raise UserError(f"unknown mixture {mix!r}: use {' or '.join(get_args(Mix))}")


class WordMixture:
    """The even mixture of some models word by word, as what gives sentences a probability."""

    def __init__(self, models: Sequence[NextWords]):
        self.models = models

    @torch.no_grad()
    def log_likelihood(
        self, words: Tensor, lengths: list[int], *, precision: str, backend: str, statistics: Statistics | None = None
    ) -> Tensor:
        """Return the log-probability of each sentence: fp64 [B]; see `Likelihood`."""
        if backend != "auto":
            raise ValueError("prefixes choose their backend themselves: use auto")
        found = [one.prefixes(words, lengths, precision=precision, statistics=statistics) for one in self.models]
        ends_are_words = self.models[0].trained.vocabulary.end_id is not None
        mixed = mixed_prefixes(found, lengths, "words", ends_are_words=ends_are_words)
        return mixed.ends[torch.tensor(lengths).cumsum(0) - 1]


def mixed_prefixes(found: Sequence[Prefixes], lengths: list[int], mix: Mix, *, ends_are_words: bool) -> Prefixes:
    """Return log P of all prefixes in a mixture of models, fp64, from what each model says of them.

    ends_are_words: whether a sentence ends with a symbol `<eos>`, so that its end is one of the symbols
    """
    begins, ends = [one.begins for one in found], [one.ends for one in found]
    if mix == "sentences" or len(found) == 1:
        return Prefixes(mean_probability(begins), mean_probability(ends))

    def given(joint: list[Tensor], begun: list[Tensor]) -> Tensor:
        """Return log p given the words before; -inf, too, where these have probability 0 in all models."""
        nowhere = torch.stack(begun).amax(0) == -math.inf
        return torch.where(nowhere, -math.inf, mixed_conditionals(joint, begun, mix))

    before = [before_each(one, lengths, 0.0) for one in begins]
    log_p = torch.cat([steps.cumsum(0) for steps in given(begins, before).split(lengths)])
    if ends_are_words:
        return Prefixes(log_p, before_each(log_p, lengths, 0.0) + given(ends, before))
    return Prefixes(log_p, log_p + given(ends, begins))


def mixed_conditionals(joint: Sequence[Tensor], begun: Sequence[Tensor], mix: Mix) -> Tensor:
    """Return log p(what comes next | words before) in a mixture of models, fp64.

    joint, begun: of each model, log P(words before, what comes next) and log P(words before). NaN: nothing comes next,
    the words before have probability 0 in all models.
    """
    if mix == "sentences":
        return mean_probability(joint) - mean_probability(begun)
    each, before = (torch.stack([one.double() for one in some]) for some in (joint, begun))
    there = before != -math.inf
    each = torch.where(there, each - before, -math.inf)
    return torch.logsumexp(each, 0) - there.sum(0).double().log()


def before_each(values: Tensor, lengths: list[int], at_the_start: float) -> Tensor:
    """Shift the values of symbols to the next ones of their sentences."""
    before = torch.cat((values[:1], values[:-1]))
    before[[int(place) for place in np.cumsum([0, *lengths])[:-1]]] = at_the_start
    return before


def mean_probability(log_probabilities: Sequence[Tensor]) -> Tensor:
    """Average probabilities of several models, given and returned as logarithms in fp64."""
    stacked = torch.stack([one.double() for one in log_probabilities])
    return torch.logsumexp(stacked, 0) - math.log(len(stacked))
