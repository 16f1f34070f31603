"""What left the range of a number format is computed again: in fp64, and what leaves that too in log space.

A backend returns with log Z which sentences can be trusted. The others have no gradient there, and their log Z means
nothing. Here they are computed again and put in place, so that the result is right for any rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flash_inside import reference, scaled
from flash_inside.devices import chart_memory, check_memory
from flash_inside.packing import Layout, taken
from flash_inside.precision import upcast
from flash_inside.rules import AnyRules


@dataclass
class Statistics:
    """Pass one to `inside` or `span_marginals` to count; it adds up over calls."""

    sentences: int = 0
    recomputed: int = 0  # left the range of the number format and were computed again, in fp64
    recomputed_in_log_space: int = 0  # ... of these, left the range of fp64 as well (not asked of single words)


def first_pass(
    rules: AnyRules,
    emissions: Tensor,
    lengths: list[int],
    precision: str,
    backend: str,
    layout: Layout | None = None,
    limits: np.ndarray | None = None,
) -> scaled.Result:
    """Compute in scaled linear space. Give a layout to get the posteriors of its rows. limits: see brackets.py."""
    if backend == "triton":
        from flash_inside.triton import backend as triton_backend  # imported where it is used: needs triton

        return triton_backend.inside(rules, emissions, lengths, precision, layout, limits)
    if not emissions.is_cuda:  # there an allocation fails, here the system may end the process
        check_memory(chart_memory(lengths, rules.nonterminals, precision))
    return scaled.inside(rules, emissions, layout or Layout(lengths), precision, limits)


def inside(
    rules: AnyRules,
    emissions: Tensor,
    lengths: list[int],
    precision: str,
    backend: str,
    statistics: Statistics | None,
    limits: np.ndarray | None = None,
) -> Tensor:
    """Return log Z of every sentence, differentiable: [B]."""
    log_z, trusted, _ = first_pass(rules, emissions, lengths, precision, backend, limits=limits)
    for sentences in one_word_and_others(doubtful(trusted), lengths):
        words, their_lengths = take(emissions, lengths, sentences, precision, statistics)
        their_limits = None if limits is None else taken(limits, lengths, sentences)
        own = rules.index_of(sentences)  # only the rules of these sentences are converted
        if their_lengths[0] == 1:
            again = reference.one_word_inside(upcast(rules.root, own), words, rules.nonterminals)
        elif precision == "fp64":
            again = reference.inside(rules.of_sentences(sentences), words, their_lengths, limits=their_limits)
        else:
            wide_rules: AnyRules = type(rules)(*(upcast(tensor, own) for tensor in rules))
            again = inside(wide_rules, upcast(words), their_lengths, "fp64", "torch", statistics, their_limits)
        index = torch.tensor(sentences, device=log_z.device)
        log_z = log_z.index_put((index,), again.to(log_z.dtype))
    return log_z


@torch.no_grad()
def span_marginals(
    rules: AnyRules, emissions: Tensor, lengths: list[int], precision: str, backend: str, statistics: Statistics | None
) -> list[Tensor]:
    """Return a table of posteriors of every sentence: [l+1, l+1] each."""
    layout = Layout(lengths)
    result = first_pass(rules, emissions, lengths, precision, backend, layout)
    tables = layout.square_tables(result.posterior)
    if sentences := doubtful(result.trusted):
        words, their_lengths = take(emissions, lengths, sentences, precision, statistics)
        own = rules.of_sentences(sentences)
        if precision == "fp64":
            again = reference.span_marginals(own, words, their_lengths)
        else:
            again = span_marginals(own, words, their_lengths, "fp64", "torch", statistics)
        for sentence, table in zip(sentences, again, strict=True):
            tables[sentence] = table.to(tables[sentence].dtype)
    return tables


def doubtful(trusted: Tensor) -> list[int]:
    """Return the numbers of the sentences to recompute: the one place where the host waits for the device."""
    return [sentence for sentence, good in enumerate(trusted.tolist()) if not good]


def one_word_and_others(sentences: list[int], lengths: list[int]) -> list[list[int]]:
    """Separate one-word sentences, to which a young grammar gives less than fp32 can hold. Their trees have no rules:
    to convert those of a large grammar to fp64 for them would take gigabytes and a tenth of a second."""
    parts = [[b for b in sentences if (lengths[b] == 1) == one_word] for one_word in (True, False)]
    return [part for part in parts if part]


def take(
    emissions: Tensor, lengths: list[int], sentences: Sequence[int], precision: str, statistics: Statistics | None
) -> tuple[Tensor, list[int]]:
    """Return emissions and lengths of some sentences, and count these as recomputed."""
    if statistics is not None and precision == "fp64":
        statistics.recomputed_in_log_space += len(sentences)
    elif statistics is not None:
        statistics.recomputed += len(sentences)
    parts = emissions.split(lengths)
    return torch.cat([parts[sentence] for sentence in sentences]), [lengths[sentence] for sentence in sentences]
