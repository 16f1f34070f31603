"""The public functions: check the input, choose a backend, recompute what left the range of the number format."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_inside import reference, scaled, trees
from flash_inside.packing import Layout
from flash_inside.rules import Rules, check_inputs, connection, upcast
from flash_inside.triton_installed import triton_installed

BACKENDS = ("auto", "triton", "torch", "reference")
PRECISIONS = tuple(scaled.PRECISIONS)


@dataclass
class Statistics:
    """Pass one to `inside` or `span_marginals` to count; it adds up over calls."""

    sentences: int = 0
    recomputed: int = 0  # left the range of the number format and were computed again, in fp64
    recomputed_in_log_space: int = 0  # ... of these, left the range of fp64 as well (not asked of single words)


def inside(
    rules: Rules,
    emissions: Tensor,
    lengths: Tensor | Sequence[int],
    precision: str = "fp32",
    backend: str = "auto",
    statistics: Statistics | None = None,
) -> Tensor:
    """Natural log marginal probability of every sentence: [B], fp64 for precision "fp64", else fp32.

    rules       probabilities, see `Rules`
    emissions   [sum(lengths), P] log p(word | preterminal), sentences packed one after another
    lengths     number of words of each sentence, any mix
    precision   "fp64" | "fp32" (true fp32, never TF32) | "tf32" (on a device without TF32: fp32) | "bf16"
    backend     "triton" (scaled linear space, CUDA) | "torch" (the same, any device) | "reference" (log space, slow)
                | "auto": "triton" for CUDA tensors unless in fp64, else "torch"

    Differentiable (once) in root, left, right and emissions. A sentence the grammar cannot generate has -inf and a zero
    gradient. A sentence whose numbers leave the range of the format is recomputed, so it is right for any rules. A
    sentence that needs a rule or an emission that is NaN has NaN.
    """
    lengths = _check(rules, emissions, lengths, precision, backend)
    backend = _choose(backend, emissions, precision)
    if statistics is not None:
        statistics.sentences += len(lengths)
    if not lengths:  # a rank without data: no sentence, but still connected to the graph
        return (emissions.sum(1) + connection(rules, emissions)).to(_result_type(precision))
    if backend == "reference":
        return reference.inside(rules, emissions, lengths, _result_type(precision))
    if rules.per_sentence:
        parts = zip(range(len(lengths)), emissions.split(lengths), lengths, strict=True)
        scores = [
            _scaled_inside(rules.of_sentence(b), words, [length], precision, backend, statistics)
            for b, words, length in parts
        ]
        return torch.cat(scores)
    return _scaled_inside(rules, emissions, lengths, precision, backend, statistics)


def inside_unchecked(
    rules: Rules,
    emissions: Tensor,
    lengths: Tensor | Sequence[int],
    precision: str = "fp32",
    backend: str = "auto",
    of_rules: tuple[Tensor, Tensor] | None = None,
    rules_stay: bool = False,
) -> tuple[Tensor, Tensor]:
    """`inside` before it asks which sentences have to be recomputed, so that no host has to wait: log Z, trusted [B].

    A sentence that is not trusted left the range of the number format: its log Z means nothing and it has no gradient.
    Give those to `inside`.

    of_rules    memory [N, N+P] twice, into which the backward may write the gradients of left and right; only for the
                first backward since they were cleared: a second would write over what autograd is to add to
    rules_stay  the rules of later calls will lie in the same memory: CUDA graphs may read them there
    """
    lengths = _check(rules, emissions, lengths, precision, backend)
    backend = _choose(backend, emissions, precision)
    if not lengths or rules.per_sentence or backend == "reference":
        log_z = inside(rules, emissions, lengths, precision, backend)
        return log_z, torch.ones_like(log_z, dtype=torch.bool)
    if of_rules is not None and any(memory.shape != rules.left.shape for memory in of_rules):
        raise ValueError(f"of_rules must be two tensors {list(rules.left.shape)}, as left and right are")
    return _first_pass(rules, emissions, lengths, precision, backend, of_rules, rules_stay)


def span_marginals(
    rules: Rules,
    emissions: Tensor,
    lengths: Tensor | Sequence[int],
    precision: str = "fp32",
    backend: str = "auto",
    statistics: Statistics | None = None,
) -> list[Tensor]:
    """Posterior probability of every span: a table [l+1, l+1] a sentence, entry (i, j), i < j, for the words i..j-1.

    The entries of a sentence of l words sum to 2l - 1. A sentence the grammar cannot generate has all zeros.
    """
    lengths = _check(rules, emissions, lengths, precision, backend)
    backend = _choose(backend, emissions, precision)
    if statistics is not None:
        statistics.sentences += len(lengths)
    if backend == "reference":
        return reference.span_marginals(rules, emissions, lengths, _result_type(precision))
    if rules.per_sentence:
        tables = []
        for b, words in enumerate(emissions.split(lengths)):
            tables += _scaled_span_marginals(rules.of_sentence(b), words, [lengths[b]], precision, backend, statistics)
        return tables
    return _scaled_span_marginals(rules, emissions, lengths, precision, backend, statistics) if lengths else []


def viterbi(
    rules: Rules,
    emissions: Tensor,
    lengths: Tensor | Sequence[int],
    precision: str = "fp32",
    backend: str = "auto",
) -> list[tuple[float, list[tuple[int, int, int]]]]:
    """The most probable labelled binary tree of every sentence: (log score, [(first word, end, label), ...]).

    Labels 0..N-1 are nonterminals, N..N+P-1 preterminals; parents come before their children, left before right. A
    sentence the grammar cannot generate has (-inf, []). Values are fp64 for precision "fp64" and fp32 for every other:
    maxima have no use for tensor cores.
    """
    lengths = _check(rules, emissions, lengths, precision, backend)
    backend = _choose(backend, emissions, precision)
    if not lengths:
        return []
    if any(tensor.isnan().any() for tensor in (*rules, emissions)):
        raise ValueError("rules or emissions have NaN: no tree is the best")
    if emissions.isposinf().any():
        raise ValueError("an emission is +inf, which is no log-probability")
    if backend == "reference":
        return reference.viterbi(rules, emissions, lengths, _result_type(precision))
    if rules.per_sentence:
        parts = enumerate(emissions.split(lengths))
        return [viterbi(rules.of_sentence(b), words, [len(words)], precision, backend)[0] for b, words in parts]
    return trees.best_trees(rules, emissions, lengths, _result_type(precision), triton=backend == "triton")


def free_memory() -> None:
    """Give back what is kept on GPUs between calls: CUDA graphs and the memory they work in."""
    if graphs := sys.modules.get("flash_inside.triton_graphs"):  # else no call has used any
        graphs.clear()
        torch.cuda.empty_cache()


def _scaled_inside(
    rules: Rules, emissions: Tensor, lengths: list[int], precision: str, backend: str, statistics: Statistics | None
) -> Tensor:
    """fp64 range for what left the range of the asked precision, log space for what left that too."""
    log_z, trusted = _first_pass(rules, emissions, lengths, precision, backend)
    doubtful = _doubtful(trusted)
    for sentences in _one_word_and_others(doubtful, lengths):
        part_emissions, part_lengths = _select(emissions, lengths, sentences)
        if precision == "fp64":
            _count(statistics, log_space=len(sentences))
        else:
            _count(statistics, fp64=len(sentences))
        if part_lengths[0] == 1:
            again = reference.one_word_inside(rules.root, part_emissions, rules.nonterminals)
        elif precision == "fp64":
            again = reference.inside(rules, part_emissions, part_lengths)
        else:
            wide_rules = Rules(*(upcast(tensor) for tensor in rules))
            again = _scaled_inside(wide_rules, upcast(part_emissions), part_lengths, "fp64", "torch", statistics)
        index = torch.tensor(sentences, device=log_z.device)
        log_z = log_z.index_put((index,), again.to(log_z.dtype))
    return log_z


def _one_word_and_others(doubtful: list[int], lengths: list[int]) -> list[list[int]]:
    """A young grammar gives one-word sentences less than fp32 can hold. Their trees have no rules: to bring those of a
    large grammar to fp64 for them would take gigabytes and a tenth of a second."""
    parts = [[b for b in doubtful if (lengths[b] == 1) == one_word] for one_word in (True, False)]
    return [part for part in parts if part]


def _first_pass(
    rules: Rules,
    emissions: Tensor,
    lengths: list[int],
    precision: str,
    backend: str,
    of_rules: tuple[Tensor, Tensor] | None = None,
    rules_stay: bool = False,
) -> tuple[Tensor, Tensor]:
    if backend == "triton":
        from flash_inside import triton_backend  # imported where it is used: needs triton

        log_z, trusted, _ = triton_backend.inside(rules, emissions, lengths, precision, None, of_rules, rules_stay)
    else:
        log_z, trusted, _ = scaled.inside(rules, emissions, Layout(lengths), precision)
    return log_z, trusted


def _scaled_span_marginals(
    rules: Rules, emissions: Tensor, lengths: list[int], precision: str, backend: str, statistics: Statistics | None
) -> list[Tensor]:
    layout = Layout(lengths)
    with torch.no_grad():
        if backend == "triton":
            from flash_inside import triton_backend  # imported where it is used: needs triton

            result = triton_backend.inside(rules, emissions, lengths, precision, layout)
        else:
            result = scaled.inside(rules, emissions, layout, precision)
        tables = layout.square_tables(result.posterior)
        doubtful = _doubtful(result.trusted)
        if doubtful:
            part_emissions, part_lengths = _select(emissions, lengths, doubtful)
            if precision == "fp64":
                _count(statistics, log_space=len(doubtful))
                again = reference.span_marginals(rules, part_emissions, part_lengths)
            else:
                _count(statistics, fp64=len(doubtful))
                again = _scaled_span_marginals(rules, part_emissions, part_lengths, "fp64", "torch", statistics)
            for sentence, table in zip(doubtful, again, strict=True):
                tables[sentence] = table.to(tables[sentence].dtype)
    return tables


def _doubtful(trusted: Tensor) -> list[int]:
    """Numbers of the sentences to recompute: the one place where the host waits for the device."""
    return [sentence for sentence, good in enumerate(trusted.tolist()) if not good]


def _select(emissions: Tensor, lengths: list[int], sentences: list[int]) -> tuple[Tensor, list[int]]:
    parts = emissions.split(lengths)
    return torch.cat([parts[sentence] for sentence in sentences]), [lengths[sentence] for sentence in sentences]


def _count(statistics: Statistics | None, fp64: int = 0, log_space: int = 0) -> None:
    if statistics is not None:
        statistics.recomputed += fp64
        statistics.recomputed_in_log_space += log_space


def _check(rules: Rules, emissions: Tensor, lengths: Tensor | Sequence[int], precision: str, backend: str) -> list[int]:
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: use one of {', '.join(PRECISIONS)}")
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not available: use one of {', '.join(BACKENDS)}")
    if backend == "reference" and precision not in ("fp64", "fp32"):
        raise ValueError(f"the reference backend computes in fp64 or fp32, not {precision}")
    return check_inputs(rules, emissions, lengths)


def _choose(backend: str, emissions: Tensor, precision: str) -> str:
    """What "auto" stands for; refuse "triton" where it cannot run."""
    if backend == "auto":
        return "triton" if emissions.is_cuda and precision != "fp64" and triton_installed() else "torch"
    if backend == "triton":
        if precision == "fp64":
            raise ValueError("the triton backend computes in fp32, tf32 or bf16, not fp64")
        if importlib.util.find_spec("triton") is None:
            raise ValueError("backend 'triton' needs the package triton, which is not installed")
        if not emissions.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(f"backend 'triton' needs CUDA tensors, not {emissions.device.type}")
    return backend


def rules_type(precision: str, nonterminals: int) -> torch.dtype | None:
    """The narrowest type of left and right that loses nothing in this precision; None: any."""
    return torch.bfloat16 if precision == "bf16" and nonterminals > scaled.LARGEST_FP32_CHART else None


def _result_type(precision: str) -> torch.dtype:
    return torch.float64 if precision == "fp64" else torch.float32
