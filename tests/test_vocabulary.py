"""Vocabularies: which words are known, ids, and files that are verified when read."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyError, VocabularyOptions, normalise
from lm_pcfg.storage.durable import replace_file

TEXT = [line.split() for line in ("the cat sat", "the dog sat", "the Cat ran 1,234.5 miles", "<unk> dog")]

# whatever str.split leaves whole: any characters but white space
words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda word: word.split() == [word])
texts = st.lists(st.lists(words, min_size=1, max_size=6), min_size=1, max_size=8)


def build(**options: object) -> Vocabulary:
    return Vocabulary.build(TEXT, VocabularyOptions(**options))  # type: ignore[arg-type]


def test_order_is_by_count_then_by_word() -> None:
    vocabulary = build()
    assert vocabulary.words == ("<unk>", "the", "dog", "sat", "1,234.5", "Cat", "cat", "miles", "ran")
    assert vocabulary == Vocabulary.build(reversed(TEXT), VocabularyOptions())
    assert vocabulary.training_words == 13
    assert vocabulary.training_unknown == 1  # the literal one


def test_size_and_minimum_count() -> None:
    assert build(size=3).words == ("<unk>", "the", "dog")  # <unk> counts
    assert build(size=3).training_unknown == 13 - 3 - 2
    assert build(size=1).words == ("<unk>",)
    assert build(min_count=2).words == ("<unk>", "the", "dog", "sat")
    assert build(size=3, end_of_sentence=True).words == ("<unk>", "<eos>", "the", "dog")  # <eos> is no word
    assert len(build(size=100)) == 9


def test_tokenise() -> None:
    vocabulary, explicit = build(), build(end_of_sentence=True)
    assert vocabulary.unknown_id == explicit.unknown_id == 0  # of unseen words and literal <unk>s
    lines = ["the zebra  <unk> sat <eos>", " "]
    assert vocabulary.tokenise(lines) == [[1, 0, 0, 3, 0], []]
    assert explicit.tokenise(lines) == [[2, 0, 0, 4, 0], []]  # a word never stands for the end
    assert (vocabulary.end_id, explicit.end_id) == (None, 1)


def test_lowercase_and_numbers() -> None:
    vocabulary = build(lowercase=True, fold_numbers=True)
    assert "cat" in vocabulary.words
    assert "Cat" not in vocabulary.words
    assert vocabulary.tokenise(["CAT 7 N"]) == [[vocabulary.words.index(word) for word in ("cat", "N", "N")]]
    options = VocabularyOptions(fold_numbers=True)
    for number in ("1", "1,234.5", "-7%", "$3.50", "12/31", "1-2", "2024-01-01", ".5"):
        assert normalise(number, options) == "N"
        assert normalise(number, VocabularyOptions(lowercase=True)) == number
    for other in ("1990s", "a1", "-", "...", "$", "N's", "½", "1e5", "x"):
        assert normalise(other, options) == other
    assert normalise("1" * 100_000 + "x", options) != "N"  # in linear time


@settings(deadline=None)
@given(words, st.booleans(), st.booleans())
def test_normalising_twice_changes_nothing(word: str, lowercase: bool, fold_numbers: bool) -> None:
    options = VocabularyOptions(lowercase=lowercase, fold_numbers=fold_numbers)
    once = normalise(word, options)
    assert normalise(once, options) == once
    assert once.split() == [once]


@settings(deadline=None)
@example([["<unk>", "a", "<eos>"]], 2, 1, False)
@given(texts, st.none() | st.integers(1, 8), st.integers(1, 3), st.booleans())
def test_known_words_are_the_most_frequent(
    text: list[list[str]], size: int | None, min_count: int, explicit: bool
) -> None:
    assume(not (explicit and any("<eos>" in line for line in text)))
    vocabulary = Vocabulary.build(text, VocabularyOptions(size=size, min_count=min_count, end_of_sentence=explicit))
    counts = Counter(word for line in text for word in line)
    known = vocabulary.words[1 + explicit :]
    ignored = [word for word in counts if word not in vocabulary.words]
    assert all(counts[word] >= min_count for word in known)
    assert sorted(known, key=lambda word: (-counts[word], word)) == list(known)
    full = size is not None and len(known) == size - 1
    assert all(counts[word] < min_count or (full and (not known or counts[word] <= counts[known[-1]]))
               for word in ignored)  # fmt: skip
    unknown = [ids.count(vocabulary.unknown_id) for ids in vocabulary.tokenise([" ".join(line) for line in text])]
    assert vocabulary.training_unknown == sum(unknown)


@settings(deadline=None)
@given(texts, st.booleans())
def test_save_and_load(tmp_path_factory: pytest.TempPathFactory, text: list[list[str]], explicit: bool) -> None:
    assume(not (explicit and any("<eos>" in [word.lower() for word in line] for line in text)))
    folder = tmp_path_factory.mktemp("run") / "vocab"
    vocabulary = Vocabulary.build(text, VocabularyOptions(size=5, lowercase=True, end_of_sentence=explicit))
    vocabulary.save(folder)
    loaded = Vocabulary.load(folder)
    assert loaded == vocabulary
    assert loaded.hash == vocabulary.hash
    assert (loaded.training_words, loaded.training_unknown) == (vocabulary.training_words, vocabulary.training_unknown)
    assert sorted(path.name for path in folder.iterdir()) == ["vocabulary.json", "words.txt"]


def test_words_file_is_readable(tmp_path: Path) -> None:
    build(size=3).save(tmp_path)
    assert (tmp_path / "words.txt").read_text() == "<unk>\nthe\ndog\n"
    assert json.loads((tmp_path / "vocabulary.json").read_text())["options"]["size"] == 3


def test_hash_depends_on_words_and_options() -> None:
    assert len({build(size=3).hash, build(size=4).hash, build(lowercase=True).hash, build().hash}) == 4
    assert build().hash == build().hash


def load_error(folder: Path) -> str:
    with pytest.raises(VocabularyError) as caught:
        Vocabulary.load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_damaged_files(tmp_path: Path) -> None:
    assert "no such file" in load_error(tmp_path)
    build().save(tmp_path)
    words_file, description_file = tmp_path / "words.txt", tmp_path / "vocabulary.json"
    words_text, description = words_file.read_text(), json.loads(description_file.read_text())
    for changed in (words_text.replace("dog", "dogs"), words_text.removesuffix("ran\n"), words_text + "\n"):
        words_file.write_text(changed)
        assert "sha256" in load_error(tmp_path)
    for changed in ("", "the\n<unk>\n", words_text + "ran\n"):
        words_file.write_text(changed)
        assert "damaged" in load_error(tmp_path)
    words_file.write_bytes(b"\xff\n")
    assert "damaged" in load_error(tmp_path)
    words_file.write_text(words_text)
    description_file.write_text(json.dumps(description | {"options": description["options"] | {"lowercase": True}}))
    assert "sha256" in load_error(tmp_path)
    description_file.write_text(json.dumps(description | {"format": 99}))
    assert "format 99" in load_error(tmp_path)
    for changed in ("{", "[]", json.dumps({"format": 1}), json.dumps(description | {"options": 3})):
        description_file.write_text(changed)
        assert str(tmp_path) in load_error(tmp_path)


def test_texts_that_make_no_vocabulary() -> None:
    with pytest.raises(VocabularyError, match="no words"):
        Vocabulary.build([[], []], VocabularyOptions())
    with pytest.raises(VocabularyError, match="end twice"):
        Vocabulary.build([["a", "<eos>"]], VocabularyOptions(end_of_sentence=True))
    assert "<eos>" in Vocabulary.build([["a", "<eos>"]], VocabularyOptions()).words
    with pytest.raises(VocabularyError, match="white space"):
        Vocabulary.build([["a b"]], VocabularyOptions())
    for wrong in ({"size": 0}, {"min_count": 0}):
        with pytest.raises(VocabularyError):
            VocabularyOptions(**wrong)


def test_files_are_replaced_whole_by_many_writers_at_once(tmp_path: Path) -> None:
    """All of one process id, as in containers on hosts that share a folder."""
    contents = [bytes([65 + k]) * 10_000 for k in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(replace_file, tmp_path / "a", content) for content in contents * 5]:
            done.result()
    assert (tmp_path / "a").read_bytes() in contents
    with pytest.raises(OSError):  # noqa: PT011 - whichever
        replace_file(tmp_path, b"a folder is in the way")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert not list(tmp_path.parent.glob("*.tmp"))
