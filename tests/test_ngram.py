"""Kneser-Ney n-grams: by hand, against a plain implementation of the formulas, and as distributions."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import Counter, defaultdict
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lm_pcfg import cli
from lm_pcfg.bench import ngram
from lm_pcfg.bench.kneser_ney import KneserNey
from lm_pcfg.bench.ngram import compare, compare_with_run
from lm_pcfg.commands.text.score import score
from lm_pcfg.corpus.pieces import train_pieces
from lm_pcfg.corpus.preparation.prepare import PrepareOptions, prepare
from lm_pcfg.corpus.sentences import Sentences, encode_sentences
from lm_pcfg.corpus.unknown import percent
from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyOptions
from lm_pcfg.errors import UserError
from lm_pcfg.inference.trained import read_stored
from small_runs import write_untrained_run
from texts import write_text


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


def plain_probability(lines, order, discounts, types=None):
    """The formulas of the module's first lines, with dictionaries; types: of the vocabulary, with the end."""
    a = {k: Counter(grams_of(lines, k)) for k in range(1, order + 1)}
    for k in range(1, order):
        preceding = defaultdict(set)
        for gram in grams_of(lines, k + 1):
            preceding[gram[1:]].add(gram[0])
        a[k] = Counter({gram: len(preceding[gram]) if gram[0] != "<s>" else count for gram, count in a[k].items()})
    types = types or len({gram[0] for gram in a[1]})

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


def plain_probabilities(plain, lines, order) -> list[float]:
    """Of every word and end of these lines."""
    found = []
    for line in lines:
        marked = ["<s>", *line, "</s>"]
        for place in range(1, len(marked)):
            context = tuple(marked[max(0, place - order + 1) : place])
            found.append(plain(marked[place], context, len(context) + 1))
    return found


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_are_those_of_the_formulas(order):
    model, vocabulary = model_of(LINES, order)
    plain = plain_probability(LINES, order, model.discounts)
    held_out = [*random_lines(12, seed=1), ["w1"], ["w40", "w40", "w40", "w39", "w1", "w1"]]
    known = {word for line in LINES for word in line}
    held_out = [words for line in held_out if (words := [word for word in line if word in known])]
    expected = plain_probabilities(plain, held_out, order)
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


# ---- runs -----------------------------------------------------------------------------------------------------------

MODEL = {"nonterminals": 2, "preterminals": 3, "dimension": 4}
SIZE = 12  # of 17 types: some words are unknown
ALIKE = ("nll", "words", "pieces", "lines", "tokens", "unknown_words", "unknown_share", "literal_unknown")


def silent(message: str) -> None:
    pass


def words_run(folder: Path, *, eos: str = "implicit", size: int | None = SIZE, **changes) -> tuple[Path, str, str]:
    """Write a run of words that was trained on train.txt; return its folder, that text and another one."""
    train = folder / "train.txt"
    if not train.exists():
        write_text(train, 60, seed=1)
        write(folder / "valid.txt", *write_text(folder / "other", 12, seed=2).read_text().splitlines(), "the <unk> xyz")
    lines = [line.split() for line in train.read_text().splitlines()]
    vocabulary = Vocabulary.build(lines, VocabularyOptions(size=size))
    model = MODEL | {"eos": eos, **changes.pop("model", {})}
    return (
        write_untrained_run(folder, "run", model, vocabulary=vocabulary, **changes),
        str(train),
        str(folder / "valid.txt"),
    )


@pytest.mark.parametrize("eos", ["implicit", "explicit"])
def test_a_run_of_words_has_the_figures_of_its_text(tmp_path, eos):
    run, train, valid = words_run(tmp_path, eos=eos)
    own, plain = compare_with_run(run, None, 3, silent), compare(train, valid, 3, SIZE, silent)
    assert (own["test"], own["train"]) == (valid, train)
    assert {name: own[name] for name in ALIKE} == pytest.approx({name: plain[name] for name in ALIKE})
    assert own["unigram_ppl"] == pytest.approx(plain["unigram_ppl"])
    assert own["ppl"] == own["ppl_per_word"] == pytest.approx(math.exp(plain["nll"] / plain["tokens"]))
    assert own["literal_unknown"] == 1
    assert own["unknown_words"] > 1
    assert own["vocabulary"] == len(read_stored(run).vocabulary) == SIZE + (eos == "explicit")  # as `info` has it
    assert plain["vocabulary"] == SIZE + 1  # the end of a line is a type of the n-grams
    shown = CliRunner().invoke(cli.app, ["bench", "ngram", "--checkpoint", str(run), "--order", "2"]).stdout
    assert re.search(rf"^unknown_share +{percent(own['unknown_share'])}$", shown, re.MULTILINE)  # as `score` has it
    assert re.search(r"^ppl_per_word +>= \d", shown, re.MULTILINE)


