"""Drawn trees and drawn derivations have the probabilities of an enumeration, of `inside` and of closed forms.

Seeds are fixed, so that a test that passes always does. A wrong sampler would fail with nearly any seed.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

import flash_inside
from flash_inside import Rules, trees
from flash_inside.packing import Layout
from flash_inside.sampling import SampledTrees
from grammars import bracketings, random_emissions, random_rules, right_branching, score_of
from lm_pcfg.errors import UserError
from lm_pcfg.grammar import analysis, generation
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.generation import sample_derivations
from lm_pcfg.grammar.grammar import Grammar


def chi_squared(observed: Counter, probabilities: dict) -> float:
    """Return how probable it is to be as far from these probabilities; rare cases, and all others, are one case."""
    total = sum(observed.values())
    frequent = {case: p for case, p in probabilities.items() if p * total >= 10}
    cells = [(observed[case], p * total) for case, p in frequent.items()]
    rest = total - sum(expected for _, expected in cells)
    if rest >= 10:
        cells.append((total - sum(count for count, _ in cells), rest))
    assert len(cells) > 1
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def assert_mean(values: np.ndarray, exact: float) -> None:
    """Within 4 standard errors."""
    assert abs(np.mean(values) - exact) <= 4 * np.std(values) / math.sqrt(len(values)) + 1e-12


# ---- trees given a sentence -----------------------------------------------------------------------------------------


def posterior(rules: Rules, words: torch.Tensor) -> dict:
    """Probability of every labelled tree given the sentence, by listing them."""
    n, p, length = rules.nonterminals, rules.preterminals, len(words)
    found = {}
    for rules_used in bracketings(0, length):
        spans = sorted({(0, length), *(span for rule in rules_used for span in rule)}, key=lambda s: (s[0], -s[1]))
        for labels in product(*(range(n, n + p) if j == i + 1 else range(n) for i, j in spans)):
            tree = tuple((i, j, label) for (i, j), label in zip(spans, labels, strict=True))
            found[tree] = math.exp(score_of(rules, words, tree))
    total = sum(found.values())
    return {tree: probability / total for tree, probability in found.items()}


def drawn(rules, emissions, lengths, samples, seed, **options):
    generator = torch.Generator().manual_seed(seed)
    return flash_inside.sample_trees(rules, emissions, lengths, samples, generator=generator, **options)


LENGTHS = [3, 1, 4, 2]


@pytest.fixture(scope="module")
def enumerated():
    """A grammar, sentences, and the posterior of each: 3,240 trees of four words."""
    rules, emissions = random_rules(2, 3, spread=2.0, seed=6), random_emissions(sum(LENGTHS), 3, spread=2.0, seed=6)
    rules.left[0, 0] = rules.right[1, 2] = 0.0  # what is impossible is never drawn
    return rules, emissions, [posterior(rules, words) for words in emissions.split(LENGTHS)]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("largest_block", [trees.LARGEST_BLOCK, 1000])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_trees_have_their_posterior(together, largest_block, precision, enumerated, monkeypatch):
    monkeypatch.setattr(trees, "LARGEST_BLOCK", largest_block)
    rules, emissions, exact = enumerated
    sentences, samples = emissions.split(LENGTHS), 4_000
    if together:
        found = drawn(rules, emissions, LENGTHS, samples, 5, precision=precision)
    else:
        found = [drawn(rules, words, [len(words)], samples, 5, precision=precision)[0] for words in sentences]
    for of_sentence, words, probabilities in zip(found, sentences, exact, strict=True):
        assert len(of_sentence) == samples
        counts = Counter(tuple(tree) for _, tree in of_sentence)
        assert counts.keys() <= {tree for tree, probability in probabilities.items() if probability > 0}
        assert chi_squared(counts, probabilities) > 0.001
        for score, tree in of_sentence[:50]:
            assert tree == sorted(tree, key=lambda node: (node[0], -node[1]))
            assert score == pytest.approx(score_of(rules, words, tree), rel=1e-12 if precision == "fp64" else 1e-6)


def span_frequencies(of_sentence, length):
    """One table [l+1, l+1] a tree."""
    tables = np.zeros((len(of_sentence), length + 1, length + 1))
    for table, (_, tree) in zip(tables, of_sentence, strict=True):
        for first, end, _ in tree:
            table[first, end] = 1
    return tables


def assert_span_marginals(rules, emissions, lengths, found):
    exact = flash_inside.span_marginals(
        Rules(*(t.double() for t in rules)), emissions.double(), lengths, "fp64", "reference"
    )
    for of_sentence, marginals, length in zip(found, exact, lengths, strict=True):
        frequency = span_frequencies(of_sentence, length).mean(0)
        error = np.sqrt(np.clip(marginals.numpy() * (1 - marginals.numpy()), 0, None) / len(of_sentence))
        assert (np.abs(frequency - marginals.numpy()) <= 4.5 * error + 2 / len(of_sentence)).all()


def test_spans_have_their_marginals_in_sentences_of_any_lengths():
    lengths = [7, 1, 12, 2, 9]
    rules, emissions = random_rules(6, 9, spread=2.0, seed=3), random_emissions(sum(lengths), 9, spread=2.0, seed=3)
    assert_span_marginals(rules, emissions, lengths, drawn(rules, emissions, lengths, 2_000, 1))


@pytest.mark.parametrize(("precision", "depth"), [("fp64", 1000.0), ("fp32", 150.0)])
def test_what_leaves_the_range_of_the_format_is_drawn_as_well(precision, depth):
    """Two symbols that explain every text, and that no tree can use: next to theirs, all other values are nothing."""
    lengths, n, p = [6, 1, 5, 7], 4, 5
    root, left, right = random_rules(n, p, spread=2.0, seed=2)
    emissions = random_emissions(sum(lengths), p, spread=2.0, seed=2) - depth
    emissions[:, 0] = 0.0
    for side in (left, right):
        side[:, [0, n]] = 0.0
        side[0] = 0.0
        side[0, [0, n]] = 0.5
    root[[0, n]] = 0.0
    rules = Rules(root, left, right)
    assert_span_marginals(rules, emissions, lengths, drawn(rules, emissions, lengths, 1_000, 1, precision=precision))


def test_rules_that_the_format_cannot_hold_are_drawn_as_well():
    """No rule is impossible. A symbol explains every text, and the rules to it are 1e-50: in fp32 there is nothing."""
    lengths, n, p = [5, 1, 4], 3, 4
    root, left, right = random_rules(n, p, spread=2.0, seed=2)
    emissions = random_emissions(sum(lengths), p, spread=2.0, seed=2) - 150.0
    emissions[:, 0] = 0.0
    left[:, n] = right[:, n] = 1e-50
    rules = Rules(root, left, right)
    found = drawn(rules, emissions, lengths, 1_000, 1, precision="fp32")
    assert_span_marginals(rules, emissions, lengths, found)
    assert found[0][0][0] == pytest.approx(score_of(rules, emissions[:5], found[0][0][1]), rel=1e-6)


@pytest.mark.parametrize("depth", [60.0, 85.0, 88.0, 95.0, 100.0, 104.0, 150.0])
def test_what_the_format_holds_in_part_is_computed_again(depth):
    """Below 1e-38 fp32 has fewer digits, and below 1e-45 none. A symbol that no rule takes is 1 next to the others."""
    root, left, right = random_rules(3, 4, seed=1)
    emissions = random_emissions(3, 4, seed=1) - depth
    emissions[:, 0] = 0.0
    left[:, 3] = right[:, 3] = 1e-60
    fp32, fp64 = (
        SampledTrees(Rules(root, left, right), emissions, Layout([3]), dtype, 0, torch.default_generator).children
        for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(fp32.double(), fp64, rtol=1e-6, atol=0)


def test_no_block_is_larger_than_it_may_be_and_none_much_smaller(monkeypatch):
    """Tables of splits, of options, and of rows times children."""
    largest, sizes = 60, {"_over_splits": [], "_choose": [], "_repair": []}
    monkeypatch.setattr(trees, "LARGEST_BLOCK", largest)
    for name, found in sizes.items():
        original = getattr(SampledTrees, name)

        def recorded(self, values, *rest, found=found, original=original):
            widths = [values.numel() // len(values), *(other.shape[1] for other in rest if torch.is_tensor(other))]
            found.append(len(values) * max(widths))
            return original(self, values, *rest)

        monkeypatch.setattr(SampledTrees, name, recorded)
    rules, emissions = random_rules(4, 5, seed=3), random_emissions(20, 5, seed=3)
    drawn(rules, emissions, [9, 11], 40, 0)
    for found in sizes.values():
        assert largest / 2 < max(found) <= largest


def test_spans_without_a_tree_are_in_no_tree():
    lengths = [4, 1, 6, 2]
    rules, emissions = right_branching(3, 4, lengths)
    for length, words, of_sentence in zip(
        lengths, emissions.split(lengths), drawn(rules, emissions, lengths, 20, 0), strict=True
    ):
        assert len(of_sentence) == 20
        for score, tree in of_sentence:
            wide = [(first, length) for first in range(length)]
            assert sorted({(i, j) for i, j, _ in tree} - {(k, k + 1) for k in range(length - 1)}) == wide
            assert score == pytest.approx(score_of(rules, words, tree), rel=1e-12)
    for length, siblings in zip(lengths, flash_inside.last_siblings(rules, emissions, lengths), strict=True):
        assert siblings.tolist() == pytest.approx([0.0] * (length - 2) + [1.0] * (length > 1))


def test_sentences_without_a_tree_have_an_empty_list():
    rules, emissions = random_rules(4, 5, root="nonterminals"), random_emissions(8, 5)
    emissions[5] = float("-inf")
    assert [len(of_sentence) for of_sentence in drawn(rules, emissions, [3, 1, 4], 7, 0)] == [7, 0, 0]
    assert drawn(rules, emissions[:2], [1, 1], 7, 0) == [[], []]
    assert drawn(rules, emissions[:0], [], 7, 0) == []
    assert drawn(rules, emissions, [3, 1, 4], 0, 0) == [[], [], []]
    with pytest.raises(ValueError, match="samples must not be negative, but is -1"):
        drawn(rules, emissions, [3, 1, 4], -1, 0)
    with pytest.raises(ValueError, match="NaN"):
        drawn(rules, emissions * math.nan, [3, 1, 4], 1, 0)


def test_the_generator_decides_the_trees():
    rules, emissions, lengths = random_rules(5, 6), random_emissions(15, 6), [6, 9]
    one, same, other = (drawn(rules, emissions, lengths, 20, seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    torch.manual_seed(1)
    assert flash_inside.sample_trees(rules, emissions, lengths, 20) == one  # PyTorch's own generator
    assert [len(of_sentence) for of_sentence in flash_inside.sample_trees(rules, emissions, lengths)] == [1, 1]


def test_one_grammar_per_sentence():
    grammars = [random_rules(4, 5, seed=seed) for seed in range(2)]
    rules = Rules(*(torch.stack(tensors) for tensors in zip(*grammars, strict=True)))
    emissions = random_emissions(7, 5)
    found = drawn(rules, emissions, [3, 4], 2_000, 0)
    for grammar, words, of_sentence in zip(grammars, emissions.split([3, 4]), found, strict=True):
        assert_span_marginals(grammar, words, [len(words)], [of_sentence])
        assert of_sentence[0][0] == pytest.approx(score_of(grammar, words, of_sentence[0][1]), rel=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_draws_the_trees_of_the_cpu():
    lengths = [7, 1, 12, 2, 9]
    rules, emissions = random_rules(60, 90, seed=3), random_emissions(sum(lengths), 90, seed=3)
    ours = drawn(Rules(*(t.cuda() for t in rules)), emissions.cuda(), lengths, 50, 1)
    truth = drawn(rules, emissions, lengths, 50, 1)
    for mine, theirs in zip(ours, truth, strict=True):
        assert [tree for _, tree in mine] == [tree for _, tree in theirs]
        assert [score for score, _ in mine] == pytest.approx([score for score, _ in theirs], rel=1e-12)
    fast = flash_inside.sample_trees(
        Rules(*(t.cuda().float() for t in rules)), emissions.cuda().float(), lengths, 2_000,
        generator=torch.Generator("cuda").manual_seed(1), precision="fp32",
    )  # fmt: skip
    assert_span_marginals(rules, emissions, lengths, fast)


# ---- derivations of a grammar ---------------------------------------------------------------------------------------

N, P, V = 2, 3, 3


def grammar_with_stop(stop: float, *, words: int = V, root: str = "all", seed: int = 0) -> Grammar:
    """Every nonterminal gives probability `stop` to its preterminal children on each side."""
    rules = random_rules(N, P, root=root, seed=seed)

    def reweighted(side: torch.Tensor) -> torch.Tensor:
        parts = side.split([N, P], dim=1)
        shares = (1 - stop, stop)
        return torch.cat([s * part / part.sum(1, keepdim=True) for s, part in zip(shares, parts, strict=True)], dim=1)

    logits = torch.randn(words, P, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    emission = Emission.of(torch.eye(P, dtype=torch.float64), logits, "fp64")
    return Grammar(rules.root, reweighted(rules.left), reweighted(rules.right), emission)


@pytest.fixture(scope="module")
def many():
    grammar = grammar_with_stop(0.7)
    return grammar, sample_derivations(grammar, 200_000, seed=4, max_length=400)


def test_strings_have_their_probabilities(many):
    grammar, found = many
    strings = [string for length in range(1, 6) for string in product(range(V), repeat=length)]
    lengths = [len(string) for string in strings]
    words = torch.tensor([word for string in strings for word in string])
    log_z = flash_inside.inside(grammar.rules, grammar.emission.log_probabilities(words), lengths, "fp64")
    exact = dict(zip(strings, log_z.exp().tolist(), strict=True))
    assert chi_squared(Counter(tuple(derivation.words) for derivation in found), exact) > 0.001


def test_surprise_length_and_uses_agree_with_the_closed_forms(many):
    grammar, found = many
    rules, number = grammar.rules, len(found)
    assert found.number_cut == 0
    assert_mean(-found.log_probability, analysis.derivation_entropy(rules, grammar.emission))
    assert_mean(found.lengths, analysis.expected_length(rules))
    sample = np.repeat(np.arange(number), 2 * found.lengths - 1)
    uses = analysis.expected_uses(rules)
    assert uses.shape == (N + P,)
    for symbol in range(N + P):
        assert_mean(np.bincount(sample[found.nodes[:, 2] == symbol], minlength=number), uses[symbol].item())


def test_log_probabilities_are_products_of_rules(many):
    grammar, found = many
    for number, derivation in enumerate(found):
        if number == 300:
            break
        assert derivation.nodes == sorted(derivation.nodes, key=lambda node: (node[0], -node[1]))
        emissions = grammar.emission.log_probabilities(torch.tensor(derivation.words))
        truth = score_of(grammar.rules, emissions, derivation.nodes)
        assert derivation.log_probability == pytest.approx(truth, rel=1e-12)
        assert not derivation.cut
    assert found.words.shape == (found.lengths.sum(),)
    assert found.nodes.shape == ((2 * found.lengths - 1).sum(), 3)


@pytest.mark.parametrize("root", ["all", "nonterminals"])
def test_the_closed_forms_are_those_of_a_derivation_from_below(root):
    """h = H(left) + H(right) + (left + right) (h, H(emission)); the root chooses among these."""
    grammar = grammar_with_stop(0.65, root=root, seed=3)
    both, words = grammar.left + grammar.right, grammar.emission.entropies()
    own = analysis.entropy(grammar.left) + analysis.entropy(grammar.right) + both[:, N:] @ words
    below = torch.cat((torch.linalg.solve(torch.eye(N) - both[:, :N], own), words))
    exact = analysis.entropy(grammar.root) + grammar.root @ below[: len(grammar.root)]
    before = grammar.left.clone()
    assert analysis.derivation_entropy(grammar.rules, grammar.emission) == pytest.approx(exact.item(), rel=1e-12)
    assert torch.equal(grammar.left, before)
    assert grammar.describe(thorough=True)["grammar/derivation_entropy"] == pytest.approx(exact.item(), rel=1e-12)


@pytest.mark.parametrize("stop", [0.7, 0.3])
def test_long_derivations_are_cut_and_counted(stop):
    """With one word, the probability of at most 10 words is that of 10 strings."""
    grammar, longest = grammar_with_stop(stop, words=1), 10
    lengths = list(range(1, longest + 1))
    mass = flash_inside.inside(grammar.rules, torch.zeros(sum(lengths), P).double(), lengths, "fp64").exp()
    found = sample_derivations(grammar, 20_000, seed=1, max_length=longest)
    assert 0 < found.number_cut < len(found) == 20_000
    assert_mean(found.cut, 1 - mass.sum().item())
    for length in lengths:
        assert_mean(found.lengths == length, mass[length - 1].item())
    assert np.array_equal(found.cut, found.lengths == 0)
    assert np.array_equal(found.cut, np.isnan(found.log_probability))
    assert [d.cut for d in found] == found.cut.tolist()
    assert all(d.words == [] and d.nodes == [] for d in found if d.cut)
    if stop < 0.5:
        assert math.isinf(analysis.derivation_entropy(grammar.rules, grammar.emission))
        assert analysis.expected_uses(grammar.rules).isinf().all()


def test_the_seed_decides_the_derivations(monkeypatch):
    grammar = grammar_with_stop(0.6)
    one, other = (list(sample_derivations(grammar, 500, seed=seed, max_length=100)) for seed in (1, 2))
    assert one != other
    monkeypatch.setattr(generation, "LARGEST_BLOCK", 1)
    assert list(sample_derivations(grammar, 500, seed=1, max_length=100)) == one


def test_no_derivation_no_long_one_and_what_cannot_be_drawn():
    grammar = grammar_with_stop(0.7, root="nonterminals")
    assert list(sample_derivations(grammar, 0, seed=0, max_length=5)) == []
    assert sample_derivations(grammar, 10, seed=0, max_length=1).number_cut == 10  # two words at least
    for number, max_length in ((-1, 5), (1, 0)):
        with pytest.raises(ValueError, match="cannot be drawn"):
            sample_derivations(grammar, number, seed=0, max_length=max_length)
    with pytest.raises(UserError, match="no mass"):
        sample_derivations(grammar._replace(left=grammar.left * 0), 10, seed=0, max_length=5)


@pytest.mark.parametrize("words", [2, 3, 5])
def test_where_the_sibling_of_the_last_word_begins(words):
    """Against the enumeration of trees: the node above the last word."""
    rules, emissions = random_rules(3, 4, spread=2.0, seed=words), random_emissions(words, 4, seed=words)
    expected = np.zeros(words - 1)
    for bracketing in bracketings(0, words):
        spans = {parent: (left, right) for parent, left, right in bracketing}
        start = next(parent[0] for parent, (_, right) in spans.items() if right == (words - 1, words))
        expected[start] += bracketing_probability(rules, emissions, spans, words)
    (found,) = flash_inside.last_siblings(rules, emissions, [words])
    np.testing.assert_allclose(found.numpy(), expected / expected.sum(), rtol=1e-9)


def bracketing_probability(rules, emissions, spans, words):
    """Of all labellings of one binary tree."""

    def inside(span):
        if span[1] - span[0] == 1:
            return torch.cat((torch.zeros(3, dtype=torch.float64), emissions[span[0]].exp()))
        left, right = (inside(child) for child in spans[span])
        return torch.cat(((rules.left @ left) * (rules.right @ right), torch.zeros(4, dtype=torch.float64)))

    return (rules.root @ inside((0, words))[: len(rules.root)]).item()


def test_last_siblings_of_several_sentences_are_those_of_each():
    rules, lengths = random_rules(3, 4, seed=2), [4, 1, 6, 2]
    emissions = random_emissions(sum(lengths), 4, seed=2)
    together = flash_inside.last_siblings(rules, emissions, lengths)
    for words, found in zip(emissions.split(lengths), together, strict=True):
        torch.testing.assert_close(found, flash_inside.last_siblings(rules, words, [len(words)])[0])
    impossible = flash_inside.last_siblings(rules, torch.full((3, 4), -math.inf), [3])
    assert impossible[0].tolist() == [0, 0]
