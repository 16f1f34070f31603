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

from lm_pcfg import cli_bench, cli_data
from lm_pcfg.cli_output import Json, print_json, print_table, show
from lm_pcfg.console import progress, say, warn
from lm_pcfg.errors import FailedElsewhere, LostContact, UserError

app = typer.Typer(
    help="Probabilistic context-free grammars as language models.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: it answers in a fraction of the time
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(cli_bench.bench, name="bench")
app.command()(cli_data.prepare)


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
            print_table(report)
    else:
        from lm_pcfg.training import loop

        loop.train(settings)


@app.command()
def score(
    file: Annotated[str, typer.Argument(help="Text, one sentence a line; - for standard input; or embedded:test.")],
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(
            help="Checkpoint or run folder; default: the best checkpoint of the newest run under runs/. Given several "
            "times: the even mixture of these grammars."
        ),
    ] = None,
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
    from lm_pcfg.grammar.likelihood import perplexity as perplexity_of
    from lm_pcfg.inference.model import load_trained
    from lm_pcfg.inference.score import TextScore, score_lines

    paths: list[Path | None] = [*checkpoint] if checkpoint else [None]
    mixture = [load_trained(path, weights=weights, device=device) for path in paths]
    if root == "nonterminals":
        mixture = [replace(one, grammar=one.grammar.with_root_over_nonterminals()) for one in mixture]
    result = TextScore()
    scored: list[bool] = []
    # Values on a terminal are progress enough.
    with progress("lines scored", _count_lines(file), show=not (per_sentence and sys.stdout.isatty())) as bar:
        values = score_lines(
            mixture, file, result, max_length=max_length, precision=precision, batch_cost=batch_cost,
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
        "checkpoint": " + ".join(str(one.checkpoint) for one in mixture),
        "weights": " + ".join(one.weights for one in mixture),
        "nll": total.nll,
        "words": result.words,
        "pieces": result.pieces,
        "bytes": result.bytes,
        "lines": total.lines,
        "tokens": total.tokens,
        "ppl": total.perplexity,
        "ppl_per_word": result.perplexity_per_word,
        "ppl_per_byte": result.perplexity_per_byte,
        "ppl_words": perplexity_of(total.nll / result.words),
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
        print_json(report)
        return
    out = sys.stderr if per_sentence else sys.stdout
    print_table(report, out)
    if "best_possible_ppl" in report:
        best, own = report["best_possible_ppl"], result.perplexity_per_word  # the source's are words
        line = f"perplexity {own:.3f}, best possible {best:.3f}, ratio {own / best:.4f}"
        print(line, file=out)


@app.command()
def info(
    corpus: Annotated[Path | None, typer.Argument(help="A prepared corpus; default: tell of a checkpoint.")] = None,
    checkpoint: Checkpoint = None,
    as_json: Json = False,
    weights: WeightsOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """What a checkpoint holds and what its grammar is like; or what a prepared corpus holds."""
    if corpus is not None:
        cli_data.info_about(corpus, as_json)
        return
    from lm_pcfg.inference.describe import describe
    from lm_pcfg.inference.model import load_trained

    report = describe(load_trained(checkpoint, weights=weights, device=device))
    show(report, as_json)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN_FOLDER...", help="Such as runs/tiny.")],
    plot: Annotated[Path | None, typer.Option(help="Write the learning curves here, as SVG.")] = None,
    reach: Annotated[float | None, typer.Option(help="Validation perplexity to find the training time of.")] = None,
    as_json: Json = False,
) -> None:
    """Figures and learning curves of runs, from their metrics.jsonl (train ppl: over the last tenth of the steps)."""
    if reach is not None and not 1 <= reach < math.inf:
        raise typer.BadParameter(f"--reach {reach} should be a perplexity: a number of at least 1")
    if plot is not None and plot.suffix != ".svg":
        raise typer.BadParameter(f"--plot {plot}: plots are SVG; give it a name that ends in .svg")
    from lm_pcfg.inference import curve_plot, learning_curves

    runs = learning_curves.read_runs(folders, warn)
    lines = [learning_curves.summary(run, reach) for run in runs]
    if as_json:
        print(json.dumps({"runs": lines}, allow_nan=False))
    else:
        print(learning_curves.table(lines))
    if plot is not None:
        try:
            plot.write_text(curve_plot.draw(runs, reach), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {plot}: {error.strerror}") from None


@app.command()
def search(
    file: Annotated[Path, typer.Argument(help="YAML file with config, common and variants: configs/search/*.yaml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change in every run but where a variant does."),
    ] = None,
    table_only: Annotated[bool, typer.Option("--table", help="Print what there is so far; train nothing.")] = False,
    only: Annotated[str | None, typer.Option(help="Train this variant alone.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Train so many at once, each in a process of its own.")] = 1,
) -> None:
    """Train variants of a config one after another, or several at once; compare them on the validation text."""
    from lm_pcfg import search as searching

    if table_only and only is not None:
        raise typer.BadParameter("--only chooses what to train, and --table trains nothing: choose one")
    ended = table_only or searching.run_search(file, overrides or [], say, warn, only, at_once)
    table = searching.table(file, overrides or [], warn)
    print(table)
    if len(table.splitlines()) == 2:
        say("no run of this search is there yet")
    if not ended:
        say("the search was stopped; the same command continues it")


def _count_lines(file: str) -> int | None:
    """For the progress bar alone; None where one cannot know before reading."""
    path = Path(file)
    if not path.is_file() or path.suffix.lower() in (".gz", ".zst"):
        return None
    with path.open("rb") as handle:
        return sum(block.count(b"\n") for block in iter(lambda: handle.read(1 << 20), b""))


# A process that exits has all others ended by the launcher: it leaves the one with the error this many seconds.
_TIME_TO_SPEAK = 5.0
# One that only lost another waits until the launcher has seen that one's end: its summary names the first.
_TIME_TO_BE_SEEN = 2.0

# What Typer raises for wrong usage: a class of click, or of the copy of it that newer Typers carry.
_WrongUsage: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main() -> None:
    try:
        status = _run()
    except Exception as error:  # a bug: Python shows where
        _tell_launcher(f"{type(error).__name__}: {' '.join(str(error).split())}")
        raise
    sys.exit(status)


def _run() -> int:
    """Exit status 0 success, 1 a failure with one clear line, 2 wrong usage. No traceback for a user's mistake."""
    try:
        status = app(standalone_mode=False) or 0
        if status == 130:  # newer Typers turn Ctrl-C into this
            raise KeyboardInterrupt
        sys.stdout.flush()
    except _WrongUsage as error:
        error.show()
        _tell_launcher(error.format_message())
        status = error.exit_code
    except FailedElsewhere as error:
        time.sleep(_TIME_TO_SPEAK)
        _tell_launcher(str(error))
        status = 1
    except LostContact as error:
        status = _fail(str(error), seconds_after=_TIME_TO_BE_SEEN)
    except UserError as error:
        status = _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        say("lm_pcfg: interrupted")
        status = 130
    except (BrokenPipeError, SystemExit) as error:
        # `lm_pcfg score ... | head`: whoever read has had enough. Typer turns that into an exit of its own.
        closed = isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError)
        status = 0 if closed else getattr(error, "code", 1)
        if closed:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except MemoryError as error:
        reason = f" ({error})" if str(error) else ""
        status = _fail(f"not enough memory; try fewer symbols, smaller batches or a lower maximum length{reason}")
    except RuntimeError as error:
        if not any(sign in str(error) for sign in ("out of memory", "you tried to allocate")):
            raise
        reason = str(error).splitlines()[0]
        status = _fail(f"not enough memory; try fewer symbols, smaller batches or a lower maximum length ({reason})")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        status = _fail(f"cannot write: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to write has nowhere to go
    return status


def _have_met() -> bool:
    """Whether the processes of a run have found each other."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()


def _fail(message: str, seconds_after: float = 0.0) -> int:
    """Of several processes each says which it is. seconds_after: for those that failed first to be noticed first."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    if several and not _have_met() and os.environ.get("LOCAL_RANK", "0") != "0":
        # What is wrong before they meet is wrong with all processes of this host: the first of them says so, and the
        # launcher ends the others. If it does not come to that, they speak, too.
        time.sleep(_TIME_TO_SPEAK)
    say(f"lm_pcfg: error: {_rank()}{message}")
    time.sleep(seconds_after)
    _tell_launcher(message)
    return 1


def _rank() -> str:
    return f"rank {os.environ.get('RANK', '?')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""


def _tell_launcher(message: str) -> None:
    from lm_pcfg.training import launcher

    launcher.tell_failure(f"{_rank()}{message}")
