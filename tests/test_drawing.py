"""Trees as text, pictures, pages, JSON and spans: for any words and any shape."""

from __future__ import annotations

import json
import math
import re
import tracemalloc
import xml.etree.ElementTree as xml
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_pcfg.corpus.treebank import Tree
from lm_pcfg.inference.drawing.trees import SVG, as_json, as_spans, as_svg, as_text, html_page, shown, width_of

CAT = Tree(
    ("the", "cat", "sees", "me"),
    ("D", "N", "V", "N"),
    ((0, 4, "S"), (0, 2, "NP"), (2, 4, "VP"), (3, 4, "NP")),
)


def right_branching(words: int, label: str = "X") -> Tree:
    nodes = tuple((first, words, f"{label}{first}") for first in range(words - 1))
    return Tree(tuple(f"w{k}" for k in range(words)), tuple(f"T{k % 3}" for k in range(words)), nodes)


@st.composite
def any_trees(draw) -> Tree:
    """Trees of any words, of nodes with one child or more."""
    words = draw(st.lists(st.text(min_size=0, max_size=6), min_size=0, max_size=9))
    labels = st.sampled_from(["S", "NP", "<&>", "\x1b[2J"])
    nodes: list[tuple[int, int, str]] = []
    todo = [(0, len(words))] if words else []
    while todo:
        first, end = todo.pop()
        if end - first == 1 and draw(st.booleans()):
            continue
        nodes.append((first, end, draw(labels)))
        if end - first == 1:
            continue
        middle = draw(st.integers(first + 1, end - 1))
        if draw(st.integers(0, 9)) == 0:
            nodes.append((first, end, draw(labels)))
        todo += [(middle, end), (first, middle)]
    tags = draw(st.lists(st.text(max_size=3), min_size=len(words), max_size=len(words)))
    return Tree(tuple(words), tuple(tags), tuple(nodes))


def elements(root: xml.Element, kind: str) -> list[xml.Element]:
    return [element for element in root.iter() if element.get("class") == kind]


def edges_of(root: xml.Element) -> int:
    return sum(path.get("d", "").count("M") for path in root.iter(f"{{{SVG}}}path"))


# ---- pictures -------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(any_trees(), st.none() | st.text())
def test_any_tree_is_a_valid_picture(tree, title):
    root = xml.fromstring(as_svg(tree, title))
    words = [element.text for element in elements(root, "word")]
    assert words == [shown(word) for word in tree.words]
    nodes = len(elements(root, "phrase")) + len(words)
    assert edges_of(root) == max(nodes - 1, 0)
    width, height = float(root.get("width", "nan")), float(root.get("height", "nan"))
    for element in root.iter():
        for name, most in (("x", width), ("y", height), ("cx", width), ("cy", height)):
            assert 0 <= float(element.get(name, 0)) <= most


@settings(max_examples=100, deadline=None)
@given(any_trees())
def test_any_tree_is_text_with_a_line_a_word(tree):
    lines = as_text(tree).split("\n") if tree.words else []
    assert [line.endswith(shown(word)) for line, word in zip(lines, tree.words, strict=True)] == [True] * len(lines)
    assert len(as_text(tree).splitlines()) == len(lines)  # nothing else breaks a line


def test_what_is_forbidden_or_harmful_is_not_shown():
    assert shown("a\x00\x1b[2Jb\ud800\ufffe\u2028c\u202e") == "a[2Jbc"
    assert shown("\x07") == "\ufffd"
    assert [width_of(text) for text in ("abc", "日本", "e\u0301", "😀")] == [3, 4, 1, 2]


def test_labels_are_shown_unless_they_are_all_the_same():
    root = xml.fromstring(as_svg(CAT, "A <cat>"))
    assert [element.text for element in elements(root, "phrase")] == ["S", "NP", "VP", "NP"]
    assert [element.text for element in elements(root, "tag")] == list(CAT.tags)
    assert root.findtext(f"{{{SVG}}}title") == "A <cat>"
    plain = Tree(CAT.words, ("",) * 4, tuple((first, end, "X") for first, end, _ in CAT.nodes))
    root = xml.fromstring(as_svg(plain))
    assert not elements(root, "tag")
    assert {element.tag for element in elements(root, "phrase")} == {f"{{{SVG}}}circle"}
    assert "X" not in as_text(plain)


def test_right_to_left_sentences_begin_on_the_right():
    words = ("שלום", "עולם", "ok")
    nodes = ((0, 3, "A"), (1, 3, "B"))
    for some, order in ((words, -1), (CAT.words[:3], 1)):
        root = xml.fromstring(as_svg(Tree(some, ("T",) * 3, nodes)))
        places = [float(element.get("x", 0)) for element in elements(root, "word")]
        assert places == sorted(places)[::order]
    root = xml.fromstring(as_svg(Tree(words, ("T",) * 3, nodes)))
    assert [element.get("direction") for element in elements(root, "word")] == ["rtl", "rtl", None]


