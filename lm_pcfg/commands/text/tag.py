"""`lm_pcfg tag` prints the most probable symbol of every word of a text."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Literal

import typer

from lm_pcfg.commands.output import Checkpoints, DeviceOption, PrecisionOption, ThreadsOption, WeightsOption
from lm_pcfg.console import progress
from lm_pcfg.errors import UserError

COLUMNS = ("line", "position", "word", "tag", "probability")


def tag(
    file: Annotated[str, typer.Argument(help="Text with one sentence a line, - (standard input), or embedded:test.")],
    checkpoint: Checkpoints = None,
    form: Annotated[
        Literal["tsv", "json"], typer.Option("--format", help="One row a word, or one JSON object a line.")
    ] = "tsv",
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Skip lines of more words (or pieces); default: what fits into memory.")
    ] = None,
    precision: PrecisionOption = "fp32",
    weights: WeightsOption = "auto",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Print the most probable symbol of every word: a preterminal (P7), or a state of a hidden Markov model (S7).

    Each word is decided by itself, by the posterior probability that is printed beside it.
    """
    from lm_pcfg.corpus.text import check_there, display_name
    from lm_pcfg.inference.lines import Warnings, count_lines, map_lines, warn_of_unknown
    from lm_pcfg.inference.model import load_model

    check_there(file)
    model = load_model(checkpoint or (), weights=weights, device=device, prepare=True, threads=threads)
    model.precision = precision
    name, unknown, tagged = display_name(file), 0, 0
    with progress("lines tagged", count_lines(file), show=not sys.stdout.isatty()) as bar:
        warnings = Warnings(lambda message: bar.message(f"warning: {message}"))
        lines = map_lines(
            file, model.vocabulary, lambda some, on_lines: model.tags(some, on_lines=on_lines),
            command="tag", max_length=max_length, fitting=model.longest_line(),
            min_length=model.grammars[0].fewest_symbols, warnings=warnings, on_lines=bar.advance,
        )  # fmt: skip
        for line in lines:
            if line.value is None:
                if not line.skipped:
                    problem = "probability 0, or words that cannot be told apart"
                    warnings.add("impossible", f"{name}, line {line.number}: no tags: {problem}")
                continue
            if form == "tsv" and not tagged:
                print("\t".join(COLUMNS))
            tagged += 1
            unknown += line.unknown + line.literal
            if form == "json":
                print(json.dumps({"line": line.number} | line.value._asdict(), ensure_ascii=False))
                continue
            for place, (word, symbol, probability) in enumerate(zip(*line.value, strict=True), start=1):
                print(f"{line.number}\t{place}\t{word}\t{symbol}\t{probability:.6f}")
        warn_of_unknown(name, unknown, model.vocabulary, warnings.warn)
        warnings.summarise()
    if not tagged:
        raise UserError(f"{name}: no line has tags: all are blank, skipped or impossible")
