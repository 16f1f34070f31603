"""A model as users have it, in Python and behind the commands: `lm_pcfg.load` returns one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch

from flash_inside import Statistics
from lm_pcfg.console import unseen
from lm_pcfg.corpus.batches import BatchOptions, plan_batches
from lm_pcfg.corpus.lengths import Limits
from lm_pcfg.corpus.pieces import AnyVocabulary
from lm_pcfg.corpus.sentences import encode_sentences
from lm_pcfg.corpus.treebank import Tree
from lm_pcfg.distributed.collectives import prepare_cpu
from lm_pcfg.distributed.sharing import ALONE, Ranks
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.families import family_of
from lm_pcfg.grammar.likelihood import tell_long
from lm_pcfg.grammar.parsing import NO_TREE, Parser, Tags, as_array, mbr_trees, mean_posteriors
from lm_pcfg.inference.lines import OnLines, longest_line, unit_of
from lm_pcfg.inference.next_word import Mix, NextWords, check_mix, complete, log_probabilities_after
from lm_pcfg.inference.sample import (
    Drawn,
    Sample,
    ScoredTree,
    check_draws,
    counted,
    draw_samples,
    posterior_trees,
    text_of,
)
from lm_pcfg.inference.score import (
    BATCH_COST,
    Surprisal,
    check_mixture,
    mixture_log_probabilities,
    parts_of,
    surprisals,
)
from lm_pcfg.inference.symbols import SymbolTable, symbols_of
from lm_pcfg.inference.trained import TrainedGrammar, Weights, load_trained

Method = Literal["mbr", "viterbi"]
END = "<end>"  # of a sentence, where a word is expected


def load_model(
    paths: Sequence[str | PathLike[str]], *, weights: Weights = "auto", device: str = "auto", prepare: bool = False,
    threads: int | None = None, ranks: Ranks = ALONE,
) -> Model:  # fmt: skip
    """Load one trained grammar or several; see `lm_pcfg.load`. ranks: processes that share what `Model` computes."""
    if prepare:
        prepare_cpu(threads)
    chosen: list[Path | None] = [Path(path) for path in paths] or [None]
    grammars = ranks.on_all(lambda: [load_trained(path, weights=weights, device=device) for path in chosen])
    found = ranks.all_gather([(str(one.checkpoint), one.weights, one.state) for one in grammars])
    for rank, own in enumerate(found):
        for (first, *theirs), (other, *those) in zip(found[0], own, strict=True):
            if theirs != those:
                problem = f"rank {rank} has loaded another model ({other}) than rank 0 ({first})"
                ranks.agree(UserError(f"{problem}; give all of them the same --checkpoint"))
    return Model(grammars, ranks=ranks)


class _LinesOfABatch(NamedTuple):
    indices: list[int]  # in the lines that were given
    longest: int  # in words or pieces


class Model:
    """One trained grammar, or several: an even mixture of them in `score` and `sample`, their consensus in trees.

    Lines are text as it was trained on, words between white space; unknown words are mapped for the model and shown as
    written. Lines may be of any length and number: they are computed in batches of similar length.
    """

    def __init__(
        self, grammars: Sequence[TrainedGrammar], *, precision: str = "fp32", batch_cost: int = BATCH_COST,
        ranks: Ranks = ALONE,
    ):  # fmt: skip
        """precision: of the inside algorithm; batch_cost: words squared of a batch.

        ranks: processes that call `score` and `parse` together, with the same lines, and share their batches.
        """
        self.grammars, self.ranks = tuple(grammars), ranks
        self.precision, self.batch_cost = precision, batch_cost
        self._next_words: list[NextWords] | None = None
        self.statistics = Statistics()  # of all that was computed: how many sentences, how many of them twice

    @property
    def vocabulary(self) -> AnyVocabulary:
        """The vocabulary, where there are several that of the first."""
        return self.grammars[0].vocabulary

    @property
    def is_bound(self) -> bool:
        """Whether scores are estimates of a lower bound, as those of compound models are."""
        return any(family_of(one.settings.model).scores_are_bounds for one in self.grammars)

    def __repr__(self) -> str:
        return f"lm_pcfg.load({', '.join(repr(str(one.checkpoint)) for one in self.grammars)})"

    # ---- probabilities ----------------------------------------------------------------------------------------------

    def score(self, lines: Sequence[str], *, mix: Mix = "sentences", on_lines: OnLines = unseen) -> np.ndarray:
        """Return the natural log-probability of every line: fp64 [lines].

        mix: of several grammars, the mean of their probabilities of sentences; or of each word (or piece) given those
        before it, and of the end, over the grammars that give the words before a probability above 0.

        Of compound models (`sc_pcfg`, `c_pcfg`) it is an estimate of the evidence lower bound, with one latent vector
        for each line, the same each time; `lm_pcfg score --samples` draws more.
        -inf: the grammar cannot generate it; NaN: the line is blank. on_lines is called with the number of lines
        whenever some are done.
        """
        _check_lines(lines)
        parts = self.ranks.on_all(lambda: parts_of(self.grammars, mix, self.next_words))
        scores = np.full(len(lines), math.nan)
        there = [number for number, line in enumerate(lines) if line.split()]
        sentences = encode_sentences(((number, lines[number]) for number in there), self.vocabulary)
        if sentences.lines != len(there):  # a line of which the vocabulary makes nothing
            there = sentences.line_numbers.tolist()
        scores[there] = mixture_log_probabilities(
            parts, sentences, precision=self.precision, batch_cost=self.batch_cost, statistics=self.statistics,
            on_lines=on_lines, ranks=self.ranks,
        )  # fmt: skip
        return scores

    # ---- what comes next --------------------------------------------------------------------------------------------

    def surprisal(
        self, lines: Sequence[str], *, entropy: bool = False, mix: Mix = "sentences", on_lines: OnLines = unseen
    ) -> list[Surprisal | None]:
        """Return the surprisal of every word of every line, and of its end, in bits; None for a blank line.

        Each line is a text of its own: nothing before it counts. The sum over a line is -log2 of its probability.
        entropy: also that of what comes next, before each word. mix: of several grammars, as in `score`.
        """
        _check_lines(lines)
        check_mix(mix)
        models = self.next_words()
        results: list[Surprisal | None] = [None] * len(lines)
        for indices in self._batches(lines, on_lines):
            found = surprisals(
                models, [lines[index] for index in indices], precision=self.precision, statistics=self.statistics,
                with_entropy=entropy, mix=mix,
            )  # fmt: skip
            for index, one in zip(indices, found, strict=True):
                results[index] = one
            on_lines(len(indices))
        return results

    def log_probabilities(self, prefix: str) -> np.ndarray:
        """Return log p(what comes next | prefix) of every word of `vocabulary.words`, and last of the end: [V + 1].

        With a vocabulary of pieces, what comes next is a piece. They sum to 1; without words in the prefix to the mass
        of finite sentences, which is 1 unless the grammar loses mass.

        Where ends are explicit, the end is `<eos>` with nothing after it, and the entry of `<eos>` itself is -inf: it
        is no word. For a PCFG, what is missing up to 1 is then the mass of strings that do not end in a single `<eos>`.
        """
        return log_probabilities_after(self.next_words(), self._ids(prefix))

    def next_word(self, prefix: str, most: int = 10) -> list[tuple[str, float]]:
        """Return the likeliest continuations with their probabilities; END stands for the end of the sentence."""
        if most < 1:
            raise UserError(f"{most} continuations cannot be listed: ask for 1 or more")
        log_p = self.log_probabilities(prefix)
        names = (*self.vocabulary.words, END)
        return [(names[index], math.exp(log_p[index])) for index in np.argsort(-log_p, kind="stable")[:most].tolist()]

    def complete(self, prefix: str, number: int, *, seed: int = 0, max_length: int = 250) -> list[str | None]:
        """Draw sentences that begin with the prefix from p(sentence | prefix), exactly; the same seed draws the same.

        The prefix stays as it is written. None stands for a sentence of more than max_length words, or one that does
        not end as sentences do.
        """
        return self.draw_completions(prefix, number, seed=seed, max_length=max_length, drawn=Drawn())

    def draw_completions(
        self, prefix: str, number: int, *, seed: int = 0, max_length: int = 250, drawn: Drawn
    ) -> list[str | None]:
        """Do as `complete`, and count in `drawn` what became of the draws."""
        check_draws(number, seed, max_length)
        vocabulary, begun, typed = self.vocabulary, self._ids(prefix), " ".join(prefix.split())
        if len(begun) >= max_length:
            unit = unit_of(vocabulary)
            raise UserError(
                f"a prefix of {counted(len(begun), unit)} leaves no room for more: sentences may have "
                f"{counted(max_length, unit)} (max_length)"
            )
        most = max_length + (vocabulary.end_id is not None)
        found: list[str | None] = []
        for ids in complete(self.next_words(), begun, number, seed=seed, max_length=most):
            text = None if ids is None else text_of(vocabulary, ids, begun, typed)
            drawn.add(ids, text)
            found.append(text)
        return found

    def next_words(self) -> list[NextWords]:
        """Return what each grammar says of prefixes; refuse, in one line, models of families that cannot."""
        if self._next_words is None:
            check_mixture(self.grammars)
            self._next_words = [NextWords(one) for one in self.grammars]
        return self._next_words

    def finite_mass(self) -> float:
        """Return the probability that a sentence ends at all: 1 unless a grammar loses mass."""
        models = self.next_words()
        return math.fsum(one.finite_mass for one in models) / len(models)

    def _ids(self, prefix: str) -> list[int]:
        if not isinstance(prefix, str):
            raise TypeError(f"give one prefix, a string, not a {type(prefix).__name__}")
        return self.vocabulary.tokenise([prefix])[0] if prefix.split() else []

    # ---- trees ------------------------------------------------------------------------------------------------------

    def parse(
        self, lines: Sequence[str], method: Method = "mbr", *, at_least: float = 0.0, on_lines: OnLines = unseen
    ) -> list[Tree]:
        """Return the tree of every line, over its words.

        mbr      the tree with the most right spans in expectation, without labels: the mean of the span posteriors of
                 all grammars decides
        viterbi  the most probable tree of one grammar; labels are its symbols, N0, N1, ... and P0, P1, ...

        at_least: for mbr, leave out the spans of a smaller posterior, so that trees are partial.

        A line of one word has a tree of one word. A line that no grammar can generate, or a blank one, has a tree
        without words.
        """
        _check_lines(lines)
        if method not in get_args(Method):
            raise UserError(f"unknown method {method!r}: use {' or '.join(get_args(Method))}")
        trees = [NO_TREE] * len(lines)
        parsers = self._parsers()
        if method == "viterbi" and len(parsers) > 1:
            raise UserError("a consensus is that of span posteriors: use mbr, or one checkpoint for viterbi")
        if method == "viterbi" and at_least > 0.0:
            raise UserError("Viterbi's spans have no posteriors: --at-least goes with --method mbr")
        if not 0.0 <= at_least <= 1.0:
            raise UserError(f"at_least = {at_least} should be a probability")

        def best(batch: _LinesOfABatch) -> list[Tree]:
            tell_long([batch.longest], on_lines)
            some = [lines[index] for index in batch.indices]
            if method == "viterbi":
                return parsers[0].best_trees(some)
            tables = [parser.posteriors(some, self.statistics) for parser in parsers]
            return mbr_trees(some, mean_posteriors(tables), at_least)

        batches = self._planned(lines)
        shared = self.ranks.share(batches, best, lambda batch: on_lines(len(batch.indices)))
        for batch, found in zip(batches, shared, strict=True):
            for index, tree in zip(batch.indices, found, strict=True):
                trees[index] = tree
        return trees

    def marginals(self, lines: Sequence[str], *, on_lines: OnLines = unseen) -> list[np.ndarray]:
        """Return the posterior of every span of words of every line: fp64 tables [words+1, words+1].

        Entry (i, j), i < j, is of the words i..j-1. Several grammars: the mean over those that have a tree. All zeros:
        none has one.
        """
        _check_lines(lines)
        tables = [np.zeros((1, 1))] * len(lines)
        parsers = self._parsers()
        for indices in self._batches(lines, on_lines):
            some = [lines[index] for index in indices]
            means = mean_posteriors([parser.posteriors(some, self.statistics) for parser in parsers])
            for index, line, mean in zip(indices, some, means, strict=True):
                tables[index] = as_array(mean, len(line.split()))
            on_lines(len(indices))
        return tables

    def tags(self, lines: Sequence[str], *, on_lines: OnLines = unseen) -> list[Tags | None]:
        """Return the most probable symbol at every word, each by itself, with its posterior probability.

        Symbols are preterminals, P0, P1, ..., or the states of a hidden Markov model, S0, S1, ... Of compound models
        they are those of the grammar of the posterior mean of z. None: a blank line, or one of probability 0.
        """
        _check_lines(lines)
        if len(self.grammars) > 1:
            raise UserError("symbols of different models have nothing in common: give one checkpoint for tags")
        first = self.grammars[0]
        tagger = Parser(first.grammar, first.vocabulary, self.precision)
        results: list[Tags | None] = [None] * len(lines)
        for indices in self._batches(lines, on_lines):
            found = tagger.tags([lines[index] for index in indices], self.statistics)
            for index, one in zip(indices, found, strict=True):
                results[index] = one
            on_lines(len(indices))
        return results

    # ---- samples ----------------------------------------------------------------------------------------------------

    def sample(self, number: int, *, seed: int = 0, max_length: int = 250) -> list[Sample]:
        """Draw sentences with their derivations by exact ancestral sampling; the same seed draws the same ones.

        A compound model first draws the latent vector of each sentence from N(0, I).

        Samples of more than max_length words are cut. The list is shorter by their number, and a warning says so: what
        is left is a sample of shorter sentences only.
        """
        drawn = Drawn()
        samples = list(self.draw(number, seed=seed, max_length=max_length, drawn=drawn))
        if message := drawn.message(max_length, unit_of(self.vocabulary)):
            warnings.warn(message, stacklevel=2)
        return samples

    def draw(self, number: int, *, seed: int = 0, max_length: int = 250, drawn: Drawn) -> Iterator[Sample]:
        """Do as `sample`, one after the other, and count in `drawn` instead of warning."""
        return draw_samples(self.grammars, number, seed=seed, max_length=max_length, drawn=drawn)

    def sample_trees(
        self, lines: Sequence[str], number: int, *, seed: int = 0, first_line: int = 0,
        on_lines: OnLines = unseen,
    ) -> list[list[ScoredTree]]:  # fmt: skip
        """Draw so many trees of every line from p(tree | line), with symbols as labels; none for a line without one.

        Of compound models (`sc_pcfg`) they are those of the grammar of the posterior mean of z, as in `parse`.
        first_line: of a longer text, where these lines begin in it, so that each part has draws of its own.
        """
        _check_lines(lines)
        if len(self.grammars) > 1:
            raise UserError("trees of given sentences are drawn from one grammar: give one checkpoint")
        trees: list[list[ScoredTree]] = [[] for _ in lines]
        for indices in self._batches(lines, on_lines, trees_each=number):
            state = np.random.SeedSequence([seed, first_line + indices[0]]).generate_state(1, np.uint64)
            generator = torch.Generator().manual_seed(int(state[0]) >> 1)
            found = posterior_trees(self.grammars[0], [lines[index] for index in indices], number, generator)
            for index, some in zip(indices, found, strict=True):
                trees[index] = some
            on_lines(len(indices))
        return trees

    # ---- what it has learned ----------------------------------------------------------------------------------------

    def symbols(self, lines: Sequence[str] | None = None, *, most: int = 10, listed: int = 50) -> SymbolTable:
        """Return what the symbols of the (first) grammar mean: their words, children and uses, the most used first.

        lines: count uses in the trees of these, not in the grammar's own derivations; most: words or children of a
        symbol; listed: symbols of each kind.
        """
        first = self.grammars[0]
        text = None
        if lines is not None:
            _check_lines(lines)
            text = encode_sentences(enumerate(lines, start=1), first.vocabulary, Limits(None, first.fewest_symbols))
            if not len(text):
                raise UserError("none of these lines has a tree: give lines of words")
        return symbols_of(first, text, most=most, listed=listed)

    # ---- limits and batches -----------------------------------------------------------------------------------------

    def longest_line(self) -> float:
        """Return how many words (or pieces) a line may have so that its chart fits into memory; inf: any number."""
        return longest_line(self.grammars, self.precision)

    def check_trees(self) -> None:
        """Refuse, in one line, models of families that have no trees."""
        self._parsers()

    def _parsers(self) -> list[Parser]:
        parsers = [Parser(one.grammar, one.vocabulary, self.precision) for one in self.grammars]
        for parser in parsers:
            parser.check()
        return parsers

    def _batches(self, lines: Sequence[str], on_lines: OnLines, trees_each: int = 1) -> Iterator[list[int]]:
        """Yield the indices of lines of similar length that are computed together; blank lines are in none."""
        for batch in self._planned(lines, trees_each):
            tell_long([batch.longest], on_lines)
            yield batch.indices

    def _planned(self, lines: Sequence[str], trees_each: int = 1) -> list[_LinesOfABatch]:
        there = np.array([number for number, line in enumerate(lines) if line.split()], dtype=np.int64)
        some = [lines[number] for number in there]
        lengths = [[len(ids) for ids in one.vocabulary.tokenise(some)] for one in self.grammars]
        longest = np.max(np.array(lengths, dtype=np.int64).reshape(len(lengths), -1), axis=0, initial=1)
        cost = max(1, self.batch_cost // max(1, trees_each // 8))
        plan = plan_batches(longest, BatchOptions(by="cost", cost=cost))
        return [_LinesOfABatch(there[batch].tolist(), int(longest[batch].max())) for batch in plan]


def _check_lines(lines: Sequence[str]) -> None:
    """A string is a sequence of strings, too: its characters, which nobody means."""
    if isinstance(lines, str):
        raise TypeError("give a list of lines, not one string")
