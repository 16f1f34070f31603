"""Bounds on the perplexity of compound models, whose probabilities of sentences are no sums that one can compute.

With w_k = p(x, z_k) / q(z_k | x) for K latent vectors z_k ~ q(z | x) of a sentence,

        evidence lower bound          mean over k of log w_k       its expectation is at most log p(x)
        importance-weighted bound     log of the mean of w_k       likewise, and never below the other; better with K

Both bound log p(x) from below in expectation, so that the perplexities that they give are upper bounds, up to the error
of the estimate. Its standard error comes from the spread of log w_k, or, for the second, from that of w_k.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from flash_inside import Statistics
from lm_pcfg.console import unseen
from lm_pcfg.corpus.sentences import Sentences
from lm_pcfg.distributed.sharing import ALONE, Ranks
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.families import family_of
from lm_pcfg.grammar.likelihood import perplexity, sentence_log_probabilities
from lm_pcfg.inference.lines import OnLines
from lm_pcfg.inference.trained import TrainedGrammar

DEFAULT_SAMPLES = 4


@dataclass
class Bounds:
    """Sums over the lines of a text, of lines that have a probability."""

    samples: int  # latent vectors of a line
    seed: int = 0
    elbo: list[float] = field(default_factory=list)  # nats
    weighted: list[float] = field(default_factory=list)  # nats
    elbo_variance: float = 0.0
    weighted_variance: float = 0.0
    seen: Counter[int] = field(default_factory=Counter)  # how often each line was there, by a hash of its words

    def score(
        self, one: TrainedGrammar, sentences: Sentences, *, precision: str, backend: str, batch_cost: int,
        statistics: Statistics | None = None, on_lines: OnLines = unseen, ranks: Ranks = ALONE,
    ) -> np.ndarray:  # fmt: skip
        """Return the evidence lower bound of every sentence, fp64 [lines], and add to the sums."""
        log_w = np.stack([
            ranks.summed(
                partial(
                    sentence_log_probabilities, one.grammar.estimating("weight", draw=draw, seed=self.seed), sentences,
                    batch_cost=batch_cost, precision=precision, backend=backend, statistics=statistics,
                    on_batch=on_lines if draw + 1 == self.samples else unseen,
                    rank=ranks.rank, world_size=ranks.world_size,
                )
            )
            for draw in range(self.samples)
        ])  # fmt: skip
        elbo = log_w.mean(0)
        there = np.isfinite(elbo)
        self.add(log_w[:, there], [sentences[number] for number in np.flatnonzero(there).tolist()])
        return elbo

    def add(self, log_w: np.ndarray, ids: Sequence[np.ndarray]) -> None:
        """log_w: [K, lines]; ids: the words of each line. Equal lines have the same z, so their errors are the same."""
        highest = log_w.max(0, initial=-math.inf)
        w = np.exp(log_w - highest)
        mean = w.mean(0)
        self.elbo += log_w.mean(0).tolist()
        self.weighted += (highest + np.log(mean)).tolist()
        if self.samples > 1:
            more = np.array([self._more_of_variance(words) for words in ids])
            self.elbo_variance += float(more @ log_w.var(0, ddof=1)) / self.samples
            self.weighted_variance += float(more @ (w.var(0, ddof=1) / mean**2)) / self.samples

    def _more_of_variance(self, words: np.ndarray) -> float:
        """Return how many times its own variance a line adds: the sum of c equal ones has c^2 times that of one."""
        line = int.from_bytes(hashlib.blake2b(words.astype(np.int64).tobytes(), digest_size=8).digest(), "little")
        self.seen[line] += 1
        return 2.0 * self.seen[line] - 1.0

    def report(self, tokens: int) -> dict[str, Any]:
        """What `lm_pcfg score` adds to its report: perplexities per token, which are upper bounds, and their errors."""
        figures: dict[str, Any] = {"samples": self.samples, "ppl_is": "an upper bound (evidence lower bound)"}
        for name, values, variance in (
            ("elbo", self.elbo, self.elbo_variance), ("importance_weighted", self.weighted, self.weighted_variance)
        ):  # fmt: skip
            bound = perplexity(-math.fsum(values) / tokens)
            error = bound * math.sqrt(variance) / tokens if self.samples > 1 else None
            figures |= {f"ppl_at_most_{name}": bound, f"ppl_at_most_{name}_se": error}
        return figures


def bounds_wanted(mixture: Sequence[TrainedGrammar], samples: int | None, seed: int) -> Bounds | None:
    """Return where bounds are summed, for a compound model; refuse what has no meaning in one line."""
    if not any(family_of(one.settings.model).scores_are_bounds for one in mixture):
        if samples is not None:
            family = mixture[0].settings.model.family
            raise UserError(f"--samples is of compound models: the probabilities of family {family} are exact")
        return None
    if len(mixture) > 1:
        raise UserError("the bounds of a compound model are those of one checkpoint: give one --checkpoint")
    return Bounds(samples or DEFAULT_SAMPLES, seed)
