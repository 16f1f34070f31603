"""`lm_pcfg parse`, `evaluate` and `sample`, and gold trees while training."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from typer.testing import CliRunner

import lm_pcfg
from command_line import lm_pcfg as command
from lm_pcfg.cli import app
from lm_pcfg.corpus.treebank import read_trees
from lm_pcfg.inference.sample import Drawn
from lm_pcfg.storage.metrics_file import read_metrics
from texts import WORDS, write_config

TEXT = "the cat sees a dog\n\nzebra\nthe old cat near the house ( runs )\n"
GOLD = """( (S (NP-SBJ (DT The) (NN cat)) (VP (VBZ sees) (NP (DT a) (NN dog))) (. .)) )
(S (NP (DT the) (JJ old) (NN cat)) (VP (VBZ runs) (-NONE- *T*-1)) (-LRB- -LRB-) (RB near) (-RRB- -RRB-)) (FRAG (. !))
(S (NP (NN house)) (VP (VBZ sleeps)))
(INTJ (UH zebra))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trees")
    config = write_config(folder, training={"max_steps": 3})
    for name, changes in {"small": [], "two": ["seed=1"], "nonterminals": ["model.root=nonterminals"]}.items():
        result = CliRunner().invoke(app, ["train", "--config", str(config), f"name={name}", *changes])
        assert result.exit_code == 0, result.output
    (folder / "text").write_text(TEXT)
    (folder / "gold.mrg").write_text(GOLD)
    return folder


def ran(folder, *arguments, text=b""):
    result = command(*arguments, cwd=folder, text=text)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def failed(folder, *arguments, text=b""):
    result = command(*arguments, cwd=folder, text=text)
    assert result.returncode == 1, (result.stdout, result.stderr)
    (line,) = result.stderr.decode().splitlines()
    return line


# ---- parse ----------------------------------------------------------------------------------------------------------


def test_a_tree_for_every_line_in_its_place(folder):
    lines = ran(folder, "parse", "text", "--checkpoint", "runs/small").splitlines()
    assert len(lines) == 4
    assert lines[1] == ""
    assert lines[2] == "(T zebra)"
    trees = [next(read_trees([line])) for line in lines if line]
    assert [" ".join(tree.words) for tree in trees] == [
        "the cat sees a dog", "zebra", "the old cat near the house -LRB- runs -RRB-",
    ]  # fmt: skip
    from_input = ran(folder, "parse", "-", "--checkpoint", "runs/small", text=TEXT.encode())
    assert from_input.splitlines() == lines


def test_every_form_shows_the_same_trees(folder):
    trees = lm_pcfg.load(folder / "runs/small").parse(TEXT.splitlines())
    objects = [json.loads(line) for line in ran(folder, "parse", "text", "--format", "json").splitlines()]
    newest = lm_pcfg.load(folder / "runs/nonterminals").parse(TEXT.splitlines())  # the default is the newest run
    assert [entry["line"] for entry in objects] == [1, 2, 3, 4]
    assert [[tuple(node) for node in entry["nodes"]] for entry in objects] == [list(tree.nodes) for tree in newest]
    spans = ran(folder, "parse", "text", "--format", "spans", "--checkpoint", "runs/small").splitlines()
    assert spans[0].split() == [f"{first}-{end}" for first, end, _ in trees[0].nodes]
    assert spans[1:3] == ["", ""]
    picture = ElementTree.fromstring(ran(folder, "parse", "text", "--format", "svg"))
    shown = [element.text for element in picture.iter() if element.get("class") == "word"]
    assert shown == TEXT.split()
    page = ran(folder, "parse", "text", "--format", "html")
    assert page.startswith("<!DOCTYPE html>")
    assert page.count("<svg") == 3
    drawing = ran(folder, "parse", "text", "--format", "text", "--method", "viterbi")
    assert all(word in drawing for word in TEXT.split())


def test_symbols_of_viterbi(folder):
    line = ran(folder, "parse", "text", "--method", "viterbi", "--checkpoint", "runs/small").splitlines()[0]
    tree = next(read_trees([line]))
    assert {tag[0] for tag in tree.tags} == {"P"}
    assert {label[0] for _, _, label in tree.nodes} == {"N"}


def test_a_consensus_of_checkpoints(folder):
    both = ran(folder, "parse", "text", "--checkpoint", "runs/small", "--checkpoint", "runs/two", "--format", "spans")
    trees = lm_pcfg.load(folder / "runs/small", folder / "runs/two").parse(TEXT.splitlines())
    assert both.splitlines()[0].split() == [f"{first}-{end}" for first, end, _ in trees[0].nodes]
    arguments = ["parse", "text", "--checkpoint", "runs/small", "--checkpoint", "runs/two", "--method", "viterbi"]
    assert "one checkpoint" in failed(folder, *arguments)


