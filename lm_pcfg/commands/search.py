"""`lm_pcfg search` trains and compares variants of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lm_pcfg.console import say


def search(
    file: Annotated[Path, typer.Argument(help="YAML file with config, common and variants: configs/search/*.yaml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Settings to change in all runs whose variant does not set them."
        ),
    ] = None,
    table_only: Annotated[bool, typer.Option("--table", help="Print the results so far, and train nothing.")] = False,
    only: Annotated[str | None, typer.Option(help="Train this variant alone.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Train so many at once, each in its own process.")] = 1,
) -> None:
    """Train variants of a config one after another, or several at once; compare them on the validation text."""
    from lm_pcfg.bench import search as searching
    from lm_pcfg.settings_file import find_config

    file = find_config(file)
    if table_only and only is not None:
        raise typer.BadParameter("--only chooses what to train, and --table trains nothing: choose one")
    ended = table_only or searching.run_search(file, overrides or [], only, at_once)
    table = searching.table(file, overrides or [])
    print(table)
    if len(table.splitlines()) == 2:
        say("no run of this search is there yet")
    if not ended:
        say("the search was stopped; the same command continues it")
