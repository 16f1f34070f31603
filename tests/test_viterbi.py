"""Best trees against the enumeration of every labelled tree, and against the readable version with back-pointers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flash_inside
from flash_inside import Rules, trees
from flash_inside.packing import Layout
from grammars import bracketings, random_emissions, random_rules, score_of

BACKENDS = ["torch", "reference"]


def best_by_enumeration(rules, words):
    """Maximum over all bracketings and labellings: per bracketing, labels are maximised bottom-up."""
    n, length = rules.nonterminals, len(words)
    if length == 1:
        return (rules.root[n:].log() + words[0]).max().item() if len(rules.root) > n else -math.inf
    best = -math.inf
    for tree in bracketings(0, length):
        value = {(i, i + 1): words[i] for i in range(length)}
        for parent, one, other in sorted(tree, key=lambda rule: rule[0][1] - rule[0][0]):
            sides = []
            for rule, child in ((rules.left, one), (rules.right, other)):
                columns = slice(n, None) if child[1] == child[0] + 1 else slice(0, n)
                sides.append((rule[:, columns].log() + value[child]).max(1).values)
            value[parent] = sides[0] + sides[1]
        best = max(best, (rules.root[:n].log() + value[0, length]).max().item())
    return best


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    size=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    root=st.sampled_from(["all", "nonterminals"]),
    seed=st.integers(0, 10**6),
)
def test_the_best_of_all_trees(backend, lengths, size, root, seed):
    rules = random_rules(*size, root=root, spread=1.5, seed=seed)
    emissions = random_emissions(sum(lengths), size[1], seed=seed)
    found = flash_inside.viterbi(rules, emissions, lengths, "fp64", backend)
    for (score, tree), words in zip(found, emissions.split(lengths), strict=True):
        truth = best_by_enumeration(rules, words)
        assert score == pytest.approx(truth, rel=1e-12)
        if truth == -math.inf:
            assert tree == []
        else:
            assert score_of(rules, words, tree) == pytest.approx(score, rel=1e-12)


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 25), min_size=1, max_size=4), n=st.integers(1, 20), seed=st.integers(0, 10**6))
def test_torch_finds_the_trees_of_the_reference(lengths, n, seed):
    rules, emissions = random_rules(n, n + 3, seed=seed), random_emissions(sum(lengths), n + 3, seed=seed)
    ours = flash_inside.viterbi(rules, emissions, lengths, "fp64", "torch")
    truth = flash_inside.viterbi(rules, emissions, lengths, "fp64", "reference")
    for (our_score, our_tree), (score, tree) in zip(ours, truth, strict=True):
        assert our_score == pytest.approx(score, rel=1e-12)
        assert our_tree == tree


@pytest.mark.parametrize("largest_block", [1, 50, 700])
def test_trees_do_not_depend_on_the_size_of_a_block(largest_block, monkeypatch):
    rules, emissions, lengths = random_rules(5, 7), random_emissions(31, 7), [9, 1, 8, 2, 11]
    whole = flash_inside.viterbi(rules, emissions, lengths, "fp64", "torch")
    monkeypatch.setattr(trees, "LARGEST_BLOCK", largest_block)
    assert flash_inside.viterbi(rules, emissions, lengths, "fp64", "torch") == whole


@pytest.mark.parametrize("backend", BACKENDS)
def test_impossible_sentences_have_no_tree(backend):
    rules = random_rules(4, 5, root="nonterminals")
    emissions = random_emissions(8, 5)
    emissions[5] = float("-inf")
    found = flash_inside.viterbi(rules, emissions, [3, 1, 4], "fp64", backend)
    assert [score == -math.inf for score, _ in found] == [False, True, True]
    assert [len(tree) for _, tree in found] == [5, 0, 0]


def test_one_grammar_per_sentence_and_no_sentence():
    grammars = [random_rules(4, 5, seed=seed) for seed in range(2)]
    rules = Rules(*(torch.stack(tensors) for tensors in zip(*grammars, strict=True)))
    emissions = random_emissions(7, 5)
    together = flash_inside.viterbi(rules, emissions, [3, 4], "fp64")
    alone = [
        flash_inside.viterbi(grammar, words, [len(words)], "fp64")[0]
        for grammar, words in zip(grammars, emissions.split([3, 4]), strict=True)
    ]
    assert together == alone
    assert flash_inside.viterbi(grammars[0], emissions[:0], []) == []


def test_peaked_grammars_in_fp32_score_their_tree_in_fp64():
    rules = Rules(*(t.float() for t in random_rules(12, 24, spread=20.0, seed=2)))
    emissions = random_emissions(30, 24, spread=20.0, seed=2, dtype=torch.float32)
    wide = Rules(*(t.double() for t in rules))
    ours = flash_inside.viterbi(rules, emissions, [12, 18], "fp32", "torch")
    truth = flash_inside.viterbi(wide, emissions.double(), [12, 18], "fp64", "reference")
    for (score, tree), (best, _), words in zip(ours, truth, emissions.double().split([12, 18]), strict=True):
        assert score == pytest.approx(best, rel=1e-9)
        assert score == pytest.approx(score_of(wide, words, tree), rel=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_probabilities_in_fp64_that_fp32_cannot_hold(backend):
    rules, emissions = random_rules(4, 5, seed=6), random_emissions(4, 5, seed=6)
    root = torch.cat((rules.root[:4], rules.root[4:] * 1e-60))
    faint = Rules(root, rules.left * 1e-50, rules.right)
    found = flash_inside.viterbi(faint, emissions, [1, 3], "fp32", backend)
    truth = flash_inside.viterbi(faint, emissions, [1, 3], "fp64", "reference")
    assert [tree for _, tree in found] == [tree for _, tree in truth]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in truth], rel=1e-6)


def test_a_chart_has_room_for_what_is_in_it_and_no_more():
    """Nine spans: five single words, whose values are given, and a whole sentence of three, which is no child."""
    chart = trees.BestTrees(random_rules(2, 3), random_emissions(5, 3), Layout([3, 2]), torch.float64, triton=False)
    assert (chart.beta.shape, chart.children.shape) == ((9 - 5, 2), (9 - 1, 2 * 2))
