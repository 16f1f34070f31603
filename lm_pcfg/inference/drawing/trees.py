"""Trees as text, pictures, pages, JSON and spans. The bracket format is in lm_pcfg/corpus/treebank.py.

Nothing here recurses, so trees may be as deep as they like, and nothing needs a library or a network to be looked at.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from lm_pcfg.corpus.treebank import Tree, bracketed
from lm_pcfg.errors import UserError

Form = Literal["bracket", "text", "json", "spans", "svg", "html"]

NO_LETTERS = "\ufffd"  # for a word of which nothing can be shown
# Of a picture, in pixels.
COLUMN, GAP, MARGIN = 8.4, 14.0, 16.0  # of letters of size 14; between words; around the whole
LOWEST_LEVEL, HIGHEST_LEVEL, ALL_LEVELS = 14.0, 38.0, 900.0  # of a tree: in a deep one they share ALL_LEVELS
TAG_TO_WORD = 19.0
MOST_IN_ONE_PICTURE = 1000
OPEN_AT_FIRST = 50  # trees of a page whose pictures are shown; the others open with a click
SVG = "http://www.w3.org/2000/svg"
PICTURE_STYLE = (
    "<style>:root{color:#222;background:#fff}"
    "@media(prefers-color-scheme:dark){:root{color:#ddd;background:#181818}}</style>"
)
PAGE_STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --faint: #767676; --line: #ddd; --mark: #fff3c4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --paper: #181818; --faint: #999; --line: #444; --mark: #4a4020; }
}
body { margin: 1.5rem auto; max-width: 75rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
       font: 15px/1.5 sans-serif; }
"""
TREES_STYLE = """
details { border-top: 1px solid var(--line); padding: .4rem 0; }
summary { cursor: pointer; overflow-wrap: anywhere; }
summary b { color: var(--faint); font-weight: normal; margin-right: .6em; }
.tree { overflow-x: auto; }
"""
PAGE_END = "</body>\n</html>\n"


# ---- what can be shown of a word ------------------------------------------------------------------------------------


def shown(text: str) -> str:
    """The text without what XML forbids and what would disturb a terminal: control characters, line separators.

    The marks that change the direction of writing go as well, since they would also turn what stands around a word.
    """
    return "".join(letter for letter in text if not _is_harmful(letter)) or NO_LETTERS


def width_of(text: str) -> int:
    """Columns that a text takes in a terminal: two for wide letters (Chinese, emoji), none for combining marks."""
    if text.isascii():
        return len(text)
    columns = 0
    for letter in text:
        if unicodedata.category(letter) not in ("Mn", "Me", "Cf"):
            columns += 2 if unicodedata.east_asian_width(letter) in "WF" else 1
    return columns


def _is_harmful(letter: str) -> bool:
    turns_writing = "\u202a" <= letter <= "\u202e" or "\u2066" <= letter <= "\u2069"
    return turns_writing or letter in "\ufffe\uffff" or unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp")


def runs_to_the_left(text: str) -> bool:
    """Whether the first letter that has a direction has that of Hebrew or Arabic."""
    directions = (unicodedata.bidirectional(letter) for letter in text)
    return next((direction for direction in directions if direction in ("L", "R", "AL")), "L") != "L"


