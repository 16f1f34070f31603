"""Scaling laws: how the validation loss of runs falls with nonterminals, training words and compute.

    L(N, D) = E + A N^-a + B D^-b          nats a token; N nonterminals, D words of the training text
    L(C)    = E + K C^-c                   C seconds of training; of the runs that no cheaper run beats

A run enters with its best validation; of several runs with the same N and text, such as schedules of several lengths,
only the best enters the first law. The second is of all of them: a short schedule is cheap. For given exponents a law
is linear in the rest, which non-negative least squares finds; a search over the exponents is left (variable
projection). Residuals are relative: 0.01 is one per cent of a loss.

A law is judged by what it has not seen: each run is also predicted by the law of all others, and the largest (of the
most nonterminals, and of these on the largest text) tells whether the law can be continued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lm_pcfg.errors import UserError
from lm_pcfg.inference.report import Run

EXPONENTS = (0.01, 3.0)  # where exponents are looked for
NO_TERM = 1e-9  # of the loss: what a term is at most, in the middle of the runs, that only rounding has left
AT_EDGE = 0.001  # an exponent so close to the edges, relatively, is at them
SAME_TEXT = 0.02  # texts whose words differ by at most so much, relatively, count as one
SHARED = 0.05  # of its seconds, that a run may share with another one
FAR_OFF = 0.05  # what the others say of a run is far off from so much of its loss on
HOUR = 3600.0


class Trained(NamedTuple):
    """What a law needs of a run."""

    name: str
    nonterminals: int
    words: float  # of the training text: seen in one epoch
    epochs: float
    seconds: float  # of training, to its end
    loss: float  # of its best validation, nats a token

    @property
    def seconds_per_word(self) -> float:
        return self.seconds / (self.words * self.epochs)


class Law(NamedTuple):
    """constant + sum of coefficient * value ** -exponent, over the named variables."""

    variables: tuple[str, ...]  # fields of Trained
    constant: float
    coefficients: tuple[float, ...]
    exponents: tuple[float, ...]

    def at(self, *values: float) -> float:
        terms = zip(self.coefficients, values, self.exponents, strict=True)
        return self.constant + sum(coefficient * value**-exponent for coefficient, value, exponent in terms)

    def of(self, run: Trained) -> float:
        return self.at(*(getattr(run, name) for name in self.variables))

    @property
    def untold(self) -> list[str]:
        """The variables that the runs tell nothing of: their term is 0, or its exponent at the edge of the search."""
        low, high = EXPONENTS[0] * (1 + AT_EDGE), EXPONENTS[1] * (1 - AT_EDGE)
        terms = zip(self.variables, self.coefficients, self.exponents, strict=True)
        return [name for name, coefficient, exponent in terms if coefficient == 0 or not low < exponent < high]


@dataclass(frozen=True)
class Fit:
    runs: list[Trained]  # by size, then text
    law: Law  # of all runs
    left_out: dict[str, float]  # what the law of all other runs says of a run; empty: too few runs to leave one out
    compute: Law | None  # None: fewer than four runs that no cheaper one beats
    frontier: list[Trained]  # these, the cheapest first; also those whose longer schedules are in `runs`

    @property
    def largest(self) -> Trained:
        return max(self.runs, key=lambda run: (run.nonterminals, run.words))


def trained(run: Run) -> Trained | str:
    """Return what a law needs of a run, or why it cannot take part."""
    best = run.best()
    words = _words_of_text(run)
    if run.failure is not None:
        return "it has failed"
    if not run.finished:
        return "it is not finished"
    if run.nonterminals is None:
        return "its config does not say how many nonterminals it has"
    if best is None or best.perplexity <= 1:
        return "it has no finite validation"
    if best.impossible:
        return f"{best.impossible} sentences of its validation text have probability 0"
    if not words or not run.seconds:
        return "its metrics do not tell how many words it has seen"
    epochs = sum(point.words for point in run.train) / words
    return Trained(run.name, run.nonterminals, words, epochs, run.seconds, math.log(best.perplexity))


def trained_beside_others(runs: Sequence[Run]) -> list[str]:
    """Name the runs that trained, for a share of their time that counts, while one of the others did."""
    return [
        run.name
        for run in runs
        if any(common_seconds(run.periods, other.periods) > SHARED * run.seconds for other in runs if other is not run)
    ]


def common_seconds(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float:
    """Return how long periods of one and of the other overlap; each in the order of time."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