def test_lines_and_tokens_are_those_of_score(tmp_path):
    """Also where the model gives none to one-word lines, and where lines are too long."""
    run, _, valid = words_run(tmp_path, model={"root": "nonterminals"})
    more = ["--checkpoint", str(run), "--max-length", "6", "--json"]
    result = CliRunner().invoke(cli.app, ["bench", "ngram", "--test", valid, *more])
    own, scored = json.loads(result.stdout), json.loads(CliRunner().invoke(cli.app, ["score", valid, *more]).stdout)
    names = [name for name in (*ALIKE, "unit", "skipped", "ppl_per_word_is_lower_bound") if name != "nll"]
    assert {name: own[name] for name in names} == {name: scored[name] for name in names}
    assert own["skipped"] > 0
    characters = scored["characters"] + scored["lines"]
    assert own["bits_per_character"] == pytest.approx(own["nll"] / math.log(2) / characters)
    assert own["bits_per_character_is_lower_bound"] == scored["bits_per_character_is_lower_bound"]
    assert "lines skipped: longer than --max-length, or too short for the run's model" in result.stderr
    assert signature(score).parameters["max_length"].default == ngram.MAX_LENGTH


@pytest.mark.parametrize("eos", ["implicit", "explicit"])
def test_a_run_of_pieces_counts_its_pieces(tmp_path, eos):
    lines = write_text(tmp_path / "train.txt", 40, seed=1).read_text().splitlines()
    write(tmp_path / "valid.txt", "the\u2581cat  sees a dog", "", "hats and dogs")  # what pieces take for a space
    pieces = train_pieces(lines, kind="unigram", size=45)
    run = write_untrained_run(tmp_path, "run", MODEL | {"eos": eos}, vocabulary=pieces)
    own = compare_with_run(run, None, 3, silent)

    def split(some: list[str]) -> list[list[str]]:
        return [list(map(str, ids)) for ids in pieces.tokenise(some)]

    held_out = split(["the\u2581cat sees a dog", "hats and dogs"])
    types = len(pieces) + 1  # the end
    text = direct_text([list(map(int, line)) for line in split(lines)], len(pieces))
    discounts = KneserNey(text, 3, ids=types).discounts
    expected = plain_probabilities(plain_probability(split(lines), 3, discounts, types), held_out, 3)
    assert own["nll"] == pytest.approx(-sum(map(math.log, expected)), rel=1e-12)
    tokens = sum(map(len, held_out)) + 2
    assert (own["unit"], own["words"], own["lines"], own["tokens"]) == ("pieces", 7, 2, tokens)
    assert own["ppl"] == pytest.approx(math.exp(own["nll"] / tokens))
    assert own["ppl_per_word"] == pytest.approx(math.exp(own["nll"] / 9))
    assert own["vocabulary"] == len(pieces) + (eos == "explicit")
    (tmp_path / "valid.txt.gz").write_bytes(gzip.compress((tmp_path / "valid.txt").read_bytes()))
    again = compare_with_run(run, str(tmp_path / "valid.txt.gz"), 3, silent)
    assert {name: again[name] for name in ALIKE} == {name: own[name] for name in ALIKE}
    assert math.isfinite(own["unigram_ppl"])  # though pieces of the second line are not in the training text
    assert set(held_out[1]) - {piece for line in split(lines) for piece in line}


def direct_text(lines: list[list[int]], end: int) -> Sentences:
    ended = [[*line, end] for line in lines]
    offsets = np.cumsum([0, *map(len, ended)])
    return Sentences(np.concatenate(ended).astype(np.int32), offsets, np.arange(len(lines)) + 1, end_of_sentence=True)


@pytest.mark.parametrize("order", [1, 2])
def test_types_that_the_text_does_not_have_keep_a_share(order):
    model = KneserNey(direct_text([[0, 1], [0]], 4), order, ids=5)  # 2 and 3 are never seen
    shares = [model.probabilities(direct_text([[word]], 4))[0] for word in range(4)]
    assert shares[2] == shares[3] > 0
    assert sum(shares) + model.probabilities(direct_text([[]], 4))[0] == pytest.approx(1, abs=1e-12)


