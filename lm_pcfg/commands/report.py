"""`lm_pcfg report` compares runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from lm_pcfg.commands.output import DeviceOption, Json
from lm_pcfg.console import progress, warn
from lm_pcfg.errors import UserError


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN_FOLDER...", help="Run folders, such as runs/tiny.")],
    plot: Annotated[Path | None, typer.Option(help="Write the learning curves here, as SVG.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write one page for a browser here, with what the models show.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="For the page: trees and surprisals of this text; default: each validation text.")
    ] = None,
    sentence: Annotated[
        str | None, typer.Option(help="For the page: show the posteriors of this sentence; default: one of the text.")
    ] = None,
    trees: Annotated[int, typer.Option(min=0, max=200, help="For the page: how many trees of the text.")] = 10,
    samples: Annotated[int, typer.Option(min=0, max=200, help="For the page: how many sampled sentences.")] = 10,
    reach: Annotated[float | None, typer.Option(help="Tell when this validation perplexity was reached.")] = None,
    as_json: Json = False,
    device: DeviceOption = "auto",
) -> None:
    """Show figures and learning curves of runs, from their metrics.jsonl, and as a page what they have learned.

    The training perplexity is that of the last tenth of the steps. `lm_pcfg glossary` says what the figures mean.
    """
    if reach is not None and not 1 <= reach < math.inf:
        raise typer.BadParameter(f"--reach {reach} should be a perplexity: a number of at least 1")
    if plot is not None and plot.suffix != ".svg":
        raise typer.BadParameter(f"--plot {plot}: plots are SVG; give it a name that ends in .svg")
    if html is None and (text is not None or sentence is not None):
        raise typer.BadParameter("--text and --sentence are for the page: add --html FILE")
    if sentence is not None and not sentence.split():
        raise typer.BadParameter("--sentence should have words")
    from lm_pcfg.bench.plot import draw_curves
    from lm_pcfg.inference import report as reports
    from lm_pcfg.inference.comparison import incomparable

    runs = reports.read_runs(folders, warn)
    lines = [reports.summary(run, reach) for run in runs]
    if as_json:
        print(json.dumps({"runs": lines}, allow_nan=False))
    else:
        print(reports.table(lines))
    for reason in incomparable(runs):
        warn(reason)
    if plot is not None:
        _write(plot, draw_curves(runs, reach))
    if html is not None:
        from lm_pcfg.pages.model_parts import Wanted
        from lm_pcfg.pages.report import PARTS_OF_A_MODEL, report_page

        wanted = Wanted(trees, samples, sentence)
        with progress("parts of the page", PARTS_OF_A_MODEL * len(runs)) as bar:
            page = report_page(
                runs, source=text, wanted=wanted, device=device, reach=reach, on_part=lambda parts: bar.advance(parts)
            )
        _write(html, page)


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
