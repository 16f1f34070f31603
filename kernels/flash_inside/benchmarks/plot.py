"""A bar chart of the benchmark as SVG text: no plotting library is needed to draw it, or to look at it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = {"triton": "#0072b2", "torch": "#56b4e9", "log-einsum-exp": "#e69f00", "log-sum-exp": "#999999"}
WIDTH, BAR, GAP, LEFT, RIGHT = 900, 16, 14, 190, 90


def draw(rows: Sequence[Mapping[str, object]]) -> str:
    """Milliseconds on a logarithmic axis, grouped by size, from rows as they stand in the CSV."""
    timed = [row for row in rows if row["p50_ms"] not in ("", None)]
    times = [float(str(row["p50_ms"])) for row in timed] or [1.0]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)) + 1e-9)
    high = max(high, low + 1)

    def x(milliseconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(milliseconds) - low) / (high - low)

    parts, y, previous = [], 40, None
    for row in timed:
        size = f"{row['nonterminals']} x {row['words']} x {row['sentences']}"
        if size != previous:
            y += GAP if previous else 0
            parts.append(_text(LEFT - 8, y + 12, size, "end"))
            previous = size
        time, method = float(str(row["p50_ms"])), str(row["method"])
        colour = COLOURS.get(method, "#000000")
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{x(time) - LEFT:.1f}" height="{BAR - 2}" fill="{colour}"/>')
        parts.append(_text(x(time) + 4, y + 12, f"{time:.3g} ms {method}", "start"))
        y += BAR
    for power in range(low, high + 1):
        position = x(10.0**power)
        parts.insert(0, f'<path d="M{position:.1f} 30V{y + 4}" stroke="#dddddd"/>')
        parts.append(_text(position, y + 18, f"{10.0**power:g}", "middle"))
    machine = f"{timed[0]['device']}, torch {timed[0]['torch']}, {timed[0]['date']}" if timed else ""
    title = "Inside algorithm, forward + backward, ms (nonterminals x words x sentences)"
    parts.append(_text(8, 18, f"{title}. {machine}", "start"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 30}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