# ---- what all drawings begin with -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Drawn:
    """A tree with its edges, and with the labels that are worth showing.

    Labels are shown unless they are all the same, and so are tags. What is not shown is "". A tree with words has one
    top: an unlabelled node is added where no node of the tree covers the others.
    """

    words: list[str]
    tags: list[str]
    nodes: list[tuple[int, int, str]]
    parents: list[int]  # of each node, a number of a node; the top, node 0, has -1
    word_parents: list[int]  # of each word; -1 where there is no node at all

    @classmethod
    def of(cls, tree: Tree) -> _Drawn:
        tags_differ = len(set(tree.tags)) > 1
        labels = {label for _, _, label in tree.nodes}
        labels_differ = len(labels) > 1 or (len(tree.nodes) == 1 and tags_differ)
        nodes = [(first, end, shown(label) if labels_differ and label else "") for first, end, label in tree.nodes]
        count = len(tree.words)
        if (count > 1 or nodes) and (not nodes or nodes[0][:2] != (0, count)):
            nodes.insert(0, (0, count, ""))
        parents: list[int] = []
        word_parents: list[int] = []
        open_nodes: list[int] = []
        for word in range(count):
            while open_nodes and nodes[open_nodes[-1]][1] <= word:
                open_nodes.pop()
            while len(parents) < len(nodes) and nodes[len(parents)][0] <= word:
                parents.append(open_nodes[-1] if open_nodes else -1)
                open_nodes.append(len(parents) - 1)
            word_parents.append(open_nodes[-1] if open_nodes else -1)
        tags = [shown(tag) if tags_differ and tag else "" for tag in tree.tags]
        return cls([shown(word) for word in tree.words], tags, nodes, parents, word_parents)

    def without_labels(self) -> _Drawn:
        nodes = [(first, end, "") for first, end, _ in self.nodes]
        return _Drawn(self.words, [""] * len(self.words), nodes, self.parents, self.word_parents)


# ---- text -----------------------------------------------------------------------------------------------------------


def as_text(tree: Tree, width: int = 100) -> str:
    """Draw a tree from left to right, a line a word. Labels are left out where lines would pass this width.

    N0─┬─N1─┬─P2 the
       │    └─P4 cat
       └─N3─┬─P1 sees
            └─P7 me
    """
    drawn = _Drawn.of(tree)
    lines = _text_lines(drawn)
    if max(map(width_of, lines), default=0) > width:
        lines = _text_lines(drawn.without_labels())
    return "\n".join(lines)


def _text_lines(drawn: _Drawn) -> list[str]:
    lines: list[str] = []
    begun: list[tuple[int, int]] = []  # the incomplete nodes from the top down: end, columns before the bar
    drawn_nodes = 0
    for word, (tag, text) in enumerate(zip(drawn.tags, drawn.words, strict=True)):
        while begun and begun[-1][0] <= word:
            begun.pop()
        new = []  # nodes that begin with this word
        while drawn_nodes < len(drawn.nodes) and drawn.nodes[drawn_nodes][0] <= word:
            new.append(drawn.nodes[drawn_nodes])
            drawn_nodes += 1
        parts = []
        ends = [end for end, _ in begun] + [end for _, end, _ in new] + [word + 1]  # of what is on this line
        for depth, (end, before) in enumerate(begun):
            has_more = ends[depth + 1] < end
            is_parent = depth == len(begun) - 1
            bar = ("├─" if has_more else "└─") if is_parent else ("│ " if has_more else "  ")
            parts.append(" " * before + bar)
        for depth, (_, end, label) in enumerate(new, start=len(begun)):
            head = f"{label}─" if label else ""
            parts.append(head + ("┬─" if ends[depth + 1] < end else "──"))
            begun.append((end, width_of(head)))
        leaf = f"{tag} {text}" if tag else f" {text}" if parts else text
        lines.append("".join(parts) + leaf)
    return lines


# ---- pictures -------------------------------------------------------------------------------------------------------


def as_svg(tree: Tree, title: str | None = None) -> str:
    """Draw a tree as a standalone SVG: phrases above, tags and words in a line at the bottom.

    A phrase stands one level above the highest of its children. Sentences of Hebrew or Arabic begin on the right.
    """
    return picture(tree, title, PICTURE_STYLE)


