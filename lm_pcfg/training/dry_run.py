"""`lm_pcfg train --dry-run`: build everything, write nothing, and say what the training will take.

A step of the most expensive batches says how much memory is needed. A few steps with batches from cheap to expensive,
and an evaluation of a part of the validation text, say how long the whole training takes. Where state dropout or a
curriculum makes the first steps smaller than the last, that is an upper bound.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np

from lm_pcfg.console import duration
from lm_pcfg.corpus.batches import Batch
from lm_pcfg.corpus.opening import Corpora
from lm_pcfg.corpus.sentences import Sentences
from lm_pcfg.distributed.engine import Engine, peak_memory
from lm_pcfg.settings import Settings
from lm_pcfg.training.evaluation import evaluate
from lm_pcfg.training.graphs import STEPS_BEFORE_CAPTURE
from lm_pcfg.training.steps import Steps

LOOKED_AT = 200  # steps of an epoch whose costs stand for all
QUANTILES = (0.5, 0.05, 0.95, 0.25, 0.75)  # of these costs: the steps that are timed
MOST_ROUNDS, ENOUGH_SECONDS = 2, 2.0  # how often they are, until so much time has been measured
MOST_SECONDS = 60.0  # then no further step is timed
EVALUATED_SECONDS = 10.0  # about so long an evaluation of a part of the validation text takes
FEWEST_EVALUATED, MOST_EVALUATED = 16, 400  # its sentences


def dry_run(settings: Settings) -> dict[str, Any]:
    """Return what a step and the whole training take; nothing on all processes but one."""
    steps = Steps(settings, Engine(settings))
    steps.position.step = steps.total_steps  # of a state dropout that falls to 0, the steps with most symbols
    batches = steps.stream.costliest_step(settings.training.epochs - 1)  # what has to fit
    seconds = _seconds_of(steps, batches)
    window, skipped = replace(steps.position.window), steps.position.skipped
    if steps.capture.allowed:  # CUDA graphs have memory of their own
        for _ in range(STEPS_BEFORE_CAPTURE + 1):
            steps.step(batches)
        steps.finish_update()
    memory, device = peak_memory(steps.engine.device), steps.engine.describe()
    of_step, sentences = time_steps(steps)
    of_evaluation = time_evaluation(steps, of_step / max(1.0, sentences)) if steps.corpora.valid is not None else 0.0
    steps.stream.close()
    if not steps.engine.is_main:
        return {}
    evaluations = count_evaluations(settings, steps.total_steps, steps.stream.steps_per_epoch(0))
    return {
        "device": device,
        "parameters": sum(tensor.numel() for tensor in steps.skeleton.parameters()),
        "vocabulary": len(steps.corpora.vocabulary),
        "steps_per_epoch": steps.stream.steps_per_epoch(0),
        "total_steps": steps.total_steps,
        "sentences": sum(batch.n_sentences for batch in batches),
        "words": sum(batch.n_words for batch in batches),
        "nll_per_sentence": window.nll / max(1.0, window.sentences) if not skipped else math.inf,
        "first_step_seconds": round(seconds, 3),
        "peak_memory": memory,
        "step_seconds": of_step,
        "evaluations": evaluations,
        "evaluation_seconds": of_evaluation,
        "expected_seconds": steps.total_steps * of_step + evaluations * of_evaluation,
    }


def expectation(report: dict[str, Any]) -> str:
    """Say for people how long the training will take, and where that comes from."""
    parts = f"{report['total_steps']:,} steps x {report['step_seconds']:.3g} s"
    if report["evaluations"]:
        parts += f" + {report['evaluations']:,} evaluations x {report['evaluation_seconds']:.3g} s"
    return f"the whole training takes about {duration(report['expected_seconds'])}: {parts}"


def _seconds_of(steps: Steps, batches: list[Batch]) -> float:
    began = time.perf_counter()
    steps.step(batches)
    steps.finish_update()
    return time.perf_counter() - began


def time_steps(steps: Steps) -> tuple[float, float]:
    """Return the mean seconds of a step of the last epoch, and how many sentences it has on this process.

    The time of a step is taken from the timed ones of about the same cost.
    """
    stream, epoch = steps.stream, steps.settings.training.epochs - 1
    stream.restore({"epoch": epoch, "batch": 0})
    drawn = [stream.next_step() for _ in range(min(LOOKED_AT, stream.steps_per_epoch(epoch)))]
    costs = np.array(steps.engine.sums([float(sum(batch.cost for batch in batches)) for batches in drawn]))
    by_cost = np.argsort(costs, kind="stable")
    chosen = list(dict.fromkeys(int(by_cost[round(quantile * (len(drawn) - 1))]) for quantile in QUANTILES))
    seconds: dict[int, list[float]] = {}
    total = 0.0
    for place in chosen * MOST_ROUNDS:
        (enough,) = steps.engine.sums([float(_is_enough(total, place in seconds))])  # the same on all processes
        if enough:
            break
        seconds.setdefault(place, []).append(_seconds_of(steps, drawn[place]))
        total += seconds[place][-1]
    timed = sorted(seconds, key=lambda place: costs[place])
    means = [sum(seconds[place]) / len(seconds[place]) for place in timed]
    mean = float(np.interp(costs, costs[timed], means).mean())
    if len(timed) == 1:  # steps that long are spent on the charts
        mean = means[0] * float(costs.mean()) / max(1.0, float(costs[timed[0]]))
    return mean, sum(batch.n_sentences for batches in drawn for batch in batches) / len(drawn)


def _is_enough(total: float, again: bool) -> bool:
    return total > (ENOUGH_SECONDS if again else MOST_SECONDS)


def time_evaluation(steps: Steps, of_sentence: float) -> float:
    """Return the seconds of an evaluation of the whole validation text, from that of a part of it.

    of_sentence: seconds that a sentence takes in training, with its gradients
    """
    corpora, weights = steps.corpora, steps.evaluated_weights()
    valid = corpora.valid
    assert valid is not None
    (affordable,) = steps.engine.sums([EVALUATED_SECONDS / max(of_sentence, 1e-9) / steps.engine.world_size])
    wanted = int(min(max(affordable, FEWEST_EVALUATED), MOST_EVALUATED))

    def timed(sentences: int) -> tuple[float, float]:
        """The seconds, and the share of the whole that was evaluated."""
        part = part_of(corpora, sentences)
        began = time.perf_counter()
        evaluate(steps.skeleton, weights, part, steps.settings, steps.engine)
        assert part.valid is not None
        return time.perf_counter() - began, float((part.valid.lengths**2).sum() / (valid.lengths**2).sum())

    (least, least_share), (seconds, share) = timed(1), timed(wanted)  # the first is mostly the grammar itself
    if share <= least_share:
        return seconds  # a text of one sentence
    return seconds + max(0.0, seconds - least) / (share - least_share) * (1.0 - share)


def part_of(corpora: Corpora, sentences: int) -> Corpora:
    """Return so many sentences of the validation text, of all lengths, and as large a part of the trees."""
    valid = corpora.valid
    assert valid is not None
    every = max(1, len(valid) // sentences)
    indices = np.argsort(valid.lengths, kind="stable")[every // 2 :: every]
    trees = corpora.trees[every // 2 :: every] if corpora.trees else corpora.trees
    return replace(corpora, valid=_taken(valid, indices), trees=trees)


def _taken(text: Sentences, indices: np.ndarray) -> Sentences:
    ids, lengths = text.gather(indices)
    return replace(
        text,
        ids=ids.astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        line_numbers=text.line_numbers[indices],
        limits=None,
    )


def count_evaluations(settings: Settings, total_steps: int, steps_per_epoch: int) -> int:
    """Return how many evaluations a training has that runs to its end."""
    evaluation = settings.evaluation
    if settings.data.valid is None:
        return 0
    after = {total_steps}  # the last step has one in any case
    if evaluation.every_steps:
        after |= set(range(evaluation.every_steps, total_steps, evaluation.every_steps))
    if evaluation.every_epochs is not None:
        between = max(1.0, evaluation.every_epochs * steps_per_epoch)  # steps
        after |= {math.ceil(number * between - 1e-6) for number in range(1, math.ceil(total_steps / between))}
    return len(after)
