"""`lm_pcfg evaluate` compares trees with gold trees."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lm_pcfg.commands.output import (
    Checkpoints,
    DeviceOption,
    Json,
    PrecisionOption,
    ThreadsOption,
    WeightsOption,
    print_json,
)
from lm_pcfg.console import progress, warn

LABELS_SHOWN = 12


def evaluate(
    trees: Annotated[
        str, typer.Argument(help="Gold trees in Penn brackets, - (standard input), or embedded:test.trees.")
    ],
    checkpoint: Checkpoints = None,
    predicted: Annotated[
        Path | None, typer.Option(help="Compare the bracketed trees of this file, in the order of the gold trees.")
    ] = None,
    method: Annotated[
        Literal["mbr", "viterbi"], typer.Option(help="The tree with the most right spans, or the most probable one.")
    ] = "mbr",
    punctuation: Annotated[
        str, typer.Option(help="Words to leave out, by tag: penn (, . : `` '' -LRB- -RRB-), keep, or TAG,TAG.")
    ] = "penn",
    lowercase: Annotated[bool, typer.Option(help="Lower-case the words before the model reads them.")] = False,
    fold_numbers: Annotated[bool, typer.Option(help="Numbers become N before the model reads them.")] = False,
    as_json: Json = False,
    precision: PrecisionOption = "fp32",
    weights: WeightsOption = "auto",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Compare trees with gold trees: S-F1, recall by label, F1 by length, beside baselines on the same file.

    `lm_pcfg glossary` says what the figures mean. Processes of `accelerate launch -m lm_pcfg evaluate` share the work.
    """
    if predicted is not None and checkpoint:
        raise typer.BadParameter("--predicted and --checkpoint exclude each other: choose one")
    from lm_pcfg.distributed.sharing import shared_work
    from lm_pcfg.inference.evaluate import evaluate_model, evaluate_predictions, load_gold

    reading: dict[str, Any] = {"punctuation": punctuation, "lowercase": lowercase, "fold_numbers": fold_numbers}
    with shared_work() as ranks:
        gold = ranks.on_main(lambda: load_gold(trees, **reading))
        if predicted is not None:
            report = ranks.on_main(lambda: evaluate_predictions(str(predicted), gold))
        else:
            from lm_pcfg.inference.model import load_model

            loading: dict[str, Any] = {"weights": weights, "device": device, "prepare": True, "threads": threads}
            model = load_model(checkpoint or (), **loading, ranks=ranks)
            model.precision = precision
            with progress("sentences parsed", len(gold.compared)) as bar:
                report = evaluate_model(
                    model, gold, method=method, warn=lambda message: bar.message(f"warning: {message}"),
                    on_lines=bar.advance,
                )  # fmt: skip
        if not ranks.is_main:
            return
        if as_json:
            print_json(report)
        else:
            print("\n".join(tables(report)))
        if report["unknown_share"] > 0.2 if "unknown_share" in report else False:
            warn("more than a fifth of the words are unknown: try --lowercase, --fold-numbers or another --punctuation")


def tables(report: dict[str, Any]) -> list[str]:
    """Return the report for people, a line each."""

    def figure(value: float | None) -> str:
        return f"{value:8.2f}" if value is not None else "       -"

    lines = [f"{'':<16}    S-F1  corpus F1"]
    own = "predicted" if "predicted_file" in report else "these trees"
    rows = [(own, report), *report["baselines"].items()]
    lines += [f"{name:<16}{figure(row['s_f1'])}   {figure(row['corpus_f1'])}" for name, row in rows]
    lines += ["", f"{'label':<16}  recall      spans"]
    lines += [
        f"{row['label']:<16}{figure(row['recall'])}  {row['spans']:>9,}" for row in report["by_label"][:LABELS_SHOWN]
    ]
    lines += ["", f"{'words':<16}    S-F1  sentences"]
    for row in report["by_length"]:
        words = f"{row['shortest']}-{row['longest']}" if row["longest"] else f"{row['shortest']} or more"
        lines.append(f"{words:<16}{figure(row['s_f1'])}  {row['sentences']:>9,}")
    lines += ["", f"{report['sentences']:,} sentences compared, {report['skipped']:,} of less than two words left out"]
    if "ppl" in report:
        about = "at most " if "ppl_is" in report else ""
        ppl = f"perplexity {about}{report['ppl']:.2f}, " if report["ppl"] is not None else ""
        if report["skipped_lines"]:
            ppl += f"without {report['skipped_lines']:,} sentences of probability 0, "
        literal = f", {report['literal_unknown']:,} <unk> in the text itself" if report["literal_unknown"] else ""
        lines.append(f"{ppl}{report['unknown_words']:,} unknown words ({100 * report['unknown_share']:.2f} %){literal}")
    return lines
