"""`lm_pcfg train` trains a grammar."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lm_pcfg.commands.output import complete_setting, print_table


def train(
    config: Annotated[Path, typer.Option(help="YAML file, such as configs/tiny.yaml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Settings to change: model.eos=explicit", autocompletion=complete_setting
        ),
    ] = None,
    print_config: Annotated[bool, typer.Option(help="Print the resolved settings and exit.")] = False,
    dry_run: Annotated[
        bool, typer.Option(help="Build everything, time a few steps, tell memory and the whole time; write nothing.")
    ] = False,
) -> None:
    """Train a grammar."""
    from lm_pcfg.settings_file import dump_yaml, load_settings

    settings = load_settings(config, overrides or [])
    if print_config:
        print(dump_yaml(settings), end="")
        return
    if dry_run:
        from lm_pcfg.training import dry_run as trial

        if report := trial.dry_run(settings):  # empty on all processes but one
            print_table(report)
            print(trial.expectation(report))
    else:
        from lm_pcfg.training import loop

        loop.train(settings)
