"""One grammar per sentence in the Triton backend, against log space: natively where there is a GPU, else interpreted.

Without a GPU test_triton.py runs this file in a process of its own.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import flash_inside
from flash_inside import Rules
from flash_inside.devices import sentence_memory
from flash_inside.precision import TOLERANCE
from grammars import random_emissions, random_rules
from test_brackets import packed_limits
from test_per_sentence_rules import of_all
from test_triton import BRACKETS, DEVICE, GPU, gradients, poisoned_memory, runs_kernels  # noqa: F401  (a fixture)

#: Unsorted, sorted, of one length, of one word; two words have no nonterminal child.
BATCHES = [
    ([4, 1, 2, 4], "all"),
    pytest.param([4, 1, 2, 4], "nonterminals", marks=pytest.mark.long),
    pytest.param([5, 3, 3, 1], "all", marks=pytest.mark.long),
    ([3, 3], "all"),
    ([1, 1], "all"),
    ([2, 2, 1], "nonterminals"),
]


def grammars(n, p, lengths, *, root="all", spreads=None, dtype=torch.float32):
    spreads = spreads or [1.0] * len(lengths)
    each = [random_rules(n, p, root=root, spread=spread, seed=b, dtype=dtype) for b, spread in enumerate(spreads)]
    return Rules(*(tensor.to(DEVICE) for tensor in of_all(each)))


def compare(rules, lengths, *, precision="fp32", tolerance=(1e-6, 1e-5), spread=1.0, **options):
    """Log Z, and the gradients of every sentence's rules as expected counts, against fp64."""
    p = rules.preterminals
    emissions = random_emissions(sum(lengths), p, spread=spread, dtype=torch.float32).to(DEVICE)
    weight = torch.linspace(0.5, 2.0, len(lengths)).to(DEVICE)
    ours = gradients(rules, emissions, lengths, weight, precision, "triton", **options)
    wide = Rules(*(tensor.double() for tensor in rules))
    limits = {"limits": options["limits"]} if "limits" in options else {}
    truth = gradients(wide, emissions.double(), lengths, weight, "fp64", "torch", **limits)
    assert torch.equal(ours[0].isinf(), truth[0].isinf())
    possible = ~truth[0].isinf()
    allowed = tolerance[0] * torch.maximum(truth[0].abs(), torch.tensor(lengths, dtype=torch.float64, device=DEVICE))
    assert ((ours[0] - truth[0]).abs() <= allowed)[possible].all()
    for probability, got, want in zip(wide, ours[1], truth[1], strict=False):
        assert got.shape == want.shape
        assert got.isfinite().all()
        for b in range(len(lengths)):  # one sentence's error must not hide behind another's size
            off, size = ((values * probability[b]).norm() for values in (got[b].double() - want[b], want[b]))
            assert off <= tolerance[1] * size + 1e-12
    assert (ours[1][3].double() - truth[1][3]).norm() <= tolerance[1] * truth[1][3].norm() + 1e-12
    return ours


@runs_kernels
@pytest.mark.parametrize(("lengths", "root"), BATCHES, ids=str)
def test_every_output_and_gradient(lengths, root):
    compare(grammars(7, 5, lengths, root=root), lengths)


@runs_kernels
@pytest.mark.parametrize("most_lengths", [0, 9], ids=["padded", "length by length"])
def test_padded_batches_and_a_product_for_each_length(most_lengths, monkeypatch):
    monkeypatch.setattr("flash_inside.triton.weights.MOST_LENGTHS", most_lengths)
    lengths = [2, 4, 1, 4]
    compare(grammars(7, 5, lengths), lengths)


@runs_kernels
def test_left_and_right_in_one_tensor_are_read_as_one():
    """And give what two tensors give."""
    from flash_inside.triton.weights import SentenceWeights

    lengths = [3, 3, 2]
    rules = grammars(7, 5, lengths)
    both = torch.cat((rules.left, rules.right), dim=1)
    halves = Rules(rules.root, both[:, :7], both[:, 7:])
    layout, order = flash_inside.packing.Layout(lengths), torch.arange(3, device=DEVICE)
    assert SentenceWeights(*halves[1:], torch.float32, layout, order).joint is not None
    assert SentenceWeights(*rules[1:], torch.float32, layout, order).joint is None
    emissions = random_emissions(sum(lengths), 5, dtype=torch.float32).to(DEVICE)
    one = flash_inside.inside(rules, emissions, lengths, "fp32", "triton")
    other = flash_inside.inside(halves, emissions, lengths, "fp32", "triton")
    torch.testing.assert_close(one, other)


