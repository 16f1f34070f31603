"""The model and its optimizer, with the same methods under every engine: one process and DDP; DeepSpeed in zero.py.

Checkpoints get and give whole tensors by parameter name, whatever the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flash_inside.devices import copy_to_host
from lm_pcfg.distributed.engine import Engine
from lm_pcfg.distributed.throughput import ReductionClock
from lm_pcfg.settings import OptimizerSection
from lm_pcfg.storage import optimizer_state

Tensors = dict[str, Tensor]
EPSILON = 1e-8  # Adam's: for gradients on the scale of loss.normalise
#: Weights from which on a CPU, too, updates all of them in one pass. It rounds differently than PyTorch's ten passes
#: over each tensor: runs of smaller models can be repeated bit for bit.
FUSED_FROM = 1 << 20


def make_optimizer(model: nn.Module, settings: OptimizerSection) -> torch.optim.Optimizer:
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.name]
    beta1, beta2 = settings.betas
    weights = list(model.parameters())
    on_gpu = all(weight.is_cuda for weight in weights)
    large = sum(weight.numel() for weight in weights) >= FUSED_FROM and all(weight.is_cpu for weight in weights)
    return kind(
        weights,
        lr=settings.learning_rate,
        betas=(beta1, beta2),
        eps=EPSILON,
        weight_decay=settings.weight_decay,
        fused=on_gpu or large,  # one kernel, and nothing on the host
    )


@dataclass(frozen=True)
class Update:
    """What came of one step, summed over all processes: all of them make the same decision."""

    nll: float
    recomputed: float
    gradient_norm: float  # before clipping

    @property
    def applied(self) -> bool:
        """Whether the weights were updated; if loss or gradient were not finite, they are as they were."""
        return math.isfinite(self.nll) and math.isfinite(self.gradient_norm)

    @property
    def trouble(self) -> str:
        """What was not finite, if the weights were not updated. (DeepSpeed has only one value for any such norm.)"""
        return "the loss" if not math.isfinite(self.nll) else "the gradient"


class Learner:
    """One process, or DDP: every process has all weights and all optimizer state."""

    def __init__(self, model: nn.Module, settings: OptimizerSection, engine: Engine):
        self.plain_model, self.engine, self.clip = model, engine, settings.clip
        self.parameters: dict[str, Any] = dict(model.named_parameters())
        self.optimizer: Any = make_optimizer(model, settings)
        # `model` is what the engine wraps: gradients are averaged over the processes there.
        self.model: Any
        self.model, self.optimizer = engine.accelerator.prepare(model, self.optimizer)
        #: One process on a GPU need not agree with anyone, so no step makes the host wait for the device.
        self.asynchronous = engine.world_size == 1 and not engine.is_deepspeed and engine.device.type == "cuda"
        if self.asynchronous:  # the update may be captured in a CUDA graph, which reads the rate from memory
            for group in self.optimizer.param_groups:
                group |= {"lr": torch.tensor(group["lr"], device=engine.device), "capturable": True}
        # Under ZeRO 3 parameters have no shape between steps, and take no hook.
        self.reduction = ReductionClock(self.parameters.values() if engine.zero_stage != 3 else [], engine)

    # ---- one step ---------------------------------------------------------------------------------------------------

    def update(self, through: Tensor, nll: Tensor, recomputed: float, learning_rate: float) -> Callable[[], Update]:
        """Clip the gradient and update the weights, unless the loss or the gradient is not finite.

        through: a scalar whose backward pass reaches the parameters; nll, recomputed: of this process's sentences.
        Returns a function that says what came of it. It waits for the device if the update is decided there
        (`asynchronous`), so the next step may be launched before it is called.
        """
        self.backward(through)
        self.set_learning_rate(learning_rate)
        if self.asynchronous:
            numbers = self.apply_on_device(nll)
            self.optimizer.zero_grad()
            return self.reader(numbers, recomputed)
        # Of averaged gradients: the norm is the same on all processes.
        norm = float(self.engine.accelerator.clip_grad_norm_(self.parameters.values(), self._clip))
        total_nll, recomputed = self.engine.sums([nll.item(), recomputed])
        update = Update(total_nll, recomputed, norm)
        if update.applied:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return lambda: update

    def backward(self, through: Tensor) -> None:
        """Leave at the parameters the gradient averaged over the processes."""
        self.engine.accelerator.backward(through)
        self.reduction.backward_done()

    def apply_on_device(self, nll: Tensor) -> Tensor:
        """Clip and step without the host: Adam's kernel leaves out an update that is not finite.

        One process only. Returns (nll, norm of the gradient), of which `reader` makes an Update.
        """
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), self._clip)
        numbers = torch.stack((nll.double(), norm.double()))
        optimizer = self._torch_optimizer()
        optimizer.found_inf = (~numbers.isfinite().all()).float()  # type: ignore[attr-defined]
        optimizer.step()
        return numbers

    @staticmethod
    def reader(numbers: Tensor, recomputed: float) -> Callable[[], Update]:
        """Start the copy of what apply_on_device returned; the function returned waits for it."""
        on_host = copy_to_host(numbers)

        def read() -> Update:
            nll, gradient_norm = on_host()
            return Update(nll, recomputed, gradient_norm)

        return read

    @property
    def _clip(self) -> float:
        return self.clip if self.clip is not None else math.inf

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate

    # ---- weights and optimizer state --------------------------------------------------------------------------------

    def local_weights(self) -> Tensors:
        """Return this process's part of each parameter, flat or whole: the parameter's own memory, no copy."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def gathered(self, parts: Tensors) -> Tensors:
        """Gather whole tensors from every process's parts (of the weights, or of their average); all take part."""
        return parts

    def local_parts(self, tensors: Tensors) -> Tensors:
        """Cut this process's part out of whole tensors: the reverse of `gathered`."""
        return tensors

    def optimizer_tensors(self) -> Tensors:
        """Return the optimizer's state as checkpoints hold it (optimizer_state.optimizer_tensors); all take part."""
        return optimizer_state.optimizer_tensors(self._torch_optimizer(), self.parameters.items())

    def load(self, weights: Tensors, optimizer: Tensors) -> None:
        """Continue from a checkpoint's tensors."""
        self._load_weights(weights)
        optimizer_state.load_optimizer_tensors(self._torch_optimizer(), list(self.parameters.items()), optimizer)

    def _load_weights(self, weights: Tensors) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])

    def _torch_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps it
