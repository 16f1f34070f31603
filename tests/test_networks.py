"""Linear layers whose gradients are summed in parts, against PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lm_pcfg.grammar import networks
from lm_pcfg.grammar.networks import MANY_ROWS, PARTS, TallLinear


@pytest.mark.parametrize("rows", [1, 5, MANY_ROWS, MANY_ROWS + 7, MANY_ROWS + PARTS])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_equal_pytorch(rows, bias):
    torch.manual_seed(rows)
    plain = nn.Linear(6, 4, bias, dtype=torch.float64)
    tall = TallLinear(6, 4, bias, dtype=torch.float64)
    tall.load_state_dict(plain.state_dict())
    x, weights = torch.randn(rows, 6, dtype=torch.float64), torch.randn(4, rows, dtype=torch.float64)
    found = []
    for layer in (plain, tall):
        given = x.clone().requires_grad_()
        out = layer(given)
        (out * weights.T).sum().backward()  # a gradient whose rows are not together in memory
        found.append([out, given.grad, *(parameter.grad for parameter in layer.parameters())])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_gradcheck_in_parts(monkeypatch):
    monkeypatch.setattr(networks, "MANY_ROWS", 4)
    tall = TallLinear(3, 2, dtype=torch.float64)
    x = torch.randn(2 * PARTS, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *inputs: networks._TallLinear.apply(*inputs), (x, tall.weight, tall.bias))
