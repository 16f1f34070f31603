"""The command line: `lm_pcfg COMMAND`. Arguments only; torch and the rest are imported once a command runs."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lm_pcfg.console import progress, say
from lm_pcfg.errors import FailedElsewhere, UserError

app = typer.Typer(
    help="Probabilistic context-free grammars as language models.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: it answers in a fraction of the time
    context_settings={"help_option_names": ["-h", "--help"]},
)

bench = typer.Typer(help="Measure.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed_version

        print(f"lm_pcfg {installed_version('lm_pcfg')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


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
    if dry_run:
        from lm_pcfg.training import dry_run as trial

        if report := trial.dry_run(settings):  # empty on all processes but one
            _print_table(report)
    else:
        from lm_pcfg.training import loop

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

    from lm_pcfg.corpus.text import display_name, read_words
    from lm_pcfg.inference.model import load_trained
    from lm_pcfg.inference.score import TextScore, score_lines

    trained = load_trained(checkpoint, weights=weights, device=device)
    if root == "nonterminals":
        trained = replace(trained, grammar=trained.grammar.with_root_over_nonterminals())
    result = TextScore()
    scored: list[bool] = []
    # Values on a terminal are progress enough.
    with progress("lines scored", _count_lines(file), show=not (per_sentence and sys.stdout.isatty())) as bar:
        values = score_lines(
            trained, file, result, max_length=max_length, precision=precision, batch_cost=batch_cost,
            warn=lambda message: bar.message(f"warning: {message}"), on_lines=lambda lines: bar.advance(lines),
        )  # fmt: skip
        for value in values:
            scored.append(value is not None and math.isfinite(value))
            if per_sentence:
                print("" if value is None else f"{value:.9g}")
    total = result.total
    if not total.lines:
        why = f"{result.skipped} skipped" if result.skipped else "it is empty" if not result.blank else "all blank"
        raise UserError(f"{display_name(file)}: no line could be scored ({why})")
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
    if file.startswith("embedded:"):  # its source is known: the best possible score of the lines that were scored
        from lm_pcfg.corpus import embedded

        lines = [words for words, counts in zip(read_words(file), scored, strict=True) if counts]
        report["best_possible_ppl"] = embedded.best_possible(lines).ppl
    if as_json:
        _print_json(report)
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
        _print_json(report)
    else:
        _print_table(report)


@bench.command(
    name="inside", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench_inside(context: typer.Context) -> None:
    """Time the inside algorithm over a grid of sizes, checked against fp64 first (--help shows its options)."""
    from flash_inside.benchmarks import inside

    raise typer.Exit(inside.main(context.args))


@bench.command(name="scaling")
def bench_scaling(
    config: Annotated[Path | None, typer.Option(help="Model and vocabulary; default: the paper's networks.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Of the config.")] = None,
    nonterminals: Annotated[int, typer.Option(min=1, help="Without a config.")] = 4096,
    words: Annotated[int | None, typer.Option(min=1, help="Vocabulary; default: the config's, or 10,000.")] = None,
    step_ms: Annotated[float | None, typer.Option(min=0, help="A measured step: one GPU, 16 sentences.")] = None,
    inside_ms: Annotated[float | None, typer.Option(min=0, help="The same of the inside algorithm alone.")] = None,
    sentences: Annotated[int, typer.Option(min=1, help="Of each GPU: the batch grows with the GPUs.")] = 16,
    all_sentences: Annotated[int | None, typer.Option(min=1, help="Of all GPUs: the batch does not grow.")] = None,
    emission_shards: Annotated[int, typer.Option(min=1, help="Ranks that share the emission's normalisers.")] = 1,
    spread: Annotated[float, typer.Option(min=0, help="Deviation of ranks' inside times, as a part of them.")] = 0.0,
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    within: Annotated[str, typer.Option(help="Link of GPUs in a node: nvlink, pcie.")] = "nvlink",
    between: Annotated[
        str, typer.Option(help="Link of nodes: infiniband, infiniband-hdr, ethernet-100, ethernet-10.")
    ] = "infiniband",
    within_gb: Annotated[float | None, typer.Option(min=0.001, help="GB/s of a GPU instead.")] = None,
    between_gb: Annotated[float | None, typer.Option(min=0.001, help="GB/s of a GPU instead.")] = None,
    most_gpus: Annotated[int, typer.Option(min=1)] = 1024,
    as_json: Json = False,
) -> None:
    """Efficiency from 1 to 1,024 GPUs, predicted from the time of a step, message sizes and links."""
    from lm_pcfg.training import scaling_report

    model_and_words = scaling_report.model_and_words(config, overrides or [], nonterminals, words)
    report = scaling_report.report(
        model_and_words, step_ms=step_ms, inside_ms=inside_ms,
        gpus_per_node=gpus_per_node, within=(within, within_gb), between=(between, between_gb), most_gpus=most_gpus,
        sentences=sentences, all_sentences=all_sentences, emission_shards=emission_shards, spread=spread,
    )  # fmt: skip
    print(json.dumps(report) if as_json else scaling_report.table(report))


def _count_lines(file: str) -> int | None:
    """For the progress bar alone; None where one cannot know before reading."""
    path = Path(file)
    if not path.is_file():
        return None
    with path.open("rb") as handle:
        return sum(block.count(b"\n") for block in iter(lambda: handle.read(1 << 20), b""))


def _print_json(report: dict[str, Any]) -> None:
    """JSON as the standard has it: null for what is not finite."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in report.items()}
    print(json.dumps(finite, allow_nan=False))


