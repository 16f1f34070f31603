"""Softmaxes of products against the plain dense computation: values, every gradient, and that no matrix is made."""

from __future__ import annotations

import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flash_inside.softmax import (
    child_probabilities,
    children,
    log_normalizers,
    normalizers,
    product_precision,
    rounded_factors,
)
from flash_inside.softmax.products import factors_of_logits

P, V, D = 37, 101, 8


@pytest.fixture(autouse=True)
def poisoned_memory():
    """What is read before it is written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def tables(*rows: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(rows))
    return [(torch.randn(count, D, generator=generator) * scale).to(dtype).requires_grad_() for count in rows]


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        sizes = [
            leaf.untyped_storage().nbytes() // leaf.itemsize for leaf in tree_leaves(result) if torch.is_tensor(leaf)
        ]
        self.elements = max(self.elements, *sizes, 0)
        return result


def assert_same(ours, dense, tolerance):
    for a, b in zip(ours, dense, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()


@pytest.mark.parametrize("largest_block", [1, 250, 1 << 27])
def test_normalizers_equal_the_dense_ones(largest_block):
    features, embeddings = tables(P, V)
    weights = torch.randn(P, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dense = torch.logsumexp(features @ embeddings.T, 1)
    ours = log_normalizers(features, embeddings, largest_block=largest_block)
    assert_same([ours], [dense], 1e-14)
    assert_same(
        torch.autograd.grad(ours @ weights, (features, embeddings)),
        torch.autograd.grad(dense @ weights, (features, embeddings)),
        1e-13,
    )


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("tf32", 1e-6), ("bf16", 1e-2)])
def test_normalizers_in_narrow_types(precision, tolerance):
    features, embeddings = tables(P, V, dtype=torch.float32)
    wide = [table.detach().double().requires_grad_() for table in (features, embeddings)]
    dense = torch.logsumexp(wide[0] @ wide[1].T, 1)
    ours = log_normalizers(features, embeddings, precision, largest_block=700)
    assert ours.dtype == torch.float32
    assert_same([ours], [dense], tolerance)
    assert_same(
        torch.autograd.grad(ours.sum(), (features, embeddings)), torch.autograd.grad(dense.sum(), wide), tolerance
    )


@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"),
    [("fp32", torch.float64, 1e-14), ("fp32", torch.float32, 1e-6), ("bf16", torch.float32, 1e-2)],
)
def test_probabilities_that_are_kept(precision, dtype, tolerance, monkeypatch):
    """As many as KEPT_FROM to KEPT_BYTES: a product for the logits and two for the gradients, each pass again."""
    features, embeddings = inputs = tables(P, V, dtype=dtype)
    weights = torch.randn(P, dtype=dtype, generator=torch.Generator().manual_seed(1))
    made, made_again, product = [], log_normalizers(*inputs, precision), normalizers.product
    gradients = torch.autograd.grad(made_again @ weights, inputs)
    monkeypatch.setattr(normalizers, "product", lambda *given: made.append(product(*given)) or made[-1])
    monkeypatch.setattr(normalizers, "KEPT_FROM", {"cpu": P * V})
    kept = log_normalizers(*inputs, precision)
    for _ in range(2):
        assert_same(torch.autograd.grad(kept @ weights, inputs, retain_graph=True), gradients, tolerance)
    assert_same([kept], [made_again], tolerance)
    padded = 112  # V = 101: rows are whole lines
    assert [result.shape for result in made] == [(P, padded), (P, D), (padded, D), (P, D), (padded, D)]
    made.clear()
    in_blocks = log_normalizers(*inputs, precision, largest_block=10 * padded)
    assert_same(torch.autograd.grad(in_blocks @ weights, inputs), gradients, tolerance)
    assert [result.shape[0] for result in made] == [10, 10, 10, 7, P, padded]
    size = P * V * (2 if precision == "bf16" else dtype.itemsize)
    for change in ("no_grad", "KEPT_BYTES"):  # nothing is kept
        if change == "KEPT_BYTES":
            monkeypatch.setattr(normalizers, change, {"cpu": size - 1})
        with torch.set_grad_enabled(change != "no_grad"):
            result = log_normalizers(features, embeddings, precision)
        assert result.grad_fn is None or "Kept" not in type(result.grad_fn).__name__
    monkeypatch.setattr(normalizers, "KEPT_BYTES", {"cpu": size})
    assert "Kept" in type(log_normalizers(features, embeddings, precision).grad_fn).__name__


def test_large_logits_do_not_overflow(monkeypatch):
    features, embeddings = tables(3, 5, dtype=torch.float32, scale=100.0)
    monkeypatch.setattr(normalizers, "KEPT_FROM", {"cpu": 0})
    kept = log_normalizers(features, embeddings)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(kept.sum(), (features, embeddings)))
    monkeypatch.setattr(normalizers, "KEPT_FROM", {"cpu": 1 << 20})
    torch.testing.assert_close(log_normalizers(features, embeddings), kept)
    ours = log_normalizers(features, embeddings)
    assert ours.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(ours.sum(), (features, embeddings)))


def test_the_matrix_of_states_and_words_is_never_made():
    features, embeddings = tables(400, 300, dtype=torch.float32)
    with LargestTensor() as seen:
        log_normalizers(features, embeddings, largest_block=20 * 304).sum().backward()
    assert seen.elements == 20 * 304  # of 120,000; 304: rows of logits are whole lines


def test_one_block_of_logits_exists_at_a_time(monkeypatch):
    """Forward and backward, of normalisers and of children."""
    made: list[weakref.ref] = []
    most = 0

    def noting(function):
        def wrapper(*arguments, **named):
            nonlocal most
            result = function(*arguments, **named)
            if result.numel() in (20 * 304, 20 * 300):
                made.append(weakref.ref(result))
            most = max(most, sum(block() is not None for block in made))
            return result

        return wrapper

    monkeypatch.setattr(normalizers, "product", noting(normalizers.product))
    monkeypatch.setattr(children, "product", noting(children.product))
    log_normalizers(*tables(400, 300, dtype=torch.float32), largest_block=20 * 304).sum().backward()
    assert (len(made), most) == (40, 1)
    made.clear()
    monkeypatch.setattr(torch, "empty", noting(torch.empty))
    with LargestTensor() as seen:
        outputs = child_probabilities(*tables(400, 300, 300, dtype=torch.float32), torch.bfloat16, "fp32", 20 * 300)
        torch.autograd.backward(outputs[2:], [torch.ones(()).expand(400, 300)] * 2)
    assert (len(made), most) == (80, 1)
    assert seen.elements == 2 * 400 * 300  # the probabilities


def test_rounding_leaves_gradients_as_they_are():
    both = tables(7, 5, dtype=torch.float32)
    values = rounded_factors(*both, "bf16")
    factors = factors_of_logits(*(table.detach() for table in both), "bf16")
    assert all(factor.dtype == torch.float16 for factor in factors)
    for table, value in zip(both, values, strict=True):
        gradient = torch.randn(table.shape, generator=torch.Generator().manual_seed(0))
        normal = table.abs() > 0.005  # smaller features have fewer digits
        assert torch.equal(value[normal], table.half().float()[normal])
        assert (value - table).abs().max() < 2**-11 * table.abs().max()
        assert torch.equal(torch.autograd.grad(value, table, gradient)[0], gradient)
    torch.testing.assert_close(values[0] @ values[1].T, factors[0].float() @ factors[1].float().T)
    assert all(one is table for one, table in zip(rounded_factors(*both, "tf32"), both, strict=True))


@pytest.mark.parametrize("kept_from", [0, 1 << 20])
def test_features_of_an_unstable_training_stay_in_the_range_of_fp16(monkeypatch, kept_from):
    """A Rank PCFG's reached 66,700 in its fifth epoch: docs/lab/families.md."""
    monkeypatch.setattr(normalizers, "KEPT_FROM", {"cpu": kept_from})
    features, embeddings = tables(4, 50, dtype=torch.float32)
    with torch.no_grad():
        features[1] *= 1e6 / features[1].abs().max()
    found = log_normalizers(features, embeddings, "bf16")
    given, words = rounded_factors(features.detach(), embeddings.detach(), "bf16")
    torch.testing.assert_close(found, (given @ words.T).logsumexp(1))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(found.sum(), (features, embeddings)))


