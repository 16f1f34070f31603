"""Trees of lines of text: posteriors of spans of words, the consensus of several models, MBR and Viterbi. Also tags.

A model sees symbols: words, pieces of words, perhaps `<eos>` at the end. Trees are over the words of a line, so a table
of span posteriors is cut down to the positions where words begin and end. Tables over words can be averaged whatever
the vocabularies of their models are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import flash_inside
from flash_inside import Statistics
from lm_pcfg.corpus.pieces import AnyVocabulary
from lm_pcfg.corpus.treebank import Tree
from lm_pcfg.errors import UserError

PHRASE, TAG = "X", "T"  # labels of trees that have none
NO_TREE = Tree((), (), ())


class Tags(NamedTuple):
    """The most probable symbol at every word of a line, each word by itself."""

    words: tuple[str, ...]  # as written
    tags: tuple[str, ...]  # P7 is preterminal 7; S7 is state 7 of a hidden Markov model
    probabilities: tuple[float, ...]  # posterior ones


class Parser(NamedTuple):
    """A grammar that makes trees, with its vocabulary; for tags any distribution."""

    grammar: Any  # with `word_posteriors` and perhaps `span_marginals`, `viterbi` and `sample_trees`
    vocabulary: AnyVocabulary
    precision: str = "fp32"
    backend: str = "auto"

    def check(self) -> None:
        """Refuse a model of a family without trees."""
        if not hasattr(self.grammar, "span_marginals"):
            raise UserError("models of this family have no trees, which need a grammar; `tag` prints symbols of words")

    def check_has(self, method: str, what: str) -> None:
        """Refuse a grammar that lacks a method for trees."""
        if not hasattr(self.grammar, method):
            raise UserError(f"models of this family have no {what}; their trees are those of parse --method mbr")

    def encode(self, lines: Sequence[str]) -> Encoded:
        """Encode the lines of which the vocabulary makes anything, and find where the words of each stand."""
        end = [] if self.vocabulary.end_id is None else [self.vocabulary.end_id]
        encoded = Encoded([], [], [], [])
        for number, (ids, line) in enumerate(zip(self.vocabulary.tokenise(lines), lines, strict=True)):
            boundaries = self.vocabulary.word_boundaries(ids, len(line.split())) if ids else None
            if boundaries is not None:
                encoded.lines.append(number)
                encoded.symbols.extend(ids + end)
                encoded.lengths.append(len(ids) + len(end))
                encoded.boundaries.append(boundaries)
        return encoded

    def posteriors(self, lines: Sequence[str], statistics: Statistics | None = None) -> list[Tensor | None]:
        """Return the posterior of every span of words: a table [words+1, words+1] a line.

        None: the model has no tree for this line, or cannot tell its words apart.
        """
        results: list[Tensor | None] = [None] * len(lines)
        encoded = self.encode(lines)
        if not encoded.lines:
            return results
        symbols, lengths = torch.tensor(encoded.symbols), encoded.lengths
        tables = self.grammar.span_marginals(
            symbols, lengths, precision=self.precision, backend=self.backend, statistics=statistics
        )
        possible = torch.stack([table[0, -1] for table in tables]).tolist()  # that of the whole line is 1, or 0
        ends = self.vocabulary.end_id is not None
        siblings = self.grammar.last_siblings(symbols, lengths) if ends else [None] * len(tables)
        for line, table, boundaries, exists, sibling in zip(
            encoded.lines, tables, encoded.boundaries, possible, siblings, strict=True
        ):
            if sibling is not None:  # without <eos>, (i, l) and (i, l + 1) are one span
                both = sibling.to(table.dtype)
                table[:-2, -2] += table[:-2, -1] - both
            if len(boundaries) < len(table):  # pieces, or an <eos> that is no word
                index = torch.tensor(boundaries, device=table.device)
                table = table[index[:, None], index]
            results[line] = table if exists else None
        return results

    def best_trees(self, lines: Sequence[str]) -> list[Tree]:
        """Return Viterbi's tree of every line, with symbols as labels; as `mbr_trees` where there is none."""
        self.check_has("viterbi", "Viterbi trees")
        trees = [one_word_tree(words) if len(words := tuple(line.split())) == 1 else NO_TREE for line in lines]
        encoded = self.encode(lines)
        if encoded.lines:
            found = self.grammar.viterbi(
                torch.tensor(encoded.symbols), encoded.lengths, precision=self.precision, backend=self.backend
            )
            n = self.grammar.nonterminals
            for line, boundaries, (_, nodes) in zip(encoded.lines, encoded.boundaries, found, strict=True):
                if nodes:
                    trees[line] = labelled_tree(lines[line].split(), nodes, boundaries, n)
        return trees

    def tags(self, lines: Sequence[str], statistics: Statistics | None = None) -> list[Tags | None]:
        """Return the tags of every line: posterior decoding. A word of several pieces has the tag of its first.

        None: the line has probability 0, or the model cannot tell its words apart.
        """
        results: list[Tags | None] = [None] * len(lines)
        encoded = self.encode(lines)
        if not encoded.lines:
            return results
        if not hasattr(self.grammar, "word_posteriors"):
            raise UserError(f"a {type(self.grammar).__name__} has no symbols above its words, so there are no tags")
        letter = "P" if hasattr(self.grammar, "nonterminals") else "S"
        tables = self.grammar.word_posteriors(
            torch.tensor(encoded.symbols), encoded.lengths, precision=self.precision, backend=self.backend,
            statistics=statistics,
        )  # fmt: skip
        for line, table, boundaries in zip(encoded.lines, tables, encoded.boundaries, strict=True):
            probabilities, symbols = (each.tolist() for each in table[boundaries[:-1]].max(1))
            if probabilities[0] > 0.0:
                names = tuple(f"{letter}{symbol}" for symbol in symbols)
                results[line] = Tags(tuple(lines[line].split()), names, tuple(probabilities))
        return results


