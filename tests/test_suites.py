"""Syntactic test suites: accuracies beside those of an independent script, and files that are none."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lm_pcfg
from command_line import lm_pcfg as command
from flash_inside import Rules
from hostile_json import ANYTHING, nearly
from lm_pcfg.corpus.pieces import PieceVocabulary
from lm_pcfg.corpus.suites.files import Pair, Spelling, read_suite
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.inference.model import Model
from lm_pcfg.inference.suites import evaluate_suites, read_suites
from small_runs import train_small_runs

# BLiMP: phenomenon, paradigm, good, bad. The zebra and the zebu are one unknown word: a tie.
PAIRS = [
    ("agreement", "near", "The cat sees a dog.", "The cat sees dog a."),
    ("agreement", "near", "A bird sleeps.", "Bird a sleeps."),
    ("agreement", "far", "The cat near the house sleeps, and runs!", "The cat near the sleeps house, and runs!"),
    ("agreement", "far", "The zebra sleeps.", "The zebu sleeps."),
    ("islands", "one", "The small dog likes the tree.", "The small dog likes the iguana."),
    ("islands", "one", "\"The cat sees the cat,\" runs the dog.", "\"The cat sees,\" runs the dog the cat."),
    ("islands", "two", "The cat runs.", "the CAT runs"),
]  # fmt: skip
ZORRO = ["dog the sees the .", "the dog sees the cat .", "look cat", "the cat chases a bird .", "a tree a", "a tree"]
FORMULAS = ["(2;%bad%) > (2;%good%)", "[(*;%bad%) - (1;%bad%)] > (2;%good%)+(3;%good%)+(4;%good%) & (3;%good%)=0"]


def suite_item(number: int, before: str, good: str, bad: str, after: str) -> dict:
    conditions = [
        {"condition_name": name, "regions": [
            {"region_number": place + 1, "content": content} for place, content in enumerate([before, word, "", after])
        ]} for name, word in (("good", good), ("bad", bad), ("not used", "zebra"))
    ]  # fmt: skip
    return {"item_number": number, "conditions": conditions}


SUITE = {
    "meta": {"name": "order", "metric": "sum"},
    "region_meta": {"1": "subject", "2": "verb", "3": "nothing", "4": "object"},
    "predictions": [{"type": "formula", "formula": formula} for formula in FORMULAS],
    "items": [
        suite_item(1, "The cat", "sees the", "the sees", "dog."),
        suite_item(2, "A bird", "near the house sleeps", "house near sleeps the", "and runs."),
        suite_item(3, "The old dog", "likes", "tree", "the zebra."),
        suite_item(4, "The dog", "zebra", "zebu", "."),  # the same to the model: the first formula fails
        suite_item(5, "The cat", "the sees", "sees the", "dog."),
        suite_item(6, "A bird", "house near sleeps the", "near the house sleeps", "and runs."),
        suite_item(7, "The old dog", "tree", "likes", "the house."),
    ],
}


def write_suites(folder: Path) -> list[Path]:
    """A file in each format."""
    names = ("linguistics_term", "UID", "sentence_good", "sentence_bad")
    lines = [json.dumps(dict(zip(names, pair, strict=True))) for pair in PAIRS]
    (folder / "blimp.jsonl").write_text("\n".join(lines) + "\n\n")
    (folder / "order-words.txt").write_text("\n".join(ZORRO) + "\n")
    (folder / "syntaxgym.json").write_text(json.dumps(SUITE, indent=1))
    return [folder / name for name in ("blimp.jsonl", "order-words.txt", "syntaxgym.json")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds, roots over nonterminals, pieces, a dense PCFG."""
    return train_small_runs(tmp_path_factory.mktemp("suites"), ["one", "two", "nonterminals", "pieces", "n_pcfg"])


def suite_report(runs: Path, files: list[Path], *more: str, names: tuple[str, ...] = ("one",)) -> dict:
    checkpoints = [word for name in names for word in ("--checkpoint", str(runs / name))]
    result = command("suite", *map(str, files), "--json", "--lowercase", *checkpoints, *more, cwd=runs)
    assert result.returncode == 0, result.stderr.decode()
    return json.loads(result.stdout)


