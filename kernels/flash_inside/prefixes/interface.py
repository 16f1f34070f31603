"""The public function: it checks the input, and computes again what left the range of a number format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_inside.devices import chart_memory, check_memory
from flash_inside.interface import check, choose
from flash_inside.precision import FORMATS, upcast
from flash_inside.prefixes import reference, scaled
from flash_inside.prefixes.ending import LeftCorners
from flash_inside.recomputation import Statistics, doubtful, take
from flash_inside.rules import Rules, connection


class Prefixes(NamedTuple):
    """Log probabilities of the prefixes of some sentences, packed one after another: [sum(lengths)] each.

    The entry of a word belongs to the prefix that ends with it.
    """

    begins: Tensor  # log P(a sentence begins with this prefix)
    ends: Tensor  # log P(a sentence is just this prefix)
    #: [sum(lengths), P] log P(a sentence begins with the words BEFORE this one, and goes on with this preterminal);
    #: not differentiable. None unless asked for
    next: Tensor | None = None


def prefix(
    rules: Rules,
    emissions: Tensor,
    lengths: Tensor | Sequence[int],
    precision: str = "fp32",
    backend: str = "auto",
    statistics: Statistics | None = None,
    corners: LeftCorners | None = None,
    with_next: bool = False,
) -> Prefixes:
    """Return log P of every prefix of every sentence, fp64 for precision "fp64", else fp32.

    rules, emissions, lengths, precision   as for `flash_inside.inside`; one grammar for all sentences
    backend     "triton" (scaled linear space, CUDA, without gradients) | "torch" (the same, any device, with gradients)
                | "reference" (log space, slow) | "auto": "triton" where it can compute this, else "torch"
    corners     `LeftCorners.of(rules)`, which costs a few products [N, N] with [N, N]; None: computed here
    with_next   also return what the next-word distributions are made of, see `Prefixes`

    Only derivations that end count. With Prefixes p, p.begins[j] - p.begins[j-1] is log p(word j | words before),
    p.ends[j] - p.begins[j] is log p(end | words up to j). Differentiable (once) in root, left, right, emissions. What
    left the range of the format is computed again, so it is right for any rules.
    """
    lengths = check(rules, emissions, lengths, precision, backend)
    if backend == "reference" and with_next:
        raise ValueError("the reference backend has no next-word distributions; use torch")
    backend = _choose(backend, rules, emissions, precision)
    if rules.per_sentence:
        raise ValueError("prefixes need one grammar for all sentences, not one each")
    rules = Rules(*rules)
    compute = FORMATS[precision].compute
    if statistics is not None:
        statistics.sentences += len(lengths)
    if not lengths:
        nothing = (emissions.sum(1) + connection(rules, emissions)).to(compute)
        return Prefixes(nothing, nothing, emissions.detach().to(compute) if with_next else None)
    if corners is None:
        corners = LeftCorners.of(rules)
    elif torch.is_grad_enabled() and any(tensor.requires_grad for tensor in rules[1:]) and not corners[3].requires_grad:
        raise ValueError("corners were made without gradients, and the rules have some: make them anew")
    if backend == "reference":
        return Prefixes(*reference.prefix(rules, corners, emissions, lengths, compute))
    return _checked(rules, corners, emissions, lengths, precision, backend, statistics, with_next)


def _choose(backend: str, rules: Rules, emissions: Tensor, precision: str) -> str:
    """Return the backend that "auto" stands for; refuse "triton" where it cannot compute this."""
    gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*rules, emissions))
    if gradients and backend == "triton":
        raise ValueError("the triton backend has no gradients of prefixes: use torch")
    return "torch" if gradients and backend == "auto" else choose(backend, emissions, precision)


def _checked(
    rules: Rules, corners: LeftCorners, emissions: Tensor, lengths: list[int], precision: str, backend: str,
    statistics: Statistics | None, with_next: bool,
) -> Prefixes:  # fmt: skip
    if backend == "triton":
        from flash_inside.triton import prefixes as on_triton  # imported where it is used: needs triton

        begins, ends, trusted, log_next = on_triton.prefix(rules, corners, emissions, lengths, precision, with_next)
    else:
        if not emissions.is_cuda:
            check_memory(chart_memory(lengths, rules.nonterminals, precision))
        begins, ends, trusted, log_next = scaled.prefix(rules, corners, emissions, lengths, precision, with_next)
    if sentences := doubtful(trusted):
        words, their_lengths = take(emissions, lengths, sentences, precision, statistics)
        if precision == "fp64":
            again = Prefixes(*reference.prefix(rules, corners, words, their_lengths))
            if with_next:
                again = again._replace(next=reference.next_preterminals(rules, corners, words, their_lengths))
        else:
            wide = Rules(*(upcast(tensor) for tensor in rules))
            again = _checked(wide, corners, upcast(words), their_lengths, "fp64", "torch", statistics, with_next)
        numbers = torch.arange(sum(lengths), device=begins.device).split(lengths)
        index = torch.cat([numbers[sentence] for sentence in sentences])
        begins = begins.index_put((index,), again.begins.to(begins.dtype))
        ends = ends.index_put((index,), again.ends.to(ends.dtype))
        if again.next is not None:
            log_next[index] = again.next.to(log_next.dtype)
    return Prefixes(begins, ends, log_next if with_next else None)
