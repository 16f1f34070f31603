"""The learning rate over the steps, and the moving average of the weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lm_pcfg.settings import ScheduleSection


def learning_rate_factor(schedule: ScheduleSection, step: int, total_steps: int) -> float:
    """Return the factor of the highest learning rate at a step, from 0: it rises over the warm-up, then falls or stays.

    It falls to about 0 at the last step of a run, and stays there.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    remaining = max(1, total_steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / remaining)
    return 1.0 - progress if schedule.kind == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0


class MovingAverage:
    """EMA of the weights. Early on the decay is smaller, (1 + n) / (10 + n), so that the start is soon forgotten.

    Where each process has only a part of the weights (ZeRO 3) it averages that part, without any communication.
    """

    def __init__(self, weights: dict[str, Tensor], decay: float):
        self.decay = decay
        self.updates = 0
        self.weights = {name: tensor.detach().clone() for name, tensor in weights.items()}

    def update(self, weights: dict[str, Tensor]) -> None:
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        torch._foreach_lerp_(list(self.weights.values()), [weights[name] for name in self.weights], 1.0 - decay)

    def load(self, weights: dict[str, Tensor], updates: int) -> None:
        self.updates = updates
        for name, tensor in self.weights.items():
            tensor.copy_(weights[name])
