"""Surprisals, next words and completions: sums equal scores, distributions sum to one, draws have the right shares."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lm_pcfg
from flash_inside import Rules
from lm_pcfg.cli import app
from lm_pcfg.commands.text.surprisal import _object, _rows
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.grammar import Grammar, GrammarPrefixes
from lm_pcfg.grammar.markov import HiddenMarkovModel
from lm_pcfg.inference.model import END, Model
from lm_pcfg.inference.next_word import GrowingSentence, NextWords, complete
from small_runs import train_small_runs
from test_prefixes import short_rules

LINES = ["the cat sees a dog", "", "the zebra sleeps", "the old cat near the house sleeps and runs"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds, explicit ends, pieces, in rank space, a hidden Markov model, a dense PCFG."""
    return train_small_runs(
        tmp_path_factory.mktemp("next"), ["one", "two", "ends", "pieces", "pieces_ends", "rank_pcfg", "nhmm", "n_pcfg"]
    )


@pytest.mark.parametrize("name", ["one", "ends", "pieces", "pieces_ends", "rank_pcfg", "nhmm"])
def test_surprisals_sum_to_the_score(runs, name):
    model = lm_pcfg.load(runs / name)
    model.precision = "fp64"
    found, scores = model.surprisal(LINES), model.score(LINES)
    assert found[1] is None
    for line, one, score in zip(LINES, found, scores, strict=True):
        if one is not None:
            assert one.words == line.split()
            assert len(one.bits) == len(one.words)
            assert one.total == pytest.approx(-score / math.log(2), rel=1e-12 if name != "nhmm" else 1e-6)
            assert (one.bits > 0).all()
            assert one.entropy is None


def test_several_checkpoints_average_prefix_probabilities(runs):
    model = lm_pcfg.load(runs / "one", runs / "two")
    found, scores = model.surprisal(LINES[:1]), model.score(LINES[:1])
    assert found[0].total == pytest.approx(-scores[0] / math.log(2), rel=1e-6)
    separate = [lm_pcfg.load(runs / name).surprisal(LINES[:1])[0].bits[0] for name in ("one", "two")]
    assert found[0].bits[0] == pytest.approx(-np.log2(np.mean(np.exp2(-np.array(separate)))), rel=1e-6)
    together = np.exp(model.log_probabilities("the cat"))
    assert together.sum() == pytest.approx(1.0, abs=1e-5)  # emissions are fp32


@pytest.mark.parametrize("name", ["one", "ends", "pieces", "rank_pcfg", "nhmm"])
def test_next_words_sum_to_one_and_agree_with_surprisals(runs, name):
    model = lm_pcfg.load(runs / name)
    model.precision = "fp64"
    line = LINES[0]
    (found,) = model.surprisal([line], entropy=True)
    words = line.split()
    for place, word in enumerate(words):
        log_p = model.log_probabilities(" ".join(words[:place]))
        assert log_p.shape == (len(model.vocabulary) + 1,)
        mass = 1.0 if place else model.finite_mass()  # hardly trained, it loses some
        if name == "ends":  # the rest is that of strings that do not end in a single <eos>
            assert 0.1 < np.exp(log_p).sum() < mass
        else:
            assert np.exp(log_p).sum() == pytest.approx(mass, abs=1e-5)  # emissions are fp32
        if name != "pieces":
            (id,) = model.vocabulary.tokenise([word])[0]
            assert -log_p[id] / math.log(2) == pytest.approx(found.bits[place], rel=1e-5)
            terms = [p * math.log2(p) for p in np.exp(log_p).tolist() if p > 0]
            assert found.entropy[place] == pytest.approx(-math.fsum(terms), rel=1e-5)
    log_p = model.log_probabilities(line)
    assert -log_p[-1] / math.log(2) == pytest.approx(found.end, rel=1e-5)
    terms = [p * math.log2(p) for p in np.exp(log_p).tolist() if p > 0]
    assert found.entropy[-1] == pytest.approx(-math.fsum(terms), rel=1e-5)
    assert len(found.entropy) == len(words) + 1
    assert len(found.entropy_reduction) == len(words)
    assert found.entropy_reduction[0] == found.entropy[0] - found.entropy[1]


