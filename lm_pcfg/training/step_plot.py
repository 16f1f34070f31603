"""Stacked bars of a step benchmark as SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = {
    "networks": "#0072b2",
    "emission": "#56b4e9",
    "inside": "#e69f00",
    "backward": "#009e73",
    "optimizer": "#999999",
}
WIDTH, BAR, LEFT, RIGHT = 900, 24, 150, 190


def draw(rows: Sequence[Mapping[str, object]]) -> str:
    """Milliseconds of the parts of a step, a bar for each row as it stands in the CSV."""
    timed = [row for row in rows if row["step_ms"] not in ("", None)]
    totals = [sum(float(str(row[f"{part}_ms"])) for part in COLOURS) for row in timed]
    scale = (WIDTH - LEFT - RIGHT) / max([*totals, 1e-9])
    machine = f"{timed[0]['device']}, torch {timed[0]['torch']}, {timed[0]['date']}" if timed else ""
    parts = [_text(8, 18, f"Training step, ms (nonterminals x sentences). {machine}")]
    for number, (part, colour) in enumerate(COLOURS.items()):
        parts.append(_box(8 + 110 * number, 28, 12, 12, colour))
        parts.append(_text(24 + 110 * number, 39, part))
    y = 54
    for row in timed:
        parts.append(_text(8, y + 15, f"{row['nonterminals']} x {row['sentences']}"))
        x = float(LEFT)
        for part, colour in COLOURS.items():
            width = float(str(row[f"{part}_ms"])) * scale
            parts.append(_box(x, y, width, BAR - 6, colour))
            x += width
        parts.append(_text(x + 6, y + 14, f"{row['step_ms']} ms, {float(str(row['words_per_second'])):,.0f} words/s"))
        y += BAR
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 10}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y}">{escape(text)}</text>'
