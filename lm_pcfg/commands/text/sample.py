"""`lm_pcfg sample` draws sentences from a model, or trees of given sentences."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated

import typer

from lm_pcfg.commands.output import Checkpoints, DeviceOption, WeightsOption, check_prefix
from lm_pcfg.console import progress, warn

if TYPE_CHECKING:
    from lm_pcfg.inference.sample import ScoredTree

TREES_AT_A_TIME = 20_000  # that are in memory before they are printed


def sample(
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Samples; with --posterior, of each line.")] = 10,
    posterior: Annotated[
        str | None, typer.Option(help="Draw trees of the lines of this text from p(tree | line), no sentences.")
    ] = None,
    prefix: Annotated[
        str | None, typer.Option(help="Draw sentences that begin with these words, from p(sentence | prefix).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same samples.")] = 0,
    max_length: Annotated[
        int, typer.Option(min=1, help="Samples of more words (or pieces) are cut, and counted.")
    ] = 250,
    trees: Annotated[bool, typer.Option("--trees", help="Print trees in brackets, not only their words.")] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print a JSON object a line: number, text, log-probability, tree; with --prefix no tree."
        ),
    ] = False,
    checkpoint: Checkpoints = None,
    weights: WeightsOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Draw sentences by exact ancestral sampling, or trees of given sentences."""
    if trees and as_json:
        raise typer.BadParameter("--trees and --json exclude each other: JSON has the trees, too")
    if prefix is not None and (posterior is not None or trees):
        raise typer.BadParameter("--prefix draws sentences without trees: it excludes --posterior and --trees")
    from lm_pcfg import load
    from lm_pcfg.corpus.text import check_there, display_name
    from lm_pcfg.corpus.treebank import bracketed
    from lm_pcfg.inference.drawing.trees import as_json as json_line
    from lm_pcfg.inference.lines import unit_of
    from lm_pcfg.inference.sample import Drawn

    if posterior is not None:
        check_there(posterior)
    model = load(*(checkpoint or ()), weights=weights, device=device, prepare_cpu=True)
    if posterior is not None:
        from lm_pcfg.inference.lines import OnLines, Warnings, count_lines, longest_line, map_lines

        read = 0

        def drawn_trees(some: list[str], on_lines: OnLines) -> list[list[ScoredTree]]:
            nonlocal read
            read += len(some)
            return model.sample_trees(some, number, seed=seed, first_line=read - len(some), on_lines=on_lines)

        with progress("lines read", count_lines(posterior)) as bar:
            warnings = Warnings(lambda message: bar.message(f"warning: {message}"))
            lines = map_lines(
                posterior, model.vocabulary, drawn_trees, command="sample", max_length=max_length,
                fitting=longest_line(model.grammars, "fp64"), warnings=warnings, on_lines=bar.advance,
                at_a_time=max(1, TREES_AT_A_TIME // number),
            )  # fmt: skip
            for line in lines:
                if line.value == []:
                    name = display_name(posterior)
                    warnings.add("impossible", f"{name}, line {line.number}: no tree (probability 0)")
                for tree, log_probability in line.value or []:
                    as_object = json_line(tree, line.number, log_probability=log_probability)
                    print(as_object if as_json else bracketed(tree))
            warnings.summarise()
        return
    if prefix is not None:
        check_prefix(model, prefix)
        counts = Drawn()
        found = model.draw_completions(prefix, number, seed=seed, max_length=max_length, drawn=counts)
        texts = [text for text in found if text is not None]
        if as_json:
            for count, (text, log_p) in enumerate(zip(texts, model.score(texts).tolist(), strict=True), start=1):
                # JSON has no NaN and no infinity.
                fields = {"number": count, "text": text, "log_probability": log_p if math.isfinite(log_p) else None}
                print(json.dumps(fields, ensure_ascii=False, allow_nan=False))
        else:
            for text in texts:
                print(text)
        if message := counts.message(max_length, unit_of(model.vocabulary)):
            warn(message)
        return
    if trees:
        model.check_trees()
    counts = Drawn()
    for count, one in enumerate(model.draw(number, seed=seed, max_length=max_length, drawn=counts), start=1):
        if as_json:
            print(json_line(one.tree, count, text=one.text, log_probability=one.log_probability))
        else:
            print(bracketed(one.tree) if trees else one.text)
    if message := counts.message(max_length, unit_of(model.vocabulary)):
        warn(message)