def _words_of_text(run: Run) -> float:
    """Return the words of an epoch, by those that a run has seen to their end; of a part of the first, that part."""
    last = run.epochs - 1
    steps = run.settings.get("training", {}).get("max_steps")
    cut_short = run.epochs_planned not in (None, run.epochs) or steps == run.steps
    if cut_short and last:
        return sum(point.words for point in run.train if point.epoch < last) / last
    return sum(point.words for point in run.train) / max(run.epochs, 1)


def best_of_each(runs: Sequence[Trained]) -> list[Trained]:
    """Keep the best run of each size and text, in the order of size, then text."""
    kept: list[Trained] = []
    for run in sorted(runs, key=lambda run: (run.nonterminals, run.words)):
        last = kept[-1] if kept else None
        if last and last.nonterminals == run.nonterminals and run.words <= last.words * (1 + SAME_TEXT):
            kept[-1] = min(last, run, key=lambda one: one.loss)
        else:
            kept.append(run)
    return kept


def fit(runs: Sequence[Trained]) -> Fit:
    """Fit the laws. Raises UserError if there are too few runs."""
    kept = best_of_each(runs)
    law = fit_law(kept, _variables(kept))
    left_out = {}
    for number, run in enumerate(kept):
        others = kept[:number] + kept[number + 1 :]
        if _variables(others) == law.variables and len(others) >= _fewest(law.variables):
            left_out[run.name] = fit_law(others, law.variables).of(run)
    frontier: list[Trained] = []
    for run in sorted(runs, key=lambda run: (run.seconds, run.loss)):
        if not frontier or run.loss < frontier[-1].loss:
            frontier.append(run)
    compute = fit_law(frontier, ("seconds",)) if len(frontier) >= _fewest(("seconds",)) else None
    return Fit(kept, law, left_out, compute, frontier)


def _variables(runs: Sequence[Trained]) -> tuple[str, ...]:
    """Return what differs enough to have an exponent: at least three sizes, at least three texts."""
    sizes = {run.nonterminals for run in runs}
    texts: list[float] = []
    for words in sorted(run.words for run in runs):
        if not texts or words > texts[-1] * (1 + SAME_TEXT):
            texts.append(words)
    return ("nonterminals",) * (len(sizes) >= 3) + ("words",) * (len(texts) >= 3)


def _fewest(variables: tuple[str, ...]) -> int:
    """Return how many runs a law needs: one more than it has numbers."""
    return 2 * len(variables) + 2


def fit_law(runs: Sequence[Trained], variables: tuple[str, ...]) -> Law:
    if not variables:
        raise UserError("a law needs runs of at least three numbers of nonterminals, or of three training texts")
    if len(runs) < _fewest(variables):
        raise UserError(
            f"{len(runs)} runs are too few for a law of {' and '.join(variables)}: it needs {_fewest(variables)}"
        )
    from scipy.optimize import minimize, nnls

    values = np.array(
        [[getattr(run, name) for name in variables] for run in runs], dtype=np.float64
    )  # [runs, variables]
    losses = np.array([run.loss for run in runs])
    middle = np.exp(np.log(values).mean(0))  # so that coefficients have the size of losses
    low, high = np.log(EXPONENTS)

    def solved(exponents: np.ndarray) -> tuple[np.ndarray, float]:
        terms = np.concatenate([np.ones((len(runs), 1)), (values / middle) ** -exponents], 1) / losses[:, None]
        solution, residual = nnls(terms, np.ones(len(runs)))
        return solution, residual

    def residual(logarithms: np.ndarray) -> float:
        outside = np.maximum(logarithms - high, 0) + np.maximum(low - logarithms, 0)
        return float(solved(np.exp(np.clip(logarithms, low, high)))[1] + outside.sum())

    grid = np.stack(np.meshgrid(*[np.linspace(low, high, 25)] * len(variables)), -1).reshape(-1, len(variables))
    start = min(grid, key=residual)
    options = {"xatol": 1e-6, "fatol": 1e-12, "maxiter": 4000}
    found = minimize(residual, start, method="Nelder-Mead", options=options).x
    exponents = np.exp(np.clip(found, low, high))
    constant, *coefficients = solved(exponents)[0]
    there = np.array(coefficients) > NO_TERM * losses.mean()
    scaled = np.where(there, coefficients * middle**exponents, 0.0)
    return Law(variables, float(constant), tuple(scaled.tolist()), tuple(exponents.tolist()))


