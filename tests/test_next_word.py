"""Surprisals, next words and completions: sums equal scores, distributions sum to one, draws have the right shares."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

import lm_pcfg
from flash_inside import Rules
from lm_pcfg.cli import app
from lm_pcfg.corpus.pieces import train_pieces
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.inference.model import END
from lm_pcfg.inference.next_word import NextWords
from test_prefixes import short_rules
from texts import write_config, write_text

LINES = ["the cat sees a dog", "", "the zebra sleeps", "the old cat near the house sleeps and runs"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of a few steps: two seeds, explicit ends, pieces, in rank space, a hidden Markov model, a dense PCFG."""
    folder = tmp_path_factory.mktemp("next")
    config = write_config(folder, training={"max_steps": 3})
    text = write_text(folder / "pieces.txt", 200, seed=5).read_text().splitlines()
    (folder / "pieces.model").write_bytes(train_pieces(text, kind="unigram", size=40).model)
    pieces = [f"data.sentencepiece={folder / 'pieces.model'}", "data.max_length=60"]
    variants = {
        "one": [], "two": ["seed=1"], "ends": ["model.eos=explicit"], "pieces": pieces,
        "pieces_ends": [*pieces, "model.eos=explicit"],
    }  # fmt: skip
    for name, changes in variants.items():
        result = CliRunner().invoke(app, ["train", "--config", str(config), f"name={name}", *changes])
        assert result.exit_code == 0, result.output
    data = {key: value for key, value in yaml.safe_load(config.read_text()).items() if key != "model"}
    for family, model in {
        "rank_pcfg": {"nonterminals": 4, "preterminals": 6, "rank": 8, "dimension": 8},
        "nhmm": {"states": 6, "dimension": 8, "eos": "explicit"},
        "n_pcfg": {"nonterminals": 3, "preterminals": 4, "dimension": 8},
    }.items():
        (folder / f"{family}.yaml").write_text(json.dumps({**data, "model": {"family": family, **model}}))
        result = CliRunner().invoke(app, ["train", "--config", str(folder / f"{family}.yaml"), f"name={family}"])
        assert result.exit_code == 0, result.output
    return folder / "runs"


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
        mass = 1.0 if place else model.next_words()[0].finite_mass  # hardly trained, it loses some
        assert np.exp(log_p).sum() == pytest.approx(mass, abs=1e-5)  # emissions are fp32
        if name != "pieces":
            (id,) = model.vocabulary.tokenise([word])[0]
            assert -log_p[id] / math.log(2) == pytest.approx(found.bits[place], rel=1e-5)
            terms = [p * math.log2(p) for p in np.exp(log_p).tolist() if p > 0]
            assert found.entropy[place] == pytest.approx(-math.fsum(terms), rel=1e-5)
    assert len(found.entropy) == len(words) + 1
    assert len(found.entropy_reduction) == len(words)
    assert found.entropy_reduction[0] == found.entropy[0] - found.entropy[1]


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
    assert "first words" in CliRunner().invoke(app, ["next", "", *checkpoint]).output
    arguments = ["sample", "--prefix", "the", "-n", "4", "--max-length", "20", *checkpoint]
    assert all(text.startswith("the") for text in CliRunner().invoke(app, arguments).stdout.splitlines())
    assert CliRunner().invoke(app, ["sample", "--prefix", "the", "--trees", *checkpoint]).exit_code == 2


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
