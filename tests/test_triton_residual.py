"""Residual layers against autograd: natively where there is a GPU, in Triton's interpreter, and in PyTorch.

Without a GPU test_triton.py runs this file in a process of its own, with the interpreter; `make test` runs it as it is.
"""

from __future__ import annotations

import pytest
import torch

from flash_inside.devices import in_triton
from flash_inside.residual import linear, residual_layers

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.gpu] if GPU else []


def plain(x, skip, *weights):
    """The same by autograd, in the type of x."""
    out = x
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        out = torch.relu(torch.nn.functional.linear(out, weight.to(x.dtype), bias.to(x.dtype)))
    return out + (x if skip is None else skip)


def drawn(rows, d, layers, own_skip, dtype, weights_type=None):
    generator = torch.Generator().manual_seed(rows + d + layers)
    shapes = [(rows, d), (rows, d), *((d, d), (d,)) * layers]
    types = [dtype, dtype, *[weights_type or dtype] * (2 * layers)]
    tensors = [
        (torch.randn(*shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) == 2 and shape[0] == d else 1.0))
        .to(DEVICE, kind)
        .requires_grad_()
        for shape, kind in zip(shapes, types, strict=True)
    ]
    if own_skip:
        tensors[1] = None
    return tensors


def both(function, inputs):
    """Results and gradients by all inputs, for the same incoming gradient."""
    result = function(*inputs)
    incoming = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result)
    return [result, *torch.autograd.grad(result, [tensor for tensor in inputs if tensor is not None], incoming)]


@pytest.mark.parametrize("own_skip", [True, False], ids=["own-skip", "other-skip"])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize(("rows", "d"), [(1, 1), (3, 5), (70, 33), (129, 128), (64, 144)])
def test_layers_equal_autograd(rows, d, layers, own_skip):
    inputs = drawn(rows, d, layers, own_skip, torch.float32)
    wide = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in inputs]
    for ours, truth in zip(both(residual_layers, inputs), both(plain, wide), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5 * d)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_bias_is_summed_over_many_rows(kind):
    """In parts that one program does not sum at once."""
    if not in_triton(torch.empty(0, device=DEVICE)):
        pytest.skip("PyTorch sums here")
    from flash_inside.triton import rows as kernels

    rows = kernels.GRADIENT_ROWS * 2 * kernels.PARTS + 1
    sums, gradient = (tensor.detach() for tensor in drawn(rows, 3, 0, False, torch.float32))
    gradient = gradient.abs()
    bias, out = torch.tensor([0.5, -0.5, 0.0], device=DEVICE).to(kind), torch.empty_like(sums)
    found = kernels.activation_gradient(gradient, sums, bias, out)
    truth = torch.where(sums.double() + bias.double() <= 0, 0.0, gradient.double())
    torch.testing.assert_close(out.double(), truth)
    assert found.dtype == kind
    torch.testing.assert_close(found.double(), truth.sum(0), rtol=1e-4 if kind == torch.float32 else 1e-2, atol=0)


@pytest.mark.parametrize("own_skip", [True, False], ids=["own-skip", "other-skip"])
def test_in_bf16_the_gradients_of_weights_are_fp32(own_skip):
    inputs = drawn(300, 64, 2, own_skip, torch.bfloat16, torch.float32)
    ours = both(residual_layers, inputs)
    wide = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in inputs]
    truth = both(plain, wide)
    assert ours[0].dtype == ours[1].dtype == torch.bfloat16
    assert all(gradient.dtype == torch.float32 for gradient in ours[-4:])
    for number, (found, right) in enumerate(zip(ours, truth, strict=True)):
        if number >= len(ours) - 4:  # those of weights: summed, and left, in fp32
            assert (found != found.bfloat16().float()).any()
        error = (found.double() - right).norm() / right.norm()
        assert error <= (5e-3 if number == 0 else 0.15), number  # of the gradients most are signs before a relu


def test_linear_layers_equal_autograd():
    x, _, weight, bias = drawn(70, 33, 1, False, torch.float32)
    for inputs in ((x, weight, bias), (x, weight, None)):
        theirs = both(torch.nn.functional.linear, inputs)
        for ours, right in zip(both(linear, inputs), theirs, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-4)
    narrow = x.detach().bfloat16().requires_grad_()
    result, d_x, d_weight, d_bias = both(linear, (narrow, weight, bias))
    assert result.dtype == d_x.dtype == torch.bfloat16
    for gradient in (d_weight, d_bias):
        assert gradient.dtype == torch.float32
        assert (gradient != gradient.bfloat16().float()).any()


def test_inputs_may_lie_anywhere_in_memory():
    x, skip, *weights = drawn(70, 33, 2, False, torch.float32)
    expected = both(residual_layers, (x, skip, *weights))
    turned = [tensor.detach().T.contiguous().T.requires_grad_() for tensor in (x, skip)]
    for ours, right in zip(both(residual_layers, (*turned, *weights)), expected, strict=True):
        torch.testing.assert_close(
            ours, right, rtol=1e-4, atol=1e-4
        )  # products of turned factors may be another kernel's
    for result in (residual_layers(x, skip, *weights), residual_layers(*turned, *weights)):
        gradients = torch.autograd.grad(result.sum(), (x, skip, *turned, *weights), allow_unused=True)  # an expanded 1
        assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)
    incoming = torch.ones(33, 70, device=DEVICE).mul_(torch.arange(70.0, device=DEVICE)).T
    found = [
        torch.autograd.grad(residual_layers(x, skip, *weights), (x, *weights), one)
        for one in (incoming, incoming.contiguous())
    ]
    for ours, right in zip(*found, strict=True):
        assert (ours - right).norm() <= 1e-5 * right.norm()


def test_what_is_no_number_is_passed_on():
    x, _, weight, bias = drawn(3, 5, 1, True, torch.float32)
    with torch.no_grad():
        bias[2] = torch.nan
    result, _, _, d_bias = both(residual_layers, (x, None, weight, bias))
    assert result[:, 2].isnan().all()
    assert d_bias[2] != 0


def test_derivatives_by_finite_differences():
    if DEVICE != "cpu":
        pytest.skip("fp64 is computed by PyTorch alone")
    inputs = [tensor.detach().double().requires_grad_() for tensor in drawn(3, 4, 2, False, torch.float64)]
    assert torch.autograd.gradcheck(residual_layers, inputs)


def test_no_rows():
    inputs = drawn(0, 8, 2, True, torch.float32)
    result, d_x, *of_weights = both(residual_layers, inputs)
    assert result.shape == d_x.shape == (0, 8)
    assert all((gradient == 0).all() for gradient in of_weights)
