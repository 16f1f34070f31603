"""Parameterisations, the Grammar boundary, state dropout, and what a grammar is like as a whole."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn import functional

import flash_inside
from grammars import random_rules
from lm_pcfg.grammar import analysis, families
from lm_pcfg.grammar.computation import Computation, backward_through
from lm_pcfg.grammar.dropout import Dropout, Kept, draw_kept
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.families import sn_pcfg
from lm_pcfg.grammar.families.sn_pcfg import SimplePCFG
from lm_pcfg.grammar.families.tables import TablePCFG
from lm_pcfg.grammar.grammar import Grammar

N, P, V, D = 5, 7, 11, 6


def make_model(**options):
    return SimplePCFG(nonterminals=N, preterminals=P, words=V, dimension=D, **options).double()


def linear(weights, name, x):
    return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def residual_pair(weights, name, x):
    return torch.relu(linear(weights, f"{name}.second", torch.relu(linear(weights, f"{name}.first", x)))) + x


def single_residual(weights, name, x):
    return torch.relu(linear(weights, f"{name}.linear", x)) + x


@pytest.mark.parametrize("root_over", ["all", "nonterminals"])
@pytest.mark.parametrize("parameterization", ["paper", "released"])
def test_rules_are_those_of_the_formulas(parameterization, root_over):
    """Symbol by symbol, from the parameters, as the paper's appendix A and the authors' code have it."""
    model = make_model(parameterization=parameterization, root_over=root_over, seed=3)
    weights = dict(model.named_parameters())
    grammar = model()
    roots = N + P if root_over == "all" else N
    symbols = weights["symbols"]

    for parent in (0, N - 1):
        state = single_residual(weights, "parent", symbols[parent])
        for side, children in (("left_child", grammar.left), ("right_child", grammar.right)):
            logits = torch.stack([single_residual(weights, side, symbols[child]) @ state for child in range(N + P)])
            torch.testing.assert_close(children[parent], logits.softmax(0))

    if parameterization == "paper":
        start = residual_pair(weights, "root_network.2", residual_pair(
            weights, "root_network.1", linear(weights, "root_network.0", weights["start"][0])))  # fmt: skip
        root_logits = torch.stack([weights["root_output"][symbol] @ start for symbol in range(roots)])
    else:
        root_logits = torch.stack([symbols[symbol] @ weights["start"][0] for symbol in range(roots)])
    if root_over == "all":  # two softmaxes, and one number that says how much each has
        one_word = weights["one_word"].sigmoid()
        expected = [root_logits[:N].softmax(0) * (1 - one_word), root_logits[N:].softmax(0) * one_word]
    else:
        expected = [root_logits.softmax(0)]
    torch.testing.assert_close(grammar.root, torch.cat(expected))

    all_words = grammar.emission.log_probabilities(torch.arange(V))  # [V, P]
    for preterminal in (0, P - 1):
        embedding = symbols[N + preterminal]
        hidden = linear(weights, "emission_network.0", embedding)
        for pair in range(1, 3 if parameterization == "paper" else 4):
            hidden = residual_pair(weights, f"emission_network.{pair}", hidden)
        if parameterization == "released":
            hidden = hidden + embedding
        logits = torch.stack([weights["words"][word] @ hidden for word in range(V)])
        torch.testing.assert_close(all_words[:, preterminal], logits.log_softmax(0))


@pytest.mark.parametrize("root_over", ["all", "nonterminals"])
def test_tables_are_softmaxes_of_free_logits(root_over):
    model = TablePCFG(nonterminals=N, preterminals=P, words=V, root_over=root_over, seed=2).double()
    grammar = model()
    torch.testing.assert_close(grammar.root, model.root.softmax(0))
    torch.testing.assert_close(grammar.left, model.left.softmax(1))
    torch.testing.assert_close(grammar.right, model.right.softmax(1))
    words = torch.tensor([3, 0, 3])
    torch.testing.assert_close(
        grammar.emission.log_probabilities(words), model.emission.log_softmax(1).T[words], rtol=1e-12, atol=1e-12
    )
    check_dropout(model, root_over)


def test_initialisations():
    size = {"nonterminals": 200, "preterminals": 400, "words": 500, "dimension": 100}
    symbols = SimplePCFG(**size, init="xavier_normal").symbols
    assert symbols.std().item() == pytest.approx(math.sqrt(2 / (600 + 100)), rel=0.02)
    uniform = SimplePCFG(**size, init="xavier_uniform").symbols
    bound = math.sqrt(6 / (600 + 100))
    assert uniform.abs().max().item() <= bound
    assert uniform.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    normal = SimplePCFG(**size, symbol_deviation=0.15, word_deviation=0.1)
    assert normal.symbols.std().item() == pytest.approx(0.15, rel=0.02)
    assert normal.words.std().item() == pytest.approx(0.1, rel=0.02)


def test_the_seed_decides_the_weights():
    one, same, other = (make_model(seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["symbols"], other["symbols"])


@pytest.mark.parametrize("parameterization", ["paper", "released", "bounded"])
@pytest.mark.parametrize("root_over", ["all", "nonterminals"])
def test_state_dropout_is_the_grammar_over_the_kept_symbols(parameterization, root_over):
    """... and the dropped ones get no gradient."""
    model = make_model(parameterization=parameterization, root_over=root_over)
    columns = check_dropout(model, root_over)
    dropped = torch.ones(N + P, dtype=torch.bool).index_fill(0, columns, False)
    assert model.symbols.grad is not None
    assert not model.symbols.grad[dropped].any()
    assert model.symbols.grad[~dropped].any()


def check_dropout(model, root_over):
    """Leaving symbols out and renormalising every softmax over the rest. Returns the kept symbols."""
    kept = draw_kept(N, P, 0.4, seed=1, step=5)
    assert kept is not None
    assert (len(kept.nonterminals), len(kept.preterminals)) == (3, 4)
    columns = torch.cat((kept.nonterminals, kept.preterminals + N))
    full, sub = model(), model(Computation(dropout=Dropout(kept)))

    def renormalised(probabilities, index):
        part = probabilities[..., index]
        return part / part.sum(-1, keepdim=True)

    if root_over == "all" and hasattr(model, "one_word"):  # S -> preterminal keeps its share
        nonterminal, preterminal = full.root.split([N, P])
        parts = [
            renormalised(part, index) * part.sum()
            for part, index in ((nonterminal, kept.nonterminals), (preterminal, kept.preterminals))
        ]
        torch.testing.assert_close(sub.root, torch.cat(parts))
    else:
        root_index = columns if root_over == "all" else kept.nonterminals
        torch.testing.assert_close(sub.root, renormalised(full.root, root_index))
    torch.testing.assert_close(sub.left, renormalised(full.left[kept.nonterminals], columns))
    torch.testing.assert_close(sub.right, renormalised(full.right[kept.nonterminals], columns))
    words = torch.tensor([2, 2, 9])
    torch.testing.assert_close(
        sub.emission.log_probabilities(words), full.emission.log_probabilities(words)[:, kept.preterminals]
    )
    sub.log_likelihood(words, [3], precision="fp64").sum().backward()
    return columns


def test_the_kept_symbols_depend_on_seed_and_step_alone():
    draws = [draw_kept(100, 200, 0.25, seed=seed, step=step) for seed, step in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert torch.equal(draws[0].nonterminals, draws[1].nonterminals)
    assert not torch.equal(draws[0].nonterminals, draws[2].nonterminals)
    assert not torch.equal(draws[0].nonterminals, draws[3].nonterminals)
    assert (len(draws[0].nonterminals), len(draws[0].preterminals)) == (75, 150)
    assert draw_kept(100, 200, 0.0, seed=0, step=0) is None


@pytest.mark.parametrize(
    ("symbols", "rate", "left"),
    [(255, 0.1, 230), (256, 0.1, 224), (4096, 0.1, 3680), (256, 0.99, 16), (271, 0.01, 256), (1000, 1e-6, 1000),
     (1024, 1e-3, 1008)],
)  # fmt: skip
def test_many_symbols_are_kept_in_multiples_of_16(symbols, rate, left):
    kept = draw_kept(symbols, 2, rate, seed=0, step=0)
    assert len(kept.nonterminals) == len(set(kept.nonterminals.tolist())) == left
    assert kept.nonterminals.max() < symbols
    assert torch.equal(kept.nonterminals, kept.nonterminals.sort().values)


@pytest.mark.parametrize(("symbols", "shapes"), [(255, 109), (256, 14), (1000, 14), (4096, 14), (16384, 14)])
def test_while_the_rate_falls_numbers_of_symbols_stay(symbols, shapes):
    section = families.section_of("sn_pcfg").model_validate(
        {"family": "sn_pcfg", "nonterminals": symbols, "state_dropout": 0.4, "state_dropout_until": 0.5}
    )
    drawn = [families.family_of(section).dropout(section, seed=0, step=step, total_steps=400) for step in range(400)]
    kept = [None if one.kept is None else tuple(len(numbers) for numbers in one.kept) for one in drawn]
    last = kept.index(None)
    assert set(kept[last:]) == {None}
    assert 190 <= last <= 200
    assert kept[:last] == sorted(kept[:last])
    assert len(set(kept)) == shapes
    for step, numbers in enumerate(kept[:last]):
        for size, number in zip((symbols, 2 * symbols), numbers, strict=True):
            assert number / size == pytest.approx(1.0 - 0.4 * (1.0 - step / 200), abs=0.02 + 8 / size)


@pytest.mark.parametrize("kept", [None, Kept(torch.tensor([0, 3]), torch.tensor([1, 2, 6]))], ids=["all", "dropout"])
def test_gradients_gathered_on_the_grammar_equal_plain_autograd(kept):
    """Three micro-batches, one backward pass of the networks."""
    model = make_model()
    batches = [(torch.tensor([1, 4, 4, 0]), [3, 1]), (torch.tensor([7]), [1]), (torch.tensor([2, 3, 5]), [3])]
    grammar = model(Computation(dropout=Dropout(kept)))
    leaves = grammar.detached()
    for words, lengths in batches:
        (-leaves.log_likelihood(words, lengths, precision="fp64").sum() / 4).backward()
    backward_through(grammar, leaves).backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    plain = model(Computation(dropout=Dropout(kept)))
    (-sum(plain.log_likelihood(*batch, precision="fp64").sum() for batch in batches) / 4).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-10, atol=1e-14, msg=name)


def test_gradients_of_bf16_rules_are_gathered_in_fp32(monkeypatch):
    """Sixteen micro-batches, each of whose gradients bf16 would round away beside the sum of the others."""
    model = make_model().float()
    batches = [(torch.tensor([number % V, 4, 0]), [3]) for number in range(16)]
    gradients = {}
    for rules, precision in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        model.zero_grad()
        monkeypatch.setattr(sn_pcfg, "rules_type", lambda precision, nonterminals, rules=rules: rules)
        grammar = model()
        leaves = grammar.detached()
        assert leaves.left.dtype == rules
        for words, lengths in batches:
            (-leaves.log_likelihood(words, lengths, precision=precision).sum()).backward()
        assert leaves.left.grad.dtype == leaves.right.grad.dtype == torch.float32
        backward_through(grammar, leaves).backward()
        gradients[precision] = [parameter.grad.clone() for parameter in model.parameters()]
    for narrow, wide in zip(gradients["bf16"], gradients["fp32"], strict=True):
        assert (narrow - wide).norm() <= 8e-2 * wide.norm()  # the root's is small, and a chart of bf16 is noisy


@pytest.mark.parametrize("parameterization", ["paper", "released", "bounded"])
def test_networks_in_bf16(parameterization):
    """Tables are bf16 inside, weights and their gradients fp32; rules have the type that the chart wants."""
    options = {"parameterization": parameterization, "rotated_children": True, "seed": 2}
    sizes = {"nonterminals": 20, "preterminals": 40, "words": 50, "dimension": 48}
    model = SimplePCFG(**sizes, **options, symbol_deviation=0.3, word_deviation=0.3)
    grammar, wide = model(Computation("bf16")), copy.deepcopy(model).double()()
    assert grammar.left.dtype == grammar.emission.features.dtype == torch.float32
    torch.testing.assert_close(grammar.left.sum(1), torch.ones(20))
    assert torch.equal(grammar.emission.features, grammar.emission.features.bfloat16().float())
    for ours, truth in zip(grammar.tensors, wide.tensors, strict=True):
        assert (ours.double() - truth).norm() <= 2e-2 * truth.norm()
    words, lengths = torch.arange(24) % 50, [9, 8, 7]
    gradients = {}
    for name, made, precision in (("ours", model, "bf16"), ("truth", copy.deepcopy(model).double(), "fp32")):
        leaves = (graph := made(Computation(precision))).detached()
        (-leaves.log_likelihood(words, lengths, precision="fp64").sum()).backward()
        backward_through(graph, leaves).backward()
        gradients[name] = {key: weight.grad for key, weight in made.named_parameters()}
    for key, ours in gradients["ours"].items():
        assert ours.dtype == torch.float32
        assert (ours.double() - gradients["truth"][key]).norm() <= 0.15 * gradients["truth"][key].norm(), key
        if key.endswith(("weight", "bias")):
            assert (ours != ours.bfloat16().float()).any(), f"{key}: rounded to bf16"


def test_bf16_rules_without_detaching_are_refused(monkeypatch):
    """Their gradients would be lost without a word."""
    model = make_model().float()
    monkeypatch.setattr(sn_pcfg, "rules_type", lambda precision, nonterminals: torch.bfloat16)
    grammar = model()
    with pytest.raises(RuntimeError, match=r"use detached\(\)"):
        grammar.log_likelihood(torch.tensor([1, 2]), [2], precision="bf16")
    with torch.no_grad():
        assert grammar.log_likelihood(torch.tensor([1, 2]), [2], precision="bf16").isfinite().all()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_words_of_a_preterminal_sum_to_one_in_every_precision(precision):
    """Large logits: rounded for the normalisers alone, the probabilities would sum to 0.9 or 1.1."""
    generator = torch.Generator().manual_seed(0)
    features, embeddings = (torch.randn(rows, 64, generator=generator) * 1.5 for rows in (P, 50))
    emission = Emission.of(features, embeddings, precision)
    totals = emission.log_probabilities(torch.arange(50)).logsumexp(0)
    torch.testing.assert_close(totals, torch.zeros(P), rtol=0, atol=1e-4)


def test_columns_are_computed_for_distinct_words_alone(monkeypatch):
    emission = make_model()().emission
    sizes = []
    multiply = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: sizes.append(len(a)) or multiply(a, b))
    columns = emission.log_probabilities(torch.tensor([4, 1, 4, 4, 1]))
    assert columns.shape == (5, P)
    assert sizes == [2]
    assert torch.equal(columns[0], columns[2])


def test_no_data_on_a_rank_gives_zero_gradients_and_not_none():
    model = make_model()
    grammar = model()
    backward_through(grammar, grammar.detached()).backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_roots_and_one_word_sentences():
    word = torch.tensor([3])
    over_all, over_nonterminals = (make_model(root_over=where)() for where in ("all", "nonterminals"))
    assert over_all.log_likelihood(word, [1]).isfinite().all()
    assert over_nonterminals.log_likelihood(word, [1]).item() == -math.inf
    paper = over_all.with_root_over_nonterminals()
    assert paper.root.shape == (N,)
    assert paper.root.sum().item() == pytest.approx(1)
    torch.testing.assert_close(paper.root / paper.root[0], over_all.root[:N] / over_all.root[0])


def test_emission_entropies():
    emission = make_model()().emission
    table = emission.log_probabilities(torch.arange(V))  # [V, P]
    torch.testing.assert_close(emission.entropies(rows=3), -(table.exp() * table).sum(0))


# ---- the mass of all strings ----------------------------------------------------------------------------------------


def grammar_with_stop(stop: float, seed: int = 0) -> Grammar:
    """One word type. Each child is a preterminal with probability `stop`: the spectral radius is 2 (1 - stop)."""
    rules = random_rules(N, P, seed=seed)
    n = rules.nonterminals

    def reweighted(children):
        nonterminals, preterminals = children[:, :n], children[:, n:]
        return torch.cat((
            (1 - stop) * nonterminals / nonterminals.sum(1, keepdim=True),
            stop * preterminals / preterminals.sum(1, keepdim=True),
        ), dim=1)  # fmt: skip

    emission = Emission(torch.ones(P, 1), torch.zeros(1, 1), torch.zeros(P))
    return Grammar(rules.root, reweighted(rules.left), reweighted(rules.right), emission)


def mass_by_length(grammar: Grammar, longest: int) -> torch.Tensor:
    """With one word type, the probability of all strings of length n is the inside probability of that one string."""
    lengths = list(range(1, longest + 1))
    return flash_inside.inside(grammar.rules, torch.zeros(sum(lengths), P).double(), lengths, "fp64").exp()


@pytest.mark.parametrize("stop", [0.9, 0.7, 0.62])
def test_a_subcritical_grammar_gives_all_its_mass_to_finite_strings(stop):
    grammar = grammar_with_stop(stop)
    mass = mass_by_length(grammar, 70)
    assert mass.sum().item() <= 1 + 1e-12
    assert mass.sum().item() == pytest.approx(1, abs=1e-3)
    assert analysis.spectral_radius(grammar.rules) == pytest.approx(2 * (1 - stop), rel=1e-6)
    assert analysis.finite_mass(grammar.rules) == pytest.approx(1, abs=1e-9)
    mean = (mass * torch.arange(1, 71)).sum().item()
    assert analysis.expected_length(grammar.rules) == pytest.approx(mean, rel=5e-2)
    assert mean <= analysis.expected_length(grammar.rules)


@pytest.mark.parametrize("stop", [0.4, 0.2])
def test_a_supercritical_grammar_loses_mass(stop):
    grammar = grammar_with_stop(stop)
    total = mass_by_length(grammar, 70).sum().item()
    assert total < 1 - 1e-2
    assert analysis.spectral_radius(grammar.rules) > 1
    assert analysis.finite_mass(grammar.rules) == pytest.approx(total, abs=1e-3)
    assert math.isinf(analysis.expected_length(grammar.rules))
    mass = mass_by_length(grammar, 70)
    mean = (mass * torch.arange(1, 71)).sum().item() / total
    assert analysis.expected_length(analysis.conditioned_on_ending(grammar.rules)) == pytest.approx(mean, rel=5e-2)


def test_spectral_radius_is_the_largest_eigenvalue():
    rules = random_rules(20, 9, seed=8, spread=3.0)
    grammar = Grammar(*rules, Emission(torch.ones(9, 1), torch.zeros(1, 1), torch.zeros(9)))
    exact = torch.linalg.eigvals(rules.left[:, :20] + rules.right[:, :20]).abs().max().item()
    assert analysis.spectral_radius(grammar.rules) == pytest.approx(exact, rel=1e-6)


def test_a_chain_of_symbols_is_no_trouble():
    """A defective matrix, on which power iteration would still be at 1.03 after a thousand rounds."""
    n = 64
    children = torch.zeros(n, n + P, dtype=torch.float64)
    children[:, n:] = 0.1 / P
    children[range(n), range(n)] = 0.45
    children[range(n - 1), range(1, n)] = 0.45
    children[:, n:] += (1 - children.sum(1, keepdim=True)) / P
    root = torch.full((n,), 1 / n, dtype=torch.float64)
    grammar = Grammar(root, children, children, Emission(torch.ones(P, 1), torch.zeros(1, 1), torch.zeros(P)))
    assert analysis.spectral_radius(grammar.rules) == pytest.approx(0.9, abs=1e-2)
    assert math.isfinite(analysis.expected_length(grammar.rules))


def test_summary_is_finite():
    assert all(math.isfinite(value) for value in make_model()().describe(thorough=True).values())
    no_nonterminal_children = grammar_with_stop(1.0)
    assert all(math.isfinite(value) for value in no_nonterminal_children.describe().values())


def test_logits_too_large_for_fp32_are_computed_in_fp64_when_no_gradient_is_wanted():
    generator = torch.Generator().manual_seed(0)
    features, embeddings = torch.randn(5, 64, generator=generator), torch.randn(40, 64, generator=generator)
    features[2] *= 3e6
    with torch.no_grad():
        emission = Emission.of(features, embeddings)
        ordinary = Emission.of(features[3:], embeddings)
    assert emission.widened
    assert not ordinary.widened
    log_p = emission.log_probabilities(torch.arange(40))
    assert log_p.dtype == torch.float32
    torch.testing.assert_close(log_p.double().exp().sum(0), torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-5)
    rows = emission.log_probabilities_of(torch.arange(5))
    torch.testing.assert_close(rows, log_p.T, rtol=1e-6, atol=1e-6)
    assert "unstable" in (emission.warning or "")
    rules = torch.ones(3).softmax(0), torch.ones(3, 8).softmax(1), torch.ones(3, 8).softmax(1)
    assert Grammar(*rules, emission).detached().emission.widened
    with torch.no_grad():
        opposite = Emission.of(torch.eye(200), -2000.0 * torch.ones(9, 200))  # a bound of 28,000, but logits of 2,000
    assert not opposite.widened
    assert ordinary.warning is None
    trained = Emission.of(features.requires_grad_(), embeddings)
    assert not trained.widened  # a step does not wait for the device to tell
