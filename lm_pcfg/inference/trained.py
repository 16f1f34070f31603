"""A trained grammar with all that is needed to use it: loading it from a run, and describing it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from lm_pcfg.console import warn
from lm_pcfg.corpus.pieces import AnyVocabulary
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.computation import EXACT
from lm_pcfg.grammar.families import family_of
from lm_pcfg.grammar.likelihood import perplexity
from lm_pcfg.settings import Settings
from lm_pcfg.storage import checkpoint
from lm_pcfg.training.documents import open_settings, open_vocabulary

Weights = Literal["auto", "ema", "raw"]


@dataclass(frozen=True)
class TrainedGrammar:
    grammar: Any  # what its family computes: a Distribution, of simple PCFGs a Grammar
    vocabulary: AnyVocabulary
    settings: Settings
    checkpoint: Path
    state: dict[str, Any]
    weights: str  # "ema" or "raw"
    parameters: int
    fewest_symbols: int  # of a sentence that can have a probability

    def with_root_over_nonterminals(self) -> TrainedGrammar:
        """The same with the paper's root: it chooses nonterminals only, and sentences of one word have no tree."""
        if not hasattr(self.grammar, "with_root_over_nonterminals"):
            raise UserError(f"{self.checkpoint}: a model of family {self.settings.model.family} has no such root")
        return replace(self, grammar=self.grammar.with_root_over_nonterminals(), fewest_symbols=2)


def load_trained(path: Path | None, *, weights: Weights = "auto", device: str = "auto") -> TrainedGrammar:
    """Load a checkpoint or the best one of a run folder; None stands for the newest run under runs/.

    It changes no setting of the process: a command calls `prepare_cpu` itself.
    """
    if weights not in get_args(Weights):
        raise UserError(f"unknown weights {weights!r}: use {', '.join(get_args(Weights))}")
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"unknown device {device!r}: use auto, cpu or cuda")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda was asked for, but PyTorch sees no GPU; use --device cpu")

    def read(folder: Path) -> tuple[checkpoint.Loaded, Settings, AnyVocabulary]:
        loaded = checkpoint.load(folder, with_optimizer=False)
        return loaded, open_settings(folder, warn), open_vocabulary(folder, warn)

    loaded, settings, vocabulary = checkpoint.with_chosen(path, read)
    folder = loaded.folder
    family = family_of(settings.model)
    family.check_memory(settings.model, len(vocabulary), device)
    with torch.random.fork_rng(devices=[]):  # PyTorch's modules draw their first weights from the caller's generator
        model = family.build(settings.model, vocabulary.words, settings.seed)
    try:
        model.load_state_dict(loaded.weights(weights))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{folder} does not fit its settings: {reason[:300]}") from None
    with torch.no_grad():
        grammar = model.to(device)(EXACT)
    if warning := getattr(grammar, "warning", None):
        warn(f"{folder}: {warning}")
    return TrainedGrammar(
        grammar=grammar, vocabulary=vocabulary, settings=settings, checkpoint=folder, state=loaded.state,
        weights="raw" if weights == "raw" or loaded.ema is None else "ema",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        fewest_symbols=family.fewest_symbols(settings.model),
    )  # fmt: skip


def describe(trained: TrainedGrammar) -> dict[str, Any]:
    """What `lm_pcfg info` prints about a checkpoint: where it comes from, its settings, what its grammar is like."""
    state, best = trained.state, trained.state.get("best_nll")
    return {
        "checkpoint": str(trained.checkpoint),
        "weights": trained.weights,
        "step": state["step"],
        "epoch": state.get("epoch"),
        "best_validation_ppl": perplexity(best) if best is not None else None,
        "valid_unknown_share": state.get("valid_unknown_share"),  # beside the perplexity; None: of an earlier version
        "best_step": state.get("best_step"),
        "best_validation_s_f1": state.get("best_s_f1"),
        "vocabulary": len(trained.vocabulary),
        "unit": trained.vocabulary.unit,
        "training_unknown_share": trained.vocabulary.training_unknown_share,
        "vocabulary_hash": trained.vocabulary.hash,
        "parameters": trained.parameters,
        **trained.settings.model.model_dump(mode="json"),
        **{name.removeprefix("grammar/"): value for name, value in trained.grammar.describe(thorough=True).items()},
    }