# ---- accuracies -----------------------------------------------------------------------------------------------------


def independent_accuracies(model: Model, folder: Path) -> dict[str, float]:
    """The accuracies by phenomenon with --lowercase and --punctuation drop, from one sentence at a time."""

    def words(text):
        return re.findall(r"[a-z]+", text.lower())

    right: dict[str, list[float]] = {}
    lines = (folder / "order-words.txt").read_text().splitlines()
    pairs = [("order", good, bad) for bad, good in zip(lines[::2], lines[1::2], strict=True)]
    for item in map(json.loads, (folder / "blimp.jsonl").read_text().split("\n")[:-2]):
        pairs.append((item["linguistics_term"], item["sentence_good"], item["sentence_bad"]))
    for phenomenon, *sentences in pairs:
        good, bad = (model.score([" ".join(words(sentence))])[0] for sentence in sentences)
        right.setdefault(phenomenon, []).append(1.0 if good > bad else 0.5 if good == bad else 0.0)
    for item in json.loads((folder / "syntaxgym.json").read_text())["items"]:
        bits = {}
        for condition in item["conditions"]:
            regions = [words(region["content"]) for region in condition["regions"]]
            found = iter(model.surprisal([" ".join(map(" ".join, regions))])[0].bits.tolist())
            bits[condition["condition_name"]] = [sum(next(found) for _ in region) for region in regions]
        good, bad = bits["good"], bits["bad"]
        holds = bad[1] > good[1] and sum(bad) - bad[0] > sum(good[1:]) and abs(good[2]) < 1e-3
        right.setdefault("order", []).append(float(holds))
    return {phenomenon: 100 * sum(some) / len(some) for phenomenon, some in right.items()}


@pytest.mark.parametrize("names", [("one",), ("two",), ("one", "two"), ("pieces",)])
def test_accuracies_are_those_of_an_independent_script(runs, tmp_path, names):
    files = write_suites(tmp_path)
    report = suite_report(runs, files, "--punctuation", "drop", "--precision", "fp64", names=names)
    model = lm_pcfg.load(*(runs / name for name in names))
    model.precision = "fp64"
    found = {row["phenomenon"]: row["accuracy"] for row in report["phenomena"]}
    assert found == independent_accuracies(model, tmp_path)
    assert report["items"] == sum(row["items"] for row in report["phenomena"]) == 17
    assert report["unscored"] == 0


def test_unknown_words_are_in_one_accuracy_and_out_of_the_other(runs, tmp_path):
    report = suite_report(runs, write_suites(tmp_path)[:1], "--punctuation", "drop")
    assert (report["items"], report["items_known"], report["ties"]) == (7, 5, 2)
    rows = {row["phenomenon"]: row for row in report["phenomena"]}
    assert (rows["agreement"]["items"], rows["agreement"]["items_known"]) == (4, 3)
    paradigms = {row["paradigm"]: row for row in report["paradigms"]}
    assert (paradigms["two"]["accuracy"], paradigms["two"]["accuracy_known"]) == (50.0, 50.0)  # a tie of known words
    far = paradigms["far"]
    assert far["accuracy"] == (far["accuracy_known"] + 50.0) / 2  # one known pair, and a tie of unknown words
    kept = suite_report(runs, write_suites(tmp_path)[:1], "--punctuation", "keep")
    assert (kept["items_known"], kept["accuracy_known"]) == (0, None)  # the text that was trained on has no full stop


def test_a_table_for_people(runs, tmp_path):
    arguments = ["suite", *map(str, write_suites(tmp_path)), "--lowercase", "--checkpoint", str(runs / "one")]
    result = command(*arguments, "--punctuation", "drop", cwd=tmp_path)
    lines = result.stdout.decode().splitlines()
    assert lines[0].split() == ["phenomenon", "accuracy", "items", "known", "words", "items"]
    assert [line.split()[0] for line in lines[1:5]] == ["agreement", "islands", "order", "all"]
    assert lines[4].split()[2] == "17"
    assert FORMULAS[0] in "\n".join(lines)
    assert lines[-1] == "17 items, 2 ties (one half each), 0 more could not be scored"
    assert "try --lowercase" in result.stderr.decode()


