"""Bracketed trees: reading and writing them, and the changes that are made to gold trees before they are compared.

Words are separated at what `str.split` takes for white space, as everywhere in this package, non-breaking spaces
included. A word with such a space inside would be one word of the tree, but two when a model reads the text below it.
It is an error that names the line.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lm_pcfg.corpus.text import EMBEDDED_PREFIX, display_name, read_lines, resolve_source
from lm_pcfg.corpus.vocabulary import NUMBER, VocabularyOptions, normalise
from lm_pcfg.errors import UserError

EMPTY = "-NONE-"  # the Penn Treebank's tag of traces, which are not in the text
TOP = "TOP"  # the label of brackets that have none
PENN_PUNCTUATION = frozenset({",", ".", ":", "``", "''", "-LRB-", "-RRB-"})  # tags; $ and # are words that are spoken

TOKEN = re.compile(r"[()]|[^\s()]+")


@dataclass(frozen=True)
class Tree:
    """A tree over words. A word has a tag; a node is a phrase above the tags, (first word, end, label).

    Nodes are in the order of their opening brackets: parents before children, left before right.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]  # one for each word
    nodes: tuple[tuple[int, int, str], ...]


class TreeError(UserError, ValueError):
    """Brackets that do not make a tree; the message says where."""


# ---- reading --------------------------------------------------------------------------------------------------------


def read_trees(lines: Iterable[str]) -> Iterator[Tree]:
    """Yield the trees of Penn brackets: several on a line, or one over several lines.

    Traces are left out, with the phrases that have nothing else below them; a tree of traces alone, or `()`, has no
    words. Labels keep their function tags. Brackets without a label are `TOP`, but the outermost ones are left out if
    there is one bracket in them, as the Penn Treebank writes it.
    """
    return (tree for _, tree in numbered_trees(lines))


def load_trees(source: str) -> list[Tree]:
    """Read the trees of a file, of '-' (standard input) or of `embedded:train|valid|test.trees`."""
    name = display_name(source)
    try:
        return list(read_trees(line for _, line in read_lines(resolve_trees(source), name=name)))
    except TreeError as error:
        raise TreeError(f"{name}: {error}") from None


def resolve_trees(source: str) -> Path | str:
    """Find a file of trees, as `load_trees` takes it, for `read_lines`."""
    if not source.startswith(EMBEDDED_PREFIX):
        return resolve_source(source)
    from lm_pcfg.corpus import embedded  # generates files: only when asked for

    if not source.endswith(".trees"):
        raise TreeError(f"{source} is text, not bracketed trees; use {source}.trees")
    try:
        return embedded.resolve(source)
    except (ValueError, OSError) as error:
        raise TreeError(str(error)) from None


def read_tree(text: str) -> Tree:
    """Return the one tree of a text."""
    found = list(read_trees([text]))
    if len(found) != 1:
        raise TreeError(f"line 1: {len(found)} trees, not one")
    return found[0]


def numbered_trees(lines: Iterable[str], first: int = 1) -> Iterator[tuple[int, Tree]]:
    """Yield (line where it begins, tree); the lines are numbered from `first`."""
    stack: list[_Bracket] = []  # the open ones: no recursion, so trees may be as deep as they like
    tree = _Unfinished()
    for number, line in enumerate(lines, start=first):
        for token in TOKEN.findall(line):
            if token == "(":
                if not stack:
                    tree = _Unfinished()
                stack.append(tree.open(number))
            elif not stack:
                raise TreeError(
                    f"line {number}: {_short(token)!r} outside of brackets; is it a file of bracketed trees?"
                )
            elif token != ")":
                stack[-1].take(token)
            else:
                bracket = stack.pop()
                if stack:
                    tree.close(bracket)
                    stack[-1].children += 1
                else:
                    if bracket != _Bracket(bracket.line, 0, 0):  # () has nothing to close
                        tree.close(bracket)
                    yield bracket.line, tree.finished()
    if stack:
        raise TreeError(f"line {stack[0].line}: the tree that begins here has no end")


@dataclass(slots=True)
class _Bracket:
    """An open bracket of [label, node, ...], [tag, word] or, as the Penn Treebank's outermost ones are, [node, ...]."""

    line: int
    words_before: int
    nodes_before: int
    label: str | None = None
    words: list[str] = field(default_factory=list)
    children: int = 0

    def take(self, token: str) -> None:
        if self.label is None and not self.children:
            self.label = token
        else:
            self.words.append(token)


