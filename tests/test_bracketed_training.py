"""Training on text with brackets (data.brackets), and the partial trees of `lm_pcfg parse` that it reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lm_pcfg
from command_line import lm_pcfg as command
from flash_inside.brackets import allowed_spans
from grammars import crosses
from lm_pcfg.corpus.lengths import Limits
from lm_pcfg.corpus.sentences import encode_sentences
from lm_pcfg.corpus.treebank import read_trees
from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyOptions
from lm_pcfg.grammar.brackets import read_limits
from lm_pcfg.storage.metrics_file import read_metrics
from texts import write_config


def right_branching(words: list[str]) -> str:
    if len(words) == 1:
        return f"(T {words[0]})"
    return f"(X (T {words[0]}) {right_branching(words[1:])})"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("brackets")
    write_config(folder, training={"epochs": 40}, optimizer={"learning_rate": 0.03}, evaluation={"every_epochs": 20})
    lines = (folder / "train.txt").read_text().splitlines()
    (folder / "right.trees").write_text("".join(right_branching(line.split()) + "\n" for line in lines))
    (folder / "none.trees").write_text("()\n" * len(lines))
    return folder


def train(folder, name, *changes):
    return command("train", "--config", "small.yaml", f"name={name}", *changes, cwd=folder)


def losses(folder, name):
    return [
        line["train/loss"] for line in read_metrics(folder / "runs" / name / "metrics.jsonl") if "train/loss" in line
    ]


@pytest.mark.long
def test_the_grammar_learns_the_brackets(folder):
    result = train(folder, "right", "data.brackets=right.trees")
    assert result.returncode == 0, result.stderr
    lines = [line for line in (folder / "train.txt").read_text().splitlines() if len(line.split()) > 2][:20]
    model = lm_pcfg.load(folder / "runs" / "right")
    spans = [(i, j, len(tree.words)) for tree in model.parse(lines) for i, j, _ in tree.nodes]
    right = sum(j == length for _, j, length in spans) / len(spans)
    assert right > 0.95
    assert np.isfinite(model.score(lines)).all()


def test_no_brackets_change_nothing_and_brackets_end_after_their_epochs(folder):

    steps = ["training.max_steps=24", "training.log_every=1", "evaluation.every_epochs=null"]  # of 8 an epoch
    for name, brackets in {
        "free": "null", "empty": "none.trees", "all": "right.trees", "first": "{path: right-branching, epochs: 0.5}",
    }.items():  # fmt: skip
        result = train(folder, name, f"data.brackets={brackets}", *steps)
        assert result.returncode == 0, result.stderr
    free, empty, every, first = (losses(folder, name) for name in ("free", "empty", "all", "first"))
    assert free == empty
    assert sum(every[:8]) > sum(free[:8])  # fewer trees count
    assert first[:4] == every[:4]  # half an epoch, and the same brackets by their name
    assert sum(first[4:]) < sum(every[4:])


def test_a_run_with_brackets_resumes_bit_for_bit(folder):
    steps = ["data.brackets={path: right.trees, epochs: 2}", "checkpoint.every_steps=11"]
    assert train(folder, "whole", "training.max_steps=22", *steps).returncode == 0
    assert train(folder, "parts", "training.max_steps=11", *steps).returncode == 0
    assert train(folder, "parts", "training.max_steps=22", "resume=auto", *steps).returncode == 0
    last = [max((folder / "runs" / name / "checkpoints").glob("step-*")) for name in ("whole", "parts")]
    assert last[0].name == last[1].name
    tensors = [lm_pcfg.load(path).grammars[0].grammar.tensors for path in last]
    assert all(torch.equal(one, other) for one, other in zip(*tensors, strict=True))


def test_a_file_of_trees_that_does_not_fit_is_told_in_one_line(folder):
    lines = (folder / "right.trees").read_text().splitlines()
    number = next(k for k, line in enumerate(lines) if line.count("(T") > 2)

    def refused(text: str, *changes: str) -> str:
        (folder / "bad.trees").write_text(text)
        result = train(folder, "bad", "data.brackets=bad.trees", *changes)
        assert result.returncode == 1
        (line,) = result.stderr.decode().splitlines()[-1:]
        assert "Traceback" not in result.stderr.decode()
        return line

    def changed(line: str) -> str:
        return "\n".join([*lines[:number], line, *lines[number + 1 :]]) + "\n"

    assert "has 59 lines, but" in refused("\n".join(lines[:-1]) + "\n")
    assert "has 61 lines, but" in refused("\n".join([*lines, "()"]) + "\n")
    assert f"bad.trees, line {number + 1}: the tree has other words" in refused(changed("(X (T a) (T zebra))"))
    assert f"bad.trees, line {number + 1}: 2 trees, not one" in refused(changed("(T a) (T b)"))
    assert f"bad.trees, line {number + 1}: " in refused(changed("(X (T a"))
    assert "model.eos=implicit" in refused(changed(lines[number]), "model.eos=explicit")
    assert "one plain file" in refused(changed(lines[number]), "data.streaming=true")
    assert "should be a path" in refused(changed(lines[number]), "data.brackets={path: x}")
    assert "standard input" in refused(changed(lines[number]), "data.brackets=-")
    over_lines = "\n".join([lines[0].replace(") ", ")\n", 1), *lines[1:]]) + "\n"
    assert "needs a tree on one line" in refused(over_lines)


def test_parse_leaves_out_what_is_unsure_and_training_reads_it(folder):
    assert train(folder, "short", "training.max_steps=5").returncode == 0

    def parsed(*options: str) -> list:
        result = command("parse", "train.txt", "--checkpoint", "runs/short", *options, cwd=folder)
        assert result.returncode == 0, result.stderr
        (folder / "partial.trees").write_bytes(result.stdout)
        return list(read_trees(result.stdout.decode().splitlines()))

    whole, partial = parsed(), parsed("--at-least", "0.4")
    lines = (folder / "train.txt").read_text().splitlines()
    tables = lm_pcfg.load(folder / "runs" / "short").marginals(lines)
    for tree, part, table in zip(whole, partial, tables, strict=True):
        sure = [(i, j) for i, j, _ in tree.nodes if table[i, j] >= 0.4 or j - i == len(tree.words)]
        assert [(i, j) for i, j, _ in part.nodes] == sure
    assert sum(len(tree.nodes) for tree in partial) < sum(len(tree.nodes) for tree in whole)

    assert train(folder, "partial", "data.brackets=partial.trees", "training.max_steps=2").returncode == 0
    numbered = enumerate(lines, start=1)
    text = encode_sentences(
        numbered, Vocabulary.build([line.split() for line in lines], VocabularyOptions()), Limits(7)
    )
    limits = read_limits(text, str(folder / "train.txt"), str(folder / "partial.trees"))
    for sentence, own in enumerate(np.split(limits, text.offsets[1:-1])):
        brackets = [(i, j) for i, j, _ in partial[int(text.line_numbers[sentence]) - 1].nodes]
        allowed = allowed_spans(own)
        for i in range(len(own)):
            for j in range(i + 1, len(own) + 1):
                assert allowed[i, j] == (not any(crosses((i, j), bracket) for bracket in brackets))

    result = command("parse", "train.txt", "--checkpoint", "runs/short", "--method", "viterbi", "--at-least", "0.5",
                     cwd=folder)  # fmt: skip
    assert result.returncode == 1
    assert "--at-least goes with --method mbr" in result.stderr.decode()


def test_a_run_says_that_it_has_brackets_and_is_not_continued_in_an_epoch_with_others(folder):
    (folder / "some.trees").write_text((folder / "right.trees").read_text())
    steps = ["data.brackets=some.trees", "checkpoint.every_steps=3", "evaluation.every_epochs=null"]
    result = train(folder, "changed", "training.max_steps=3", *steps)
    assert result.returncode == 0, result.stderr
    assert "brackets: on " in result.stderr.decode()
    (folder / "some.trees").write_text((folder / "none.trees").read_text())
    result = train(folder, "changed", "training.max_steps=6", "resume=auto", *steps)
    assert result.returncode == 1
    assert "belongs to other data" in result.stderr.decode()


def test_the_embedded_treebank_has_brackets_for_the_embedded_text(folder):
    options = ["training.max_steps=1", "data.train=embedded:valid", "data.brackets=embedded:valid.trees"]
    result = train(folder, "embedded", "data.valid=null", *options)
    assert result.returncode == 0, result.stderr
    assert "brackets: on " in result.stderr.decode()
    result = train(folder, "embedded", *options[:2], "data.brackets=embedded:valid")
    assert "use embedded:valid.trees" in result.stderr.decode()
