"""`lm_pcfg score` computes the perplexity of a text."""

from __future__ import annotations

import sys
from inspect import signature
from typing import Annotated, Any, Literal, TextIO

import typer

from lm_pcfg.commands.output import (
    Checkpoints,
    DeviceOption,
    Json,
    MixOption,
    PrecisionOption,
    ThreadsOption,
    WeightsOption,
    for_people,
    print_json,
    print_table,
)
from lm_pcfg.console import progress, warn


def score(
    file: Annotated[str, typer.Argument(help="Text with one sentence a line, - (standard input), or embedded:test.")],
    checkpoint: Checkpoints = None,
    mix: MixOption = "sentences",
    per_sentence: Annotated[bool, typer.Option(help="Print the natural log-probability of every line.")] = False,
    as_json: Json = False,
    max_length: Annotated[int, typer.Option(min=1, help="Skip lines of more words (or pieces).")] = 250,
    precision: PrecisionOption = "fp32",
    root: Annotated[
        Literal["trained", "nonterminals"],
        typer.Option(help="nonterminals: renormalise to the paper's root, which skips one-word lines."),
    ] = "trained",
    weights: WeightsOption = "auto",
    device: DeviceOption = "auto",
    samples: Annotated[
        int | None, typer.Option(min=1, help="Of compound models: latent vectors drawn for each line (default: 4).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of compound models: the same seed draws the same vectors.")] = 0,
    batch_cost: Annotated[int, typer.Option(min=1, help="Size of a batch: the sum of its lengths squared.")] = 25_600,
    track: Annotated[bool, typer.Option(help="Log the figures to the run's MLflow run, if it has one.")] = True,
    threads: ThreadsOption = None,
) -> None:
    """Compute the perplexity of a text, or the log-probability of each of its lines.

    `lm_pcfg glossary` says what the figures mean. Processes of `accelerate launch -m lm_pcfg score` share the work.
    """
    if per_sentence and as_json:
        raise typer.BadParameter("--per-sentence and --json exclude each other: choose one")
    from lm_pcfg.corpus.text import check_there
    from lm_pcfg.distributed.sharing import shared_work
    from lm_pcfg.inference.bounds import bounds_wanted
    from lm_pcfg.inference.lines import count_lines
    from lm_pcfg.inference.model import load_model
    from lm_pcfg.inference.score import TextScore, score_lines, score_report
    from lm_pcfg.storage.checkpoint import run_folder_of
    from lm_pcfg.storage.exported import is_export
    from lm_pcfg.training.tracked_scores import score_log, score_name

    with shared_work() as ranks:
        ranks.on_main(lambda: check_there(file))
        loading: dict[str, Any] = {"weights": weights, "device": device, "prepare": True, "threads": threads}
        mixture = load_model(checkpoint or (), **loading, ranks=ranks).grammars
        if root == "nonterminals":
            mixture = tuple(one.with_root_over_nonterminals() for one in mixture)
        result = TextScore(bounds=bounds_wanted(mixture, samples, seed))
        own = mixture[0].checkpoint
        given = {"root": root, "weights": weights, "precision": precision, "max_length": max_length, "samples": samples}
        drawn = {"seed": seed} if result.bounds is not None else {}
        given |= drawn
        usual = signature(score).parameters
        how = {option: value for option, value in given.items() if value != usual[option].default}
        # An export inside a run is another model than the run's.
        with score_log(run_folder_of(own), track and len(mixture) == 1 and not is_export(own)) as log:
            total = count_lines(file) if ranks.is_main else None
            # Values on a terminal are progress enough.
            with progress("lines scored", total, show=not (per_sentence and sys.stdout.isatty())) as bar:
                values = score_lines(
                    mixture, file, result, max_length=max_length, precision=precision, batch_cost=batch_cost,
                    mix=mix, warn=lambda message: bar.message(f"warning: {message}"), on_lines=bar.advance, ranks=ranks,
                )  # fmt: skip
                for value in values:
                    if per_sentence and ranks.is_main:
                        print("" if value is None else f"{value:.9g}")
            if not ranks.is_main:
                return
            report = score_report(mixture, file, result, precision, mix)
            if as_json:
                print_json(report)
            else:
                print_report(report, result.bounds is not None, sys.stderr if per_sentence else sys.stdout)
            if log is not None:
                sys.stdout.flush()  # the result does not wait for MLflow
                of_text = {"text_hash": result.digest.hexdigest(), **drawn}
                log.send(score_name(file, **how), mixture[0].state["step"], report | of_text, warn)


def print_report(report: dict[str, Any], is_bound: bool, out: TextIO) -> None:
    """Print the figures for people, and beside the best possible ones where these are known."""
    print_table(for_people(report), out)
    if is_bound:
        print(bounds_for_people(report), file=out)
    if "best_possible_ppl" in report:
        best, own = report["best_possible_ppl"], report["ppl_per_word"]  # the embedded corpus is made of words
        bound = "at most " if is_bound else "at least " if report["ppl_per_word_is_lower_bound"] else ""
        print(f"perplexity {bound}{own:.3f}, best possible {best:.3f}, ratio {bound}{own / best:.4f}", file=out)


def bounds_for_people(report: dict[str, Any]) -> str:
    """Say what the figures of a compound model are."""

    def figure(name: str) -> str:
        bound, error = report[f"ppl_at_most_{name}"], report[f"ppl_at_most_{name}_se"]
        return f"{bound:.3f} (standard error {'-' if error is None else f'{error:.3f}'})"

    samples = f"{report['samples']} {'sample' if report['samples'] == 1 else 'samples'}"
    return (
        f"perplexity at most {figure('elbo')} by the evidence lower bound, at most {figure('importance_weighted')} by "
        f"the importance-weighted bound: estimates of upper bounds, {samples} a line"
    )
