"""`lm_pcfg next` says what comes after some words."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from lm_pcfg.commands.output import Checkpoints, DeviceOption, WeightsOption, check_prefix


def next_word(
    prefix: Annotated[str, typer.Argument(help='The first words of a sentence, as one argument; "" for its start.')],
    checkpoint: Checkpoints = None,
    most: Annotated[int, typer.Option("--top", min=1, help="So many of the likeliest continuations.")] = 10,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object; its mass is the probability that a sentence ends at all."),
    ] = False,
    weights: WeightsOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Print the likeliest next words with their probabilities; <end> is the end of the sentence."""
    from lm_pcfg import load
    from lm_pcfg.console import warn
    from lm_pcfg.inference.next_word import LITTLE_LOST

    model = load(*(checkpoint or ()), weights=weights, device=device, prepare_cpu=True)
    check_prefix(model, prefix)
    found = model.next_word(prefix, most)
    mass = model.finite_mass()
    if not prefix.split() and mass < 1.0 - LITTLE_LOST:
        warn(f"no word before it: the probabilities of first words sum to {mass:.4g}, that of sentences that end")
    if as_json:
        following = [{"word": word, "probability": probability} for word, probability in found]
        print(json.dumps({"prefix": prefix, "next": following, "mass": mass}, ensure_ascii=False))
        return
    for word, probability in found:
        print(f"{probability:10.6f}  {word}")