def test_predictions_have_accuracies_of_their_own(runs, tmp_path):
    report = suite_report(runs, write_suites(tmp_path)[2:], "--punctuation", "drop")
    assert [row["formula"] for row in report["predictions"]] == FORMULAS
    assert all(row["items"] == 7 for row in report["predictions"])
    assert 0.0 < report["accuracy"] <= min(row["accuracy"] for row in report["predictions"]) < 100.0


def test_metrics(runs, tmp_path):
    """Of the words of a region; the sum of all regions is that of their values."""
    model = lm_pcfg.load(runs / "one")
    bits = model.surprisal(["the cat sees a dog"])[0].bits.tolist()
    expected = {
        "sum": sum(bits[:3]), "mean": sum(bits[:3]) / 3, "median": sorted(bits[:3])[1],
        "range": max(bits[:3]) - min(bits[:3]), "max": max(bits[:3]), "min": min(bits[:3]),
    }  # fmt: skip
    for metric, value in expected.items():
        last = 0.0 if metric == "range" else bits[3]
        end = 0.0 if metric == "range" else bits[4]
        contents = {7: "the cat sees", 2: "a", 5: "dog", 9: ""}
        regions = [{"region_number": number, "content": text} for number, text in contents.items()]
        formulas = [f"(7;%x%) = {value!r}", f"(*;%x%) = {value + last + end!r}", "(9;%x%)=0"]
        suite = {"meta": {"metric": metric}, "predictions": [{"formula": formula} for formula in formulas],
                 "items": [{"conditions": [{"condition_name": "x", "regions": regions}]}]}  # fmt: skip
        (tmp_path / "metric.json").write_text(json.dumps(suite))
        items = read_suites([tmp_path / "metric.json"], lowercase=False, keep_punctuation=True)
        assert items[0].phenomenon == "metric"
        assert evaluate_suites(model, items, warn=lambda message: None)["accuracy"] == 100.0


def test_a_dense_grammar_has_pairs_but_no_regions(runs, tmp_path):
    blimp, zorro, syntaxgym = write_suites(tmp_path)
    assert suite_report(runs, [blimp, zorro], names=("n_pcfg",))["items"] == 10
    result = command("suite", str(blimp), str(syntaxgym), "--checkpoint", str(runs / "n_pcfg"), cwd=runs)
    assert result.returncode == 1
    assert "family n_pcfg has no next-word probabilities" in result.stderr.decode()


# ---- what cannot be scored ------------------------------------------------------------------------------------------


def judged(model: Model, *sentences: tuple[str, str]) -> tuple[dict, str]:
    told: list[str] = []
    items = [Pair(f"here, line {n}", "x", "x", good, bad) for n, (good, bad) in enumerate(sentences, start=1)]
    return evaluate_suites(model, items, warn=told.append), "\n".join(told)


def test_sentences_without_a_score_are_counted_and_told(runs, monkeypatch):
    model = lm_pcfg.load(runs / "nonterminals")
    report, told = judged(model, ("the cat", "a dog"), ("", "a dog"), ("cat", "a dog"))
    assert (report["items"], report["unscored"]) == (1, 2)
    assert "here, line 2: not scored: a sentence without words" in told
    assert "here, line 3: not scored: a sentence so short" in told
    monkeypatch.setattr(model, "longest_line", lambda: 3.0)
    report, told = judged(model, ("the cat", "a dog"), ("the cat", "a dog the cat"))
    assert (report["items"], report["unscored"]) == (1, 1)
    assert "at most 3 words" in told
    with pytest.raises(UserError, match="no item could be scored \\(1 were not\\)"):
        judged(model, ("", ""))
    monkeypatch.setattr(model, "score", lambda lines, on_lines: np.array([-1.0, math.nan, -2.0]))
    report, told = judged(model, ("the cat", "a dog"), ("the cat", "the dog"))
    assert (report["accuracy"], report["unscored"]) == (100.0, 1)
    assert "here, line 1: not scored: its probability is no number" in told


