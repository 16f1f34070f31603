"""Whether the perplexities of runs can be compared: the terminal, the page and a search say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lm_pcfg import cli
from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyOptions
from lm_pcfg.inference.comparison import incomparable
from lm_pcfg.inference.report import read_runs

VALID = "texts/valid.txt"


def write_run(
    folder: Path, *, words: str = "a b c", valid: str = VALID, tokens: int | None = 50, most: int | None = None,
    impossible: int = 0, unknown: float = 0.0, kind: str | None = None, **options: Any,
) -> Path:  # fmt: skip
    """A run folder with what a comparison looks at."""
    folder.mkdir(parents=True)
    settings = {"data": {"valid": valid}, "evaluation": {"max_length": most}, "loss": {"normalise": "tokens"}}
    (folder / "config.yaml").write_text(json.dumps(settings))
    Vocabulary.build([words.split()], VocabularyOptions(**options)).save(folder / "vocab")
    if kind is not None:
        (folder / "vocab" / "words.txt").rename(folder / "vocab" / "pieces.model")
        (folder / "vocab" / "vocabulary.json").write_text(json.dumps({"kind": kind, "types": 4, "sha256": words}))
    line = {"step": 1, "valid/ppl": 9.0, "valid/impossible": impossible, "valid/unknown_share": unknown}
    (folder / "metrics.jsonl").write_text(
        json.dumps(line | ({} if tokens is None else {"valid/tokens": tokens})) + "\n"
    )
    return folder


def reasons(folder: Path, **other: Any) -> list[str]:
    """What is said of a plain run and one that differs from it."""
    folders = [write_run(folder / "one"), write_run(folder / "two", **other)]
    return incomparable(read_runs(folders, pytest.fail))


@pytest.mark.parametrize(
    "other",
    [{}, {"end_of_sentence": True}, {"size": 9}, {"words": "c b a"}, {"most": 40}, {"impossible": 1, "tokens": 40}],
    ids=["the same", "explicit ends", "a size above all words", "another order", "a limit no line has", "impossible"],
)
def test_what_does_not_change_the_meaning_of_a_perplexity_is_no_reason(tmp_path, other):
    assert reasons(tmp_path, **other) == []


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"words": "a b c d"}, "different vocabularies (4 and 5 types)"),
        ({"words": "a b d"}, "different vocabularies (4 types)"),
        ({"lowercase": True}, "different vocabularies (4 types)"),
        ({"valid": "other.txt", "tokens": 9}, "have different validation texts (other.txt and texts/valid.txt)"),
        ({"valid": "other.txt"}, "may have different validation texts (other.txt and texts/valid.txt)"),
        ({"tokens": 40}, "different validation texts (40 and 50 tokens; another text, or fewer of its lines)"),
        ({"tokens": 40, "most": 9}, "texts (40 and 50 tokens; evaluation.max_length is 9 and none)"),
        ({"tokens": None, "most": 9}, "may have different validation texts (evaluation.max_length is 9 and none)"),
        ({"unknown": 0.05}, "two: 5.00 % or more of the validation text is unknown"),
    ],
)  # fmt: skip
def test_each_reason_is_told(tmp_path, other, said):
    (reason,) = reasons(tmp_path, **other)
    assert said in reason


def test_words_and_pieces_are_compared_where_all_words_are_known(tmp_path):
    (reason,) = reasons(tmp_path, kind="sentencepiece", tokens=90)
    assert "per word and per piece" in reason
    assert reason.endswith("`lm_pcfg score` has ppl_per_word, for a text whose words all of the models know")
    write_run(tmp_path / "three", unknown=0.04)
    reason = incomparable(read_runs([tmp_path / "three", tmp_path / "two"], pytest.fail))[0]
    assert reason.endswith("all of the models know (unknown in the validation text: three 4.00 %)")


def test_pieces_of_other_models_are_not_counted_against_each_other(tmp_path):
    folders = [write_run(tmp_path / name, kind="sentencepiece", words=name, tokens=len(name)) for name in ("ab", "c")]
    (reason,) = incomparable(read_runs(folders, pytest.fail))
    assert "different vocabularies" in reason


def test_many_names_are_cut_short(tmp_path):
    folders = [write_run(tmp_path / name, valid=name) for name in "abcdefg"]
    assert "(a, b, c and others)" in incomparable(read_runs(folders, pytest.fail))[0]


def test_terminal_and_page_say_the_same(tmp_path):
    folders = [write_run(tmp_path / "one"), write_run(tmp_path / "two", words="a b", valid="other.txt")]
    page = tmp_path / "page.html"
    result = CliRunner().invoke(cli.app, ["report", *map(str, folders), "--html", str(page)])
    assert result.exit_code == 0, result.output
    said = incomparable(read_runs(folders, pytest.fail))
    assert len(said) == 2
    for reason in said:
        assert f"warning: {reason}" in result.stderr
        assert reason in page.read_text()


@pytest.mark.parametrize("damage", ["[", "[]", '{"options": 3, "sha256": 1}', "{}"])
def test_a_damaged_vocabulary_is_not_held_against_a_run(tmp_path, damage):
    folders = [write_run(tmp_path / "one"), write_run(tmp_path / "two")]
    (folders[1] / "vocab" / "vocabulary.json").write_text(damage)
    assert incomparable(read_runs(folders, pytest.fail)) == []