@pytest.mark.parametrize("name", ["one", "ends", "nhmm"])
def test_the_end_is_the_same_everywhere(runs, name, tmp_path):
    """In rows of surprisal, in log_probabilities, in `next`, and in sentences that grow."""
    model = lm_pcfg.load(runs / name)
    vocabulary = model.vocabulary
    for line in ("the cat", "the cat sees a dog"):
        log_p = model.log_probabilities(line)
        grown = GrowingSentence(model.next_words(), vocabulary.tokenise([line])[0]).log_probabilities()
        np.testing.assert_allclose(grown, log_p, rtol=1e-6)  # emissions are fp32
        (tmp_path / "line").write_text(line + "\n")
        arguments = ["--precision", "fp64", "--checkpoint", str(runs / name)]
        rows = CliRunner().invoke(app, ["surprisal", str(tmp_path / "line"), *arguments]).stdout.splitlines()
        number, place, word, bits = rows[-1].split("\t")
        assert (number, place, word) == ("1", str(len(line.split()) + 1), END)
        assert float(bits) == pytest.approx(-log_p[-1] / math.log(2), abs=2e-6)
        arguments = ["next", line, "--top", "99", "--json", "--checkpoint", str(runs / name)]
        following = json.loads(CliRunner().invoke(app, arguments).stdout)["next"]
        shares = {one["word"]: one["probability"] for one in following}
        assert -math.log2(shares[END]) == pytest.approx(float(bits), abs=2e-6)
        if vocabulary.end_id is not None:
            assert log_p[vocabulary.end_id] == -math.inf
            assert "<eos>" not in shares or shares["<eos>"] == 0.0


def test_entropies_of_explicit_ends_in_batches_of_lines(runs):
    model = lm_pcfg.load(runs / "ends")
    model.precision = "fp64"
    together = model.surprisal(LINES, entropy=True)
    for line, found in zip(LINES, together, strict=True):
        if found is not None:
            (alone,) = model.surprisal([line], entropy=True)
            np.testing.assert_allclose(found.entropy, alone.entropy, rtol=1e-9)


def test_long_prefixes_are_computed_at_once(runs, monkeypatch):
    """They do not grow word by word, which takes minutes."""
    monkeypatch.setattr(GrammarPrefixes, "growing", None)
    generator = torch.Generator().manual_seed(0)
    model = lm_pcfg.load(runs / "one")
    words = torch.randn(len(model.vocabulary), 4, dtype=torch.float64, generator=generator)
    emission = Emission.of(torch.randn(64, 4, dtype=torch.float64, generator=generator), words)
    grammar = Grammar(*short_rules(64, 64, seed=1, share=0.9), emission)
    model = Model([replace(model.grammars[0], grammar=grammar)])
    started = time.perf_counter()
    log_p = model.log_probabilities("the cat sees a " * 40)
    assert time.perf_counter() - started < 30
    assert np.exp(log_p).sum() == pytest.approx(1.0, abs=1e-9)


def test_next_words_of_a_hidden_markov_model_sum_to_one(runs):
    generator = torch.Generator().manual_seed(0)
    trained = lm_pcfg.load(runs / "nhmm").grammars[0]
    start, *rows = torch.randn(6, 5, dtype=torch.float64, generator=generator).softmax(1)
    tables = [torch.randn(size, 4, dtype=torch.float64, generator=generator) for size in (5, len(trained.vocabulary))]
    model = Model([replace(trained, grammar=HiddenMarkovModel(start, (torch.stack(rows),), Emission.of(*tables)))])
    for prefix in ("", "the", "the cat sees a dog " * 20):
        assert np.exp(model.log_probabilities(prefix)).sum() == pytest.approx(1.0, abs=1e-12)


def test_perplexity_from_next_words_is_that_of_sentences(runs):
    model = lm_pcfg.load(runs / "one")
    model.precision = "fp64"
    for line in LINES[::3]:
        words, log_p = line.split(), 0.0
        for place in range(len(words) + 1):
            following = model.log_probabilities(" ".join(words[:place]))
            log_p += following[-1 if place == len(words) else model.vocabulary.tokenise([words[place]])[0][0]]
        assert log_p == pytest.approx(model.score([line])[0], rel=1e-5)


