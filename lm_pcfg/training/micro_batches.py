"""The likelihood of a step's micro-batches, and its gradient at the tensors of the grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from flash_inside import Statistics
from lm_pcfg.corpus.batches import Batch
from lm_pcfg.grammar.boundary import Grammar
from lm_pcfg.settings import InsideSection
from lm_pcfg.training.later import read_later


def accumulate_gradients(
    leaves: Grammar,
    batches: Iterable[Batch],
    scale: float,
    inside: InsideSection,
    of_rules: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, int]:
    """Adds the gradient of scale x (-log-likelihood). Returns -log-likelihood (fp64) and the sentences recomputed.

    Which sentences left the range of the number format is asked only after the backward passes are launched: they have
    no gradient there, and are computed again on their own. To ask before would leave a GPU without work.

    of_rules: memory where the gradients of left and right may come to lie; the rules then lie where they lay before
    """
    nll = torch.zeros((), dtype=torch.float64, device=leaves.root.device)
    looks: list[tuple[Batch, Callable[[], list[bool]]]] = []
    for batch in batches:
        if batch.n_sentences:
            log_z, trusted = leaves.log_likelihood_unchecked(
                torch.from_numpy(batch.words), batch.lengths, precision=inside.precision, backend=inside.backend,
                of_rules=None if looks else of_rules,  # the first batch's; the others add to them
                rules_stay=of_rules is not None,
            )  # fmt: skip
            looks.append((batch, read_later(trusted)))
            log_z = torch.where(trusted, log_z, 0.0)
            (-log_z.sum() * scale).backward()
            nll -= log_z.detach().double().sum()
    statistics = Statistics()
    for batch, look in looks:
        doubtful = [sentence for sentence, good in enumerate(look()) if not good]
        if doubtful:
            sentences = np.split(batch.words, np.cumsum(batch.lengths)[:-1])
            words = np.concatenate([sentences[sentence] for sentence in doubtful])
            log_z = leaves.log_likelihood(
                torch.from_numpy(words), [batch.lengths[sentence] for sentence in doubtful],
                precision=inside.precision, backend=inside.backend, statistics=statistics,
            )  # fmt: skip
            (-log_z.sum() * scale).backward()
            nll -= log_z.detach().double().sum()
    return nll, statistics.recomputed