@pytest.mark.parametrize("narrow", [0, 1])
def test_narrow_tables_are_refused(narrow):
    two = list(tables(3, 4, dtype=torch.float32))
    two[narrow] = two[narrow].bfloat16()
    with pytest.raises(ValueError, match=r"should be float32 or float64, not torch\.bfloat16"):
        log_normalizers(*two)
    with pytest.raises(ValueError, match="should have one type"):
        child_probabilities(two[0], two[1], two[1])
    with pytest.raises(ValueError, match=r"children should be \[S, d\]"):
        child_probabilities(*(table[None] for table in tables(3, 4, 4)))
    with pytest.raises(ValueError, match=r"should be float32 or float64, not torch\.float16"):
        child_probabilities(*(table.half() for table in (two[0], two[1], two[1])))


def test_a_gpu_without_triton_is_served_by_pytorch(monkeypatch):
    """As `inside` does, with one warning. TRITON_INTERPRET stands for the GPU: it asks the same question."""
    from flash_inside import devices, interface

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    devices.triton_installed.cache_clear()
    try:
        features, embeddings = tables(3, 4, dtype=torch.float32)
        with pytest.warns(UserWarning, match="triton is not installed"):
            ours = log_normalizers(features, embeddings)
        with warnings.catch_warnings(action="error"):  # said once
            assert interface.choose("auto", SimpleNamespace(is_cuda=True), "fp32") == "torch"
        assert torch.allclose(ours, (features @ embeddings.T).logsumexp(1))
    finally:
        devices.triton_installed.cache_clear()


