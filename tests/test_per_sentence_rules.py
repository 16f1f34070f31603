"""One grammar per sentence: a batch gives what each sentence gives alone with its rules, on every path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flash_inside
from flash_inside import Rules, Statistics, dense, recomputation
from flash_inside.dense import PairRules
from flash_inside.dense import scaled as dense_scaled
from flash_inside.devices import chunks_of_sentences, sentence_memory
from flash_inside.packing import Layout, Padding
from flash_inside.precision import TOLERANCE
from flash_inside.scaled import chart as scaled
from grammars import enumerate_trees, random_emissions, random_rules, rules_that_lose_a_row, score_of
from test_brackets import packed_limits, some_brackets
from test_dense import enumerated, pair_rules

LENGTHS = [3, 1, 5, 2, 4, 5, 1, 3]


def of_all(rules_of_each):
    """Stack grammars: the tensors of each, with a leading dimension."""
    return type(rules_of_each[0])(*map(torch.stack, zip(*rules_of_each, strict=True)))


def gradients_of(function, inputs, weights):
    """Return the values of a function of some tensors, and the gradients of their weighted sum."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    values = function(*leaves)
    return [values.detach(), *torch.autograd.grad((values * weights.to(values)).sum(), leaves)]


def test_runs_are_the_rows_of_a_width():
    layout = Layout([4, 7, 7, 2, 4, 1, 4])
    for width in range(1, 8):
        rows, here = torch.arange(layout.rows)[layout.span_rows(width)], layout.span_rows(width)
        sentence, _ = layout.spans(width)
        for start in range(here.start, here.stop):
            block = slice(start, min(start + 5, here.stop))
            met = []
            for run in layout.runs(width, block):
                own = run.of(rows[block.start - here.start : block.stop - here.start])
                for b, rows_of_sentence in zip(range(run.sentences.start, run.sentences.stop), own, strict=True):
                    assert (sentence[rows_of_sentence - here.start] == b).all()
                    met += rows_of_sentence.tolist()
            assert met == list(range(block.start, block.stop))
    assert len(layout.runs(1)) == 4
    assert len(Layout([5] * 9).runs(3)) == 1


def test_padded_rows_go_there_and_back():
    layout = Layout([4, 7, 7, 2, 4, 1, 4])
    for width in range(1, 8):
        here = layout.span_rows(width)
        sentence, _ = layout.spans(width)
        for start in (here.start, here.start + 3, here.stop - 1):
            runs = layout.runs(width, slice(start, here.stop))
            if not runs:
                continue
            sentences, each, there, back = Padding.of(runs)
            rows = np.arange(here.stop - start)
            assert (rows[there][back] == rows).all()
            numbers = np.repeat(np.arange(sentences.start, sentences.stop), each)
            assert (sentence[start - here.start :][there] == numbers).all()


def test_rows_by_sentence():
    layout = Layout([4, 7, 7, 2, 4, 1, 4])
    order, runs = layout.by_sentence()
    sentence = layout.sentence_of_rows()
    assert sorted(order) == sorted({*range(layout.words, layout.rows)} - {*layout.tops()})
    for run in runs:
        for b, rows in zip(
            range(run.sentences.start, run.sentences.stop), run.of(torch.from_numpy(order)), strict=True
        ):
            assert (sentence[rows] == b).all()
            assert len(rows) == layout.lengths[b] * (layout.lengths[b] - 1) // 2 - 1


# ---- simple rules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("root", ["all", "nonterminals"])
def test_equals_enumeration(root, backend):
    each = [random_rules(3, 4, root=root, spread=2.0, seed=b) for b in range(len(LENGTHS))]
    rules, emissions = of_all(each), random_emissions(sum(LENGTHS), 4)
    brackets = [some_brackets(length, seed) for seed, length in enumerate(LENGTHS)]
    log_z = flash_inside.inside(rules, emissions, LENGTHS, "fp64", backend)
    within = flash_inside.inside(rules, emissions, LENGTHS, "fp64", backend, limits=packed_limits(brackets, LENGTHS))
    tables = flash_inside.span_marginals(rules, emissions, LENGTHS, "fp64", backend)
    for b, words in enumerate(emissions.split(LENGTHS)):
        total, spans = enumerate_trees(each[b], words)
        assert log_z[b].exp().item() == pytest.approx(total, rel=1e-12)
        torch.testing.assert_close(tables[b], torch.from_numpy(spans), rtol=0, atol=1e-12)
        assert within[b].exp().item() == pytest.approx(enumerate_trees(each[b], words, brackets[b])[0], rel=1e-12)


