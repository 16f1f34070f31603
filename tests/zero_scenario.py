"""What test_zero.py runs, one process: python zero_scenario.py FOLDER. Weights of every way to train are left there."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from graph_emulation import capturing
from lm_pcfg.grammar.boundary import Grammar
from lm_pcfg.settings_file import load_settings
from lm_pcfg.training import captured
from lm_pcfg.training.engine import Engine
from lm_pcfg.training.loop import Trainer

STEPS, BROKEN = 8, (2, 5)  # of those, counted from 0, the loss and the gradient are not finite
LARGE, SMALL = 10**8, 50  # buckets: of DeepSpeed's own reduction there is need with the small ones alone
TWO_RATES = ["optimizer.network_rate=0.1"]


class Launches(TorchDispatchMode):
    """What would be a kernel on a GPU, and what would make the host wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.waits = 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.overloadpacket.__name__
        if name == "_local_scalar_dense":
            self.waits += 1
        elif not (function.is_view or name.startswith(("empty", "detach"))):
            self.launches += 1
        return function(*arguments, **(keywords or {}))


@contextmanager
def spoilt(spoil) -> Iterator[None]:
    original = Grammar.log_likelihood_unchecked

    def log_likelihood(*arguments, **options):
        log_z, trusted = original(*arguments, **options)
        return spoil(log_z), trusted

    with patch.object(Grammar, "log_likelihood_unchecked", log_likelihood):
        yield


def spoilt_gradient(log_z: torch.Tensor) -> torch.Tensor:
    log_z = log_z * 1.0
    log_z.register_hook(lambda gradient: gradient * math.inf)
    return log_z


def use(stage: int, bucket: int, folder: Path) -> None:
    AcceleratorState._reset_state(True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(stage > 0).lower()
    if stage:
        zero = {"stage": stage, "reduce_bucket_size": bucket}
        file = folder / "deepspeed.json"
        file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}))
        os.environ |= {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file), "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)}


def emulate_graphs(trainer: Trainer) -> None:
    trainer.captures = True
    optimizer = getattr(trainer.learner, "zero", trainer.learner._torch_optimizer())
    optimizer = getattr(optimizer, "optimizer", optimizer)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])

    def state() -> list[torch.Tensor]:
        weights = [parameter.data for group in optimizer.param_groups for parameter in group["params"]]
        moments = [tensor for values in optimizer.state.values() for tensor in values.values()]
        return [*weights, *moments, *(parameter.data for parameter in trainer.learner.parameters.values())]

    captured.capture = capturing(state)
    captured._send = lambda values, to: [target.copy_(value) for value, target in zip(values, to, strict=True)]
    torch.cuda.empty_cache = lambda: None


def train(
    folder: Path, name: str, stage: int, bucket: int, late: bool, graphs: bool = False, overrides: Sequence[str] = ()
) -> None:
    """late: as one process on a GPU, where Adam's kernel decides. The parts after the backward pass are counted."""
    use(stage, bucket, folder)
    settings = load_settings(folder / "small.yaml", [f"name={name}", *overrides])
    trainer = Trainer(settings, Engine(settings), None)
    learner = trainer.learner
    learner.reads_late = late
    counts = Launches()
    if graphs:
        emulate_graphs(trainer)
    elif late:
        original = learner.apply_on_device

        def counted(nll: torch.Tensor) -> torch.Tensor:
            counts.launches = 0
            with counts:
                return original(nll)

        learner.apply_on_device = counted
    for step in range(STEPS):
        spoil = {BROKEN[0]: lambda log_z: log_z * math.nan, BROKEN[1]: spoilt_gradient}.get(step, lambda log_z: log_z)
        with spoilt(spoil):
            trainer.step(trainer.stream.next_step())
    trainer.settle()
    whole = learner.whole(learner.pieces())
    save_file({key: tensor.contiguous().clone() for key, tensor in whole.items()}, folder / f"{name}.safetensors")
    save_file(learner.optimizer_tensors(), folder / f"{name}-optimizer.safetensors")
    told = {
        "skipped": trainer.position.skipped,
        "norm": trainer.position.window.gradient_norm,
        "one_bucket": getattr(learner, "bucket", None) is not None,
        "launches": counts.launches,
        "waits": counts.waits,
        "captured": trainer._captured is not None,
    }
    (folder / f"{name}.json").write_text(json.dumps(told))


def main(folder: Path) -> None:
    adam = torch.optim.Adam
    torch.optim.Adam = lambda *arguments, **options: adam(*arguments, **(options | {"fused": True}))  # as on a GPU
    train(folder, "plain", 0, 0, late=True)
    train(folder, "plain-rates", 0, 0, late=True, overrides=TWO_RATES)
    for stage in (1, 2, 3):
        train(folder, f"zero{stage}", stage, LARGE, late=False)
        train(folder, f"zero{stage}-late", stage, LARGE, late=True)
        train(folder, f"zero{stage}-deepspeed", stage, SMALL, late=False)
        train(folder, f"zero{stage}-rates", stage, LARGE, late=False, overrides=TWO_RATES)
        if stage < 3:
            train(folder, f"zero{stage}-graphs", stage, LARGE, late=True, graphs=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
