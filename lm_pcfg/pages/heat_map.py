"""The posteriors of the spans of a sentence as a picture: the words below, and above them a cell for every span.

The cell of a span stands amid its words, the higher the more words it has, as in a chart. The stronger its colour, the
more probable it is that the span is a phrase. Spans of one word always are, and have no cell.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from lm_pcfg.inference.drawing.trees import runs_to_the_left, shown, width_of
from lm_pcfg.pages.shell import text

MOST_WORDS = 60
CELL = 30  # pixels
LONGEST_WORD = 18  # letters that are shown of a word
LETTER = 6.6  # pixels, of letters of size 13
SLOPE = math.radians(50)  # of the words
FAINTEST = 0.005  # posterior of a cell that is drawn
STYLE = """
.heat { font: 11px sans-serif; }
.heat .chart { fill: none; stroke: var(--line); }
.heat rect { fill: var(--cool); }
.heat rect.of-tree { stroke: currentColor; stroke-width: 1.5; }
.heat text { fill: currentColor; text-anchor: middle; }
.heat .words { font-size: 13px; }
.heat .words text { text-anchor: end; }
"""


def heat_map(
    words: Sequence[str], posteriors: Sequence[Sequence[float]], spans: Collection[tuple[int, int]] = ()
) -> str:
    """Draw the posteriors as an SVG for a page with STYLE.

    posteriors  [words+1][words+1], entry (i, j) of the words i..j-1, as `Model.marginals` gives them
    spans       of a tree; their cells have an edge
    """
    count = len(words)
    names = [name if len(name) <= LONGEST_WORD else f"{name[: LONGEST_WORD - 1]}…" for name in map(shown, words)]
    lengths = [width_of(name) * LETTER + 8 for name in names]
    turned = 2 * sum(map(runs_to_the_left, names)) > count  # sentences of Hebrew or Arabic begin on the right
    order = list(range(count))[::-1] if turned else list(range(count))
    left = 4 + max(length * math.cos(SLOPE) - (place + 0.5) * CELL for place, length in _placed(lengths, order))
    left = max(4.0, left)
    bottom = 4 + (count - 1) * CELL  # of the cells
    width, height = left + count * CELL + 4, bottom + max(lengths) * math.sin(SLOPE) + 12

    def corner(first: int, end: int) -> tuple[float, float]:
        middle = (first + end) / 2
        middle = count - middle if turned else middle
        return left + (middle - 0.5) * CELL, bottom - (end - first - 1) * CELL

    chart = "".join(
        "M{:g} {:g}h{}v{}h-{}z".format(*corner(first, first + length), CELL, CELL, CELL)
        for length in range(2, count + 1)
        for first in range(count - length + 1)
    )
    parts = [f'<path class="chart" d="{chart}"/>']
    edged, cells = [], []
    for first in range(count):
        for end in range(first + 2, count + 1):
            posterior = min(1.0, float(posteriors[first][end]))
            in_tree = (first, end) in spans
            if posterior >= FAINTEST or in_tree:
                cell = _cell(*corner(first, end), posterior, in_tree, _span_name(names, first, end))
                (edged if in_tree else cells).append(cell)
    parts += [*cells, *edged, '<g class="words">']  # edges lie above their neighbours
    for place, word in enumerate(order):
        x, y = left + (place + 0.5) * CELL, bottom + 14
        turn = f"translate({x:.1f} {y:.1f}) rotate({-math.degrees(SLOPE):g})"
        parts.append(f'<text transform="{turn}">{text(names[word])}</text>')
    parts.append("</g>")
    size = (
        f'width="{math.ceil(width)}" height="{math.ceil(height)}" viewBox="0 0 {math.ceil(width)} {math.ceil(height)}"'
    )
    body = "\n".join(parts)
    return f'<svg class="heat" {size} role="img" aria-label="posteriors of spans">\n{body}\n</svg>\n'


def _placed(lengths: Sequence[float], order: Sequence[int]) -> list[tuple[int, float]]:
    return [(place, lengths[word]) for place, word in enumerate(order)]


def _span_name(names: Sequence[str], first: int, end: int) -> str:
    between = " " if end - first == 2 else " … "
    return f"{names[first]}{between}{names[end - 1]}"


def _cell(x: float, y: float, posterior: float, in_tree: bool, name: str) -> str:
    edge = ' class="of-tree"' if in_tree else ""
    cell = (
        f'<rect{edge} x="{x:.1f}" y="{y:.1f}" width="{CELL}" height="{CELL}" fill-opacity="{posterior:.3f}">'
        f"<title>{text(name)}: {posterior:.3f}</title></rect>"
    )
    if posterior < 0.05:
        return cell
    return cell + f'<text x="{x + CELL / 2:.1f}" y="{y + CELL / 2 + 4:.1f}">{100 * posterior:.0f}</text>'
