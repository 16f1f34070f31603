"""`lm_pcfg bench ...` measures. Benchmarks of the kernels are passed on to `flash_inside.benchmarks`."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import typer

from lm_pcfg.commands.output import Json, WholeHelp, for_people, show
from lm_pcfg.console import warn

bench = typer.Typer(help="Measure.", cls=WholeHelp, no_args_is_help=True, rich_markup_mode=None)

#: Benchmarks of the kernels, which read their own options: command -> (module of flash_inside.benchmarks, help).
KERNEL_BENCHMARKS = {
    "inside": ("inside", "Time the inside algorithm over a grid of sizes, checked against fp64 first"),
    "kernels": ("kernel_times", "Show which kernels the inside algorithm spends its time in"),
    "extremes": ("extremes", "Check the inside algorithm on very peaked random grammars against fp64"),
    "viterbi": ("viterbi", "Time the best trees, checked against fp64 first"),
    "emission": ("normalizers", "Time the emission's normalisers, checked against fp64 first"),
}


def _kernel_benchmark(module: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        main = import_module(f"flash_inside.benchmarks.{module}").main
        if module != "inside":
            raise typer.Exit(main(context.args))
        from lm_pcfg.bench.plot import draw_kernels

        raise typer.Exit(main(context.args, draw_kernels))

    return run


for _name, (_module, _help) in KERNEL_BENCHMARKS.items():
    bench.command(
        _name,
        help=f"{_help} (--help shows its options).",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )(_kernel_benchmark(_module))


@bench.command(name="step")
def bench_step(
    config: Annotated[Path | None, typer.Option(help="YAML file with the data; default: synthetic text.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change: model.state_dropout=0.5"),
    ] = None,
    nonterminals: Annotated[
        str | None,
        typer.Option(
            help="Numbers of nonterminals; default: the config as it is; without one, 512,2048,4096,8192, or smaller "
            "without a GPU."
        ),
    ] = None,
    sentences: Annotated[
        str | None,
        typer.Option(help="Batch sizes, with commas between them; default: the config's; with --nonterminals 16."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Number of steps to time; default: 100, or 10 without a GPU.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write an SVG here.")] = None,
) -> None:
    """Time a training step and its parts: of a config, or over a grid of grammars and batch sizes.

    With --nonterminals there are twice as many preterminals, and with --sentences a step is one batch, whatever the
    config says.
    """
    sizes = None if nonterminals is None else _numbers("--nonterminals", nonterminals)
    grid = sizes, None if sentences is None else _numbers("--sentences", sentences)
    from lm_pcfg.bench import step

    if not step.main(config, overrides or [], *grid, steps, csv, plot):
        raise typer.Exit(1)


@bench.command(name="ngram")
def bench_ngram(
    train: Annotated[
        str | None,
        typer.Option(metavar="INPUT", help="Training text: a file, a folder or pattern of shards, a prepared corpus."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Instead of --train: the vocabulary (words or pieces) and the training text of this "
            "run; all lines of the text, also those longer than its data.max_length.",
        ),
    ] = None,
    test: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Text to score; default with --checkpoint: the run's validation text."),
    ] = None,
    order: Annotated[int, typer.Option(min=1, max=9, help="Length of the longest n-gram, in words (or pieces).")] = 5,
    vocabulary_size: Annotated[
        int | None, typer.Option(min=1, help="Most word types, as data.vocabulary.size; default: all.")
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(min=1, help="Skip lines of more words (or pieces); default: 250 with --checkpoint, as `score`."),
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Compute the perplexity of a text under a Kneser-Ney n-gram model and a unigram model, on the same tokens.

    Every line also predicts its end, as in `score`. `lm_pcfg glossary` says what the figures mean.
    """
    if (train is None) == (checkpoint is None):
        given = "exclude each other: choose one" if train else "are missing: give a text to train on, or a run"
        raise typer.BadParameter(f"--train and --checkpoint {given}")
    from lm_pcfg.bench import ngram

    if checkpoint is not None:
        if vocabulary_size is not None:
            raise typer.BadParameter("--vocabulary-size goes with --train: a run has a vocabulary of its own")
        report = ngram.compare_with_run(checkpoint, test, order, warn, max_length or ngram.MAX_LENGTH)
        show(report if as_json else for_people(report), as_json)
        return
    if train is None or test is None:
        raise typer.BadParameter("--test is missing: give the text to score")
    report = ngram.compare(train, test, order, vocabulary_size, warn, max_length)
    show(report if as_json else for_people(report), as_json)