@runs_kernels
def test_copies_of_the_rules_are_freed_at_once():
    """Nothing waits for the garbage collector: they are as large as all rules."""
    from flash_inside.triton.weights import SentenceWeights

    lengths = [1, 3, 2]
    rules, layout = grammars(7, 5, lengths), flash_inside.packing.Layout(lengths)
    weights = SentenceWeights(*rules[1:], torch.float32, layout, torch.tensor(layout.order, device=DEVICE))
    weights.from_children(*(torch.zeros(6, size, device=DEVICE) for size in (14, 5)), 1)
    copy = weakref.ref(weights.left)
    gc.disable()
    try:
        del weights
        assert copy() is None
    finally:
        gc.enable()


@runs_kernels
@pytest.mark.parametrize("most_words", [0, 4])
def test_bf16_charts(most_words, monkeypatch):
    """With and without what rounding left of the short sentences. The interpreter cuts bits off where a GPU rounds."""
    monkeypatch.setattr("flash_inside.precision.LARGEST_FP32_CHART", 0)
    monkeypatch.setattr("flash_inside.precision.MOST_WORDS_OF_SHORT", most_words)
    lengths = [3, 5, 1, 2] if most_words else [5, 1]
    rules = grammars(33, 40, lengths, dtype=torch.bfloat16)
    ours = compare(rules, lengths, precision="bf16", tolerance=(1e-2, 5e-2))
    if most_words:
        short = [0, 2, 3]
        emissions = random_emissions(sum(lengths), 40, dtype=torch.float32).to(DEVICE)
        wide = Rules(*(tensor.double() for tensor in rules))
        truth = flash_inside.inside(wide, emissions.double(), lengths, "fp64")
        assert ((ours[0] - truth) / truth)[short].abs().max() < 2e-5


@runs_kernels
def test_brackets_and_recomputation_with_the_rules_of_the_sentence():
    lengths = [3, 1, 6]
    limits = packed_limits([BRACKETS[length] for length in lengths], lengths)
    statistics = flash_inside.Statistics()
    rules = grammars(7, 5, lengths, spreads=[1.0, 0.5, 200.0])
    compare(rules, lengths, limits=limits, statistics=statistics, spread=10.0, tolerance=(1e-6, 1e-4))
    emissions = random_emissions(sum(lengths), 5, spread=10.0, dtype=torch.float32).to(DEVICE)
    _, trusted = flash_inside.inside_unchecked(rules, emissions, lengths, "fp32", "triton", limits)
    assert trusted.tolist() == [True, True, False]
    assert statistics.recomputed == 1


@runs_kernels
def test_marginals_and_best_trees():
    lengths = [3, 5, 1, 3]
    rules = grammars(7, 5, lengths)
    emissions = random_emissions(sum(lengths), 5, dtype=torch.float32).to(DEVICE)
    wide = Rules(*(tensor.double() for tensor in rules))
    tables = flash_inside.span_marginals(rules, emissions, lengths, "fp32", "triton")
    for one, other in zip(tables, flash_inside.span_marginals(wide, emissions.double(), lengths, "fp64"), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)
    best = flash_inside.viterbi(rules, emissions, lengths, "fp32", "triton")
    truth = flash_inside.viterbi(wide, emissions.double(), lengths, "fp64", "reference")
    assert [tree for _, tree in best] == [tree for _, tree in truth]
    assert [score for score, _ in best] == pytest.approx([score for score, _ in truth], rel=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize(
    "lengths", [[20] * 6, [7, 21, 21], [40, 3, 17, 40, 16, 1, 29]], ids=["one length", "two", "many"]
)
def test_natively_and_within_the_memory_that_is_planned(lengths, precision):
    n, p = 320, 520
    rules = grammars(n, p, lengths, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    compare(rules, lengths, precision=precision, tolerance=TOLERANCE[precision])
    emissions = random_emissions(sum(lengths), p, dtype=torch.float32).to(DEVICE).requires_grad_()
    leaves = [tensor.detach().requires_grad_() for tensor in rules]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    log_z, trusted = flash_inside.inside_unchecked(Rules(*leaves), emissions, lengths, precision, "triton")
    log_z.sum().backward()
    assert trusted.all()
    used = torch.cuda.max_memory_allocated() - before
    assert used <= sum(sentence_memory(length, n, p, precision) for length in lengths)
