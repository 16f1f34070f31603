"""Rules that stay factors in the Triton backend, against fp64: natively where there is a GPU, else interpreted.

Without a GPU test_triton.py runs this file in a process of its own.
"""

from __future__ import annotations

import pytest
import torch

import flash_inside
from flash_inside import FactoredRules
from flash_inside.precision import TOLERANCE
from flash_inside.triton import graphs
from grammars import random_emissions, random_factors
from test_brackets import packed_limits
from test_triton import BRACKETS, DEVICE, GPU, poisoned_memory, runs_kernels  # noqa: F401  (a fixture)


def factors(n, middle, p, **options):
    options.setdefault("dtype", torch.float32)
    return FactoredRules(*(tensor.to(DEVICE) for tensor in random_factors(n, middle, p, **options)))


def gradients(rules, emissions, lengths, precision, backend, **options):
    """Log Z, and the gradients of factors and emissions."""
    weight = torch.linspace(0.5, 2.0, len(lengths)).to(DEVICE)
    inputs = [tensor.detach().clone().requires_grad_() for tensor in (*rules, emissions)]
    given = FactoredRules(*inputs[:4])
    log_z = flash_inside.inside(given, inputs[4], lengths, precision, backend, **options)
    possible = torch.where(log_z.isinf(), 0.0, log_z)
    return log_z.detach().double(), torch.autograd.grad((possible * weight).sum(), inputs)


def compare(rules, lengths, *, precision="fp32", tolerance=(1e-6, 1e-5), spread=1.0, **options):
    """Log Z, and the gradients of all factors as expected counts, against fp64."""
    emissions = random_emissions(sum(lengths), rules.preterminals, spread=spread, dtype=torch.float32).to(DEVICE)
    ours = gradients(rules, emissions, lengths, precision, "triton", **options)
    wide = FactoredRules(*(tensor.double() for tensor in rules))
    limits = {"limits": options["limits"]} if "limits" in options else {}
    truth = gradients(wide, emissions.double(), lengths, "fp64", "torch", **limits)
    assert torch.equal(ours[0].isinf(), truth[0].isinf())
    possible = ~truth[0].isinf()
    allowed = tolerance[0] * torch.maximum(truth[0].abs(), torch.tensor(lengths, dtype=torch.float64, device=DEVICE))
    assert ((ours[0] - truth[0]).abs() <= allowed)[possible].all()
    for probability, got, want in zip((*wide, torch.ones((), device=DEVICE)), ours[1], truth[1], strict=True):
        assert got.shape == want.shape
        assert got.isfinite().all()
        off, size = ((values * probability).norm() for values in (got.double() - want, want))
        assert off <= tolerance[1] * size + 1e-12
    if not options:
        spans = flash_inside.span_marginals(rules, emissions, lengths, precision, "triton")
        of_fp64 = flash_inside.span_marginals(wide, emissions.double(), lengths, "fp64", "torch")
        for got, want in zip(spans, of_fp64, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance[1])
    return ours, truth


@runs_kernels
@pytest.mark.parametrize(
    ("lengths", "root"), [([4, 1, 2, 4], "all"), ([2, 2, 1], "nonterminals"), ([1, 1], "all")], ids=str
)
def test_every_output_and_gradient(lengths, root):
    compare(factors(9, 4, 5, root=root), lengths)


@runs_kernels
@pytest.mark.parametrize("most_words", [0, 4])
def test_bf16_charts(most_words, monkeypatch):
    """With and without what rounding left of the short sentences, whose middle values are rounded, too."""
    monkeypatch.setattr("flash_inside.precision.LARGEST_FP32_CHART", 0)
    monkeypatch.setattr("flash_inside.precision.MOST_WORDS_OF_SHORT", most_words)
    lengths = [3, 5, 1, 2, 4] if most_words else [5, 1]
    ours, truth = compare(factors(33, 17, 40, dtype=torch.bfloat16), lengths, precision="bf16", tolerance=(1e-2, 5e-2))
    if most_words:
        short = [0, 2, 3, 4]
        assert ((ours[0] - truth[0]) / truth[0])[short].abs().max() < 2e-5


@runs_kernels
def test_brackets_and_sentences_that_leave_the_range():
    lengths = [3, 1, 6]
    limits = packed_limits([BRACKETS[length] for length in lengths], lengths)
    compare(factors(9, 4, 5), lengths, limits=limits)
    statistics = flash_inside.Statistics()
    # A smaller probability might have a gradient above the range of fp32.
    rules = FactoredRules(*(tensor.clamp(min=1e-35) for tensor in factors(9, 4, 5, spread=200.0, seed=2)))
    compare(rules, lengths, statistics=statistics, spread=10.0, tolerance=(1e-6, 1e-4))
    assert 0 < statistics.recomputed < 3


@runs_kernels
def test_a_sum_over_many_symbols_may_reach_further_than_its_terms(monkeypatch):
    """D of a middle value adds up 2N entries of D: the limit is that much lower than with the rules multiplied out."""
    rules, emissions = factors(5, 3, 3), random_emissions(3, 3, dtype=torch.float32).to(DEVICE)
    smallest = []
    for given in (rules, rules.multiplied()):
        for limit in (10.0**power for power in range(-16, 0)):  # what this backend stores of D is 2^-39 of it
            graphs.clear()  # one that was captured has the limit of then
            monkeypatch.setattr("flash_inside.triton.chart.LARGEST_D_OF_TRITON", limit)
            if flash_inside.inside_unchecked(given, emissions, [3], "fp32", "triton")[1].item():
                smallest.append(limit)
                break
    assert smallest[0] == pytest.approx(10 * smallest[1])


@runs_kernels
def test_passes_are_equal_bit_for_bit():
    rules, lengths = factors(9, 4, 5), [4, 2]
    emissions = random_emissions(sum(lengths), 5, dtype=torch.float32).to(DEVICE)
    one, other = (gradients(rules, emissions, lengths, "fp32", "triton") for _ in range(2))
    assert torch.equal(one[0], other[0])
    assert all(torch.equal(*pair) for pair in zip(one[1], other[1], strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("lengths", [[20] * 6, [40, 3, 17, 40, 16, 1, 29]], ids=["one length", "many"])
def test_natively(lengths, precision):
    rules = factors(640, 96, 520, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    ours, truth = compare(rules, lengths, precision=precision, tolerance=TOLERANCE[precision])
    short = [length <= flash_inside.precision.MOST_WORDS_OF_SHORT for length in lengths]
    if precision == "bf16" and any(short):
        assert ((ours[0] - truth[0]) / truth[0])[short].abs().max() < 1e-4
