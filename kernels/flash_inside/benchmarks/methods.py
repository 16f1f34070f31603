"""What is measured and compared: the backends, and two programs in log space for sentences of ONE length.

    log_einsum_exp   rows are exponentiated after subtracting their maximum: the sum over children is a matrix product
                     (the method of the paper's PyTorch version)
    log_sum_exp      the sum over children is a logsumexp over a tensor [spans, 2N, N]: the textbook, and its memory

The two exist to be compared with. They are plain PyTorch, differentiated by autograd, and checked against fp64 like
everything that is timed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import flash_inside
from flash_inside.rules import Rules

METHODS = ("triton", "torch", "log-einsum-exp", "log-sum-exp")
#: The backends with one grammar per sentence; only measured if asked for.
PER_SENTENCE = ("triton-per-sentence", "torch-per-sentence")

Inside = Callable[[Rules, Tensor, list[int]], Tensor]


def backend_of(method: str) -> str | None:
    """Return the backend that a method is; None: it is none."""
    backend = method.removesuffix("-per-sentence")
    return backend if backend in ("triton", "torch") else None


def function_of(method: str, precision: str, verdicts: list[Tensor]) -> Inside:
    """Return the function of a method. verdicts will hold which sentences of its last pass can be trusted."""
    if method == "log-einsum-exp":
        return log_einsum_exp
    if method == "log-sum-exp":
        return log_sum_exp

    backend = backend_of(method) or method

    def inside(rules: Rules, emissions: Tensor, lengths: list[int]) -> Tensor:
        log_z, trusted = flash_inside.inside_unchecked(rules, emissions, lengths, precision, backend)
        verdicts[:] = [trusted]
        return log_z

    return inside


def log_einsum_exp(rules: Rules, emissions: Tensor, lengths: list[int]) -> Tensor:
    def product(rows: Tensor, weight: Tensor, _log_weight: Tensor) -> Tensor:
        largest = rows.detach().amax(-1, keepdim=True)
        return ((rows - largest).exp() @ weight.T).log() + largest

    return _inside(rules, emissions, lengths, product)


def log_sum_exp(rules: Rules, emissions: Tensor, lengths: list[int]) -> Tensor:
    def product(rows: Tensor, _weight: Tensor, log_weight: Tensor) -> Tensor:
        return torch.logsumexp(rows.unsqueeze(-2) + log_weight, dim=-1)

    return _inside(rules, emissions, lengths, product)


def _inside(
    rules: Rules, emissions: Tensor, lengths: list[int], product: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """product: rows [B, spans, K], weight [2N, K], log weight -> log eta | log zeta [B, spans, 2N]."""
    if len(set(lengths)) > 1:
        raise ValueError("takes sentences of one length only")
    length = lengths[0]
    n = rules.nonterminals
    both = torch.cat((rules.left, rules.right)).float()  # [2N, N+P]
    leaves, children = both[:, n:].contiguous(), both[:, :n].contiguous()
    log_leaves, log_children = leaves.log(), children.log()
    rows = emissions.float().view(len(lengths), length, -1)
    eta_zeta = [product(rows, leaves, log_leaves)]  # by width
    beta = rows
    for width in range(2, length + 1):
        spans = length - width + 1
        splits = [
            eta_zeta[part - 1][:, :spans, :n] + eta_zeta[width - part - 1][:, part : part + spans, n:]
            for part in range(1, width)
        ]
        beta = torch.logsumexp(torch.stack(splits), dim=0)  # [B, spans, N]
        if width < length:
            eta_zeta.append(product(beta, children, log_children))
    return torch.logsumexp(rules.root[:n].float().log() + beta[:, 0], dim=-1)