def picture(tree: Tree, title: str | None = None, style: str = "") -> str:
    """Draw the same as a part of a page, whose colours it takes, unless it gets a style of its own."""
    drawn = _Drawn.of(tree)
    xs, width = _word_places(drawn)
    node_xs, heights = _node_places(drawn, xs)
    if 2 * sum(map(runs_to_the_left, drawn.words)) > len(xs):  # most of the words
        xs, node_xs = ([width - x for x in places] for places in (xs, node_xs))
    highest = max(heights, default=0)
    level = min(HIGHEST_LEVEL, max(LOWEST_LEVEL, ALL_LEVELS / max(highest, 1)))
    ys = [MARGIN + (highest - height) * level for height in heights]
    leaf_y = MARGIN + highest * level  # of tags, or of words without tags
    word_y = leaf_y + (TAG_TO_WORD if any(drawn.tags) else 0.0)

    parts = [f"<title>{escape(shown(title))}</title>"] if title else []
    parts += [style] if style else []
    if edges := _edges(drawn, xs, node_xs, ys, leaf_y, level):
        parts.append(f'<path d="{edges}" fill="none" stroke="currentColor" stroke-opacity="0.45"/>')
    for (_, _, label), x, y in zip(drawn.nodes, node_xs, ys, strict=True):
        dot = f'<circle class="phrase" cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="currentColor"/>'
        parts.append(_label("phrase", x, y, label, 12) if label else dot)
    parts += [_label("tag", x, leaf_y, tag, 12) for tag, x in zip(drawn.tags, xs, strict=True) if tag]
    parts += [_label("word", x, word_y, word, 14) for word, x in zip(drawn.words, xs, strict=True)]
    across, down = math.ceil(width), math.ceil(word_y + MARGIN)
    begin = f'<svg xmlns="{SVG}" width="{across}" height="{down}" viewBox="0 0 {across} {down}"'
    return "\n".join([f'{begin} font-family="sans-serif" fill="currentColor">', *parts, "</svg>\n"])


