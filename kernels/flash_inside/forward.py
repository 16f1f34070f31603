"""The forward algorithm of hidden Markov models in scaled linear space on packed sentences: PyTorch, any device.

On a GPU all but the matrix products of a step is one Triton kernel (triton/forward.py).

    alpha_1[s] = start[s] e_1[s]        alpha_t[s] = (sum_s' alpha_t-1[s'] T[s', s]) e_t[s]        Z = sum_s alpha_l[s]

with e_t[s] the probability of word t given the state s. A row of alpha is stored divided by its maximum m, and one of e
by its own, n; the logarithms of both are summed in fp64 (a tilde marks a stored value):

    alpha~_t = (alpha~_t-1 T) e~_t / m_t        log Z = log sum_s alpha~_l[s] + sum_t (log m_t + log n_t)

Sentences are sorted by decreasing length, so that those alive at step t are a prefix: a step is one matrix product
[alive, S] x [S, S]. T may be given in two factors [S, r] and [r, S], and is then never made.

The derivatives D = d log Z / d stored value, the backward algorithm, are computed right after the forward pass: they
tell which sentences left the range of the number format, so that a wrong log Z is never returned. A value is lost below
1e-38 in fp32. All paths that lose one are counted at the last place where they do: there D is right, and what they
lack is at most 1e-38 D. A sentence whose D are too large for that is computed again, in fp64 or in log space.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_inside.interface import BACKENDS, choose
from flash_inside.packing import Steps, steps_of
from flash_inside.precision import (
    FORMATS,
    LARGEST_D_OF_TORCH,
    Format,
    chart_format,
    check_precision,
    finite,
    full_matmul_precision,
    gradient_type,
    matmul_precision,
    product,
    upcast,
)
from flash_inside.recomputation import Statistics, doubtful, take
from flash_inside.reference import log_matmul, log_sum_exp, safe_log
from flash_inside.rules import check_lengths
from flash_inside.scaled import leaf_values


class Chain(NamedTuple):
    """A Markov chain of S hidden states. Rows are probabilities, and sum to 1."""

    start: Tensor  # [S] of the first state
    transition: tuple[Tensor, ...]  # (T [S, S],) from row to column; or two factors ([S, r], [r, S]) whose product is T

    @property
    def states(self) -> int:
        return len(self.start)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.start, *self.transition


# ---- public functions -----------------------------------------------------------------------------------------------


def log_likelihood(
    chain: Chain,
    emissions: Tensor,
    lengths: Tensor | Sequence[int],
    precision: str = "fp32",
    backend: str = "auto",
    statistics: Statistics | None = None,
) -> Tensor:
    """Return the natural log-probability of every sentence: [B], fp64 for precision "fp64", else fp32.

    emissions   [sum(lengths), S] log p(word | state), sentences packed one after another
    precision   as in `flash_inside.inside`
    backend     "triton" (scaled linear space, CUDA) | "torch" (the same, any device) | "reference" (log space, slow)
                | "auto": "triton" for CUDA tensors unless in fp64, else "torch"

    Differentiable (once) in start, transition and emissions. A sentence without any path has -inf and a zero gradient.
    A sentence whose numbers leave the range of the format is recomputed, so it is right for any parameters.
    """
    lengths = _check(chain, emissions, lengths, precision, backend)
    backend = choose(backend, emissions, precision)
    if statistics is not None:
        statistics.sentences += len(lengths)
    if not lengths:  # a rank without data: no sentence, but still connected to the graph
        return (emissions.sum(1) + sum(tensor.sum() for tensor in chain.tensors)).to(FORMATS[precision].compute)
    if backend == "reference":
        return in_log_space(chain, emissions, lengths, FORMATS[precision].compute)
    return _checked(chain, emissions, lengths, precision, backend, statistics)


def log_likelihood_unchecked(
    chain: Chain, emissions: Tensor, lengths: Tensor | Sequence[int], precision: str = "fp32", backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Do as `log_likelihood`, but recompute nothing, so that the host need not wait: return log Z and trusted, [B].

    A sentence that is not trusted has no gradient, and its log Z means nothing: give those to `log_likelihood`.
    """
    lengths = _check(chain, emissions, lengths, precision, backend)
    backend = choose(backend, emissions, precision)
    if not lengths or backend == "reference":
        log_z = log_likelihood(chain, emissions, lengths, precision, backend)
        return log_z, torch.ones_like(log_z, dtype=torch.bool)
    return _scaled(chain, emissions, lengths, precision, backend)


