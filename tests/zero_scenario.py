"""What test_zero.py runs, one process: python zero_scenario.py FOLDER [STAGE]... Weights of all ways are left there."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import save_file

from lm_pcfg.distributed.engine import Engine
from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.settings_file import load_settings
from lm_pcfg.training.steps import Steps

STEPS, BROKEN = 8, (2, 5)  # of those, counted from 0, the loss alone and the gradient alone are not finite
LARGE, SMALL = 10**8, 50  # numbers in a bucket: all parameters, or less than some


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


def train(folder: Path, name: str, stage: int, bucket: int) -> None:
    use(stage, bucket, folder)
    settings = load_settings(folder / "small.yaml", [f"name={name}"])
    trainer = Steps(settings, Engine(settings))
    learner = trainer.learner
    for step in range(STEPS):
        spoil = {BROKEN[0]: lambda log_z: log_z + math.nan, BROKEN[1]: spoilt_gradient}.get(step, lambda log_z: log_z)
        with spoilt(spoil):
            trainer.step(trainer.stream.next_step())
    weights = learner.gathered(learner.local_weights())
    save_file({key: tensor.contiguous().clone() for key, tensor in weights.items()}, folder / f"{name}.safetensors")
    save_file(learner.optimizer_tensors(), folder / f"{name}-optimizer.safetensors")
    told = {"skipped": trainer.position.skipped, "norm": trainer.position.window.gradient_norm}
    (folder / f"{name}.json").write_text(json.dumps(told))


def main(folder: Path, stages: list[int]) -> None:
    adam = torch.optim.Adam
    torch.optim.Adam = lambda *arguments, **options: adam(*arguments, **(options | {"fused": True}))  # as on a GPU
    train(folder, "plain", 0, 0)
    for stage in stages or (1, 2, 3):
        train(folder, f"zero{stage}", stage, LARGE)
        train(folder, f"zero{stage}-buckets", stage, SMALL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(stage) for stage in sys.argv[2:]])
