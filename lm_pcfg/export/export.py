"""Write a trained model to a folder that can be handed on, perhaps pruned, with figures that are measured here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from lm_pcfg.console import Progress, progress, say
from lm_pcfg.corpus.text import check_there, display_name
from lm_pcfg.corpus.vocabulary import Vocabulary
from lm_pcfg.errors import UserError
from lm_pcfg.export import card
from lm_pcfg.export.card import Figure, Pruning, shown
from lm_pcfg.export.mlflow_model import mlmodel
from lm_pcfg.export.pruning import check_prunable, pruned, uses_of
from lm_pcfg.inference.bounds import bounds_wanted
from lm_pcfg.inference.lines import count_lines
from lm_pcfg.inference.score import TextScore, score_lines, score_report
from lm_pcfg.inference.symbols import load_text
from lm_pcfg.inference.trained import StoredModel, TrainedGrammar, computed, read_stored
from lm_pcfg.settings import Settings, TrackingSection
from lm_pcfg.storage import checkpoint, exported
from lm_pcfg.training.documents import documents

#: What config.json says of the training, and of the evaluation of these weights.
_OF_THE_TRAINING = ("step", "epoch")
_OF_ITS_EVALUATION = ("best_nll", "best_impossible", "best_step", "best_s_f1", "valid_unknown_share")
DEFAULT_LENGTH = 250  # of `lm_pcfg score`, too


@dataclass(frozen=True)
class ExportOptions:
    weights: Literal["auto", "ema", "raw"] = "auto"
    licence: str = "unknown"
    score: Sequence[str] = field(default_factory=tuple)  # texts whose figures go into the card
    prune: str | None = None  # a text: symbols that it hardly uses are left out
    prune_below: float = 1.0  # expected uses in that text
    prune_check: str | None = None  # a second text, for the perplexity before and after
    max_length: int = DEFAULT_LENGTH  # longer lines of texts are left out


def export(path: Path | None, folder: Path, options: ExportOptions) -> dict[str, Any]:
    """Write the model of a run, a checkpoint or an export to a folder; return what was written, in figures."""
    card.check_licence(options.licence)
    exported.check_name(folder)
    exported.check_free(folder)
    files = [file for file in (*options.score, options.prune, options.prune_check) if file is not None]
    for file in files:
        if file == "-":
            raise UserError("an export reads its texts more than once: save standard input to a file first")
        check_there(file)
    stored = read_stored(path, options.weights)
    if exported.is_export(folder) and stored.folder.resolve() == folder.resolve():
        raise UserError(f"{folder} cannot be exported to itself; name a new folder")
    name = shown(folder)
    trained = computed(stored, "cuda" if torch.cuda.is_available() else "cpu")
    pruning = None
    if options.prune is not None:
        stored, trained, pruning = _prune(stored, trained, options, _source(path, stored), name)
    figures = [_scored(trained, file, name, options)[0] for file in options.score]
    description = _description(stored, trained, pruning)
    text = card.model_card(
        name=name, licence=options.licence, description=description, figures=figures, pruning=pruning
    )
    others = {exported.CARD: text.encode(errors="replace"), exported.MLMODEL: mlmodel()}
    of_model = documents(_without_paths(stored.settings), stored.vocabulary)
    exported.save(folder, stored.tensors, of_model, description, others)
    exported.verify(folder)
    return {
        "folder": str(folder),
        "checkpoint": str(stored.folder),
        "family": stored.settings.model.family,
        "form": stored.form,
        "weights": stored.weights,
        "parameters": trained.parameters,
        "bytes": (folder / checkpoint.MODEL).stat().st_size,
        **{f"ppl {shown(one.file)}": one.report["ppl"] for one in figures},
        **(_pruning_report(pruning) if pruning else {}),
    }


def _description(stored: StoredModel, trained: TrainedGrammar, pruning: Pruning | None) -> dict[str, Any]:
    """Return what config.json says."""
    from importlib.metadata import version

    keys = _OF_THE_TRAINING + (_OF_ITS_EVALUATION if _is_the_evaluated(stored) else ())
    return {
        "lm_pcfg_version": version("lm_pcfg"),
        "form": stored.form,
        "weights": stored.weights,
        "model": stored.settings.model.model_dump(mode="json"),
        "vocabulary_size": len(stored.vocabulary),
        "vocabulary_hash": stored.vocabulary.hash,
        "pieces": not isinstance(stored.vocabulary, Vocabulary),
        "unit": stored.vocabulary.unit,
        "parameters": trained.parameters,
        **{key: stored.state[key] for key in keys if stored.state.get(key) is not None},
        **({"pruned": earlier} if (earlier := _earlier_pruning(stored)) else {}),
        **({"pruned": _pruning_report(pruning)} if pruning else {}),
    }


def _is_the_evaluated(stored: StoredModel) -> bool:
    """Whether the best evaluation of the run was of these weights. It takes averaged weights where there are any."""
    evaluated = "raw" if stored.settings.ema.decay is None else "ema"
    return stored.state.get("best_step") == stored.state["step"] and stored.weights == evaluated


def _without_paths(settings: Settings) -> Settings:
    """Keep the machine to ourselves: absolute paths become names, and where the run was kept is left out."""

    def harmless(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: harmless(part) for key, part in value.items()}
        if isinstance(value, list):
            return [harmless(part) for part in value]
        if isinstance(value, str) and Path(value).is_absolute():
            return shown(value) or "text"
        return value

    values = harmless(settings.model_dump(mode="json"))
    changes = {"resume": False, "runs_folder": "runs", "tracking": TrackingSection().model_dump()}
    return type(settings).model_validate(values | changes)


# ---- figures --------------------------------------------------------------------------------------------------------


def _scored(
    trained: TrainedGrammar, file: str, model: str, options: ExportOptions, *more: str
) -> tuple[Figure, bytearray]:
    """Score a text as the command does, which the card names; and tell which lines have a probability."""
    result = TextScore(bounds=bounds_wanted([trained], None, 0))
    with progress(f"lines of {display_name(file)} scored", count_lines(file)) as bar:
        for _ in score_lines(
            [trained], file, result, max_length=options.max_length, warn=_warning(bar), on_lines=bar.advance
        ):
            pass
    report = score_report([trained], file, result)
    length = ("--max-length", str(options.max_length)) if options.max_length != DEFAULT_LENGTH else ()
    return Figure(file, report, model, (*length, *more)), result.is_scored


def _warning(bar: Progress) -> Any:
    return lambda message: bar.message(f"warning: {message}")


# ---- pruning --------------------------------------------------------------------------------------------------------


def _prune(
    stored: StoredModel, trained: TrainedGrammar, options: ExportOptions, source: str, name: str
) -> tuple[StoredModel, TrainedGrammar, Pruning]:
    file, below = options.prune, options.prune_below
    assert file is not None
    if not 0 < below < math.inf:
        raise UserError(f"--prune-below {below:g} should be a number of expected uses above 0")
    grammar = check_prunable(trained)
    with progress(f"lines of {display_name(file)} parsed", count_lines(file)) as bar:
        sentences = load_text(
            trained, file, max_length=options.max_length, warn=_warning(bar), on_lines=lambda lines: bar.advance(lines)
        )
        uses = uses_of(grammar, sentences, lambda lines: bar.advance(lines))
    if not uses.isfinite().all():
        raise UserError("this grammar has probabilities that are not numbers; take an earlier checkpoint")
    smaller = pruned(stored, trained, uses, below)
    after = computed(smaller, str(grammar.root.device))
    weights = ("--weights", options.weights) if options.weights != "auto" else ()
    figures = []
    for text in (file, *([options.prune_check] if options.prune_check else [])):
        was, had = _scored(trained, text, source, options, *weights)
        now, has = _scored(after, text, name, options)
        if lost := sum(before and not still for before, still in zip(had, has, strict=True)):
            those = f"{lost:,} lines of {display_name(text)}"
            raise UserError(f"{those} would have no probability any more; lower --prune-below")
        figures.append((was, now))
    counts = [(one.nonterminals, len(one.emission.features)) for one in (grammar, check_prunable(after))]
    nonterminals, preterminals = zip(*counts, strict=True)
    was_model, is_model = (one.settings.model.model_dump(mode="json") for one in (stored, smaller))
    changes = " ".join(f"model.{key}={value}" for key, value in was_model.items() if is_model[key] != value)
    changes = _earlier_pruning(stored).get("trained_with", changes)
    result = Pruning(file, below, nonterminals, preterminals, changes, figures)
    say(f"pruned: {nonterminals[1]:,} of {nonterminals[0]:,} nonterminals and {preterminals[1]:,} of "
        f"{preterminals[0]:,} preterminals stay")  # fmt: skip
    return smaller, after, result


def _source(path: Path | None, stored: StoredModel) -> str:
    """Name the model that was exported, as it was given."""
    if path is None:
        return f"runs/{checkpoint.run_folder_of(stored.folder).name}"
    return shown(path).replace("hf:/", "hf://")  # Path makes one slash of two


def _earlier_pruning(stored: StoredModel) -> dict[str, Any]:
    """Return what config.json of a pruned export says, if that is what is exported again."""
    earlier = stored.state.get("pruned")
    good = isinstance(earlier, dict) and isinstance(earlier.get("trained_with"), str)
    return earlier if good and earlier is not None else {}


def _pruning_report(pruning: Pruning) -> dict[str, Any]:
    (first_before, first_after), *others = pruning.figures
    report = {
        "prune_file": shown(pruning.file),
        "prune_below": pruning.below,
        "trained_with": pruning.trained_with,
        "nonterminals_before": pruning.nonterminals[0],
        "nonterminals": pruning.nonterminals[1],
        "preterminals_before": pruning.preterminals[0],
        "preterminals": pruning.preterminals[1],
        "prune_ppl_before": first_before.report["ppl"],
        "prune_ppl": first_after.report["ppl"],
    }
    for before, after in others:
        report |= {"prune_check_file": shown(before.file), "prune_check_ppl_before": before.report["ppl"],
                   "prune_check_ppl": after.report["ppl"]}  # fmt: skip
    return report
