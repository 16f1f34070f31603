"""Sums over the lines of a text, with a grammar whose probabilities are given."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyOptions
from lm_pcfg.inference.score import TextScore, score_lines
from lm_pcfg.inference.trained import TrainedGrammar


def trained(log_likelihood) -> TrainedGrammar:
    vocabulary = Vocabulary.build([["a", "b", "c"]], VocabularyOptions())
    grammar = SimpleNamespace(log_likelihood=log_likelihood)
    return TrainedGrammar(grammar, vocabulary, None, Path("nowhere"), {}, "raw", 0, fewest_symbols=1)  # type: ignore[arg-type]


def test_a_line_of_probability_0_is_in_no_sum(tmp_path):
    """Its unknown words are not either: they cost nothing that was counted."""

    def log_likelihood(words, lengths, **options):
        return torch.tensor([-math.inf if length == 3 else -2.0 * length for length in lengths])

    text = tmp_path / "text"
    text.write_text("a zebra\nzebra zebra zebra\nb\n")
    result, warned = TextScore(), list[str]()
    values = score_lines([trained(log_likelihood)], str(text), result, max_length=9, warn=warned.append)
    assert list(values) == [-4.0, -math.inf, -2.0]
    assert (result.total.nll, result.lines, result.skipped) == (pytest.approx(6.0), 2, 1)
    assert (result.words, result.pieces, result.bytes, result.unknown_words) == (3, 3, 8, 1)
    assert list(result.is_scored) == [1, 0, 1]
    assert [message.partition(": ")[2] for message in warned[:1]] == ["probability 0, skipped"]
