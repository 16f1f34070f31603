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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    weights: WeightsOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Print the likeliest next words with their probabilities; <end> is the end of the sentence."""
    from lm_pcfg import load
    from lm_pcfg.console import warn

    model = load(*(checkpoint or ()), weights=weights, device=device, prepare_cpu=True)
    check_prefix(model, prefix)
    found = model.next_word(prefix, most)
    if not prefix.split():
        warn("no word before it: these are first words, and sum to the probability of sentences that end")
    if as_json:
        following = [{"word": word, "probability": probability} for word, probability in found]
        print(json.dumps({"prefix": prefix, "next": following}, ensure_ascii=False))
        return
    for word, probability in found:
        print(f"{probability:10.6f}  {word}")
