"""Prefix probabilities against enumeration, simulation, log space and finite differences."""

from __future__ import annotations

import itertools
from bisect import bisect

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flash_inside
from flash_inside import GrowingPrefixes, LeftCorners, Rules, Statistics, prefix
from flash_inside.precision import TOLERANCE
from flash_inside.prefixes import ending_probabilities, reference
from grammars import random_emissions, random_rules

BACKENDS = ["torch", "reference"]
ROOTS = ["all", "nonterminals"]


def short_rules(n: int, p: int, *, root: str = "all", seed: int = 0, share: float = 0.15) -> Rules:
    """Random rules that prefer preterminals, so that long strings have hardly any mass."""
    found = random_rules(n, p, root=root, seed=seed)
    sides = []
    for side in (found.left, found.right):
        side = torch.cat((side[:, :n] * share, side[:, n:]), dim=1)
        sides.append(side / side.sum(1, keepdim=True))
    return Rules(found.root, *sides)


def random_words(p: int, words: int, seed: int) -> torch.Tensor:
    """Log p(word | preterminal): [words, P]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(p, words, dtype=torch.float64, generator=generator).log_softmax(1).T.contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("root", ROOTS)
def test_prefixes_equal_enumeration_of_all_longer_strings(backend, root):
    rules, emission = short_rules(3, 4, root=root, seed=2), random_words(4, 2, seed=1)
    sentence, longest = [0, 1, 1], 11
    found = prefix(rules, emission[sentence], [len(sentence)], "fp64", backend)
    beyond = 1.0
    totals = [0.0] * len(sentence)
    for length in range(1, longest + 1):
        strings = torch.tensor(list(itertools.product(range(2), repeat=length)))
        log_z = flash_inside.inside(rules, emission[strings.flatten()], [length] * len(strings), "fp64")
        beyond -= log_z.exp().sum().item()
        for j in range(min(length, len(sentence))):
            begins = (strings[:, : j + 1] == torch.tensor(sentence[: j + 1])).all(1)
            totals[j] += log_z[begins].exp().sum().item()
    assert 0 < beyond < 1e-4
    for j, total in enumerate(totals):
        assert total <= found.begins[j].exp().item() + 1e-12
        assert found.begins[j].exp().item() - total <= beyond


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4), n=st.integers(1, 4), p=st.integers(1, 4),
    root=st.sampled_from(ROOTS), spread=st.sampled_from([0.5, 2.0]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_equals_the_reference_and_sums_to_one(lengths, n, p, root, spread, seed):
    """Also of grammars that lose mass: next words and the end have all of a prefix's probability."""
    rules = random_rules(n, p, root=root, spread=spread, seed=seed)
    words = random_words(p, 5, seed)
    ids = torch.randint(5, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    found = prefix(rules, words[ids], lengths, "fp64", with_next=True)
    truth = prefix(rules, words[ids], lengths, "fp64", "reference")
    torch.testing.assert_close(found.begins, truth.begins, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.ends, truth.ends, rtol=1e-10, atol=1e-10)
    assert found.next is not None
    next_words = torch.logsumexp(found.next[:, :, None] + words.T, dim=1)  # [words, V] joint with what is before
    torch.testing.assert_close(next_words.gather(1, ids[:, None])[:, 0], found.begins, rtol=1e-10, atol=1e-10)
    ends = np.cumsum(lengths)
    for first, end in zip(ends - lengths, ends, strict=True):
        whole = flash_inside.inside(rules, words[ids[first:end]], [end - first], "fp64")
        torch.testing.assert_close(found.ends[end - 1 : end], whole, rtol=1e-12, atol=1e-12)
        for j in range(first, end - 1):
            total = next_words[j + 1].exp().sum() + found.ends[j].exp()
            assert (total / found.begins[j].exp()).item() == pytest.approx(1.0, abs=1e-10)
        first_words = next_words[first].exp().sum().item()
        assert first_words == pytest.approx(LeftCorners.of(rules).finite_mass(rules.root).item(), abs=1e-10)


def test_a_batch_equals_its_sentences_alone():
    lengths = [4, 1, 6, 2, 6]
    rules, emissions = random_rules(5, 7, seed=4), random_emissions(sum(lengths), 7, seed=4)
    together = prefix(rules, emissions, lengths, "fp64", with_next=True)
    alone = [prefix(rules, words, [len(words)], "fp64", with_next=True) for words in emissions.split(lengths)]
    for field in range(3):
        joined = torch.cat([found[field] for found in alone])
        torch.testing.assert_close(together[field], joined, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("root", ROOTS)
def test_gradcheck_in_every_input(backend, root):
    lengths = [3, 1, 4]
    rules = short_rules(2, 3, root=root, seed=1, share=0.3)
    inputs = [tensor.requires_grad_() for tensor in (*rules, random_emissions(sum(lengths), 3, seed=1))]

    def log_p(root, left, right, emissions):
        found = prefix(Rules(root, left, right), emissions, lengths, "fp64", backend)
        return found.begins, found.ends[found.ends.isfinite()]

    assert torch.autograd.gradcheck(log_p, inputs, fast_mode=backend == "reference")


@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_gradients_in_fp32_are_near_those_of_fp64(spread):
    """Also of sentences that are computed again: logits of deviation 30 have some."""
    lengths, counts = [5, 1, 4], Statistics()
    for seed in (4, 11, 13):
        rules = random_rules(4, 5, spread=spread, seed=seed, dtype=torch.float32)
        emissions = random_emissions(sum(lengths), 5, spread=spread, seed=seed, dtype=torch.float32)
        found = []
        for dtype, precision in ((torch.float32, "fp32"), (torch.float64, "fp64")):
            inputs = [tensor.to(dtype).clone().requires_grad_() for tensor in (*rules, emissions)]
            with torch.no_grad():
                corners = LeftCorners.of(rules) if spread > 1 else None
            given = Rules(*(tensor.detach() for tensor in inputs[:3])) if corners else Rules(*inputs[:3])
            result = prefix(given, inputs[3], lengths, precision, statistics=counts, corners=corners)
            result.begins.sum().backward()
            found.append([tensor.grad for tensor in inputs if tensor.grad is not None])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())
    assert spread == 1.0 or counts.recomputed > 0


def test_gradient_of_a_grammar_that_loses_mass():
    """The derivative through the least fixed point, away from 1."""
    rules = random_rules(3, 2, spread=0.5, seed=5)
    left = torch.cat((rules.left[:, :3] * 4, rules.left[:, 3:]), dim=1)
    right = torch.cat((rules.right[:, :3] * 4, rules.right[:, 3:]), dim=1)
    inputs = [
        t.requires_grad_() for t in (rules.root, left / left.sum(1, keepdim=True), right / right.sum(1, keepdim=True))
    ]
    assert LeftCorners.of(Rules(*inputs)).ends.max() < 0.9

    def log_p(root, left, right):
        return prefix(Rules(root, left, right), random_emissions(3, 2), [3], "fp64").begins

    assert torch.autograd.gradcheck(log_p, inputs)


def test_symbols_that_never_end_take_no_part():
    """0 -> 1 | words; 1 -> 1 1 for ever; 2 -> 2 word: left-recursive for ever, and its matrix would be singular."""
    left, right = torch.zeros(3, 5, dtype=torch.float64), torch.zeros(3, 5, dtype=torch.float64)
    left[0] = torch.tensor([0.0, 0.3, 0.2, 0.25, 0.25])
    right[0] = torch.tensor([0.2, 0.2, 0.2, 0.2, 0.2])
    left[1, 1] = right[1, 1] = left[2, 2] = right[2, 3] = 1.0
    rules = Rules(torch.tensor([0.6, 0.2, 0.2], dtype=torch.float64), left, right)
    corners = LeftCorners.of(rules)
    m = 0.5 * 0.4 / (1 - 0.5 * 0.2)  # m = 0.5 (0.2 m + 0.4)
    torch.testing.assert_close(corners.ends, torch.tensor([m, 0.0, 0.0], dtype=torch.float64))
    emissions = random_emissions(3, 2)
    found, truth = prefix(rules, emissions, [3], "fp64"), prefix(rules, emissions, [3], "fp64", "reference")
    torch.testing.assert_close(found.begins, truth.begins)
    assert found.begins.isfinite().all()


def test_newton_finds_the_least_solution_of_a_critical_grammar():
    """A -> A A with probability 1/2, words otherwise: m = 1 is a double root, which plain iteration nears like 1/n."""
    rule = torch.tensor([[0.5**0.5, 1 - 0.5**0.5]], dtype=torch.float64)
    m, trusted = ending_probabilities(rule, rule)
    least = (1 - 0.5**0.5) ** 2 / 0.5  # (s m + 1 - s)^2 = m has the solutions 1 and ((1 - s) / s)^2
    assert m.item() == pytest.approx(least, rel=1e-12)
    critical = torch.tensor([[0.5, 0.5]], dtype=torch.float64)  # (m / 2 + 1 / 2)^2 = m: a double root at 1
    assert trusted
    m, trusted = ending_probabilities(critical, critical)
    assert m.item() == pytest.approx(1.0, abs=1e-6)
    assert not trusted


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_extreme_logits_agree_with_log_space(precision):
    recomputed = 0
    for seed in range(12):
        rules = random_rules(6, 8, spread=30.0, seed=seed)
        emissions = random_emissions(16, 8, spread=30.0, seed=seed)
        narrow = Rules(*(tensor.to(torch.float32 if precision == "fp32" else torch.float64) for tensor in rules))
        counts = Statistics()
        found = prefix(narrow, emissions, [7, 9], precision, statistics=counts)
        wide = Rules(*(tensor.double() for tensor in narrow))
        truth = prefix(wide, emissions, [7, 9], "fp64", "reference", corners=LeftCorners.of(narrow))
        tolerance = 1e-6 if precision == "fp32" else 1e-11
        for ours, theirs in zip(found[:2], truth[:2], strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)
        recomputed += counts.recomputed + counts.recomputed_in_log_space
    assert precision == "fp64" or recomputed > 0  # else the logits were not extreme


@pytest.mark.parametrize("seed", [74, 83, 110])
def test_symbols_that_are_almost_surely_their_own_left_child(seed):
    """Against many digits: in fp64 the rest of their rows is lost beside 1, and m, prefixes or both are far off."""
    rules = random_rules(6, 8, spread=30.0, seed=seed)
    emissions = random_emissions(4, 8, spread=30.0, seed=seed)
    ends, begins = in_many_digits(rules, emissions)
    corners = LeftCorners.of(rules)
    np.testing.assert_allclose(corners.ends.numpy(), ends, rtol=1e-10)
    assert all((tensor >= 0).all() for tensor in corners)
    for precision, backend in (("fp64", "torch"), ("fp64", "reference"), ("fp32", "torch")):
        found = prefix(rules, emissions, [4], precision, backend, corners=corners)
        np.testing.assert_allclose(found.begins.numpy(), begins, rtol=1e-10 if precision == "fp64" else 1e-5)
        assert (found.ends <= found.begins + 1e-4).all()
    growing = GrowingPrefixes(rules)
    for word, wanted in zip(emissions, begins, strict=True):
        growing.add(word[None])
        assert growing.begins.item() == pytest.approx(wanted, rel=1e-10)


def in_many_digits(rules: Rules, emissions: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return m and log P of every prefix by the recursion of the textbook, with 150 digits and no trick."""
    n, p = rules.nonterminals, rules.preterminals
    with mpmath.workdps(150):
        root, left, right = ([[mpmath.mpf(x) for x in row] for row in np.atleast_2d(t.numpy())] for t in rules)
        root, left, right = ([[x / mpmath.fsum(row) for x in row] for row in table] for table in (root, left, right))

        def times(table, vector):
            return [mpmath.fdot(row, vector) for row in table]

        m, ones = [mpmath.mpf(0)] * n, [mpmath.mpf(1)] * p
        for _ in range(400):
            l_m, r_m = times(left, m + ones), times(right, m + ones)
            slope = mpmath.matrix(n, n)
            for a, b in itertools.product(range(n), repeat=2):
                slope[a, b] = (a == b) - r_m[a] * left[a][b] - l_m[a] * right[a][b]
            step = mpmath.lu_solve(slope, mpmath.matrix([x * y - z for x, y, z in zip(l_m, r_m, m, strict=True)]))
            m = [x + y for x, y in zip(m, step, strict=True)]
            if max(abs(x) for x in step) < mpmath.mpf(10) ** -100:
                break
        ends = times(right, m + ones)
        matrix = mpmath.matrix(n, n)
        for a, b in itertools.product(range(n), repeat=2):
            matrix[a, b] = (a == b) - ends[a] * left[a][b]
        paths = matrix**-1
        words = [[mpmath.exp(mpmath.mpf(x)) for x in row] for row in emissions.tolist()]
        beta, pi, begins = {}, {}, []
        for j in range(1, len(words) + 1):
            for i in reversed(range(j)):
                leaf = words[i] if j == i + 1 else [mpmath.mpf(0)] * p
                inner = [mpmath.mpf(0)] * n
                x = [d * y for d, y in zip(ends, times(left, inner + leaf), strict=True)]
                for k in range(i + 1, j):
                    l_b, r_b, r_p = times(left, beta[i, k]), times(right, beta[k, j]), times(right, pi[k, j])
                    inner = [z + u * v for z, u, v in zip(inner, l_b, r_b, strict=True)]
                    x = [z + u * v for z, u, v in zip(x, l_b, r_p, strict=True)]
                beta[i, j], pi[i, j] = inner + leaf, list(paths * mpmath.matrix(x)) + leaf
            begins.append(float(mpmath.log(mpmath.fdot(root[0], pi[0, j]))))
        return [float(x) for x in m], begins


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_precisions_are_near_fp64_on_the_same_rounded_rules(precision):
    lengths = [20, 3, 31]
    dtype = torch.float32
    rules = random_rules(40, 80, seed=3, dtype=dtype)
    emissions = random_emissions(sum(lengths), 80, seed=3, dtype=dtype)
    found = prefix(rules, emissions, lengths, precision)
    truth = prefix(Rules(*(tensor.double() for tensor in rules)), emissions.double(), lengths, "fp64")
    for ours, theirs in zip(found[:2], truth[:2], strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=TOLERANCE[precision][0], atol=1e-5)


def test_impossible_words_and_bad_input():
    rules, emissions = random_rules(3, 4, root="nonterminals", seed=1), random_emissions(5, 4)
    emissions[3] = float("-inf")
    counts = Statistics()
    found = prefix(rules, emissions, [5], "fp64", statistics=counts)
    assert found.begins.isfinite().tolist() == [True, True, True, False, False]
    assert found.ends.isfinite().tolist() == [False, True, True, False, False]
    truth = prefix(rules, emissions, [5], "fp64", "reference")
    torch.testing.assert_close(found.begins, truth.begins)
    assert counts.recomputed_in_log_space == 0
    assert prefix(rules, emissions[:0], [], "fp64").begins.shape == (0,)
    with pytest.raises(ValueError, match="not available"):
        prefix(rules, emissions, [5], backend="cuda")
    with pytest.raises(ValueError, match="made without gradients"):
        prefix(Rules(*(t.clone().requires_grad_() for t in rules)), emissions, [5], corners=LeftCorners.of(rules))
    with pytest.raises(ValueError, match="no gradients of prefixes"):
        prefix(rules, emissions.clone().requires_grad_(), [5], backend="triton")
    with pytest.raises(ValueError, match="one grammar for all"):
        prefix(Rules(*(tensor[None] for tensor in rules)), emissions, [5])


def test_next_preterminals_of_the_reference():
    lengths = [3, 2]
    rules, emissions = random_rules(3, 4, seed=8), random_emissions(5, 4, seed=8)
    found = prefix(rules, emissions, lengths, "fp64", with_next=True)
    truth = reference.next_preterminals(rules, LeftCorners.of(rules), emissions, lengths)
    torch.testing.assert_close(found.next, truth, rtol=1e-10, atol=1e-10)


def test_a_grammar_that_loses_mass_agrees_with_simulated_derivations():
    """100,000 derivations; one of more than 10,000 symbols counts as endless. Within 4 standard errors."""
    n, p, words, count = 3, 3, 2, 100_000
    rules = random_rules(n, p, spread=1.0, seed=3)
    more = [torch.cat((side[:, :n] * 2.5, side[:, n:]), dim=1) for side in (rules.left, rules.right)]
    rules = Rules(rules.root, *(side / side.sum(1, keepdim=True) for side in more))
    emission = random_words(p, words, seed=2)
    begins, ended = simulate(rules, emission.exp().T.numpy(), count, np.random.default_rng(0))
    corners = LeftCorners.of(rules)
    mass = corners.finite_mass(rules.root).item()
    assert mass < 0.9
    expected = {(): mass}
    for string in [*itertools.product(range(words), repeat=1), *itertools.product(range(words), repeat=2)]:
        expected[string] = prefix(rules, emission[list(string)], [len(string)], "fp64").begins[-1].exp().item()
    for string, probability in expected.items():
        share = np.mean([begun[: len(string)] == string for begun in begins[ended]]) * ended.mean()
        assert abs(share - probability) <= 4 * (probability * (1 - probability) / count) ** 0.5, string


def simulate(rules: Rules, emission: np.ndarray, count: int, generator: np.random.Generator):
    """Return the first two words of each derivation, and whether it ended."""
    n = rules.nonterminals
    root, left, right = (tensor.numpy() for tensor in rules)

    cumulative = [[row.cumsum().tolist() for row in side] for side in (right, left)]
    uniform = iter(generator.random(40 * count).tolist())
    begins = np.empty(count, dtype=object)
    waiting = np.zeros((count, n), dtype=np.int64)  # nonterminals still to be expanded, of any order
    for number, symbol in enumerate(generator.choice(len(root), count, p=root).tolist()):
        stack, begun, symbols = [symbol], (), 0
        while stack and len(begun) < 2 and symbols < 10_000:
            symbol = stack.pop()
            symbols += 1
            if symbol >= n:
                begun += (int(next(uniform) > emission[symbol - n, 0]),)
            else:
                stack += [min(bisect(side[symbol], next(uniform)), len(side[symbol]) - 1) for side in cumulative]
        begins[number] = begun
        for rest in stack:
            if rest < n:
                waiting[number, rest] += 1
    total = waiting.sum(1)
    active = total > 0
    while (active & (total < 10_000)).any():  # a generation at a time: the order no longer matters
        rows = np.flatnonzero(active & (total < 10_000))
        following = np.zeros((len(rows), n), dtype=np.int64)
        for symbol in range(n):
            for side in (left, right):
                probabilities = np.append(side[symbol, :n], side[symbol, n:].sum())
                following += generator.multinomial(waiting[rows, symbol], probabilities / probabilities.sum())[:, :n]
        waiting[rows] = following
        total[rows] += following.sum(1)
        active[rows] = following.sum(1) > 0
    return begins, ~active


@pytest.mark.parametrize("root", ROOTS)
def test_a_growing_prefix_equals_the_whole_at_once(root):
    length, count, p = 6, 3, 4
    rules, emissions = random_rules(3, p, root=root, spread=2.0, seed=6), random_emissions(length * count, p, seed=6)
    found = prefix(rules, emissions, [length] * count, "fp64", with_next=True)
    assert found.next is not None
    begins, ends, following = found.begins.view(count, -1), found.ends.view(count, -1), found.next.view(count, -1, p)
    growing = GrowingPrefixes(rules, count)
    assert growing.begins.exp().tolist() == pytest.approx([LeftCorners.of(rules).finite_mass(rules.root).item()] * 3)
    for word in range(length):
        torch.testing.assert_close(growing.next_preterminals(), following[:, word], rtol=1e-11, atol=1e-11)
        growing.add(emissions.view(count, length, p)[:, word])
        torch.testing.assert_close(growing.begins, begins[:, word], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(growing.ends, ends[:, word], rtol=1e-11, atol=1e-11)
    growing.keep(torch.tensor([2, 0, 0]))
    torch.testing.assert_close(growing.begins, begins[[2, 0, 0], -1])