def posteriors(
    chain: Chain,
    emissions: Tensor,
    lengths: Tensor | Sequence[int],
    precision: str = "fp32",
    statistics: Statistics | None = None,
) -> Tensor:
    """Return p(state at this word | sentence): [sum(lengths), S]. The rows of an impossible sentence are zeros.

    It is the derivative of log Z by the log-emission.
    """
    with torch.inference_mode(False), torch.enable_grad():
        fixed = Chain(chain.start.detach().clone(), tuple(matrix.detach().clone() for matrix in chain.transition))
        words = emissions.detach().clone().requires_grad_()
        log_z = log_likelihood(fixed, words, lengths, precision, statistics=statistics)
        possible = torch.where(log_z == float("-inf"), 0.0, log_z)
        return torch.autograd.grad(possible.sum(), words)[0]


def in_log_space(chain: Chain, emissions: Tensor, lengths: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """Compute as on a blackboard, one sentence after the other: nothing underflows. The truth for the fast pass. [B]"""

    def wide(tensor: Tensor) -> Tensor:
        return upcast(tensor) if dtype == torch.float64 else tensor.to(dtype)

    log_start = safe_log(wide(chain.start))
    columns = [safe_log(wide(matrix)).T.contiguous() for matrix in chain.transition]
    scores = []
    for words in wide(emissions).split(list(lengths)):
        alpha = (log_start + words[0])[None]  # [1, S]
        for word in words[1:]:
            for matrix in columns:
                alpha = log_matmul(alpha, matrix)
            alpha = alpha + word
        scores.append(log_sum_exp(alpha, 1))
    # Every input stays connected: a chain of one-word sentences has a zero gradient in T, and not none.
    return torch.cat(scores) + 0.0 * sum(torch.where(c.isfinite(), c, 0.0)[:1, :1].sum() for c in columns)


def _check(chain: Chain, emissions: Tensor, lengths: Tensor | Sequence[int], precision: str, backend: str) -> list[int]:
    check_precision(precision)
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} has no forward algorithm: use one of {', '.join(BACKENDS)}")
    if backend == "reference" and precision not in ("fp64", "fp32"):
        raise ValueError(f"the reference backend computes in fp64 or fp32, not {precision}")
    lengths = check_lengths(lengths)
    shapes = [tuple(matrix.shape) for matrix in chain.transition]
    s = chain.states
    inner = shapes[0][-1] if shapes else 0
    if chain.start.dim() != 1 or shapes not in ([(s, s)], [(s, inner), (inner, s)]):
        raise ValueError(
            f"start must be [S], transition [S, S] or two factors [S, r], [r, S], not {list(chain.start.shape)} "
            f"and {', '.join(str(list(shape)) for shape in shapes)}"
        )
    if emissions.shape != (sum(lengths), s):
        raise ValueError(f"emissions must be [{sum(lengths)}, {s}] (words, states), not {list(emissions.shape)}")
    devices = {tensor.device for tensor in (*chain.tensors, emissions)}
    if len(devices) > 1:
        raise ValueError(f"chain and emissions must be on one device, not on {sorted(map(str, devices))}")
    return lengths


def _checked(
    chain: Chain, emissions: Tensor, lengths: list[int], precision: str, backend: str, statistics: Statistics | None
) -> Tensor:
    log_z, trusted = _scaled(chain, emissions, lengths, precision, backend)
    if sentences := doubtful(trusted):
        words, their_lengths = take(emissions, lengths, sentences, precision, statistics)
        if precision == "fp64":
            again = in_log_space(chain, words, their_lengths)
        else:
            wide = Chain(upcast(chain.start), tuple(upcast(matrix) for matrix in chain.transition))
            again = _checked(wide, upcast(words), their_lengths, "fp64", "torch", statistics)
        log_z = log_z.index_put((torch.tensor(sentences, device=log_z.device),), again.to(log_z.dtype))
    return log_z


def _scaled(chain: Chain, emissions: Tensor, lengths: list[int], precision: str, backend: str) -> tuple[Tensor, Tensor]:
    first, *second = chain.transition
    steps = steps_of(tuple(lengths), emissions.device)
    return _ScaledForward.apply(
        chain.start, first, second[0] if second else None, emissions, steps, precision, backend == "triton"
    )