def test_lines_that_are_too_long_have_no_tree_and_a_warning(folder, monkeypatch):
    result = command("parse", "text", "--max-length", "4", cwd=folder)
    assert result.stdout.decode().splitlines() == ["()", "", "(T zebra)", "()"]
    assert result.stderr.decode().count("skipped; --max-length 4 is the limit") == 2
    monkeypatch.setattr("lm_pcfg.inference.lines.memory_of", lambda device: 4000.0)
    result = command("parse", "text", cwd=folder)
    assert "fits into memory" in result.stderr.decode()


def test_a_line_without_a_tree_is_told(folder, monkeypatch):
    """A grammar of softmaxes has a tree for all lines but single words: its tables of posteriors are taken away."""
    from lm_pcfg.grammar.parsing import Parser

    monkeypatch.setattr(Parser, "posteriors", lambda self, lines, statistics=None: [None] * len(lines))
    result = command("parse", "text", cwd=folder)
    assert result.stdout.decode().splitlines() == ["()", "", "(T zebra)", "()"]
    assert "text, line 1: no tree: probability 0" in result.stderr.decode()


@pytest.mark.parametrize("arguments", [["parse", "strange"], ["evaluate", "strange.mrg"], ["score", "strange"]])
def test_unknown_words_are_told_where_training_saw_none(folder, arguments):
    (folder / "strange").write_text("the cat zebra\nzebra zebra sees\n")
    (folder / "strange.mrg").write_text("(S (D the) (N cat) (V zebra))\n(S (N zebra) (N zebra) (V sees))\n")
    said = command(*arguments, "--checkpoint", "runs/small", cwd=folder).stderr.decode()
    name = arguments[1]
    assert f"warning: {name}: 3 unknown words, but training saw none: their probability is arbitrary" in said
    (folder / "strange").write_text("the cat sees\n")
    (folder / "strange.mrg").write_text("(S (D the) (N cat) (V sees))\n")
    assert "unknown words" not in command(*arguments, "--checkpoint", "runs/small", cwd=folder).stderr.decode()


# ---- evaluate -------------------------------------------------------------------------------------------------------


def test_a_report_beside_baselines(folder):
    report = json.loads(ran(folder, "evaluate", "gold.mrg", "--checkpoint", "runs/small", "--lowercase", "--json"))
    assert (report["sentences"], report["skipped"]) == (3, 2)  # "!" has no word left, "zebra" only one
    assert report["unknown_words"] == 1  # zebra; without --lowercase The is another
    assert report["unknown_share"] == pytest.approx(1 / 13)
    assert report["baselines"]["best binary"]["s_f1"] == pytest.approx(100 * (1 + 1 / 2 + 1) / 3)
    model = lm_pcfg.load(folder / "runs/small")
    lines = ["the cat sees a dog", "the old cat runs near", "house sleeps", "zebra"]
    assert report["nll"] == pytest.approx(-model.score(lines).sum(), rel=1e-6)
    assert (report["words"], report["lines"], report["tokens"], report["skipped_lines"]) == (13, 4, 17, 0)
    table = ran(folder, "evaluate", "gold.mrg", "--checkpoint", "runs/small")
    for name in ("S-F1", "right-branching", "left-branching", "random", "best binary", "NP", "41 or more"):
        assert name in table
    assert f"perplexity {report['ppl']:.2f}" not in table  # The is unknown there


def test_our_own_trees_as_predictions_score_the_same(folder):
    (folder / "lines").write_text("the cat sees a dog\nthe old cat runs near\n\nhouse sleeps\nzebra\n")
    own = json.loads(ran(folder, "evaluate", "gold.mrg", "--checkpoint", "runs/small", "--lowercase", "--json"))
    (folder / "predicted").write_text(ran(folder, "parse", "lines", "--checkpoint", "runs/small"))
    theirs = json.loads(ran(folder, "evaluate", "gold.mrg", "--predicted", "predicted", "--json"))
    for name in ("s_f1", "corpus_f1", "by_label", "by_length", "baselines", "sentences"):
        assert theirs[name] == own[name]
    assert "ppl" not in theirs
    assert theirs["predicted_file"] == "predicted"
    assert ran(folder, "evaluate", "gold.mrg", "--predicted", "predicted").splitlines()[1].startswith("predicted ")


