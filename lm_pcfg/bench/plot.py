"""Plots as SVG text: learning curves, scaling laws, the parts of a training step, the times of kernels.

No plotting library is needed to draw them, or to look at them. Rows of benchmarks are as they stand in the CSV.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

from lm_pcfg.bench.laws import Fit, Trained
from lm_pcfg.inference.report import Point, Run

Row = Mapping[str, object]

GRID = "#dddddd"
# ---- learning curves
RUN_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"]
PANEL_WIDTH, PANEL_HEIGHT, TOP, GAP = 430, 320, 44, 60  # of a panel; above it; left of it
MOST_ABOVE_LOWEST = 4.0  # the beginning, far above the rest, is cut off: it would leave no room for the differences
MOST_POINTS, MOST_DOTS = 600, 120  # of a curve
# ---- bars
BARS_WIDTH = 900
PART_COLOURS = {"networks": "#0072b2", "emission": "#56b4e9", "inside": "#e69f00", "backward": "#009e73",
                "optimizer": "#999999"}  # fmt: skip
METHOD_COLOURS = {"triton": "#0072b2", "torch": "#56b4e9", "log-einsum-exp": "#e69f00", "log-sum-exp": "#999999"}


class Curve(NamedTuple):
    """A line of a plot: its places, from left to right."""

    points: Sequence[tuple[float, float]]
    colour: str
    style: str = 'stroke-width="2"'
    dots: bool = False  # where it is not crowded


class Panel(NamedTuple):
    """Where a plot stands in its picture, in pixels."""

    left: int
    width: int = PANEL_WIDTH
    height: int = PANEL_HEIGHT
    top: int = TOP


PAGE_PANEL = Panel(left=46, width=330, height=220, top=8)
TRAINING = 'stroke-dasharray="4 2" opacity="0.5"'  # of a curve
#: In a page the plots take its colours.
PAGE_STYLE = f"""
.plot {{ width: 100%; max-width: 32rem; font: 12px sans-serif; }}
.plot text {{ fill: currentColor; }}
.plot [stroke-dasharray] {{ opacity: .7; }}
.plot [stroke="{GRID}"] {{ stroke: var(--line); }}
.plot [stroke="#000000"] {{ stroke: currentColor; }}
.plot [fill="#000000"] {{ fill: currentColor; }}
"""


def draw_curves(runs: Sequence[Run], reach: float | None = None) -> str:
    """Draw validation (solid, dots) and training (dashed) perplexity of all runs, and a line at `reach`."""
    unit, seconds = time_unit(runs)
    low, high = _perplexities(runs, reach)
    panels = []
    for left, title, across in (
        (GAP, f"training time, {unit}", lambda point: point.seconds / seconds),
        (PANEL_WIDTH + 2 * GAP, "steps", lambda point: point.step),
    ):
        end = _end(runs, across)
        panels += _panel(Panel(left), perplexity_curves(runs, across), title, end, low, high, True, reach)
    units = {run.unit for run in runs if run.unit}
    several_units = len(units) > 1  # whose curves cannot be compared
    per = " per word or per piece, not comparable" if several_units else "".join(f" per {unit[:-1]}" for unit in units)
    parts = [_text(8, 18, f"Perplexity{per}: validation (solid) and training (dashed)"), *panels]
    bottom = TOP + PANEL_HEIGHT + 60
    for number, run in enumerate(runs):
        parts.append(_line([(GAP, bottom - 4), (GAP + 24, bottom - 4)], run_colour(number), 'stroke-width="3"'))
        label = run_label(run) + (f", per {run.unit[:-1]}" if several_units and run.unit else "")
        parts.append(_text(GAP + 32, bottom, label))
        bottom += 18
    return _picture(2 * (PANEL_WIDTH + GAP) + 20, bottom, parts)


def page_panels(runs: Sequence[Run]) -> dict[str, str]:
    """Draw the learning curves for a page, in its colours (PAGE_STYLE): a small picture each, by title."""
    unit, seconds = time_unit(runs)

    def by_step(point: Point) -> float:
        return point.step

    def by_time(point: Point) -> float:
        return point.seconds / seconds

    losses = [
        Curve([(point.step, point.loss) for point in run.train if point.loss is not None], run_colour(number))
        for number, run in enumerate(runs)
    ]
    s_f1 = [
        Curve(
            [(point.step, point.s_f1) for point in run.valid if point.s_f1 is not None], run_colour(number), dots=True
        )
        for number, run in enumerate(runs)
    ]
    logarithmic = (*_perplexities(runs, None), True)
    plots = {
        "Training loss": (losses, "steps", _end(runs, by_step), *_linear_range(losses), False),
        "Perplexity": (perplexity_curves(runs, by_step), "steps", _end(runs, by_step), *logarithmic),
        "Perplexity over time":
            (perplexity_curves(runs, by_time), f"training time, {unit}", _end(runs, by_time), *logarithmic),
        "S-F1": (s_f1, "steps", _end(runs, by_step), *_linear_range(s_f1), False),
    }  # fmt: skip
    width, height = PAGE_PANEL.left + PAGE_PANEL.width + 14, PAGE_PANEL.top + PAGE_PANEL.height + 42
    pictures: dict[str, str] = {}
    for title, plot in plots.items():
        if any(curve.points for curve in plot[0]):
            parts = "\n".join(_panel(PAGE_PANEL, *plot, clip=f"plot{len(pictures)}"))
            begin = f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">'
            pictures[title] = f"{begin}\n{parts}\n</svg>"
    return pictures


def perplexity_curves(runs: Sequence[Run], across: Callable[[Point], float]) -> list[Curve]:
    """The training and the validation perplexity of every run, over steps or time."""
    curves = []
    for number, run in enumerate(runs):
        train, valid = (
            [(across(point), point.perplexity) for point in points if _is_finite(point)]
            for points in (run.train, run.valid)
        )
        curves += [Curve(train, run_colour(number), TRAINING), Curve(valid, run_colour(number), dots=True)]
    return curves


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Return at most so many points: of each stretch of a long curve the lowest and the highest, so no peak is lost."""
    if len(points) <= most:
        return list(points)
    kept = {0, len(points) - 1}
    bounds = [round(part * len(points) / (most // 2 - 1)) for part in range(most // 2)]
    for first, end in pairwise(bounds):
        stretch = range(first, end)
        kept |= {min(stretch, key=lambda place: points[place][1]), max(stretch, key=lambda place: points[place][1])}
    return [points[place] for place in sorted(kept)]


def run_label(run: Run) -> str:
    """A run and its best evaluation, in words."""
    best = run.best()
    return f"{run.name}: {best.perplexity:.2f} at step {best.step:,}" if best else f"{run.name}: no evaluation"


def run_colour(number: int) -> str:
    return RUN_COLOURS[number % len(RUN_COLOURS)]


def time_unit(runs: Sequence[Run]) -> tuple[str, float]:
    """What training times are shown in, and its seconds."""
    longest = _end(runs, lambda point: point.seconds)
    return ("minutes", 60.0) if longest >= 120 else ("seconds", 1.0)


def _panel(
    panel: Panel, curves: Sequence[Curve], title: str, end: float, low: float, high: float, logarithmic: bool,
    reach: float | None = None, clip: str = "", begin: float = 0.0,
) -> list[str]:  # fmt: skip
    """Draw curves with their axes, and a line at `reach`. begin: above 0, equal distances across are equal ratios."""
    left, width, height, top = panel
    bottom, clip = top + height, clip or f"panel{left}"

    def x(value: float) -> float:
        return left + width * (math.log(value / begin) / math.log(end / begin) if begin else value / end)

    def y(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if logarithmic else (value - low) / (high - low)
        return top + height * (1 - share)

    area = f'<rect x="{left}" y="{top}" width="{width + 4}" height="{height}"/>'
    parts = [f'<clipPath id="{clip}">{area}</clipPath>']
    for tick in _ticks_of_ratios(begin, end) if begin else _ticks(end, most=max(2, width // 53)):
        parts.append(_line([(x(tick), top), (x(tick), bottom)], GRID))
        parts.append(_text(x(tick), bottom + 16, _short(tick) if begin else f"{tick:,g}", "middle"))
    for tick in _logarithmic_ticks(low, high) if logarithmic else _ticks_between(low, high):
        parts.append(_line([(left, y(tick)), (left + width, y(tick))], GRID))
        parts.append(_text(left - 6, y(tick) + 4, f"{tick:g}", "end"))
    parts.append(f'<g clip-path="url(#{clip})" fill="none">')
    if reach is not None:
        parts.append(_line([(left, y(reach)), (left + width, y(reach))], "#000000", 'stroke-dasharray="2 3"'))
    for points, colour, style, dots in curves:
        places = [(x(across), y(value)) for across, value in thinned(points)]
        parts += [_line(places, colour, style)] if places else []
        if dots and len(places) <= MOST_DOTS:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in places]
    return [*parts, "</g>", _text(left + width / 2, bottom + 34, title, "middle")]


def _end(runs: Sequence[Run], across: Callable[[Point], float]) -> float:
    """Where the longest run ends."""
    return max((across(point) for run in runs for point in (*run.train, *run.valid)), default=0.0) or 1.0


def _perplexities(runs: Sequence[Run], reach: float | None) -> tuple[float, float]:
    """From where to where perplexities are shown."""
    values = [point.perplexity for run in runs for point in (*run.train, *run.valid) if _is_finite(point)]
    values += [reach] if reach is not None else []
    low = min(values, default=1.0) * 0.97
    return low, max(low * 1.1, min(max(values, default=10.0) * 1.03, low * MOST_ABOVE_LOWEST))


def _linear_range(curves: Sequence[Curve]) -> tuple[float, float]:
    values = [value for curve in curves for _, value in curve.points] or [0.0, 1.0]
    low, high = min(values), max(values)
    if low > 0:
        high = min(high, low * MOST_ABOVE_LOWEST)
    room = 0.04 * (high - low) or 0.05 * abs(low) or 1.0
    return low - room, high + room


def draw_laws(fitted: Fit) -> str:
    """Draw the losses of runs (dots) and their laws (lines) over nonterminals, training words and seconds."""
    losses = [run.loss for run in {*fitted.runs, *fitted.frontier}]
    room = 0.06 * (max(losses) - min(losses)) or 0.1
    parts = [_text(8, 18, "Validation loss, nats a token: runs (dots) and laws (lines)")]
    left, bottom, most = GAP, TOP + PANEL_HEIGHT + 60, 1
    for name, title, group_of in (
        ("nonterminals", "nonterminals", lambda run: f"{_short(run.words)} words"),
        ("words", "training words", lambda run: f"{run.nonterminals:,} nonterminals"),
        ("seconds", "seconds of training", lambda run: ""),
    ):
        drawn = {*fitted.runs, *fitted.frontier} if name == "seconds" else fitted.runs
        places = [float(getattr(run, name)) for run in drawn]
        begin, end = min(places) / 1.3, max(places) * 1.3
        across = [begin * (end / begin) ** (number / 40) for number in range(41)]
        groups: dict[str, list[Trained]] = {}
        for run in fitted.runs:
            groups.setdefault(group_of(run), []).append(run)
        curves = []
        for number, (label, runs) in enumerate(groups.items()):
            colour, y = run_colour(number), bottom + 18 * number
            dots = [(float(getattr(run, name)), run.loss) for run in runs]
            curves.append(Curve(dots, colour, 'stroke-width="0"', dots=True))
            if name in fitted.law.variables:
                law = [(place, fitted.law.of(runs[0]._replace(**{name: place}))) for place in across]
                curves.append(Curve(law, colour))
            if label:
                parts += [_bar(left, y - 10, 12, 12, colour), _text(left + 20, y, label)]
        if name == "seconds":
            short = [(run.seconds, run.loss) for run in fitted.frontier if run not in fitted.runs]
            curves.append(Curve(short, run_colour(0), 'stroke-width="0"', dots=True))
        if name == "seconds" and fitted.compute:
            curves.append(Curve([(place, fitted.compute.at(place)) for place in across], "#000000", TRAINING))
        parts += _panel(Panel(left), curves, title, end, min(losses) - room, max(losses) + room, False, begin=begin)
        left, most = left + PANEL_WIDTH + GAP, max(most, len(groups))
    return _picture(left + 20, bottom + 18 * most, parts)


def draw_steps(rows: Sequence[Row]) -> str:
    """Draw the milliseconds of the parts of a training step, a stacked bar for each row of `bench step`."""
    bar, left, right = 24, 150, 190
    timed = [row for row in rows if row["step_ms"] not in ("", None)]
    totals = [sum(_number(row, f"{part}_ms") for part in PART_COLOURS) for row in timed]
    scale = (BARS_WIDTH - left - right) / max([*totals, 1e-9])
    parts = [_text(8, 18, f"Training step, ms (nonterminals or states x sentences). {_machine(timed)}")]
    for number, (part, colour) in enumerate(PART_COLOURS.items()):
        parts += [_bar(8 + 110 * number, 28, 12, 12, colour), _text(24 + 110 * number, 39, part)]
    y = 54
    for row in timed:
        parts.append(_text(8, y + 15, f"{row['nonterminals'] or row['states']} x {row['sentences']}"))
        x = float(left)
        for part, colour in PART_COLOURS.items():
            width = _number(row, f"{part}_ms") * scale
            parts.append(_bar(x, y, width, bar - 6, colour))
            x += width
        parts.append(_text(x + 6, y + 14, f"{row['step_ms']} ms, {_number(row, 'words_per_second'):,.0f} words/s"))
        y += bar
    return _picture(BARS_WIDTH, y + 10, parts)


def draw_kernels(rows: Sequence[Row]) -> str:
    """Draw milliseconds on a logarithmic axis, a bar for each row of `bench inside`, grouped by size."""
    bar, gap, left, right = 16, 14, 190, 90
    timed = [row for row in rows if row["p50_ms"] not in ("", None)]
    times = [_number(row, "p50_ms") for row in timed]
    low = math.floor(math.log10(min(times, default=1.0)))
    high = max(math.ceil(math.log10(max(times, default=1.0)) + 1e-9), low + 1)

    def x(milliseconds: float) -> float:
        return left + (BARS_WIDTH - left - right) * (math.log10(milliseconds) - low) / (high - low)

    bars, y, previous = [], 40, None
    for row, time in zip(timed, times, strict=True):
        size, method = f"{row['nonterminals']} x {row['words']} x {row['sentences']}", str(row["method"])
        if size != previous:
            y += gap if previous else 0
            bars.append(_text(left - 8, y + 12, size, "end"))
            previous = size
        bars.append(_bar(left, y, x(time) - left, bar - 2, METHOD_COLOURS.get(method, "#000000")))
        bars.append(_text(x(time) + 4, y + 12, f"{time:.3g} ms {method}"))
        y += bar
    powers = [10.0**power for power in range(low, high + 1)]
    axis = [_line([(x(power), 30), (x(power), y + 4)], GRID) for power in powers]  # behind the bars
    labels = [_text(x(power), y + 18, f"{power:g}", "middle") for power in powers]
    title = f"Inside algorithm, forward + backward, ms (nonterminals x words x sentences). {_machine(timed)}"
    return _picture(BARS_WIDTH, y + 30, [*axis, *bars, *labels, _text(8, 18, title)])


# ---- what the drawings are made of ----------------------------------------------------------------------------------


def _picture(width: int, height: int, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _line(points: Sequence[tuple[float, float]], colour: str, style: str = "") -> str:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{path}" stroke="{colour}"{" " * bool(style)}{style}/>'


def _number(row: Row, field: str) -> float:
    return float(str(row[field]))


def _machine(rows: Sequence[Row]) -> str:
    """Say on which machine and when the rows were measured."""
    return f"{rows[0]['device']}, torch {rows[0]['torch']}, {rows[0]['date']}" if rows else ""


def _is_finite(point: Point) -> bool:
    return 0 < point.perplexity < math.inf


def _ticks(end: float, most: int = 8) -> list[float]:
    """Return some round numbers from 0 to end, so many steps at most."""
    step = _round_step(end, most)
    return [step * number for number in range(int(end / step * 1.001) + 1)]


def _ticks_between(low: float, high: float) -> list[float]:
    """Return some round numbers from low to high."""
    step = _round_step(high - low, 6)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _round_step(length: float, most: int) -> float:
    """1, 2 or 5 times a power of ten, so that at most so many steps have this length."""
    power = 10.0 ** math.floor(math.log10(length / most))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= length * 0.999)


def _ticks_of_ratios(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten from low to high, or the powers alone where these are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if len(powers) > 4 else (1, 2, 5)
    return [tick for power in powers for factor in factors if low <= (tick := factor * 10.0**power) <= high]


def _short(number: float) -> str:
    """Write a large number with two digits, so that texts of almost one size have one name: 16M for 16 million."""
    return f"{number / 1e6:.2g}M" if number >= 1e6 else f"{float(f'{number:.2g}'):,g}"


def _logarithmic_ticks(low: float, high: float) -> list[float]:
    """Return some round numbers from low to high, where equal distances are equal ratios."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 1.1, 1.2, 1.3, 1.5, 1.7, 2, 2.5, 3, 4, 5, 6, 8)
    return [tick for power in powers for factor in factors if low <= (tick := factor * 10.0**power) <= high]
