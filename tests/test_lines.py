"""From the lines of a text to values in their order: blocks, skipped lines, warnings, progress."""

from __future__ import annotations

import pytest

from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyOptions
from lm_pcfg.errors import UserError
from lm_pcfg.inference import lines
from lm_pcfg.inference.lines import Line, Warnings, map_lines

VOCABULARY = Vocabulary.build([["a", "b", "c"]], VocabularyOptions())


def lengths_of(some, on_lines):
    """The function that is mapped: how many words each line has, one at a time."""
    for _ in some:
        on_lines(1)
    return [len(line.split()) for line in some]


def test_values_have_the_order_of_the_lines_over_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LINES_AT_A_TIME", 2)
    text, warned, done = tmp_path / "text", list[str](), list[int]()
    text.write_text("a b\n\na b c a b\nc\na b c\na z\n")
    found = map_lines(
        str(text), VOCABULARY, lengths_of, command="count", max_length=4, min_length=2,
        warnings=Warnings(warned.append), on_lines=done.append,
    )  # fmt: skip
    assert list(found) == [
        Line(1, "a b", 2), Line(2, "", None, "blank"), Line(3, "a b c a b", None, "long"), Line(4, "c", None, "short"),
        Line(5, "a b c", 3), Line(6, "a z", 2, unknown=1),
    ]  # fmt: skip
    assert sum(done) == 6 == lines.count_lines(str(text))
    assert [message.partition(": ")[2].partition(",")[0] for message in warned] == ["5 words", "one word"]


def test_a_block_without_sentences_is_not_computed(tmp_path):
    text = tmp_path / "text"
    text.write_text("\n \n")
    found = map_lines(
        str(text), VOCABULARY, lambda *_: pytest.fail("called"), command="count", max_length=4,
        warnings=Warnings(pytest.fail),
    )  # fmt: skip
    assert [line.skipped for line in found] == ["blank", "blank"]


def test_only_the_first_warnings_of_a_kind_are_shown():
    said: list[str] = []
    warnings = Warnings(said.append)
    for number in range(8):
        warnings.add("long", f"line {number}")
    warnings.add("short", "another")
    warnings.summarise()
    assert said == [*(f"line {number}" for number in range(5)), "another", "... and 3 more lines (long)"]


@pytest.mark.parametrize("name", ["text.jsonl", "text.parquet"])
def test_what_is_not_lines_of_text_is_refused(name):
    with pytest.raises(UserError, match=f"{name}: parse reads text, one sentence a line"):
        list(map_lines(name, VOCABULARY, lengths_of, command="parse", max_length=4, warnings=Warnings(print)))
