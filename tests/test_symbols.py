"""What the symbols of a grammar mean: uses against finite differences and enumeration, tables, page, command."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from command_line import lm_pcfg
from grammars import random_rules
from lm_pcfg.corpus.sentences import Sentences, encode_sentences
from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyOptions
from lm_pcfg.grammar.analysis import expected_uses
from lm_pcfg.grammar.families.tables import TablePCFG
from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.inference.drawing.symbol_tables import symbol_tables, symbols_page
from lm_pcfg.inference.symbols import symbols, uses_in_text
from texts import write_config

N, P = 3, 4
VOCABULARY = Vocabulary.build([["a", "b", "<c>", "日本", "e"]], VocabularyOptions())
LINES = ["a b <c> a", "b", "e e", "日本 a b a b", "a <c>"]


def a_grammar(seed: int = 1, root: str = "all", sharp: float = 1.0) -> Grammar:
    model = TablePCFG(nonterminals=N, preterminals=P, words=len(VOCABULARY), root_over=root, seed=seed).double()
    with torch.no_grad():
        for side in (model.left, model.right):
            side[:, N:] += sharp  # more words than phrases: it is subcritical
        return model()


def sentences(*lines: str) -> Sentences:
    return encode_sentences(enumerate(lines, start=1), VOCABULARY)


def in_fp64(grammar: Grammar, text: Sentences, **options):
    return uses_in_text(grammar, text, precision="fp64", **options)


# ---- uses in a text -------------------------------------------------------------------------------------------------


def test_uses_sum_to_the_number_of_words_and_one_less():
    grammar, text = a_grammar(), sentences(*LINES)
    for cost in (1, 40, 8000):  # batches of one sentence, of some, of all
        done: list[int] = []
        found = in_fp64(grammar, text, batch_cost=cost, on_batch=done.append)
        assert sum(done) == len(LINES)
        assert (found.sentences, found.words, found.impossible) == (5, 14, 0)
        assert found.symbols[:N].sum().item() == pytest.approx(14 - 5)
        assert found.symbols[N:].sum().item() == pytest.approx(14, rel=1e-6)
        counts = np.unique(text.ids, return_counts=True)[1]
        torch.testing.assert_close(found.emitted.sum(1).double(), torch.tensor(counts).double())


def test_uses_are_derivatives_of_log_z():
    """To make all rules of a symbol e^t as probable adds t x (its uses) to log Z, for a small t."""
    grammar, text, t = a_grammar(seed=3), sentences(*LINES), 1e-5
    words, lengths = torch.from_numpy(text.ids).long(), text.lengths.tolist()

    def log_z(changed: Grammar) -> float:
        return changed.log_likelihood(words, lengths, precision="fp64").sum().item()

    def slope(change) -> float:
        return (log_z(change(t)) - log_z(change(-t))) / (2 * t)

    expected = []
    for a in range(N):
        scale = torch.zeros(N, 1, dtype=torch.float64)
        scale[a] = 1.0
        expected.append(slope(lambda t, scale=scale: grammar._replace(left=grammar.left * (t * scale).exp())))
    emission = grammar.emission
    for b in range(P):
        one = torch.zeros(P, dtype=torch.float64)
        one[b] = 1.0
        expected.append(
            slope(
                lambda t, one=one: grammar._replace(
                    emission=emission._replace(log_normalizers=emission.log_normalizers - t * one)
                )
            )
        )
    found = in_fp64(grammar, text).symbols
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_uses_are_those_of_all_trees_of_a_sentence():
    """a b: one bracketing, N x P x P labellings, each written out."""
    grammar = a_grammar(seed=4)
    text = sentences("a b")
    first, second = text.ids.tolist()
    log_p = grammar.emission.log_probabilities(torch.tensor([first, second])).exp()  # [2, P]
    uses, emitted, total = torch.zeros(N + P, dtype=torch.float64), torch.zeros(2, P, dtype=torch.float64), 0.0
    for a, b, c in itertools.product(range(N), range(P), range(P)):
        p = grammar.root[a] * grammar.left[a, N + b] * grammar.right[a, N + c] * log_p[0, b] * log_p[1, c]
        for symbol in (a, N + b, N + c):
            uses[symbol] += p
        emitted[0, b] += p
        emitted[1, c] += p
        total += p
    found = in_fp64(grammar, text)
    torch.testing.assert_close(found.symbols, uses / total, rtol=1e-6, atol=1e-7)
    order = [found.distinct.tolist().index(word) for word in (first, second)]
    torch.testing.assert_close(found.emitted[order].double(), emitted / total, rtol=1e-6, atol=1e-7)


def test_impossible_sentences_are_counted_apart():
    grammar, text = a_grammar(root="nonterminals"), sentences(*LINES)  # one word has no tree
    found = in_fp64(grammar, text)
    assert (found.sentences, found.words, found.impossible) == (4, 13, 1)
    assert found.symbols[N:].sum().item() == pytest.approx(13, rel=1e-6)
    table = symbols(grammar, VOCABULARY, text=text, precision="fp64")
    assert "4 sentences, 13 words, without 1 that have no tree" in symbol_tables(table)


# ---- uses in the grammar --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["all", "nonterminals"])
def test_expected_uses_are_those_of_all_levels_of_a_derivation(root):
    rules = a_grammar(seed=2, root=root).rules
    level = torch.zeros(N + P, dtype=torch.float64)
    level[: len(rules.root)] = rules.root
    total = torch.zeros(N + P, dtype=torch.float64)
    for _ in range(3000):
        total += level
        level = level[:N] @ (rules.left + rules.right)
    found = expected_uses(rules)
    torch.testing.assert_close(found, total)
    assert found[N:].sum() - found[:N].sum() == pytest.approx(1.0)  # words = rules + 1, on average too


def test_of_a_grammar_whose_derivations_may_never_end_those_that_do_are_counted():
    grammar = a_grammar(sharp=-8.0)
    assert expected_uses(grammar.rules).isinf().all()
    table = symbols(grammar, VOCABULARY)
    assert table.all_preterminals.uses - table.all_nonterminals.uses == pytest.approx(1.0)
    assert symbols(grammar, VOCABULARY, text=sentences(*LINES), precision="fp64").sentences == 5


def test_expected_uses_of_a_larger_grammar_go_in_blocks():
    rules = random_rules(600, 1200, seed=5)
    found = expected_uses(rules)
    assert found.shape == (1800,)
    assert found.isinf().all() or found[600:].sum() - found[:600].sum() == pytest.approx(1.0)


# ---- the table ------------------------------------------------------------------------------------------------------


def test_the_table_lists_the_most_used_symbols_with_what_they_choose():
    grammar, text = a_grammar(seed=6), sentences(*LINES)
    uses = in_fp64(grammar, text)
    table = symbols(grammar, VOCABULARY, text=text, most=3, listed=2, precision="fp64")
    order = sorted(range(N), key=lambda k: -uses.symbols[k])
    assert [one.name for one in table.nonterminals] == [f"N{k}" for k in order[:2]]
    top = order[0]
    one = table.nonterminals[0]
    assert one.uses == pytest.approx(uses.symbols[top].item())
    assert one.root == pytest.approx(grammar.root[top].item())
    expected = grammar.left[top].sort(descending=True)
    names = [f"N{k}" if k < N else f"P{k - N}" for k in expected.indices[:3].tolist()]
    assert [choice.name for choice in one.left.likeliest] == names
    assert [choice.probability for choice in one.left.likeliest] == pytest.approx(expected.values[:3].tolist())
    entropy = -(grammar.right[top] * grammar.right[top].log()).sum().item()
    assert (one.right.entropy, np.log(one.right.effective)) == pytest.approx((entropy, entropy))

    best = max(range(P), key=lambda k: uses.symbols[N + k])
    two = table.preterminals[0]
    assert two.name == f"P{best}"
    p = grammar.emission.log_probabilities(torch.arange(len(VOCABULARY)))[:, best].exp()
    assert two.words.likeliest[0].name == VOCABULARY.words[int(p.argmax())]
    assert two.words.entropy == pytest.approx(-(p * p.log()).sum().item())
    assert two.emitted is not None
    shares = uses.emitted[:, best] / uses.emitted[:, best].sum()
    assert two.emitted.likeliest[0].name == VOCABULARY.words[int(uses.distinct[shares.argmax()])]
    assert two.emitted.likeliest[0].probability == pytest.approx(shares.max().item(), rel=1e-5)
    q = uses.symbols[:N] / uses.symbols[:N].sum()
    assert table.all_nonterminals.effective == pytest.approx((-(q * q.log()).sum()).exp().item())
    assert (table.all_preterminals.symbols, table.text) == (P, "the text")


def test_both_forms_show_every_symbol(monkeypatch):
    grammar = a_grammar(seed=7)
    for text in (None, sentences(*LINES)):
        table = symbols(grammar, VOCABULARY, text=text, precision="fp64", name="<some> text")
        json.dumps(asdict(table), allow_nan=False)
        plain = symbol_tables(table)
        assert max(map(len, plain.splitlines())) <= 120
        names = [f"N{k}" for k in range(N)] + [f"P{k}" for k in range(P)]
        assert sorted(re.findall(r"^([NP]\d+) .* uses", plain, re.MULTILINE)) == names
        page = symbols_page(table, "A <grammar>")
        assert sorted(re.findall(r'<tr id="([NP]\d+)">', page)) == names
        assert set(re.findall(r'href="#(\w+)"', page)) == set(names)  # every link has its place
        assert "<c>" not in page
        assert "&lt;c&gt;" in page
        assert not re.search(r"<script|<link|src=|@import", page)
    few = symbols_page(symbols(grammar, VOCABULARY, listed=1), "few")
    assert set(re.findall(r'href="#(\w+)"', few)) <= set(re.findall(r'id="(\w+)"', few))
    monkeypatch.setattr("lm_pcfg.inference.symbols.ROWS", 2)
    assert symbols(grammar, VOCABULARY) == symbols(grammar, VOCABULARY)
    assert len(symbols(grammar, VOCABULARY).preterminals) == P


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder, training={"max_steps": 2})
    result = lm_pcfg("train", "--config", str(config), cwd=folder)
    assert result.returncode == 0, result.stderr.decode()
    return folder


def info(folder: Path, *options: str, status: int = 0) -> str:
    result = lm_pcfg("info", *options, "--device", "cpu", cwd=folder)
    assert result.returncode == status, result.stderr.decode()
    return (result.stderr if status else result.stdout).decode()


def test_the_command_prints_tables_and_writes_a_page(trained):
    out = info(trained, "--grammar", "--text", "valid.txt", "--html", "page.html")
    assert "trees of valid.txt (12 sentences" in out
    assert "nonterminals" in out  # and what it always prints
    page = (trained / "page.html").read_text(encoding="utf-8")
    assert all(f'<tr id="{name}">' in page for name in ("N0", "N3", "P0", "P5"))
    report = json.loads(info(trained, "--grammar", "--text", "valid.txt", "--json", "--symbols", "2", "--most", "3"))
    assert report["step"] == 2
    table = report["symbols"]
    words = len((trained / "valid.txt").read_text().split())
    assert (table["sentences"], table["words"]) == (12, words)
    assert table["all_preterminals"]["uses"] == pytest.approx(words, rel=1e-4)
    assert table["all_nonterminals"]["uses"] == pytest.approx(words - 12, rel=1e-4)
    assert [len(table[kind]) for kind in ("nonterminals", "preterminals")] == [2, 2]
    assert len(table["preterminals"][0]["emitted"]["likeliest"]) == 3
    assert "symbols" not in json.loads(info(trained, "--json", "--html", "page.html", "--text", "valid.txt"))


def test_mistakes_get_one_line(trained):
    assert "--grammar or --html" in info(trained, "--text", "valid.txt", status=2)
    assert "not for a prepared corpus" in info(trained, "somewhere", "--grammar", status=2)
    (trained / "blank.txt").write_text("\n\n")
    for options, reason in (
        (("--text", "none.txt"), "no such file"),
        (("--text", "blank.txt"), "no line has a tree"),
        (("--text", "text.jsonl"), "one sentence a line"),
        (("--text", "valid.txt", "--html", "no/page.html"), "cannot write no/page.html"),
    ):
        err = info(trained, "--grammar", *options, status=1)
        assert reason in err
        assert len(err.splitlines()) == 1
    assert (
        "lines are left out"
        in lm_pcfg(
            "info", "--grammar", "--text", "valid.txt", "--max-length", "4", "--device", "cpu", cwd=trained
        ).stderr.decode()
    )
