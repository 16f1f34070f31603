"""Bracketed trees: reading them, and the text they stand over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_TOKEN = re.compile(r"[()]|[^\s()]+")
_WORD = re.compile(r"\([^\s()]* ([^\s()]+)\)")
EMPTY = "-NONE-"  # the Penn Treebank's tag of traces, which are not in the text


@dataclass(frozen=True)
class Tree:
    """A tree over words. A word has a tag; a node is a phrase above the tags, (first word, end, label).

    Nodes are in the order of their opening brackets: parents before children, left before right.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]  # one for each word
    nodes: tuple[tuple[int, int, str], ...]


class TreeError(ValueError):
    """Brackets that do not make a tree; the message says where."""


def words_of(tree: str) -> list[str]:
    """Return the words below a tree that `read_trees` gave out."""
    return _WORD.findall(tree)


def read_trees(lines: Iterable[str]) -> Iterator[str]:
    """Yield trees on one line each (a file may use several), without traces and the unlabelled outermost bracket."""
    stack: list[list[str | _Node]] = []  # of open brackets: no recursion, so trees may be as deep as they like
    began = 0
    for number, line in enumerate(lines, start=1):
        for token in _TOKEN.findall(line):
            if token == "(":
                if not stack:
                    began = number
                stack.append([])
            elif not stack:
                raise TreeError(f"line {number}: {token!r} outside of brackets; is it a file of bracketed trees?")
            elif token == ")":
                node = _closed(stack.pop(), began)
                if stack:
                    stack[-1].append(node)
                elif node.as_tree is not None:
                    yield node.as_tree
            else:
                stack[-1].append(token)
    if stack:
        raise TreeError(f"line {began}: the tree that begins here has no end")


@dataclass(frozen=True)
class _Node:
    """A closed pair of brackets, written on one line; None where nothing but traces is below."""

    text: str | None
    as_tree: str | None  # as the outermost brackets of a tree: those without a label around one node are left out


def _closed(parts: list[str | _Node], line: int) -> _Node:
    """Close [label, node, ...], [tag, word] or, as the Penn Treebank's outermost brackets are, [node, ...]."""
    label, below = (parts[0], parts[1:]) if parts and isinstance(parts[0], str) else ("", parts)
    if label == EMPTY:
        return _Node(None, None)
    words = [part for part in below if isinstance(part, str)]
    nodes = [part for part in below if isinstance(part, _Node)]
    if words and nodes:
        raise TreeError(f"line {line}: words and brackets side by side below {label or 'the top'!r}")
    if not nodes:
        if len(words) != 1:
            raise TreeError(f"line {line}: ({' '.join([str(label), *words])}) should be a tag and a word")
        text: str | None = f"({label} {words[0]})"
        return _Node(text, text)
    kept = [node.text for node in nodes if node.text is not None]
    text = f"({label or 'TOP'} {' '.join(kept)})" if kept else None
    return _Node(text, nodes[0].as_tree if not label and len(nodes) == 1 else text)