# ---- advice ---------------------------------------------------------------------------------------------------------


class Advice(NamedTuple):
    nonterminals: int
    words: float
    epochs: float
    seconds: float
    loss: float


def advise(fitted: Fit, words: float, seconds: float) -> Advice | None:
    """Choose the size, and how much of a text to train on in a budget; None if nothing fits into it.

    Nothing is continued but the law of D: sizes are powers of two among those of the runs, seconds a word lie between
    those measured, and numbers of epochs between those that were best.
    """
    runs = fitted.runs
    sizes = sorted({run.nonterminals for run in runs})
    between = (2**power for power in range(sizes[0].bit_length(), sizes[-1].bit_length()))
    epochs = _power(runs, lambda run: run.epochs, fitted.law.variables)
    fewest, most = min(run.epochs for run in runs), max(run.epochs for run in runs)
    parts, least = [words], min(run.words for run in runs)
    while parts[-1] > least:
        parts.append(max(parts[-1] / 2, least))
    candidates = []
    for size in sorted({*sizes, *(size for size in between if sizes[0] < size < sizes[-1])}):
        for part in parts:
            one = Trained("", size, part, 1.0, 1.0, 0.0)
            turns = max(min(epochs(one), most), fewest, 1.0)
            cost = seconds_per_word(runs, size) * part * turns
            if cost <= seconds:
                candidates.append(Advice(size, part, turns, cost, fitted.law.of(one)))
    return min(candidates, key=lambda advice: (advice.loss, advice.seconds), default=None)


def seconds_per_word(runs: Sequence[Trained], nonterminals: float) -> float:
    """Return the time a word takes at some size within those of the runs: on a line between the logarithms of two."""
    sizes = sorted({run.nonterminals for run in runs})
    means = [np.mean([math.log(run.seconds_per_word) for run in runs if run.nonterminals == size]) for size in sizes]
    return math.exp(float(np.interp(math.log(nonterminals), np.log(sizes), means)))


def _power(
    runs: Sequence[Trained], of: Callable[[Trained], float], variables: tuple[str, ...]
) -> Callable[[Trained], float]:
    """Fit a product of powers of the variables, by least squares of logarithms."""

    def row(run: Trained) -> list[float]:
        return [1.0, *(math.log(getattr(run, name)) for name in variables)]

    weights = np.linalg.lstsq(np.array([row(run) for run in runs]), np.log([of(run) for run in runs]), rcond=None)[0]
    return lambda run: math.exp(float(np.dot(row(run), weights)))


# ---- for people and machines ----------------------------------------------------------------------------------------

_SYMBOLS = {"nonterminals": "N", "words": "D", "seconds": "C"}


def formula(law: Law) -> str:
    terms = zip(law.coefficients, law.variables, law.exponents, strict=True)
    return " + ".join([f"{law.constant:.4f}", *(f"{k:.4g} {_SYMBOLS[name]}^-{e:.4f}" for k, name, e in terms)])