def test_no_rows_at_all():
    features, embeddings = tables(0, V)
    ours = log_normalizers(features, embeddings)
    d_features, d_embeddings = torch.autograd.grad(ours.sum(), (features, embeddings))
    assert ours.shape == (0,)
    assert d_features.shape == (0, D)
    assert (d_embeddings == 0).all()


@pytest.mark.parametrize("largest_block", [1, 40, 1 << 27])
def test_children_equal_the_dense_ones(largest_block):
    parents, left_children, right_children = tables(7, 18, 18)
    left, right, *entrances = child_probabilities(parents, left_children, right_children, largest_block=largest_block)
    assert entrances[0] is left
    assert entrances[1] is right
    dense = [(parents @ children.T).softmax(1) for children in (left_children, right_children)]
    assert_same((left, right), dense, 1e-14)
    weights = torch.randn(2, 7, 18, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inputs = (parents, left_children, right_children)
    assert_same(
        torch.autograd.grad((torch.stack((left, right)) * weights).sum(), inputs),
        torch.autograd.grad((torch.stack(dense) * weights).sum(), inputs),
        1e-12,
    )


def test_derivatives_by_finite_differences(monkeypatch):
    assert torch.autograd.gradcheck(log_normalizers, tables(3, 4))
    monkeypatch.setattr(normalizers, "KEPT_FROM", {"cpu": 0})
    assert torch.autograd.gradcheck(log_normalizers, tables(3, 4))
    assert torch.autograd.gradcheck(lambda *tables: child_probabilities(*tables)[:2], tables(2, 5, 5))


def test_narrow_probabilities_take_wide_gradients_at_their_entrances():
    inputs = tables(7, 18, 18, dtype=torch.float32)
    left, right, *entrances = child_probabilities(*inputs, dtype=torch.bfloat16)
    assert left.dtype == right.dtype == torch.bfloat16
    assert not left.requires_grad
    wide = [table.detach().double().requires_grad_() for table in inputs]
    dense = [(wide[0] @ children.T).softmax(1) for children in wide[1:]]
    assert_same((left, right), dense, 4e-3)
    # In bf16 1 + 2^-12 is 1. What is the same for a whole row means nothing to a softmax: the 2^-12 are all there is.
    weights = torch.ones(2, 7, 18)
    weights[:, :, ::2] += 2.0**-12
    ours = torch.autograd.grad(entrances, inputs, list(weights))
    assert_same(ours, torch.autograd.grad(dense, wide, list(weights.double())), 1e-2)


@pytest.mark.parametrize("largest_block", [40, 1 << 27])
def test_children_of_bf16_tables(largest_block, monkeypatch):
    """Tables and their gradients are bf16; probabilities, unless asked for, and sums over blocks are not."""
    inputs = [table.detach().bfloat16().requires_grad_() for table in tables(200, 18, 18, dtype=torch.float32)]
    assert child_probabilities(*inputs, precision="bf16")[0].dtype == torch.float32
    left, right, *entrances = child_probabilities(*inputs, torch.bfloat16, "bf16", largest_block)
    assert {entrance.dtype for entrance in entrances} == {torch.float32}
    wide = [table.detach().double().requires_grad_() for table in inputs]
    dense = [(wide[0] @ children.T).softmax(1) for children in wide[1:]]
    assert_same((left, right), dense, 4e-3)
    rows, of_rows = [], children.rows.softmax_gradient
    monkeypatch.setattr(
        children.rows, "softmax_gradient", lambda p, *others: rows.append(len(p)) or of_rows(p, *others)
    )
    weights = list(torch.randn(2, 200, 18, generator=torch.Generator().manual_seed(1)))
    ours = torch.autograd.grad(entrances, inputs, weights)
    assert rows == ([4] * 100 if largest_block == 40 else [200] * 2)  # as many bytes as 2 rows of fp32
    assert {gradient.dtype for gradient in ours} == {torch.bfloat16}
    truth = torch.autograd.grad(dense, wide, [weight.double() for weight in weights])
    assert_same(ours, truth, 7e-3)


def test_products_of_16_bits_are_summed_in_fp32():
    settings = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(settings, name) for name in names]
    assert any(before)
    with product_precision("bf16"):
        assert not any(getattr(settings, name) for name in names)
        assert settings.fp32_precision == "tf32"
    assert [getattr(settings, name) for name in names] == before


