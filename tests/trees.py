"""Random trees, as a treebank has them."""

from __future__ import annotations

import random

from lm_pcfg.corpus.treebank import Tree

LABELS = ("NP", "VP", "NP-SBJ", "S=2", "PP-LOC-1", "ADVP|PRT")
TAGS = ("NN", "DT", ",", "-LRB-")


def random_tree(source: random.Random, words: int) -> Tree:
    """Draw a tree: up to four children a node, some of them without a bracket; chains of nodes over the same words."""
    nodes: list[tuple[int, int, str]] = []

    def grow(start: int, end: int, at_least_one: bool) -> None:
        while at_least_one or source.random() < 0.3:
            nodes.append((start, end, source.choice(LABELS)))
            at_least_one = False
        if end - start > 1:
            places = sorted(source.sample(range(start + 1, end), min(end - start - 1, source.randint(1, 3))))
            for first, last in zip([start, *places], [*places, end], strict=True):
                grow(first, last, source.random() < 0.5)

    if words:
        grow(0, words, words > 1)
    return Tree(tuple(f"w{k}" for k in range(words)), tuple(source.choice(TAGS) for _ in range(words)), tuple(nodes))
