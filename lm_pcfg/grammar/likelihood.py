"""Log-probabilities and perplexity of a corpus under a grammar."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from flash_inside import Statistics
from flash_inside.softmax import product_precision
from lm_pcfg.corpus.batches import make_batch, plan_epoch
from lm_pcfg.corpus.sentences import Sentences
from lm_pcfg.grammar.boundary import Grammar


@dataclass(frozen=True)
class CorpusScore:
    """Sums over the sentences that have a probability; `impossible` ones (probability 0) are in none of them."""

    nll: float  # total negative log-likelihood, natural logarithm
    words: int  # without ends of sentences
    lines: int
    impossible: int

    @property
    def tokens(self) -> int:
        """Words + lines: every line also predicts its end, whether that is a terminal or part of the tree."""
        return self.words + self.lines

    @property
    def perplexity(self) -> float:
        return perplexity(self.nll / self.tokens) if self.tokens else math.nan

    @property
    def words_perplexity(self) -> float:
        """The same likelihood spread over the words alone."""
        return perplexity(self.nll / self.words) if self.words else math.nan


def perplexity(nll: float) -> float:
    """Of a negative log-likelihood per token; inf where exp overflows."""
    return math.exp(nll) if nll < 700 else math.inf


def sentence_log_probabilities(
    grammar: Grammar,
    sentences: Sentences,
    *,
    batch_cost: int,
    precision: str = "fp32",
    backend: str = "auto",
    statistics: Statistics | None = None,
    on_batch: Callable[[int], None] = lambda lines: None,
    rank: int = 0,
    world_size: int = 1,
) -> np.ndarray:
    """fp64 [lines], in the order of the corpus. batch_cost: budget of words squared of a batch.

    Of several ranks each computes every world_size-th batch and leaves 0 elsewhere: their sum is the same, bit for bit.
    """
    scores = np.zeros(len(sentences), dtype=np.float64)
    with torch.no_grad(), product_precision("fp32"):  # of the emission's columns, whatever the chart's is
        plan = plan_epoch(sentences.lengths, by="cost", cost=batch_cost, shuffle=False)
        for indices in plan[rank::world_size]:
            batch = make_batch(sentences, indices)
            log_z = grammar.log_likelihood(
                torch.from_numpy(batch.words), batch.lengths, precision=precision, backend=backend,
                statistics=statistics,
            )  # fmt: skip
            scores[indices] = log_z.double().cpu().numpy()
            on_batch(len(indices))
    return scores


def corpus_score(sentences: Sentences, log_probabilities: np.ndarray) -> CorpusScore:
    """math.fsum: the total does not depend on the order of the sentences."""
    possible = np.isfinite(log_probabilities)
    return CorpusScore(
        nll=-math.fsum(log_probabilities[possible].tolist()),
        words=int(sentences.word_lengths[possible].sum()),
        lines=int(possible.sum()),
        impossible=int((~possible).sum()),
    )
