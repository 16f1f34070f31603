"""`lm_pcfg suite` scores minimal pairs and SyntaxGym's suites."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lm_pcfg.commands.output import Checkpoints, DeviceOption, Json, PrecisionOption, WeightsOption, print_json
from lm_pcfg.console import progress, warn

NAME_SHOWN = 48  # characters of a phenomenon's name


def suite(
    files: Annotated[
        list[Path],
        typer.Argument(help="Minimal pairs of BLiMP (.jsonl) or Zorro (.txt), or suites of SyntaxGym (.json)."),
    ],
    checkpoint: Checkpoints = None,
    punctuation: Annotated[
        Literal["keep", "drop"],
        typer.Option(help="Punctuation at the ends of words becomes words of its own (keep), or is left out (drop)."),
    ] = "keep",
    lowercase: Annotated[bool, typer.Option(help="Lower-case the words before the model reads them.")] = False,
    as_json: Json = False,
    precision: PrecisionOption = "fp32",
    weights: WeightsOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Score syntactic test suites: accuracy by phenomenon, with and without unknown words; ties count one half."""
    from lm_pcfg import load
    from lm_pcfg.inference.suites import evaluate_suites, read_suites

    items = read_suites(files, lowercase=lowercase, keep_punctuation=punctuation == "keep")
    model = load(*(checkpoint or ()), weights=weights, device=device, prepare_cpu=True)
    model.precision = precision
    sentences = len({sentence for item in items for sentence in item.sentences})
    with progress("sentences read", sentences) as bar:
        report = evaluate_suites(
            model, items, warn=lambda message: bar.message(f"warning: {message}"), on_lines=bar.advance
        )
    report = {"files": [str(file) for file in files], "punctuation": punctuation, "lowercase": lowercase} | report
    if as_json:
        print_json(report)
    else:
        print("\n".join(tables(report)))
    if report["items_known"] < 0.8 * report["items"]:
        warn("more than a fifth of the items have unknown words: try --lowercase or another --punctuation")


def tables(report: dict[str, Any]) -> list[str]:
    """Return the report for people, a line each."""
    rows = [(row["phenomenon"], row) for row in report["phenomena"]] + [("all", report)]
    lines = _table("phenomenon", rows)
    formulas = [(f"{row['suite']}: {row['formula']}", row) for row in report["predictions"]]
    if formulas:
        lines += ["", *_table("prediction", formulas)]
    ties = f"{report['ties']:,} tie{'s' * (report['ties'] != 1)} (one half each)"
    return [*lines, "", f"{report['items']:,} items, {ties}, {report['unscored']:,} more could not be scored"]


def _table(title: str, rows: list[tuple[str, dict[str, Any]]]) -> list[str]:
    width = min(NAME_SHOWN, max(len(name) for name, _ in [(title, {}), *rows]))
    lines = [f"{title:<{width}}  accuracy    items   known words    items"]
    for name, row in rows:
        shown = name if len(name) <= width else f"{name[: width - 3]}..."
        lines.append(
            f"{shown:<{width}}  {_figure(row['accuracy'])} {row['items']:>8,}   "
            f"{_figure(row['accuracy_known']):>11} {row['items_known']:>8,}"
        )
    return lines


def _figure(value: float | None) -> str:
    return f"{value:8.2f}" if value is not None else "       -"
