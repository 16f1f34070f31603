"""Corners that mutants of the code showed to have no test: blocks of rows and nodes, as small as they can be."""

from __future__ import annotations

import pytest
import torch

import flash_inside
from flash_inside import Rules, sampling, trees
from flash_inside.packing import Layout
from flash_inside.sampling import SampledTrees
from flash_inside.trees import BestTrees
from grammars import random_emissions, random_rules


def faint_chart(dtype: torch.dtype) -> torch.Tensor:
    """Values in which fp32 loses most parts: a preterminal is e^100 times as probable as others, and no rule takes it.

    The chart has 4 preterminals, and 3 nonterminals with two sides: rows [4] -> [6] of words, [3] -> [6] of spans.
    """
    root, left, right = random_rules(3, 4, seed=1)
    emissions = random_emissions(6, 4, seed=1) - 100.0
    emissions[:, 0] = 0.0
    left[:, 3] = right[:, 3] = 1e-60
    rules = Rules(root, left, right)
    return SampledTrees(rules, emissions, Layout([6]), dtype, 0, torch.default_generator).children


@pytest.mark.parametrize("largest", [1, 8, 13])  # elements; less than a row is a row
def test_what_is_computed_again_is_so_in_blocks(largest, monkeypatch):
    shapes, exact, original = [], faint_chart(torch.float64), sampling.log

    def recorded(probabilities, dtype):
        shapes.append(probabilities.shape)
        return original(probabilities, dtype)

    monkeypatch.setattr(sampling, "log", recorded)
    monkeypatch.setattr(trees, "LARGEST_BLOCK", largest)
    torch.testing.assert_close(faint_chart(torch.float32).double(), exact, rtol=1e-6, atol=0)
    assert max(rows for rows, options in shapes if options == 4) == max(1, largest // 4)


def test_with_rules_per_sentence_blocks_of_nodes_are_as_small(monkeypatch):
    """Options of a node are symbols, of which rules [B, N, N+P] have N + P, not N or B."""
    n, p, sentences, length, largest, sizes = 2, 30, 9, 3, 70, []
    grammars = [random_rules(n, p, seed=seed) for seed in range(sentences)]
    rules = Rules(*(torch.stack(tensors) for tensors in zip(*grammars, strict=True)))
    emissions, original = random_emissions(sentences * length, p), BestTrees._choose
    expected = flash_inside.viterbi(rules, emissions, [length] * sentences)

    def recorded(self, values):
        sizes.append(values.numel())
        return original(self, values)

    monkeypatch.setattr(BestTrees, "_choose", recorded)
    monkeypatch.setattr(trees, "LARGEST_BLOCK", largest)
    assert flash_inside.viterbi(rules, emissions, [length] * sentences) == expected
    assert max(sizes) == largest // (n + p) * p
