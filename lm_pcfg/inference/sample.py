"""Sentences drawn from a model, and trees drawn for given sentences: both exact (`lm_pcfg sample`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from lm_pcfg.corpus.pieces import AnyVocabulary, PieceVocabulary
from lm_pcfg.corpus.treebank import Tree
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.generation import Derivation
from lm_pcfg.grammar.parsing import Parser, labelled_tree
from lm_pcfg.inference.trained import TrainedGrammar

AT_A_TIME = 10_000  # derivations that grow together


@dataclass(frozen=True)
class Sample:
    """A sentence with the derivation that made it."""

    text: str
    #: Over words, or over the pieces of a vocabulary of pieces; labels are symbols. A hidden Markov model has no tree,
    #: and its states as tags.
    tree: Tree
    log_probability: float  # natural, of the derivation (of compound models: given z): that of the sentence is larger


class ScoredTree(NamedTuple):
    """A tree of a given line, drawn from p(tree | line)."""

    tree: Tree
    log_probability: float  # natural, of the tree and its words together


@dataclass
class Drawn:
    """How many samples were drawn, and why some of them are no sentences."""

    samples: int = 0
    cut: int = 0  # they would have had more words than allowed
    without_end: int = 0  # explicit ends: `<eos>` was not at the end, or not only there
    empty: int = 0  # explicit ends: `<eos>` alone

    def add(self, ids: Sequence[int] | None, text: str | None) -> None:
        """Count a draw. ids: its symbols, None if it was cut; text: None if it is no sentence."""
        self.samples += 1
        self.cut += ids is None
        if ids is not None and text is None:
            self.empty += len(ids) == 1
            self.without_end += len(ids) > 1

    def message(self, max_length: int, unit: str) -> str:
        """Say what is missing from the samples, so that nobody takes them for all; "" if nothing is."""
        parts = []
        if self.cut:
            parts.append(f"{self.cut:,} of {self.samples:,} samples have more than {counted(max_length, unit)}")
        if self.without_end:
            parts.append(f"{self.without_end:,} of {self.samples:,} do not end in a single <eos>")
        if self.empty:
            parts.append(f"{self.empty:,} of {self.samples:,} have no {unit}")
        return (
            f"{' and '.join(parts)}: they are left out, so the others are no fair sample of the grammar"
            if parts
            else ""
        )


def counted(number: float, unit: str) -> str:
    """1 word, 2 words; unit: the plural."""
    return f"{number:,.0f} {unit.removesuffix('s') if number == 1 else unit}"


def check_draws(number: int, seed: int, max_length: int) -> None:
    """Refuse what cannot be drawn."""
    if number < 0 or max_length < 1 or seed < 0:
        limit = counted(max_length, "words")
        raise UserError(f"{counted(number, 'samples')} of at most {limit} with seed {seed} cannot be drawn")


def draw_samples(
    mixture: Sequence[TrainedGrammar], number: int, *, seed: int, max_length: int, drawn: Drawn
) -> Iterator[Sample]:
    """Yield samples of the even mixture of some grammars; those left out are counted in `drawn`."""
    check_draws(number, seed, max_length)
    for one in mixture:
        if not hasattr(one.grammar, "sample"):
            raise UserError(f"{one.checkpoint}: a model of family {one.settings.model.family} cannot be sampled")
    for block, start in enumerate(range(0, number, AT_A_TIME)):
        count = min(AT_A_TIME, number - start)
        chosen = np.random.default_rng([seed, block]).integers(len(mixture), size=count)
        made = []
        for place, one in enumerate(mixture):
            own, end_id = int((chosen == place).sum()), one.vocabulary.end_id
            most = max_length + (end_id is not None)
            made.append(one.grammar.sample(own, seed=_seed(seed, block, place), max_length=most, end_id=end_id))
        for place in chosen.tolist():
            derivation = next(made[place])
            sample = None if derivation.cut else _sample(mixture[place], derivation)
            drawn.add(None if derivation.cut else derivation.words, None if sample is None else sample.text)
            if sample is not None:
                yield sample


def _seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])


def _sample(trained: TrainedGrammar, derivation: Derivation) -> Sample | None:
    """Turn a derivation into words; None where ends are explicit and it does not end as sentences do."""
    vocabulary = trained.vocabulary
    text = text_of(vocabulary, derivation.words)
    if text is None:
        return None
    ids = derivation.words if vocabulary.end_id is None else derivation.words[:-1]
    words = [vocabulary.words[id] for id in ids]
    if not hasattr(trained.grammar, "nonterminals"):  # states, as in `tag`
        tree = Tree(tuple(words), tuple(f"S{state}" for _, _, state in derivation.nodes[: len(ids)]), ())
    else:
        tree = labelled_tree(words, derivation.nodes, range(len(ids) + 1), trained.grammar.nonterminals)
    return Sample(text, tree, derivation.log_probability)


def text_of(vocabulary: AnyVocabulary, ids: Sequence[int], begun: Sequence[int] = (), typed: str = "") -> str | None:
    """Return the words of a drawn sentence; None where ends are explicit and it does not end as sentences do.

    begun, typed: its first symbols, and how they were written; so they stay.
    """
    ids = list(ids)
    if vocabulary.end_id is not None:
        if ids.count(vocabulary.end_id) != 1 or ids[-1] != vocabulary.end_id or len(ids) == 1:
            return None
        ids = ids[:-1]
    if isinstance(vocabulary, PieceVocabulary):
        text, known = vocabulary.decode(ids), vocabulary.decode(begun)
        return typed + text[len(known) :] if begun and text.startswith(known) else text
    return " ".join([*typed.split(), *(vocabulary.words[id] for id in ids[len(begun) :])])


def posterior_trees(
    trained: TrainedGrammar, lines: Sequence[str], number: int, generator: torch.Generator
) -> list[list[ScoredTree]]:
    """Draw trees of every line from p(tree | line); none where it has none."""
    parser = Parser(trained.grammar, trained.vocabulary)
    parser.check()
    parser.check_has("sample_trees", "trees drawn for given sentences")
    results: list[list[ScoredTree]] = [[] for _ in lines]
    encoded = parser.encode(lines)
    if encoded.lines:
        found = trained.grammar.sample_trees(torch.tensor(encoded.symbols), encoded.lengths, number, generator)
        n = trained.grammar.nonterminals
        for line, boundaries, trees in zip(encoded.lines, encoded.boundaries, found, strict=True):
            words = lines[line].split()
            results[line] = [ScoredTree(labelled_tree(words, nodes, boundaries, n), score) for score, nodes in trees]
    return results
