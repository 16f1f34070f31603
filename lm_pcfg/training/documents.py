"""The settings and the vocabulary that a checkpoint carries, hashed like its tensors: scoring and resuming use these.

config.yaml and vocab/ of the run say the same to people. If they differ, that is told, and the checkpoint's count.
Checkpoints of earlier versions carry neither: for them those of the run are all there is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lm_pcfg.corpus.pieces import AnyVocabulary, load_vocabulary
from lm_pcfg.errors import UserError
from lm_pcfg.settings import Settings
from lm_pcfg.settings_file import dump_yaml, load_settings
from lm_pcfg.storage import checkpoint, durable
from lm_pcfg.storage.checkpoint import CONFIG, VOCABULARY
from lm_pcfg.storage.run_folder import earlier_configs

Warn = Callable[[str], None]

_LARGEST_CONFIG = 1 << 20  # bytes; a few kilobytes are usual
_MOST_NAMED = 4  # settings that a warning lists
_NOT_OF_A_MODEL = ("resume",)  # how the last command was given
_OTHER = "is not what the checkpoint was trained with"


def documents(settings: Settings, vocabulary: AnyVocabulary) -> dict[str, bytes]:
    """Return the files that a checkpoint carries besides its tensors."""
    of_vocabulary = {f"{VOCABULARY}/{name}": content for name, content in vocabulary.files().items()}
    return {CONFIG: dump_yaml(settings).encode(), **of_vocabulary}


def open_settings(folder: Path, warn: Warn) -> Settings:
    """Load the settings that a checkpoint was trained with."""
    of_run = checkpoint.run_folder_of(folder) / CONFIG
    if not _carries(folder, CONFIG):
        if not of_run.exists():
            raise UserError(f"{folder} is not in a run folder: {of_run.parent} has no {CONFIG}; copy the whole run")
        return load_settings(of_run)
    settings = load_settings(folder / CONFIG)
    if _should_be_there(folder, of_run) and (problem := difference(settings, of_run)):
        kept = earlier_configs(of_run.parent) if problem.startswith(_OTHER) else []
        if not any(difference(settings, earlier) is None for earlier in kept):  # then it is of an earlier stretch
            warn(f"{of_run} {problem}; the checkpoint's own is used")
    return settings


def open_vocabulary(folder: Path, warn: Warn) -> AnyVocabulary:
    """Load the vocabulary that a checkpoint was trained with."""
    of_run = checkpoint.run_folder_of(folder) / VOCABULARY
    state = checkpoint.verify(folder, only=set())
    if not _carries(folder, VOCABULARY):
        vocabulary = load_vocabulary(of_run)
        if state.get("vocabulary_hash") != vocabulary.hash:
            raise UserError(f"{folder} was trained with another vocabulary than {of_run} holds")
        return vocabulary
    vocabulary = load_vocabulary(folder / VOCABULARY)
    if _should_be_there(folder, of_run) and (problem := other_vocabulary(folder, of_run)):
        warn(f"{problem}; the checkpoint's own is used")
    return vocabulary


def difference(settings: Settings, config: Path) -> str | None:
    """Say how a config differs from the settings of a checkpoint; None: it does not."""
    try:
        durable.read_file(config, _LARGEST_CONFIG)  # no pipe, no device
        there = load_settings(config)
    except (UserError, OSError) as error:
        return f"is missing or damaged ({durable.reason(error)})"
    ours, theirs = (flat(some.model_dump(mode="json")) for some in (settings, there))
    keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key) and key not in _NOT_OF_A_MODEL]
    if not keys:
        return None
    named = [f"{key} is {theirs.get(key)} there, {ours.get(key)} in the checkpoint" for key in keys[:_MOST_NAMED]]
    more = f", and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
    return f"{_OTHER}: {', '.join(named)}{more}"


def other_vocabulary(folder: Path, of_run: Path) -> str | None:
    """Say that the run's vocab/ is not that of the checkpoint in `folder`; None: it is."""
    try:
        own = {file.name: file.read_bytes() for file in sorted((folder / VOCABULARY).iterdir())}
    except OSError as error:
        raise UserError(f"{folder / VOCABULARY} cannot be read: {durable.reason(error)}") from error
    for name, content in own.items():
        try:
            if durable.read_file(of_run / name, len(content)) != content:
                return f"{of_run / name} is not what the checkpoint was trained with"
        except OSError as error:
            return f"{of_run / name} is lost or damaged ({durable.reason(error)})"
    return None


def _carries(folder: Path, document: str) -> bool:
    names = checkpoint.verify(folder, only=set())["files"]
    return any(f"{name}/".startswith(f"{document}/") for name in names)


def _should_be_there(folder: Path, of_run: Path) -> bool:
    """Whether the checkpoint lies in a run, or was copied out of it and stands alone."""
    return folder.parent.name == "checkpoints" or of_run.exists()


def flat(values: dict[str, Any], section: str = "") -> dict[str, Any]:
    """Settings in sections as settings with dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{section}{name}.") if isinstance(value, dict) else {f"{section}{name}": value}
    return found