def _word_places(drawn: _Drawn) -> tuple[list[float], float]:
    """The middle of each word, and the width of the picture: words, tags and labels get the room they need."""
    columns = [max(width_of(word), width_of(tag)) for word, tag in zip(drawn.words, drawn.tags, strict=True)]
    for first, end, label in drawn.nodes:
        for word in range(first, min(end, first + 2)):  # neighbours on one level are two words apart, or stand over one
            columns[word] = max(columns[word], -(-width_of(label) // min(end - first, 2)))
    xs, right = [], MARGIN
    for count in columns:
        xs.append(right + (COLUMN * count + GAP) / 2)
        right += COLUMN * count + GAP
    return xs, right + MARGIN


def _node_places(drawn: _Drawn, xs: list[float]) -> tuple[list[float], list[int]]:
    """The place of each node: x, amid its first and last child, and its level above the words, from 1."""
    count = len(drawn.nodes)
    heights, lowest, highest = [1] * count, [math.inf] * count, [-math.inf] * count

    def add(above: int, x: float, height: int) -> None:
        if above >= 0:
            heights[above] = max(heights[above], height + 1)
            lowest[above], highest[above] = min(lowest[above], x), max(highest[above], x)

    node_xs = [0.0] * count
    for above, x in zip(drawn.word_parents, xs, strict=True):
        add(above, x, 0)
    for node in reversed(range(count)):  # children before their parents
        node_xs[node] = (lowest[node] + highest[node]) / 2
        add(drawn.parents[node], node_xs[node], heights[node])
    return node_xs, heights


def _edges(
    drawn: _Drawn, xs: list[float], node_xs: list[float], ys: list[float], leaf_y: float, level: float
) -> str:  # fmt: skip
    """One path of all edges: each goes to the level below its parent, then straight down, so that none cross."""
    below = [*zip(drawn.parents, node_xs, ys, strict=True)]
    below += [(above, x, leaf_y) for above, x in zip(drawn.word_parents, xs, strict=True)]
    room = min(8.0, level / 3)  # for the labels
    room_above = room if any(label for _, _, label in drawn.nodes) else 0.0
    edges = []
    for place, (above, x, y) in enumerate(below):
        if above >= 0:
            room_below = max(room, room_above) if place >= len(ys) else room_above
            bend = max(ys[above] + room_above, ys[above] + level - room_below)
            edges.append(f"M{node_xs[above]:.1f} {ys[above] + room_above:.1f}L{x:.1f} {bend:.1f}V{y - room_below:.1f}")
    return "".join(edges)


def _label(kind: str, x: float, y: float, text: str, size: int) -> str:
    place = f'x="{x:.1f}" y="{y + 0.35 * size:.1f}" text-anchor="middle"'
    direction = ' direction="rtl"' if runs_to_the_left(text) else ""
    return f'<text class="{kind}" {place} font-size="{size}"{direction}>{escape(text)}</text>'


# ---- pages ----------------------------------------------------------------------------------------------------------


def html_page(trees: Iterable[Tree | None], title: str) -> Iterator[str]:
    """Yield one HTML page in parts, a tree at a time. It needs no script, and nothing besides itself.

    Trees are numbered from 1. None stands for a line without a tree: it has a number, and is not shown.
    """
    yield page_begin(title, TREES_STYLE)
    for number, tree in enumerate(trees, start=1):
        if tree is not None:
            sentence = escape(" ".join(map(shown, tree.words)))
            is_open = " open" if number <= OPEN_AT_FIRST else ""
            yield (
                f'<details{is_open} id="{number}"><summary><b>{number}</b><bdi>{sentence}</bdi></summary>'
                f'<div class="tree">\n{picture(tree)}</div></details>\n'
            )
    yield PAGE_END


def page_begin(title: str, style: str = "", head: str = "") -> str:
    """The beginning of a page for light and dark screens, down to its heading; it ends with PAGE_END.

    head: more of the page's head, as HTML
    """
    name = escape(shown(title))
    return (
        '<!DOCTYPE html>\n<html>\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{head}<title>{name}</title>\n<style>{PAGE_STYLE}{style}</style>\n</head>\n<body>\n<h1>{name}</h1>\n"
    )


def svg_stack(trees: Iterable[Tree | None], title: str) -> str:
    """Draw trees below one another in one standalone SVG; None is passed over."""
    pictures: list[str] = []
    width = height = 0
    for tree in trees:
        if len(pictures) == MOST_IN_ONE_PICTURE:
            raise UserError(f"more than {MOST_IN_ONE_PICTURE:,} trees are too many for one picture; use --format html")
        if tree is not None:
            one = picture(tree)
            across, down = (int(size) for size in _SIZE.findall(one)[0])
            pictures.append(one.replace("<svg ", f'<svg y="{height}" ', 1))
            width, height = max(width, across), height + down
    begin = f'<svg xmlns="{SVG}" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    return "\n".join([begin, f"<title>{escape(shown(title))}</title>", PICTURE_STYLE, *pictures, "</svg>\n"])


_SIZE = re.compile(r'width="(\d+)" height="(\d+)"')


def write_trees(trees: Iterable[Tree | None], form: Form, title: str) -> Iterator[str]:
    """Yield trees in one of the forms, in parts. None stands for a blank line; a tree without words for none found."""
    if form == "html":
        yield from html_page(trees, title)
    elif form == "svg":
        yield svg_stack(trees, title)
    else:
        for number, tree in enumerate(trees, start=1):
            if tree is None:
                yield "\n" if form != "json" else f"{as_json(Tree((), (), ()), number)}\n"
            elif form == "json":
                yield f"{as_json(tree, number)}\n"
            elif form == "text":
                yield f"{as_text(tree)}\n\n"
            else:
                yield f"{bracketed(tree) if form == 'bracket' else as_spans(tree)}\n"


# ---- for programmes -------------------------------------------------------------------------------------------------


def as_json(tree: Tree, number: int, **more: Any) -> str:
    """One JSON object on one line: {"line": 1, "words": [...], "tags": [...], "nodes": [[first, end, label], ...]}.

    Nodes are as in `Tree`: `end` is the number of the first word behind the phrase, and parents come before children.
    more: further entries; a number that is not finite becomes null.
    """
    entries = {"line": number, "words": tree.words, "tags": tree.tags, "nodes": tree.nodes, **more}
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entries.items()}
    return json.dumps(finite, allow_nan=False)


def as_spans(tree: Tree) -> str:
    """The phrases of two or more words on one line, as "0-5 0-2 2-5": first word from 0, and the end behind the last.

    The order is that of the tree: parents before children, left before right. A span is written once, also where
    several nodes have it; that of the whole sentence is among them. A sentence of one word has an empty line.
    """
    spans = dict.fromkeys((first, end) for first, end, _ in tree.nodes if end - first > 1)
    return " ".join(f"{first}-{end}" for first, end in spans)
