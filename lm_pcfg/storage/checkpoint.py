"""Checkpoints of a run: complete or absent, checked before use, and free of pickle.

    runs/<name>/checkpoints/step-00001234/   model.safetensors  optimizer.safetensors  [ema.safetensors]  state.json
                                             config.yaml  vocab/
    runs/<name>/best -> checkpoints/step-00001234

A folder named step-N is complete: it was written under a temporary name, fsynced, and renamed. The hashes in state.json
tell if a disk damages it later. It can be used alone: it has its settings and its vocabulary (those of earlier versions
have not, and need the run they are in). Randomness derives from (seed, step, rank), so no generator state is kept.
Optimizer state is kept by parameter name, so a checkpoint opens at any world size and with any engine.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lm_pcfg.console import warn
from lm_pcfg.errors import UserError
from lm_pcfg.storage import durable
from lm_pcfg.storage.hashed_folder import verify_file, write_folder
from lm_pcfg.storage.notes import failure_of
from lm_pcfg.storage.state_file import CheckpointError, read_state

T = TypeVar("T")

MODEL, OPTIMIZER, EMA, STATE = "model.safetensors", "optimizer.safetensors", "ema.safetensors", "state.json"

EXPORTED = "config.json"  # in place of state.json in an exported model
CONFIG, VOCABULARY = "config.yaml", "vocab"  # a file and a folder, in a checkpoint as in a run

_TENSORS = ".safetensors"
_TRIES = 5
_STEP_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Loaded:
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor] | None
    ema: dict[str, Tensor] | None
    state: dict[str, Any]
    folder: Path

    def weights(self, which: Literal["auto", "ema", "raw"] = "auto") -> dict[str, Tensor]:
        """Return the weights to run the model with: averaged if there are such, unless the raw ones are asked for."""
        if which == "ema" and self.ema is None:
            raise CheckpointError(f"{self.folder} holds no averaged weights ({EMA}); use the raw ones")
        if which == "raw" or self.ema is None:
            return self.model
        return {**self.model, **self.ema}  # what is not averaged (buffers) comes from the model


# ---------------------------------------------------------------------------------------------------------- writing


def save(
    run_folder: Path,
    step: int,
    *,
    model: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    ema: dict[str, Tensor] | None,
    state: dict[str, Any],
    documents: Mapping[str, bytes] | None = None,
) -> Path:
    """Write checkpoints/step-N and return it. On any failure nothing changes: earlier checkpoints stay as they were.

    documents: other files by their names, which may have a folder: the settings, the vocabulary.

    `state` must be standard JSON (None rather than NaN); `format`, `files` and `step` are filled in here.
    A step that was saved before is replaced; at every moment either the old or the new one is there.
    """
    checkpoints = run_folder / "checkpoints"
    final = checkpoints / name_of(step)
    tensor_files = {MODEL: model, OPTIMIZER: optimizer} | ({} if ema is None else {EMA: ema})
    if state.get("step", step) != step:
        raise ValueError(f"state is of step {state['step']}, but step {step} is saved")
    try:
        write_folder(final, tensor_files, documents or {}, {**state, "step": step}, state_name=STATE)
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot write checkpoint {final}: {durable.reason(error)}") from error
    return final


# ---------------------------------------------------------------------------------------------------------- reading


def verify(folder: Path, *, only: set[str] | None = None, state_name: str = STATE) -> dict[str, Any]:
    """Check size and hash of every file (of the tensor files: of `only` these) and return the state.

    An error names what is wrong. A checkpoint whose name tells another step than its state is damaged, too: the names
    decide which one is the newest.
    """
    state = read_state(folder / state_name)
    named = _STEP_NAME.fullmatch(folder.name) if state_name == STATE else None
    if named and int(named[1]) != state["step"]:
        raise CheckpointError(
            f"{folder} has another name than it was written with: rename it to {name_of(state['step'])}, its step"
        )
    for name, expected in state["files"].items():
        if only is None or name in only or not name.endswith(_TENSORS):
            verify_file(folder / name, size=expected["size"], sha256=expected["sha256"])
    return state


def load(folder: Path, *, device: str | torch.device = "cpu", with_optimizer: bool, state_name: str = STATE) -> Loaded:
    """Check the files that are wanted and open them; without the optimizer its file may be missing."""
    wanted = {MODEL, EMA} | ({OPTIMIZER} if with_optimizer else set())
    state = verify(folder, only=wanted, state_name=state_name)
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in sorted(wanted & state["files"].keys()):
        try:
            tensors[name] = load_file(folder / name, device=str(device))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / name} cannot be read: {durable.reason(error)}") from error
        except RuntimeError as error:  # that a file cannot be opened, or that the device has no memory left
            if not (folder / name).exists():  # it was deleted a moment ago
                raise CheckpointError(f"{folder / name} is missing") from error
            if "unable to open file" not in str(error):
                raise
            raise CheckpointError(f"{folder / name} cannot be read: {durable.reason(error)}") from error
    for name in wanted - {EMA}:
        if name not in tensors:
            raise CheckpointError(f"{folder / name} is missing: the checkpoint was written without it")
    return Loaded(tensors[MODEL], tensors.get(OPTIMIZER), tensors.get(EMA), state, folder)


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest step first."""
    checkpoints = run_folder / "checkpoints"
    found = []
    try:
        for entry in checkpoints.iterdir() if checkpoints.is_dir() else ():
            match = _STEP_NAME.fullmatch(entry.name)
            if match and entry.is_dir():
                found.append((int(match[1]), entry))
    except OSError as error:
        raise CheckpointError(f"{checkpoints} cannot be read: {durable.reason(error)}") from error
    return [folder for _, folder in sorted(found)]


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint folder."""
    match = _STEP_NAME.fullmatch(checkpoint.name)
    if match is None:
        raise CheckpointError(f"{checkpoint} is no checkpoint folder: its name should be step-N")
    return int(match[1])


def latest(run_folder: Path) -> Path | None:
    return next(reversed(list_checkpoints(run_folder)), None)


def find_resumable(run_folder: Path, warn: Callable[[str], None]) -> Path | None:
    """Find the newest complete checkpoint; None if there is none at all. Damaged ones are named and passed over."""
    if (run_folder / "checkpoints").is_dir():
        with contextlib.suppress(OSError):  # tidying is save's duty; a folder that cannot be written can still be read
            durable.remove_leftovers(run_folder / "checkpoints")
    return newest_whole(run_folder, warn)


def newest_whole(run_folder: Path, warn: Callable[[str], None]) -> Path | None:
    """Do as find_resumable, but without tidying up: the run may be another training's."""
    checkpoints = list_checkpoints(run_folder)
    for folder in reversed(checkpoints):
        try:
            verify(folder)
        except CheckpointError as error:
            warn(f"damaged checkpoint passed over: {error}")
        else:
            return folder
    if checkpoints:
        raise CheckpointError(
            f"none of the {len(checkpoints)} checkpoints in {run_folder / 'checkpoints'} is whole; bring one back from "
            "a copy, or start over with another name=..."
        )
    return None