def test_words_that_pieces_do_not_tell_apart(runs, tmp_path, monkeypatch):
    model = lm_pcfg.load(runs / "pieces")
    boundaries = PieceVocabulary.word_boundaries
    monkeypatch.setattr(
        PieceVocabulary, "word_boundaries", lambda *arguments: None if arguments[2] == 5 else boundaries(*arguments)
    )
    files = write_suites(tmp_path)[2:]
    told: list[str] = []
    report = evaluate_suites(model, read_suites(files, lowercase=True, keep_punctuation=False), warn=told.append)
    assert report["unscored"] == 2
    assert any("item 1: not scored: words that the model's pieces do not tell apart" in line for line in told)


def test_sentences_of_probability_0(runs, tmp_path):
    """Word 2 has probability 0 everywhere: a sentence with it is worse than others, and ties with its like."""
    whole = lm_pcfg.load(runs / "one").grammars[0]
    side = torch.tensor([[0.2, 0.4, 0.4]], dtype=torch.float64)
    emissions = torch.zeros(len(whole.vocabulary), 2, dtype=torch.float64)
    emissions[2] = -math.inf
    emission = Emission.of(torch.ones(2, 2, dtype=torch.float64), emissions)
    grammar = Grammar(*Rules(torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), side, side), emission)
    model = Model([replace(whole, grammar=grammar)], precision="fp64")
    never, once = model.vocabulary.words[2], model.vocabulary.words[3]
    report, told = judged(model, (f"{once} {once}", f"{once} {never}"), (f"{never} {once}", f"{once} {never}"))
    assert (report["accuracy"], report["ties"]) == (75.0, 1)
    assert "here, line 2: a sentence of probability 0" in told
    suite = {**SUITE, "predictions": [{"formula": "(2;%good%) < (2;%bad%)"}, {"formula": "(1;%bad%) = (1;%good%)"}]}
    suite["items"] = [suite_item(1, once, once, never, once)]
    (tmp_path / "zero.json").write_text(json.dumps(suite))
    items = read_suites([tmp_path / "zero.json"], lowercase=False, keep_punctuation=True)
    assert evaluate_suites(model, items, warn=lambda message: None)["accuracy"] == 100.0
    suite["predictions"] = [{"formula": "(4;%good%) < (4;%bad%)"}]  # after a word of probability 0
    (tmp_path / "zero.json").write_text(json.dumps(suite))
    items = read_suites([tmp_path / "zero.json"], lowercase=False, keep_punctuation=True)
    with pytest.raises(UserError, match="no item could be scored"):
        evaluate_suites(model, items, warn=lambda message: None)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_words_of_natural_language():
    text = "\"Carla's (big) dogs' ball...\" doesn't -- ''end'' -LRB- <unk> 's ?!"
    signs = ['"', "Carla's", "(", "big", ")", "dogs'", "ball", "...", '"', "doesn't", "--", "''", "end", "''"]
    assert Spelling().words(text) == [*signs, "-LRB-", "<unk>", "'s", "?", "!"]
    without = ["carla's", "big", "dogs'", "ball", "doesn't", "end", "-lrb-", "<unk>", "'s"]
    assert Spelling(lowercase=True, keep_punctuation=False).words(text) == without
    assert len(Spelling().words("." * 100_000 + "x" + "'" * 100_000)) < 100_000


def with_item(**changes: object) -> str:
    return json.dumps({**SUITE, "items": [{**SUITE["items"][0], **changes}]})


CONDITION = SUITE["items"][0]["conditions"][0]


def with_regions(*regions: dict) -> str:
    return with_item(conditions=[{**CONDITION, "regions": list(regions)}])


