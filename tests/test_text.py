"""Reading text files: what counts as a line, and errors of one line that say the way out."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_pcfg.corpus import embedded
from lm_pcfg.corpus.lengths import Limits
from lm_pcfg.corpus.sentences import load_sentences, sentences_within
from lm_pcfg.corpus.text import BINARY_CHECK_BYTES, TextError, read_lines, read_words
from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyOptions


def write(folder: Path, content: bytes) -> Path:
    path = folder / "text.txt"
    path.write_bytes(content)
    return path


def error_of(path: Path | str) -> str:
    with pytest.raises(TextError) as caught:
        list(read_lines(path))
    message = str(caught.value)
    assert "\n" not in message
    return message


def fake_standard_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a b\nc\n", ["a b", "c"]),
        (b"a b\nc", ["a b", "c"]),
        (b"a\r\nb\r\n\r\nc", ["a", "b", "", "c"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        ("a\u2028b\x85c\x0cd\x1ce\x0bf\rg\n".encode(), ["a\u2028b\x85c\x0cd\x1ce\x0bf\rg"]),
        ("naïve 東京 🙂\n".encode(), ["naïve 東京 🙂"]),
    ],
    ids=["empty", "blank", "plain", "no-last-newline", "crlf", "byte-order-mark", "other-separators", "unicode"],
)
def test_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, lines: list[str]) -> None:
    expected = list(enumerate(lines, start=1))
    assert list(read_lines(write(tmp_path, content))) == expected
    fake_standard_input(monkeypatch, content)
    assert list(read_lines("-")) == expected


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"]))))
def test_any_lines_come_back(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    path = write(tmp_path_factory.mktemp("lines"), b"\xef\xbb\xbf" + "".join(f"{line}\n" for line in lines).encode())
    assert [line for _, line in read_lines(path)] == (lines or [""])[: max(len(lines), 1)]


def test_reading_is_lazy(tmp_path: Path) -> None:
    path = write(tmp_path, b"word " * 20 + b"\n" + b"more words\n" * 100_000 + b"\xff\n")
    lines = read_lines(path)
    assert next(lines) == (1, "word " * 20)  # the bad last line has not been read yet
    lines.close()


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert "no such file" in error_of(tmp_path / "nothing.txt")
    assert "is a folder" in error_of(tmp_path)
    assert "cannot be opened" in error_of(tmp_path / ("x" * 5000))
    below_a_file = write(tmp_path, b"a\n") / "b"
    assert str(below_a_file) in error_of(below_a_file)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    path = write(tmp_path, b"a\n")
    path.chmod(0)
    assert "no permission" in error_of(path)


@pytest.mark.parametrize(
    ("content", "looks_like"),
    [
        (gzip.compress(b"a b\n" * 10), "gzip"),
        (b"\x28\xb5\x2f\xfd\x04\x00A", "zstd"),
        (b"PAR1\x15\x04\x15\x10", "Parquet"),
        (b"PK\x03\x04\x14\x00", "zip"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "PNG"),
        (b"%PDF-1.7\n%\xe2\xe3", "PDF"),
        ("a b\n".encode("utf-16"), "UTF-16"),
        (b"some text\n\nand a \0 byte\n", "binary"),
    ],
    ids=["gzip", "zstd", "parquet", "zip", "png", "pdf", "utf-16", "nul"],
)
def test_binary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, looks_like: str) -> None:
    path = write(tmp_path, content)
    message = error_of(path)
    assert looks_like in message
    assert str(path) in message
    fake_standard_input(monkeypatch, content)
    message = error_of("-")
    assert looks_like in message
    assert message.startswith("standard input: ")


def test_compressed_text_is_read_as_it_is(tmp_path: Path) -> None:
    text = b"\xef\xbb\xbfa b\r\nc\n" * 1 + b"d e\n" * 50_000
    for suffix, content in ((".gz", gzip.compress(text)), (".zst", zstandard.ZstdCompressor().compress(text))):
        path = tmp_path / f"text.txt{suffix}"
        path.write_bytes(content)
        lines = [line for _, line in read_lines(path)]
        assert lines == ["a b", "c"] + ["d e"] * 50_000
        path.write_bytes(content[:-9])
        assert "is the file whole" in error_of(path)
        path.write_bytes(b"plain text\n" * 9)
        assert "reading failed" in error_of(path)


def test_text_that_only_resembles_a_binary_file(tmp_path: Path) -> None:
    assert list(read_lines(write(tmp_path, b"PAR1 is a word\n"))) == [(1, "PAR1 is a word")]
    far_away = b"a\n" * BINARY_CHECK_BYTES + b"b\0c\n"
    assert list(read_lines(write(tmp_path, far_away)))[-1][1] == "b\0c"


def test_invalid_utf8_says_where(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbffirst\nsecond caf\xe9 here\n"
    message = error_of(write(tmp_path, content))
    assert "line 2" in message
    assert f"byte 0xe9 at offset {content.index(0xE9)}" in message
    assert "iconv -f latin1 -t utf-8" in message
    first_line = error_of(write(tmp_path, b"\xef\xbb\xbfa\xe9\n"))
    assert "line 1 " in first_line
    assert "offset 4" in first_line
    assert "0xed" in error_of(write(tmp_path, b"a\n\xed\xa0\x80\n"))  # a lone surrogate


def test_words_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "a  b\u00a0c\n\n d \n".encode())
    assert list(read_words(path)) == [["a", "b", "c"], [], ["d"]]
    asked = []

    def resolve(name: str) -> Path:
        asked.append(name)
        return path

    monkeypatch.setattr(embedded, "resolve", resolve, raising=False)
    assert list(read_words("embedded:train")) == [["a", "b", "c"], [], ["d"]]
    assert asked == ["embedded:train"]
    with pytest.raises(TextError, match=r"^nothing\.txt: no such file"):
        list(read_words("nothing.txt"))


def test_sentences(tmp_path: Path) -> None:
    path = write(tmp_path, b"a b c\n\na\nb x\na b c a b\n")
    for explicit in (False, True):
        vocabulary = Vocabulary.build([["a", "b", "c"]], VocabularyOptions(end_of_sentence=explicit))
        end = [1] if explicit else []
        first = 1 + len(end)  # id of a
        sentences = load_sentences(path, vocabulary, limits=Limits(max_length=3, min_length=2))
        # a single word can be in the chart with its <eos>
        expected = [[first, first + 1, first + 2, *end], *([[first, *end]] if explicit else []), [first + 1, 0, *end]]
        assert [sentences[k].tolist() for k in range(len(sentences))] == expected
        assert sentences.lengths.tolist() == [len(ids) for ids in expected]
        assert sentences.word_lengths.tolist() == [len(ids) - len(end) for ids in expected]
        assert sentences.lines == len(sentences) == len(expected)
        assert sentences.words == sum(len(ids) - len(end) for ids in expected)
        assert sentences.unknown == 1
        skipped = sentences.skipped
        assert (skipped.blank, skipped.too_long, skipped.too_short) == (1, 1, 0 if explicit else 1)
        assert sentences.line_numbers.tolist() == ([1, 3, 4] if explicit else [1, 4])
        assert sentences.lines + skipped.total == 5
    assert len(load_sentences(write(tmp_path, b"\n \n"), vocabulary)) == 0


def test_the_corpus_room_does_not_import_torch() -> None:
    modules = "lm_pcfg.corpus.opening, lm_pcfg.corpus.preparation.prepare"  # and what they import
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0


@pytest.mark.parametrize("literal", [None, np.array([2, 1])])
def test_unknown_words_of_the_text_are_not_known_of_a_prepared_corpus(literal):
    vocabulary = Vocabulary(["<unk>", "a"], VocabularyOptions())
    packed, lengths = np.zeros(5, np.int32), np.array([2, 3])
    sentences = sentences_within(Limits(), packed, lengths, np.array([1, 2]), vocabulary, literal)
    assert sentences.literal_unknown == (None if literal is None else 3)