# --------------------------------------------------------------------------------------------- best, prune, resolve


def point_best(run_folder: Path, checkpoint: Path) -> None:
    """Point the link `best` to this checkpoint: a new link under a temporary name is renamed over the old one."""
    if checkpoint.resolve().parent != (run_folder / "checkpoints").resolve():
        raise ValueError(f"{checkpoint} is no checkpoint of {run_folder}")
    link, new_link = run_folder / "best", durable.temporary_name(run_folder / "best")
    _tell_if_dangling(run_folder, f"it is replaced by {checkpoint.name}")
    try:
        if link.is_dir() and not link.is_symlink():  # a copy made by a tool that follows links, such as scp -r
            durable.delete(link)
        new_link.unlink(missing_ok=True)
        new_link.symlink_to(Path("checkpoints") / checkpoint.resolve().name)
        os.replace(new_link, link)
        durable.fsync(run_folder)
    except OSError as error:
        new_link.unlink(missing_ok=True)
        raise CheckpointError(f"cannot point {link} to {checkpoint.name}: {durable.reason(error)}") from error


def repair_best(run_folder: Path, step: int | None) -> None:
    """Point `best` to the checkpoint of this step: a kill just after it was saved leaves the link behind."""
    for saved in list_checkpoints(run_folder):
        if step_of(saved) == step:
            point_best(run_folder, saved)
            return
    _tell_if_dangling(run_folder, "it stays so until an evaluation is better")


def best(run_folder: Path) -> Path | None:
    """Return the checkpoint that `best` points to; None if it points nowhere, or out of the run."""
    link = run_folder / "best"
    if link.is_symlink():
        target = run_folder / os.readlink(link)
        inside = target.resolve().parent == (run_folder / "checkpoints").resolve()
        return target if inside and target.is_dir() else None
    return link if link.is_dir() else None