# ---- scaled linear space --------------------------------------------------------------------------------------------


class _Forward:
    """alpha~ of all rows, and what scales it."""

    def __init__(self, chain: Chain, emissions: Tensor, steps: Steps, precision: Format, triton: bool):
        compute, storage, device = precision.compute, precision.storage, emissions.device
        self.matrices = tuple(matrix.to(storage) for matrix in chain.transition)
        self.words, scale = leaf_values(emissions, steps.word, precision)  # e~ [rows, S], log n [rows]
        rows = len(self.words)
        self.alpha = torch.empty_like(self.words)
        #: alpha~ times the first of two factors: [rows, r], of the step that it leads to
        rank = self.matrices[0].shape[1] if len(self.matrices) > 1 else 0
        self.middle = torch.zeros(rows, rank, dtype=storage, device=device)
        self.divisor = torch.empty(rows, dtype=torch.float64, device=device)  # m
        self.largest_input = torch.ones(rows, dtype=compute, device=device)  # of what e~ or a factor is multiplied by
        start = chain.start.double()  # it may be 1e-60, and is only a vector
        if triton:
            from flash_inside.triton import forward as kernels

            kernels.alphas(
                start, self.matrices, self.words, steps.alive, self.alpha, self.middle, self.divisor, self.largest_input
            )
        else:
            self._steps_in_torch(start, steps, compute)
        #: [B] fp64: sum of alpha~ at the end of each sorted sentence, and the logarithm of what it was divided by
        self.end_sums = self.alpha[steps.end].double().sum(1)
        self.log_scale = steps.by_sentence(self.divisor.log() + scale).sum(0)

    def _steps_in_torch(self, start: Tensor, steps: Steps, compute: torch.dtype) -> None:
        predicted = start.expand(steps.alive[0], -1)
        for step, count in enumerate(steps.alive):
            here = steps.rows(step)
            if step:
                predicted = product(self.alpha[steps.rows(step - 1)][:count], self.matrices[0], compute)
                self.largest_input[here] = predicted.amax(1).clamp_(min=1.0)
                if len(self.matrices) > 1:
                    self.middle[here] = predicted
                    predicted = product(self.middle[here], self.matrices[1], compute)
                    self.largest_input[here] = torch.maximum(self.largest_input[here], predicted.amax(1))
            values = predicted * self.words[here]
            divisor = values.amax(1, keepdim=True)
            divisor = torch.where(divisor > 0, divisor, 1.0)
            self.divisor[here] = divisor.squeeze(1)
            self.alpha[here] = values / divisor


class _Derivatives(NamedTuple):
    predicted: Tensor  # [rows, S] storage type: D of alpha~ T, of the first step D of start
    middle: Tensor  # [rows, r] storage type: D of alpha~ times the first of two factors
    posterior: Tensor  # [rows, S] compute type
    largest: Tensor  # [rows] largest D of anything stored


def _derivatives(forward: _Forward, steps: Steps, precision: Format, triton: bool) -> _Derivatives:
    """Compute D for an incoming gradient of 1 a sentence, from the last step back: the backward algorithm."""
    compute = precision.compute
    predicted, middle = torch.empty_like(forward.alpha), torch.zeros_like(forward.middle)
    posterior = torch.empty_like(forward.alpha, dtype=compute)
    largest = torch.empty_like(forward.largest_input)
    sums = forward.end_sums
    ending = torch.where(sums > 0, 1.0 / sums, 0.0).to(compute)  # [B]
    derivatives = _Derivatives(predicted, middle, posterior, largest)
    if triton:
        from flash_inside.triton import forward as kernels

        kernels.derivatives(
            ending, forward.matrices, forward.words, steps.alive, forward.alpha, forward.divisor, forward.largest_input,
            *derivatives,
        )  # fmt: skip
        return derivatives
    ending = ending[:, None].expand(-1, forward.alpha.shape[1])  # [B, S]
    divisor = forward.divisor.to(compute)[:, None]
    longer = 0  # sentences with a step after this one
    for step in reversed(range(len(steps.alive))):
        here = steps.rows(step)
        d_alpha = ending[longer : steps.alive[step]]
        if longer:
            after = steps.rows(step + 1)
            d_after = predicted[after]
            if len(forward.matrices) > 1:
                d_middle = product(d_after, forward.matrices[1].T, compute)
                largest[after] = torch.maximum(largest[after], d_middle.amax(1))
                middle[after] = d_middle
                d_after = middle[after]
            d_alpha = torch.cat((product(d_after, forward.matrices[0].T, compute), d_alpha))
        posterior[here] = forward.alpha[here] * d_alpha
        d_values = d_alpha / divisor[here]
        predicted[here] = d_values * forward.words[here]
        # Of alpha~; of alpha before its division, and of the predicted (e~ <= 1); of e~ and a second factor's entries
        largest[here] = torch.maximum(d_alpha.amax(1), d_values.amax(1) * forward.largest_input[here])
        longer = steps.alive[step]
    return derivatives


