"""`lm_pcfg tag`: the most probable symbol of every word. tests/test_every_family.py has its probabilities."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import lm_pcfg
from lm_pcfg.cli import app
from lm_pcfg.errors import UserError
from small_runs import train_small_runs, write_untrained_run
from texts import WORDS

LINES = ["the cat sees a dog", "", "the zebra sleeps", "bird"]
COMPOUND = {
    "family": "sc_pcfg", "nonterminals": 3, "preterminals": 4, "dimension": 6, "latent": 3, "encoder": 5,
    "init": "normal(1, 1)",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tags")
    write_untrained_run(folder, "sc_pcfg", COMPOUND)
    return train_small_runs(folder, ["one", "ends", "nonterminals", "pieces_ends", "nhmm", "n_pcfg"])


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(LINES) + "\n")
    return path


@pytest.mark.parametrize("name", ["one", "ends", "pieces_ends", "nhmm", "n_pcfg", "sc_pcfg"])
def test_every_word_has_a_symbol_of_the_model(runs, name):
    model = lm_pcfg.load(runs / name)
    tags = model.tags(LINES)
    assert [None if found is None else found.words for found in tags] == [tuple(line.split()) or None for line in LINES]
    for found in tags:
        if found is not None:
            assert all(0.0 < p <= 1.0 + 1e-6 for p in found.probabilities)
            letters = {symbol[0] for symbol in found.tags}
            assert letters == {"S" if name == "nhmm" else "P"}
    for line, found in zip(LINES, tags, strict=True):  # alone as among others
        (alone,) = model.tags([line])
        if found is not None:
            assert alone.tags == found.tags
            assert alone.probabilities == pytest.approx(found.probabilities, rel=1e-5)


def test_the_tag_of_a_word_of_pieces_is_that_of_its_first_piece(runs):
    model, line = lm_pcfg.load(runs / "pieces_ends"), "the zebra sleeps"
    one = model.grammars[0]
    (pieces,) = one.vocabulary.tokenise([line])
    assert len(pieces) > 3
    (table,) = one.grammar.word_posteriors(torch.tensor([*pieces, one.vocabulary.end_id]), [len(pieces) + 1])
    first = one.vocabulary.word_boundaries(pieces, 3)[:-1]
    (found,) = model.tags([line])
    assert found.tags == tuple(f"P{symbol}" for symbol in table[first].argmax(1).tolist())


def test_a_row_a_word_or_an_object_a_line(runs, text):
    expected = lm_pcfg.load(runs / "one").tags(LINES)
    result = CliRunner().invoke(app, ["tag", str(text), "--checkpoint", str(runs / "one")])
    assert result.exit_code == 0, result.output
    head, *rows = [row.split("\t") for row in result.stdout.splitlines()]
    assert head == ["line", "position", "word", "tag", "probability"]
    assert [(int(number), word, tag) for number, _, word, tag, _ in rows] == [
        (number, word, tag)
        for number, found in enumerate(expected, start=1)
        if found is not None
        for word, tag in zip(found.words, found.tags, strict=True)
    ]
    assert [int(position) for number, position, *_ in rows if number == "1"] == [1, 2, 3, 4, 5]
    result = CliRunner().invoke(app, ["tag", str(text), "--checkpoint", str(runs / "one"), "--format", "json"])
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["line"] for one in objects] == [1, 3, 4]
    assert [tuple(one["tags"]) for one in objects] == [found.tags for found in expected if found is not None]


def test_lines_without_tags_are_told(runs, text):
    """A root over nonterminals derives no line of one word."""
    result = CliRunner().invoke(app, ["tag", str(text), "--checkpoint", str(runs / "nonterminals")])
    assert result.exit_code == 0
    assert "line 4: one word, skipped" in result.stderr
    assert lm_pcfg.load(runs / "nonterminals").tags(["bird", "the cat"])[0] is None


def test_a_text_without_tags_is_an_error(runs, tmp_path):
    (tmp_path / "blank").write_text("\n\n")
    result = CliRunner().invoke(app, ["tag", str(tmp_path / "blank"), "--checkpoint", str(runs / "one")])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "no line has tags" in str(result.exception)


def test_symbols_of_two_models_are_not_mixed(runs, text):
    command = ["tag", str(text), "--checkpoint", str(runs / "one"), "--checkpoint", str(runs / "ends")]
    assert CliRunner().invoke(app, command).stdout == ""
    with pytest.raises(UserError, match="give one checkpoint for tags"):
        lm_pcfg.load(runs / "one", runs / "ends").tags(LINES)


def test_most_probable_symbols_are_those_that_sampled_trees_have(runs):
    """The tag of a word is that of most trees drawn from p(tree | sentence)."""
    model = lm_pcfg.load(runs / "one")
    line = " ".join(WORDS[:4])
    (trees,) = model.sample_trees([line], 2000)
    (found,) = model.tags([line])
    for place, (symbol, probability) in enumerate(zip(found.tags, found.probabilities, strict=True)):
        share = sum(one.tree.tags[place] == symbol for one in trees) / len(trees)
        assert share == pytest.approx(probability, abs=0.05)
