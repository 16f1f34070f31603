"""The optimizer, what is scheduled over the steps, and the moving average of the weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lm_pcfg.settings import ModelSection, OptimizerSection, ScheduleSection


def parameter_groups(model: nn.Module, settings: OptimizerSection) -> list[dict[str, Any]]:
    """One group of parameters, or two where the networks' layers learn at another rate than the embeddings."""
    layers = {p for module in model.modules() if isinstance(module, nn.Linear) for p in module.parameters()}
    parameters = list(model.parameters())
    if not layers or settings.network_rate == 1.0:
        return [{"params": parameters, "rate_factor": 1.0}]
    return [
        {"params": [p for p in parameters if p not in layers], "rate_factor": 1.0},
        {"params": [p for p in parameters if p in layers], "rate_factor": settings.network_rate},
    ]


def make_optimizer(model: nn.Module, settings: OptimizerSection) -> torch.optim.Optimizer:
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.name]
    beta1, beta2 = settings.betas
    return kind(
        parameter_groups(model, settings),
        lr=settings.learning_rate,
        betas=(beta1, beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=all(parameter.is_cuda for parameter in model.parameters()),  # one kernel, and nothing on the host
    )


def learning_rate_factor(schedule: ScheduleSection, step: int, total_steps: int) -> float:
    """Factor of the highest learning rate for a step counted from 0: it rises over the warm-up, then falls or stays.

    The last step of a run has about `final_fraction` of the rate; steps beyond total_steps keep it.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    remaining = max(1, total_steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / remaining)
    fall = 1.0 - progress if schedule.kind == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
    return schedule.final_fraction + (1.0 - schedule.final_fraction) * fall


def state_dropout_rate(model: ModelSection, step: int, total_steps: int) -> float:
    """Fraction of the symbols left out at a step counted from 0."""
    if model.state_dropout_until is None:
        return model.state_dropout
    return model.state_dropout * max(0.0, 1.0 - step / (model.state_dropout_until * total_steps))


class MovingAverage:
    """EMA of the weights. Early on the decay is smaller, (1 + n) / (10 + n), so that the start is soon forgotten.

    It averages pieces of the weights where each process has only those (ZeRO 3), without any communication.
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
