"""`lm_pcfg export` writes a model to a folder that can be handed on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lm_pcfg.commands.output import Json, WeightsOption, show


def export(
    model: Annotated[Path, typer.Argument(metavar="RUN", help="A run, a checkpoint, or an earlier export.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder, or an export to replace.")],
    score: Annotated[
        list[str] | None, typer.Option(help="Put the perplexity of this text into the model card; may be repeated.")
    ] = None,
    license: Annotated[str, typer.Option(help="Licence of the model, as the hub writes it: apache-2.0.")] = "unknown",
    prune: Annotated[
        str | None, typer.Option(help="Leave out symbols that this text hardly uses (one sentence a line).")
    ] = None,
    prune_below: Annotated[
        float, typer.Option(help="With --prune: leave out symbols of fewer expected uses in the text.")
    ] = 1.0,
    prune_check: Annotated[
        str | None, typer.Option(help="With --prune: a second text, for the perplexity before and after.")
    ] = None,
    max_length: Annotated[int, typer.Option(min=1, help="Leave out lines of texts of more words.")] = 250,
    weights: WeightsOption = "auto",
    as_json: Json = False,
) -> None:
    """Write a model to a folder in the layout of the Hugging Face hub, with a model card.

    `lm_pcfg.load` and --checkpoint open it, here or on the hub; MLflow loads and serves it.
    """
    if prune is None and (prune_check is not None or prune_below != 1.0):
        raise typer.BadParameter("--prune-check and --prune-below go with --prune FILE")
    from lm_pcfg.distributed.collectives import prepare_cpu
    from lm_pcfg.export import export as exports

    prepare_cpu()
    options = exports.ExportOptions(
        weights=weights, licence=license, score=score or [], prune=prune, prune_below=prune_below,
        prune_check=prune_check, max_length=max_length,
    )  # fmt: skip
    show(exports.export(model, folder, options), as_json)