BAD = {
    "a.jsonl": [
        ("{", "a.jsonl, line 1: not JSON"), ("[" * 100_000, "nested too deep"), ("9" * 5000, "not JSON"),
        ("\n\n[]", "line 3: should be an object, not a list"), ('{"sentence_good": "a"}', "sentence_bad should be a"),
        ('{"sentence_good": "\\ud800", "sentence_bad": "a"}', "half of a character"), ("", "no item in it"),
        ('{"sentence_good": "a", "sentence_bad": "b", "UID": 1}', "UID should be a text, not 1"),
    ],
    "a.txt": [("a b\nc d\ne", "3 lines are no pairs"), ("\n\n", "no item in it"), ("a\0b", "binary file")],
    "a.json": [
        ("[]", "should be an object"), ("{}", "predictions should be a list"), ("{" * 100_000, "JSON"),
        ('{"meta": {"metric": "mode"}}', "the metric 'mode' is none of sum, mean"),
        (json.dumps({**SUITE, "predictions": [{"type": "code", "formula": "1"}]}), "the type 'code' is not known"),
        (json.dumps({**SUITE, "predictions": [{"formula": "1 <"}]}), "a.json, prediction 1: a number, a region"),
        (json.dumps({**SUITE, "predictions": [{"formula": "(9;%good%) > 1"}]}), "item 1: no region 9"),
        (json.dumps({**SUITE, "predictions": [{"formula": "(1;%best%) > 1"}]}), "item 1: no condition 'best'"),
        (with_item(conditions=[CONDITION, CONDITION]), "condition 2: a second condition 'good'"),
        (with_regions({"region_number": 1, "content": "a"}, {"region_number": 1, "content": "a"}), "second region 1"),
        (with_regions({"region_number": True, "content": "a"}), "region_number should be a whole number, not True"),
        (with_regions({"region_number": 1}), "content should be a text, not nothing"),
    ],
    "a.csv": [("a", "give a file of BLiMP")],
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), [(name, *one) for name, some in BAD.items() for one in some])
def test_bad_files_are_told_in_a_line(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    result = command("suite", name, cwd=tmp_path)
    assert result.returncode == 1
    (line,) = result.stderr.decode().splitlines()
    assert line.startswith(f"lm_pcfg: error: {name}")
    assert message in line


def test_files_that_are_none(tmp_path, monkeypatch):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "large.txt").write_text("a\nb\n")
    monkeypatch.setattr("lm_pcfg.corpus.suites.files.LARGEST_FILE", 3)
    for name, message in {"none.txt": "no such file", "folder.json": "is a folder", "large.txt": "larger than"}.items():
        with pytest.raises(UserError, match=message):
            read_suite(tmp_path / name, Spelling())
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="not a plain file"):
        read_suite(tmp_path / "zero.txt", Spelling())


def test_names_of_files_stand_in_for_those_of_phenomena(tmp_path):
    (tmp_path / "agreement-far.txt").write_text("a b\nb a\n")
    (tmp_path / "mine.jsonl").write_text('{"sentence_good": "A b", "sentence_bad": "b"}\n')
    zorro, blimp = (read_suite(tmp_path / name, Spelling())[0] for name in ("agreement-far.txt", "mine.jsonl"))
    assert zorro == Pair(f"{tmp_path / 'agreement-far.txt'}, line 1", "agreement", "agreement-far", "b a", "a b")
    assert (blimp.phenomenon, blimp.paradigm, blimp.sentences) == ("mine", "mine", ["A b", "b"])


FUZZED = (
    nearly(SUITE).map(lambda value: (".json", json.dumps(value).encode()))
    | st.lists(nearly({"sentence_good": "the cat", "sentence_bad": "cat the", "UID": "u"}) | ANYTHING, max_size=3).map(
        lambda values: (".jsonl", "\n".join(map(json.dumps, values)).encode())
    )
    | st.tuples(st.sampled_from([".json", ".jsonl", ".txt"]), st.binary(max_size=40))
    | st.text(alphabet="the cat.\n\t'\"!\u2028\x85", max_size=60).map(lambda text: (".txt", text.encode()))
    | st.text(alphabet="12(;%good%)<>=&|+-[]. ", max_size=20).map(
        lambda text: (".json", json.dumps({**SUITE, "predictions": [{"formula": text}]}).encode())
    )
)


def test_fuzzed_files_are_scored_or_told(runs, tmp_path):
    model = lm_pcfg.load(runs / "one")

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(FUZZED, st.booleans())
    def check(fuzzed, keep):
        suffix, content = fuzzed
        file = tmp_path / f"fuzzed{suffix}"
        file.write_bytes(content)
        try:
            report = evaluate_suites(
                model, read_suites([file], lowercase=keep, keep_punctuation=keep), warn=lambda message: None
            )
        except UserError:
            return
        json.dumps(report, allow_nan=False)
        assert report["items"] > 0

    check()
