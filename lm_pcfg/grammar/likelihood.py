"""The likelihood of sentences under a model: gradients for training, log-probabilities and perplexity for scoring."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flash_inside import Statistics
from flash_inside.devices import copy_to_host
from flash_inside.packing import taken
from flash_inside.softmax import product_precision
from lm_pcfg.console import Advance, unseen
from lm_pcfg.corpus.batches import Batch, BatchOptions, describe_lengths, make_batch, plan_batches
from lm_pcfg.corpus.sentences import Sentences
from lm_pcfg.errors import memory_told
from lm_pcfg.grammar.families.shared.family import Distribution, Likelihood
from lm_pcfg.settings import InsideSection

LONG = 500  # symbols of a sentence that progress names before it is computed: time grows with the cube


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
    """Return the perplexity of a negative log-likelihood per token; inf where exp overflows."""
    return math.exp(nll) if nll < 700 else math.inf


def sentence_log_probabilities(
    model: Likelihood,
    sentences: Sentences,
    *,
    batch_cost: int,
    precision: str = "fp32",
    backend: str = "auto",
    statistics: Statistics | None = None,
    on_batch: Advance = unseen,
    rank: int = 0,
    world_size: int = 1,
) -> np.ndarray:
    """Return fp64 [lines], in the order of the corpus. batch_cost: budget of words squared of a batch.

    Each of several ranks computes every world_size-th batch and leaves 0 elsewhere: the sum over ranks is exact.
    on_batch: called with the lines that are done when all ranks are as fast as this one.
    """
    scores = np.zeros(len(sentences), dtype=np.float64)
    with torch.no_grad(), product_precision("fp32"):  # of the emission's columns, whatever the chart's is
        plan = plan_batches(sentences.lengths, BatchOptions(by="cost", cost=batch_cost))
        for number, indices in enumerate(plan[rank::world_size]):
            batch = make_batch(sentences, indices)
            tell_long(batch.lengths, on_batch)
            with memory_told(
                partial(describe_lengths, batch.lengths, sentences.unit),
                partial(_smaller_batches, batch_cost, len(indices)),
            ):
                log_z = model.log_likelihood(
                    torch.from_numpy(batch.words), batch.lengths, precision=precision, backend=backend,
                    statistics=statistics,
                )  # fmt: skip
            scores[indices] = log_z.double().cpu().numpy()
            on_batch(sum(map(len, plan[number * world_size : (number + 1) * world_size])))
    return scores


def _smaller_batches(batch_cost: int, sentences: int) -> str:
    """Say which settings make a batch of a text that is scored smaller."""
    half = batch_cost // 2
    smaller = f"evaluation.batch_cost={half} while training, --batch-cost {half} of `lm_pcfg score`, "
    fewer = "fewer symbols (model.nonterminals, model.rank or model.states)"
    return f"{smaller if sentences > 1 else ''}a lower --max-length, or {fewer}"


def tell_long(lengths: Sequence[int], on_batch: Advance) -> None:
    """Have progress name the longest sentence of a batch that will take long."""
    if (longest := max(lengths, default=0)) >= LONG:
        on_batch(0, f"now a line of length {longest:,}")


def corpus_score(sentences: Sentences, log_probabilities: np.ndarray) -> CorpusScore:
    """math.fsum: the total does not depend on the order of the sentences."""
    possible = np.isfinite(log_probabilities)
    return CorpusScore(
        nll=-math.fsum(log_probabilities[possible].tolist()),
        words=int(sentences.word_lengths[possible].sum()),
        lines=int(possible.sum()),
        impossible=int((~possible).sum()),
    )


def accumulate_gradients(
    leaves: Distribution, batches: Iterable[Batch], scale: float, inside: InsideSection
) -> tuple[Tensor, int]:
    """Add the gradient of scale x (-log-likelihood); return -log-likelihood (fp64) and the sentences recomputed.

    The host asks which sentences left the range of the number format only after the backward passes are launched, so
    that a GPU never idles. Those sentences have no gradient yet; they go through `log_likelihood`, which recomputes.
    """
    how = {"precision": inside.precision, "backend": inside.backend}
    unchecked = getattr(leaves, "log_likelihood_unchecked", None)
    nll = torch.zeros((), dtype=torch.float64, device=leaves.tensors[0].device)
    statistics = Statistics()
    checks: list[tuple[Batch, Callable[[], list[bool]]]] = []

    def add(log_z: Tensor) -> None:
        (-log_z.sum() * scale).backward()
        nll.sub_(log_z.detach().double().sum())

    for batch in batches:
        if not batch.n_sentences:
            continue
        words = torch.from_numpy(batch.words)
        brackets: dict[str, Any] = {} if batch.limits is None else {"limits": batch.limits}
        if unchecked is None:
            add(leaves.log_likelihood(words, batch.lengths, statistics=statistics, **how, **brackets))
        else:
            log_z, trusted = unchecked(words, batch.lengths, **how, **brackets)
            checks.append((batch, copy_to_host(trusted)))
            add(torch.where(trusted, log_z, 0.0))
    for batch, check in checks:
        doubtful = [sentence for sentence, good in enumerate(check()) if not good]
        if doubtful:
            words = torch.from_numpy(taken(batch.words, batch.lengths, doubtful))
            lengths = [batch.lengths[sentence] for sentence in doubtful]
            brackets = {} if batch.limits is None else {"limits": taken(batch.limits, batch.lengths, doubtful)}
            add(leaves.log_likelihood(words, lengths, statistics=statistics, **how, **brackets))
    return nll, statistics.recomputed