def test_left_and_right_lie_one_after_the_other():
    left, right, *_ = child_probabilities(*tables(7, 18, 18))
    assert right.data_ptr() == left.data_ptr() + left.numel() * left.itemsize
    assert left.is_contiguous()
    assert right.is_contiguous()


@pytest.mark.parametrize("side", [0, 1])
def test_gradients_of_one_side_that_are_slices(side):
    """As a backend may leave them; and there may be no parents at all."""
    generator = torch.Generator().manual_seed(3)
    for sentences in (0, 3):
        shapes = [(sentences, 7, 5), (12, 5), (12, 5)]
        inputs = [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
        weights = torch.randn(sentences, 9, 15, generator=generator, dtype=torch.float64)[:, :7, :12]
        found = torch.autograd.grad(child_probabilities(*inputs)[side], inputs, weights)
        dense = (inputs[0] @ inputs[1 + side].T).softmax(-1)
        wanted = torch.autograd.grad(dense, (inputs[0], inputs[1 + side]), weights)
        torch.testing.assert_close(found[0], wanted[0])
        torch.testing.assert_close(found[1 + side], wanted[1])
        assert not found[2 - side].any()


@pytest.mark.parametrize("largest_block", [1, 5 * 12, 1 << 27])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", None), ("bf16", torch.bfloat16)])
def test_children_of_parents_of_many_sentences_are_those_of_each(largest_block, precision, dtype):
    """A block is a row, some rows of one or two sentences, or all."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(3, 7, 5), (12, 5), (12, 5)]
    parents, *children = (torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes)
    weights = torch.randn(2, 3, 7, 12, generator=generator)
    found = child_probabilities(parents, *children, dtype, precision, largest_block)
    of_parents, *of_children = torch.autograd.grad(found[2:], (parents, *children), list(weights))
    summed = [torch.zeros_like(table) for table in of_children]
    for sentence in range(3):
        own = [table.detach().requires_grad_() for table in (parents[sentence], *children)]
        alone = child_probabilities(*own, dtype, precision, largest_block)
        for one, many in zip(alone[:2], found[:2], strict=True):
            torch.testing.assert_close(many[sentence], one)
        of_own, *of_sentence = torch.autograd.grad(alone[2:], own, list(weights[:, sentence]))
        torch.testing.assert_close(of_parents[sentence], of_own, rtol=1e-5, atol=1e-5)
        summed = [so_far + part for so_far, part in zip(summed, of_sentence, strict=True)]
    for sum_of_all, wanted in zip(of_children, summed, strict=True):
        torch.testing.assert_close(sum_of_all, wanted, rtol=1e-5, atol=1e-4)
