"""The small networks of the parameterisations, and how their weights begin."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flash_inside.residual import linear, residual_layers

ALL = slice(None)
#: Root mean square of what a bounded residual pair adds to a row, at most: symbols of `normal(0.1, ...)` begin at 0.1.
LARGEST_RMS = 0.35
FEW = -5.0  # `one_word` at the beginning: 0.7 % of sentences have one word (PTB: 0.3 %)


class Linear(nn.Linear):
    """A linear layer that computes in the type of its input: fp32 weights are rounded for an input of bf16."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias) if x.dtype == torch.bfloat16 else super().forward(x)


class ResidualPair(nn.Module):
    """Res(x) = relu(W2 relu(W1 x + b1) + b2) + x

    bounded: what is added to x is shortened if its root mean square is above LARGEST_RMS. Without, pairs in a row
    multiply: where the weights of all of them point the same way, features grow a hundredfold at each, and a training
    may come to features of 1e6 from weights below 1 (docs/lab/stability.md).
    """

    def __init__(self, dimension: int, bounded: bool = False):
        super().__init__()
        self.first = nn.Linear(dimension, dimension)
        self.second = nn.Linear(dimension, dimension)
        self.bounded = bounded

    def forward(self, x: Tensor) -> Tensor:
        if self.bounded:
            added = self._layers(x, torch.zeros_like(x))
            return shortened(added, LARGEST_RMS * x.shape[-1] ** 0.5) + x
        return self._layers(x, None)

    def _layers(self, x: Tensor, skip: Tensor | None) -> Tensor:
        """relu(W2 relu(W1 x + b1) + b2) + skip, where None is x"""
        if x.dtype == torch.bfloat16:
            return residual_layers(x, skip, self.first.weight, self.first.bias, self.second.weight, self.second.bias)
        return torch.relu(self.second(torch.relu(self.first(x)))) + (x if skip is None else skip)


def shortened(x: Tensor, longest: float) -> Tensor:
    """Shorten the rows that are longer than that: [R, d] -> [R, d]. The others stay as they are, bit for bit."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    limit = lengths.new_full((), longest)  # a number would be divided by an inverse, and 1 would not be 1
    return x * (limit / torch.maximum(lengths, limit)).to(x.dtype)


class ResidualLayer(nn.Module):
    """relu(W x + b) + x, or + another tensor instead of x"""

    def __init__(self, dimension: int):
        super().__init__()
        self.linear = nn.Linear(dimension, dimension)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if x.dtype == torch.bfloat16:
            return residual_layers(x, skip, self.linear.weight, self.linear.bias)
        return torch.relu(self.linear(x)) + (x if skip is None else skip)


class LatentLinear(nn.Linear):
    """W [x; z] + b for every row x of a table and every z: [S, d], [B, k] -> [B, S, d]. No z is copied to the rows."""

    def __init__(self, dimension: int, latent: int, outputs: int | None = None):
        super().__init__(dimension + latent, dimension if outputs is None else outputs)
        self.dimension = dimension

    def forward(self, x: Tensor, z: Tensor, outputs: slice | Tensor = ALL) -> Tensor:  # type: ignore[override]
        """outputs: those that are wanted"""
        of_x, of_z = self.weight[outputs].tensor_split([self.dimension], 1)
        return nn.functional.linear(x, of_x, self.bias[outputs]) + nn.functional.linear(z, of_z)[:, None]


class LatentResidualLayer(nn.Module):
    """relu(W [x; z] + b) + x"""

    def __init__(self, dimension: int, latent: int):
        super().__init__()
        self.linear = LatentLinear(dimension, latent)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return torch.relu(self.linear(x, z)) + x


class LatentNetwork(nn.Module):
    """A linear layer of [x; z] and some residual pairs."""

    def __init__(self, dimension: int, latent: int, pairs: int):
        super().__init__()
        self.linear = LatentLinear(dimension, latent)
        self.pairs = nn.Sequential(*(ResidualPair(dimension) for _ in range(pairs)))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.pairs(self.linear(x, z))


def rotation(dimension: int, generator: torch.Generator) -> nn.Linear:
    """A matrix that begins as a random rotation (or reflection)."""
    linear = Linear(dimension, dimension, bias=False)
    nn.init.orthogonal_(linear.weight, generator=generator)
    return linear


def residual_network(dimension: int, pairs: int, bounded: bool = False) -> nn.Sequential:
    """A linear layer and some residual pairs."""
    return nn.Sequential(Linear(dimension, dimension), *(ResidualPair(dimension, bounded) for _ in range(pairs)))


def root_probabilities(logits: Tensor, nonterminals: int, one_word: Tensor | None) -> Tensor:
    """Probabilities of S -> symbol in fp64, from logits over nonterminals and then, with `one_word`, preterminals.

    one_word: [1] the logit of the mass of S -> preterminal. It has this parameter of its own because one softmax over
    both does not train: steps without one-word sentences, which are nearly all, drive S -> T below e^-700 (PTB, N 2048,
    after 500 steps), and then they have no probability at all.
    """
    logits = logits.double()
    if one_word is None:
        return logits.softmax(-1)
    over_nonterminals, over_preterminals = logits.tensor_split([nonterminals], -1)
    one_word = one_word.double()
    return torch.cat(
        (
            over_nonterminals.softmax(-1) * torch.sigmoid(-one_word),
            over_preterminals.softmax(-1) * one_word.sigmoid(),
        ),
        -1,
    )


def initialise(module: nn.Module, scheme: str, tables: dict[str, float | None], generator: torch.Generator) -> None:
    """Fill every parameter of the module.

    scheme   "xavier_normal" or "xavier_uniform" for every matrix
    tables   standard deviations of a normal distribution for the named tables, instead of the scheme; None = the scheme
    Biases are uniform in +-1/sqrt(fan-in), as PyTorch has them: neither the paper nor its code speaks of them.
    """
    parameters = dict(module.named_parameters())
    fill = {"xavier_normal": nn.init.xavier_normal_, "xavier_uniform": nn.init.xavier_uniform_}[scheme]
    for name, parameter in parameters.items():
        deviation = tables.get(name)
        if deviation is not None:
            nn.init.normal_(parameter, std=deviation, generator=generator)
        elif parameter.dim() > 1:
            fill(parameter, generator=generator)
        else:
            bound = parameters[name.removesuffix("bias") + "weight"].shape[1] ** -0.5
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
