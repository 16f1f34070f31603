"""Mixtures word by word: the mean of what several models say of each word, given those before it."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import lm_pcfg
from command_line import lm_pcfg as command
from command_line import ran, refusal
from flash_inside import Rules
from lm_pcfg.corpus.pieces import PieceOptions, PieceVocabulary, train_pieces
from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyOptions
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.grammar.markov import HiddenMarkovModel
from lm_pcfg.inference.model import END, Model
from lm_pcfg.inference.next_word import WordMixture, log_probabilities_after
from lm_pcfg.inference.trained import TrainedGrammar
from small_runs import write_untrained_run
from test_prefixes import short_rules
from texts import write_text

LINES = ["a", "b a", "the cat sees", "", "cat the a b the", "zebra a sees b"]
VOCABULARY = Vocabulary(["<unk>", "a", "b", "the", "cat", "sees"], VocabularyOptions())
THREE = Vocabulary(["<unk>", "a", "b"], VocabularyOptions())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs that have learnt nothing, and a text: two of words, a dense and two compound ones, one of other words."""
    folder = tmp_path_factory.mktemp("mixtures")
    small = {"preterminals": 6, "dimension": 8, "init": "normal(0.5, 0.5)"}
    for name, nonterminals in (("one", 4), ("two", 5)):
        write_untrained_run(folder, name, {"nonterminals": nonterminals, **small})
    write_untrained_run(folder, "dense", {"family": "n_pcfg", "nonterminals": 3, "preterminals": 4, "dimension": 8})
    compound = {"family": "sc_pcfg", "nonterminals": 4, "preterminals": 6, "dimension": 8}
    for name in ("compound", "compound_2"):
        write_untrained_run(folder, name, compound)
    write_untrained_run(folder, "fewer", {"nonterminals": 4, **small}, vocabulary=VOCABULARY)
    lines = write_text(folder / "text", 12, seed=3, longest=8).read_text().splitlines()
    lines[4], lines[5] = "", "cat"
    (folder / "text").write_text("\n".join(lines) + "\n")
    return folder


