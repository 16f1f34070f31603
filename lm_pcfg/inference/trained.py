"""A trained grammar with all that is needed to use it: loading it from a run, and describing it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lm_pcfg.console import warn
from lm_pcfg.corpus.pieces import AnyVocabulary, load_vocabulary
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.computation import EXACT
from lm_pcfg.grammar.dense import DenseGrammar
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.families import family_of
from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.grammar.likelihood import perplexity
from lm_pcfg.settings import Settings
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint, exported, hub
from lm_pcfg.training.documents import open_settings, open_vocabulary

Weights = Literal["auto", "ema", "raw"]
EMISSION = ("features", "embeddings", "log_normalizers")  # names of its tensors where a grammar is stored


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


@dataclass(frozen=True)
class StoredModel:
    """What is read of a model before anything is computed."""

    tensors: dict[str, Tensor]  # of the module that its family builds; or, of the form "grammar", see `grammar_of`
    settings: Settings
    vocabulary: AnyVocabulary
    folder: Path
    state: dict[str, Any]
    weights: str  # "ema" or "raw"
    form: str = "networks"  # or "grammar": the probabilities themselves, without networks


def load_trained(path: Path | None, *, weights: Weights = "auto", device: str = "auto") -> TrainedGrammar:
    """Load a checkpoint, the best one of a run folder, or an export; None stands for the newest run under runs/.

    It changes no setting of the process: a command calls `prepare_cpu` itself.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"unknown device {device!r}: use auto, cpu or cuda")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda was asked for, but PyTorch sees no GPU; use --device cpu")
    return computed(read_stored(path, weights), device)


def read_stored(path: Path | None, weights: Weights = "auto") -> StoredModel:
    """Read a model and check it by its hashes. Path: as of `load_trained`, or a name on the Hugging Face hub."""
    if weights not in get_args(Weights):
        raise UserError(f"unknown weights {weights!r}: use {', '.join(get_args(Weights))}")
    if path is not None and not path.exists():
        path = hub.local_folder(path)
    if path is not None and exported.is_export(path):
        return _read_export(path, weights)

    def read(folder: Path) -> tuple[checkpoint.Loaded, Settings, AnyVocabulary]:
        loaded = checkpoint.load(folder, with_optimizer=False)
        return loaded, open_settings(folder, warn), open_vocabulary(folder, warn)

    loaded, settings, vocabulary = checkpoint.with_chosen(path, read)
    kind = "raw" if weights == "raw" or loaded.ema is None else "ema"
    return StoredModel(loaded.weights(weights), settings, vocabulary, loaded.folder, loaded.state, kind)


def _read_export(folder: Path, weights: Weights) -> StoredModel:
    loaded = exported.load(folder)
    state = loaded.state
    if weights not in ("auto", state["weights"]):
        raise UserError(f"{folder} was exported with {state['weights']} weights: it has no others")
    settings, vocabulary = load_settings(folder / checkpoint.CONFIG), load_vocabulary(folder / checkpoint.VOCABULARY)
    if vocabulary.hash != state.get("vocabulary_hash"):
        raise UserError(f"{folder} has another vocabulary than its model was trained with")
    return StoredModel(loaded.model, settings, vocabulary, folder, state, state["weights"], state["form"])


def computed(stored: StoredModel, device: str) -> TrainedGrammar:
    """Build the model and compute its distribution."""
    settings, vocabulary, folder = stored.settings, stored.vocabulary, stored.folder
    family = family_of(settings.model)
    if stored.form == "grammar":
        grammar = grammar_of(stored, device)
        parameters = sum(tensor.numel() for tensor in stored.tensors.values())
    else:
        family.check_memory(settings.model, len(vocabulary), device)
        with torch.random.fork_rng(devices=[]):  # PyTorch's modules draw first weights from the caller's generator
            model = family.build(settings.model, vocabulary.words, settings.seed)
        try:
            model.load_state_dict(stored.tensors)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{folder} does not fit its settings: {reason[:300]}") from None
        with torch.no_grad():
            grammar = model.to(device)(EXACT)
        parameters = sum(parameter.numel() for parameter in model.parameters())
    if warning := getattr(grammar, "warning", None):
        warn(f"{folder}: {warning}")
    return TrainedGrammar(
        grammar=grammar, vocabulary=vocabulary, settings=settings, checkpoint=folder, state=stored.state,
        weights=stored.weights, parameters=parameters, fewest_symbols=family.fewest_symbols(settings.model),
    )  # fmt: skip


# ---- a grammar that is stored as its probabilities ------------------------------------------------------------------


def grammar_tensors(grammar: Grammar | DenseGrammar) -> dict[str, Tensor]:
    """Return the tensors of a grammar by their names: what the form "grammar" stores."""
    rules = grammar.rules._asdict()
    return {**rules, **dict(zip(EMISSION, grammar.emission.tensors, strict=True))}


def grammar_of(stored: StoredModel, device: str) -> Grammar | DenseGrammar:
    """Make the grammar of such tensors: [N] or [N+P] root, [N, N+P] left and right (or [N, N+P, N+P] pairs), emission.

    Tensors that do not fit together are refused.
    """
    tensors = {name: tensor.to(device) for name, tensor in stored.tensors.items()}
    rules = ("root", "pairs") if "pairs" in tensors else ("root", "left", "right")
    try:
        root, *sides = (tensors.pop(name) for name in rules)
        features, embeddings, normalizers = (tensors.pop(name) for name in EMISSION)
        (p, d), n = features.shape, len(sides[0])
        symbols = [n + p] * (len(sides[0].shape) - 1)
        fits = (
            not tensors and 0 < len(symbols) == 3 - len(sides) and all(side.shape == (n, *symbols) for side in sides)
            and root.shape in ((n,), (n + p,)) and normalizers.shape == (p,)
            and embeddings.shape == (len(stored.vocabulary), d) and root.dtype == torch.float64 and min(n, p, d) > 0
            and {side.dtype for side in sides} <= {torch.float32} and features.dtype == embeddings.dtype
            and features.dtype == normalizers.dtype in (torch.float32, torch.float64)
        )  # fmt: skip
    except (KeyError, ValueError, IndexError, TypeError):
        fits = False
    if not fits:
        raise UserError(f"{stored.folder} has tensors that make no grammar; export the model again")
    emission = Emission(features, embeddings, normalizers, widened=features.dtype == torch.float64)
    if len(sides) == 1:
        return DenseGrammar(root, sides[0], emission)
    left, right = torch.stack(sides).unbind(0)  # views of one tensor, so that products can take both at once
    return Grammar(root, left, right, emission)


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
