"""`lm_pcfg.load`: scores, trees and span posteriors of lines, of one grammar or several, without side effects."""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import flash_inside
import lm_pcfg
from lm_pcfg.cli import app
from lm_pcfg.corpus.pieces import train_pieces
from lm_pcfg.corpus.treebank import Tree
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.parsing import labelled_tree, mbr_trees, mean_posteriors
from lm_pcfg.inference.sample import Drawn
from texts import write_config, write_text

LINES = ["the cat sees a dog", "", "zebra", "the old cat near the house sleeps and runs", "a zebra runs", "  "]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of a few steps: two seeds, another vocabulary, explicit ends, pieces, no trees for one word."""
    folder = tmp_path_factory.mktemp("model")
    config = write_config(folder, training={"max_steps": 3})
    text = write_text(folder / "pieces.txt", 200, seed=5).read_text().splitlines()
    (folder / "pieces.model").write_bytes(train_pieces(text, kind="unigram", size=40).model)
    variants = {
        "one": [], "two": ["seed=1"], "fewer": ["data.vocabulary.size=5", "seed=2"], "ends": ["model.eos=explicit"],
        "pieces": [f"data.sentencepiece={folder / 'pieces.model'}", "data.max_length=60"],
        "pieces_ends": [f"data.sentencepiece={folder / 'pieces.model'}", "data.max_length=60", "model.eos=explicit"],
        "nonterminals": ["model.root=nonterminals"],
    }  # fmt: skip
    for name, changes in variants.items():
        result = CliRunner().invoke(app, ["train", "--config", str(config), f"name={name}", *changes])
        assert result.exit_code == 0, result.output
    return folder / "runs"


def spans(tree: Tree) -> set[tuple[int, int]]:
    return {(first, end) for first, end, _ in tree.nodes}


def is_binary(tree: Tree) -> bool:
    return len(spans(tree)) == len(tree.nodes) == len(tree.words) - 1


def test_scores_are_those_of_the_command(runs, tmp_path):
    model = lm_pcfg.load(runs / "one")
    scores = model.score(LINES)
    assert np.isnan(scores).tolist() == [False, True, False, False, False, True]
    (tmp_path / "lines").write_text("\n".join(LINES) + "\n")
    arguments = ["score", str(tmp_path / "lines"), "--checkpoint", str(runs / "one"), "--per-sentence"]
    printed = CliRunner().invoke(app, arguments).stdout.splitlines()
    # The command sets the number of threads
    assert scores[[0, 2, 3, 4]] == pytest.approx([float(line) for line in printed if line], rel=1e-6)
    both = lm_pcfg.load(runs / "one", runs / "two").score(LINES[:1])
    separate = [lm_pcfg.load(runs / name).score(LINES[:1]) for name in ("one", "two")]
    assert both == pytest.approx(np.logaddexp(*separate) - np.log(2))


def test_marginals_are_those_of_the_kernel(runs):
    model = lm_pcfg.load(runs / "one")
    grammar, vocabulary = model.grammars[0].grammar, model.vocabulary
    tables = model.marginals(LINES)
    for line, table in zip(LINES, tables, strict=True):
        words = len(line.split())
        assert table.shape == (words + 1, words + 1)
        if words:
            emissions = grammar.emission.log_probabilities(torch.tensor(vocabulary.tokenise([line])[0]))
            (truth,) = flash_inside.span_marginals(grammar.rules, emissions, [words], "fp64", "reference")
            np.testing.assert_allclose(table, truth.numpy(), atol=1e-5)


@pytest.mark.parametrize("name", ["one", "ends", "pieces"])
def test_trees_are_binary_and_over_the_words_as_written(runs, name):
    trees = lm_pcfg.load(runs / name).parse(LINES)
    for line, tree in zip(LINES, trees, strict=True):
        assert list(tree.words) == line.split()
        if len(tree.words) > 1:
            assert is_binary(tree)
            assert tree.nodes[0] == (0, len(tree.words), "X")


def test_viterbi_has_the_symbols_of_the_grammar(runs):
    model = lm_pcfg.load(runs / "one")
    grammar = model.grammars[0].grammar
    for line, tree in zip(LINES, model.parse(LINES, "viterbi"), strict=True):
        if not line.split():
            assert tree == Tree((), (), ())
            continue
        emissions = grammar.emission.log_probabilities(torch.tensor(model.vocabulary.tokenise([line])[0]))
        ((_, nodes),) = flash_inside.viterbi(grammar.rules, emissions, [len(emissions)])
        n = grammar.rules.nonterminals
        phrases = [(first, end, f"N{label}") for first, end, label in nodes if label < n]
        assert list(tree.nodes) == phrases
        assert list(tree.tags) == [f"P{label - n}" for _, _, label in nodes if label >= n]


@pytest.mark.parametrize("name", ["ends", "pieces"])
def test_viterbi_over_words_where_symbols_are_none(runs, name):
    for line, tree in zip(LINES, lm_pcfg.load(runs / name).parse(LINES, "viterbi"), strict=True):
        assert list(tree.words) == line.split()
        assert all(tree.tags)
        if len(tree.words) > 1:
            assert tree.nodes[0][:2] == (0, len(tree.words))
        crossing = [1 for a, b in spans(tree) for c, d in spans(tree) if a < c < b < d]
        assert not crossing


def test_nodes_inside_of_words_and_above_the_end_are_left_out():
    """Pieces 0-1 2 3-4 are three words, 5 is <eos>; 7 nonterminals."""
    nodes = [(0, 6, 0), (0, 5, 1), (0, 3, 2), (0, 2, 3), (0, 1, 7), (1, 2, 8), (2, 3, 9), (3, 5, 4), (3, 4, 10)]
    nodes += [(4, 5, 11), (5, 6, 12)]
    tree = labelled_tree(["ab", "c", "de"], nodes, [0, 2, 3, 5], 7)
    assert tree == Tree(("ab", "c", "de"), ("N3", "P2", "N4"), ((0, 3, "N0"), (0, 2, "N2")))
    crossing = [(0, 4, 0), (0, 1, 7), (1, 4, 1), (1, 3, 2), (1, 2, 8), (2, 3, 9), (3, 4, 10)]
    tree = labelled_tree(["ab", "cd"], crossing, [0, 2, 4], 7)
    assert tree == Tree(("ab", "cd"), ("P0", "P2"), ((0, 2, "N0"),))


@pytest.mark.parametrize("name", ["one", "ends", "pieces", "pieces_ends"])
def test_marginals_are_the_frequencies_of_trees_that_are_drawn(runs, name):
    """Trees over words: without <eos> two nodes may be one span, and pieces are below words."""
    model, line, number = lm_pcfg.load(runs / name), "the cat sees a dog near runs", 3000
    (table,), (trees,) = model.marginals([line]), model.sample_trees([line], number, seed=3)
    words = len(line.split())
    drawn = np.zeros((words + 1, words + 1))
    for tree, _ in trees:
        for first, end, _ in tree.nodes:
            drawn[first, end] += 1 / number
    spans_of_several = np.triu(np.ones_like(table), 2).astype(bool)
    assert table[0, words] == pytest.approx(1.0, abs=1e-4)
    assert np.abs(table - drawn)[spans_of_several].max() < 4 * np.sqrt(0.25 / number)


def test_one_word_has_one_tree_even_without_a_probability(runs):
    model = lm_pcfg.load(runs / "nonterminals")
    assert model.score(["zebra"]).tolist() == [-np.inf]
    assert model.parse(["zebra"]) == [Tree(("zebra",), ("T",), ())]
    assert not model.marginals(["zebra"])[0].any()


# ---- consensus ------------------------------------------------------------------------------------------------------


def test_a_consensus_is_the_tree_of_the_mean_posteriors(runs):
    """Vocabularies may differ, be of pieces, or have ends."""
    names = ["one", "fewer", "ends", "pieces"]
    model = lm_pcfg.load(*(runs / name for name in names))
    separate = [lm_pcfg.load(runs / name).marginals(LINES) for name in names]
    for number, line in enumerate(LINES):
        mean = np.mean([tables[number] for tables in separate], axis=0)
        np.testing.assert_allclose(model.marginals(LINES)[number], mean, atol=1e-6)
        if len(line.split()) > 1:
            best = flash_inside.mbr([torch.from_numpy(mean)])[0]
            assert spans(model.parse(LINES)[number]) == {(i, j) for i, j in best if j - i > 1}


def test_a_model_without_a_tree_is_left_out_of_the_mean():
    table, other = torch.rand(4, 4), torch.rand(4, 4)
    means = mean_posteriors([[table, None, None], [other, other, None]])
    torch.testing.assert_close(means[0], ((table.double() + other.double()) / 2))
    torch.testing.assert_close(means[1], other.double())
    assert means[2] is None
    trees = mbr_trees(["a b c", "a b c", "a b c"], means)
    assert [len(tree.words) for tree in trees] == [3, 3, 0]


def test_a_consensus_has_no_viterbi_tree_and_different_vocabularies_no_mixture(runs):
    model = lm_pcfg.load(runs / "one", runs / "fewer")
    with pytest.raises(UserError, match="consensus"):
        model.parse(LINES, "viterbi")
    with pytest.raises(UserError, match="different vocabularies"):
        model.score(LINES)


# ---- a good guest ---------------------------------------------------------------------------------------------------


def test_nothing_of_the_process_changes(runs):
    def state():
        tiny = torch.full((), 1e-40)
        flushed = (tiny * 1.0).item() == 0.0
        return (
            torch.get_num_threads(), flushed, torch.get_default_dtype(), torch.is_grad_enabled(),
            torch.backends.cuda.matmul.fp32_precision, torch.get_rng_state().sum().item(),
            np.random.get_state()[1].sum(),
        )  # fmt: skip

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    before = state()
    model = lm_pcfg.load(runs / "one")
    model.score(LINES), model.parse(LINES), model.parse(LINES, "viterbi"), model.marginals(LINES)
    model.sample_trees(LINES, 2), model.symbols(LINES), list(model.draw(3, max_length=5, drawn=Drawn()))
    assert state() == before
    lm_pcfg.load(runs / "one", prepare_cpu=True)
    assert state()[1]  # asked for
    torch.set_num_threads(threads)


def test_mistakes_of_a_caller_are_told(runs):
    model = lm_pcfg.load(runs / "one")
    for mistake in (model.score, model.parse, model.marginals, model.symbols):
        with pytest.raises(TypeError, match="list of lines"):
            mistake("the cat")
    with pytest.raises(UserError, match="unknown method"):
        model.parse(LINES, "vitterbi")
    with pytest.raises(UserError, match="none of these lines"):
        model.symbols([""])
    with pytest.raises(UserError, match="cannot be drawn"):
        model.sample(-1)
    with pytest.raises(UserError, match="unknown device"):
        lm_pcfg.load(runs / "one", device="cpuu")
    with pytest.raises(UserError, match="unknown weights"):
        lm_pcfg.load(runs / "one", weights="foo")


def test_a_line_of_which_one_vocabulary_makes_nothing_is_left_to_the_others(runs, monkeypatch):
    model = lm_pcfg.load(runs / "one", runs / "pieces")
    alone = lm_pcfg.load(runs / "one").parse(LINES[:1])
    pieces = model.grammars[1].vocabulary
    monkeypatch.setattr(type(pieces), "tokenise", lambda self, lines: [[] for _ in lines])
    assert model.parse(LINES[:1]) == alone


def test_a_run_is_found_from_anywhere_and_after_a_move(runs, tmp_path, monkeypatch):
    before = lm_pcfg.load(runs / "one").score(LINES[:1])
    shutil.copytree(runs / "one", tmp_path / "elsewhere" / "moved", symlinks=True)
    monkeypatch.chdir(tmp_path)
    assert lm_pcfg.load("elsewhere/moved").score(LINES[:1]) == before
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert lm_pcfg.load("moved/best").score(LINES[:1]) == before


def test_importing_the_package_is_cheap():
    code = "import sys, time; t = time.perf_counter(); import lm_pcfg; print(time.perf_counter() - t, len(sys.modules))"
    best = min(float(subprocess.check_output([sys.executable, "-c", code]).split()[0]) for _ in range(3))
    assert best < 0.2
    heavy = subprocess.check_output([sys.executable, "-c", "import lm_pcfg, sys; print('torch' in sys.modules)"])
    assert heavy.strip() == b"False"
