"""Peaked grammars, long sentences, impossible sentences: never NaN, -inf only where it is the truth."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flash_inside
from flash_inside import (
    ResidentRules,
    Rules,
    recomputation,
    reference,
    scaled,
    span_limits,
    trees,
)
from flash_inside.dense import plan
from flash_inside.dense import scaled as dense_scaled
from flash_inside.precision import (
    TOLERANCE,
    TOLERANCE_OF_NORMALIZERS,
    TOLERANCE_OF_TREES,
    finite,
    full_matmul_precision,
    largest_gradient,
    product_precision,
    upcast,
)
from grammars import raising, random_emissions, random_rules, right_branching, rules_that_lose_a_row


def run(rules, emissions, lengths, precision, backend, statistics=None):
    inputs = [tensor.clone().requires_grad_() for tensor in (*rules, emissions)]
    log_z = flash_inside.inside(Rules(*inputs[:3]), inputs[3], lengths, precision, backend, statistics)
    log_z.sum().backward()
    return log_z.detach().double(), [tensor.grad for tensor in inputs]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("spread", [10.0, 30.0])
def test_peaked_grammars_equal_fp64_log_space_on_the_same_tensors(spread, precision):
    """1,000 random sentences. Without recomputation about a third of those at 30 would be -inf, wrong or infinite."""
    statistics = flash_inside.Statistics()
    generator = torch.Generator().manual_seed(int(spread))
    storage = torch.bfloat16 if precision == "bf16" else torch.float32
    tolerance = {"fp32": 1e-6, "bf16": 1e-3}[precision]  # 16 symbols: rounding errors of bf16 hardly average out
    n, p = 16, 32
    for batch in range(20):
        rules = Rules(*(t.to(storage).float() for t in random_rules(n, p, spread=spread, seed=batch)))
        lengths = torch.randint(1, 11, (50,), generator=generator).tolist()
        words = torch.randn(sum(lengths), p, generator=generator, dtype=torch.float64) * spread
        emissions = words.log_softmax(-1).float()
        ours, gradients = run(rules, emissions, lengths, precision, "torch", statistics)
        truth = flash_inside.inside(
            Rules(*(t.double() for t in rules)), emissions.double(), lengths, "fp64", "reference"
        )
        assert not ours.isnan().any()
        assert torch.equal(ours.isinf(), truth.isinf())
        possible = ~truth.isinf()
        allowed = tolerance * torch.maximum(truth.abs(), torch.tensor(lengths, dtype=torch.float64))
        assert ((ours - truth).abs() <= allowed)[possible].all()
        assert all(gradient.isfinite().all() for gradient in gradients)
    assert statistics.sentences == 1000
    if spread == 10.0:
        assert statistics.recomputed <= 10  # rare: recomputation is not the normal path
    else:
        assert statistics.recomputed > 0


def test_gradients_of_recomputed_sentences_equal_the_reference():
    lengths, n, p = [7, 9, 8, 5, 9, 8], 16, 32
    checked = 0
    for seed in range(12):
        # fp32 probabilities of at least 1e-30, so that no derivative count / p overflows fp32
        rules = Rules(*(t.clamp(min=1e-30).float() for t in random_rules(n, p, spread=30.0, seed=seed)))
        emissions = random_emissions(sum(lengths), p, spread=30.0, seed=seed, dtype=torch.float32)
        statistics = flash_inside.Statistics()
        _, ours = run(rules, emissions, lengths, "fp32", "torch", statistics)
        wide = Rules(*(t.double() for t in rules))
        _, truth = run(wide, emissions.double(), lengths, "fp64", "reference")
        for probability, got, want in zip((*wide, torch.ones(())), ours, truth, strict=True):
            assert ((got - want) * probability).norm() <= 1e-5 * (want * probability).norm()
        checked += statistics.recomputed
    assert checked > 0


@pytest.fixture(scope="module")
def two_hundred_words():
    rules = random_rules(4, 8, seed=2)
    emissions = random_emissions(200 + 3, 8, seed=2) - 20  # log Z about -4,500
    return rules, emissions, flash_inside.inside(rules, emissions, [200, 3], "fp64", "reference")


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_two_hundred_words(two_hundred_words, precision):
    rules, emissions, truth = two_hundred_words
    ours, gradients = run(rules, emissions, [200, 3], precision, "torch")
    torch.testing.assert_close(ours, truth, rtol=1e-3 if precision == "bf16" else 1e-6, atol=0)
    assert all(gradient.isfinite().all() for gradient in gradients)
    posterior_sums = [
        table.sum().item() for table in flash_inside.span_marginals(rules, emissions, [200, 3], precision)
    ]
    assert posterior_sums == pytest.approx([399, 5], rel=2e-2 if precision == "bf16" else 1e-4)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_impossible_sentences_have_minus_infinity_and_a_zero_gradient(precision, backend):
    rules = random_rules(4, 5, root="nonterminals")
    lengths = [3, 1, 4]  # the one-word sentence is impossible: a nonterminal never emits
    emissions = random_emissions(8, 5)
    emissions[5] = float("-inf")  # no preterminal emits this word of the last sentence
    log_z, gradients = run(rules, emissions, lengths, precision, backend)
    assert log_z.isinf().tolist() == [False, True, True]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[3][3:].any()
    tables = flash_inside.span_marginals(rules, emissions, lengths, precision, backend)
    assert [table.sum().item() for table in tables] == pytest.approx([5, 0, 0], abs=1e-5)
    alone, only = run(rules, emissions[3:4], [1], precision, backend)
    assert alone.isinf().all()
    assert not any(gradient.any() for gradient in only)


def test_a_word_whose_likely_tag_is_lost_is_computed_again():
    """The tag that explains it has a root of 1e-60, the other e^-120: 1e-52, which fp32 cannot hold."""
    root = torch.tensor([0.0, 1e-60, 1.0], dtype=torch.float64)
    words, statistics = torch.tensor([[0.0, -120.0], [0.0, 0.0]]), flash_inside.Statistics()
    side = torch.full((1, 3), 1 / 3)
    found = flash_inside.inside(Rules(root, side, side), words, [1, 1], statistics=statistics)
    assert found.tolist() == pytest.approx([-120.0, 0.0])
    assert statistics == flash_inside.Statistics(sentences=2, recomputed=1)


@pytest.mark.parametrize("before", [True, False])
def test_sums_of_products_are_full_precision_meanwhile(before):
    settings = torch.backends.cuda.matmul
    earlier = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = before
    try:
        for name, products in (("fp32", "ieee"), ("bf16", "ieee"), ("tf32", "tf32")):
            with full_matmul_precision(name):
                assert not settings.allow_bf16_reduced_precision_reduction
                assert settings.fp32_precision == products
            assert settings.allow_bf16_reduced_precision_reduction == before
    finally:
        settings.allow_bf16_reduced_precision_reduction = earlier


def test_limits_of_formats_and_blocks_are_sensible():
    """Tolerances are small shares. Blocks are a few hundred megabytes at most, and not one row at a time."""
    shares = [*TOLERANCE.values(), *TOLERANCE_OF_NORMALIZERS.values()]
    assert all(0 < share <= 0.2 for share in [TOLERANCE_OF_TREES, *sum(shares, ())])
    blocks = (
        scaled.chart.LARGEST_BLOCK,
        dense_scaled.LARGEST_BLOCK,
        trees.LARGEST_BLOCK,
        reference._LogMatmul.LARGEST_BLOCK,
    )
    for size in (*blocks, scaled.chart.MOST_SPLITS_KEPT, plan.MOST_SPLITS_KEPT):
        assert 1 << 20 <= size <= 1 << 26


def test_a_second_derivative_through_a_wider_type_is_refused():
    tensor = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad((upcast(tensor) ** 2).sum(), tensor, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_rows_that_are_converted_alone_have_their_gradient_at_their_place():
    tensor, index = torch.arange(6.0).view(3, 2).requires_grad_(), torch.tensor([2, 0])
    for given, kind in ((tensor, torch.float64), (tensor.double(), torch.float64)):
        found = upcast(given, index)
        assert (found.dtype, found.tolist()) == (kind, [[4, 5], [0, 1]])
    found = upcast(tensor, index)
    weights = torch.tensor([[1e300, 2], [3, -1e300]], dtype=torch.float64)
    (gradient,) = torch.autograd.grad((found * weights).sum(), tensor)
    limit = largest_gradient(torch.float32)
    assert gradient.tolist() == [[3, -limit], [0, 0], [limit, 2]]


def test_only_gradients_of_a_wider_type_are_clamped():
    most = {dtype: torch.finfo(dtype).max for dtype in (torch.float64, torch.float32, torch.bfloat16)}
    for own, largest in most.items():
        given = torch.tensor([largest, -largest, 1.5], dtype=own)
        assert torch.equal(finite(given, own), given)
        for narrow, limit in most.items():
            found = finite(given, narrow)
            assert found.dtype == narrow
            if limit < largest:
                assert found.tolist() == [limit / 64, -limit / 64, 1.5]
                assert largest_gradient(narrow) == limit / 64


def test_a_span_without_a_tree_is_not_taken_for_a_lost_one():
    lengths, statistics = [4, 1, 6, 2], flash_inside.Statistics()
    rules, emissions = right_branching(3, 4, lengths)
    ours, gradients = run(rules, emissions, lengths, "fp64", "torch", statistics)
    truth, wanted = run(rules, emissions, lengths, "fp64", "reference")
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=0)
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    assert statistics == flash_inside.Statistics(sentences=4)
    limits = np.concatenate([span_limits([(length - 2, length)] if length > 2 else [], length) for length in lengths])
    within = flash_inside.inside(rules, emissions, lengths, "fp64", "torch", statistics, limits)
    torch.testing.assert_close(within, truth, rtol=1e-12, atol=0)
    assert statistics == flash_inside.Statistics(sentences=8)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_a_root_that_all_but_forbids_one_word_sentences(precision):
    """S -> T with 1e-60 in all: fp64 holds that, and nothing needs to be recomputed."""
    rules = random_rules(4, 5, seed=6)
    root = torch.cat((rules.root[:4], rules.root[4:] * 1e-60))
    rules = Rules(root / root.sum(), rules.left.float(), rules.right.float())
    lengths, emissions = [1, 3, 1], random_emissions(5, 5, seed=6, dtype=torch.float32)
    statistics = flash_inside.Statistics()
    ours, gradients = run(rules, emissions, lengths, precision, "torch", statistics)
    truth, wanted = run(Rules(*(t.double() for t in rules)), emissions.double(), lengths, "fp64", "reference")
    torch.testing.assert_close(ours, truth, rtol=1e-3 if precision == "bf16" else 1e-6, atol=0)
    assert statistics.recomputed == 0
    for probability, got, want in zip((*rules, torch.ones(())), gradients, wanted, strict=True):
        allowed = 2.5e-2 if precision == "bf16" else 1e-5
        assert ((got - want) * probability).norm() <= allowed * (want * probability).norm()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_row_that_underflows_as_a_whole_is_noticed(precision):
    rules, emissions = rules_that_lose_a_row(1e-25, 1e-20, 1e-15, 1e-20)
    statistics = flash_inside.Statistics()
    ours, _ = run(rules, emissions, [3], precision, "torch", statistics)
    truth = flash_inside.inside(Rules(*(t.double() for t in rules)), emissions.double(), [3], "fp64", "reference")
    torch.testing.assert_close(ours, truth, rtol=1e-6, atol=0)
    assert statistics.recomputed == 1


def test_fp64_on_fp32_tensors_has_finite_gradients():
    for seed in range(10):
        rules = random_rules(8, 16, spread=60.0, seed=seed, dtype=torch.float32)
        emissions = random_emissions(12, 16, spread=60.0, seed=seed, dtype=torch.float32)
        _, gradients = run(rules, emissions, [5, 7], "fp64", "torch")
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_process_wide_settings_change_nothing():
    rules, emissions = random_rules(4, 5, dtype=torch.float32), random_emissions(6, 5, dtype=torch.float32)
    plain = flash_inside.inside(rules, emissions, [6])
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    try:
        settings.fp32_precision = "tf32"
        assert torch.equal(flash_inside.inside(rules, emissions, [6]), plain)
        assert settings.fp32_precision == "tf32"
    finally:
        settings.fp32_precision = before
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(flash_inside.inside(rules, emissions, [6]), plain)


def test_the_lowest_finite_emission_is_no_nan():
    rules, emissions = random_rules(4, 5, dtype=torch.float32), random_emissions(6, 5, dtype=torch.float32)
    emissions[0, 0] = torch.finfo(torch.float32).min
    for backend in ("torch", "reference"):
        assert flash_inside.inside(rules, emissions, [6], "fp32", backend).isfinite().all()


def test_impossible_through_zero_rules():
    """No rule leads anywhere but to preterminals, so three words have no tree: the truth is -inf, by recomputing."""
    n, p = 2, 3
    pair = torch.cat((torch.zeros(n, n), torch.full((n, p), 1 / p)), dim=1)
    rules = Rules(torch.full((n,), 0.5), pair, pair)
    emissions = random_emissions(5, p, dtype=torch.float32)
    statistics = flash_inside.Statistics()
    log_z, gradients = run(rules, emissions, [3, 2], "fp32", "torch", statistics)
    assert log_z.isinf().tolist() == [True, False]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert statistics.recomputed == 1
    assert statistics.recomputed_in_log_space == 1


def test_an_impossible_sentence_beside_tiny_rules_leaves_the_others_their_gradients():
    """A row divided by 1e-40 has coefficients that fp32 does not hold, and infinity times no derivative is NaN."""
    left = torch.tensor([[0.0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 1e-20]])
    right = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 1e-20]])
    emissions = torch.tensor([-1.0, -1.0, float("-inf"), -1.0, -1.0])[:, None]
    for precision in ("fp32", "tf32", "bf16"):
        log_z, gradients = run(Rules(torch.full((3,), 1 / 3), left, right), emissions, [3, 2], precision, "torch")
        assert log_z.isinf().tolist() == [True, False]
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert gradients[3].flatten().tolist() == pytest.approx([0, 0, 0, 1, 1])


def test_range_beyond_fp64_is_computed_in_log_space():
    """Needed components of 1e-400: only log space holds them."""
    rules = random_rules(3, 3, seed=4)
    emissions = torch.zeros(4, 3, dtype=torch.float64)
    for word in range(4):  # each word all but forbids every preterminal except one, by a factor exp(-900)
        emissions[word] = -900.0
        emissions[word, word % 3] = 0.0
    blocked = Rules(rules.root, rules.left.clone(), rules.right.clone())
    blocked.left[:, 3 + 0] = 0.0  # ... and the first word's only cheap preterminal cannot be a left child
    statistics = flash_inside.Statistics()
    log_z, gradients = run(blocked, emissions, [4], "fp64", "torch", statistics)
    truth = flash_inside.inside(blocked, emissions, [4], "fp64", "reference")
    torch.testing.assert_close(log_z, truth, rtol=1e-12, atol=0)
    assert truth.item() < -800
    assert statistics.recomputed_in_log_space == 1
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("flush", [True, False])
def test_a_sum_that_underflows_before_its_division_is_noticed(flush):
    """Numbers below 1e-38 are zero, as the commands have it (7 decades less than in the other tests), or denormal, as a
    caller of the library may have it: then they are there, with few digits."""
    torch.set_flush_denormal(flush)  # the fixture in conftest.py sets it back
    smallest = 1.2e-38 if flush else 0.0
    generator = torch.Generator().manual_seed(30)
    for batch in range(3):
        rules = Rules(
            *(torch.where(t < smallest, 0.0, t.float()) for t in random_rules(16, 32, spread=30.0, seed=batch))
        )
        denormal = (rules.left > 0) & (rules.left < 1.2e-38)
        assert denormal.any().item() == (not flush)
        lengths = torch.randint(1, 11, (50,), generator=generator).tolist()
        words = torch.randn(sum(lengths), 32, generator=generator, dtype=torch.float64) * 30.0
        emissions = words.log_softmax(-1).float()
        ours = flash_inside.inside(rules, emissions, lengths, "fp32", "torch").double()
        wide = Rules(*(t.double() for t in rules))
        truth = flash_inside.inside(wide, emissions.double(), lengths, "fp64", "reference")
        assert torch.equal(ours.isinf(), truth.isinf())
        possible = ~truth.isinf()
        allowed = 1e-6 * torch.maximum(truth.abs(), torch.tensor(lengths, dtype=torch.float64))
        assert ((ours - truth).abs() <= allowed)[possible].all()
        tables = flash_inside.span_marginals(rules, emissions, lengths, "fp32", "torch")
        true_tables = flash_inside.span_marginals(wide, emissions.double(), lengths, "fp64", "reference")
        for table, true_table in zip(tables, true_tables, strict=True):
            torch.testing.assert_close(table.double(), true_table, rtol=0, atol=2e-5)


def test_recomputed_sentences_give_bf16_rules_fp32_gradients():
    rules = [t.to(torch.bfloat16).requires_grad_() for t in random_rules(16, 32, spread=30.0, seed=3)]
    for tensor in rules:
        tensor.grad_dtype = torch.float32
    lengths = [9] * 20
    emissions = random_emissions(180, 32, spread=30.0, seed=3, dtype=torch.float32)
    statistics = flash_inside.Statistics()
    flash_inside.inside(Rules(*rules), emissions, lengths, "fp32", "torch", statistics).sum().backward()
    assert statistics.recomputed > 0
    for tensor in rules[1:]:
        assert tensor.grad.dtype == torch.float32
        assert (tensor.grad != tensor.grad.to(torch.bfloat16).float()).any()


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("spoilt", ["root", "left", "right", "emissions"])
def test_nan_is_neither_a_figure_nor_impossible(spoilt, backend):
    """A sentence of two words needs no rule of nonterminal children; one of three does."""
    rules, emissions = random_rules(3, 4), random_emissions(5, 4)
    tensors = {**rules._asdict(), "emissions": emissions}
    tensors[spoilt].view(-1)[-1 if spoilt == "emissions" else 0] = float("nan")  # the last word is of the second
    precision = "fp64" if backend == "reference" else "fp32"
    log_z, gradients = run(rules, emissions, [2, 3], precision, backend)
    assert log_z.isnan().tolist() == [spoilt == "root", True]
    assert not all(gradient.isfinite().all() for gradient in gradients)
    with pytest.raises(ValueError, match="NaN"):
        flash_inside.viterbi(rules, emissions, [2, 3], backend=backend)


def test_memory_for_gradients_has_the_shape_of_the_rules():
    memory = torch.empty(3, 4), torch.empty(3, 4)
    with pytest.raises(ValueError, match=r"gradient_memory must be two tensors \[3, 7\]"):
        flash_inside.inside_unchecked(ResidentRules(*random_rules(3, 4), memory), random_emissions(5, 4), [2, 3])


def test_one_word_sentences_are_recomputed_apart_from_the_others():
    assert recomputation.one_word_and_others([0, 1, 2, 4], [1, 2, 1, 9, 3]) == [[0, 2], [1, 4]]
    assert recomputation.one_word_and_others([1, 3], [1, 2, 1, 9]) == [[1, 3]]


def test_a_gradient_of_one_side_is_one_to_add_to():
    root, *sides = random_rules(3, 4)
    rules = ResidentRules(root, *(side.requires_grad_() for side in sides), (torch.empty(3, 7), torch.empty(3, 7)))
    assert not rules.have_gradients
    for side in (rules.left, rules.right):
        side.grad = torch.zeros_like(side)
        assert rules.have_gradients
        side.grad = None


def test_products_of_an_unknown_precision_are_refused():
    with pytest.raises(ValueError, match="unknown precision 'fp16'"):
        product_precision("fp16")


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_what_left_the_range_is_not_trusted_unless_it_is_computed_again(backend):
    rules = random_rules(16, 32, spread=30.0, seed=3, dtype=torch.float32)
    emissions = random_emissions(180, 32, spread=30.0, seed=3, dtype=torch.float32)
    _, trusted = flash_inside.inside_unchecked(rules, emissions, [9] * 20, "fp32", backend)
    assert (trusted.shape, trusted.dtype) == ((20,), torch.bool)
    assert trusted.all() == (backend == "reference")
    nothing = flash_inside.inside_unchecked(rules, emissions[:0], [], "fp32", backend)
    assert [len(part) for part in nothing] == [0, 0]


@pytest.mark.parametrize("root", ["all", "nonterminals"])
def test_what_is_impossible_by_itself_is_no_reason_to_compute_again(root):
    """A word that no symbol has, and a single word where no root has one."""
    rules, emissions, statistics = random_rules(3, 4, root=root), random_emissions(6, 4), flash_inside.Statistics()
    emissions[3] = float("-inf")
    log_z = flash_inside.inside(rules, emissions, [2, 3, 1], "fp32", "torch", statistics)
    assert log_z.isinf().tolist() == [False, True, root == "nonterminals"]
    assert statistics == flash_inside.Statistics(sentences=3)


def test_a_single_word_is_computed_again_without_the_rules(monkeypatch):
    """To convert those of a large grammar to fp64 would take gigabytes."""
    monkeypatch.setattr(reference, "one_word_inside", raising("one word"))
    root, left, right = random_rules(2, 3, dtype=torch.float32)
    emissions = torch.tensor([[0.0, -120.0, -120.0]])
    root[2] = 0.0  # so that the likely tag has no part
    with pytest.raises(NotImplementedError, match="one word"):
        flash_inside.inside(Rules(root, left, right), emissions, [1], "fp32", "torch")


def test_posteriors_that_leave_fp32_are_computed_in_fp64_first(monkeypatch):
    """The readable version is for what leaves fp64, too: it is far slower."""
    monkeypatch.setattr(reference, "span_marginals", raising("log space"))
    rules = random_rules(16, 32, spread=30.0, seed=3, dtype=torch.float32)
    emissions = random_emissions(180, 32, spread=30.0, seed=3, dtype=torch.float32)
    statistics = flash_inside.Statistics()
    flash_inside.span_marginals(rules, emissions, [9] * 20, "fp32", "torch", statistics)
    assert statistics.recomputed > 0
    assert statistics.recomputed_in_log_space == 0