class _ScaledForward(torch.autograd.Function):
    """(start, matrix, second factor or None, emissions) -> log Z [B], trusted [B], which is not differentiable."""

    @staticmethod
    def forward(
        ctx: Any, start: Tensor, first: Tensor, second: Tensor | None, emissions: Tensor, steps: Steps, name: str,
        triton: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        chain = Chain(start, (first,) if second is None else (first, second))
        precision = chart_format(name, chain.states, shortest=int(steps.lengths[-1]))
        with full_matmul_precision(name):
            forward = _Forward(chain, emissions, steps, precision, triton)
            derivatives = _derivatives(forward, steps, precision, triton)
        sums = forward.end_sums
        log_z = torch.where(sums > 0, sums.log() + forward.log_scale, float("-inf"))

        largest = steps.by_sentence(derivatives.largest).amax(0)
        nothing = emissions.index_select(0, steps.word).amax(1) == float("-inf")  # no state has this word
        impossible = steps.by_sentence(nothing).any(0)
        in_range = torch.isfinite(log_z) & (largest <= LARGEST_D_OF_TORCH[precision.compute])
        trusted = torch.where(sums > 0, in_range, impossible & ~sums.isnan())
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(
                forward.alpha, forward.middle, derivatives.predicted, derivatives.middle, derivatives.posterior,
                trusted & (sums > 0),
            )  # fmt: skip
            ctx.steps, ctx.precision, ctx.name = steps, precision, name
            ctx.gradient_types = [gradient_type(tensor) for tensor in (*chain.tensors, emissions)]
        results = log_z.to(precision.compute)[steps.inverse], trusted[steps.inverse]
        ctx.mark_non_differentiable(results[1])
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_log_z: Tensor, _unused: Tensor) -> tuple[Tensor | None, ...]:
        """Expected counts, divided by the probability where they are not by its logarithm."""
        alpha, middle, d_predicted, d_middle, posterior, believed = ctx.saved_tensors
        steps, compute = ctx.steps, ctx.precision.compute
        gradient = torch.where(believed, d_log_z[steps.order].to(compute), 0.0)[steps.sentence, None]  # [rows, 1]
        lost = ~believed[steps.sentence, None]

        def cleared(values: Tensor) -> Tensor:
            """Rows of a sentence that is not trusted may be inf or NaN: 0 x inf must not happen."""
            return values.masked_fill(lost, 0.0)

        def weighted(values: Tensor) -> Tensor:
            return cleared(values.to(compute) * gradient).to(values.dtype)

        sentences = len(believed)
        into = weighted(d_predicted)
        d_start = into[:sentences].double().sum(0)
        before = cleared(alpha[steps.before])[sentences:].T  # of all steps but the first: those that a state led to
        with matmul_precision(ctx.name):
            if len(ctx.gradient_types) == 3:
                d_matrices: tuple[Tensor, ...] = (product(before, into[sentences:], compute),)
            else:
                d_matrices = (
                    product(before, weighted(d_middle)[sentences:], compute),
                    product(cleared(middle)[sentences:].T, into[sentences:], compute),
                )
        d_emissions = torch.empty_like(posterior)
        d_emissions[steps.word] = weighted(posterior)
        d_start, *d_transition, d_words = map(finite, (d_start, *d_matrices, d_emissions), ctx.gradient_types)
        return d_start, d_transition[0], d_transition[1] if len(d_transition) > 1 else None, d_words, None, None, None
