"""Gradients of micro-batches at the grammar's tensors, with sentences that leave the range of the number format."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flash_inside import Statistics
from flash_inside.softmax import log_normalizers
from lm_pcfg.corpus.batches import Batch
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.grammar.likelihood import accumulate_gradients
from lm_pcfg.settings import InsideSection

N, P, V = 6, 9, 14


def grammar(deviation: float, seed: int) -> Grammar:
    generator = torch.Generator().manual_seed(seed)

    def probabilities(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * deviation).softmax(-1)

    features, words = torch.randn(P, 3, generator=generator) * deviation, torch.randn(V, 3, generator=generator)
    emission = Emission(features, words, log_normalizers(features, words))
    root = probabilities(N + P).double()
    return Grammar(root, probabilities(N, N + P), probabilities(N, N + P), emission).detached()


def batch(*lengths: int, seed: int) -> Batch:
    words = np.random.default_rng(seed).integers(0, V, sum(lengths))
    return Batch(words, list(lengths), np.arange(len(lengths)), sum(lengths))


@pytest.mark.parametrize("deviation", [1.0, 30.0])
def test_asking_later_changes_nothing(deviation):
    """Against log-likelihoods that are checked before the backward pass; at 30 some sentences leave the range."""
    batches = [batch(7, 3, 12, 1, seed=1), batch(seed=2), batch(9, 9, 2, seed=3)]
    recomputed = 0
    for seed in range(6):
        one, other = grammar(deviation, seed), grammar(deviation, seed)
        nll, recomputed_here = accumulate_gradients(one, batches, 0.25, InsideSection(precision="fp32"))
        statistics, total = Statistics(), 0.0
        for part in batches:
            if part.n_sentences:
                log_z = other.log_likelihood(torch.from_numpy(part.words), part.lengths, statistics=statistics)
                (-log_z.sum() * 0.25).backward()
                total -= log_z.double().sum().item()
        assert recomputed_here == statistics.recomputed
        recomputed += recomputed_here
        assert nll.item() == pytest.approx(total, rel=1e-6)
        for mine, plain in zip(one.tensors, other.tensors, strict=True):
            torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-4, atol=1e-6 * plain.grad.abs().max().item())
    assert (recomputed > 0) == (deviation > 1)
