"""`lm_pcfg sample` draws sentences from a model, or trees of given sentences."""

from __future__ import annotations

from typing import Annotated

import typer

from lm_pcfg.commands.output import Checkpoints, DeviceOption, WeightsOption
from lm_pcfg.console import progress, warn


def sample(
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Samples; with --posterior, of each line.")] = 10,
    posterior: Annotated[
        str | None, typer.Option(help="Draw trees of the lines of this text from p(tree | line), no sentences.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same samples.")] = 0,
    max_length: Annotated[int, typer.Option(min=1, help="Samples of more words are cut, and counted.")] = 250,
    trees: Annotated[bool, typer.Option("--trees", help="Print trees in brackets, not only their words.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object a line, with tree and probability.")
    ] = False,
    checkpoint: Checkpoints = None,
    weights: WeightsOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Draw sentences by exact ancestral sampling, or trees of given sentences."""
    if trees and as_json:
        raise typer.BadParameter("--trees and --json exclude each other: JSON has the trees, too")
    from lm_pcfg import load
    from lm_pcfg.corpus.treebank import bracketed
    from lm_pcfg.inference.drawing import as_json as json_line
    from lm_pcfg.inference.sample import Tally

    model = load(*(checkpoint or ()), weights=weights, device=device, prepare_cpu=True)
    if posterior is not None:
        from lm_pcfg.inference.lines import Warnings, count_lines, map_lines

        with progress("lines read", count_lines(posterior)) as bar:
            warnings = Warnings(lambda message: bar.message(f"warning: {message}"))
            lines = map_lines(
                posterior, model.vocabulary, lambda some, on: model.sample_trees(some, number, seed=seed, on_lines=on),
                command="sample", max_length=max_length, warnings=warnings, on_lines=lambda lines: bar.advance(lines),
            )  # fmt: skip
            for line in lines:
                if line.value == []:
                    warnings.add("impossible", f"{posterior}, line {line.number}: no tree (probability 0)")
                for tree in line.value or []:
                    print(json_line(tree, line.number) if as_json else bracketed(tree))
            warnings.summarise()
        return
    tally = Tally()
    for count, one in enumerate(model.draw(number, seed=seed, max_length=max_length, tally=tally), start=1):
        if as_json:
            print(json_line(one.tree, count, text=one.text, log_probability=one.log_probability))
        else:
            print(bracketed(one.tree) if trees else one.text)
    if message := tally.message(max_length):
        warn(message)
