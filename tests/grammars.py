"""Random simple PCFGs and a brute-force inside algorithm, for the tests of every backend."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from flash_inside import FactoredRules, Rules


def random_rules(
    n: int, p: int, *, root: str = "all", spread: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Rules:
    """Softmax of normal logits with standard deviation `spread`; root over "all" symbols or the "nonterminals"."""
    generator = torch.Generator().manual_seed(seed)

    def softmax(*shape: int) -> Tensor:
        return (torch.randn(*shape, dtype=torch.float64, generator=generator) * spread).softmax(-1).to(dtype)

    return Rules(softmax(n + p if root == "all" else n), softmax(n, n + p), softmax(n, n + p))


def random_factors(
    n: int, middle: int, p: int, *, root: str = "all", spread: float = 1.0, seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> FactoredRules:  # fmt: skip
    """Do as `random_rules`, with so many middle symbols."""
    root_and_preterminals = random_rules(n, p, root=root, spread=spread, seed=seed, dtype=dtype).root
    generator = torch.Generator().manual_seed(seed + 20_000)
    logits = (
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((2, n, middle + p), (middle, n))
    )
    sides, inner = ((some * spread).softmax(-1).to(dtype) for some in logits)
    return FactoredRules(root_and_preterminals, *sides.unbind(0), inner)


def random_emissions(
    words: int, p: int, *, spread: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    """[words, P] log-probabilities around exp(-3)."""
    generator = torch.Generator().manual_seed(seed + 10_000)
    return (torch.randn(words, p, dtype=torch.float64, generator=generator) * spread - 3).to(dtype)


def rules_that_lose_a_row(lost: float, inner: float, left_end: float, right_end: float) -> tuple[Rules, Tensor]:
    """Three words, two trees. Words 0 and 1 as a span have probability lost^2, and the better tree needs them.

    The other tree, inner x left_end x right_end, survives. If the span's row underflows as a whole, no derivative
    tells: it is in no split above it.
    """
    n, p = 5, 3
    left, right, root = torch.zeros(n, n + p), torch.zeros(n, n + p), torch.zeros(n + p)
    root[3] = 1.0
    left[0, 5] = right[1, 6] = 1.0
    left[2, 5] = right[2, 6] = lost
    left[3, 2] = right[3, 7] = right[4, 7] = 0.5
    left[4, 6], left[3, 5], right[3, 4] = inner, left_end, right_end
    return Rules(root, left, right), torch.full((3, p), -300.0).fill_diagonal_(0.0)


def rules_with_a_faint_split(inner: float, outer: float) -> tuple[Rules, Tensor]:
    """Four words, two trees: ((0 1) 2) 3 has probability inner^4 / 4, 0 (1 (2 3)) has outer^2.

    The parts of the second have probability 1, so that next to them those of the first are inner^4. A symbol that leads
    nowhere dominates the row of the whole sentence.
    """
    n, p = 6, 4
    left, right, root = torch.full((n, n + p), 1e-30), torch.full((n, n + p), 1e-30), torch.zeros(n)
    root[4] = 1.0
    left[0, n + 2] = right[0, n + 3] = left[1, n + 1] = right[1, 0] = 1.0  # 0: words 2, 3; 1: words 1 to 3
    left[2, n + 0] = right[2, n + 1] = left[3, 2] = right[3, n + 2] = inner  # 2: words 0, 1; 3: words 0 to 2
    left[4, 3] = right[4, n + 3] = 0.5
    left[4, n + 0] = right[4, 1] = outer
    left[5, n + 0] = right[5, 1] = 1e-10
    return Rules(root, left, right), torch.full((4, p), -300.0).fill_diagonal_(0.0)


def right_branching(n: int, p: int, lengths: list[int], seed: int = 0) -> tuple[Rules, Tensor]:
    """Rules and emissions of sentences whose only trees branch to the right: the last preterminal has the last word.

    A left child is one of the other preterminals, a right child a nonterminal or the last word. So a span of several
    words that ends before the sentence has no tree at all, and none of these rows is lost by rounding.
    """
    root, left, right = random_rules(n, p, seed=seed)
    left[:, :n] = left[:, -1] = right[:, n:-1] = 0.0
    emissions = random_emissions(sum(lengths), p, seed=seed)
    emissions[:, -1] = float("-inf")
    last = np.cumsum(lengths) - 1
    emissions[last] = float("-inf")
    emissions[last, -1] = 0.0
    return Rules(root, left / left.sum(1, keepdim=True), right / right.sum(1, keepdim=True)), emissions


Span = tuple[int, int]


def bracketings(i: int, j: int) -> Iterator[list[tuple[Span, Span, Span]]]:
    """Every binary tree over the words i..j-1, as its (parent, left, right) spans; a leaf has none."""
    if j == i + 1:
        yield []
    for k in range(i + 1, j):
        for left in bracketings(i, k):
            for right in bracketings(k, j):
                yield [((i, j), (i, k), (k, j)), *left, *right]


def crosses(one: Span, other: Span) -> bool:
    return one[0] < other[0] < one[1] < other[1] or other[0] < one[0] < other[1] < one[1]


def enumerate_trees(rules: Rules, emissions: Tensor, brackets: Collection[Span] = ()) -> tuple[float, np.ndarray]:
    """Total probability of a sentence, and the posterior of every span, by listing every labelled tree.

    emissions: [l, P]; brackets: trees that cross one of these do not count.
    For each bracketing the probabilities of all its labellings form one tensor with an axis a node
    (N or P labels), so every labelled tree is one entry of it.
    """
    root, left, right = (tensor.double().numpy() for tensor in rules)
    words = emissions.double().exp().numpy()
    length, n = len(words), left.shape[0]
    mass = np.zeros((length + 1, length + 1))
    if length == 1:
        total = float(root[n:] @ words[0]) if len(root) > n else 0.0
        mass[0, 1] = total
    else:
        total = 0.0
        for tree in bracketings(0, length):
            spans = sorted({span for rule in tree for span in rule})
            if any(crosses(span, bracket) for span in spans for bracket in brackets):
                continue
            axis = {span: number for number, span in enumerate(spans)}

            def along(array: np.ndarray, *nodes: Span, axis: dict[Span, int] = axis) -> np.ndarray:
                """Put the axes of an array at the axes of these nodes."""
                order = np.argsort([axis[node] for node in nodes])
                shape = [1] * len(axis)
                for node, size in zip(nodes, array.shape, strict=True):
                    shape[axis[node]] = size
                return array.transpose(order).reshape(shape)

            def columns(node: Span) -> slice:
                return slice(n, None) if node[1] == node[0] + 1 else slice(0, n)

            probability = along(root[:n], (0, length))
            for parent, one, other in tree:
                probability = probability * along(left[:, columns(one)], parent, one)
                probability = probability * along(right[:, columns(other)], parent, other)
            for word in range(length):
                probability = probability * along(words[word], (word, word + 1))
            total += probability.sum()
            for i, j in spans:
                mass[i, j] += probability.sum()
    return total, mass / total if total > 0 else np.zeros_like(mass)


def score_of(rules: Rules, words: Tensor, tree: list[tuple[int, int, int]]) -> float:
    """Log-probability of a labelled tree, and a check that it is one: binary, over all words."""
    n, label = rules.nonterminals, {(i, j): symbol for i, j, symbol in tree}
    assert len(label) == len(tree) == 2 * len(words) - 1
    total = rules.root[label[0, len(words)]].log()
    for (i, j), symbol in label.items():
        if j == i + 1:
            total = total + words[i, symbol - n]
            continue
        (middle,) = [k for k in range(i + 1, j) if (i, k) in label and (k, j) in label]
        assert symbol < n
        total = total + rules.left[symbol, label[i, middle]].log() + rules.right[symbol, label[middle, j]].log()
    return total.item()


def raising(name: str) -> Callable[..., NoReturn]:
    """Stand for a backend: what is raised tells that it was called."""

    def called(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(name)

    return called
