"""Bracketed trees: reading them, and the text they stand over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_TOKEN = re.compile(r"[()]|[^\s()]+")
_WORD = re.compile(r"\([^\s()]* ([^\s()]+)\)")
EMPTY = "-NONE-"  # the Penn Treebank's tag of traces, which are not in the text


class TreeError(ValueError):
    """Brackets that do not make a tree; the message says where."""


def words_of(tree: str) -> list[str]:
    """The words below a tree that `read_trees` gave out."""
    return _WORD.findall(tree)


def read_trees(lines: Iterable[str]) -> Iterator[str]:
    """Each tree on one line, without traces and the unlabelled outermost bracket; in the file it may take several."""
    stack: list[list] = []
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
                node = stack.pop()
                if stack:
                    stack[-1].append(node)
                elif (tree := _finished(node, began)) is not None:
                    yield tree
            else:
                stack[-1].append(token)
    if stack:
        raise TreeError(f"line {began}: the tree that begins here has no end")


def _finished(node: list, line: int) -> str | None:
    while len(node) == 1 and isinstance(node[0], list):  # ( (S ...))
        node = node[0]
    cleaned = _without_traces(node, line)
    return None if cleaned is None else _written(cleaned)


def _without_traces(node: list, line: int) -> list | None:
    """A node is [label, child, ...] or [tag, word]; the outermost of the Penn Treebank has no label."""
    label, children = (node[0], node[1:]) if node and isinstance(node[0], str) else ("", node)
    if label == EMPTY:
        return None
    if all(isinstance(child, str) for child in children):
        if len(children) != 1:
            raise TreeError(f"line {line}: ({' '.join(map(str, node))}) should be a tag and a word")
        return [label, children[0]]
    if any(isinstance(child, str) for child in children):
        raise TreeError(f"line {line}: words and brackets side by side below {label or 'the top'!r}")
    kept = [cleaned for child in children if (cleaned := _without_traces(child, line)) is not None]
    return [label, *kept] if kept else None


def _written(node: list) -> str:
    label, children = node[0], node[1:]
    if isinstance(children[0], str):
        return f"({label} {children[0]})"
    return f"({label or 'TOP'} {' '.join(map(_written, children))})"
