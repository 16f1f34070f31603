"""What commands share: options that several of them take, and how they print results for people or for machines."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from lm_pcfg.console import warn
from lm_pcfg.errors import UserError

if TYPE_CHECKING:  # it imports torch
    from lm_pcfg.inference.model import Model

Checkpoints = Annotated[
    list[Path] | None,
    typer.Option(
        "--checkpoint", help="Run, checkpoint or exported folder, or owner/name on the Hugging Face hub; default: the "
        "best checkpoint of the newest run under runs/. "
        "Given several times: their even mixture in scores, surprisals and next words, "
        "their consensus in trees.",
    ),
]  # fmt: skip
MixOption = Annotated[
    Literal["sentences", "words"],
    typer.Option(
        help="Of several checkpoints: the mean of their probabilities of sentences, or of each word given those before."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
WeightsOption = Annotated[
    Literal["auto", "ema", "raw"], typer.Option(help="Averaged weights where there are any (auto), or one kind.")
]
PrecisionOption = Annotated[
    Literal["fp64", "fp32", "tf32", "bf16"], typer.Option(help="Precision of the inside algorithm.")
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Of each process on a CPU; default: the cores, shared out among the processes of this machine. The "
        "last digits of results depend on it.",
    ),
]  # fmt: skip
DeviceOption = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")]


class WholeHelp(TyperGroup):
    """A group of commands whose list has the whole first sentence of each: Typer would cut it at the line's end."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(1000)) for name, one in commands.items() if one])


def complete_setting(incomplete: str) -> list[str]:
    """Return what a shell offers after `model.n` and the Tab key."""
    from lm_pcfg.settings_file import setting_keys

    return [f"{key}=" for key in setting_keys() if key.startswith(incomplete)]


def print_json(report: dict[str, Any]) -> None:
    """Print JSON as the standard has it: null stands for what is not finite."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in report.items()}
    print(json.dumps(finite, allow_nan=False))


def print_table(report: dict[str, Any], out: Any = None) -> None:
    """Print a line for each entry, to standard output unless another stream is given."""
    width = max(map(len, report))
    for name, value in report.items():
        if isinstance(value, float):
            shown = f"{value:,.4f}"
        else:
            shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        print(f"{name:<{width}}  {shown}", file=out or sys.stdout)


def for_people(report: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a text with lower bounds and shares as people write them."""
    from lm_pcfg.corpus.unknown import percent

    flag = "_is_lower_bound"
    shown = {name: value for name, value in report.items() if not name.endswith(flag)}
    for name in shown:
        if report.get(name + flag):
            shown[name] = f">= {report[name]:,.4f}"  # unknown words cost more than <unk>
    share = report["unknown_share"]
    return shown | {"unknown_share": "not known" if share is None else percent(share)}


def show(report: dict[str, Any], as_json: bool) -> None:
    """Print a report in the form that was asked for."""
    if as_json:
        print_json(report)
    else:
        print_table(report)


def check_prefix(model: Model, prefix: str) -> None:
    """Refuse a prefix whose chart does not fit; warn of unknown words, and of mass that the grammar loses."""
    from lm_pcfg.corpus.vocabulary import END_OF_SENTENCE
    from lm_pcfg.inference.lines import longest_line, unit_of
    from lm_pcfg.inference.sample import counted

    vocabulary, words, limit = model.vocabulary, prefix.split(), longest_line(model.grammars, "fp64")
    ids = vocabulary.tokenise(words) if words else []
    if sum(map(len, ids)) >= limit:
        most = counted(limit - 1, unit_of(vocabulary))
        raise UserError(f"a prefix may have at most {most} here: its chart has to fit into memory")
    unknown = dict.fromkeys(word for word, own in zip(words, ids, strict=True) if vocabulary.unknown_id in own)
    if vocabulary.end_id is not None and END_OF_SENTENCE in unknown:
        del unknown[END_OF_SENTENCE]
        warn(f"{END_OF_SENTENCE} ends sentences and is no word: in a prefix it is taken for an unknown word")
    if unknown:
        taken = "an unknown word" if len(unknown) == 1 else "unknown words"
        warn(f"the vocabulary does not have {', '.join(list(unknown)[:5])}: taken for {taken}")
    for one in model.next_words():
        if message := one.warning():
            warn(message)