class _Unfinished:
    """The words and nodes of a tree up to the place where it is being read."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.tags: list[str] = []
        self.nodes: list[tuple[int, int, str | None]] = []  # no label: around one bracket, which may be all of the tree

    def open(self, line: int) -> _Bracket:
        self.nodes.append((0, 0, None))  # a place; `close` fills it or takes it away
        return _Bracket(line, len(self.words), len(self.nodes) - 1)

    def close(self, bracket: _Bracket) -> None:
        label, start, place = bracket.label, bracket.words_before, bracket.nodes_before
        if label == EMPTY:
            del self.words[start:], self.tags[start:], self.nodes[place:]
        elif bracket.words and bracket.children:
            raise TreeError(
                f"line {bracket.line}: words and brackets side by side below {_short(label or 'the top')!r}"
            )
        elif not bracket.children:
            if label is None or len(bracket.words) != 1:
                parts = _short(" ".join([label or "", *bracket.words]))
                raise TreeError(f"line {bracket.line}: ({parts}) should be a tag and a word")
            del self.nodes[place:]
            self.words.append(bracket.words[0])
            self.tags.append(label)
        elif len(self.words) == start:  # nothing but traces
            del self.nodes[place:]
        else:
            self.nodes[place] = (start, len(self.words), label or (TOP if bracket.children > 1 else None))

    def finished(self) -> Tree:
        outer = 0
        while outer < len(self.nodes) and self.nodes[outer][2] is None:
            outer += 1
        nodes = tuple((start, end, label or TOP) for start, end, label in self.nodes[outer:])
        return Tree(tuple(self.words), tuple(self.tags), nodes)


def _short(text: str) -> str:
    return textwrap.shorten(text, 60, placeholder=" ...") if " " in text else text[:60]


# ---- writing --------------------------------------------------------------------------------------------------------


def escape_brackets(word: str) -> str:
    """Write ( and ) inside a word as the Penn Treebank does."""
    return word.replace("(", "-LRB-").replace(")", "-RRB-")


def unescape_brackets(word: str) -> str:
    return word.replace("-LRB-", "(").replace("-RRB-", ")")


def bracketed(tree: Tree) -> str:
    """Write a tree as Penn brackets on one line; what `read_tree` makes of it is the same tree, with escaped words.

    Words without a node above all of them get one that is called TOP. ValueError: nodes that cross, are empty or out of
    order, and words, tags and labels that are empty or have white space inside.
    """
    if not tree.words:
        return "()"
    nodes = list(tree.nodes)
    if len(tree.words) > 1 and (not nodes or nodes[0][:2] != (0, len(tree.words))):
        nodes.insert(0, (0, len(tree.words), TOP))
    nodes.reverse()  # the next one is the last
    parts: list[str] = []
    ends: list[int] = []  # of the open brackets
    for place, (word, tag) in enumerate(zip(tree.words, tree.tags, strict=True)):
        while nodes and nodes[-1][0] == place:
            _, end, label = nodes.pop()
            if not place < end <= (ends[-1] if ends else len(tree.words)):
                raise ValueError(f"node {label!r} over words {place} to {end} crosses another or has no words")
            parts.append(f"({_symbol(label)}")
            ends.append(end)
        closing = 0
        while ends and ends[-1] == place + 1:
            ends.pop()
            closing += 1
        parts.append(f"({_symbol(tag)} {_symbol(word)}){')' * closing}")
    if nodes:
        raise ValueError(f"node {nodes[-1]} is out of order")
    return " ".join(parts)


def _symbol(text: str) -> str:
    if text.split() != [text]:
        raise ValueError(f"{text!r} is empty or has white space, and cannot be written in brackets")
    return escape_brackets(text)


# ---- changing -------------------------------------------------------------------------------------------------------


def plain_label(label: str) -> str:
    """Return a label without function tags and numbers: NP of NP-SBJ-1 and of NP=2; -LRB- and ADVP|PRT stay."""
    return label if label.startswith(("-", "=")) else re.split("[-=]", label, maxsplit=1)[0]


def without(tree: Tree, tags: Collection[str]) -> Tree:
    """Leave out the words with these tags, and the phrases that have no others."""
    return with_words(tree, [tag not in tags for tag in tree.tags])


def with_words(tree: Tree, kept: Sequence[bool]) -> Tree:
    """Leave out the words that are not kept (one value for each), and the phrases that have no others."""
    if all(kept):
        return tree
    before = [0]  # number of words kept before each
    for keep in kept:
        before.append(before[-1] + keep)
    return Tree(
        tuple(word for word, keep in zip(tree.words, kept, strict=True) if keep),
        tuple(tag for tag, keep in zip(tree.tags, kept, strict=True) if keep),
        tuple((before[i], before[j], label) for i, j, label in tree.nodes if before[i] < before[j]),
    )


def normalised(tree: Tree, lowercase: bool, fold_numbers: bool) -> Tree:
    """Write the words as the Penn Treebank's language-modelling text does: in lower case, and N for numbers.

    A number is what a vocabulary takes for one: a digit, and otherwise only digits and , . - / % $. As in that text,
    where it comes before "a.m.", it may have a colon. The Penn Treebank's `\\/` is a slash, and a plus may be in front.
    So 1,000 and 1\\/2 and 9:30 are N; 1990s and 10-year and 1\\/2-year stay, and so does a % that is a word of its own.
    """
    options = VocabularyOptions(lowercase=lowercase, fold_numbers=fold_numbers)

    def change(word: str) -> str:
        if fold_numbers:
            number = word.removeprefix("+").replace("\\/", "/").replace(":", ".")
            if normalise(number, options) == NUMBER:
                return NUMBER
        return normalise(word, options)

    return replace(tree, words=tuple(map(change, tree.words)))
