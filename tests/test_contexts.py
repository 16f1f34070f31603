"""Words that begin as their neighbours in the training text tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lm_pcfg.grammar.contexts import (
    CONTEXTS,
    NEIGHBOURS,
    UNSURE,
    EncodedText,
    context_vectors,
    neighbour_information,
    singular_vectors,
)
from lm_pcfg.grammar.families.shared.sections import Init, TablesSection

# 0 never occurs; 1 and 2 stand for one another between 3 and 4, 5 and 6 between 7 and 8.
SENTENCES = [[3, 1, 4], [3, 2, 4], [7, 5, 8], [7, 6, 8], [3, 1, 4, 7, 5, 8], [3, 2, 4, 7, 6, 8]] * 20
IDS = np.array([word for sentence in SENTENCES for word in sentence], dtype=np.int32)
LENGTHS = np.array([len(sentence) for sentence in SENTENCES])
WORDS = 9
TEXT = EncodedText(IDS, LENGTHS, torch.device("cpu"))


def drawn(words=300, sentences=400, device="cpu"):
    """A text of words by Zipf's law, whose neighbours tell next to nothing: singular values lie close together."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 30, sentences)
    ids = (words ** generator.random(lengths.sum())).astype(np.int32) - 1
    return EncodedText(ids, lengths, torch.device(device))


def test_information_is_what_counting_by_hand_gives():
    dense = neighbour_information(IDS, LENGTHS, WORDS).to_dense()
    frequencies = np.bincount(IDS, minlength=WORDS)
    column_of = {word: column for column, word in enumerate(np.argsort(-frequencies, kind="stable"))}
    expected = torch.zeros(WORDS, 4 * (WORDS + 1), dtype=torch.float64)
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
    vectors = context_vectors(TEXT, WORDS, 16, seed=1)
    torch.testing.assert_close(vectors.square().mean(1)[1:], torch.ones(WORDS - 1), rtol=1e-2, atol=0)
    assert 0.2 < vectors[0].square().mean() < 3.0  # never seen: random
    alike = vectors[1:] @ vectors[1:].T / 16
    assert alike[0, 1] > 0.99  # 1 and 2
    assert alike[4, 5] > 0.99  # 5 and 6
    assert alike[0, 4] < 0.5


def test_the_seed_decides():
    vectors = context_vectors(TEXT, WORDS, 4, seed=1)  # fewer coordinates than contexts
    state = torch.random.get_rng_state()
    torch.testing.assert_close(context_vectors(TEXT, WORDS, 4, seed=1), vectors, rtol=0, atol=0)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.allclose(context_vectors(TEXT, WORDS, 4, seed=2), vectors)


def test_singular_vectors_are_those_of_a_decomposition():
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.randn(n, 4, dtype=torch.float64, generator=generator) for n in (30, 20))
    u, s, _ = torch.linalg.svd(left @ right.T)
    vectors, values = singular_vectors((left @ right.T).to_sparse(), 6, generator)  # the last two are 0, and left out
    torch.testing.assert_close(values.flip(0), s[:4])
    torch.testing.assert_close(vectors @ vectors.T, u[:, :4] @ u[:, :4].T)
    torch.testing.assert_close((vectors.flip(1).T @ u[:, :4]).abs(), torch.eye(4, dtype=torch.float64))


def test_strengths_that_fall_slowly_are_found_nearly():
    """Without iterations the last of these are a fifth too low."""
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.linalg.qr(torch.randn(n, 40, dtype=torch.float64, generator=generator)).Q for n in (60, 50))
    values = 0.9 ** torch.arange(40, dtype=torch.float64)
    _, found = singular_vectors(((left * values) @ right.T).to_sparse(), 20, generator)
    assert len(found) == 20
    torch.testing.assert_close(found.flip(0)[:19], values[:19], rtol=0.02, atol=0)
    assert (found.flip(0) <= values[:20] * (1 + 1e-9)).all()


def test_the_signs_of_a_decomposition_do_not_matter(monkeypatch):
    """They are what a library, a device or a number of threads chooses."""
    text = drawn()
    vectors = context_vectors(text, 300, 64, seed=1)
    eigh = torch.linalg.eigh

    def turned(matrix):
        values, found = eigh(matrix)
        return values, found * (-1) ** torch.arange(len(values))

    monkeypatch.setattr(torch.linalg, "eigh", turned)
    assert torch.equal(context_vectors(text, 300, 64, seed=1), vectors)


def test_the_number_of_threads_does_not_matter():
    text, before = drawn(1000, 1000), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        vectors = context_vectors(text, 1000, 64, seed=1)
        torch.set_num_threads(2)
        assert torch.equal(context_vectors(text, 1000, 64, seed=1), vectors)
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_finds_the_same_vectors():
    vectors = context_vectors(drawn(1000, 1000), 1000, 64, seed=1)
    torch.cuda.reset_peak_memory_stats()
    of_gpu = context_vectors(drawn(1000, 1000, "cuda"), 1000, 64, seed=1)
    assert torch.cuda.max_memory_allocated() > 1000 * 64 * 8  # it was computed there
    assert not of_gpu.is_cuda
    assert (vectors != of_gpu).sum() <= 2  # of 64,000, where a number lies between two of bf16


def test_only_frequent_words_are_contexts():
    ids = np.arange(CONTEXTS + 100)
    assert neighbour_information(ids, np.array([len(ids)]), len(ids)).shape == (len(ids), 4 * (CONTEXTS + 1))


def test_one_sentence_of_one_word():
    assert (
        context_vectors(EncodedText(np.array([0]), np.array([1]), torch.device("cpu")), 1, 8, seed=0).isfinite().all()
    )


def test_settings():
    assert str(Init.parse("contexts(0.1, 0.3)")) == "contexts(0.1, 0.3)"
    assert Init.parse("contexts(0.1, 0.3)") == Init("contexts", 0.1, 0.3)
    with pytest.raises(ValueError, match="contexts needs word embeddings"):
        TablesSection(nonterminals=4, init="contexts(1, 1)")