@pytest.mark.parametrize("words", [(), ("one",)])
def test_trees_of_no_or_one_word(words):
    tree = Tree(words, ("T",) * len(words), ())
    root = xml.fromstring(as_svg(tree))
    assert (edges_of(root), len(elements(root, "word"))) == (0, len(words))
    assert as_text(tree) == "".join(words)
    assert as_spans(tree) == ""
    unary = Tree(("one",), ("T",), ((0, 1, "A"), (0, 1, "B")))
    assert edges_of(xml.fromstring(as_svg(unary))) == 2
    assert as_text(unary) == "A───B─── one"


def test_words_without_a_tree_hang_on_one_node():
    root = xml.fromstring(as_svg(Tree(("a", "b", "c"), ("T",) * 3, ())))
    assert (edges_of(root), len(elements(root, "phrase"))) == (3, 1)


def test_deep_trees_stay_finite():
    root = xml.fromstring(as_svg(right_branching(300)))
    assert edges_of(root) == 299 + 300 - 1
    assert float(root.get("height", "nan")) < 5000
    assert float(root.get("width", "nan")) < 20_000
    assert len(as_text(right_branching(300)).split("\n")) == 300
    assert edges_of(xml.fromstring(as_svg(right_branching(5000)))) == 9998  # deeper than Python's stack


# ---- text -----------------------------------------------------------------------------------------------------------


def test_text_is_drawn_from_left_to_right():
    assert as_text(CAT).split("\n") == [
        "S─┬─NP─┬─D the",
        "  │    └─N cat",
        "  └─VP─┬─V sees",
        "       └─NP───N me",
    ]
    tree = Tree(tuple("abcd"), ("T",) * 4, ((0, 4, "X"), (0, 3, "X"), (1, 3, "X")))
    assert as_text(tree).split("\n") == [
        "┬─┬─ a",
        "│ └─┬─ b",
        "│   └─ c",
        "└─ d",
    ]


def test_ten_words_fit_into_a_terminal():
    for tree in (right_branching(10, "N40"), right_branching(10, "a long label ")):
        lines = as_text(tree).split("\n")
        assert len(lines) == 10
        assert max(map(len, lines)) <= 100
    assert "N401" in as_text(right_branching(10, "N40"))
    assert "label" not in as_text(right_branching(10, "a long label "))  # too wide with labels


# ---- pages ----------------------------------------------------------------------------------------------------------


def test_a_page_has_every_sentence_and_needs_nothing_else():
    page = "".join(html_page([CAT, None, Tree(("<b>", "\x00&"), ("", ""), ((0, 2, ""),))], "Trees & <more>"))
    assert page.startswith("<!DOCTYPE html>")
    assert page.endswith("</html>\n")
    assert "<title>Trees &amp; &lt;more&gt;</title>" in page
    assert re.findall(r'<details open id="(\d+)"><summary><b>\d+</b><bdi>(.*?)</bdi>', page) == [
        ("1", "the cat sees me"),
        ("3", "&lt;b&gt; &amp;"),
    ]
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"<script|<link|src=|href=|@import", page)
    for picture in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        xml.fromstring(picture)


def test_a_page_of_many_trees_is_written_as_they_come():
    taken = 0

    def trees() -> Iterator[Tree]:
        nonlocal taken
        for _ in range(400):
            taken += 1
            yield right_branching(12)

    parts = html_page(trees(), "many")
    next(parts), next(parts)
    assert taken == 1
    tracemalloc.start()
    size = sum(map(len, parts))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken == 400
    assert peak < size / 4


# ---- for programmes -------------------------------------------------------------------------------------------------


def test_json_and_spans():
    line = as_json(CAT, 7, log_probability=-math.inf, score=0.5)
    assert json.loads(line) == {
        "line": 7, "words": ["the", "cat", "sees", "me"], "tags": ["D", "N", "V", "N"],
        "nodes": [[0, 4, "S"], [0, 2, "NP"], [2, 4, "VP"], [3, 4, "NP"]], "log_probability": None, "score": 0.5,
    }  # fmt: skip
    assert "\n" not in as_json(Tree(("a\n\u2028",), ("",), ()), 1)
    assert as_spans(CAT) == "0-4 0-2 2-4"
    assert as_spans(Tree(("a", "b"), ("", ""), ((0, 2, "A"), (0, 2, "B")))) == "0-2"
