"""Score the validation text with the current weights. Processes share the work; the result is the same, bit for bit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from flash_inside import Statistics
from lm_pcfg.corpus.sentences import Sentences
from lm_pcfg.corpus.stream import BatchStream
from lm_pcfg.distributed.collectives import Collectives
from lm_pcfg.grammar.computation import EXACT
from lm_pcfg.grammar.likelihood import CorpusScore, corpus_score, sentence_log_probabilities
from lm_pcfg.settings import EvaluationSection, Settings


@dataclass(frozen=True)
class Evaluation:
    score: CorpusScore
    recomputed: float
    grammar: dict[str, float]  # entropies and the like
    seconds: float

    def metrics(self) -> dict[str, float]:
        return {
            "valid/ppl": self.score.perplexity,
            "valid/ppl_words": self.score.words_perplexity,
            "valid/nll": self.score.nll,
            "valid/tokens": self.score.tokens,
            "valid/impossible": self.score.impossible,
            "valid/recomputed": self.recomputed,
            "valid/seconds": round(self.seconds, 3),
            **self.grammar,
        }

    def describe(self) -> str:
        impossible = f", {self.score.impossible} sentences with probability 0" if self.score.impossible else ""
        return f"validation perplexity {self.score.perplexity:.3f}{impossible}"


def is_due(settings: EvaluationSection, step: int, stream: BatchStream, epoch: int, batch_before: int) -> bool:
    """Return whether to evaluate after this step, which began at batch `batch_before` of `epoch`."""
    if settings.every_steps and step % settings.every_steps == 0:
        return True
    if settings.every_epochs is None:
        return False
    batches = stream.batches_per_epoch(epoch)
    after = stream.state()
    done = batches if after["epoch"] > epoch else after["batch"]
    passed = [math.floor((epoch + part / batches) / settings.every_epochs + 1e-9) for part in (batch_before, done)]
    return passed[1] > passed[0]


class _Interrupted(Exception):
    pass


def evaluate(
    skeleton: nn.Module,
    weights: dict[str, Tensor],
    valid: Sentences,
    settings: Settings,
    processes: Collectives,
    stop_asked: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Put `weights` (raw, averaged or gathered) into `skeleton`, a module on `meta`, and score the text.

    Return None if a process was asked to stop meanwhile: a scheduler does not wait for the end of a long text.
    """
    began = time.perf_counter()
    statistics = Statistics()

    def check(lines: int) -> None:
        if stop_asked():
            raise _Interrupted

    own, interrupted = np.zeros(len(valid)), False
    with torch.no_grad():
        grammar = functional_call(skeleton, weights, (EXACT,))
        try:
            own = sentence_log_probabilities(
                grammar, valid, batch_cost=settings.evaluation.batch_cost, precision=settings.evaluation.precision,
                backend=settings.inside.backend, statistics=statistics, on_batch=check,
                rank=processes.rank, world_size=processes.world_size,
            )  # fmt: skip
        except _Interrupted:
            interrupted = True
        recomputed, interruptions = processes.sums([float(statistics.recomputed), float(interrupted)])
        if interruptions:
            return None
        properties = grammar.describe()
    log_p = processes.all_reduce(torch.from_numpy(own).to(processes.device)).cpu().numpy()
    return Evaluation(corpus_score(valid, log_p), recomputed, properties, time.perf_counter() - began)