def random_table(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def words_of(preterminals: int, words: int, seed: int) -> Emission:
    """An emission in fp64, so that results are exact."""
    return Emission.of(random_table(preterminals, 4, seed=seed), random_table(words, 4, seed=seed + 1))


def grammar(vocabulary, seed: int, root: str = "all", share: float = 0.15) -> Grammar:
    return Grammar(*short_rules(3, 4, root=root, seed=seed, share=share), words_of(4, len(vocabulary), seed))


def hmm(vocabulary, seed: int) -> HiddenMarkovModel:
    start, *rows = random_table(6, 5, seed=seed).softmax(1)
    return HiddenMarkovModel(start, (torch.stack(rows),), words_of(5, len(vocabulary), seed))


def two_words(vocabulary, seed: int) -> Grammar:
    """S -> P P alone: no sentence has another length than 2."""
    rules = (torch.tensor(table, dtype=torch.float64) for table in ([1.0, 0.0], [[0.0, 1.0]], [[0.0, 1.0]]))
    return Grammar(*Rules(*rules), words_of(1, len(vocabulary), seed))


def mixture(vocabulary, *grammars, precision: str = "fp64") -> Model:
    about = {"settings": None, "checkpoint": "here", "state": {}, "weights": "raw", "parameters": 0}
    trained = [TrainedGrammar(one, vocabulary, **about, fewest_symbols=1) for one in grammars]  # type: ignore[arg-type]
    return Model(trained, precision=precision)


def next_distribution(model: Model, ids: Sequence[int]) -> np.ndarray | None:
    """Average p(what comes next | ids) of the models, each by itself; None: all give the ids probability 0."""
    found = []
    for one in model.next_words():
        with contextlib.suppress(UserError):  # "these words begin no sentence"
            found.append(np.exp(log_probabilities_after([one], ids)))
    return np.mean(found, axis=0) if found else None


def by_hand(model: Model, ids: Sequence[int]) -> list[float]:
    """Probabilities of each symbol and, last, of the end, up to the first that is 0."""
    found = []
    for place, symbol in enumerate([*ids, -1]):
        p = next_distribution(model, ids[:place])
        if p is None:
            break
        found.append(float(p[symbol]))
    return found


def pieces_of_text(tmp_path, options: PieceOptions) -> PieceVocabulary:
    text = write_text(tmp_path / "pieces.txt", 200, seed=5).read_text().splitlines()
    return PieceVocabulary(train_pieces(text, kind="unigram", size=40).model, options)


@pytest.mark.parametrize("kind", ["words", "three", "ends", "pieces", "pieces_ends", "hmm", "hmm and grammar"])
def test_each_word_has_the_mean_of_its_probabilities(kind, tmp_path):
    vocabulary = VOCABULARY
    if kind.startswith("pieces"):
        vocabulary = pieces_of_text(tmp_path, PieceOptions())
    if kind not in ("words", "three", "pieces"):
        vocabulary = vocabulary.with_end_of_sentence()
    if kind.startswith("hmm"):
        model = mixture(vocabulary, hmm(vocabulary, 1), (hmm if kind == "hmm" else grammar)(vocabulary, 2))
    else:
        model = mixture(vocabulary, *(grammar(vocabulary, seed) for seed in range(3 if kind == "three" else 2)))
    lines = [line for line in LINES if "zebra" not in line] if kind.startswith("pieces") else LINES
    scores, found = model.score(lines, mix="words"), model.surprisal(lines, mix="words", entropy=True)
    for line, score, one in zip(lines, scores, found, strict=True):
        if not line:
            assert math.isnan(score)
            assert one is None
            continue
        ids = vocabulary.tokenise([line])[0]
        steps = by_hand(model, ids)
        bits = -np.log2(steps)
        assert score == pytest.approx(math.fsum(np.log(steps)), rel=1e-9)
        assert one.total == pytest.approx(bits.sum(), rel=1e-9)
        assert one.end == pytest.approx(bits[-1], rel=1e-9, abs=1e-12)
        places = vocabulary.word_boundaries(ids, len(line.split()))
        by_word = [bits[first:end].sum() for first, end in itertools.pairwise(places)]
        np.testing.assert_allclose(one.bits, by_word, rtol=1e-9, atol=1e-12)
        for place, entropy in zip(places, one.entropy, strict=True):
            p = next_distribution(model, ids[:place])
            p = p[p > 0]
            assert entropy == pytest.approx(-(p * np.log2(p)).sum(), rel=1e-9)
    several = [len(line.split()) > 1 for line in lines]
    assert (np.abs(scores - model.score(lines))[several] > 1e-6).all()


@pytest.mark.parametrize("share", [0.15, 4.0], ids=["all derivations end", "some mass is lost"])
def test_probabilities_of_all_strings_sum_to_what_steps_give(share):
    model = mixture(THREE, grammar(THREE, 2, share=share), grammar(THREE, 3))
    longest = 3
    strings = [ids for length in range(1, longest + 1) for ids in itertools.product(range(3), repeat=length)]
    p = np.exp(model.score([" ".join(THREE.words[id] for id in ids) for ids in strings], mix="words"))
    assert (model.finite_mass() < 0.99) == (share > 1)
    beyond = 0.0  # of strings that go on
    for ids in strings:
        if len(ids) == longest:
            *words, end = by_hand(model, ids)
            beyond += math.prod(words) * (1.0 - end)
    assert 0.0 < beyond < 0.7
    assert p.sum() + beyond == pytest.approx(model.finite_mass(), abs=1e-12)
    assert p.sum() < 1.0


def test_one_model_is_the_same_either_way():
    model = mixture(VOCABULARY, grammar(VOCABULARY, 1))
    np.testing.assert_array_equal(model.score(LINES, mix="words"), model.score(LINES))
    both = zip(*(model.surprisal(LINES, mix=mix, entropy=True) for mix in ("words", "sentences")), strict=True)
    for one, other in both:
        if one is not None:
            np.testing.assert_array_equal(one.bits, other.bits)
            assert one.end == other.end
            np.testing.assert_allclose(one.entropy, other.entropy, rtol=1e-12)
    twice = mixture(VOCABULARY, *[grammar(VOCABULARY, 1)] * 2)
    np.testing.assert_allclose(twice.score(LINES, mix="words"), model.score(LINES), rtol=1e-12)


def test_single_precision_is_near():
    grammars = [grammar(VOCABULARY, seed) for seed in (1, 2)]
    exact = mixture(VOCABULARY, *grammars).score(LINES, mix="words")
    np.testing.assert_allclose(
        mixture(VOCABULARY, *grammars, precision="fp32").score(LINES, mix="words"), exact, rtol=1e-5
    )


def test_a_model_that_gives_the_words_before_probability_0_has_no_part():
    model = mixture(VOCABULARY, grammar(VOCABULARY, 1), two_words(VOCABULARY, 2))
    alone = mixture(VOCABULARY, grammar(VOCABULARY, 1)).surprisal(["a b the cat"])[0]
    scores = model.score(["a b", "a b the cat", "a"], mix="words")
    found = model.surprisal(["a b", "a b the cat", "a"], mix="words", entropy=True)
    for line, score, one in zip(["a b", "a b the cat", "a"], scores, found, strict=True):
        steps = by_hand(model, VOCABULARY.tokenise([line])[0])
        assert score == pytest.approx(math.fsum(np.log(steps)), rel=1e-9)
        np.testing.assert_allclose([*one.bits, one.end], -np.log2(steps), rtol=1e-9)
        assert np.isfinite(one.entropy).all()
    assert found[1].bits[2] == pytest.approx(alone.bits[2] + 1.0)  # half of it: the other one expects the end
    assert found[1].bits[3] == pytest.approx(alone.bits[3])
    assert found[1].end == pytest.approx(alone.end)


def test_where_no_model_has_the_words_there_is_nothing():
    model = mixture(VOCABULARY, two_words(VOCABULARY, 1), two_words(VOCABULARY, 2))
    scores = model.score(["a b", "a b the cat", "a", "cat a"], mix="words")
    assert np.isneginf(scores).tolist() == [False, True, True, False]
    _, found, short, _ = model.surprisal(["a b", "a b the cat", "a", "cat a"], mix="words", entropy=True)
    assert found.bits[2] == math.inf
    assert np.isfinite(found.bits[:2]).all()
    assert np.isnan([found.bits[3], found.end]).all()
    assert np.isnan(found.entropy).tolist() == [False, False, False, True, True]
    assert found.entropy[2] == 0.0
    assert short.end == math.inf


def test_the_root_over_nonterminals(folder):
    """One-word lines are then not scored, by the command; by the models themselves they have probability 0."""
    runs = [lm_pcfg.load(folder / "runs" / name).grammars[0].with_root_over_nonterminals() for name in ("one", "two")]
    model = Model(runs, precision="fp64")
    lines = [line for line in (folder / "text").read_text().splitlines() if line]
    scores = model.score(lines, mix="words")
    for line, score in zip(lines, scores, strict=True):
        steps = by_hand(model, model.vocabulary.tokenise([line])[0])
        with np.errstate(divide="ignore"):
            assert score == pytest.approx(np.log(steps).sum(), rel=1e-5)  # emissions are fp32
        assert math.isfinite(score) == (len(line.split()) > 1)
    options = ["--root", "nonterminals", "--precision", "fp64", "--json"]
    report = json.loads(ran(folder, "score", "text", *both("one", "two"), *options))
    assert report["nll"] == pytest.approx(-scores[np.isfinite(scores)].sum(), rel=1e-9)
    assert report["skipped"] == np.isneginf(scores).sum() > 0


# ---- commands -------------------------------------------------------------------------------------------------------


def both(*names: str) -> list[str]:
    return ["--mix", "words", *(part for name in names for part in ("--checkpoint", f"runs/{name}"))]


def test_score_and_surprisal_say_the_same(folder):
    model = lm_pcfg.load(folder / "runs/one", folder / "runs/two")
    scores = model.score((folder / "text").read_text().splitlines(), mix="words")
    arguments = ["text", *both("one", "two"), "--device", "cpu"]
    report = json.loads(ran(folder, "score", *arguments, "--json"))
    assert report["mix"] == "words"
    assert report["nll"] == pytest.approx(-np.nansum(scores), rel=1e-9)
    assert ["mix", "words"] in [line.split() for line in ran(folder, "score", *arguments).splitlines()]
    printed = [float(line or "nan") for line in ran(folder, "score", *arguments, "--per-sentence").splitlines()]
    assert printed == pytest.approx(scores.tolist(), rel=1e-8, nan_ok=True)
    rows = [row.split("\t") for row in ran(folder, "surprisal", *arguments).splitlines()[1:]]
    assert sum(row[2] == END for row in rows) == report["lines"] == 11
    assert sum(float(row[3]) for row in rows) == pytest.approx(report["nll"] / math.log(2), rel=1e-6)
    objects = [json.loads(line) for line in ran(folder, "surprisal", *arguments, "--format", "json").splitlines()]
    totals = [-one["total"] * math.log(2) for one in objects]
    assert totals == pytest.approx(scores[np.isfinite(scores)].tolist(), rel=1e-5)


def test_the_report_says_which_mixture_it_is(folder):
    """Only where there are several checkpoints: otherwise it is none."""
    usual = json.loads(ran(folder, "score", "text", *both("one", "two")[2:], "--json"))
    words = json.loads(ran(folder, "score", "text", *both("one", "two"), "--json"))
    assert usual["mix"] == "sentences"
    assert usual["nll"] != words["nll"]
    assert usual.keys() == words.keys()
    alone = ran(folder, "score", "text", *both("one"), "--json")
    assert "mix" not in json.loads(alone)
    assert alone == ran(folder, "score", "text", *both("one")[2:], "--json")


def test_what_cannot_be_mixed_word_by_word_is_refused_in_one_line(folder):
    no_prefixes = "has no next-word probabilities"
    for names in (["dense"], ["dense", "dense"], ["one", "dense"], ["compound"]):
        assert no_prefixes in refusal(folder, "score", "text", *both(*names))
    assert no_prefixes in refusal(folder, "score", "text", *both("compound"), "--samples", "2")
    assert "give one --checkpoint" in refusal(folder, "score", "text", *both("compound", "compound_2"))
    assert no_prefixes in refusal(folder, "surprisal", "text", *both("one", "dense"))
    assert "different vocabularies" in refusal(folder, "score", "text", *both("one", "fewer"))
    assert "--samples is of compound models" in refusal(folder, "score", "text", *both("one", "two"), "--samples", "2")
    assert command("score", "text", "--mix", "letters", cwd=folder).returncode == 2
    with pytest.raises(UserError, match=no_prefixes):
        lm_pcfg.load(folder / "runs/compound").score(["the cat"], mix="words")


def test_another_mixture_is_refused_in_one_line():
    model = mixture(VOCABULARY, grammar(VOCABULARY, 1))
    for function in (model.score, model.surprisal):
        with pytest.raises(UserError, match="unknown mixture 'letters': use sentences or words"):
            function(["", "a b"], mix="letters")  # type: ignore[operator]
    with pytest.raises(ValueError, match="use auto"):
        WordMixture(model.next_words()).log_likelihood(torch.tensor([1]), [1], precision="fp64", backend="torch")
