"""Trees with the most right spans in expectation, against the enumeration of every binary tree."""

from __future__ import annotations

import pytest
import torch

import flash_inside
from flash_inside.benchmarks.viterbi import is_binary_tree
from grammars import bracketings, random_emissions, random_rules

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


def all_trees(words):
    """Every binary tree as the set of its spans."""
    for rules in bracketings(0, words):
        yield {span for rule in rules for span in rule} or {(0, 1)}


def right_spans(table, spans):
    return sum(table[i, j].item() for i, j in spans)


@pytest.mark.parametrize("words", range(1, 8))
def test_the_best_of_all_trees(words):
    tables = list(torch.rand(20, words + 1, words + 1, generator=torch.Generator().manual_seed(words)).double())
    for table, found in zip(tables, flash_inside.mbr(tables), strict=True):
        assert is_binary_tree(found, words)
        assert set(found) == max(all_trees(words), key=lambda spans: right_spans(table, spans))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("root", ["all", "nonterminals"])
def test_posteriors_of_grammars(root, device):
    """Lengths of all kinds in one batch. One word is impossible for a root without preterminals."""
    lengths = [3, 1, 40, 2, 31]
    rules = flash_inside.Rules(*(t.to(device) for t in random_rules(5, 7, root=root, spread=2.0, dtype=torch.float32)))
    emissions = random_emissions(sum(lengths), 7, spread=2.0, dtype=torch.float32).to(device)
    tables = flash_inside.span_marginals(rules, emissions, lengths)
    most_probable = flash_inside.viterbi(rules, emissions, lengths)
    for words, table, spans, (_, tree) in zip(lengths, tables, flash_inside.mbr(tables), most_probable, strict=True):
        if words == 1:
            assert spans == ([(0, 1)] if root == "all" else [])
            continue
        assert is_binary_tree(spans, words)
        assert right_spans(table, spans) >= right_spans(table, [(i, j) for i, j, _ in tree]) - 1e-5


def test_one_tree_with_nearly_all_probability_is_viterbis():
    lengths = [9, 1, 12, 20]
    rules = random_rules(6, 8, spread=100.0, seed=3)
    emissions = random_emissions(sum(lengths), 8, spread=100.0, seed=3)
    tables = flash_inside.span_marginals(rules, emissions, lengths, "fp64")
    trees = [[(i, j) for i, j, _ in tree] for _, tree in flash_inside.viterbi(rules, emissions, lengths, "fp64")]
    for table, spans in zip(tables, trees, strict=True):
        assert min(table[i, j] for i, j in spans) > 0.99
    assert flash_inside.mbr(tables) == trees


def test_the_first_of_equal_splits():
    assert flash_inside.mbr([torch.ones(5, 5)]) == [[(0, 4), (0, 1), (1, 4), (1, 2), (2, 4), (2, 3), (3, 4)]]


def test_sentences_without_a_tree():
    rules, emissions = random_rules(4, 5, root="nonterminals"), random_emissions(8, 5)
    emissions[5] = float("-inf")
    trees = flash_inside.mbr(flash_inside.span_marginals(rules, emissions, [3, 1, 4], "fp64"))
    assert [len(spans) for spans in trees] == [5, 0, 0]
    assert flash_inside.mbr([]) == []


def test_what_is_no_table_is_refused():
    good, broken = torch.ones(4, 4), torch.ones(4, 4)
    broken[1, 3] = float("nan")
    with pytest.raises(ValueError, match=r"^table 1 has values that are no posteriors: NaN or infinite$"):
        flash_inside.mbr([good, broken])
    for shape in ((4, 3), (1, 1), (2, 4, 4)):
        with pytest.raises(ValueError, match=r"^table 0 must be \[l\+1, l\+1\] for a sentence of l words, not "):
            flash_inside.mbr([torch.ones(shape)])