def test_shards_and_prepared_corpora_have_the_figures_of_their_text(tmp_path):
    _, train, valid = words_run(tmp_path)
    plain = compare(train, valid, 3, SIZE, silent)
    lines = Path(train).read_text().splitlines()
    shards, prepared = tmp_path / "shards", tmp_path / "prepared"
    shards.mkdir()
    write(shards / "a.txt", *lines[:20])
    write(shards / "b.txt", *lines[20:])
    prepare([str(shards)], prepared, PrepareOptions(words=VocabularyOptions(size=SIZE)), processes=1)
    data = {"train": str(prepared), "index_folder": str(tmp_path / "index"), "max_length": 4}
    for own in (
        compare(str(shards), valid, 3, SIZE, silent),
        compare(str(prepared), valid, 3, None, silent),
        compare_with_run(words_run(tmp_path, data=data)[0], valid, 3, silent),
        compare_with_run(words_run(tmp_path, data=data | {"train": str(shards)})[0], valid, 3, silent),
    ):
        assert {name: own[name] for name in ALIKE} == pytest.approx({name: plain[name] for name in ALIKE})
    assert not (tmp_path / "index").exists()  # that of a training is used, and none is left behind
    with pytest.raises(UserError, match="prepared corpus brings its vocabulary; leave --vocabulary-size out"):
        compare(str(prepared), valid, 3, SIZE, silent)


def test_words_of_shards_of_pieces_are_told_by_their_spaces(tmp_path):
    lines = write_text(tmp_path / "train.txt", 40, seed=1).read_text().splitlines()
    write_text(tmp_path / "valid.txt", 9, seed=2)
    pieces = train_pieces(lines, kind="unigram", size=45)
    run = write_untrained_run(tmp_path, "run", MODEL, vocabulary=pieces)
    pieces.save(tmp_path / "vocab")
    options = PrepareOptions(existing=str(tmp_path / "vocab"))
    prepare([str(tmp_path / "valid.txt")], tmp_path / "prepared", options, processes=1)
    of_text, of_shards = (compare_with_run(run, name, 2, silent) for name in (None, str(tmp_path / "prepared")))
    assert {name: of_shards[name] for name in ALIKE} == {name: of_text[name] for name in ALIKE}
    assert "bits_per_character" not in of_shards  # which do not have the text
    assert "bits_per_character" in of_text


def test_what_a_run_did_not_have_is_said(tmp_path):
    messages: list[str] = []
    run, train, valid = words_run(
        tmp_path, size=None, data={"train": [{"path": str(tmp_path / "train.txt"), "weight": 2}]}
    )
    compare_with_run(run, valid, 2, messages.append)
    assert "the corpora of data.train are counted once each, whatever their weights" in messages
    assert any("2 unknown words, but the training text has none: they cost what a type" in said for said in messages)
    without = write(tmp_path / "without", "the cat sees")
    no_unk = compare(train, without, 2, None, silent)  # none is needed, and none is a type
    assert compare_with_run(run, without, 2, silent)["nll"] == pytest.approx(no_unk["nll"])
    messages.clear()
    Path(train).write_text(Path(train).read_text() + "the cat\n")
    compare_with_run(run, without, 2, messages.append)
    assert any(said.endswith("has the text changed?") for said in messages)


def test_runs_without_their_text_get_one_line(tmp_path):
    run, train, valid = words_run(tmp_path, data={"valid": None})
    with pytest.raises(UserError, match="has no validation text: give the text to score with --test FILE"):
        compare_with_run(run, None, 3, silent)
    with pytest.raises(UserError, match="standard input"):
        compare_with_run(run, "-", 3, silent)
    Path(train).rename(tmp_path / "elsewhere")
    expected = "^the text that .*run was trained on cannot be used from here: .*train.txt: no such file; check the path"
    with pytest.raises(UserError, match=expected) as caught:
        compare_with_run(run, valid, 3, silent)
    assert "\n" not in str(caught.value)
    Path(train).write_text("\n")
    with pytest.raises(UserError, match="no sentence in it"):
        compare_with_run(run, valid, 3, silent)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train", "a", "--checkpoint", "b"], "--train and --checkpoint exclude each other: choose one"),
        (["--test", "c"], "--train and --checkpoint are missing: give a text to train on, or a run"),
        (["--train", "a"], "--test is missing: give the text to score"),
        (["--checkpoint", "b", "--vocabulary-size", "9"], "--vocabulary-size goes with --train"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_wrong_usage(arguments, message):
    result = CliRunner().invoke(cli.app, ["bench", "ngram", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_run_that_is_not_there_gets_one_line(tmp_path):
    with pytest.raises(UserError, match="moved") as caught:
        compare_with_run(tmp_path / "moved", None, 3, silent)
    assert "\n" not in str(caught.value)
