"""The model and its optimizer as an engine holds them, behind one face: one process and DDP here, DeepSpeed in zero.py.

Whatever the engine, what goes into a checkpoint and comes out of it is whole tensors by parameter name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lm_pcfg.settings import OptimizerSection
from lm_pcfg.training import checkpoint
from lm_pcfg.training.engine import Engine
from lm_pcfg.training.later import read_later
from lm_pcfg.training.optimization import make_optimizer
from lm_pcfg.training.throughput import ReductionClock

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Update:
    """Of one step, over all processes, so that all of them come to the same decision."""

    applied: bool  # False: loss or gradient were not finite, and the weights are as they were
    nll: float
    gradient_norm: float  # before clipping
    recomputed: float


class Learner:
    """One process, or DDP: every process has all weights and all optimizer state."""

    def __init__(self, model: nn.Module, settings: OptimizerSection, engine: Engine):
        self.plain_model, self.engine, self.clip = model, engine, settings.clip
        self.parameters: dict[str, Any] = dict(model.named_parameters())
        self.optimizer: Any = make_optimizer(model, settings)
        # `model` is what the engine wraps: gradients are averaged over the processes there.
        self.model: Any
        self.model, self.optimizer = engine.accelerator.prepare(model, self.optimizer)
        #: One process on a GPU need not agree with anyone, and then nothing in a step makes the host wait for its end.
        self.reads_late = engine.world_size == 1 and not engine.is_deepspeed and engine.device.type == "cuda"
        self._keep_rate_on_device()
        # Under ZeRO 3 parameters have no shape between steps, and take no hook.
        self.reduction = ReductionClock(self.parameters.values() if engine.zero_stage != 3 else [], engine)

    # ---- one step ---------------------------------------------------------------------------------------------------

    def update(
        self,
        through: Tensor,
        nll: Tensor,
        recomputed: float,
        learning_rate: float,
        mark: Callable[[str], None] = lambda part: None,
    ) -> Callable[[], Update]:
        """through: scalar whose backward pass reaches the parameters; nll: of this process's sentences.

        mark: told when a part is over, for benchmarks. Returns a function that says what came of it; where the update
        is decided on the device (`reads_late`) it waits for the device, so the next step may be begun before.
        """
        if self.reads_late:
            return self._update_on_device(through, nll, recomputed, learning_rate, mark)
        update = self._update(through, nll, recomputed, learning_rate, mark)
        return lambda: update

    def _update_on_device(
        self, through: Tensor, nll: Tensor, recomputed: float, learning_rate: float, mark: Callable[[str], None]
    ) -> Callable[[], Update]:
        """The host decides nothing: Adam's kernel itself leaves out an update whose loss or gradient is not finite."""
        self.engine.accelerator.backward(through)
        mark("backward")
        self.set_learning_rate(learning_rate)
        numbers = self.apply_on_device(nll)
        self.optimizer.zero_grad()
        return self.reader(numbers, recomputed)

    def apply_on_device(self, nll: Tensor) -> Tensor:
        """Clip the gradients and update the weights, unless something is not finite: (nll, norm of the gradient)."""
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), self._clip)
        numbers = torch.stack((nll.double(), norm.double()))
        optimizer = self._torch_optimizer()
        optimizer.found_inf = (~numbers.isfinite().all()).float()  # type: ignore[attr-defined]
        optimizer.step()
        return numbers

    @staticmethod
    def reader(numbers: Tensor, recomputed: float) -> Callable[[], Update]:
        """Of what apply_on_device gave; the copy to the host is under way."""
        on_host = read_later(numbers)

        def read() -> Update:
            total_nll, gradient_norm = on_host()
            finite = math.isfinite(total_nll) and math.isfinite(gradient_norm)
            return Update(finite, total_nll, gradient_norm, recomputed)

        return read

    @property
    def _clip(self) -> float:
        return self.clip if self.clip is not None else math.inf

    def _update(
        self, through: Tensor, nll: Tensor, recomputed: float, learning_rate: float, mark: Callable[[str], None]
    ) -> Update:
        accelerator = self.engine.accelerator
        accelerator.backward(through)
        self.reduction.backward_done()
        mark("backward")
        # Of averaged gradients: the same on all processes.
        norm = float(accelerator.clip_grad_norm_(self.parameters.values(), self._clip))
        total_nll, recomputed = self.engine.sums([nll.item(), recomputed])
        finite = math.isfinite(total_nll) and math.isfinite(norm)
        if finite:
            self.set_learning_rate(learning_rate)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return Update(finite, total_nll, norm, recomputed)

    def _keep_rate_on_device(self) -> None:
        """Where the update may be captured in a CUDA graph: what it reads has to be in memory."""
        if self.reads_late:
            for group in self.optimizer.param_groups:
                group |= {"lr": torch.tensor(group["lr"], device=self.engine.device), "capturable": True}

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            rate = learning_rate * group["rate_factor"]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    # ---- weights and optimizer state --------------------------------------------------------------------------------

    def pieces(self) -> Tensors:
        """This process's part of each parameter, flat or whole: the optimizer's own memory, not copies."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def whole(self, pieces: Tensors) -> Tensors:
        """Whole tensors from every process's pieces (the weights', or a moving average of them); all take part."""
        return pieces

    def pieces_of(self, whole: Tensors) -> Tensors:
        """The reverse: what of these whole tensors is this process's part."""
        return whole

    def optimizer_tensors(self) -> Tensors:
        """As checkpoints hold it (checkpoint.optimizer_tensors); all processes take part."""
        return checkpoint.optimizer_tensors(self._torch_optimizer(), self.parameters.items())

    def load(self, weights: Tensors, optimizer: Tensors) -> None:
        """Continue from a checkpoint's tensors."""
        self._load_weights(weights)
        checkpoint.load_optimizer_tensors(self._torch_optimizer(), list(self.parameters.items()), optimizer)

    def _load_weights(self, weights: Tensors) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])

    def _torch_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps it


def make_learner(model: nn.Module, settings: OptimizerSection, engine: Engine) -> Learner:
    if not engine.is_deepspeed:
        return Learner(model, settings, engine)
    from lm_pcfg.training.zero import ZeroLearner  # DeepSpeed takes seconds to import

    return ZeroLearner(model, settings, engine)
