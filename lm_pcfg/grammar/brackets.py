"""Brackets of the training text, from a file of trees: what the trees of its sentences may not cross.

The file has a line for each line of the text, as `lm_pcfg parse` writes it: a tree over its words, perhaps a partial
one, or a line without a tree, about which nothing is known.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flash_inside import span_limits
from lm_pcfg.corpus.opening import Corpora
from lm_pcfg.corpus.sentences import Sentences
from lm_pcfg.corpus.text import display_name, read_lines, resolve_source
from lm_pcfg.corpus.treebank import TreeError, escape_brackets, read_trees, resolve_trees
from lm_pcfg.corpus.vocabulary import Vocabulary
from lm_pcfg.errors import UserError
from lm_pcfg.settings import DataSection

RIGHT_BRANCHING = "right-branching"  # in place of a file


def with_brackets(corpora: Corpora, data: DataSection) -> Corpora:
    """Return the corpora with the brackets of data.brackets on the sentences of the training text."""
    if data.brackets is None:
        return corpora
    train, vocabulary = corpora.train, corpora.vocabulary
    if not isinstance(train, Sentences) or not isinstance(data.train, str):
        raise UserError("data.brackets needs a training text that is one plain file, read into memory")
    if not isinstance(vocabulary, Vocabulary) or vocabulary.end_id is not None:
        raise UserError("data.brackets are around words: use model.eos=implicit, and no data.sentencepiece")
    path = data.brackets["path"] if isinstance(data.brackets, dict) else data.brackets
    limits = right_branching(train) if path == RIGHT_BRANCHING else read_limits(train, data.train, path)
    return replace(corpora, train=replace(train, limits=limits))


def describe(train: Sentences, data: DataSection) -> str:
    """Say how many sentences have brackets, and for how long."""
    lengths = np.repeat(train.lengths, train.lengths)
    free = (train.limits[:, 0] == lengths) & (train.limits[:, 1] == 0)  # type: ignore[index]
    some = len(train) - int(np.minimum.reduceat(free, train.offsets[:-1]).sum())
    epochs = f" in the first {data.brackets['epochs']:g} epochs" if isinstance(data.brackets, dict) else ""
    return (
        f"brackets: on {some:,} of {len(train):,} training sentences{epochs}; the training loss counts their trees only"
    )


def right_branching(sentences: Sentences) -> np.ndarray:
    """Return the limits under which only spans of one word and those to the end of the sentence are allowed."""
    lengths = sentences.lengths
    position = np.arange(len(sentences.ids)) - np.repeat(sentences.offsets[:-1], lengths)
    limits = np.stack((np.repeat(lengths, lengths), position), axis=1).astype(np.int32)
    limits[sentences.offsets[1:] - 1, 1] = 0  # any span may end with the sentence
    return limits


def read_limits(sentences: Sentences, text: str, trees: str) -> np.ndarray:
    """Return the limits of the sentences of a text (`flash_inside.span_limits`): int32 [sum of lengths, 2]."""
    text_name, name = display_name(text), display_name(trees)
    lines = [line for _, line in read_lines(resolve_trees(trees), name=name)]
    wanted = set(sentences.line_numbers.tolist())
    limits, number = [], 0
    for number, line in read_lines(resolve_source(text), name=text_name):
        if number in wanted and number <= len(lines):
            limits.append(_limits_of(lines[number - 1], line.split(), f"{name}, line {number}"))
    if number != len(lines):
        raise UserError(f"{name}: has {len(lines):,} lines, but {text_name} has {number:,}; it needs one for each")
    return np.concatenate(limits)


def _limits_of(line: str, words: list[str], where: str) -> np.ndarray:
    try:
        trees = [tree for tree in read_trees([line]) if tree.words]
    except TreeError as error:
        reason = str(error).removeprefix("line 1: ")
        raise UserError(
            f"{where}: {reason} (data.brackets needs a tree on one line, for each line of the text)"
        ) from None
    if len(trees) > 1:
        raise UserError(f"{where}: {len(trees)} trees, not one")
    for tree in trees:
        if list(tree.words) != [escape_brackets(word) for word in words]:
            raise UserError(f"{where}: the tree has other words than the text there: {' '.join(tree.words)[:60]}")
    brackets = [(first, end) for tree in trees for first, end, _ in tree.nodes]
    return span_limits(brackets, len(words))
