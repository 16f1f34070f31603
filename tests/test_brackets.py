"""The inside algorithm over trees that cross no bracket: against enumeration, log space and finite differences."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flash_inside
from flash_inside import Rules, Statistics, span_limits
from flash_inside.brackets import allowed_rows, allowed_spans
from flash_inside.packing import Layout
from grammars import bracketings, crosses, enumerate_trees, random_emissions, random_rules

BACKENDS = ["torch", "reference"]


def some_brackets(length: int, seed: int) -> list[tuple[int, int]]:
    """Some spans of a random binary tree: none of them, all of them, or any number between."""
    generator = np.random.default_rng(seed)
    share, brackets, open_spans = generator.choice([0.0, 0.3, 0.7, 1.0]), [], [(0, length)]
    while open_spans:
        start, end = open_spans.pop()
        if generator.random() <= share:
            brackets.append((start, end))
        if end - start > 1:
            middle = int(generator.integers(start + 1, end))
            open_spans += [(start, middle), (middle, end)]
    return brackets


def packed_limits(brackets: list[list[tuple[int, int]]], lengths: list[int]) -> np.ndarray:
    return np.concatenate([span_limits(own, length) for own, length in zip(brackets, lengths, strict=True)])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_equals_enumeration_of_the_trees_that_cross_no_bracket(backend, lengths, seed):
    rules, emissions = random_rules(2, 3, spread=1.5, seed=seed), random_emissions(sum(lengths), 3, seed=seed)
    brackets = [some_brackets(length, seed + b) for b, length in enumerate(lengths)]
    limits = packed_limits(brackets, lengths)
    statistics = Statistics()
    log_z = flash_inside.inside(rules, emissions, lengths, "fp64", backend, statistics, limits)
    for b, words in enumerate(emissions.split(lengths)):
        total, _ = enumerate_trees(rules, words, brackets[b])
        assert log_z[b].exp().item() == pytest.approx(total, rel=1e-12)
    assert statistics.recomputed == statistics.recomputed_in_log_space == 0


@settings(max_examples=100, deadline=None)
@given(length=st.integers(1, 12), seed=st.integers(0, 10**6))
def test_two_limits_a_word_tell_which_spans_cross_a_bracket(length, seed):
    brackets = some_brackets(length, seed)
    allowed = allowed_spans(span_limits(brackets, length))
    for start in range(length):
        for end in range(start + 1, length + 1):
            assert allowed[start, end] == (not any(crosses((start, end), bracket) for bracket in brackets))


def test_rows_of_a_packed_chart():
    lengths = [3, 6, 1, 6]
    limits = packed_limits([some_brackets(length, b) for b, length in enumerate(lengths)], lengths)
    layout = Layout(lengths)
    tables = layout.square_tables(torch.from_numpy(allowed_rows(limits, layout)))
    for own, table in zip(np.split(limits, np.cumsum(lengths)[:-1]), tables, strict=True):
        np.testing.assert_array_equal(table.numpy(), allowed_spans(own))


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_trees_together_and_no_bracket_at_all(backend):
    """The probabilities of the whole trees of a sentence add up to that of the sentence."""
    rules, words = random_rules(3, 4, seed=2), random_emissions(5, 4, seed=2)
    free = flash_inside.inside(rules, words, [5], "fp64", backend)
    none = flash_inside.inside(rules, words, [5], "fp64", backend, limits=span_limits([], 5))
    assert torch.equal(free, none)
    every_tree = [{span for rule in tree for span in rule} for tree in bracketings(0, 5)]
    parts = [flash_inside.inside(rules, words, [5], "fp64", backend, limits=span_limits(t, 5)) for t in every_tree]
    torch.testing.assert_close(torch.stack(parts).logsumexp(0), free, rtol=1e-12, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend):
    lengths = [3, 1, 6, 5]
    limits = packed_limits([[(1, 3)], [], [(0, 2), (2, 6), (3, 5)], [(1, 4), (2, 4)]], lengths)
    rules = random_rules(3, 4, seed=1)
    inputs = [tensor.requires_grad_() for tensor in (*rules, random_emissions(sum(lengths), 4, seed=1))]

    def log_z(root, left, right, emissions):
        return flash_inside.inside(Rules(root, left, right), emissions, lengths, "fp64", backend, limits=limits)

    assert torch.autograd.gradcheck(log_z, inputs)


def test_what_leaves_the_range_is_recomputed_with_its_own_brackets():
    """The better trees are forbidden: what is left is far below what fp32 holds beside them."""
    lengths = [9, 14, 9]
    limits = packed_limits([[(0, 8), (1, 8)], [(2, 14), (2, 13), (4, 13)], []], lengths)
    rules = random_rules(3, 4, spread=60.0, seed=4)
    emissions = random_emissions(sum(lengths), 4, spread=60.0, seed=4)
    statistics = Statistics()
    single = Rules(*(tensor.float() for tensor in rules))
    found = flash_inside.inside(single, emissions.float(), lengths, "fp32", "torch", statistics, limits)
    exact = Rules(*(tensor.double() for tensor in single))
    truth = flash_inside.inside(exact, emissions.float().double(), lengths, "fp64", "reference", limits=limits)
    assert statistics.recomputed > 0
    torch.testing.assert_close(found.double(), truth, rtol=1e-6, atol=0)


def test_rules_of_each_sentence_their_own():
    lengths = [4, 5]
    limits = packed_limits([[(1, 3)], [(0, 2)]], lengths)
    both = [random_rules(2, 3, seed=seed) for seed in (0, 1)]
    emissions = random_emissions(9, 3)
    together = Rules(*(torch.stack(pair) for pair in zip(*both, strict=True)))
    found = flash_inside.inside(together, emissions, lengths, "fp64", "torch", limits=limits)
    for b, (rules, words, own) in enumerate(zip(both, emissions.split(lengths), np.split(limits, [4]), strict=True)):
        alone = flash_inside.inside(rules, words, [lengths[b]], "fp64", "torch", limits=own)
        assert found[b] == alone[0]


def test_mistakes_are_refused():
    with pytest.raises(ValueError, match="crosses"):
        span_limits([(0, 3), (2, 5)], 6)
    with pytest.raises(ValueError, match="of a sentence of 6 words"):
        span_limits([(3, 7)], 6)
    with pytest.raises(ValueError, match=r"should have \(6, 2\)"):
        flash_inside.inside(random_rules(2, 3), random_emissions(6, 3), [6], limits=span_limits([], 5))


def test_two_brackets_are_refused_just_if_they_cross():
    spans = list(combinations(range(7), 2))
    for pair in product(spans, repeat=2):
        if crosses(*pair):
            with pytest.raises(ValueError, match="crosses another one"):
                span_limits(pair, 6)
        else:
            span_limits(pair, 6)


def test_a_span_that_brackets_forbid_is_not_lost():
    """Four words, of which the last two are no span; a bracket around words 1 and 2 forbids words 0 and 1."""
    n, p = 4, 5
    root, left, right = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(n, n + p), torch.zeros(n, n + p)
    for parent, one, other in ((0, 3, n + 4), (3, 1, n + 2), (1, n + 0, n + 1), (3, n + 0, 2), (2, n + 1, n + 2)):
        left[parent, one] = right[parent, other] = 0.5
    words = torch.full((4, p), float("-inf"))
    words[0, 0] = words[1, 1] = words[2, 2] = words[3, 4] = 0.0
    for brackets, trees in (([], 2), ([(1, 3)], 1)):
        statistics, limits = flash_inside.Statistics(), packed_limits([brackets], [4])
        rules = flash_inside.Rules(root, left, right)
        found = flash_inside.inside(rules, words, [4], "fp32", "torch", statistics, limits)
        assert found.exp().item() == pytest.approx(trees / 64)
        assert statistics == flash_inside.Statistics(sentences=1)
