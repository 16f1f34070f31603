"""An exported model: a folder in the layout of the Hugging Face hub, complete or absent, checked before use.

    FOLDER/  model.safetensors  config.json  config.yaml  vocab/  README.md  MLmodel

config.json is to an export what state.json is to a checkpoint: it has the hashes of the other files, and its own.
README.md (the model card) and MLmodel (by which MLflow opens the folder) have no hashes: people and MLflow change them.
Nothing here is code or pickle, and names of files cannot leave the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from lm_pcfg.errors import UserError
from lm_pcfg.storage import checkpoint, durable, hashed_folder
from lm_pcfg.storage.checkpoint import CONFIG, MODEL, OPTIMIZER, STATE, VOCABULARY, Loaded
from lm_pcfg.storage.state_file import read_state

DESCRIPTION = checkpoint.EXPORTED
CARD, MLMODEL = "README.md", "MLmodel"
KIND = "lm_pcfg"  # `model_type` in config.json
#: How the model is stored: its networks' weights, or the tensors of a grammar that has no networks (a pruned one).
FORMS = ("networks", "grammar")
WEIGHTS = ("ema", "raw")
#: The files that config.json may name; the vocabulary is of words or of pieces.
HASHED = (MODEL, CONFIG, *(f"{VOCABULARY}/{name}" for name in ("words.txt", "pieces.model", "vocabulary.json")))
FILES = (DESCRIPTION, *HASHED, CARD, MLMODEL)
_MOST_BYTES = 1 << 24  # of config.json; a few kilobytes are usual


def is_export(folder: Path) -> bool:
    """Whether a folder looks like an export, perhaps a damaged one: `load` says what is wrong with it."""
    of_a_run = (STATE, OPTIMIZER, "checkpoints", "metrics.jsonl")
    has_its_files = any((folder / name).exists() for name in (DESCRIPTION, MODEL))
    return has_its_files and not any((folder / name).exists() for name in of_a_run)


def load(folder: Path) -> Loaded:
    """Check all files and open the tensors; an error names what is damaged."""
    verify(folder)
    return checkpoint.load(folder, with_optimizer=False, state_name=DESCRIPTION)


def verify(folder: Path) -> dict[str, Any]:
    """Check size and hash of every file and return config.json."""
    describe(folder)
    return checkpoint.verify(folder, state_name=DESCRIPTION)


def describe(folder: Path) -> dict[str, Any]:
    """Return config.json, whole and with no names but those of an export's files, which are not looked at."""
    kind = _kind(folder)
    if kind is not None and kind != KIND:
        shown = repr(kind)[:40]
        raise UserError(f"{folder} has a model of type {shown}: lm_pcfg opens what `lm_pcfg export` has written")
    state = read_state(folder / DESCRIPTION)
    if unknown := sorted(set(state["files"]) - set(HASHED)):
        raise UserError(f"{folder / DESCRIPTION} names {unknown[0]}, which no export has; export the model again")
    if state.get("form") not in FORMS or state.get("weights") not in WEIGHTS:
        raise UserError(f"{folder / DESCRIPTION} does not say how the model is stored; export it again")
    return state


def save(
    folder: Path, tensors: dict[str, Tensor], documents: Mapping[str, bytes], description: dict[str, Any],
    others: Mapping[str, bytes],
) -> None:  # fmt: skip
    """Write an export; one that was there is replaced, and on any failure stays as it was.

    documents  settings and vocabulary, which get hashes; others: model card and MLmodel, which do not
    """
    check_free(folder)
    description = {"model_type": KIND, **description}
    try:
        hashed_folder.write_folder(
            folder.resolve(), {MODEL: tensors}, documents, description, state_name=DESCRIPTION, unhashed=others
        )
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        raise UserError(f"cannot write {folder}: {durable.reason(error)}") from error


def check_name(folder: Path) -> None:
    """Refuse a name that is no UTF-8: the model card and commands have it."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(f"{str(folder)!r} is no UTF-8, and the model card has this name; name another folder") from None


def check_free(folder: Path) -> None:
    """Refuse a place where something else is: only a new or empty folder, or an earlier export, is written to."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file: name a new folder to export to")
    try:
        there = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {durable.reason(error)}") from error
    if not there and not any(folder.iterdir()):
        return
    others = [name for name in there if name not in FILES]
    if _kind(folder) != KIND or others:
        what = f"has {others[0]}" if others else "is no export"
        raise UserError(f"{folder} {what}: an export replaces an earlier export only; name a new folder")


def _kind(folder: Path) -> Any:
    """Return `model_type` of config.json; None if it cannot be read."""
    try:
        content = json.loads(durable.read_file(folder / DESCRIPTION, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return content.get("model_type", "unknown") if isinstance(content, dict) else None
