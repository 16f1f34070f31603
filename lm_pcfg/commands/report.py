"""`lm_pcfg report` compares runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from lm_pcfg.commands.output import Json
from lm_pcfg.console import warn
from lm_pcfg.errors import UserError


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN_FOLDER...", help="Run folders, such as runs/tiny.")],
    plot: Annotated[Path | None, typer.Option(help="Write the learning curves here, as SVG.")] = None,
    reach: Annotated[float | None, typer.Option(help="Tell when this validation perplexity was reached.")] = None,
    as_json: Json = False,
) -> None:
    """Show figures and learning curves of runs, from their metrics.jsonl.

    The training perplexity is that of the last tenth of the steps. `lm_pcfg glossary` says what the figures mean.
    """
    if reach is not None and not 1 <= reach < math.inf:
        raise typer.BadParameter(f"--reach {reach} should be a perplexity: a number of at least 1")
    if plot is not None and plot.suffix != ".svg":
        raise typer.BadParameter(f"--plot {plot}: plots are SVG; give it a name that ends in .svg")
    from lm_pcfg.bench.plot import draw_curves
    from lm_pcfg.inference import report as reports

    runs = reports.read_runs(folders, warn)
    lines = [reports.summary(run, reach) for run in runs]
    if as_json:
        print(json.dumps({"runs": lines}, allow_nan=False))
    else:
        print(reports.table(lines))
    for reason in reports.incomparable(lines):
        warn(reason)
    if plot is not None:
        try:
            plot.write_text(draw_curves(runs, reach), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {plot}: {error.strerror}") from None
