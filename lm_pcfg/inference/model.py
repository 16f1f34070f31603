"""A trained grammar with all that is needed to use it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lm_pcfg.corpus.vocabularies import AnyVocabulary, load_vocabulary
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.boundary import Grammar
from lm_pcfg.grammar.build import build_model, check_that_it_fits
from lm_pcfg.processor import prepare_cpu
from lm_pcfg.settings import Settings
from lm_pcfg.settings_file import load_settings
from lm_pcfg.training import checkpoint

Weights = Literal["auto", "ema", "raw"]


@dataclass(frozen=True)
class TrainedGrammar:
    grammar: Grammar
    vocabulary: AnyVocabulary
    settings: Settings
    checkpoint: Path
    state: dict[str, Any]
    weights: str  # "ema" or "raw"
    parameters: int


def load_trained(path: Path | None, *, weights: Weights = "auto", device: str = "auto") -> TrainedGrammar:
    """path: a checkpoint or run folder; None: the best checkpoint of the newest run under runs/."""
    prepare_cpu()
    run_folder, folder = checkpoint.resolve_checkpoint(path)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda was asked for, but PyTorch sees no GPU; use --device cpu")
    loaded = checkpoint.load(folder, with_optimizer=False)
    if not (run_folder / "config.yaml").exists():
        raise UserError(f"{folder} is not in a run folder: {run_folder} has no config.yaml; copy the whole run")
    settings = load_settings(run_folder / "config.yaml")
    vocabulary = load_vocabulary(run_folder / "vocab")
    if loaded.state["vocabulary_hash"] != vocabulary.hash:
        raise UserError(f"{folder} was trained with another vocabulary than {run_folder / 'vocab'} holds")
    check_that_it_fits(settings.model, len(vocabulary), device)
    model = build_model(settings.model, vocabulary.words, settings.seed)
    try:
        model.load_state_dict(loaded.weights(weights))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{folder} does not fit {run_folder / 'config.yaml'}: {reason[:300]}") from None
    with torch.no_grad():
        grammar = model.to(device)(None)
    return TrainedGrammar(
        grammar=grammar,
        vocabulary=vocabulary,
        settings=settings,
        checkpoint=folder,
        state=loaded.state,
        weights="raw" if weights == "raw" or loaded.ema is None else "ema",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
