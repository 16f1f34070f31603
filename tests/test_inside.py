"""The dynamic programmes against enumeration, an independent implementation, and finite differences."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flash_inside
from flash_inside import Rules, interface, recomputation, reference, trees
from flash_inside.packing import Layout, SplitRows, Squares
from flash_inside.precision import FORMATS, gradient_type, most_words_of_short, product, upcast
from flash_inside.scaled import chart as scaled
from grammars import enumerate_trees, raising, random_emissions, random_rules

BACKENDS = ["torch", "reference"]
sentence_lengths = st.lists(st.integers(1, 6), min_size=1, max_size=4)
sizes = st.tuples(st.integers(1, 3), st.integers(1, 3))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(lengths=sentence_lengths, size=sizes, root=st.sampled_from(["all", "nonterminals"]), seed=st.integers(0, 10**6))
def test_inside_and_marginals_equal_enumeration_of_all_trees(backend, lengths, size, root, seed):
    rules = random_rules(*size, root=root, spread=1.5, seed=seed)
    emissions = random_emissions(sum(lengths), size[1], seed=seed)
    log_z = flash_inside.inside(rules, emissions, lengths, "fp64", backend)
    marginals = flash_inside.span_marginals(rules, emissions, lengths, "fp64", backend)
    for b, words in enumerate(emissions.split(lengths)):
        total, posterior = enumerate_trees(rules, words)
        assert log_z[b].exp().item() == pytest.approx(total, rel=1e-12)
        np.testing.assert_allclose(marginals[b].numpy(), posterior, atol=1e-12)
        if total > 0:
            assert marginals[b].sum().item() == pytest.approx(2 * lengths[b] - 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_torch_struct_on_the_expanded_rules(backend):
    """torch-struct's SentCFG takes the whole rule tensor A -> B C: here the product of left and right."""
    torch_struct = pytest.importorskip("torch_struct")
    n, p, batch, length = 4, 5, 3, 7
    rules = random_rules(n, p, root="nonterminals", seed=3)
    emissions = random_emissions(batch * length, p, seed=3)
    expanded = (rules.left[:, :, None] * rules.right[:, None, :]).log()  # [N, N+P, N+P]
    peer = torch_struct.SentCFG(
        (
            emissions.view(batch, length, p),
            expanded.expand(batch, n, n + p, n + p),
            rules.root.log().expand(batch, n),
        ),
        lengths=torch.full((batch,), length),
    )
    log_z = flash_inside.inside(rules, emissions, [length] * batch, "fp64", backend)
    torch.testing.assert_close(log_z, peer.partition.flatten(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("root", ["all", "nonterminals"])
def test_gradcheck_in_every_input(backend, root):
    lengths = [3, 1, 5, 2] if root == "all" else [3, 5, 2]
    rules = random_rules(3, 4, root=root, seed=1)
    inputs = [tensor.requires_grad_() for tensor in (*rules, random_emissions(sum(lengths), 4, seed=1))]

    def log_z(root, left, right, emissions):
        return flash_inside.inside(Rules(root, left, right), emissions, lengths, "fp64", backend)

    assert torch.autograd.gradcheck(log_z, inputs)


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5), n=st.integers(1, 24), seed=st.integers(0, 10**6))
def test_torch_backend_equals_reference_with_every_gradient(lengths, n, seed):
    rules, emissions = random_rules(n, 2 * n, seed=seed), random_emissions(sum(lengths), 2 * n, seed=seed)
    weight = torch.randn(len(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    gradients = {}
    for backend in BACKENDS:
        inputs = [tensor.clone().requires_grad_() for tensor in (*rules, emissions)]
        log_z = flash_inside.inside(Rules(*inputs[:3]), inputs[3], lengths, "fp64", backend)
        gradients[backend] = (log_z, *torch.autograd.grad((log_z * weight).sum(), inputs))
    for ours, truth in zip(gradients["torch"], gradients["reference"], strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("precision", "log_z_tolerance", "gradient_tolerance"),
    [("fp64", 1e-14, 1e-12), ("fp32", 1e-6, 1e-5), ("tf32", 1e-4, 2e-3), ("bf16", 3e-4, 2.5e-2)],
)
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_accuracy_of_every_precision(precision, log_z_tolerance, gradient_tolerance, spread):
    """Against fp64 log space on the same rounded tensors; gradients as expected counts, relative in norm."""
    lengths = [2, 60, 31, 17, 2]
    storage = torch.bfloat16 if precision == "bf16" else torch.float32
    rules = Rules(*(t.to(storage).double() for t in random_rules(33, 65, spread=spread, seed=5)))
    emissions = random_emissions(sum(lengths), 65, spread=spread, seed=5).float().double()
    results = {}
    for name, backend in ((precision, "torch"), ("fp64", "reference")):
        inputs = [tensor.clone().requires_grad_() for tensor in (*rules, emissions)]
        log_z = flash_inside.inside(Rules(*inputs[:3]), inputs[3], lengths, name, backend)
        results[backend] = (log_z.detach().double(), torch.autograd.grad(log_z.sum(), inputs))
    (ours, our_gradients), (truth, true_gradients) = results["torch"], results["reference"]
    allowed = log_z_tolerance * torch.maximum(truth.abs(), torch.tensor(lengths, dtype=torch.float64))
    assert ((ours - truth).abs() <= allowed).all()
    for probability, got, want in zip((*rules, torch.ones(())), our_gradients, true_gradients, strict=True):
        assert ((got - want) * probability).norm() <= gradient_tolerance * (want * probability).norm()


def test_sentences_keep_the_callers_order_and_do_not_touch_each_other():
    lengths = [4, 9, 1, 9, 2]
    rules, emissions = random_rules(6, 7), random_emissions(sum(lengths), 7)
    together = flash_inside.inside(rules, emissions, torch.tensor(lengths), "fp64")
    alone = [flash_inside.inside(rules, words, [len(words)], "fp64") for words in emissions.split(lengths)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-14, atol=0)
    tables = flash_inside.span_marginals(rules, emissions, lengths, "fp64")
    assert [table.shape[0] - 1 for table in tables] == lengths


def test_one_grammar_per_sentence():
    lengths = [5, 1, 3]
    grammars = [random_rules(4, 5, seed=seed) for seed in range(3)]
    rules = Rules(*(torch.stack(tensors) for tensors in zip(*grammars, strict=True)))
    emissions = random_emissions(sum(lengths), 5)
    for backend in BACKENDS:
        log_z = flash_inside.inside(rules, emissions, lengths, "fp64", backend)
        tables = flash_inside.span_marginals(rules, emissions, lengths, "fp64", backend)
        for b, words in enumerate(emissions.split(lengths)):
            total, posterior = enumerate_trees(grammars[b], words)
            assert log_z[b].exp().item() == pytest.approx(total)
            np.testing.assert_allclose(tables[b].numpy(), posterior, atol=1e-12)


def test_two_backward_passes_are_bitwise_equal():
    lengths = [20, 7, 13]
    rules, emissions = random_rules(16, 32, dtype=torch.float32), random_emissions(40, 32, dtype=torch.float32)
    runs = []
    for _ in range(2):
        inputs = [tensor.clone().requires_grad_() for tensor in (*rules, emissions)]
        flash_inside.inside(Rules(*inputs[:3]), inputs[3], lengths).sum().backward()
        runs.append([tensor.grad for tensor in inputs])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_an_empty_batch_is_connected_to_the_graph():
    rules, emissions = random_rules(3, 4), torch.empty(0, 4, dtype=torch.float64, requires_grad=True)
    log_z = flash_inside.inside(rules, emissions, [], "fp64")
    assert log_z.shape == (0,)
    log_z.sum().backward()
    assert emissions.grad is not None


@pytest.mark.parametrize("largest_block", [1, 50])
def test_the_reference_does_not_depend_on_the_size_of_a_block(largest_block, monkeypatch):
    def log_z_and_gradients():
        rules, words = random_rules(3, 4), random_emissions(9, 4)
        inputs = [tensor.requires_grad_() for tensor in (*rules, words)]
        log_z = flash_inside.inside(Rules(*inputs[:3]), inputs[3], [4, 5], "fp64", "reference")
        return log_z.detach(), *torch.autograd.grad(log_z.sum(), inputs)

    whole = log_z_and_gradients()
    monkeypatch.setattr(reference._LogMatmul, "LARGEST_BLOCK", largest_block)
    for one, other in zip(whole, log_z_and_gradients(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("largest_block", [1, 50])
def test_the_torch_backend_does_not_depend_on_the_size_of_a_block(largest_block, monkeypatch):
    def log_z_and_gradients():
        rules, words = random_rules(3, 4), random_emissions(9, 4)
        inputs = [tensor.requires_grad_() for tensor in (*rules, words)]
        log_z = flash_inside.inside(Rules(*inputs[:3]), inputs[3], [4, 5], "fp64", "torch")
        return log_z.detach(), *torch.autograd.grad(log_z.sum(), inputs)

    whole = log_z_and_gradients()
    monkeypatch.setattr(scaled, "LARGEST_SQUARES", 0)
    monkeypatch.setattr(scaled, "LARGEST_BLOCK", largest_block)
    monkeypatch.setattr(scaled, "MOST_SPLITS_KEPT", largest_block)
    steps, blocks = {}, SplitRows.blocks
    monkeypatch.setattr(SplitRows, "blocks", lambda *given: steps.update([given[1:]]) or blocks(*given))
    for one, other in zip(whole, log_z_and_gradients(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert steps == {width: max(1, largest_block // (3 * splits)) for width, splits in ((2, 1), (3, 2), (4, 3), (5, 4))}


SQUARE_LENGTHS = [[7, 7, 7], [9, 4, 9, 1, 2, 8], [1], [2, 1]]


def log_z_and_gradients(lengths, dtype, precision, limits=None):
    rules, words = random_rules(5, 7, dtype=dtype), random_emissions(sum(lengths), 7, dtype=dtype)
    inputs = [tensor.requires_grad_() for tensor in (*rules, words)]
    log_z = flash_inside.inside(Rules(*inputs[:3]), inputs[3], lengths, precision, "torch", limits=limits)
    return log_z.detach(), *torch.autograd.grad(log_z.sum(), inputs)


@pytest.mark.parametrize("lengths", SQUARE_LENGTHS, ids=str)
@pytest.mark.parametrize("largest_block", [16 * 5, 1 << 22])
def test_squares_change_no_bit_of_small_grammars(lengths, largest_block, monkeypatch):
    """Blocks are of one sentence of some words, of several, or of all."""
    limits = np.concatenate([flash_inside.span_limits([(0, min(2, length))], length) for length in lengths])
    made, make = [], scaled.Squares.__init__
    monkeypatch.setattr(scaled.Squares, "__init__", lambda *given: made.append(given) or make(*given))
    monkeypatch.setattr(scaled, "LARGEST_BLOCK", largest_block)
    monkeypatch.setattr(scaled, "FEW_LENGTHS", 9)
    in_squares = [log_z_and_gradients(lengths, torch.float32, "fp32", given) for given in (None, limits)]
    assert len(made) == (0 if 5 * max(lengths) ** 2 // 4 > largest_block else 4 if lengths == [1] else 6)
    monkeypatch.setattr(scaled, "LARGEST_SQUARES", 0)
    made.clear()
    by_number = [log_z_and_gradients(lengths, torch.float32, "fp32", given) for given in (None, limits)]
    assert not made
    for one, other in zip(sum(in_squares, ()), sum(by_number, ()), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("lengths", SQUARE_LENGTHS, ids=str)
@pytest.mark.parametrize("largest_squares", [0, 1 << 26])
def test_the_order_of_sums_of_large_grammars(lengths, largest_squares, monkeypatch):
    """Above 64 nonterminals a CPU sums over splits in another order; here from the first one on."""
    as_ever = log_z_and_gradients(lengths, torch.float64, "fp64")
    monkeypatch.setattr(scaled, "LARGEST_AS_EVER", 0)
    monkeypatch.setattr(scaled, "LARGEST_SQUARES", largest_squares)
    if max(lengths) > 1:
        monkeypatch.setattr(torch, "bmm", raising("bmm"))
    for one, other in zip(as_ever, log_z_and_gradients(lengths, torch.float64, "fp64"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_bf16_begins_above_256_nonterminals_for_rules_and_chart_alike():
    """Up to there a chart is fp32, and rules rounded to bf16 would lose what it could use."""
    assert [flash_inside.rules_type("bf16", n) for n in (1, 256, 257)] == [None, None, torch.bfloat16]
    assert {flash_inside.rules_type(precision, 4096) for precision in ("fp64", "fp32", "tf32")} == {None}
    assert [in_bf16_as_in_fp32(n, 17) for n in (256, 257)] == [True, False]


def test_a_chart_of_bf16_begins_above_16_words():
    assert [in_bf16_as_in_fp32(257, words) for words in (16, 17)] == [True, False]
    assert [most_words_of_short(storage) for storage in (torch.bfloat16, torch.float32, torch.float64)] == [16, 0, 0]


def in_bf16_as_in_fp32(n, words):
    rules, emissions = random_rules(n, 3, dtype=torch.float32), random_emissions(words, 3, dtype=torch.float32)
    bf16, fp32 = (flash_inside.inside(rules, emissions, [words], precision) for precision in ("bf16", "fp32"))
    return torch.equal(bf16, fp32)


def test_the_type_of_the_result_follows_the_precision():
    rules, emissions = random_rules(3, 4), random_emissions(3, 4)
    for precision in flash_inside.PRECISIONS:
        want = torch.float64 if precision == "fp64" else torch.float32
        assert flash_inside.inside(rules, emissions, [3], precision).dtype == want


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [2, 0]}, "at least one word"),
        ({"lengths": [2, 2]}, r"emissions must be \[4, 4\]"),
        ({"lengths": torch.tensor([3.0])}, "vector of integers"),
        ({"lengths": 5}, "lengths must be integers, one a sentence"),
        ({"lengths": [float("nan")]}, "lengths must be integers, one a sentence"),
        ({"lengths": [2.5]}, "lengths must be integers, one a sentence"),
        ({"emissions": [[0.0] * 4] * 3}, "must be tensors of PyTorch"),
        ({"rules": Rules(torch.ones(3), torch.ones(7), torch.ones(7))}, r"left must be \[N, N\+P\] or"),
        ({"rules": Rules(torch.ones(()), torch.ones(3, 7), torch.ones(3, 7))}, r"root \[N\] or \[N\+P\]"),
        ({"precision": "fp16"}, "unknown precision 'fp16'"),
        ({"backend": "cuda"}, "backend 'cuda' is not available"),
        ({"backend": "reference", "precision": "bf16"}, "fp64 or fp32"),
        ({"rules": Rules(torch.ones(5), torch.ones(3, 7), torch.ones(3, 7))}, "root must end in 3 or 7"),
        ({"rules": Rules(torch.ones(3), torch.ones(3, 7), torch.ones(3, 6))}, "left and right"),
        ({"rules": Rules(torch.ones(3), torch.ones(3, 3), torch.ones(3, 3))}, "left and right"),  # no preterminals
        ({"rules": Rules(torch.ones(0), torch.ones(0, 4), torch.ones(0, 4))}, "left and right"),  # no nonterminals
        ({"rules": Rules(*(t.expand(2, *t.shape) for t in random_rules(3, 4)))}, "2 grammars for 1 sentences"),
        ({"emissions": torch.ones(3, 4, device="meta")}, r"on one device, not on \['cpu', 'meta'\]"),
        ({"backend": "triton"}, "needs CUDA tensors, not cpu"),
        ({"backend": "triton", "precision": "fp64"}, "in fp32, tf32 or bf16, not fp64"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_input_is_refused_in_one_line(change, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = {"rules": random_rules(3, 4), "emissions": random_emissions(3, 4), "lengths": [3]} | change
    with pytest.raises(ValueError, match=message):
        flash_inside.inside(**arguments)


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_the_packed_layout_gives_every_span_its_own_row(lengths):
    layout = Layout(lengths)
    assert layout.rows == sum(length * (length + 1) // 2 for length in lengths)
    for width in range(1, layout.longest + 1):
        sentence, position = layout.spans(width)
        rows = layout.offset[width] + layout.prefix[sentence] - sentence * (width - 1) + position
        assert rows.tolist() == list(range(layout.offset[width], layout.offset[width + 1]))
        left, right = layout.splits(width) if width > 1 else (np.empty(0), np.empty(0))
        assert len(np.unique(left)) == left.size
        assert len(np.unique(right)) == right.size


def test_rows_of_splits_are_kept_up_to_a_limit_and_are_the_same():
    layout = Layout([5, 3])
    made, splits = [], layout.splits
    layout.splits = lambda width, block: made.append(width) or splits(width, block)  # type: ignore[method-assign]

    def two_passes(most_kept):
        made.clear()
        rows = SplitRows(layout, torch.device("cpu"), most_kept)
        passes = [[list(rows.blocks(width, step=4)) for width in (2, 3)] for _ in range(2)]
        return passes, list(made)

    every_block, none_kept = two_passes(0)
    assert none_kept == [2, 2, 3] * 2  # 6 spans of two words are two blocks, 4 of three words one
    assert two_passes(5)[1] == none_kept
    assert two_passes(6)[1] == [2, 3, 3]
    kept, all_kept = two_passes(6 + 4 * 2)
    assert all_kept == [2, 3]
    for one, other in zip(every_block[1], kept[1], strict=True):
        for (here, left, right), (also_here, also_left, also_right) in zip(one, other, strict=True):
            assert here == also_here
            assert torch.equal(left, also_left)
            assert torch.equal(right, also_right)


@pytest.mark.parametrize("name", ["inside", "inside_unchecked", "span_marginals", "viterbi"])
def test_the_backend_that_was_asked_for_computes(name, monkeypatch):
    for own in ("inside", "span_marginals", "viterbi"):
        monkeypatch.setattr(reference, own, raising("reference"))
    for module, own in ((recomputation, "inside"), (recomputation, "span_marginals"), (interface, "first_pass")):
        monkeypatch.setattr(module, own, raising("torch"))
    monkeypatch.setattr(trees, "best_trees", raising("torch"))
    for backend in BACKENDS:
        with pytest.raises(NotImplementedError, match=backend):
            getattr(flash_inside, name)(random_rules(3, 4), random_emissions(3, 4), [3], "fp64", backend)


def test_a_second_derivative_is_refused():
    emissions, weight = random_emissions(3, 4).requires_grad_(), torch.ones(1, dtype=torch.float64, requires_grad=True)
    log_z = flash_inside.inside(random_rules(3, 4), emissions, [3], "fp64", "torch")
    (gradient,) = torch.autograd.grad((weight * log_z).sum(), emissions, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_the_readable_version_computes_in_the_type_that_is_asked_for():
    inputs = [tensor.requires_grad_() for tensor in (*random_rules(3, 4), random_emissions(3, 4))]
    for dtype in (torch.float32, torch.float64):
        assert reference.inside(Rules(*inputs[:3]), inputs[3], [3], dtype).dtype == dtype


def test_a_needed_rule_of_hardly_any_probability_has_a_finite_gradient_in_the_readable_version():
    rules, emissions = random_rules(2, 3, dtype=torch.float32), random_emissions(2, 3)
    rules.left.zero_()
    rules.left[:, 2] = 1e-42
    rules.left.requires_grad_()
    reference.inside(rules, emissions, [2]).backward()
    assert rules.left.grad.isfinite().all()
    assert rules.left.grad.max() > 1e30


def test_a_leaf_may_ask_for_wider_gradients():
    leaf = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    assert gradient_type(leaf) == gradient_type(2 * leaf) == torch.bfloat16
    leaf.grad_dtype = torch.float32
    assert gradient_type(leaf) == torch.float32
    leaf.grad_dtype = None  # any
    assert gradient_type(leaf) == torch.bfloat16


def test_a_product_on_a_gpu_is_one_call(monkeypatch):
    for name in ("mm", "bmm"):
        monkeypatch.setattr(torch, name, lambda a, b, out_dtype, name=name: (name, out_dtype))
    for dims, name in ((2, "mm"), (3, "bmm")):
        operand = SimpleNamespace(dtype=torch.bfloat16, is_cuda=True, dim=lambda dims=dims: dims)
        assert product(operand, operand, torch.float32) == (name, torch.float32)


def test_a_second_derivative_through_the_wider_type_is_refused():
    values = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad((upcast(values) ** 2).sum(), values, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(("n", "as_ever"), [(64, True), (65, False)])
def test_small_grammars_are_rounded_as_ever_up_to_64_nonterminals(n, as_ever):
    """Their runs are repeated bit for bit; squares take up to 256 MiB in fp32."""
    layout = Layout([2])
    weights = scaled.Weights.of(random_rules(n, 3), layout, FORMATS["fp64"])
    assert weights.of_children.is_contiguous() == (not as_ever)
    assert scaled.Chart(weights, random_emissions(2, 3), layout, FORMATS["fp64"]).as_ever == as_ever
    assert 4 * scaled.LARGEST_SQUARES == 256 << 20


def test_what_is_kept_on_a_gpu_is_given_back(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("cache"))
    monkeypatch.delitem(sys.modules, "flash_inside.triton.graphs", raising=False)
    flash_inside.free_memory()
    assert not done  # no call has used any
    graphs = SimpleNamespace(clear=lambda: done.append("graphs"))
    monkeypatch.setitem(sys.modules, "flash_inside.triton.graphs", graphs)
    flash_inside.free_memory()
    assert done == ["graphs", "cache"]


def test_statistics_begin_at_nothing_and_count_sentences():
    statistics = flash_inside.Statistics()
    assert statistics == flash_inside.Statistics(sentences=0, recomputed=0, recomputed_in_log_space=0)
    rules, emissions = random_rules(3, 4), random_emissions(5, 4)
    flash_inside.inside(rules, emissions, [2, 3], statistics=statistics)
    flash_inside.span_marginals(rules, emissions, [2, 3], statistics=statistics)
    assert statistics == flash_inside.Statistics(sentences=4)


def test_posteriors_have_no_gradient():
    tensors = [tensor.requires_grad_() for tensor in random_rules(3, 4)]
    tables = flash_inside.span_marginals(Rules(*tensors), random_emissions(5, 4), [2, 3])
    assert not any(table.requires_grad for table in tables)


def test_squares_are_used_up_to_their_limits_on_a_cpu(monkeypatch):
    """Two squares of each sentence; of five words the spans of one width have at most 2 x 3 splits."""
    layout, cpu = Layout([3, 5]), torch.device("cpu")
    numbers, largest = 2 * (9 + 25) * 7, 6 * 7
    for squares, block, fits in ((0, 0, True), (-1, 0, False), (0, -1, False)):
        monkeypatch.setattr(scaled, "LARGEST_SQUARES", numbers + squares)
        monkeypatch.setattr(scaled, "LARGEST_BLOCK", largest + block)
        assert scaled.SquareChart.fits(layout, 7, cpu) == fits
        assert not scaled.SquareChart.fits(layout, 7, torch.device("meta"))


def test_few_symbols_and_many_lengths_have_row_numbers_instead_of_squares():
    cpu, few, many = torch.device("cpu"), Layout([3, 5, 3]), Layout([3, 5, 2])
    assert scaled.SquareChart.fits(few, 64, cpu)
    assert not scaled.SquareChart.fits(many, 64, cpu)
    assert scaled.SquareChart.fits(many, 65, cpu)


def test_squares_are_worked_off_some_sentences_at_a_time():
    """Of four words two spans have three, with two splits each: four splits a sentence."""
    squares = Squares(Layout([4] * 5), (), torch.float64, torch.device("cpu"))
    for largest, sentences in ((3, [1] * 5), (8, [2, 2, 1]), (11, [2, 2, 1]), (12, [3, 2]), (20, [5])):
        assert [len(left) for _, left, _ in squares.parts(3, largest)] == sentences