def test_gold_scored_against_itself_is_perfect(folder):
    report = json.loads(ran(folder, "evaluate", "gold.mrg", "--predicted", "gold.mrg", "--json"))
    assert report["s_f1"] == report["corpus_f1"] == 100.0
    kept = json.loads(ran(folder, "evaluate", "gold.mrg", "--predicted", "gold.mrg", "--punctuation", "keep", "--json"))
    assert kept["s_f1"] == 100.0
    assert kept["baselines"]["best binary"]["s_f1"] < 100


def test_punctuation_by_tags(folder):
    report = json.loads(ran(folder, "evaluate", "gold.mrg", "--punctuation", ".,UH", "--json"))
    assert report["tokens"] == (5 + 7 + 2) + 3  # the brackets of the second sentence stay


def test_sentences_without_a_probability_are_counted(folder):
    report = json.loads(ran(folder, "evaluate", "gold.mrg", "--checkpoint", "runs/nonterminals", "--json"))
    assert (report["lines"], report["skipped_lines"]) == (3, 1)  # one word
    assert "without 1 sentences of probability 0" in ran(
        folder, "evaluate", "gold.mrg", "--checkpoint", "runs/nonterminals"
    )
    assert "no word has the tag PENN" in failed(folder, "evaluate", "gold.mrg", "--punctuation", "PENN")


def test_what_is_no_tree_is_named_with_its_line(folder):
    (folder / "bad").write_text("(S (NN a) (VB b))\n(S (NN a) b)\n")
    assert failed(folder, "evaluate", "bad") == (
        "lm_pcfg: error: bad: line 2: words and brackets side by side below 'S'"
    )
    (folder / "empty").write_text("")
    assert "no tree of two words or more" in failed(folder, "evaluate", "empty")
    (folder / "few").write_text("(S (NN a) (VB b))\n")
    assert "few: line 1" in failed(folder, "evaluate", "gold.mrg", "--predicted", "few")
    assert "no such file" in failed(folder, "evaluate", "nothing")
    assert "embedded:test is text" in failed(folder, "evaluate", "embedded:test")


# ---- sample ---------------------------------------------------------------------------------------------------------


def test_samples_are_sentences_and_the_same_for_a_seed(folder):
    options = ["--checkpoint", "runs/small", "--max-length", "1000"]
    first = ran(folder, "sample", "-n", "20", *options).splitlines()
    assert first == ran(folder, "sample", "-n", "20", *options).splitlines()
    assert first != ran(folder, "sample", "-n", "20", "--seed", "1", *options).splitlines()
    assert {word for line in first for word in line.split()} <= {*WORDS, "<unk>"}
    trees = ran(folder, "sample", "-n", "20", "--trees", *options).splitlines()
    assert [" ".join(next(read_trees([tree])).words) for tree in trees] == first
    objects = [json.loads(line) for line in ran(folder, "sample", "-n", "20", "--json", *options).splitlines()]
    assert [entry["text"] for entry in objects] == first
    assert all(entry["log_probability"] < 0 for entry in objects)


def test_what_a_limit_cuts_is_counted(folder):
    result = command("sample", "-n", "50", "--max-length", "3", "--checkpoint", "runs/small", cwd=folder)
    lines = result.stdout.decode().splitlines()
    assert 0 < len(lines) < 50
    assert f"{50 - len(lines)} of 50 samples have more than 3 words: they are left out" in result.stderr.decode()
    with pytest.warns(UserWarning, match="of 50 samples"):
        samples = lm_pcfg.load(folder / "runs/small").sample(50, max_length=3)
    assert [sample.text for sample in samples] == lines


def test_samples_of_a_mixture_come_from_all(folder):
    model = lm_pcfg.load(folder / "runs/small", folder / "runs/two")
    drawn = Drawn()
    samples = list(model.draw(300, max_length=2, drawn=drawn))
    assert (drawn.samples, len(samples)) == (300, 300 - drawn.cut)
    pairs = [sample for sample in samples if len(sample.tree.words) == 2]
    sources = [[two_words_log_p(one, pair) == pytest.approx(pair.log_probability, abs=1e-5) for pair in pairs]
               for one in model.grammars]  # fmt: skip
    assert all(sum(fits) == 1 for fits in zip(*sources, strict=True))
    assert all(map(any, sources))


def two_words_log_p(trained, sample):
    """The log-probability of a derivation of two words under a grammar."""
    root, left, right, emission, *_ = trained.grammar
    top = int(sample.tree.nodes[0][2][1:])
    tags = [int(tag[1:]) for tag in sample.tree.tags]
    words = emission.log_probabilities(torch.tensor(trained.vocabulary.tokenise([sample.text])[0]))
    first, second = (side[top, len(left) + tag] for side, tag in zip((left, right), tags, strict=True))
    return (root[top] * first * second).log().item() + words[0, tags[0]].item() + words[1, tags[1]].item()


