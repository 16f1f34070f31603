"""`lm_pcfg surprisal` says how surprising every word of a text is."""

from __future__ import annotations

import json
import math
import sys
from typing import Annotated, Any, Literal

import typer

from lm_pcfg.commands.output import Checkpoints, DeviceOption, MixOption, PrecisionOption, WeightsOption
from lm_pcfg.console import progress
from lm_pcfg.errors import UserError

COLUMNS = ["line", "position", "word", "surprisal"]
ENTROPY_COLUMNS = ["entropy", "entropy_reduction"]


def surprisal(
    file: Annotated[str, typer.Argument(help="Text with one sentence a line, - (standard input), or embedded:test.")],
    checkpoint: Checkpoints = None,
    mix: MixOption = "sentences",
    entropy: Annotated[
        bool, typer.Option("--entropy", help="Also the entropy of what comes next, and by how much the word lowers it.")
    ] = False,
    form: Annotated[
        Literal["tsv", "json"], typer.Option("--format", help="One row a word, or one JSON object a line.")
    ] = "tsv",
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Skip lines of more words (or pieces); default: what fits into memory.")
    ] = None,
    precision: PrecisionOption = "fp32",
    weights: WeightsOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Print the surprisal of every word, and of the end of every line, in bits."""
    from lm_pcfg import load
    from lm_pcfg.corpus.text import check_there, display_name
    from lm_pcfg.corpus.unknown import Unknown
    from lm_pcfg.inference.lines import Warnings, count_lines, map_lines, warn_of_unknown

    check_there(file)
    model = load(*(checkpoint or ()), weights=weights, device=device, prepare_cpu=True)
    model.precision = precision
    name = display_name(file)
    scored = skipped = blank = unknown = literal = words = 0
    with progress("lines read", count_lines(file), show=not sys.stdout.isatty()) as bar:
        warnings = Warnings(lambda message: bar.message(f"warning: {message}"))
        for one in model.next_words():
            if message := one.warning():
                warnings.warn(message)
        lines = map_lines(
            file, model.vocabulary,
            lambda some, on_lines: model.surprisal(some, entropy=entropy, mix=mix, on_lines=on_lines),
            command="surprisal", max_length=max_length, fitting=model.longest_line(),
            min_length=min(one.fewest_symbols for one in model.grammars), warnings=warnings, on_lines=bar.advance,
        )  # fmt: skip
        for line in lines:
            if line.value is None:
                blank += line.skipped == "blank"
                skipped += line.skipped != "blank"
                if not line.skipped:
                    warnings.add("words", f"{name}, line {line.number}: its words cannot be told apart, skipped")
                continue
            if form == "tsv" and not scored:
                print("\t".join([*COLUMNS, *(ENTROPY_COLUMNS if entropy else [])]))
            scored += 1
            unknown += line.unknown
            literal += line.literal
            words += len(line.value.words)
            if not math.isfinite(line.value.total):
                warnings.add("impossible", f"{name}, line {line.number}: probability 0")
            sys.stdout.write(_rows(line.number, line.value) if form == "tsv" else _object(line.number, line.value))
        warn_of_unknown(name, unknown + literal, model.vocabulary, warnings.warn)
        if model.vocabulary.unit == "words" and (message := Unknown(unknown, literal, words).warning(name)):
            warnings.warn(message)
        warnings.summarise()
    if not scored:
        why = f"{skipped} skipped" if skipped else "all blank" if blank else "it is empty"
        raise UserError(f"{name}: no line could be scored ({why})")


def _rows(number: int, found: Any) -> str:
    from lm_pcfg.inference.model import END

    rows = []
    bits = [*found.bits.tolist(), found.end]
    for place, (word, value) in enumerate(zip([*found.words, END], bits, strict=True)):
        cells = [str(number), str(place + 1), word, f"{value:.6f}"]
        if found.entropy is not None:
            reduction = found.entropy_reduction
            cells.append(f"{found.entropy[place]:.6f}")
            cells.append(f"{reduction[place]:.6f}" if place < len(reduction) else "")
        rows.append("\t".join(cells) + "\n")
    return "".join(rows)


def _object(number: int, found: Any) -> str:
    fields: dict[str, Any] = {
        "line": number,
        "words": found.words,
        "surprisal": [_number(value) for value in found.bits.tolist()],
        "end": _number(found.end),
        "total": _number(found.total),
    }
    if found.entropy is not None:
        fields["entropy"] = [_number(value) for value in found.entropy.tolist()]
        fields["entropy_reduction"] = [_number(value) for value in found.entropy_reduction.tolist()]
    return json.dumps(fields, ensure_ascii=False, allow_nan=False) + "\n"


def _number(value: float) -> float | None:
    """JSON has no infinity: null stands for it."""
    return value if math.isfinite(value) else None