class Encoded(NamedTuple):
    """Lines as a model sees them. Those that it cannot see, or whose words it cannot tell apart, are left out."""

    lines: list[int]  # their numbers
    symbols: list[int]  # [sum(lengths)] ids, with `<eos>` where ends are explicit
    lengths: list[int]
    boundaries: list[list[int]]  # where the words of each begin and end


def symbol_name(symbol: int, nonterminals: int) -> str:
    """N7 is the nonterminal number 7, P7 the preterminal number 7."""
    return f"N{symbol}" if symbol < nonterminals else f"P{symbol - nonterminals}"


def labelled_tree(
    words: Sequence[str], nodes: Sequence[tuple[int, int, int]], boundaries: Sequence[int], nonterminals: int
) -> Tree:
    """Turn the nodes of a tree over symbols into a tree over words.

    Nodes that begin or end inside of a word are left out, and so is what is below a word: its tag is that of the
    highest node that is just this word, or, if there is none, of its first piece. Without `<eos>`, which is no word,
    a node above it ends one symbol earlier, where its other child ends; of these two the upper one stays.
    """
    place = {position: word for word, position in enumerate(boundaries)}
    last = boundaries[-1]
    tags: list[str] = [""] * len(words)
    phrases: dict[tuple[int, int], str] = {}
    for first, end, symbol in nodes:  # parents come before their children
        if first >= last:
            continue  # <eos> itself
        word, word_end, label = place.get(first), place.get(min(end, last)), symbol_name(symbol, nonterminals)
        if word is None:
            continue
        if word_end == word + 1 or (word_end is None and end - first == 1):
            tags[word] = tags[word] or label
        elif word_end is not None:
            phrases.setdefault((word, word_end), label)
    return Tree(tuple(words), tuple(tags), tuple((first, end, label) for (first, end), label in phrases.items()))


def mean_posteriors(tables: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Average the tables of several models, line by line; a model without a tree for a line is left out of its mean."""
    if len(tables) == 1:
        return list(tables[0])
    means: list[Tensor | None] = []
    for of_line in zip(*tables, strict=True):
        there = [table.double().cpu() for table in of_line if table is not None]
        means.append(torch.stack(there).mean(0) if there else None)
    return means


def mbr_trees(lines: Sequence[str], tables: Sequence[Tensor | None], at_least: float = 0.0) -> list[Tree]:
    """Return the tree with the most right spans in expectation for every line, without labels.

    at_least: spans of a smaller posterior are left out, but not that of the whole line.
    A line of one word has only one tree, whatever a model says; another line without a table has NO_TREE.
    """
    found = iter(flash_inside.mbr([table for table in tables if table is not None]))
    trees = []
    for line, table in zip(lines, tables, strict=True):
        words = tuple(line.split())
        spans = next(found) if table is not None else []
        if table is not None and at_least > 0.0:
            posterior = table.tolist()
            spans = [(i, j) for i, j in spans if posterior[i][j] >= at_least or j - i == len(words)]
        phrases = tuple((first, end, PHRASE) for first, end in spans if end - first > 1)
        tree = Tree(words, (TAG,) * len(words), phrases) if phrases else NO_TREE
        trees.append(one_word_tree(words) if len(words) == 1 else tree)
    return trees


def one_word_tree(words: tuple[str, ...]) -> Tree:
    return Tree(words, (TAG,), ())


def as_array(table: Tensor | None, words: int) -> np.ndarray:
    """Return a table as fp64 [words+1, words+1]; zeros for None."""
    return np.zeros((words + 1, words + 1)) if table is None else table.double().cpu().numpy()
