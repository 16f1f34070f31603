"""Kneser-Ney n-grams: by hand, against a plain implementation of the formulas, and as distributions."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lm_pcfg import cli
from lm_pcfg.bench.ngram import KneserNey, compare
from lm_pcfg.corpus.sentences import Sentences, encode_sentences
from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyOptions
from lm_pcfg.errors import UserError


def vocabulary_of(lines: list[list[str]]) -> Vocabulary:
    return Vocabulary.build(lines, VocabularyOptions(end_of_sentence=True))


def encoded(lines: list[list[str]], vocabulary: Vocabulary) -> Sentences:
    return encode_sentences([(number, " ".join(line)) for number, line in enumerate(lines, start=1)], vocabulary)


def model_of(lines: list[list[str]], order: int) -> tuple[KneserNey, Vocabulary]:
    vocabulary = vocabulary_of(lines)
    return KneserNey(encoded(lines, vocabulary), order, vocabulary.training_unknown > 0), vocabulary


def random_lines(count: int, seed: int = 0) -> list[list[str]]:
    """Words of very different frequencies, so that discounts can be estimated."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 9, count)
    return [[f"w{number}" for number in np.minimum(generator.zipf(1.6, size), 40)] for size in sizes]


LINES = random_lines(400)


def test_by_hand():
    """a b | a, order 2, discounts 0.5, 1, 1.5. In 48ths p_1: a 14, b 14, end 20."""
    model, vocabulary = model_of([["a", "b"], ["a"]], 2)
    assert model.types == 3
    assert model.orders_with_fallback == [1, 2]
    expected = {"a": [31, 22], "a a b": [31, 7, 19, 34], "b b": [7, 7, 34]}  # 48ths, the end last
    for line, parts in expected.items():
        probabilities = model.probabilities(encoded([line.split()], vocabulary))
        np.testing.assert_allclose(probabilities, np.array(parts) / 48, rtol=1e-14)


def test_discounts_are_those_of_the_counts_of_counts():
    model, _ = model_of(LINES, 3)
    trigrams = Counter(gram for gram in grams_of(LINES, 3))
    n = Counter(trigrams.values())
    y = n[1] / (n[1] + 2 * n[2])
    expected = (1 - 2 * y * n[2] / n[1], 2 - 3 * y * n[3] / n[2], 3 - 4 * y * n[4] / n[3])
    assert model.discounts[2] == pytest.approx(expected)
    assert 3 not in model.orders_with_fallback


def grams_of(lines: list[list[str]], k: int) -> list[tuple[str, ...]]:
    marked = [["<s>", *line, "</s>"] for line in lines]
    grams = [tuple(line[end - k : end]) for line in marked for end in range(k, len(line) + 1)]
    return [gram for gram in grams if gram != ("<s>",)]


def plain_probability(lines, order, discounts):
    """The formulas of the module's first lines, with dictionaries."""
    a = {k: Counter(grams_of(lines, k)) for k in range(1, order + 1)}
    for k in range(1, order):
        preceding = defaultdict(set)
        for gram in grams_of(lines, k + 1):
            preceding[gram[1:]].add(gram[0])
        a[k] = Counter({gram: len(preceding[gram]) if gram[0] != "<s>" else count for gram, count in a[k].items()})
    types = len({gram[0] for gram in a[1]})

    def probability(word, context, k):
        if k == 0:
            return 1 / types
        lower = probability(word, context[1:], k - 1)
        followers = {gram: count for gram, count in a[k].items() if gram[:-1] == context}
        total = sum(followers.values())
        if not total:
            return lower
        taken = {gram: discounts[k - 1][min(count, 3) - 1] for gram, count in followers.items()}
        gram = (*context, word)
        return (followers.get(gram, 0) - taken.get(gram, 0.0)) / total + sum(taken.values()) / total * lower

    return probability


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_are_those_of_the_formulas(order):
    model, vocabulary = model_of(LINES, order)
    plain = plain_probability(LINES, order, model.discounts)
    held_out = [*random_lines(12, seed=1), ["w1"], ["w40", "w40", "w40", "w39", "w1", "w1"]]
    known = {word for line in LINES for word in line}
    held_out = [words for line in held_out if (words := [word for word in line if word in known])]
    expected = []
    for line in held_out:
        marked = ["<s>", *line, "</s>"]
        for place in range(1, len(marked)):
            context = tuple(marked[max(0, place - order + 1) : place])
            expected.append(plain(marked[place], context, len(context) + 1))
    np.testing.assert_allclose(model.probabilities(encoded(held_out, vocabulary)), expected, rtol=1e-12)