def report(fitted: Fit) -> dict[str, Any]:
    """Everything that was found, for machines."""
    largest = fitted.largest
    return {
        "law": _described(fitted.law),
        "compute": _described(fitted.compute) if fitted.compute else None,
        "frontier": [run._asdict() for run in fitted.frontier],
        "largest": largest.name,
        "largest_error": _error(fitted.left_out.get(largest.name), largest.loss),
        "runs": [
            {
                **run._asdict(),
                "fitted": fitted.law.of(run),
                "residual": _error(fitted.law.of(run), run.loss),
                "left_out": fitted.left_out.get(run.name),
                "left_out_error": _error(fitted.left_out.get(run.name), run.loss),
            }
            for run in fitted.runs
        ],
    }


def _described(law: Law) -> dict[str, Any]:
    return {**law._asdict(), "untold": law.untold}


def _error(predicted: float | None, loss: float) -> float | None:
    return None if predicted is None else predicted / loss - 1


def table(fitted: Fit) -> str:
    lines = [
        f"{'run':<24} {'N':>6} {'words':>12} {'epochs':>6} {'seconds':>8} {'loss':>7} {'ppl':>8} {'fitted':>7} "
        f"{'residual':>8} {'left out':>8} {'error':>7}"
    ]
    for run in report(fitted)["runs"]:
        left_out, error = run["left_out"], run["left_out_error"]
        unseen = f"{left_out:8.4f} {error:7.2%}" if left_out is not None else f"{'-':>8} {'-':>7}"
        lines.append(
            f"{run['name']:<24} {run['nonterminals']:6} {run['words']:12,.0f} {run['epochs']:6.0f} "
            f"{run['seconds']:8.0f} {run['loss']:7.4f} {math.exp(run['loss']):8.2f} {run['fitted']:7.4f} "
            f"{run['residual']:8.2%} {unseen}"
        )
    lines += ["", f"L = {formula(fitted.law)}   nats a token; N nonterminals, D training words"]
    if fitted.compute:
        lines.append(
            f"L = {formula(fitted.compute)}   of the {len(fitted.frontier)} runs that no cheaper one beats; C seconds"
        )
    lines.append(f"no cheaper run beats {', '.join(run.name for run in fitted.frontier)}")
    for law in filter(None, (fitted.law, fitted.compute)):
        for name in law.untold:
            lines.append(f"these runs do not tell how the loss falls with {_SYMBOLS[name]}: its exponent is at an edge")
    largest = fitted.largest
    if (said := fitted.left_out.get(largest.name)) is not None:
        lines.append(
            f"the largest run, {largest.name}, has {largest.loss:.4f}; the law of all others says {said:.4f} "
            f"({said / largest.loss - 1:+.2%})"
        )
    for run in fitted.runs:
        said = fitted.left_out.get(run.name)
        if said is not None and abs(error := said / run.loss - 1) > FAR_OFF:
            lines.append(f"the law of all others is {error:+.1%} off at {run.name}: is something wrong with this run?")
    return "\n".join(lines)


def advice_line(fitted: Fit, advice: Advice | None, words: float, seconds: float) -> str:
    asked = f"for {words:,.0f} words and {seconds / HOUR:g} hours"
    least, most = (of(run.words for run in fitted.runs) for of in (min, max))
    if advice is None:
        size = min(run.nonterminals for run in fitted.runs)
        return f"{asked}: not even N {size} is trained in that time on {min(least, words):,.0f} words"
    part = "" if advice.words == words else f" on {advice.words:,.0f} of the words"
    line = (
        f"{asked} take N {advice.nonterminals}{part}, about {advice.epochs:.0f} epochs "
        f"({advice.seconds / HOUR:.2g} hours): predicted perplexity {math.exp(advice.loss):.1f}"
    )
    if advice.nonterminals == max(run.nonterminals for run in fitted.runs) and 2 * advice.seconds < seconds:
        line += "; there is time for more nonterminals than any of these runs has"
    if not least / 2 <= advice.words <= 2 * most:
        line += f"; a guess, since these runs have {least:,.0f} to {most:,.0f} words"
    return line