def inside(lengths, precision="fp64", backend="torch", **options):
    """The inside algorithm as a function of tensors."""
    return lambda root, left, right, words: flash_inside.inside(
        Rules(root, left, right), words, lengths, precision, backend, **options
    )


@pytest.mark.parametrize("lengths", [[7, 1, 4, 9, 4, 1, 7], [6] * 4, [1, 1, 1], [2, 2, 3]], ids=str)
@pytest.mark.parametrize("root", ["all", "nonterminals"])
def test_equals_each_sentence_alone(lengths, root, monkeypatch):
    monkeypatch.setattr(scaled, "LARGEST_BLOCK", 50)
    each = [random_rules(4, 5, root=root, seed=b) for b in range(len(lengths))]
    rules, emissions = of_all(each), random_emissions(sum(lengths), 5)
    weights = torch.arange(1.0, len(lengths) + 1)
    impossible = [root == "nonterminals" and length == 1 for length in lengths]
    weights[impossible] = 0.0
    found = gradients_of(lambda *t: inside(lengths)(*t).nan_to_num(neginf=0.0), [*rules, emissions], weights)
    log_z = flash_inside.inside(rules, emissions, lengths, "fp64")
    spans = flash_inside.span_marginals(rules, emissions, lengths, "fp64")
    siblings = flash_inside.last_siblings(rules, emissions, lengths)
    best = flash_inside.viterbi(rules, emissions, lengths, "fp64", "torch")
    drawn = flash_inside.sample_trees(rules, emissions, lengths, 3)
    d_words = found[4].split(lengths)
    for b, words in enumerate(emissions.split(lengths)):
        length, own = [len(words)], each[b]
        assert (log_z[b] == float("-inf")) == impossible[b]
        alone = gradients_of(lambda *t: inside([len(t[3])])(*t).nan_to_num(neginf=0.0), [*own, words], weights[b])
        of_batch = (found[0][b : b + 1], *(found[number][b] for number in (1, 2, 3)), d_words[b])
        for one, other in zip(of_batch, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(spans[b], flash_inside.span_marginals(own, words, length, "fp64")[0])
        torch.testing.assert_close(siblings[b], flash_inside.last_siblings(own, words, length)[0])
        assert best[b] == flash_inside.viterbi(own, words, length, "fp64", "torch")[0]
        assert best[b][1] == flash_inside.viterbi(own, words, length, "fp64", "reference")[0][1]
        assert len(drawn[b]) == (0 if impossible[b] else 3)
        for score, tree in drawn[b]:
            assert score == pytest.approx(score_of(own, words, tree))


def test_copies_of_one_grammar_are_that_grammar():
    rules, emissions = random_rules(4, 5), random_emissions(sum(LENGTHS), 5)
    copies, weights = of_all([rules] * len(LENGTHS)), torch.arange(1.0, len(LENGTHS) + 1)
    one = gradients_of(inside(LENGTHS), [*rules, emissions], weights)
    each = gradients_of(inside(LENGTHS), [*copies, emissions], weights)
    for number, (shared, own) in enumerate(zip(one, each, strict=True)):
        torch.testing.assert_close(own.sum(0) if 1 <= number <= 3 else own, shared, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("root", ["all", "nonterminals"])
def test_gradients(root):
    lengths = [3, 1, 3] if root == "all" else [3, 2, 3]
    rules = of_all([random_rules(2, 2, root=root, seed=b) for b in range(len(lengths))])
    inputs = [tensor.clone().requires_grad_() for tensor in (*rules, random_emissions(sum(lengths), 2))]
    for limits in (None, packed_limits([[(1, 3)], *([[]] * 2)], lengths)):
        assert torch.autograd.gradcheck(inside(lengths, limits=limits), inputs, fast_mode=limits is not None)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_leaves_the_range_is_recomputed_with_its_own_rules(precision, monkeypatch):
    """And only its rules are converted to fp64."""
    lengths = [7, 1, 4, 10, 2, 5, 6]
    spreads = [1.0, 30.0, 30.0, 1.0, 30.0, 300.0, 0.5]
    each = [random_rules(4, 6, spread=spread, seed=b, dtype=torch.float32) for b, spread in enumerate(spreads)]
    rules, emissions = of_all(each), random_emissions(sum(lengths), 6, spread=30.0, dtype=torch.float32)
    limits = packed_limits([some_brackets(length, seed) for seed, length in enumerate(lengths)], lengths)
    converted, upcast = [], recomputation.upcast
    monkeypatch.setattr(recomputation, "upcast", lambda *given: converted.append(upcast(*given)) or converted[-1])
    for own in (None, limits):
        converted.clear()
        statistics, weights = Statistics(), torch.ones(len(lengths))
        found = gradients_of(
            inside(lengths, precision, statistics=statistics, limits=own), [*rules, emissions], weights
        )
        wide = [tensor.double() for tensor in (*rules, emissions)]
        truth = gradients_of(inside(lengths, "fp64", "reference", limits=own), wide, weights)
        assert statistics.sentences == len(lengths)
        assert 0 < statistics.recomputed < len(lengths)
        assert max(len(tensor) for tensor in converted if tensor.dim() == 3) <= statistics.recomputed
        torch.testing.assert_close(found[0].double(), truth[0], rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(found[4].double(), truth[4], rtol=0, atol=1e-5)
        for number in (1, 2, 3):
            counts, true_counts = (gradient[number].double() * wide[number - 1] for gradient in (found, truth))
            torch.testing.assert_close(counts, true_counts, rtol=0, atol=1e-4)
    tables = flash_inside.span_marginals(rules, emissions, lengths, precision)
    true_tables = flash_inside.span_marginals(Rules(*wide[:3]), wide[3], lengths, "fp64", "reference")
    for table, spans in zip(tables, true_tables, strict=True):
        torch.testing.assert_close(table.double(), spans, rtol=0, atol=1e-5)


def test_the_recomputed_sentence_has_a_gradient_of_the_type_asked_for():
    """Of rules in bf16 in fp32: it does not pass through bf16."""
    lengths, spreads = [7, 4, 6], [1.0, 60.0, 0.5]
    each = [random_rules(4, 6, spread=spread, seed=b, dtype=torch.bfloat16) for b, spread in enumerate(spreads)]
    emissions = random_emissions(sum(lengths), 6, dtype=torch.float32)
    emissions[7:11] *= 30.0
    inputs = [tensor.requires_grad_() for tensor in of_all(each)]
    for tensor in inputs:
        tensor.grad_dtype = torch.float32
    statistics = Statistics()
    flash_inside.inside(Rules(*inputs), emissions, lengths, "fp32", "torch", statistics).sum().backward()
    assert statistics.recomputed == 1
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    flash_inside.inside(Rules(*wide), emissions.double(), lengths, "fp64").sum().backward()
    for one, other in zip(inputs, wide, strict=True):
        assert one.grad.dtype == torch.float32
        counts, true_counts = (tensor.grad.double() * tensor.detach().double() for tensor in (one, other))
        torch.testing.assert_close(counts, true_counts, rtol=0, atol=2e-6)


def test_unchecked_names_the_sentences_that_are_not_trusted():
    lengths, spreads = [7, 4, 6], [1.0, 60.0, 0.5]
    each = [random_rules(4, 6, spread=spread, seed=b, dtype=torch.float32) for b, spread in enumerate(spreads)]
    emissions = random_emissions(sum(lengths), 6, dtype=torch.float32)
    emissions[7:11] *= 30.0
    inputs = [tensor.clone().requires_grad_() for tensor in (*of_all(each), emissions)]
    log_z, trusted = flash_inside.inside_unchecked(Rules(*inputs[:3]), inputs[3], lengths)
    assert trusted.tolist() == [True, False, True]
    for gradient in torch.autograd.grad(log_z[trusted].sum(), inputs[:3]):
        assert gradient[0].any()
        assert gradient[2].any()
        assert not gradient[1].any()


def test_a_row_that_is_lost_as_a_whole_is_noticed():
    """In one of two grammars, the other of which has no zeros."""
    losing, words = rules_that_lose_a_row(1e-25, 1e-24, 1e-27, 1e-2)
    fine = random_rules(5, 3, dtype=torch.float32)
    rules, emissions = of_all([fine, losing, fine]), torch.cat((words, words, words[:2]))
    statistics = Statistics()
    found = flash_inside.inside(rules, emissions, [3, 3, 2], "fp32", "torch", statistics)
    wide = Rules(*(tensor.double() for tensor in rules))
    truth = flash_inside.inside(wide, emissions.double(), [3, 3, 2], "fp64", "reference")
    torch.testing.assert_close(found.double(), truth, rtol=1e-6, atol=0)
    assert statistics.recomputed == 1


def test_bf16_charts():
    """More nonterminals than get a chart in fp32, and no short sentence."""
    n, p, lengths = 264, 40, [18, 17, 18]
    rules = of_all([random_rules(n, p, seed=b, dtype=torch.bfloat16) for b in range(3)])
    emissions = random_emissions(sum(lengths), p, dtype=torch.float32)
    weights = torch.ones(3)
    found = gradients_of(inside(lengths, "bf16"), [*rules, emissions], weights)
    wide = [tensor.double() for tensor in (*rules, emissions)]
    truth = gradients_of(inside(lengths), wide, weights)
    torch.testing.assert_close(found[0].double(), truth[0], rtol=TOLERANCE["bf16"][0], atol=0)
    for value, one, other in zip((*wide[:3], torch.ones(())), found[1:], truth[1:], strict=True):
        assert ((one.double() - other) * value).norm() <= TOLERANCE["bf16"][1] * (other * value).norm()


def test_memory_is_planned_in_chunks_of_sentences():
    n, p, lengths = 2048, 4096, [40] * 16
    one = sentence_memory(40, n, p, "bf16")
    assert 2 * n * (n + p) * 2 * 2 < one < 2 * n * (n + p) * 2 * 6
    assert chunks_of_sentences(lengths, n, p, "bf16", 5.5 * one) == [
        slice(0, 5),
        slice(5, 10),
        slice(10, 15),
        slice(15, 16),
    ]
    assert chunks_of_sentences(lengths, n, p, "bf16", 0.0) == [slice(b, b + 1) for b in range(16)]
    assert chunks_of_sentences(lengths, n, p, "bf16", float("inf")) == [slice(0, 16)]
    assert chunks_of_sentences([], n, p, "bf16", one) == []


# ---- rules over pairs of children -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("root", ["all", "nonterminals"])
def test_dense_equals_enumeration(root, backend):
    each = [pair_rules(2, 2, root=root, spread=2.0, seed=b) for b in range(len(LENGTHS))]
    rules, emissions = of_all(each), random_emissions(sum(LENGTHS), 2)
    brackets = [some_brackets(length, seed) for seed, length in enumerate(LENGTHS)]
    log_z = dense.inside(rules, emissions, LENGTHS, "fp64", backend)
    within = dense.inside(rules, emissions, LENGTHS, "fp64", backend, limits=packed_limits(brackets, LENGTHS))
    tables = dense.span_marginals(rules, emissions, LENGTHS, "fp64", backend)
    for b, words in enumerate(emissions.split(LENGTHS)):
        total, spans = enumerated(each[b], words)
        assert log_z[b].exp().item() == pytest.approx(total, rel=1e-12)
        torch.testing.assert_close(tables[b], torch.from_numpy(spans), rtol=0, atol=1e-12)
        assert within[b].exp().item() == pytest.approx(enumerated(each[b], words, brackets[b])[0], rel=1e-12)


@pytest.mark.parametrize("lengths", [[7, 1, 4, 9, 4, 1, 7], [6] * 4, [1, 3]])
def test_dense_equals_each_sentence_alone(lengths, monkeypatch):
    monkeypatch.setattr(dense_scaled, "LARGEST_BLOCK", 200)  # blocks of spans end within sentences
    each = [pair_rules(3, 4, seed=b) for b in range(len(lengths))]
    rules, emissions = of_all(each), random_emissions(sum(lengths), 4)
    weights = torch.arange(1.0, len(lengths) + 1)
    found = gradients_of(
        lambda root, pairs, words: dense.inside(PairRules(root, pairs), words, lengths, "fp64"),
        [*rules, emissions], weights,
    )  # fmt: skip
    spans, siblings = dense.span_marginals(rules, emissions, lengths), dense.last_siblings(rules, emissions, lengths)
    d_words = found[3].split(lengths)
    for b, words in enumerate(emissions.split(lengths)):
        alone = gradients_of(
            lambda root, pairs, own: dense.inside(PairRules(root, pairs), own, [len(own)], "fp64"),
            [*each[b], words], weights[b],
        )  # fmt: skip
        for one, other in zip((found[0][b : b + 1], found[1][b], found[2][b], d_words[b]), alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(spans[b], dense.span_marginals(each[b], words, [len(words)])[0])
        torch.testing.assert_close(siblings[b], dense.last_siblings(each[b], words, [len(words)])[0])


def test_dense_gradients():
    lengths = [3, 1, 3]
    rules = of_all([pair_rules(2, 2, seed=b) for b in range(len(lengths))])
    inputs = [tensor.clone().requires_grad_() for tensor in (*rules, random_emissions(sum(lengths), 2))]
    assert torch.autograd.gradcheck(
        lambda root, pairs, words: dense.inside(PairRules(root, pairs), words, lengths, "fp64"), inputs
    )


def test_dense_recomputes_a_sentence_with_its_own_rules():
    lengths = [7, 1, 4, 10, 2, 5]
    spreads = [1.0, 30.0, 30.0, 1.0, 30.0, 300.0]
    rules = of_all([pair_rules(4, 6, spread=spread, seed=b, dtype=torch.float32) for b, spread in enumerate(spreads)])
    emissions = random_emissions(sum(lengths), 6, spread=30.0, dtype=torch.float32)
    statistics, weights = Statistics(), torch.ones(len(lengths))
    found = gradients_of(
        lambda root, pairs, words: dense.inside(PairRules(root, pairs), words, lengths, statistics=statistics),
        [*rules, emissions], weights,
    )  # fmt: skip
    truth = gradients_of(
        lambda root, pairs, words: dense.inside(PairRules(root, pairs), words, lengths, "fp64", "reference"),
        [tensor.double() for tensor in (*rules, emissions)], weights,
    )  # fmt: skip
    assert 0 < statistics.recomputed < len(lengths)
    torch.testing.assert_close(found[0].double(), truth[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found[3].double(), truth[3], rtol=0, atol=1e-5)
    counts, true_counts = found[2].double() * rules.pairs.double(), truth[2] * rules.pairs.double()
    torch.testing.assert_close(counts, true_counts, rtol=0, atol=1e-4)
    tables = dense.span_marginals(rules, emissions, lengths)
    wide = PairRules(*(tensor.double() for tensor in rules))
    true_tables = dense.span_marginals(wide, emissions.double(), lengths, "fp64", "reference")
    for table, spans in zip(tables, true_tables, strict=True):
        torch.testing.assert_close(table.double(), spans, rtol=0, atol=1e-5)


def test_dense_refuses_what_cannot_be_meant():
    rules, emissions = of_all([pair_rules(2, 3)] * 2), random_emissions(7, 3)
    for arguments, message in (
        ((rules, emissions, [7]), "2 grammars for 1 sentences"),
        ((PairRules(rules.root[0], rules.pairs), emissions, [3, 4]), r"or both with \[B, ...\]"),
    ):
        with pytest.raises(ValueError, match=message):
            dense.inside(*arguments)
    assert dense.inside(PairRules(rules.root[:0], rules.pairs[:0]), emissions[:0], []).shape == (0,)