@pytest.mark.parametrize("order", [1, 2, 5])
@pytest.mark.parametrize(
    "context", [[], ["w1"], ["w1", "w1", "w2"], ["w40"], ["w1", "w2", "w40", "w40", "w39", "w38"]], ids=" ".join
)
def test_probabilities_sum_to_one_after_seen_and_unseen_contexts(order, context):
    model, vocabulary = model_of(LINES, order)
    words = sorted({word for line in LINES for word in line})
    assert model.types == len(words) + 1
    total = sum(model.probabilities(encoded([[*context, word]], vocabulary))[len(context)] for word in words)
    if context:  # the end is predicted too
        total += model.probabilities(encoded([context], vocabulary))[-1]
    else:
        total += end_of_an_empty_line(model)
    assert total == pytest.approx(1, abs=1e-12)


def end_of_an_empty_line(model: KneserNey) -> float:
    """No text has one (blank lines are left out), yet it has its probability."""
    empty = Sentences(np.array([1], np.int32), np.array([0, 1]), np.array([1]), end_of_sentence=True)
    (probability,) = model.probabilities(empty)
    return probability


def test_order_1_is_relative_frequencies():
    model, vocabulary = model_of([["a", "b"], ["a"], ["a", "c"]], 1)
    np.testing.assert_allclose(
        model.probabilities(encoded([["a", "c", "b"]], vocabulary)), [3 / 8, 1 / 8, 1 / 8, 3 / 8]
    )


# ---- files ----------------------------------------------------------------------------------------------------------


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_tokens_are_words_and_lines(tmp_path):
    train = write(tmp_path / "train", *(" ".join(line) for line in LINES))
    test = write(tmp_path / "test", "w1 w2", "", "w3")
    runner = CliRunner()
    report = json.loads(
        runner.invoke(cli.app, ["bench", "ngram", "--train", train, "--test", test, "--order", "3", "--json"]).stdout
    )
    assert (report["words"], report["lines"], report["tokens"]) == (3, 2, 5)
    assert report["vocabulary"] == len({word for line in LINES for word in line}) + 1
    assert report["ppl"] == pytest.approx(math.exp(report["nll"] / 5))
    assert report["ppl_words"] == pytest.approx(math.exp(report["nll"] / 3))
    unigram = runner.invoke(cli.app, ["bench", "ngram", "--train", train, "--test", test, "--order", "1", "--json"])
    assert json.loads(unigram.stdout)["ppl"] == pytest.approx(report["unigram_ppl"])
    assert "unigram_ppl" in runner.invoke(cli.app, ["bench", "ngram", "--train", train, "--test", test]).stdout


def test_unknown_words(tmp_path):
    """They are <unk> where the training text has that; else there is no probability to give."""
    messages: list[str] = []
    with_unknown = write(tmp_path / "with", "a <unk> b", "b a")
    without = write(tmp_path / "without", "a b b", "b a")
    test = write(tmp_path / "test", "a zebra")
    literal = write(tmp_path / "literal", "a <unk>")
    report = compare(with_unknown, test, 2, None, messages.append)
    assert report["unknown_words"] == 1
    assert report["nll"] == compare(with_unknown, literal, 2, None, messages.append)["nll"]
    assert "too small to estimate the discounts of order 1" in messages[0]
    with pytest.raises(UserError, match="1 words are not in the training text"):
        compare(without, test, 2, None, messages.append)
    assert compare(without, test, 2, 2, messages.append)["vocabulary"] == 3  # <unk>, b and the end


def test_bad_texts_get_one_line(tmp_path):
    train, empty = write(tmp_path / "train", "a b"), write(tmp_path / "empty", "")
    for bad_train, bad_test, message in (
        (empty, train, "has no words"),
        (train, empty, "no sentence in it"),
        (train, "-", "standard input"),
        (str(tmp_path / "gone"), train, "no such file"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            compare(bad_train, bad_test, 3, None, print)
        assert "\n" not in str(caught.value)
