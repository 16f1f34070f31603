"""`lm_pcfg parse` draws the trees of a text."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import typer

from lm_pcfg.commands.output import Checkpoints, DeviceOption, PrecisionOption, ThreadsOption, WeightsOption
from lm_pcfg.console import progress


def parse(
    file: Annotated[str, typer.Argument(help="Text with one sentence a line, - (standard input), or embedded:test.")],
    checkpoint: Checkpoints = None,
    method: Annotated[
        Literal["mbr", "viterbi"],
        typer.Option(help="The tree with the most right spans in expectation, or the most probable one, with symbols."),
    ] = "mbr",
    form: Annotated[
        Literal["bracket", "text", "json", "spans", "svg", "html"],
        typer.Option("--format", help="Penn brackets, a drawing in text, JSON lines, spans, one picture, or a page."),
    ] = "bracket",
    at_least: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="With mbr: leave out spans of a smaller posterior.")
    ] = 0.0,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Skip lines of more words (or pieces); default: what fits into memory.")
    ] = None,
    precision: PrecisionOption = "fp32",
    weights: WeightsOption = "auto",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Print the tree of every line, in the order of the lines.

    Processes of `accelerate launch -m lm_pcfg parse` share the work.
    """
    from lm_pcfg.corpus.text import check_there, display_name
    from lm_pcfg.corpus.treebank import Tree
    from lm_pcfg.distributed.sharing import shared_work
    from lm_pcfg.grammar.parsing import NO_TREE
    from lm_pcfg.inference.drawing.trees import write_trees
    from lm_pcfg.inference.lines import OnLines, Warnings, count_lines, map_lines, warn_of_unknown
    from lm_pcfg.inference.model import load_model

    name, unknown = display_name(file), 0
    with shared_work() as ranks:
        ranks.on_main(lambda: check_there(file))
        loading: dict[str, Any] = {"weights": weights, "device": device, "prepare": True, "threads": threads}
        model = load_model(checkpoint or (), **loading, ranks=ranks)
        model.precision = precision
        total = count_lines(file) if ranks.is_main else None
        with progress("lines parsed", total, show=not sys.stdout.isatty()) as bar:
            warnings = Warnings(lambda message: bar.message(f"warning: {message}"))

            def parse_lines(some: Sequence[str], on_lines: OnLines) -> list[Tree]:
                return model.parse(some, method, at_least=at_least, on_lines=on_lines)

            def trees() -> Iterator[Tree | None]:
                nonlocal unknown
                lines = map_lines(
                    file, model.vocabulary, parse_lines, command="parse", max_length=max_length,
                    fitting=model.longest_line(), warnings=warnings, on_lines=bar.advance, ranks=ranks,
                )  # fmt: skip
                for line in lines:
                    if line.value is not None and not line.value.words:
                        warnings.add(
                            "impossible",
                            f"{name}, line {line.number}: no tree: probability 0, or words that cannot be told apart",
                        )
                    unknown += line.unknown + line.literal if line.value and line.value.words else 0
                    yield None if line.skipped == "blank" else line.value or NO_TREE

            if not ranks.is_main:
                for _ in trees():
                    pass
                return
            for part in write_trees(trees(), form, title=name):
                sys.stdout.write(part)
            warn_of_unknown(name, unknown, model.vocabulary, warnings.warn)
            warnings.summarise()
