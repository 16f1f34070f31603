"""The command line: `lm_pcfg COMMAND`. Arguments only; torch and the rest are imported once a command runs."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lm_pcfg.console import progress, say
from lm_pcfg.errors import UserError

app = typer.Typer(
    help="Probabilistic context-free grammars as language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: it answers in a fraction of the time
    context_settings={"help_option_names": ["-h", "--help"]},
)

bench = typer.Typer(help="Measure.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")

Checkpoint = Annotated[
    Path | None,
    typer.Option(help="Checkpoint or run folder; default: the best checkpoint of the newest run under runs/."),
]
WeightsOption = Annotated[
    Literal["auto", "ema", "raw"], typer.Option(help="Averaged weights where there are any (auto), or one kind.")
]
DeviceOption = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def train(
    config: Annotated[Path, typer.Option(help="YAML file, such as configs/tiny.yaml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change: model.eos=explicit"),
    ] = None,
    print_config: Annotated[bool, typer.Option(help="Print the resolved settings and exit.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Build everything, run one step, report time and memory.")] = False,
) -> None:
    """Train a grammar."""
    from lm_pcfg.settings_file import dump_yaml, load_settings

    settings = load_settings(config, overrides or [])
    if print_config:
        print(dump_yaml(settings), end="")
        return
    from lm_pcfg.training import loop

    if dry_run:
        _print_table(loop.dry_run(settings))
    else:
        loop.train(settings)


@app.command()
def score(
    file: Annotated[str, typer.Argument(help="Text, one sentence a line; - for standard input; or embedded:test.")],
    checkpoint: Checkpoint = None,
    per_sentence: Annotated[bool, typer.Option(help="Print the natural log-probability of every line.")] = False,
    as_json: Json = False,
    max_length: Annotated[int, typer.Option(min=1, help="Lines of more words are skipped.")] = 250,
    precision: Annotated[
        Literal["fp64", "fp32", "tf32", "bf16"], typer.Option(help="Of the inside algorithm.")
    ] = "fp32",
    root: Annotated[
        Literal["trained", "nonterminals"],
        typer.Option(help="nonterminals: the paper's root, by renormalising; one-word lines are skipped then."),
    ] = "trained",
    weights: WeightsOption = "auto",
    device: DeviceOption = "auto",
    batch_cost: Annotated[int, typer.Option(min=1, help="Words squared that are computed at a time.")] = 25_600,
) -> None:
    """Perplexity of a text, or the log-probability of each of its lines."""
    if per_sentence and as_json:
        raise typer.BadParameter("--per-sentence and --json exclude each other: choose one")
    from dataclasses import replace

    from lm_pcfg.inference.model import load_trained
    from lm_pcfg.inference.score import TextScore, score_lines

    trained = load_trained(checkpoint, weights=weights, device=device)
    if root == "nonterminals":
        trained = replace(trained, grammar=trained.grammar.with_root_over_nonterminals())
    result = TextScore()
    with progress("lines scored", _count_lines(file)) as bar:
        values = score_lines(
            trained, file, result, max_length=max_length, precision=precision, batch_cost=batch_cost,
            warn=lambda message: bar.message(f"warning: {message}"), on_lines=lambda lines: bar.advance(lines),
        )  # fmt: skip
        for value in values:
            if per_sentence:
                print("" if value is None else f"{value:.9g}")
    total = result.total
    if not total.lines:
        why = f"{result.skipped} skipped" if result.skipped else "it is empty" if not result.blank else "all blank"
        raise UserError(f"{file}: no line could be scored ({why})")
    report: dict[str, Any] = {
        "file": file,
        "checkpoint": str(trained.checkpoint),
        "weights": trained.weights,
        "nll": total.nll,
        "words": total.words,
        "lines": total.lines,
        "tokens": total.tokens,
        "ppl": total.perplexity,
        "ppl_words": total.words_perplexity,
        "skipped": result.skipped,
        "unknown_words": result.unknown_words,
        "recomputed": result.statistics.recomputed,
        "precision": precision,
    }
    if file.startswith("embedded:"):
        from lm_pcfg.corpus import embedded
        from lm_pcfg.corpus.text import read_words

        report["best_possible_ppl"] = embedded.best_possible(words for words in read_words(file) if words).ppl
    if as_json:
        print(json.dumps(report))
        return
    out = sys.stderr if per_sentence else sys.stdout
    _print_table(report, out)
    if "best_possible_ppl" in report:
        best = report["best_possible_ppl"]
        line = f"perplexity {total.perplexity:.3f}, best possible {best:.3f}, ratio {total.perplexity / best:.4f}"
        print(line, file=out)


@app.command()
def info(
    checkpoint: Checkpoint = None, as_json: Json = False, weights: WeightsOption = "auto", device: DeviceOption = "auto"
) -> None:
    """What a checkpoint holds, and what its grammar is like."""
    from lm_pcfg.inference.describe import describe
    from lm_pcfg.inference.model import load_trained

    report = describe(load_trained(checkpoint, weights=weights, device=device))
    if as_json:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in report.items()}
        print(json.dumps(finite))
    else:
        _print_table(report)


@bench.command(
    name="inside", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench_inside(context: typer.Context) -> None:
    """Time the inside algorithm over a grid of sizes, checked against fp64 first (--help shows its options)."""
    from flash_inside.benchmarks import inside

    raise typer.Exit(inside.main(context.args))


def _count_lines(file: str) -> int:
    """For the progress bar alone; 0 where one cannot know."""
    path = Path(file)
    if not path.is_file():
        return 0
    with path.open("rb") as handle:
        return sum(block.count(b"\n") for block in iter(lambda: handle.read(1 << 20), b""))


def _print_table(report: dict[str, Any], out: Any = None) -> None:
    width = max(map(len, report))
    for name, value in report.items():
        if isinstance(value, float):
            shown = f"{value:,.4f}"
        else:
            shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        print(f"{name:<{width}}  {shown}", file=out or sys.stdout)


def main() -> None:
    """Exit status 0 success, 1 a failure with one clear line, 2 wrong usage. No traceback for a user's mistake."""
    try:
        app()
    except UserError as error:
        say(f"lm_pcfg: error: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        say("lm_pcfg: interrupted")
        sys.exit(130)
    except BrokenPipeError:  # `lm_pcfg score ... | head`
        sys.stderr.close()
        sys.exit(0)
