"""The settings and the vocabulary that a checkpoint carries, hashed like its tensors: scoring and resuming use these.

config.yaml and vocab/ of the run say the same to people. If they differ, that is told, and the checkpoint's count.
Checkpoints of earlier versions carry neither: for them those of the run are all there is.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_pcfg.corpus.pieces import AnyVocabulary, load_vocabulary
from lm_pcfg.errors import UserError
from lm_pcfg.settings import Settings
from lm_pcfg.settings_file import dump_yaml, load_settings
from lm_pcfg.storage import checkpoint, durable
from lm_pcfg.storage.checkpoint import CONFIG, VOCABULARY
from lm_pcfg.storage.run_folder import earlier_configs
from lm_pcfg.storage.state_file import CheckpointError, read_state
from lm_pcfg.yaml_text import parse_yaml

Warn = Callable[[str], None]

_LARGEST_CONFIG = 1 << 20  # bytes; a few kilobytes are usual
_TRIES = 5
_LONGEST_SHOWN = 80  # characters of a setting
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
    if _should_be_there(folder, of_run):
        _tell_difference(of_run, lambda config: difference(settings, config), warn)
    return settings


def _tell_difference(of_run: Path, difference_of: Callable[[Path], str | None], warn: Warn) -> None:
    """Tell that a run's config.yaml says something else, unless the checkpoint is of an earlier stretch of the run."""
    if problem := difference_of(of_run):
        kept = earlier_configs(of_run.parent) if problem.startswith(_OTHER) else []
        if not any(difference_of(earlier) is None for earlier in kept):
            warn(f"{of_run} {problem}; the checkpoint's own is used")


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
    return _named_difference(*(flat(some.model_dump(mode="json")) for some in (settings, there)))


def _named_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key) and key not in _NOT_OF_A_MODEL]
    if not keys:
        return None
    named = [
        f"{_short(key)} is {_short(theirs.get(key))} there, {_short(ours.get(key))} in the checkpoint"
        for key in keys[:_MOST_NAMED]
    ]
    more = f", and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
    return f"{_OTHER}: {', '.join(named)}{more}"


def _short(value: Any) -> str:
    """A setting, or its name, within a line: whoever wrote it."""
    text = str(value)[:_LONGEST_SHOWN] + "..." * (len(str(value)) > _LONGEST_SHOWN)
    return text if text.isprintable() else repr(text)


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


# ---- as they were written, for reports: of any version, and without the tensors ------------------------------------


@dataclass(frozen=True)
class Carried:
    """What a checkpoint carries; the hashes say that it is what was written."""

    folder: Path
    config: bytes
    files: dict[str, dict[str, Any]]  # size and sha256 by name


def newest_carried(run: Path, warn: Warn) -> Carried | None:
    """Find the settings that the newest checkpoint of a run carries; None: no whole one carries any."""
    for _ in range(_TRIES):
        deleted = False
        for folder in reversed(checkpoint.list_checkpoints(run)):
            try:
                files = read_state(folder / checkpoint.STATE)["files"]
                config = _read_config(folder, files[CONFIG]["sha256"]) if CONFIG in files else None
            except CheckpointError as error:
                if folder.exists():
                    warn(f"damaged checkpoint passed over: {error}")
                deleted |= not folder.exists()
            else:
                return None if config is None else Carried(folder, config, files)
        if not deleted:  # by a training, which has saved another
            break
    return None


def _read_config(folder: Path, sha256: str) -> bytes:
    try:
        config = durable.read_file(folder / CONFIG, _LARGEST_CONFIG)
    except OSError as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read: {durable.reason(error)}") from error
    if hashlib.sha256(config).hexdigest() != sha256:
        raise CheckpointError(f"{folder / CONFIG} is damaged: its content does not match its checksum")
    return config


def written_settings(run: Path, carried: Carried | None, warn: Warn) -> dict[str, Any]:
    """Return the settings of a run as they were written; UserError if they cannot be read.

    They are those of the checkpoint: what config.yaml of the run says else is told. Without one they are config.yaml's.
    """
    of_run = run / CONFIG
    if carried is None:
        return _parsed(_read_written(of_run), of_run)
    own = _parsed(carried.config, carried.folder / CONFIG)

    def difference_of(config: Path) -> str | None:
        try:
            content = _read_written(config)
            return None if content == carried.config else _named_difference(flat(own), flat(_parsed(content, config)))
        except UserError as error:
            return f"is missing or damaged ({error})"

    _tell_difference(of_run, difference_of, warn)
    return own


def _read_written(config: Path) -> bytes:
    try:
        return durable.read_file(config, _LARGEST_CONFIG)
    except OSError as error:
        raise UserError(f"{config} cannot be read: {durable.reason(error)}") from None


def _parsed(content: bytes, config: Path) -> dict[str, Any]:
    try:
        settings = parse_yaml(content.decode("utf-8-sig"), str(config))
    except UnicodeDecodeError:
        raise UserError(f"{config} cannot be read: not UTF-8 text") from None
    if not isinstance(settings, dict):
        raise UserError(f"{config} has no settings")
    return {str(name): value for name, value in settings.items()}


def vocabulary_folder(run: Path, carried: Carried | None, warn: Warn) -> Path:
    """Return where the vocabulary of a run is: vocab/, unless it is not what the checkpoint carries, which is told."""
    if carried is None:
        return run / VOCABULARY
    problems = [
        f"{run / name} {problem}"
        for name, entry in carried.files.items()
        if name.startswith(f"{VOCABULARY}/") and (problem := _other_content(run / name, **entry))
    ]
    if not problems:
        return run / VOCABULARY
    try:
        checkpoint.verify(carried.folder, only=set())
    except CheckpointError as error:
        warn(f"{problems[0]}, and {error}")
        return run / VOCABULARY
    warn(f"{problems[0]}; the checkpoint's own is used")
    return carried.folder / VOCABULARY


def _other_content(path: Path, size: int, sha256: str) -> str | None:
    """Say what is wrong with a file that should have this content; None: it has."""
    try:
        with durable.open_regular(path) as file:
            same = os.fstat(file.fileno()).st_size == size and hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError as error:
        return f"is lost or damaged ({durable.reason(error)})"
    return None if same else _OTHER


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