def tiny(seed: int = 2):
    """A grammar over three words, of which few sentences are long."""
    rules = short_rules(2, 3, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    tables = [torch.randn(size, 4, dtype=torch.float64, generator=generator) for size in (3, 3)]
    return Grammar(*rules, Emission.of(*tables)), rules


def test_completions_have_the_right_shares(runs):
    """Chi-squared over 100,000 completions of a prefix, rare ones pooled."""
    grammar, _ = tiny()
    trained = replace(lm_pcfg.load(runs / "one").grammars[0], grammar=grammar)
    begun, count = [1, 0], 100_000
    drawn = NextWords(trained).complete(begun, count, random=np.random.default_rng(0), max_length=9)
    shares = Counter(None if ids is None else tuple(ids) for ids in drawn)
    strings = [string for string in shares if string is not None]
    assert all(list(string[:2]) == begun for string in strings)
    lengths = [len(string) for string in strings]
    words = torch.tensor([word for string in strings for word in string])
    log_p = grammar.log_likelihood(words, lengths, precision="fp64")
    begins = NextWords(trained).prefixes(torch.tensor(begun), [2], precision="fp64").begins[-1]
    expected = (log_p - begins).exp() * count
    common = [index for index in range(len(strings)) if expected[index] >= 10]
    observed = np.array([shares[strings[index]] for index in common])
    wanted = expected[common].numpy()
    observed, wanted = np.append(observed, count - observed.sum()), np.append(wanted, count - wanted.sum())
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    degrees = len(common)
    # Wilson and Hilferty's approximation; 3.09 standard deviations are a probability of 0.001
    deviation = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
    assert degrees > 20
    assert deviation < 3.09


def with_words(runs, logits: list[float], seed: int = 2) -> NextWords:
    """Tiny rules whose preterminals all have the same words, with these logits."""
    rules = short_rules(2, 3, seed=seed)
    emission = Emission.of(torch.ones(3, 1, dtype=torch.float64), torch.tensor(logits, dtype=torch.float64)[:, None])
    return NextWords(replace(lm_pcfg.load(runs / "one").grammars[0], grammar=Grammar(*rules, emission)))


def test_completions_of_a_mixture_follow_the_model_given_the_prefix(runs):
    """Word 1 is three times as likely in the first grammar, so after two of them it has 9 draws of 10."""
    logits = [[0.0, math.log(6.0), math.log(3.0)], [math.log(7.0), math.log(2.0), 0.0]]
    models = [with_words(runs, one) for one in logits]
    count = 20_000
    drawn = [ids for ids in complete(models, [1, 1], count, seed=0, max_length=60) if ids is not None]
    assert len(drawn) > 0.99 * count
    # The mean share of word 0 among the words that follow: 0.1 in one grammar, 0.7 in the other, weighted by p(model)
    thirds = Counter(ids[2] for ids in drawn if len(ids) > 2)
    share = thirds[0] / thirds.total()
    assert share == pytest.approx(0.9 * 0.1 + 0.1 * 0.7, abs=0.02)  # an even choice would give 0.4
    drawn = complete(models, [], 4000, seed=0, max_length=60)
    firsts = Counter(ids[0] for ids in drawn if ids is not None)
    assert firsts[0] / firsts.total() == pytest.approx(0.4, abs=0.04)


def test_the_entropy_of_a_mixture_is_that_of_the_mean_distribution(runs):
    model = lm_pcfg.load(runs / "one", runs / "two")
    model.precision = "fp64"
    line = LINES[0]
    (found,) = model.surprisal([line], entropy=True)
    alone = [lm_pcfg.load(runs / name).surprisal([line], entropy=True)[0].entropy for name in ("one", "two")]
    for place in range(6):
        p = np.exp(model.log_probabilities(" ".join(line.split()[:place])))
        p = p[p > 0]
        assert found.entropy[place] == pytest.approx(-(p * np.log2(p)).sum(), rel=1e-5)
    assert not np.allclose(found.entropy, np.mean(alone, axis=0), rtol=1e-4)


@pytest.mark.parametrize("name", ["one", "ends", "pieces", "nhmm"])
def test_completions_begin_with_the_prefix(runs, name):
    model = lm_pcfg.load(runs / name)
    found = model.complete("the cat", 8, seed=3, max_length=30)
    assert found == model.complete("the cat", 8, seed=3, max_length=30)
    texts = [text for text in found if text is not None]
    assert texts or name == "ends"  # hardly trained, it does not know where <eos> belongs
    assert all(text.startswith("the cat") for text in texts)
    mixed = lm_pcfg.load(runs / "one", runs / "two").complete("the cat", 8, seed=3, max_length=30)
    assert len(mixed) == 8


def test_commands(runs, tmp_path):
    checkpoint = ["--checkpoint", str(runs / "one")]
    (tmp_path / "lines").write_text("\n".join(LINES) + "\n")
    shown = CliRunner().invoke(app, ["surprisal", str(tmp_path / "lines"), "--entropy", *checkpoint]).stdout
    rows = [row.split("\t") for row in shown.splitlines()]
    assert rows[0] == ["line", "position", "word", "surprisal", "entropy", "entropy_reduction"]
    assert [row[2] for row in rows[1:7]] == [*LINES[0].split(), END]
    arguments = ["surprisal", str(tmp_path / "lines"), "--format", "json", *checkpoint]
    objects = [json.loads(line) for line in CliRunner().invoke(app, arguments).stdout.splitlines()]
    assert [one["line"] for one in objects] == [1, 3, 4]
    assert objects[0]["surprisal"] == pytest.approx([float(row[3]) for row in rows[1:6]], abs=1e-6)
    shown = CliRunner().invoke(app, ["next", "the cat", "--top", "3", "--json", *checkpoint]).stdout
    following = json.loads(shown.splitlines()[-1])["next"]
    assert len(following) == 3
    assert following[0]["probability"] >= following[1]["probability"]
    shown = CliRunner().invoke(app, ["next", "zebu", "--top", "2", *checkpoint])
    assert "does not have zebu" in shown.output
    shown = CliRunner().invoke(app, ["next", "", "--json", *checkpoint])  # hardly trained, it loses mass
    assert "of first words sum to" in shown.stderr
    assert 0.0 < json.loads(shown.stdout)["mass"] < 1.0
    arguments = ["sample", "--prefix", "the", "-n", "4", "--max-length", "20", *checkpoint]
    assert all(text.startswith("the") for text in CliRunner().invoke(app, arguments).stdout.splitlines())
    assert CliRunner().invoke(app, ["sample", "--prefix", "the", "--trees", *checkpoint]).exit_code == 2


def test_after_a_word_of_probability_0_there_is_nothing(runs):
    """S -> P P alone: sentences have two words."""
    rules = Rules(*(torch.tensor(table, dtype=torch.float64) for table in ([1.0, 0.0], [[0.0, 1.0]], [[0.0, 1.0]])))
    trained = lm_pcfg.load(runs / "one").grammars[0]
    words = torch.zeros(len(trained.vocabulary), 4, dtype=torch.float64)
    grammar = Grammar(*rules, Emission.of(torch.zeros(1, 4, dtype=torch.float64), words))
    model = Model([replace(trained, grammar=grammar)], precision="fp64")
    (found,) = model.surprisal(["the cat sees a"], entropy=True)
    assert found.bits[2] == math.inf
    assert math.isnan(found.bits[3])
    assert math.isnan(found.end)
    each = math.log2(len(words))
    assert found.entropy == pytest.approx([each, each, 0.0, math.nan, math.nan], nan_ok=True, abs=1e-9)
    rows, shown = _rows(1, found).splitlines(), json.loads(_object(1, found))
    assert [row.split("\t")[3] for row in rows[2:]] == ["inf", "nan", "nan"]
    assert shown["surprisal"][2:] == [None, None]
    assert shown["entropy"][3:] == [None, None]
    with pytest.raises(UserError, match="these words begin no sentence"):
        model.log_probabilities("the cat sees")
    with pytest.raises(UserError, match="these words begin no sentence"):
        model.complete("the cat sees", 2)


def test_a_family_without_prefixes_is_refused_in_one_line(runs):
    with pytest.raises(UserError, match="family n_pcfg has no next-word probabilities"):
        lm_pcfg.load(runs / "n_pcfg").surprisal(LINES)


def test_a_grammar_that_loses_mass_is_told(runs):
    """A -> A A with probability 0.49, else words: a derivation ends with probability (0.3 / 0.7)^2."""
    side = torch.tensor([[0.7, 0.3]], dtype=torch.float64)
    emission = Emission.of(torch.zeros(1, 4, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.float64))
    grammar = Grammar(*Rules(torch.ones(1, dtype=torch.float64), side, side), emission)
    model = NextWords(replace(lm_pcfg.load(runs / "one").grammars[0], grammar=grammar))
    assert model.finite_mass == pytest.approx((0.3 / 0.7) ** 2)
    assert "81.63% of the probability" in (model.warning() or "")


def test_commands_warn_of_lost_mass(runs):
    for arguments in (["next", "the cat"], ["sample", "--prefix", "the", "-n", "1"]):
        shown = CliRunner().invoke(app, [*arguments, "--checkpoint", str(runs / "one")])
        assert "derivations that never end" in shown.stderr, arguments
        shown = CliRunner().invoke(app, [*arguments, "--checkpoint", str(runs / "nhmm")])
        assert "derivations that never end" not in shown.stderr
    shown = CliRunner().invoke(app, ["next", "", "--json", "--checkpoint", str(runs / "nhmm")])
    assert shown.stderr == ""
    assert json.loads(shown.stdout)["mass"] == 1.0


@pytest.mark.parametrize("name", ["one", "pieces", "nhmm"])
def test_completions_keep_the_prefix_as_typed(runs, name):
    checkpoint = ["--checkpoint", str(runs / name)]
    arguments = ["sample", "--prefix", " the  Zebu", "-n", "5", "--max-length", "40", *checkpoint]
    shown = CliRunner().invoke(app, arguments)
    texts = shown.stdout.splitlines()
    assert texts
    assert all(text.startswith("the Zebu") for text in texts)
    found = [json.loads(line) for line in CliRunner().invoke(app, [*arguments, "--json"]).stdout.splitlines()]
    assert [one["text"] for one in found] == texts
    assert [set(one) for one in found] == [{"number", "text", "log_probability"}] * len(texts)
    scores = lm_pcfg.load(runs / name).score(texts)
    assert [one["log_probability"] for one in found] == pytest.approx(scores.tolist(), rel=1e-5)


def test_what_cannot_be_drawn_is_refused_in_one_line(runs):
    model = lm_pcfg.load(runs / "one")
    for number, seed, longest in ((-1, 0, 9), (1, -1, 9), (1, 0, 0)):
        with pytest.raises(UserError, match="cannot be drawn"):
            model.complete("", number, seed=seed, max_length=longest)
    with pytest.raises(UserError, match=r"a prefix of 1 word leaves no room for more: sentences may have 1 word "):
        model.complete("the", 1, max_length=1)
    with pytest.raises(UserError, match="a prefix of 3 words leaves no room"):
        model.complete("the cat sees", 1, max_length=2)
    arguments = ["sample", "--prefix", "the cat", "--max-length", "2", "--checkpoint", str(runs / "one")]
    shown = CliRunner().invoke(app, arguments)
    assert isinstance(shown.exception, UserError)
    assert "a prefix of 2 words leaves no room" in str(shown.exception)


def test_a_prefix_is_one_string(runs):
    model = lm_pcfg.load(runs / "one")
    for function in (model.next_word, model.log_probabilities, lambda prefix: model.complete(prefix, 1)):
        with pytest.raises(TypeError, match="give one prefix, a string, not a list"):
            function(["the cat"])
    with pytest.raises(UserError, match="0 continuations"):
        model.next_word("the", 0)


def test_the_end_symbol_in_a_prefix_is_no_word(runs):
    shown = CliRunner().invoke(app, ["next", "the <eos>", "--checkpoint", str(runs / "ends")])
    assert "<eos> ends sentences and is no word" in shown.stderr
    assert "does not have <eos>" not in shown.stderr


@pytest.mark.parametrize(("text", "why"), [("", "it is empty"), ("\n\n", "all blank"), ("the cat sees\n", "1 skipped")])
def test_a_text_without_scored_lines_is_an_error(runs, tmp_path, text, why):
    (tmp_path / "text").write_text(text)
    arguments = ["surprisal", str(tmp_path / "text"), "--max-length", "2", "--checkpoint", str(runs / "one")]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 1
    assert shown.stdout == ""
    assert f"no line could be scored ({why})" in str(shown.exception)
