"""The public functions: they check the input, and compute again what left the range of a number format."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flash_inside.brackets import check_limits
from flash_inside.dense import differentiable, reference
from flash_inside.dense.plan import Plan, plan_of
from flash_inside.dense.reference import PairRules
from flash_inside.dense.scaled import compute_type
from flash_inside.devices import chart_memory, check_memory
from flash_inside.packing import taken
from flash_inside.precision import check_precision, upcast
from flash_inside.recomputation import Statistics, doubtful, one_word_and_others, take
from flash_inside.reference import one_word_inside
from flash_inside.rules import check_lengths

BACKENDS = ("auto", "torch", "reference")


def inside(
    rules: PairRules,
    emissions: Tensor,
    lengths: Tensor | Sequence[int],
    precision: str = "fp32",
    backend: str = "auto",
    statistics: Statistics | None = None,
    limits: np.ndarray | None = None,
) -> Tensor:
    """Return the natural log marginal probability of every sentence: [B], fp64 for precision "fp64", else fp32.

    rules       probabilities, see `PairRules`
    emissions   [sum(lengths), P] log p(word | preterminal), sentences packed one after another
    precision   "fp64" | "fp32" (true fp32) | "tf32" (fp32 charts, products in TF32) | "bf16" (the same as "tf32")
    backend     "torch" or "auto" (scaled linear space) | "reference" (log space, slow); there are no Triton kernels
    limits      as in `flash_inside.inside`: only trees that cross no bracket count

    Differentiable (once) in root, pairs and emissions. A sentence the grammar cannot generate has -inf and a zero
    gradient. A sentence whose numbers leave the range of the format is recomputed, so it is right for any rules.
    """
    lengths = _check(rules, emissions, lengths, precision, backend)
    if statistics is not None:
        statistics.sentences += len(lengths)
    compute = compute_type(precision)
    if not lengths:  # a rank without data: no sentence, but still connected to the graph
        return (emissions.sum(1) + reference.connection(rules, emissions)).to(compute)
    if limits is not None:
        limits = check_limits(limits, lengths)
    if backend == "reference":
        return reference.inside(rules, emissions, lengths, compute, limits)
    return _checked(rules, emissions, lengths, precision, statistics, limits)


def inside_unchecked(
    rules: PairRules,
    emissions: Tensor,
    lengths: Tensor | Sequence[int],
    precision: str = "fp32",
    backend: str = "auto",
    limits: np.ndarray | None = None,
) -> tuple[Tensor, Tensor]:
    """Do as `inside`, but recompute nothing, so that the host need not wait: return log Z and trusted, both [B].

    A sentence that is not trusted has no gradient, and its log Z means nothing: give those to `inside`.
    """
    lengths = _check(rules, emissions, lengths, precision, backend)
    if not lengths or backend == "reference":
        log_z = inside(rules, emissions, lengths, precision, backend, limits=limits)
        return log_z, torch.ones_like(log_z, dtype=torch.bool)
    if limits is not None:
        limits = check_limits(limits, lengths)
    return _first_pass(rules, emissions, lengths, precision, limits=limits)[:2]


def span_marginals(
    rules: PairRules,
    emissions: Tensor,
    lengths: Tensor | Sequence[int],
    precision: str = "fp32",
    backend: str = "auto",
    statistics: Statistics | None = None,
) -> list[Tensor]:
    """Return the posterior of every span, as `flash_inside.span_marginals` does."""
    lengths = _check(rules, emissions, lengths, precision, backend)
    if statistics is not None:
        statistics.sentences += len(lengths)
    return [spans for spans, _ in _posteriors(rules, emissions, lengths, precision, backend, statistics)]


def last_siblings(rules: PairRules, emissions: Tensor, lengths: Tensor | Sequence[int]) -> list[Tensor]:
    """Return the posterior of where the sibling of the last word begins, as `flash_inside.last_siblings` does."""
    lengths = _check(rules, emissions, lengths, "fp64", "auto")
    tables = _posteriors(upcast_rules(rules), upcast(emissions), lengths, "fp64", "auto", None)
    return [before_word[:-2, -1] for _, before_word in tables]


@torch.no_grad()
def _posteriors(
    rules: PairRules, emissions: Tensor, lengths: list[int], precision: str, backend: str,
    statistics: Statistics | None,
) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    """Return of every sentence the two tables of `reference.posteriors`."""
    if not lengths:
        return []
    if backend == "reference":
        return reference.posteriors(rules, emissions, lengths, compute_type(precision))
    plan = plan_of(lengths, emissions.device)
    _, trusted, *of_rows = _first_pass(rules, emissions, lengths, precision, plan)
    tables = list(zip(*(plan.layout.square_tables(values) for values in of_rows), strict=True))
    for sentence in doubtful(trusted):
        words, length = take(emissions, lengths, [sentence], precision, statistics)
        if precision == "fp64":
            (again,) = reference.posteriors(rules.of_sentence(sentence), words, length)
        else:
            own = upcast_rules(rules.of_sentence(sentence))
            (again,) = _posteriors(own, upcast(words), length, "fp64", backend, statistics)
        tables[sentence] = tuple(table.to(compute_type(precision)) for table in again)
    return tables


def upcast_rules(rules: PairRules) -> PairRules:
    return PairRules(*map(upcast, rules))


def _checked(
    rules: PairRules,
    emissions: Tensor,
    lengths: list[int],
    precision: str,
    statistics: Statistics | None,
    limits: np.ndarray | None,
) -> Tensor:
    log_z, trusted, *_ = _first_pass(rules, emissions, lengths, precision, limits=limits)
    for sentences in one_word_and_others(doubtful(trusted), lengths):
        words, their_lengths = take(emissions, lengths, sentences, precision, statistics)
        their_limits = None if limits is None else taken(limits, lengths, sentences)
        own = rules.index_of(sentences)  # only the rules of these sentences are converted
        if their_lengths[0] == 1:
            again = one_word_inside(upcast(rules.root, own), words, rules.nonterminals)
        elif precision == "fp64":
            again = reference.inside(rules.of_sentences(sentences), words, their_lengths, limits=their_limits)
        else:
            wide_rules = PairRules(*(upcast(tensor, own) for tensor in rules))
            again = _checked(wide_rules, upcast(words), their_lengths, "fp64", statistics, their_limits)
        log_z = log_z.index_put((torch.tensor(sentences, device=log_z.device),), again.to(log_z.dtype))
    return log_z


def _first_pass(
    rules: PairRules,
    emissions: Tensor,
    lengths: list[int],
    precision: str,
    plan: Plan | None = None,
    limits: np.ndarray | None = None,
) -> differentiable.Result:
    if not emissions.is_cuda:  # there an allocation fails, here the system may end the process
        check_memory(chart_memory(lengths, rules.nonterminals, precision))
    return differentiable.inside(rules, emissions, plan or plan_of(lengths, emissions.device), precision, limits)


def _check(
    rules: PairRules, emissions: Tensor, lengths: Tensor | Sequence[int], precision: str, backend: str
) -> list[int]:
    """Refuse what cannot be meant, in one line each; return the lengths as a list of Python integers."""
    check_precision(precision)
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} has no dense inside algorithm: use one of {', '.join(BACKENDS)}")
    if backend == "reference" and precision not in ("fp64", "fp32"):
        raise ValueError(f"the reference backend computes in fp64 or fp32, not {precision}")
    lengths = check_lengths(lengths)
    root, pairs = rules
    n, p = (rules.nonterminals, rules.preterminals) if pairs.dim() in (3, 4) else (0, 0)
    fits = n > 0 and p > 0 and pairs.shape[-2] == n + p and root.dim() == pairs.dim() - 2
    if not fits or root.shape[:-1] != pairs.shape[:-3] or root.shape[-1] not in (n, n + p):
        raise ValueError(
            f"root must be [N] or [N+P] and pairs [N, N+P, N+P], or both with [B, ...], not {list(root.shape)} and "
            f"{list(pairs.shape)}"
        )
    if rules.per_sentence and len(pairs) != len(lengths):
        raise ValueError(f"{len(pairs)} grammars for {len(lengths)} sentences: one each is needed")
    if emissions.shape != (sum(lengths), p):
        raise ValueError(
            f"emissions must be [{sum(lengths)}, {p}] (words of all sentences, P), not {list(emissions.shape)}"
        )
    devices = {tensor.device for tensor in (*rules, emissions)}
    if len(devices) > 1:
        raise ValueError(f"rules and emissions must be on one device, not on {sorted(map(str, devices))}")
    return lengths
