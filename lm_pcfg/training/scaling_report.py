"""`lm_pcfg bench scaling`: the scaling model as a table, with everything it takes for granted."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from lm_pcfg.errors import UserError
from lm_pcfg.settings import ModelSection
from lm_pcfg.training import scaling
from lm_pcfg.training.scaling import Machines

H200_MEGABYTES = 141_000


def model_and_words(
    config: Path | None, overrides: list[str], nonterminals: int, words: int | None
) -> tuple[ModelSection, int]:
    if config is None:
        if overrides:
            raise UserError(f"{overrides[0]} changes a config: give one with --config")
        return ModelSection(nonterminals=nonterminals), words or 10_000
    from lm_pcfg.settings_file import load_settings

    settings = load_settings(config, overrides)
    size = words or settings.data.vocabulary.size
    if size is None:
        raise UserError(f"{config} keeps all words: say how many there are with --words")
    return settings.model, size


def report(
    model_and_vocabulary: tuple[ModelSection, int],
    *,
    step_ms: float | None,
    inside_ms: float | None,
    gpus_per_node: int,
    within: tuple[str, float | None],
    between: tuple[str, float | None],
    most_gpus: int,
    **options: Any,
) -> dict[str, Any]:
    model, words = model_and_vocabulary
    step = scaling.step_on_one_gpu(model, words, step_ms=step_ms, inside_ms=inside_ms)
    machines = Machines(gpus_per_node, scaling.link(*within), scaling.link(*between))
    given = step_ms is not None or inside_ms is not None
    measured = "from the time given" if given else "measured on one H200 in bf16 (kernels/README.md)"
    counts = scaling.gpu_counts(most_gpus)
    predictions = [scaling.predict(model, words, step, machines, gpus, **options) for gpus in counts]
    parameters = scaling.parameters(model, words)
    return {
        "parameters": parameters,
        "step_on_one_gpu_ms": asdict(step),
        "message_bytes": {"gradients": 4 * parameters, "normalizers": 4 * model.preterminals},
        "options": options,
        "assumptions": scaling.assumptions(
            model,
            words,
            step,
            machines,
            measured=measured,
            spread=options["spread"],
            emission_shards=options["emission_shards"],
        ),
        "predictions": [asdict(prediction) for prediction in predictions],
        "zero_megabytes_a_gpu": {  # stages 0 (DDP) to 3
            gpus: [scaling.zero_bytes(parameters, gpus, stage) / 1e6 for stage in range(4)]
            for gpus in counts
            if gpus in (8, 1024)
        },
    }


COLUMNS = {  # heading: field, format
    "GPUs": ("gpus", "d"),
    "nodes": ("nodes", "d"),
    "sentences": ("sentences", ",.0f"),
    "compute ms": ("compute_ms", ".2f"),
    "waiting": ("waiting_ms", ".2f"),
    "gradients": ("gradients_ms", ".2f"),
    "normalisers": ("normalizers_ms", ".3f"),
    "scalars": ("scalars_ms", ".3f"),
    "step ms": ("step_ms", ".2f"),
    "words/s": ("words_per_second", ",.0f"),
    "efficiency": ("efficiency", ".1%"),
}


def table(report: dict[str, Any]) -> str:
    predictions = report["predictions"]
    lines = ["assumed:", *(f"- {assumption}" for assumption in report["assumptions"]), ""]
    cells = [[format(p[field], form) for field, form in COLUMNS.values()] for p in predictions]
    widths = [max(map(len, [heading, *column])) for heading, *column in zip(COLUMNS, *cells, strict=True)]
    rows = [list(COLUMNS), *cells]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.append("")
    for limit in (0.9, 0.5):
        kept = [p["gpus"] for p in predictions if p["efficiency"] >= limit]
        lines.append(f"at least {limit:.0%} efficient: up to {kept[-1]:,} GPUs")
    for gpus, sizes in report["zero_megabytes_a_gpu"].items():
        stages = ", ".join(f"ZeRO {stage} {size:,.0f}" for stage, size in enumerate(sizes) if stage)
        lines.append(f"weights, gradients and Adam on {gpus:,} GPUs, MB each: DDP {sizes[0]:,.0f}, {stages}")
    saved = 16 * report["parameters"] / 1e6
    lines.append(f"so ZeRO can save {saved:,.0f} MB at most, {saved / H200_MEGABYTES:.1%} of an H200's memory")
    return "\n".join(lines)
