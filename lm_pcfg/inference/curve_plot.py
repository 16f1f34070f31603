"""Learning curves as SVG text: perplexity against training time and against steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from lm_pcfg.inference.learning_curves import Point, Run

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"]
WIDTH, HEIGHT, TOP, GAP = 430, 320, 44, 60  # of a panel; above it; left of it
MOST_ABOVE_LOWEST = 4.0  # the beginning, far above the rest, is cut off: it would leave no room for the differences


def draw(runs: Sequence[Run], reach: float | None = None) -> str:
    """Validation (solid, dots) and training (dashed) perplexity of all runs. reach: a line at that perplexity."""
    values = [point.perplexity for run in runs for point in (*run.train, *run.valid) if _is_shown(point)]
    values += [reach] if reach is not None else []
    low = min(values, default=1.0) * 0.97
    high = max(low * 1.1, min(max(values, default=10.0) * 1.03, low * MOST_ABOVE_LOWEST))

    def y(perplexity: float) -> float:
        return TOP + HEIGHT * (1 - math.log(perplexity / low) / math.log(high / low))

    longest = max((point.seconds for run in runs for point in (*run.train, *run.valid)), default=0.0)
    unit, seconds = ("minutes", 60.0) if longest >= 120 else ("seconds", 1.0)
    parts = [
        _text(8, 18, "Perplexity: validation (solid) and training (dashed)"),
        *_panel(GAP, f"training time, {unit}", runs, lambda point: point.seconds / seconds, y, (low, high), reach),
        *_panel(WIDTH + 2 * GAP, "steps", runs, lambda point: point.step, y, (low, high), reach),
    ]
    bottom = TOP + HEIGHT + 60
    for number, run in enumerate(runs):
        best = run.best()
        label = f"{run.name}: {best.perplexity:.2f} at step {best.step:,}" if best else f"{run.name}: no evaluation"
        parts.append(f'<path d="M{GAP} {bottom - 4}h24" stroke="{_colour(number)}" stroke-width="3"/>')
        parts.append(_text(GAP + 32, bottom, label))
        bottom += 18
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * (WIDTH + GAP) + 20}" height="{bottom}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _panel(
    left: int, title: str, runs: Sequence[Run], across: Callable[[Point], float], y: Callable[[float], float],
    limits: tuple[float, float], reach: float | None,
) -> list[str]:  # fmt: skip
    end = max((across(point) for run in runs for point in (*run.train, *run.valid)), default=0.0) or 1.0

    def x(value: float) -> float:
        return left + WIDTH * value / end

    clip = f"panel{left}"
    parts = [f'<clipPath id="{clip}"><rect x="{left}" y="{TOP}" width="{WIDTH + 4}" height="{HEIGHT}"/></clipPath>']
    for tick in _ticks(end):
        parts.append(f'<path d="M{x(tick):.1f} {TOP}v{HEIGHT}" stroke="#dddddd"/>')
        parts.append(_text(x(tick), TOP + HEIGHT + 16, f"{tick:,g}", "middle"))
    for tick in _logarithmic_ticks(*limits):
        parts.append(f'<path d="M{left} {y(tick):.1f}h{WIDTH}" stroke="#dddddd"/>')
        parts.append(_text(left - 6, y(tick) + 4, f"{tick:g}", "end"))
    parts.append(f'<g clip-path="url(#{clip})" fill="none">')
    if reach is not None:
        parts.append(f'<path d="M{left} {y(reach):.1f}h{WIDTH}" stroke="#000000" stroke-dasharray="2 3"/>')
    for number, run in enumerate(runs):
        for points, style in ((run.train, 'stroke-dasharray="4 2" opacity="0.5"'), (run.valid, 'stroke-width="2"')):
            places = [(x(across(point)), y(point.perplexity)) for point in points if _is_shown(point)]
            line = "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
            if line:
                parts.append(f'<path d="M{line}" stroke="{_colour(number)}" {style}/>')
            if points is run.valid:
                parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{_colour(number)}"/>' for a, b in places]
    return [*parts, "</g>", _text(left + WIDTH / 2, TOP + HEIGHT + 34, title, "middle")]


def _ticks(end: float) -> list[float]:
    """Some round numbers from 0 to end, eight steps at most."""
    power = 10.0 ** math.floor(math.log10(end / 8))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * 8 >= end * 0.999)
    return [step * number for number in range(int(end / step * 1.001) + 1)]


def _logarithmic_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 1.1, 1.2, 1.3, 1.5, 1.7, 2, 2.5, 3, 4, 5, 6, 8)
    return [tick for power in powers for factor in factors if low <= (tick := factor * 10.0**power) <= high]


def _is_shown(point: Point) -> bool:
    return 0 < point.perplexity < math.inf


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
