"""Prefix probabilities on the Triton chart against fp64: natively where there is a GPU, else in Triton's interpreter.

Without a GPU `test_in_the_interpreter` of test_triton.py runs this file.
"""

from __future__ import annotations

import os

import pytest
import torch

from flash_inside import Rules, Statistics, prefix
from flash_inside.precision import TOLERANCE
from grammars import random_emissions, random_rules

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if GPU else "cpu"
pytestmark = pytest.mark.gpu if GPU else pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")


def compared(rules: Rules, emissions: torch.Tensor, lengths: list[int], precision: str, statistics: Statistics) -> None:
    """Compare every prefix with fp64 on the same rounded tensors."""
    there = Rules(*(tensor.to(DEVICE) for tensor in rules))
    found = prefix(there, emissions.to(DEVICE), lengths, precision, "triton", statistics, with_next=True)
    truth = prefix(Rules(*(tensor.double() for tensor in rules)), emissions.double(), lengths, "fp64", with_next=True)
    for ours, theirs in zip(found, truth, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=10 * TOLERANCE[precision][0], atol=1e-4)


@pytest.mark.parametrize("root", ["all", "nonterminals"])
def test_equals_fp64(root):
    lengths = [4, 1, 6, 2, 6]
    rules = random_rules(5, 7, root=root, seed=4, dtype=torch.float32)
    counts = Statistics()
    compared(rules, random_emissions(sum(lengths), 7, seed=4, dtype=torch.float32), lengths, "fp32", counts)
    assert counts.recomputed == 0


def test_extreme_logits_are_recomputed():
    counts = Statistics()
    for seed in (4, 11, 13):
        rules = random_rules(4, 5, spread=30.0, seed=seed, dtype=torch.float32)
        emissions = random_emissions(9, 5, spread=30.0, seed=seed, dtype=torch.float32)
        compared(rules, emissions, [4, 5], "fp32", counts)
    assert counts.recomputed > 0


@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_large_grammar_on_a_gpu(precision):
    lengths = [30, 7, 1, 21]
    rules = random_rules(1024, 2048, seed=1, dtype=torch.float32)
    counts = Statistics()
    compared(rules, random_emissions(sum(lengths), 2048, seed=1, dtype=torch.float32), lengths, precision, counts)
    assert counts.recomputed == 0
