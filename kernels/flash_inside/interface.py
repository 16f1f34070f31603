"""The public functions: they check the input, choose a backend and call it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flash_inside import recomputation, reference, sampling, trees
from flash_inside.brackets import check_limits
from flash_inside.devices import triton_installed
from flash_inside.precision import FORMATS, check_precision
from flash_inside.recomputation import Statistics, first_pass
from flash_inside.rules import AnyRules, FactoredRules, ResidentRules, Rules, check_inputs, connection

BACKENDS = ("auto", "triton", "torch", "reference")


def inside(
    rules: AnyRules,
    emissions: Tensor,
    lengths: Tensor | Sequence[int],
    precision: str = "fp32",
    backend: str = "auto",
    statistics: Statistics | None = None,
    limits: np.ndarray | None = None,
) -> Tensor:
    """Return the natural log marginal probability of every sentence: [B], fp64 for precision "fp64", else fp32.

    rules       probabilities, see `Rules` and `FactoredRules`
    emissions   [sum(lengths), P] log p(word | preterminal), sentences packed one after another
    lengths     number of words of each sentence, any mix
    precision   "fp64" | "fp32" (true fp32, never TF32) | "tf32" (on a device without TF32: fp32) | "bf16"
    backend     "triton" (scaled linear space, CUDA) | "torch" (the same, any device) | "reference" (log space, slow)
                | "auto": "triton" for CUDA tensors unless in fp64, else "torch"
    limits      int32 [sum(lengths), 2] of `span_limits`, packed likewise: only trees that cross no bracket count

    Differentiable (once) in rules and emissions. A sentence the grammar cannot generate has -inf and a zero
    gradient. A sentence whose numbers leave the range of the format is recomputed, so it is right for any rules. A
    sentence that needs a rule or an emission that is NaN has NaN.
    """
    lengths = check(rules, emissions, lengths, precision, backend, factored=True)
    backend = choose(backend, emissions, precision)
    if isinstance(rules, ResidentRules):  # they mean something to inside_unchecked only
        rules = Rules(*rules)
    if statistics is not None:
        statistics.sentences += len(lengths)
    if not lengths:  # a rank without data: no sentence, but still connected to the graph
        return (emissions.sum(1) + connection(rules, emissions)).to(FORMATS[precision].compute)
    if limits is not None:
        limits = check_limits(limits, lengths)
    if backend == "reference":
        return reference.inside(rules, emissions, lengths, FORMATS[precision].compute, limits)
    return recomputation.inside(rules, emissions, lengths, precision, backend, statistics, limits)


def inside_unchecked(
    rules: AnyRules,
    emissions: Tensor,
    lengths: Tensor | Sequence[int],
    precision: str = "fp32",
    backend: str = "auto",
    limits: np.ndarray | None = None,
) -> tuple[Tensor, Tensor]:
    """Do as `inside`, but recompute nothing, so that the host need not wait: return log Z and trusted, both [B].

    A sentence that is not trusted left the range of the number format: its log Z means nothing and it has no gradient.
    Give those to `inside`. Rules that stay where they are while they are trained can be `ResidentRules`.
    """
    lengths = check(rules, emissions, lengths, precision, backend, factored=True)
    backend = choose(backend, emissions, precision)
    if not lengths or backend == "reference":
        log_z = inside(rules, emissions, lengths, precision, backend, limits=limits)
        return log_z, torch.ones_like(log_z, dtype=torch.bool)
    if limits is not None:
        limits = check_limits(limits, lengths)
    log_z, trusted, _ = first_pass(rules, emissions, lengths, precision, backend, limits=limits)
    return log_z, trusted


def span_marginals(
    rules: AnyRules,
    emissions: Tensor,
    lengths: Tensor | Sequence[int],
    precision: str = "fp32",
    backend: str = "auto",
    statistics: Statistics | None = None,
) -> list[Tensor]:
    """Return the posterior of every span: a table [l+1, l+1] a sentence, entry (i, j), i < j, for the words i..j-1.

    The entries of a sentence of l words sum to 2l - 1. A sentence the grammar cannot generate has all zeros.
    """
    lengths = check(rules, emissions, lengths, precision, backend, factored=True)
    backend = choose(backend, emissions, precision)
    if statistics is not None:
        statistics.sentences += len(lengths)
    if backend == "reference":
        return reference.span_marginals(rules, emissions, lengths, FORMATS[precision].compute)
    return recomputation.span_marginals(rules, emissions, lengths, precision, backend, statistics) if lengths else []


def viterbi(
    rules: Rules, emissions: Tensor, lengths: Tensor | Sequence[int], precision: str = "fp32", backend: str = "auto"
) -> list[tuple[float, list[tuple[int, int, int]]]]:
    """Find the most probable labelled binary tree of every sentence: (log score, [(first word, end, label), ...]).

    Labels 0..N-1 are nonterminals, N..N+P-1 preterminals; parents come before their children, left before right. A
    sentence the grammar cannot generate has (-inf, []). Values are fp64 for precision "fp64" and fp32 for every other:
    maxima have no use for tensor cores.
    """
    lengths = check(rules, emissions, lengths, precision, backend)
    backend = choose(backend, emissions, precision)
    if not lengths:
        return []
    _check_values(rules, emissions, "no tree is the best")
    if backend == "reference":
        return reference.viterbi(rules, emissions, lengths, FORMATS[precision].compute)
    return trees.best_trees(rules, emissions, lengths, FORMATS[precision].compute, triton=backend == "triton")


def sample_trees(
    rules: Rules,
    emissions: Tensor,
    lengths: Tensor | Sequence[int],
    samples: int = 1,
    *,
    generator: torch.Generator | None = None,
    precision: str = "fp64",
) -> list[list[tuple[float, list[tuple[int, int, int]]]]]:
    """Draw labelled binary trees of every sentence from p(tree | sentence), independently and exactly.

    A sentence has `samples` of them, each as (log p(tree, sentence), [(first word, end, label), ...]) with labels and
    order as in `viterbi`. A sentence the grammar cannot generate has no tree: its list is empty.

    generator   of any device; by default PyTorch's own for the CPU. The same state and input draw the same trees
    precision   "fp64", or fp32 values for every other: a fraction of the memory, and probabilities that are off by
                about 1e-7 x |log p(sentence)|. Draws are fp64 in any case, and log p(tree, sentence) is summed in fp64

    Plain PyTorch on any device. The chart is kept: 3N numbers for each span of each sentence. Rules per sentence are
    worked off one sentence after another.
    """
    lengths = check(rules, emissions, lengths, precision, "torch")
    if samples < 0:
        raise ValueError(f"samples must not be negative, but is {samples}")
    if not lengths or not samples:
        return [[] for _ in lengths]
    _check_values(rules, emissions, "no tree can be drawn")
    if generator is None:
        generator = torch.default_generator
    dtype = FORMATS[precision].compute
    if rules.per_sentence:
        parts = enumerate(emissions.split(lengths))
        return [
            sampling.sampled_trees(rules.of_sentence(b), words, [len(words)], samples, dtype, generator)[0]
            for b, words in parts
        ]
    return sampling.sampled_trees(rules, emissions, lengths, samples, dtype, generator)


def last_siblings(rules: Rules, emissions: Tensor, lengths: Tensor | Sequence[int]) -> list[Tensor]:
    """Return the posterior of where the sibling of the last word begins: fp64 [l - 1] a sentence, which sums to 1.

    For sentences whose last word is an end marker: without it, the nodes (i, l) and (i, l - 1) are one span, and both
    are there with this probability. A sentence the grammar cannot generate has zeros. Rules per sentence are worked off
    one sentence after another, so that those of one are in fp64 at a time.
    """
    lengths = check(rules, emissions, lengths, "fp64", "torch")
    if rules.per_sentence:
        parts = enumerate(emissions.split(lengths))
        return [last_siblings(rules.of_sentence(b), words, [len(words)])[0] for b, words in parts]
    return sampling.last_siblings(rules, emissions, lengths, torch.float64) if lengths else []


def free_memory() -> None:
    """Give back what is kept on GPUs between calls: CUDA graphs and the memory they work in."""
    if graphs := sys.modules.get("flash_inside.triton.graphs"):  # else no call has used any
        graphs.clear()
        torch.cuda.empty_cache()


def check(
    rules: AnyRules, emissions: Tensor, lengths: Tensor | Sequence[int], precision: str, backend: str,
    factored: bool = False,
) -> list[int]:  # fmt: skip
    """Refuse what cannot be meant; factored: whether `FactoredRules` are taken."""
    check_precision(precision)
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not available: use one of {', '.join(BACKENDS)}")
    if backend == "reference" and precision not in ("fp64", "fp32"):
        raise ValueError(f"the reference backend computes in fp64 or fp32, not {precision}")
    if isinstance(rules, FactoredRules) and not factored:
        raise ValueError(
            "only inside, inside_unchecked and span_marginals take factored rules: give the others rules.multiplied()"
        )
    return check_inputs(rules, emissions, lengths)


def _check_values(rules: Rules, emissions: Tensor, consequence: str) -> None:
    if any(tensor.isnan().any() for tensor in (*rules, emissions)):
        raise ValueError(f"rules or emissions have NaN: {consequence}")
    if emissions.isposinf().any():
        raise ValueError("an emission is +inf, which is no log-probability")


def choose(backend: str, emissions: Tensor, precision: str) -> str:
    """Return the backend that "auto" stands for; refuse "triton" where it cannot run."""
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
