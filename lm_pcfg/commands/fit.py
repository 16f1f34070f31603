"""`lm_pcfg fit` fits scaling laws to finished runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from lm_pcfg.commands.output import Json
from lm_pcfg.console import warn
from lm_pcfg.errors import UserError


def fit(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Run folders, or folders of a search: runs/scaling.")
    ],
    plot: Annotated[Path | None, typer.Option(help="Draw the runs and their laws here, as SVG.")] = None,
    words: Annotated[float | None, typer.Option(help="Advise on a training text of so many words ...")] = None,
    hours: Annotated[float | None, typer.Option(help="... and so many hours of training on such a machine.")] = None,
    as_json: Json = False,
) -> None:
    """Fit the validation loss of runs as a power law of nonterminals, training words and compute.

    Of runs with the same size and text, such as schedules of several lengths, the best takes part. Each run is also
    predicted by the law of all others: that error says how far the law can be trusted.
    """
    if (words is None) != (hours is None):
        raise typer.BadParameter("--words and --hours belong together: advice needs both")
    for name, value in (("--words", words), ("--hours", hours)):
        if value is not None and not 0 < value < math.inf:
            raise typer.BadParameter(f"{name} {value:g} should be more than 0")
    if plot is not None and plot.suffix != ".svg":
        raise typer.BadParameter(f"--plot {plot}: plots are SVG; give it a name that ends in .svg")
    import json

    from lm_pcfg.bench import laws
    from lm_pcfg.bench.plot import draw_laws
    from lm_pcfg.inference import report as reports
    from lm_pcfg.inference.comparison import differences, named

    runs = reports.read_runs(_runs_of(folders), warn)
    if len({run.unit for run in runs if run.unit}) > 1:
        raise UserError(
            "these runs have losses per word and per piece, which no law has in common: give runs of one kind"
        )
    taken = []
    for run in runs:
        one = laws.trained(run)
        if isinstance(one, str):
            warn(f"{run.name} takes no part: {one}")
        else:
            taken.append(one)
    names = {one.name for one in taken}
    for reason in differences([run for run in runs if run.name in names]):
        warn(reason)
    if shared := laws.trained_beside_others([run for run in runs if run.name in names]):
        warn(
            f"{named(shared)} trained while another run did: unless each had a machine of its own, their seconds mean "
            "little, and so do the law of compute and the advice"
        )
    fitted = laws.fit(taken)
    advice = None if words is None or hours is None else laws.advise(fitted, words, hours * laws.HOUR)
    if as_json:
        found = laws.report(fitted)
        if words is not None:
            found["advice"] = advice._asdict() if advice else None
        print(json.dumps(found, allow_nan=False))
    else:
        print(laws.table(fitted))
        if words is not None and hours is not None:
            print(laws.advice_line(fitted, advice, words, hours * laws.HOUR))
    if plot is not None:
        try:
            plot.write_text(draw_laws(fitted), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {plot}: {error.strerror}") from None


def _runs_of(folders: list[Path]) -> list[Path]:
    """Replace the folder of a search by the runs in it; a run that is named twice counts once."""
    found: list[Path] = []
    for folder in folders:
        inside = sorted(file.parent for file in folder.glob("*/metrics.jsonl"))
        found += [folder] if (folder / "config.yaml").exists() or not inside else inside
    return list({folder.resolve(): folder for folder in found}.values())
