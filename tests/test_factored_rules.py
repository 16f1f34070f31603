"""Rules that stay factors, against the same rules multiplied out; the Triton kernels are in test_triton_factored.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flash_inside
from flash_inside import FactoredRules, Rules, precision, span_limits
from flash_inside.prefixes import prefix
from grammars import (
    enumerate_trees,
    random_emissions,
    random_factors,
    random_rules,
    rules_that_lose_a_row,
    rules_with_a_faint_split,
)


def with_identity(rules):
    """The same grammar: the middle symbols are the nonterminals."""
    return FactoredRules(*rules, torch.eye(rules.nonterminals, dtype=rules.left.dtype))


def gradients(rules, emissions, lengths, weight, *, multiplied=False, **options):
    """Log Z, and the gradients of factors and emissions."""
    inputs = [tensor.clone().requires_grad_() for tensor in (*rules, emissions)]
    given = FactoredRules(*inputs[:4])
    log_z = flash_inside.inside(given.multiplied() if multiplied else given, inputs[4], lengths, **options)
    possible = torch.where(log_z.isinf(), 0.0, log_z)
    return log_z.detach().double(), torch.autograd.grad((possible * weight).sum(), inputs)


@pytest.mark.parametrize("root", ["all", "nonterminals"])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_equals_enumeration(root, backend):
    rules, lengths = random_factors(3, 2, 2, root=root), [1, 4, 2, 3]
    emissions = random_emissions(sum(lengths), 2)
    found = flash_inside.inside(rules, emissions, lengths, "fp64", backend)
    whole = rules.multiplied()
    for log_z, words in zip(found, emissions.split(lengths), strict=True):
        assert log_z.exp().item() == pytest.approx(enumerate_trees(whole, words)[0], rel=1e-12)


@pytest.mark.parametrize("lengths", [[1, 6, 2, 6, 3], [1, 1], [2, 2], [9]], ids=str)
@pytest.mark.parametrize("n", [6, 70])
def test_every_gradient_is_that_of_the_rules_multiplied_out(n, lengths):
    """With brackets, too; 70 nonterminals sum over splits in another order."""
    rules, emissions = random_factors(n, 4, 5), random_emissions(sum(lengths), 5)
    weight = torch.linspace(0.5, 2.0, len(lengths))
    limits = np.concatenate([span_limits([(0, 2)] if length > 2 else [], length) for length in lengths])
    for options in ({}, {"limits": limits}):
        ours, truth = (
            gradients(rules, emissions, lengths, weight, precision="fp64", multiplied=multiplied, **options)
            for multiplied in (False, True)
        )
        torch.testing.assert_close(ours[0], truth[0], rtol=1e-12, atol=0)
        for got, want in zip(ours[1], truth[1], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("precision_name", "backend"), [("fp64", "torch"), ("fp64", "reference"), ("fp32", "torch")])
def test_spans_have_the_posteriors_of_the_rules_multiplied_out(precision_name, backend):
    """Also where a sentence leaves fp32, and where it has no tree."""
    lengths, statistics = [1, 6, 2, 9, 3], flash_inside.Statistics()
    for seed in range(5):
        rules = random_factors(16, 8, 32, spread=30.0, seed=seed, dtype=torch.float32)
        emissions = random_emissions(sum(lengths), 32, spread=30.0, seed=seed, dtype=torch.float32)
        emissions[8] = -torch.inf if seed == 4 else emissions[8]  # of the third sentence
        found = flash_inside.span_marginals(rules, emissions, lengths, precision_name, backend, statistics)
        wide = FactoredRules(*(tensor.double() for tensor in rules)).multiplied()
        truth = flash_inside.span_marginals(wide, emissions.double(), lengths, "fp64", "reference")
        for got, want, length in zip(found, truth, lengths, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4 if precision_name == "fp32" else 1e-10)
            possible = not (seed == 4 and length == 2)
            assert got.sum().item() == pytest.approx((2 * length - 1) * possible, rel=1e-4)
    assert (statistics.recomputed > 0) is (precision_name == "fp32")


def test_gradcheck():
    inputs = [tensor.requires_grad_() for tensor in (*random_factors(3, 2, 2), random_emissions(7, 2))]

    def log_z(*tensors):
        return flash_inside.inside(FactoredRules(*tensors[:4]), tensors[4], [4, 1, 2], "fp64")

    assert torch.autograd.gradcheck(log_z, inputs)


@pytest.mark.parametrize("chart", ["fp32", "bf16"])
def test_peaked_factors_equal_fp64_log_space_on_the_same_tensors(chart):
    """Sentences that leave the range are computed again, with the gradients of their factors."""
    statistics, tolerance = flash_inside.Statistics(), {"fp32": 1e-6, "bf16": 1e-3}[chart]
    lengths = [9, 7, 1, 8, 3, 9, 5, 2]
    weight, allowed = torch.ones(len(lengths)), tolerance * (1 + torch.tensor(lengths))
    for seed in range(20):
        rules = random_factors(16, 8, 32, spread=30.0, seed=seed, dtype=torch.float32)
        rules = FactoredRules(*(tensor.clamp(min=1e-30) for tensor in rules))
        emissions = random_emissions(sum(lengths), 32, spread=30.0, seed=seed, dtype=torch.float32)
        ours = gradients(rules, emissions, lengths, weight, precision=chart, statistics=statistics)
        wide = FactoredRules(*(tensor.double() for tensor in rules))
        truth = gradients(wide, emissions.double(), lengths, weight, precision="fp64", backend="reference")
        assert ((ours[0] - truth[0]).abs() <= torch.maximum(allowed, tolerance * truth[0].abs())).all()
        for probability, got, want in zip((*wide, torch.ones(())), ours[1], truth[1], strict=True):
            off, size = (((values * probability).norm()) for values in (got.double() - want, want))
            assert off <= (1e-4 if chart == "fp32" else 2e-2) * size
    assert 0 < statistics.recomputed < statistics.sentences


def test_what_is_lost_in_the_middle_is_noticed():
    """A row that underflows as a whole, a split next to larger ones, and rules that come to nothing over the middle."""
    for rules, emissions in (rules_that_lose_a_row(1e-25, 1e-20, 1e-15, 1e-20), rules_with_a_faint_split(1e-12, 1e-30)):
        rules, statistics = Rules(*(tensor.float() for tensor in rules)), flash_inside.Statistics()
        found = flash_inside.inside(with_identity(rules), emissions.float(), [len(emissions)], statistics=statistics)
        wide = Rules(*(tensor.double() for tensor in rules))
        truth = flash_inside.inside(wide, emissions.float().double(), [len(emissions)], "fp64", "reference")
        torch.testing.assert_close(found.double(), truth, rtol=1e-6, atol=0)
        assert statistics.recomputed == 1
    tiny = random_factors(4, 3, 3, dtype=torch.float32)
    tiny = tiny._replace(left=tiny.left * 1e-25, inner=tiny.inner * 1e-25)  # their product is below fp32
    emissions = random_emissions(3, 3, dtype=torch.float32)
    found = flash_inside.inside(tiny, emissions, [3])
    wide = FactoredRules(*(tensor.double() for tensor in tiny))
    truth = flash_inside.inside(wide, emissions.double(), [3], "fp64", "reference")
    torch.testing.assert_close(found.double(), truth, rtol=1e-6, atol=0)


def test_factors_are_multiplied_in_no_type_that_loses_them():
    """In log space, too: a sentence whose word has a probability of e^-800 beside another one."""
    tiny = random_factors(4, 3, 3, dtype=torch.float32)
    tiny = tiny._replace(left=tiny.left * 1e-25, inner=tiny.inner * 1e-25)  # their product is below fp32
    emissions = torch.tensor([[0.0, -800.0, -800.0]] * 2 + [[-800.0, 0.0, -800.0]])
    wide = FactoredRules(*(tensor.double() for tensor in tiny))
    truth = flash_inside.inside(wide, emissions.double(), [3], "fp64", "reference")
    for precision_name, backend in (("fp64", "torch"), ("fp64", "reference"), ("fp32", "torch")):
        found = flash_inside.inside(tiny, emissions, [3], precision_name, backend)
        torch.testing.assert_close(found.double(), truth, rtol=1e-6, atol=0)


def test_factors_of_several_types():
    """Their products are at least in fp32, whatever surrounds the call."""
    rules, emissions = random_factors(5, 3, 4), random_emissions(4, 4)
    mixed = FactoredRules(rules.root, rules.left.half(), rules.right.bfloat16(), rules.inner.float())
    truth = flash_inside.inside(FactoredRules(*(tensor.double() for tensor in mixed)), emissions, [4], "fp64")
    with torch.autocast("cpu", torch.bfloat16):
        whole = mixed.multiplied()
        for given, backend in ((mixed, "torch"), (mixed, "reference"), (whole, "torch")):
            found = flash_inside.inside(given, emissions, [4], "fp64", backend)
            torch.testing.assert_close(found, truth, rtol=1e-12 if given is mixed else 1e-6, atol=0)
    assert whole.left.dtype == torch.float32


def test_a_sum_over_many_symbols_may_reach_further_than_its_terms(monkeypatch):
    """D of a middle value adds up 2N entries of D: the limit is that much lower."""
    rules, emissions = random_factors(5, 3, 3, dtype=torch.float32), random_emissions(4, 3, dtype=torch.float32)
    smallest = {}
    for rules_given in (rules, rules.multiplied()):
        for limit in (10.0**power for power in range(-2, 6)):
            monkeypatch.setitem(precision.LARGEST_D_OF_TORCH, torch.float32, limit)
            if flash_inside.inside_unchecked(rules_given, emissions, [4])[1].item():
                smallest[type(rules_given)] = limit
                break
    assert smallest[FactoredRules] == pytest.approx(10 * smallest[Rules])


def test_zeros_are_judged_as_in_the_rules_multiplied_out():
    """Zeros of any factor: which sentences have no probability, and which of them must be computed again."""
    lengths, doubted = [4, 2, 1, 3, 5], []
    for seed in range(40):
        rules, kept = random_factors(4, 3, 3, seed=seed), np.random.default_rng(seed)
        rules = FactoredRules(*(tensor * torch.from_numpy(kept.random(tensor.shape) < 0.3) for tensor in rules))
        emissions = random_emissions(sum(lengths), 3, seed=seed)
        ours, truth = (
            flash_inside.inside_unchecked(given, emissions, lengths, "fp64") for given in (rules, rules.multiplied())
        )
        assert torch.equal(ours[1], truth[1])
        torch.testing.assert_close(ours[0], truth[0], rtol=1e-12, atol=0)
        doubted += (~ours[1]).tolist()
    assert any(doubted)
    assert not all(doubted)


def test_what_cannot_be_meant_is_refused():
    rules, emissions = random_factors(4, 3, 2), random_emissions(3, 2)
    for wrong in (rules.inner.T, rules.inner[0], rules.inner[:, :3], random_factors(4, 5, 2).inner):
        with pytest.raises(ValueError, match="inner"):
            flash_inside.inside(rules._replace(inner=wrong), emissions, [3])
    with pytest.raises(ValueError, match="multiplied"):
        flash_inside.LeftCorners.of(rules)
    with pytest.raises(ValueError, match=r"one grammar for all sentences, not \[1, 4, 5\]"):
        flash_inside.inside(rules._replace(left=rules.left[None]), emissions, [3])
    with pytest.raises(ValueError, match=r"left and right \[N, M\+P\]"):
        flash_inside.inside(rules._replace(right=rules.right[:, 1:]), emissions, [3])
    for function in (flash_inside.viterbi, flash_inside.sample_trees, prefix):
        with pytest.raises(ValueError, match="multiplied"):
            function(rules, emissions, [3])
    narrow = random_rules(4, 2)
    assert flash_inside.viterbi(rules.multiplied(), emissions, [3])
    torch.testing.assert_close(with_identity(narrow).multiplied().left, narrow.left)
