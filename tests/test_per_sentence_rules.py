"""One grammar per sentence: a batch gives what each sentence gives alone with its rules, on every path."""

from __future__ import annotations

import pytest
import torch

from flash_inside import Statistics, dense
from flash_inside.dense import PairRules, scaled
from flash_inside.packing import Layout
from grammars import random_emissions
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


def test_rows_by_sentence():
    layout = Layout([4, 7, 7, 2, 4, 1, 4])
    order, runs = layout.by_sentence()
    sentence = layout.sentence_of_rows()
    assert sorted(order) == list(range(layout.words, layout.rows))
    for run in runs:
        for b, rows in zip(
            range(run.sentences.start, run.sentences.stop), run.of(torch.from_numpy(order)), strict=True
        ):
            assert (sentence[rows] == b).all()
            assert len(rows) == layout.lengths[b] * (layout.lengths[b] - 1) // 2


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


@pytest.mark.parametrize("lengths", [[7, 1, 4, 9, 4, 1, 7], [6] * 4])
def test_dense_equals_each_sentence_alone(lengths, monkeypatch):
    monkeypatch.setattr(scaled, "LARGEST_BLOCK", 200)  # blocks of spans end within sentences
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
    lengths = [3, 1, 4, 3]
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
