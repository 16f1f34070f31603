"""The Triton kernel of dropout against PyTorch: natively where there is a GPU, else in Triton's interpreter.

Without a GPU test_triton.py runs this file in a process of its own.
"""

from __future__ import annotations

import os

import pytest
import torch

from flash_inside.dropout import hashed_dropout

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if GPU else "cpu"
pytestmark = pytest.mark.gpu if GPU else pytest.mark.skipif(not INTERPRETED, reason="run by test_triton.py")


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 5), (64, 16), (33, 67)])
@pytest.mark.parametrize("rate", [0.3, 0.5, 0.9])
def test_values_and_gradients_equal_pytorch(shape, rate):
    generator = torch.Generator().manual_seed(0)
    for key in ([0, 0], [1, 2**32 - 1], [2**32 - 1, 2**31], [0x9E3779B9, 0x85EBCA6B]):
        x = torch.randn(shape, generator=generator).to(DEVICE).requires_grad_()
        wide = x.detach().double().requires_grad_()
        gradient = torch.randn(shape, generator=generator).to(DEVICE)
        given = torch.tensor(key, device=DEVICE)
        out, expected = hashed_dropout(x, rate, given), hashed_dropout(wide, rate, given)  # no kernel for fp64
        out.backward(gradient)
        expected.backward(gradient.double())
        assert torch.equal(out == 0, expected == 0)
        torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_scaled_in_fp32(dtype):
    x, key = torch.randn(40, 30).to(dtype), torch.tensor([5, 7])
    out = hashed_dropout(x.to(DEVICE), 0.7, key)
    assert out.dtype == dtype
    one_unit = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]  # the interpreter cuts off what bf16 lacks
    expected = hashed_dropout(x.double(), 0.7, key)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=one_unit, atol=1e-7)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_what_is_no_rate_is_refused(rate):
    with pytest.raises(ValueError, match="below 1"):
        hashed_dropout(torch.ones(2, 2), rate, torch.tensor([5, 7]))


def test_rows_of_a_wider_table_are_told_apart_by_their_own_numbers():
    wide = torch.ones(6, 10, device=DEVICE)
    key = torch.tensor([5, 7], device=DEVICE)
    assert torch.equal(hashed_dropout(wide[:, :4], 0.5, key), hashed_dropout(wide[:, :4].contiguous(), 0.5, key))
