"""Bracketed trees: read, written, changed; and those of other parsers beside gold trees."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_pcfg.corpus.predictions import read_predictions
from lm_pcfg.corpus.treebank import (
    PENN_PUNCTUATION,
    Tree,
    TreeError,
    bracketed,
    escape_brackets,
    normalised,
    numbered_trees,
    plain_label,
    read_tree,
    read_trees,
    unescape_brackets,
    with_words,
    without,
)
from lm_pcfg.errors import UserError
from trees import random_tree

CAT = "(S (NP-SBJ (DT the) (NN cat)) (VP (VBD sat)) (. .))"
NAMES = st.text(st.characters(exclude_categories=("Zs", "Zl", "Zp", "Cc", "Cs")), min_size=1, max_size=8).filter(
    lambda text: text.split() == [text] and text != "-NONE-"
)
PIECES = st.sampled_from(["(", ")", " ", "\n", "a", "NP-SBJ", "-NONE-", "-LRB-", "( (S ", "(NN é)", "\xa0", "\u2028"])


@st.composite
def trees(draw) -> Tree:
    shape = random_tree(draw(st.randoms(use_true_random=False)), draw(st.integers(0, 12)))
    names = itertools.cycle(draw(st.lists(NAMES, min_size=1, max_size=7)))
    return Tree(
        tuple(next(names) for _ in shape.words),
        tuple(next(names) for _ in shape.tags),
        tuple((i, j, next(names)) for i, j, _ in shape.nodes),
    )


def trees_or_message(read: Callable[[], list[Tree]]) -> tuple[list[Tree], str | None]:
    try:
        return read(), None
    except TreeError as error:
        return [], str(error)


# ---- reading --------------------------------------------------------------------------------------------------------


def test_a_tree_is_words_tags_and_spans():
    assert read_tree(CAT) == Tree(
        ("the", "cat", "sat", "."), ("DT", "NN", "VBD", "."), ((0, 4, "S"), (0, 2, "NP-SBJ"), (2, 3, "VP"))
    )
    assert read_tree("(NN cat)") == Tree(("cat",), ("NN",), ())
    assert read_tree("()") == read_tree("( )") == Tree((), (), ())


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("( (S (NN a) (VB b)) )", "(S (NN a) (VB b))"),  # as the Penn Treebank's files are
        ("( (NN a) (VB b))", "(TOP (NN a) (VB b))"),
        ("(S ( (NN a)) (VB b))", "(S (TOP (NN a)) (VB b))"),  # no label inside
        ("(S (NP (-NONE- *-1)) (VP (VB go) (NP (NP (-NONE- *T*)))))", "(S (VP (VB go)))"),
        ("( (S (-NONE- *)) )", "()"),
        ("(S(NN a)(VB b))", "(S (NN a) (VB b))"),
        ("(S (NN\n  a)\r\n\t(VB b)\n)", "(S (NN a) (VB b))"),
        ("(-LRB- -LRB-)", "(-LRB- -LRB-)"),
        ("(S (N 猫) (V naïve🙂))", "(S (N 猫) (V naïve🙂))"),
    ],
)
def test_what_brackets_mean(text, written):
    for lines in ([text], text.split("\n")):
        assert [bracketed(tree) for tree in read_trees(lines)] == [written]


def test_many_trees_on_a_line_and_one_over_many():
    lines = ["", f"{CAT} (NN a)(NN b)", "(S", "", " (NN c)", ") (X", "(NN d))"]
    assert [(line, " ".join(tree.words)) for line, tree in numbered_trees(lines)] == [
        (2, "the cat sat ."), (2, "a"), (2, "b"), (3, "c"), (6, "d"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("(S (NN a)", "line 2: .* no end"),
        ("(S (NN a)))", "line 2: .* outside"),
        ("cat", "line 2: 'cat' outside"),
        ("(S (NN a) b)", "line 2: .* side by side below 'S'"),
        ("(S\n(NP (NN a b)))", r"line 3: \(NN a b\) should be a tag and a word"),
        ("(S () (NN a))", r"line 2: \(\) should"),
        ("(NN)", r"line 2: \(NN\) should"),
        ("(NN 5\xa0km)", "line 2: .* a tag and a word"),  # the text below would have two words
        (f"(NN {'a ' * 10_000})", "line 2: .{30,90}$"),
    ],
)
def test_what_is_no_tree_is_named(bad, message):
    with pytest.raises(TreeError, match=message) as error:
        list(read_trees([CAT, *bad.split("\n")]))
    assert isinstance(error.value, UserError)
    assert "\n" not in str(error.value)


def test_one_tree_is_asked_for():
    for text in ("", f"{CAT} {CAT}"):
        with pytest.raises(TreeError, match=r"line 1: \d trees, not one"):
            read_tree(text)


def check_any_text(text: str) -> None:
    found, message = trees_or_message(lambda: list(read_trees(text.split("\n"))))
    assert message is None or re.match(r"line \d+: ", message)
    assert [read_tree(bracketed(tree)) for tree in found] == found


@given(st.one_of(st.text(), st.lists(PIECES).map("".join)))
def test_any_text_is_trees_or_a_tree_error(text):
    check_any_text(text)


@given(trees(), st.integers(0), PIECES, st.booleans())
def test_damaged_trees_are_trees_or_a_tree_error(tree, place, piece, instead):
    text = bracketed(tree)
    place %= len(text)
    check_any_text(text[:place] + piece + text[place + instead :])


# ---- writing --------------------------------------------------------------------------------------------------------


@given(trees())
def test_a_written_tree_is_read_back(tree):
    again = read_tree(bracketed(tree))
    assert again == Tree(
        tuple(map(escape_brackets, tree.words)),
        tuple(map(escape_brackets, tree.tags)),
        tuple((i, j, escape_brackets(label)) for i, j, label in tree.nodes),
    )
    assert read_tree(bracketed(again)) == again


def test_trees_may_be_deep():
    depth = 3000
    chain = Tree(("a",), ("A",), tuple((0, 1, f"X{k}") for k in range(depth)))
    right = Tree(("a",) * depth, ("A",) * depth, tuple((k, depth, "X") for k in range(depth - 1)))
    for tree in (chain, right):
        assert read_tree(bracketed(tree)) == tree
        assert without(tree, {"A"}) == Tree((), (), ())


def test_brackets_inside_words_are_escaped():
    assert bracketed(Tree(("(a)", "b"), ("(", "B"), ())) == "(TOP (-LRB- -LRB-a-RRB-) (B b))"
    assert unescape_brackets(escape_brackets("(a)b")) == "(a)b"


@pytest.mark.parametrize(
    "tree",
    [
        Tree(("a", "b", "c"), ("A",) * 3, ((0, 3, "S"), (0, 2, "X"), (1, 3, "Y"))),
        Tree(("a", "b"), ("A",) * 2, ((0, 2, "S"), (1, 1, "X"))),
        Tree(("a", "b"), ("A",) * 2, ((0, 2, "S"), (1, 2, "X"), (0, 1, "Y"))),
        Tree(("a", "b"), ("A",) * 2, ((0, 3, "S"),)),
        Tree(("a b",), ("A",), ()),
        Tree(("",), ("A",), ()),
        Tree(("a",), ("A",), ((0, 1, ""),)),
        Tree(("a", "b"), ("A",), ()),
    ],
)
def test_what_is_no_tree_is_not_written(tree):
    with pytest.raises(ValueError, match=r".+"):
        bracketed(tree)


# ---- changing -------------------------------------------------------------------------------------------------------


def test_plain_labels():
    labels = {"NP-SBJ-1": "NP", "NP=2": "NP", "-LRB-": "-LRB-", "-NONE-": "-NONE-", "ADVP|PRT": "ADVP|PRT", "S": "S",
              "PRP$": "PRP$", "": ""}  # fmt: skip
    assert {label: plain_label(label) for label in labels} == labels


def test_without_punctuation():
    tree = read_tree("(S (PRN (-LRB- -LRB-) (, ,)) (NP (NN a)) (: --) (VP (VB b) (NP ($ $) (CD 3)) (. ?)) ('' ''))")
    assert bracketed(without(tree, PENN_PUNCTUATION)) == "(S (NP (NN a)) (VP (VB b) (NP ($ $) (CD 3))))"
    assert without(tree, ()) == tree
    assert bracketed(without(tree, set(tree.tags))) == "()"


@given(trees(), st.randoms(use_true_random=False))
def test_leaving_words_out_is_reading_without_them(tree, source):
    kept = [source.random() < 0.6 for _ in tree.words]
    marked = Tree(tree.words, tuple("K" if keep else "-NONE-" for keep in kept), tree.nodes)
    changed = with_words(Tree(tree.words, ("K",) * len(kept), tree.nodes), kept)
    assert bracketed(changed) == bracketed(read_tree(bracketed(marked)))


def test_words_as_in_the_language_modelling_text():
    words = (
        "The",
        "1,000.5",
        "-3",
        "+7",
        "1\\/2",
        "9:30",
        "%",
        "1990s",
        "10-year",
        "1\\/2-year",
        "'80s",
        ":",
        "N",
        "$",
    )
    tree = Tree(words, ("T",) * len(words), ())
    folded = ("The", *("N",) * 5, "%", "1990s", "10-year", "1\\/2-year", "'80s", ":", "N", "$")
    assert normalised(tree, lowercase=False, fold_numbers=True).words == folded
    assert normalised(tree, lowercase=True, fold_numbers=True).words == ("the", *folded[1:])
    assert normalised(tree, lowercase=True, fold_numbers=False).words[:2] == ("the", "1,000.5")
    assert normalised(tree, lowercase=False, fold_numbers=False) == tree


# ---- predictions ----------------------------------------------------------------------------------------------------

GOLD = [read_tree(CAT), read_tree("(NN go)"), read_tree("(S (NP (DT a) (NN b)) (VP (VB c) (RB d)))")]


def spans(tree: Tree) -> set[tuple[int, int]]:
    return {(i, j) for i, j, _ in tree.nodes}


@pytest.mark.parametrize(
    "lines",
    [
        ["(S (X (DT the) (NN cat)) (VBD sat) (. .))", "(NN go)", "(S (X (DT a) (NN b)) (X (VB c) (RB d)))"],
        ["( ( the cat ) sat . )", "( go )", "( ( a b ) ( c d ) )"],  # the last could be two words with tags
        ["((the cat) sat)", "go", "(a b) (c d)"],  # without punctuation
        ["(S (X (DT the) (NN cat)) (VBD sat)) (NN go)", "", "(S (X (DT a)", "(NN b)) (X (VB c) (RB d)))"],  # a stream
        ["((the", "cat) sat .) (go)", "", "((a b) (c d))"],
        ["((the cat) sat)", "", "(go)", "", "((a b) (c d))"],  # blank lines between trees
    ],
)
def test_predictions_in_every_style(lines):
    found = read_predictions(lines, "theirs", GOLD, PENN_PUNCTUATION)
    assert [len(tree.words) for tree in found] == [3, 1, 4]
    assert [{span for span in spans(tree) if span[1] - span[0] > 1} for tree in found] == [
        {(0, 3), (0, 2)}, set(), {(0, 4), (0, 2), (2, 4)},
    ]  # fmt: skip
    assert found[2].words == ("a", "b", "c", "d")


def test_a_prediction_may_be_empty():
    for lines in (["", "()", "((a b) (c d))"], ["()", "( )", "(S (X (A a) (B b)) (X (C c) (D d)))"]):
        found = read_predictions(lines, "theirs", GOLD)
        assert [len(tree.words) for tree in found] == [0, 0, 4]
        assert spans(found[2]) == {(0, 4), (0, 2), (2, 4)}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["((the cat) sat .)", "go", "(a b)"], "theirs: line 3: a tree of 2 words, but its gold tree has 4$"),
        (["(the cat)", "go", "(a b)"], "theirs: line 1: .* gold tree has 4, or 3 without punctuation"),
        ([CAT, "(NN go)"], "theirs: line 2: only 2 trees, but there are 3"),
        ([CAT, "(NN go)", "((a b) (c d)"], "theirs: line 3: .* no end"),
        ([CAT, "(NN go)", bracketed(GOLD[2]), "(NN go)"], "theirs: line 4: another tree"),
        ([CAT, "(NN go) (NN go)", ""], "theirs: line 2: 2 trees on one line"),
        ([], "theirs: line 0: only 0 trees"),
    ],
)
def test_predictions_that_do_not_fit(lines, message):
    with pytest.raises(TreeError, match=message):
        read_predictions(lines, "theirs", GOLD, PENN_PUNCTUATION)


@given(st.lists(trees().filter(lambda tree: tree.words), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_both_styles_of_any_trees_are_told_apart(gold, labels, stream):
    lines = []
    for tree in gold:
        plain = bracketed(Tree(tree.words, ("X",) * len(tree.words), tuple((i, j, "X") for i, j, _ in tree.nodes)))
        lines.append(plain if labels else re.sub(r"\(X ([^\s()]+)\)", r"\1", re.sub(r"\(X (?=\()", "(", plain)))
    if stream:
        lines = [part for line in lines for part in re.split(r"(?<=\)) (?=\()", line)]
    found = read_predictions(lines, "theirs", gold)
    assert [tree.words for tree in found] == [tuple(map(escape_brackets, tree.words)) for tree in gold]
    assert [spans(tree) for tree in found] == [spans(tree) for tree in gold]


@given(st.lists(st.one_of(st.text(), st.lists(PIECES).map("".join)), max_size=4))
def test_any_predictions_are_trees_or_a_tree_error(lines):
    found, message = trees_or_message(lambda: read_predictions(lines, "theirs", GOLD, PENN_PUNCTUATION))
    if message is None:
        assert all(len(tree.words) in (0, own) for tree, own in zip(found, (3, 1, 4), strict=True))
    else:
        assert re.match(r"theirs: line \d+: ", message)