def test_every_block_of_lines_has_draws_of_its_own(folder, monkeypatch):
    monkeypatch.setattr("lm_pcfg.commands.text.sample.TREES_AT_A_TIME", 20)  # two blocks of ten lines
    (folder / "same").write_text("the old cat near the house sleeps\n" * 20)
    drawn = ["sample", "--posterior", "same", "-n", "2", "--checkpoint", "runs/small"]
    lines = ran(folder, *drawn).splitlines()
    assert len(lines) == 40
    assert lines[:20] != lines[20:]
    objects = ran(
        folder, "sample", "--posterior", "same", "-n", "2", "--json", "--checkpoint", "runs/small"
    ).splitlines()
    assert all(json.loads(line)["log_probability"] < 0 for line in objects)


def test_trees_of_given_sentences(folder):
    lines = ran(folder, "sample", "--posterior", "text", "-n", "3", "--checkpoint", "runs/small").splitlines()
    assert len(lines) == 9
    trees = [next(read_trees([line])) for line in lines]
    assert [tree.words[0] for tree in trees] == ["the"] * 3 + ["zebra"] * 3 + ["the"] * 3
    result = command("sample", "--posterior", "text", "-n", "3", "--checkpoint", "runs/nonterminals", cwd=folder)
    assert len(result.stdout.decode().splitlines()) == 6
    assert "line 3: no tree (probability 0)" in result.stderr.decode()


# ---- while training -------------------------------------------------------------------------------------------------


def trained(folder, name, *changes):
    config = write_config(folder, evaluation={"trees": str(folder / "gold.mrg")})
    result = command("train", "--config", str(config), f"name={name}", *changes, cwd=folder)
    assert result.returncode == 0, result.stderr.decode()
    lines = [line for line in read_metrics(folder / "runs" / name / "metrics.jsonl") if "valid/ppl" in line]
    return result.stderr.decode(), lines


def test_s_f1_is_logged_and_likelihood_selects(folder):
    said, lines = trained(folder, "watched")
    assert "trees: 3 of" in said
    assert "chosen by likelihood" in said
    report = json.loads(ran(folder, "evaluate", "gold.mrg", "--checkpoint", "runs/watched", "--json"))
    best = min(lines, key=lambda line: line["valid/ppl"])
    assert best["valid/s_f1"] == pytest.approx(report["s_f1"])
    recall = {row["label"]: row["recall"] for row in report["by_label"]}
    assert {name.removeprefix("valid/recall_") for name in best if "recall_" in name} == set(recall)
    assert best["valid/recall_NP"] == pytest.approx(recall["NP"])
    assert f"S-F1 {best['valid/s_f1']:.2f}" in said


def test_trees_select_if_asked_to(folder, monkeypatch):
    from lm_pcfg.training import evaluation

    values = iter([0.1, 0.9, 0.5])
    original = evaluation.compared_trees

    def f1_of_all(*arguments, **options):
        return original(*arguments, **options) * 0 + next(values)

    monkeypatch.setattr(evaluation, "compared_trees", f1_of_all)
    said, lines = trained(folder, "chosen", "evaluation.select=trees", "training.epochs=3")
    assert "chosen by trees" in said
    assert [line["valid/s_f1"] for line in lines] == pytest.approx([10, 90, 50])
    assert (folder / "runs/chosen/best").resolve().name == f"step-{lines[1]['step']:08d}"


def test_another_way_to_choose_forgets_the_best_so_far(folder):
    """An S-F1 and a number of impossible sentences cannot be compared."""
    trained(folder, "changed", "evaluation.select=trees", "training.epochs=2")
    said, lines = trained(folder, "changed", "training.epochs=4", "resume=auto")
    assert "chosen by likelihood from now on" in said
    best = min(lines[2:], key=lambda line: line["valid/ppl"])
    assert (folder / "runs/changed/best").resolve().name == f"step-{best['step']:08d}"
    assert "best S-F1" not in said


def test_mistakes_in_the_settings_of_trees(folder):
    config = str(write_config(folder))
    assert "needs gold trees" in failed(folder, "train", "--config", config, "evaluation.select=trees")
    assert "no such file" in failed(folder, "train", "--config", config, "evaluation.trees=nothing")
    arguments = [f"evaluation.trees={folder / 'gold.mrg'}", "data.valid=null"]
    assert "give data.valid" in failed(folder, "train", "--config", config, *arguments)
