"""The commands that measure: `lm_pcfg bench ...`. Arguments only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lm_pcfg import cli_data
from lm_pcfg.cli_output import Json, show
from lm_pcfg.console import warn

bench = typer.Typer(help="Measure.", no_args_is_help=True, rich_markup_mode=None)
bench.command(name="data")(cli_data.bench_data)

_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@bench.command(name="inside", context_settings=_PASSED_ON)
def bench_inside(context: typer.Context) -> None:
    """Time the inside algorithm over a grid of sizes, checked against fp64 first (--help shows its options)."""
    from flash_inside.benchmarks import inside

    raise typer.Exit(inside.main(context.args))


@bench.command(name="kernels", context_settings=_PASSED_ON)
def bench_kernels(context: typer.Context) -> None:
    """What the inside algorithm spends its time in, by kernel (--help shows its options)."""
    from flash_inside.benchmarks import kernel_times

    raise typer.Exit(kernel_times.main(context.args))


@bench.command(name="extremes", context_settings=_PASSED_ON)
def bench_extremes(context: typer.Context) -> None:
    """Check the inside algorithm on very peaked random grammars against fp64 (--help shows its options)."""
    from flash_inside.benchmarks import extremes

    raise typer.Exit(extremes.main(context.args))


@bench.command(name="viterbi", context_settings=_PASSED_ON)
def bench_viterbi(context: typer.Context) -> None:
    """Time the best trees, checked against fp64 first (--help shows its options)."""
    from flash_inside.benchmarks import viterbi

    raise typer.Exit(viterbi.main(context.args))


@bench.command(name="emission", context_settings=_PASSED_ON)
def bench_emission(context: typer.Context) -> None:
    """Time the emission's normalisers, checked against fp64 first (--help shows its options)."""
    from flash_inside.benchmarks import normalizers

    raise typer.Exit(normalizers.main(context.args))


@bench.command(name="step")
def bench_step(
    config: Annotated[Path | None, typer.Option(help="YAML file with the data; default: synthetic text.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change: model.state_dropout=0.5"),
    ] = None,
    nonterminals: Annotated[
        str | None,
        typer.Option(help="Grammars, by their nonterminals; default: 512,2048,4096,8192, or smaller without a GPU."),
    ] = None,
    sentences: Annotated[str, typer.Option(help="Batch sizes.")] = "16",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of each measurement; default: 100, or 10 without a GPU.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write an SVG here.")] = None,
) -> None:
    """Time a training step and its parts over a grid of grammars and batch sizes.

    There are twice as many preterminals as nonterminals, and a step is one batch, whatever the config says.
    """
    sizes = None if nonterminals is None else _numbers("--nonterminals", nonterminals)
    grid = sizes, _numbers("--sentences", sentences)
    from lm_pcfg.training import step_benchmark

    if not step_benchmark.main(config, overrides or [], *grid, steps, csv, plot):
        raise typer.Exit(1)


@bench.command(name="ngram")
def bench_ngram(
    train: Annotated[str, typer.Option(metavar="FILE", help="Training text, one sentence a line.")],
    test: Annotated[str, typer.Option(metavar="FILE", help="Text to score.")],
    order: Annotated[int, typer.Option(min=1, max=9, help="Words of the longest n-gram.")] = 5,
    vocabulary_size: Annotated[
        int | None, typer.Option(min=1, help="Most word types, as data.vocabulary.size; default: all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Perplexity of a text under a Kneser-Ney n-gram model and a unigram model: baselines on the same tokens."""
    from lm_pcfg.baselines import ngram

    report = ngram.compare(train, test, order, vocabulary_size, warn)
    show(report, as_json)


def _numbers(option: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 0 < int(part) < 2**30 for part in parts):  # twice as many preterminals
        raise typer.BadParameter(f"{option} {text!r} should be whole numbers from 1 to 2^30, with commas between them")
    return [int(part) for part in parts]


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
    emission_shards: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks that share the emission's normalisers; default: all, as in training."),
    ] = None,
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
