"""PCFGs with rules over pairs of children: against enumeration, simple PCFGs and log space."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import flash_inside
from flash_inside import Rules, Statistics, dense, devices
from flash_inside.dense import PairRules, differentiable, interface, plan, reference, scaled, tables
from flash_inside.packing import SplitRows
from flash_inside.precision import largest_gradient
from grammars import bracketings, crosses, raising, random_emissions, random_rules, right_branching
from test_brackets import packed_limits, some_brackets

BACKENDS = ["torch", "reference"]
LENGTHS = [3, 1, 5, 2, 4, 5]


def pair_rules(n, p, *, root="all", spread=1.0, seed=0, dtype=torch.float64) -> PairRules:
    """Softmax of normal logits over all pairs: left and right children depend on each other."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, (n + p) ** 2, dtype=torch.float64, generator=generator) * spread
    roots = torch.randn(n + p if root == "all" else n, dtype=torch.float64, generator=generator) * spread
    return PairRules(roots.softmax(0), logits.softmax(1).view(n, n + p, n + p).to(dtype))


def paired(rules: Rules) -> PairRules:
    """T = left x right."""
    return PairRules(rules.root, rules.left[:, :, None] * rules.right[:, None, :])


def enumerated(rules: PairRules, emissions, brackets=()) -> tuple[float, np.ndarray]:
    """Probability of a sentence and the posterior of every span, from a list of all labelled trees."""
    root, pairs, words = rules.root.numpy(), rules.pairs.numpy(), emissions.exp().numpy()
    n, p, length = rules.nonterminals, rules.preterminals, len(words)
    mass = np.zeros((length + 1, length + 1))
    if length == 1:
        mass[0, 1] = sum(root[n + tag] * words[0, tag] for tag in range(p)) if len(root) > n else 0.0
    for tree in bracketings(0, length) if length > 1 else ():
        inner = [parent for parent, _, _ in tree]
        spans = [*inner, *((i, i + 1) for i in range(length))]
        if any(crosses(span, bracket) for span in spans for bracket in brackets):
            continue
        for labels in itertools.product(*([range(n)] * len(inner) + [range(n, n + p)] * length)):
            label = dict(zip(spans, labels, strict=True))
            probability = root[label[0, length]]
            for parent, left, right in tree:
                probability *= pairs[label[parent], label[left], label[right]]
            for i in range(length):
                probability *= words[i, label[i, i + 1] - n]
            for i, j in spans:
                mass[i, j] += probability
    total = mass[0, length]
    return total, mass / total if total else mass


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("root", ["all", "nonterminals"])
def test_equals_enumeration_of_all_labelled_trees(root, backend):
    rules, emissions = pair_rules(2, 2, root=root, spread=2.0), random_emissions(sum(LENGTHS), 2)
    brackets = [some_brackets(length, seed) for seed, length in enumerate(LENGTHS)]
    limits, statistics = packed_limits(brackets, LENGTHS), Statistics()
    log_z = dense.inside(rules, emissions, LENGTHS, "fp64", backend, statistics)
    within = dense.inside(rules, emissions, LENGTHS, "fp64", backend, statistics, limits)
    tables = dense.span_marginals(rules, emissions, LENGTHS, "fp64", backend, statistics)
    assert statistics == Statistics(sentences=3 * len(LENGTHS))  # none was computed again in log space
    for b, words in enumerate(emissions.split(LENGTHS)):
        total, spans = enumerated(rules, words)
        assert log_z[b].exp().item() == pytest.approx(total, rel=1e-12)
        np.testing.assert_allclose(tables[b].numpy(), spans, atol=1e-12)
        assert within[b].exp().item() == pytest.approx(enumerated(rules, words, brackets[b])[0], rel=1e-12)
    assert (log_z[1] == float("-inf")) == (root == "nonterminals")


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_simple_pcfg_where_rules_factor(backend):
    lengths = [9, 1, 4, 12, 2]
    rules, emissions = random_rules(4, 5, seed=3), random_emissions(sum(lengths), 5)
    simple = [tensor.clone().requires_grad_() for tensor in (*rules, emissions)]
    factors = [tensor.clone().requires_grad_() for tensor in (*rules, emissions)]
    expected = flash_inside.inside(Rules(*simple[:3]), simple[3], lengths, "fp64")
    found = dense.inside(paired(Rules(*factors[:3])), factors[3], lengths, "fp64", backend)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    for log_z in (expected, found):
        (log_z * weights).sum().backward()
    for one, other in zip(simple, factors, strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-10, atol=1e-14)
    for one, other in zip(
        flash_inside.span_marginals(rules, emissions, lengths, "fp64"),
        dense.span_marginals(paired(rules), emissions, lengths, "fp64", backend), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(other, one, rtol=0, atol=1e-12)
    for one, other in zip(
        flash_inside.last_siblings(rules, emissions, lengths), dense.last_siblings(paired(rules), emissions, lengths),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(other, one, rtol=0, atol=1e-12)


def test_spans_that_end_in_a_word_alone():
    """The second table of posteriors, of every span, by both ways; its last column is `last_siblings`."""
    rules, emissions = pair_rules(3, 4, spread=2.0), random_emissions(sum(LENGTHS), 4)
    ways = [interface._posteriors(rules, emissions, LENGTHS, "fp64", backend, None) for backend in BACKENDS]
    for (_, ours), (spans, truth) in zip(*ways, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-14)
        assert (truth <= spans + 1e-12).all()
    assert ways[1][2][1][0, 2] == pytest.approx(ways[1][2][0][0, 2])  # of two words: always


@pytest.mark.parametrize("within", [False, True], ids=["free", "bracketed"])
def test_a_span_without_a_tree_is_not_taken_for_a_lost_one(within):
    lengths = [4, 1, 6, 2]
    rules, emissions = right_branching(3, 4, lengths)
    limits = packed_limits([[(length - 2, length)] if length > 2 else [] for length in lengths], lengths)
    truth = flash_inside.inside(rules, emissions, lengths, "fp64", "reference")
    statistics = Statistics()
    found = dense.inside(paired(rules), emissions, lengths, "fp64", "torch", statistics, limits if within else None)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=0)
    assert statistics == Statistics(sentences=4)


@pytest.mark.parametrize("root", ["all", "nonterminals"])
def test_gradients(root):
    lengths = [4, 1, 3, 2] if root == "all" else [4, 3, 2]
    limits = packed_limits([[(1, 3)], *([[]] * (len(lengths) - 1))], lengths)
    inputs = [*pair_rules(2, 3, root=root), random_emissions(sum(lengths), 3)]
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    for of_brackets in (None, limits):
        assert torch.autograd.gradcheck(
            lambda root, pairs, words, own=of_brackets: dense.inside(
                PairRules(root, pairs), words, lengths, "fp64", limits=own
            ),
            inputs,
            fast_mode=of_brackets is not None,
        )


def test_a_batch_of_one_word_sentences():
    inputs = [tensor.clone().requires_grad_() for tensor in (*pair_rules(2, 3), random_emissions(3, 3))]
    results = []
    for backend in BACKENDS:
        log_z = dense.inside(PairRules(*inputs[:2]), inputs[2], [1, 1, 1], "fp64", backend)
        results.append([log_z.detach(), *torch.autograd.grad(log_z.sum(), inputs)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_blocks_of_spans_change_nothing(monkeypatch):
    lengths = [7, 3, 1, 6]
    rules, emissions = pair_rules(3, 4), random_emissions(sum(lengths), 4)

    def results():
        inputs = [tensor.clone().requires_grad_() for tensor in (*rules, emissions)]
        log_z = dense.inside(PairRules(*inputs[:2]), inputs[2], lengths, "fp64")
        return [log_z, *torch.autograd.grad(log_z.sum(), inputs)]

    whole = results()
    monkeypatch.setattr(scaled, "LARGEST_BLOCK", 32)
    monkeypatch.setattr(plan, "MOST_SPLITS_KEPT", 10)
    monkeypatch.setattr(plan, "MOST_BYTES", 0)  # no plan is kept
    plan.clear()
    steps, blocks = {}, SplitRows.blocks
    monkeypatch.setattr(SplitRows, "blocks", lambda *given: steps.update([given[1:]]) or blocks(*given))
    for one, other in zip(whole, results(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert steps == {2: 2, 3: 2, 4: 2, 5: 2, 6: 1, 7: 1}  # 32 // (4 x the larger of 4 and the number of splits)


@pytest.mark.parametrize("spread", [10.0, 30.0, 300.0])
def test_extreme_rules_equal_log_space(spread):
    """Those that leave fp32 are computed again, and of those of spread 300 some leave fp64, too."""
    statistics, n, p = Statistics(), 4, 6
    for seed in range(4):
        rules = pair_rules(n, p, spread=spread, seed=seed, dtype=torch.float32)
        lengths = [7, 1, 4, 10, 2, 5, 8, 3]
        emissions = random_emissions(sum(lengths), p, spread=spread, seed=seed, dtype=torch.float32)
        inputs = [tensor.clone().requires_grad_() for tensor in (*rules, emissions)]
        found = dense.inside(PairRules(*inputs[:2]), inputs[2], lengths, "fp32", statistics=statistics)
        wide = [tensor.double().clone().requires_grad_() for tensor in (*rules, emissions)]
        truth = dense.inside(PairRules(*wide[:2]), wide[2], lengths, "fp64", "reference")
        assert torch.equal(found.isinf(), truth.isinf())
        there = truth.isfinite()
        torch.testing.assert_close(found[there].double(), truth[there], rtol=1e-6, atol=1e-5)
        found[there].sum().backward()
        truth[there].sum().backward()
        # Expected counts: the derivatives by logarithms, where that by a probability of 1e-40 is not too large for fp32
        for one, other in zip(inputs[:2], wide[:2], strict=True):
            held = other.grad < largest_gradient(torch.float32) / 8
            counts, true_counts = ((t.grad.double() * t.detach().double())[held] for t in (one, other))
            assert (counts - true_counts).norm() <= 1e-5 * true_counts.norm() + 1e-12
        torch.testing.assert_close(inputs[2].grad.double(), wide[2].grad, rtol=0, atol=1e-5)
        tables = dense.span_marginals(rules, emissions, lengths)
        wide_rules = PairRules(*(tensor.double() for tensor in rules))
        wide_tables = dense.span_marginals(wide_rules, emissions.double(), lengths, "fp64", "torch")
        true_tables = dense.span_marginals(wide_rules, emissions.double(), lengths, "fp64", "reference")
        for table, wide_table, spans in zip(tables, wide_tables, true_tables, strict=True):
            torch.testing.assert_close(table.double(), spans, rtol=0, atol=1e-5)
            torch.testing.assert_close(wide_table, spans, rtol=0, atol=1e-9)
    assert statistics.sentences == 32
    assert (statistics.recomputed > 0) == (spread > 10)
    assert (statistics.recomputed_in_log_space > 0) == (spread > 100)


def test_a_row_that_is_lost_as_a_whole_is_noticed():
    """Three words, two trees. The better one has words 0 and 1 as a span, whose only value is 1e-50: 0 in fp32.

    The other tree survives, and no derivative tells.
    """
    n, p = 3, 5
    pairs, root = torch.zeros(n, n + p, n + p), torch.zeros(n, dtype=torch.float64)
    root[0] = 1.0
    pairs[0, 1, n + 2], pairs[1, n + 0, n + 1] = 0.5, 1e-20
    pairs[0, n + 3, 2], pairs[2, n + 4, n + 2] = 1e-27, 1e-24
    words = torch.full((3, p), float("-inf"))
    words[0, 3] = words[1, 4] = words[2, 2] = 0.0
    words[0, 0] = words[1, 1] = math.log(1e-15)
    statistics = Statistics()
    found = dense.inside(PairRules(root, pairs), words, [3], statistics=statistics)
    assert found.item() == pytest.approx(math.log(0.5e-50 + 1e-51), rel=1e-6)
    assert statistics.recomputed == 1
    assert not dense.inside_unchecked(PairRules(root, pairs), words, [3])[1].any()


def test_a_word_whose_likely_tag_is_lost_is_computed_again():
    """The tag that explains it has a root of 1e-60, the other e^-120: 1e-52, which fp32 cannot hold."""
    root, statistics = torch.tensor([0.0, 1e-60, 1.0], dtype=torch.float64), Statistics()
    rules, words = PairRules(root, torch.full((1, 3, 3), 1 / 9)), torch.tensor([[0.0, -120.0], [0.0, 0.0]])
    assert dense.inside(rules, words, [1, 1], statistics=statistics).tolist() == pytest.approx([-120.0, 0.0])
    assert statistics == Statistics(sentences=2, recomputed=1)
    assert dense.inside_unchecked(rules, words, [1, 1])[1].tolist() == [False, True]


def test_grammars_of_some_sentences():
    one = pair_rules(2, 3)
    assert one.of_sentences([1]) is one.of_sentence(1) is one
    many = PairRules(*(torch.stack((tensor, 2 * tensor, 3 * tensor)) for tensor in one))
    assert torch.equal(many.of_sentences([2, 0]).pairs, torch.stack((3 * one.pairs, one.pairs)))
    assert torch.equal(many.of_sentence(1).root, 2 * one.root)


def test_impossible_sentences_and_nan():
    rules, emissions = pair_rules(2, 3), random_emissions(7, 3)
    emissions[1] = float("-inf")
    inputs = [tensor.clone().requires_grad_() for tensor in (*rules, emissions)]
    statistics = Statistics()
    log_z = dense.inside(PairRules(*inputs[:2]), inputs[2], [3, 4], statistics=statistics)
    assert log_z[0] == float("-inf")
    assert statistics.recomputed == 0
    gradients = torch.autograd.grad(log_z.sum(), inputs)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[2][:3].any()
    broken = rules.pairs.clone()
    broken[0, 0, 0] = math.nan
    assert dense.inside(PairRules(rules.root, broken), emissions, [3, 4])[1].isnan()
    assert dense.inside(rules, emissions[:0], []).shape == (0,)


def test_what_cannot_be_meant_is_refused():
    rules, emissions = pair_rules(2, 3), random_emissions(7, 3)
    for arguments, message in (
        ((rules, emissions[:, :2], [7]), r"emissions must be \[7, 3\]"),
        ((PairRules(rules.root, rules.pairs[:, :, :3]), emissions, [7]), r"pairs \[N, N\+P, N\+P\]"),
        ((PairRules(rules.root[:2], torch.ones(2, 2, 2)), emissions[:, :0], [7]), r"root must be \[N\] or \[N\+P\]"),
        ((PairRules(rules.root[:0], torch.ones(0, 3, 3)), emissions, [7]), r"root must be \[N\] or \[N\+P\]"),
        ((PairRules(rules.root[:3], rules.pairs), emissions, [7]), r"root must be \[N\] or \[N\+P\]"),
        ((PairRules(rules.root[:3], rules.pairs[:, :, :3]), emissions[:, :1], [7]), r"not \[3\] and \[2, 5, 3\]"),
        ((PairRules(rules.root[None], rules.pairs), emissions, [7]), r"not \[1, 5\] and \[2, 5, 5\]"),
        ((PairRules(rules.root[None], rules.pairs.expand(2, -1, -1, -1)), emissions, [3, 4]), r"not \[1, 5\] and"),
        ((PairRules(rules.root[None], rules.pairs[None]), emissions, [3, 4]), "1 grammars for 2 sentences"),
        ((PairRules(rules.root, rules.pairs.to("meta")), emissions, [7]), r"not on \['cpu', 'meta'\]"),
        ((rules, emissions, [7], "fp16"), "unknown precision 'fp16'"),
        ((rules, emissions, [7], "fp32", "triton"), "no dense inside algorithm"),
        ((rules, emissions, [7], "bf16", "reference"), "fp64 or fp32"),
    ):
        with pytest.raises(ValueError, match=message):
            dense.inside(*arguments)


@pytest.mark.parametrize("function", [dense.inside, dense.inside_unchecked, dense.span_marginals])
def test_the_backend_that_was_asked_for_computes(function, monkeypatch):
    rules, emissions = pair_rules(2, 3), random_emissions(3, 3)
    for module, names, backend in (
        (reference, ("inside", "posteriors"), "reference"),
        (differentiable, ("inside",), "torch"),
    ):
        for name in names:
            monkeypatch.setattr(module, name, raising(backend))
    for backend in BACKENDS:
        with pytest.raises(NotImplementedError, match=backend):
            function(rules, emissions, [3], "fp64", backend)


@pytest.mark.parametrize("function", [dense.inside, dense.inside_unchecked, dense.span_marginals])
def test_a_chart_that_does_not_fit_is_not_begun(function, monkeypatch):
    monkeypatch.setattr(devices, "memory_of", lambda device=None: devices.chart_memory([6], 2, "fp32"))
    rules, emissions = pair_rules(2, 3), random_emissions(7, 3)
    function(rules, emissions[:6], [6])
    with pytest.raises(MemoryError, match="are needed, and there are"):
        function(rules, emissions, [7])


def test_a_second_derivative_is_refused():
    rules, emissions = pair_rules(2, 3), random_emissions(3, 3).requires_grad_()
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    log_z = dense.inside(rules, emissions, [3], "fp64")
    (gradient,) = torch.autograd.grad((weight * log_z).sum(), emissions, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_span_that_brackets_forbid_is_not_lost():
    """Four words, of which the last two are no span; a bracket around words 1 and 2 forbids words 0 and 1."""
    n, p = 4, 5
    pairs, root = torch.zeros(n, n + p, n + p), torch.tensor([1.0, 0.0, 0.0, 0.0])
    pairs[0, 3, n + 4] = pairs[3, 1, n + 2] = pairs[1, n + 0, n + 1] = pairs[3, n + 0, 2] = pairs[2, n + 1, n + 2] = 0.1
    words = torch.full((4, p), float("-inf"))
    words[0, 0] = words[1, 1] = words[2, 2] = words[3, 4] = 0.0
    for brackets, log_z in (([], math.log(2e-3)), ([(1, 3)], math.log(1e-3))):
        statistics = Statistics()
        limits = packed_limits([brackets], [4])
        found = dense.inside(PairRules(root, pairs), words, [4], "fp64", "torch", statistics, limits)
        assert found.item() == pytest.approx(log_z, rel=1e-6)
        assert statistics == Statistics(sentences=1)


@pytest.mark.parametrize("per_sentence", [False, True])
def test_tables_in_memory_that_is_kept_are_the_same(per_sentence):
    """CUDA graphs keep it; sentences are sorted there as well."""
    pairs, batch = pair_rules(2, 3).pairs, plan.plan_of([2, 5, 3], torch.device("cpu"))
    if per_sentence:
        pairs = torch.stack((pairs, 2 * pairs, 3 * pairs))
    new = tables.PairTables.cut(pairs, batch, torch.float64)
    memory = {kind: torch.empty_like(table) for kind, table in new.of.items()}
    kept = tables.PairTables.cut(pairs, batch, torch.float64, memory)
    for kind, table in new.of.items():
        assert kept.of[kind] is memory[kind]
        assert torch.equal(memory[kind], table)


def test_a_single_word_is_computed_again_without_the_rules(monkeypatch):
    """To convert those of a large grammar to fp64 would take gigabytes."""
    monkeypatch.setattr(interface, "one_word_inside", raising("one word"))
    rules = PairRules(torch.tensor([0.0, 0.0, 1.0]), torch.full((1, 3, 3), 1 / 9))
    with pytest.raises(NotImplementedError, match="one word"):
        dense.inside(rules, torch.tensor([[0.0, -120.0]]), [1])