def dangling_best(run_folder: Path) -> str | None:
    """Say that `best` leads to no checkpoint of this run; None: it does, or there is none."""
    link = run_folder / "best"
    if not os.path.lexists(link) or best(run_folder) is not None:
        return None
    if not link.is_symlink():
        return f"{link} is a file, neither a link to a checkpoint nor a copy of one"
    return f"{link} points to {os.readlink(link)}, which is no checkpoint of this run"


def _tell_if_dangling(run_folder: Path, consequence: str) -> None:
    if problem := dangling_best(run_folder):
        warn(f"{problem}: {consequence}")


def prune(run_folder: Path, keep_last: int, keep: Iterable[Path] = (), upto: int | None = None) -> None:
    """Delete all but the newest `keep_last` checkpoints, the best one and those in `keep`.

    upto: the step that the run has reached. Later checkpoints are damaged ones, which it passed over when it was
    resumed: they stay, and do not count.
    """
    best_one = best(run_folder)
    protected = {folder.resolve() for folder in [*keep, *([best_one] if best_one else [])]}
    own = [folder for folder in list_checkpoints(run_folder) if upto is None or step_of(folder) <= upto]
    old_ones = own[: -keep_last if keep_last > 0 else None]
    for folder in old_ones:
        if folder.resolve() not in protected:
            try:
                durable.delete(folder)
            except OSError as error:
                raise CheckpointError(f"cannot delete checkpoint {folder}: {durable.reason(error)}") from error


def resolve_checkpoint(
    path: Path | None = None, runs: Path = Path("runs"), named_by: str | None = None
) -> tuple[Path, Path]:
    """Return (run folder, checkpoint folder) to infer with, given a checkpoint, a run (best, else latest) or `best`.

    None takes the run under `runs` whose newest checkpoint was written last. named_by: how the user gives the path, if
    all do so in one way: commands have --checkpoint PATH, or an argument.
    """
    by = f" with {named_by}" if named_by else "" if path else " with --checkpoint"
    ways_out = f"train one with `lm_pcfg train --config configs/tiny.yaml`, or name {'another' if path else 'one'}{by}"
    if path is None:
        folders = [folder for folder in runs.iterdir() if folder.is_dir()] if runs.is_dir() else []
        if not folders:
            raise CheckpointError(f"no run under {runs}/: {ways_out}")
        newest = {run: _identity(checkpoint)[1] for run in folders if (checkpoint := latest(run))}
        if not newest:
            raise CheckpointError(f"no run under {runs}/ has a checkpoint yet: {ways_out}")
        path = max(newest, key=lambda run: newest[run])
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}: name the folder of a run or of a checkpoint{by}")
    if (path / STATE).exists() or _STEP_NAME.fullmatch(path.resolve().name):
        return run_folder_of(path.resolve()), path.resolve()
    if (path / EXPORTED).exists():
        raise CheckpointError(f"{path} is an exported model: it can be used, but not trained further; name its run")
    _tell_if_dangling(path, "the newest is used")
    checkpoint = best(path) or latest(path)
    if checkpoint is not None:
        return path.resolve(), checkpoint.resolve()
    if (failure := failure_of(path)) is not None:
        raise CheckpointError(f"{path} has no checkpoint: it has FAILED ({failure})")
    if (path / "config.yaml").exists() or (path / "checkpoints").is_dir():
        raise CheckpointError(f"{path} has no checkpoint yet: {ways_out}")
    raise CheckpointError(f"{path} is neither a run nor a checkpoint folder: {ways_out}")


def with_chosen(path: Path | None, use: Callable[[Path], T]) -> T:
    """Use the checkpoint that resolve_checkpoint finds; if a training deletes it meanwhile, choose again."""
    for _ in range(_TRIES):
        _, folder = resolve_checkpoint(path)
        before = _identity(folder)
        try:
            return use(folder)
        except (UserError, OSError):
            if _identity(folder) == before:
                raise
    raise CheckpointError(
        f"{path or 'runs/'}: a training replaces its checkpoints faster than they are read; try again"
    )


def _identity(folder: Path) -> tuple[int, float]:
    """Tell a folder from another that takes its name: its inode and time; (0, 0) if there is none."""
    try:
        status = folder.stat()
    except OSError:
        return 0, 0.0
    return status.st_ino, status.st_mtime


def run_folder_of(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint folder belongs to, resolved."""
    checkpoint = checkpoint.resolve()
    if checkpoint.name == "best":  # a real folder, copied by a tool that follows links: it lies in the run itself
        return checkpoint.parent
    return checkpoint.parent.parent