def _print_table(report: dict[str, Any], out: Any = None) -> None:
    width = max(map(len, report))
    for name, value in report.items():
        if isinstance(value, float):
            shown = f"{value:,.4f}"
        else:
            shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        print(f"{name:<{width}}  {shown}", file=out or sys.stdout)


# A process that exits has all others ended by the launcher: it leaves the one with the error this many seconds.
_TIME_TO_SPEAK = 5.0

# What Typer raises for wrong usage: a class of click, or of the copy of it that newer Typers carry.
_WrongUsage: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main() -> None:
    """Exit status 0 success, 1 a failure with one clear line, 2 wrong usage. No traceback for a user's mistake."""
    try:
        status = app(standalone_mode=False) or 0
        sys.stdout.flush()
    except _WrongUsage as error:
        error.show()
        status = error.exit_code
    except FailedElsewhere:
        time.sleep(_TIME_TO_SPEAK)
        status = 1
    except UserError as error:
        status = _fail(str(error), error)
    except (KeyboardInterrupt, typer.Abort):
        say("lm_pcfg: interrupted")
        status = 130
    except (BrokenPipeError, SystemExit) as error:
        # `lm_pcfg score ... | head`: whoever read has had enough. Typer turns that into an exit of its own.
        closed = isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError)
        status = 0 if closed else getattr(error, "code", 1)
        if closed:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except MemoryError:
        status = _fail("not enough memory; try fewer symbols, smaller batches or a lower maximum length")
    except RuntimeError as error:
        if not any(sign in str(error) for sign in ("out of memory", "allocate memory")):
            raise
        reason = str(error).splitlines()[0]
        status = _fail(f"not enough memory; try fewer symbols, smaller batches or a lower maximum length ({reason})")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        status = _fail(f"cannot write: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to write has nowhere to go
    sys.exit(status)


def _have_met() -> bool:
    """Whether the processes of a run have found each other."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()


def _fail(message: str, error: Exception | None = None) -> int:
    """Of several processes each says which it is; torchrun shows the first error in its summary, if it is told."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    if several and not _have_met() and os.environ.get("LOCAL_RANK", "0") != "0":
        # What is wrong before they meet is wrong with all processes of this host: the first of them says so, and the
        # launcher ends the others. If it does not come to that, they speak, too.
        time.sleep(_TIME_TO_SPEAK)
    say(f"lm_pcfg: error: {'rank ' + os.environ.get('RANK', '?') + ': ' if several else ''}{message}")
    if error is not None and "TORCHELASTIC_ERROR_FILE" in os.environ and "torch" in sys.modules:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    return 1
