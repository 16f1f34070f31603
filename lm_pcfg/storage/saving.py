"""Checkpoints are saved while training goes on: tensors are copied to memory, and a thread writes them to disk."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm_pcfg.errors import UserError
from lm_pcfg.storage import checkpoint, run_folder
from lm_pcfg.storage.metrics_file import MetricsFile

Tensors = dict[str, Tensor]


class Saver:
    """Writes checkpoints on the main process. `failed`: a write failed, and the next `start` or `wait` raises it."""

    def __init__(self, run_folder: Path, keep_last: int, documents: Mapping[str, bytes], metrics: MetricsFile):
        """documents: what every checkpoint carries besides tensors: the settings, the vocabulary.

        metrics: the lines so far are durable before a checkpoint that counts them.
        """
        self.run_folder, self.keep_last, self.documents, self.metrics = run_folder, keep_last, documents, metrics
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, tensors: dict[str, Tensors | None], state: dict[str, Any], best_steps: list[int]) -> None:
        """Wait for an earlier write, copy the tensors, and start to write them.

        tensors: model, optimizer, ema; best_steps: the steps whose checkpoints are kept, the best first.
        """
        self.wait()
        state = {**state, "metrics": self.metrics.mark()}
        copies = {name: None if part is None else _copied(part) for name, part in tensors.items()}
        # Not a daemon: the interpreter waits for it, so that a run that ends for another reason still has it.
        self._writing = threading.Thread(target=self._write, args=(copies, state, best_steps), name="checkpoint")
        self._writing.start()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def failed(self) -> bool:
        return self._failure is not None

    def _write(self, copies: dict[str, Any], state: dict[str, Any], best_steps: list[int]) -> None:
        try:
            self.metrics.sync()
            saved = checkpoint.save(self.run_folder, state["step"], state=state, documents=self.documents, **copies)
            if best_steps[:1] == [state["step"]]:
                checkpoint.point_best(self.run_folder, saved)
            tidy(self.run_folder, saved, self.keep_last, best_steps)
        except BaseException as error:  # a bug, too, has to reach the main thread
            self._failure = error


def tidy(run: Path, saved: Path, keep_last: int, best_steps: list[int]) -> None:
    """Note which checkpoint was saved last, and delete old ones. A resumed run does so: a kill may have come before."""
    run_folder.remember_checkpoint(run, saved)
    best = [folder for folder in checkpoint.list_checkpoints(run) if checkpoint.step_of(folder) in best_steps]
    checkpoint.prune(run, keep_last, keep=best, upto=checkpoint.step_of(saved))


def _copied(tensors: Tensors) -> Tensors:
    """Copy tensors to the host's memory; from a GPU to pinned memory, all at once."""
    copies = {}
    for name, tensor in tensors.items():
        pinned = tensor.device.type == "cuda"
        copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        copies[name].copy_(tensor.detach(), non_blocking=pinned)
    if any(tensor.device.type == "cuda" for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copies


def load_fitting(folder: Path, model: torch.nn.Module, vocabulary_hash: str, device: torch.device) -> checkpoint.Loaded:
    """Load a checkpoint with its optimizer state; refuse that of another model or another vocabulary."""
    loaded = checkpoint.load(folder, device=device, with_optimizer=True)
    if missing := [name for name in ("window", "data") if loaded.state.get(name) is None]:
        raise UserError(f"{folder / checkpoint.STATE} does not say where the training stood: no {missing[0]!r} in it")
    if loaded.state.get("vocabulary_hash") != vocabulary_hash:
        raise UserError(f"{folder} was trained with another vocabulary than this run has")
    if mismatch := _mismatch(model, loaded.model):
        way_out = "continue with those of its config.yaml, or start another run with name=..."
        raise UserError(f"{folder} does not fit the settings of `model`: {mismatch}; {way_out}")
    return loaded


def _mismatch(model: torch.nn.Module, tensors: dict[str, Tensor]) -> str | None:
    """Say in words how the tensors differ from what the model needs."""
    needed = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(needed.keys() | given.keys()):
        if needed.get(name) != given.get(name):
            return f"{name} is {given.get(name, 'missing')} there, but {needed.get(name, 'unknown')} here"
    return None