def _numbers(option: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 0 < int(part) < 2**30 for part in parts):  # twice as many preterminals
        raise typer.BadParameter(f"{option} {text!r} should be whole numbers from 1 to 2^30, with commas between them")
    return [int(part) for part in parts]


@bench.command(name="scaling")
def bench_scaling(
    config: Annotated[Path | None, typer.Option(help="Config of the model; default: the paper's networks.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change.")] = None,
    nonterminals: Annotated[int, typer.Option(min=1, help="Number of nonterminals if there is no config.")] = 4096,
    words: Annotated[int | None, typer.Option(min=1, help="Vocabulary size; default: the config's, or 10,000.")] = None,
    step_ms: Annotated[float | None, typer.Option(min=0, help="Measured step of 16 sentences on one GPU.")] = None,
    inside_ms: Annotated[float | None, typer.Option(min=0, help="The same for the inside algorithm alone.")] = None,
    sentences: Annotated[int, typer.Option(min=1, help="Sentences of each GPU: the batch grows with the GPUs.")] = 16,
    all_sentences: Annotated[int | None, typer.Option(min=1, help="Sentences of all GPUs: it does not grow.")] = None,
    emission_shards: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks that share the emission's normalisers; default: all, as in training."),
    ] = None,
    spread: Annotated[float, typer.Option(min=0, help="Relative standard deviation of the ranks' inside times.")] = 0.0,
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    within: Annotated[str, typer.Option(help="Link of GPUs in a node: nvlink, pcie.")] = "nvlink",
    between: Annotated[
        str, typer.Option(help="Link of nodes: infiniband, infiniband-hdr, ethernet-100, ethernet-10.")
    ] = "infiniband",
    within_gb: Annotated[float | None, typer.Option(min=0.001, help="GB/s of a GPU in a node instead.")] = None,
    between_gb: Annotated[float | None, typer.Option(min=0.001, help="GB/s of a GPU between nodes instead.")] = None,
    most_gpus: Annotated[int, typer.Option(min=1)] = 1024,
    as_json: Json = False,
) -> None:
    """Predict the efficiency from 1 to 1,024 GPUs, from the time of a step, message sizes and links."""
    from lm_pcfg.bench import scaling

    report = scaling.report(
        scaling.model_and_words(config, overrides or [], nonterminals, words), step_ms=step_ms, inside_ms=inside_ms,
        gpus_per_node=gpus_per_node, within=(within, within_gb), between=(between, between_gb), most_gpus=most_gpus,
        sentences=sentences, all_sentences=all_sentences, emission_shards=emission_shards, spread=spread,
    )  # fmt: skip
    print(json.dumps(report) if as_json else scaling.table(report))


@bench.command(name="data")
def bench_data(
    source: Annotated[
        list[str] | None,
        typer.Argument(metavar="[INPUT]...", help="A prepared corpus or raw shards; default: random text."),
    ] = None,
    lines: Annotated[int, typer.Option(min=1, help="Number of lines of random text, with PTB's lengths.")] = 1_000_000,
    sentencepiece: Annotated[Path | None, typer.Option(help="Model for raw shards; default: their words.")] = None,
    field: Annotated[str, typer.Option(help="Field of JSON lines or Parquet that holds the text.")] = "text",
    by: Annotated[Literal["cost", "sentences"], typer.Option(help="As batch.by.")] = "cost",
    max_length: Annotated[int, typer.Option(min=0, help="As data.max_length; 0: none.")] = 40,
    workers: Annotated[int, typer.Option(min=0, help="As data.workers.")] = 0,
    as_json: Json = False,
) -> None:
    """Stream one epoch through the batcher without a model; tell speed, memory, and how even the batches are."""
    from lm_pcfg.bench.data import measure

    report = measure(
        source or [], lines=lines, sentencepiece=sentencepiece, field=field, by=by, max_length=max_length or None,
        workers=workers,
    )  # fmt: skip
    show(report, as_json)
