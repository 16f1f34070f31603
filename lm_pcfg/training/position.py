"""Where a run stands: what a checkpoint keeps besides tensors and the place in the data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from lm_pcfg.grammar.likelihood import perplexity

_RANKED = 100  # more of the best checkpoints than anyone keeps
_FORMER_BESTS = 1_000  # on other validation lines: as many as state_file.py reads
_SEVERAL = 3  # updates in a row that are not finite: one alone may be a batch's fault
_LOOKED_BACK = 20  # updates at the end of a run without a validation text
_FAR = 10  # times the perplexity of a model that knows nothing, which is about the size of the vocabulary
_LONG = 1e6  # figures from here on are told in short


def figure(perplexity: float, decimals: int = 3) -> str:
    """Return a perplexity for people: nobody reads all digits of one that is absurd."""
    return f"{perplexity:.{decimals}f}" if perplexity < _LONG else f"{perplexity:.2e}"


@dataclass
class Window:
    """Sums since the last line of metrics."""

    steps: int = 0
    nll: float = 0.0
    sentences: float = 0.0
    words: float = 0.0
    gradient_norm: float = 0.0
    skipped: int = 0
    recomputed: float = 0.0
    seconds: float = 0.0  # of training: without evaluations, and without the time in which a run stood still


@dataclass
class Position:
    """What a checkpoint keeps besides tensors and the place in the data."""

    step: int = 0
    best_nll: float | None = None  # per token, of the validation text
    best_impossible: int = 0  # sentences of it with probability 0, which are in no sum
    best_step: int | None = None
    best_s_f1: float | None = None  # of gold trees, where they decide
    validated: str = ""  # fingerprint of what the evaluations are of; earlier versions kept none
    former_bests: list[int] = field(default_factory=list)  # best steps on other lines; their checkpoints stay
    evaluation_pending: bool = False  # due after this step and not done yet
    evaluations_since_best: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    skipped_steps: list[int] = field(default_factory=list)  # the last of them
    evaluated_step: int = 0  # the last evaluation
    diverged: str = ""  # what was wrong then
    ema_updates: int = 0
    #: Evaluations, best first: [impossible, nll, step], or [-S-F1, nll, step] where trees decide
    ranking: list[list[float]] = field(default_factory=list)
    window: Window = field(default_factory=Window)

    def take_evaluation(
        self, nll: float | None, impossible: int, s_f1: float | None = None, types: int | None = None
    ) -> bool:
        """Record an evaluation; return whether it is the best: fewest sentences of probability 0, then lowest nll.

        nll: per token; None if no sentence had a probability. s_f1: given where trees decide, the highest is the best.
        types: the size of the vocabulary.
        """
        self.evaluation_pending = False
        self.diverged = self._divergence_found(nll, types)
        self.evaluated_step = self.step
        first = float(impossible) if s_f1 is None else -s_f1
        before = (math.inf, math.inf)
        if self.ranking:
            before = (self.ranking[0][0], self.ranking[0][1])
        elif self.best_nll is not None:  # of a checkpoint from before there was a ranking
            before = (self.best_impossible, self.best_nll)
        improved = nll is not None and math.isfinite(nll) and (first, nll) < before
        if nll is not None and math.isfinite(nll):
            self.ranking = sorted([*self.ranking, [first, nll, self.step]])[:_RANKED]
        if improved:
            self.best_nll, self.best_impossible, self.best_step = nll, impossible, self.step
            self.best_s_f1 = s_f1
            self.evaluations_since_best = 0
        else:
            self.evaluations_since_best += 1
        return improved

    def skip(self) -> None:
        """Count an update that was left out: loss or gradient were not finite."""
        self.skipped += 1
        self.skipped_in_a_row += 1
        self.skipped_steps = [*self.skipped_steps, self.step][-_LOOKED_BACK:]

    def _divergence_found(self, nll: float | None, types: int | None) -> str:
        """Say what an evaluation finds wrong; skipped updates count if there are no others since the one before.

        A finite perplexity can tell, too. That of an untrained model is about the vocabulary's size, as if it guessed
        words; 10 times as much, also after a few steps, is that of a training with too large steps. A run that
        was better before has a model: it may just be over-fitted.
        """
        if nll is None or not math.isfinite(nll):
            return "no sentence of the validation text has a finite probability"
        if self.skipped_in_a_row >= max(_SEVERAL, self.step - self.evaluated_step):
            return "no update since the evaluation before was finite"
        best = nll if self.best_nll is None else min(nll, self.best_nll)
        if types is not None and perplexity(best) > _FAR * types:
            found = figure(perplexity(nll))
            return f"the validation perplexity, {found}, is more than {_FAR} times the vocabulary's size, {types:,}"
        return self._nothing_learned()

    def _nothing_learned(self) -> str:
        return "no update was finite" if 0 < self.step <= self.skipped else ""

    def divergence(self) -> str:
        """Say why a run that ends here has no usable model; nothing if it has one.

        Its evaluation tells. Without a validation text the last updates do.
        """
        if self.evaluated_step == self.step:
            return self.diverged
        last = min(self.step, _LOOKED_BACK)
        skipped = sum(step > self.step - last for step in self.skipped_steps)
        if not self._nothing_learned() and (self.skipped_in_a_row >= _SEVERAL or 2 * skipped > last):
            return f"{skipped} of the last {last} updates were not finite"
        return self._nothing_learned()

    def forget_best(self) -> None:
        self.best_nll, self.best_impossible, self.best_step, self.evaluations_since_best = None, 0, None, 0
        self.best_s_f1, self.ranking, self.former_bests = None, [], []

    def set_best_aside(self) -> None:
        """Begin a new ranking, since what follows cannot be compared; the checkpoint of the best so far stays."""
        bests = [*self.former_bests, *([] if self.best_step is None else [self.best_step])]
        self.forget_best()
        self.former_bests = bests[-_FORMER_BESTS:]  # the oldest no longer stay

    def best_metrics(self) -> dict[str, float]:
        """Return the figures of the best evaluation, under names of their own."""
        if self.best_nll is None or self.best_step is None:
            return {}
        best = {"best/valid_ppl": perplexity(self.best_nll), "best/step": float(self.best_step)}
        return best if self.best_s_f1 is None else best | {"best/s_f1": self.best_s_f1}

    def describe_best(self, beside: str, is_bound: bool = False) -> str:
        """Say after a comma which evaluation was the best, if there was any.

        beside: what belongs to its perplexity; is_bound: whether that is an upper bound
        """
        if self.best_nll is None:
            return ""
        at_most = "at most " if is_bound else ""
        valid = f"validation perplexity {at_most}{figure(perplexity(self.best_nll))}{beside}"
        if self.best_s_f1 is None:
            return f", best {valid} at step {self.best_step}"
        return f", best S-F1 {self.best_s_f1:.2f} at step {self.best_step} ({valid})"

    def best_steps(self, count: int) -> list[int]:
        """Return the steps whose checkpoints stay: of the best evaluations, best first, and the best of before."""
        return [int(step) for _, _, step in self.ranking[:count]] + self.former_bests

    @classmethod
    def of(cls, state: dict[str, Any]) -> Position:
        names = cls.__dataclass_fields__
        plain = {name: state[name] for name in names if name != "window" and name in state}
        return cls(**plain, window=Window(**state["window"]))
