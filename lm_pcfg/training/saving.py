"""Checkpoints written beside the training, copied to memory first, then to disk in a thread; and read again."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm_pcfg.corpus.vocabularies import AnyVocabulary
from lm_pcfg.errors import UserError
from lm_pcfg.training import checkpoint

Tensors = dict[str, Tensor]


class Saver:
    """Of the main process. A write that failed is told by `failure`, and raised by the next `start` or `wait`."""

    def __init__(self, run_folder: Path, keep_last: int):
        self.run_folder, self.keep_last = run_folder, keep_last
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, tensors: dict[str, Tensors | None], state: dict[str, Any], best_steps: list[int]) -> None:
        """tensors: model, optimizer, ema; best_steps: whose checkpoints are kept, the best first.

        Returns once the tensors are copied, after waiting for an earlier write.
        """
        self.wait()
        copies = {name: None if part is None else _copied(part) for name, part in tensors.items()}
        # Not a daemon: the interpreter waits for it, so that a run that ends for another reason still has it.
        self._writing = threading.Thread(target=self._write, args=(copies, state, best_steps), name="checkpoint")
        self._writing.start()

    def wait(self) -> None:
        """Until nothing is being written."""
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
            saved = checkpoint.save(self.run_folder, state["step"], state=state, **copies)
            if best_steps[:1] == [state["step"]]:
                checkpoint.point_best(self.run_folder, saved)
            there = checkpoint.list_checkpoints(self.run_folder)
            best = [folder for folder in there if checkpoint.step_of(folder) in best_steps]
            checkpoint.prune(self.run_folder, self.keep_last, keep=best, upto=state["step"])
        except BaseException as error:  # a bug, too, has to reach the main thread
            self._failure = error


def _copied(tensors: Tensors) -> Tensors:
    """In memory of their own; from a GPU through pinned memory, all at a time."""
    copies = {}
    for name, tensor in tensors.items():
        pinned = tensor.device.type == "cuda"
        copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        copies[name].copy_(tensor.detach(), non_blocking=pinned)
    if any(tensor.device.type == "cuda" for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copies


def load_fitting(
    folder: Path, model: torch.nn.Module, vocabulary: AnyVocabulary, device: torch.device
) -> checkpoint.Loaded:
    """A checkpoint with its optimizer state, refused if it is of another model or another vocabulary."""
    loaded = checkpoint.load(folder, device=device, with_optimizer=True)
    if loaded.state["vocabulary_hash"] != vocabulary.hash:
        raise UserError(f"{folder} was trained with another vocabulary than its run's folder vocab/ holds")
    if mismatch := _mismatch(model, loaded.model):
        raise UserError(f"{folder} does not fit the settings of `model`: {mismatch}")
    return loaded


def _mismatch(model: torch.nn.Module, tensors: dict[str, Tensor]) -> str | None:
    """How the tensors differ from what the model needs, in words."""
    needed = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(needed.keys() | given.keys()):
        if needed.get(name) != given.get(name):
            return f"{name} is {given.get(name, 'missing')} there, but {needed.get(name, 'unknown')} here"
    return None
