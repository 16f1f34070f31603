"""`lm_pcfg verify` checks a run or a prepared corpus."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lm_pcfg.commands.output import Json, print_json
from lm_pcfg.console import progress


def verify(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A run, a checkpoint, an export or a corpus.")],
    as_json: Json = False,
) -> None:
    """Check the files of a run, a checkpoint, an export or a corpus. What is damaged is listed, with status 1."""
    from lm_pcfg.inference import verification
    from lm_pcfg.storage import checkpoint

    with progress("checkpoints checked", len(checkpoint.list_checkpoints(folder))) as bar:
        found = verification.verify(folder, lambda: bar.advance(1))
    if as_json:
        print_json(asdict(found))
    else:
        for line in found.damaged:
            print(f"damaged: {line}")
        checked = ", ".join(f"{number:,} {what.replace('_', ' ')}" for what, number in found.counts.items())
        print(": ".join(filter(None, [str(folder), checked, f"{len(found.damaged) or 'nothing'} damaged"])))
    if found.damaged:
        raise typer.Exit(1)
