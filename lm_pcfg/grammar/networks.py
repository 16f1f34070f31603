"""The small networks of the parameterisations, and how their weights begin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Parts of the rows in which the gradient of a weight is summed, and how many rows make them worth it.
PARTS, MANY_ROWS = 8, 1024


class TallLinear(nn.Linear):
    """A linear layer for thousands of rows of a few hundred numbers.

    The gradient of its weight is a small matrix summed over many rows: left to one product, a GPU gives it as many
    processors as the matrix has tiles, 4 of 132 for 256 x 256.
    """

    def forward(self, x: Tensor) -> Tensor:
        return _TallLinear.apply(x, self.weight, self.bias)


class _TallLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        of_weight = _summed_outer_products(gradient, x) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, gradient.sum(0) if ctx.needs_input_grad[2] else None


def _summed_outer_products(a: Tensor, b: Tensor) -> Tensor:
    """a^T b: [R, m], [R, n] -> [m, n]"""
    if len(a) < MANY_ROWS or len(a) % PARTS:
        return a.T @ b
    a, b = (table.contiguous().view(PARTS, -1, table.shape[1]) for table in (a, b))
    return torch.bmm(a.mT, b).sum(0)


class ResidualPair(nn.Module):
    """Res(x) = relu(W2 relu(W1 x + b1) + b2) + x"""

    def __init__(self, dimension: int):
        super().__init__()
        self.first = TallLinear(dimension, dimension)
        self.second = TallLinear(dimension, dimension)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x)))) + x


class ResidualLayer(nn.Module):
    """relu(W x + b) + x, or + another tensor instead of x"""

    def __init__(self, dimension: int):
        super().__init__()
        self.linear = TallLinear(dimension, dimension)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        return torch.relu(self.linear(x)) + (x if skip is None else skip)


def rotation(dimension: int, generator: torch.Generator) -> TallLinear:
    """A matrix that begins as a random rotation (or reflection)."""
    linear = TallLinear(dimension, dimension, bias=False)
    nn.init.orthogonal_(linear.weight, generator=generator)
    return linear


def residual_network(dimension: int, pairs: int) -> nn.Sequential:
    """A linear layer and some residual pairs."""
    return nn.Sequential(TallLinear(dimension, dimension), *(ResidualPair(dimension) for _ in range(pairs)))


def initialise(module: nn.Module, scheme: str, tables: dict[str, float | None], generator: torch.Generator) -> None:
    """Fill every parameter of the module.

    scheme   "xavier_normal" or "xavier_uniform" for every matrix
    tables   standard deviations of a normal distribution for the named tables, instead of the scheme; None = the scheme
    Biases are uniform in +-1/sqrt(fan-in), as PyTorch has them: neither the paper nor its code speaks of them.
    """
    fill = {"xavier_normal": nn.init.xavier_normal_, "xavier_uniform": nn.init.xavier_uniform_}[scheme]
    for name, parameter in module.named_parameters():
        deviation = tables.get(name)
        if deviation is not None:
            nn.init.normal_(parameter, std=deviation, generator=generator)
        elif parameter.dim() > 1:
            fill(parameter, generator=generator)
        else:
            bound = parameter.shape[0] ** -0.5  # all linear layers here are square
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
