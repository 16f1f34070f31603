"""Words that begin as their neighbours in the training text tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lm_pcfg.grammar.contexts import CONTEXTS, NEIGHBOURS, UNSURE, context_vectors, neighbour_information
from lm_pcfg.grammar.families.sections import Init, TablesSection

# 0 never occurs; 1 and 2 stand for one another between 3 and 4, 5 and 6 between 7 and 8.
SENTENCES = [[3, 1, 4], [3, 2, 4], [7, 5, 8], [7, 6, 8], [3, 1, 4, 7, 5, 8], [3, 2, 4, 7, 6, 8]] * 20
IDS = np.array([word for sentence in SENTENCES for word in sentence], dtype=np.int32)
LENGTHS = np.array([len(sentence) for sentence in SENTENCES])
WORDS = 9


def test_information_is_what_counting_by_hand_gives():
    dense = neighbour_information(IDS, LENGTHS, WORDS).to_dense()
    frequencies = np.bincount(IDS, minlength=WORDS)
    column_of = {word: column for column, word in enumerate(np.argsort(-frequencies, kind="stable"))}
    expected = torch.zeros(WORDS, 4 * (WORDS + 1))
    for number, (offset, weight) in enumerate(NEIGHBOURS.items()):
        counts = np.zeros((WORDS, WORDS + 1))
        for sentence in SENTENCES:
            for place, word in enumerate(sentence):
                beside = place + offset
                counts[word, column_of[sentence[beside]] if 0 <= beside < len(sentence) else WORDS] += 1
        share = counts.sum(0) ** 0.75 / (counts.sum(0) ** 0.75).sum()
        for word in range(WORDS):
            for column in np.flatnonzero(counts[word]):
                seen = (counts[word, column] + UNSURE * share[column]) / (counts[word].sum() + UNSURE)
                value = weight * np.log(seen / share[column])
                expected[word, number * (WORDS + 1) + column] = max(0.0, value)
    torch.testing.assert_close(dense, expected)


def test_words_with_the_same_neighbours_begin_alike():
    vectors = context_vectors(IDS, LENGTHS, WORDS, 16, seed=1)
    torch.testing.assert_close(vectors.square().mean(1)[1:], torch.ones(WORDS - 1))
    assert 0.2 < vectors[0].square().mean() < 3.0  # never seen: random
    alike = vectors[1:] @ vectors[1:].T / 16
    assert alike[0, 1] > 0.99  # 1 and 2
    assert alike[4, 5] > 0.99  # 5 and 6
    assert alike[0, 4] < 0.5


def test_the_seed_decides():
    vectors = context_vectors(IDS, LENGTHS, WORDS, 4, seed=1)  # fewer coordinates than contexts
    state = torch.random.get_rng_state()
    torch.testing.assert_close(context_vectors(IDS, LENGTHS, WORDS, 4, seed=1), vectors, rtol=0, atol=0)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.allclose(context_vectors(IDS, LENGTHS, WORDS, 4, seed=2), vectors)


def test_only_frequent_words_are_contexts():
    ids = np.arange(CONTEXTS + 100)
    assert neighbour_information(ids, np.array([len(ids)]), len(ids)).shape == (len(ids), 4 * (CONTEXTS + 1))


def test_one_sentence_of_one_word():
    assert context_vectors(np.array([0]), np.array([1]), 1, 8, seed=0).isfinite().all()


def test_settings():
    assert str(Init.parse("contexts(0.1, 0.3)")) == "contexts(0.1, 0.3)"
    assert Init.parse("contexts(0.1, 0.3)") == Init("contexts", 0.1, 0.3)
    with pytest.raises(ValueError, match="contexts needs word embeddings"):
        TablesSection(nonterminals=4, init="contexts(1, 1)")
