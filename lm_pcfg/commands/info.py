"""`lm_pcfg info` describes a checkpoint or a prepared corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lm_pcfg.commands.output import DeviceOption, Json, WeightsOption, show


def info(
    corpus: Annotated[Path | None, typer.Argument(help="Describe a prepared corpus, not a checkpoint.")] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Checkpoint or run folder; default: the best checkpoint of the newest run under runs/."),
    ] = None,
    as_json: Json = False,
    weights: WeightsOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Describe a checkpoint and its grammar, or a prepared corpus."""
    if corpus is not None:
        from lm_pcfg.corpus.shards import prepared

        manifest = prepared.read_manifest(corpus)
        prepared.verify(manifest)
        prepared.vocabulary_of(manifest)  # an error if it does not fit
        show(prepared.describe(manifest), as_json)
        return
    from lm_pcfg import load
    from lm_pcfg.inference.trained import describe

    model = load(*([checkpoint] if checkpoint else []), weights=weights, device=device, prepare_cpu=True)
    show(describe(model.grammars[0]), as_json)
