"""The networks' passes and the update as two CUDA graphs, for one process on a GPU.

Most of the 350 launches of a step belong to the networks and the optimizer, and never change. Replaying them took a
step of N 2048 on an H200 from 10.7 to 4.9 ms; the GPU is busy for 3.4 of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from flash_inside.devices import capture
from lm_pcfg.console import warn
from lm_pcfg.distributed.learner import Learner, Update
from lm_pcfg.grammar.dropout import Dropout
from lm_pcfg.grammar.families.shared.family import Distribution

STEPS_BEFORE_CAPTURE = 3  # kernels are compiled then, and Adam has its state
#: Computes the model of a step: the module of the networks, or the same module with other weights.
Module = Callable[..., Any]


class GraphCapture:
    """Decides which steps replay graphs, and captures them: after some steps of the same shape."""

    def __init__(self, learner: Learner, compute: Callable[[Dropout, Module], Any], allowed: bool):
        """compute(dropout, module) computes the model of a step."""
        self.allowed = allowed
        self._learner, self._compute = learner, compute
        self._captured: CapturedNetworks | None = None
        self._shape: tuple[int, ...] | None = None  # of the last steps
        self._alike = 0  # so many of them had it

    def networks(self, dropout: Dropout, possible: bool) -> CapturedNetworks | None:
        """Return the graphs for steps of this shape, or None if the host launches the kernels, as in the first steps.

        possible: whether the family allows graphs of such steps
        """
        if dropout.shape != self._shape:
            self._shape, self._alike, self._captured = dropout.shape, 0, None
        self._alike += 1
        if not (self.allowed and possible) or self._alike <= STEPS_BEFORE_CAPTURE:
            return None
        if self._captured is None:
            torch.cuda.empty_cache()  # a capture cannot use memory that others have freed
            try:
                self._captured = CapturedNetworks(self._learner, self._compute, dropout)
            except torch.OutOfMemoryError:
                warn("no memory for CUDA graphs of the networks: this run goes on without them (networks.cuda_graphs)")
                self.allowed = False
        return self._captured

    def forget(self) -> None:
        """Drop the graphs: they hold the memory of the optimizer's state as it was."""
        self._captured, self._shape = None, None

    def stop(self) -> None:
        """From now on the host launches everything itself."""
        self.allowed = False
        self.forget()


class CapturedNetworks:
    """Graphs of steps of one shape. All that a step changes lies in fixed memory: dropout, gradients, rate.

    The model must have been through some steps of this shape, so that all kernels are compiled and Adam has its state.
    """

    def __init__(self, learner: Learner, compute: Callable[[Dropout, Module], Any], dropout: Dropout):
        device = learner.engine.device
        self.learner = learner
        self.dropout = dropout.to(device)
        self.nll = torch.zeros((), dtype=torch.float64, device=device)
        parameters = list(learner.parameters.values())
        # The same memory under new leaves of autograd: those of the parameters belong to the stream of the first steps,
        # and a backward pass would make that stream wait for the capture's.
        weights = {name: parameter.detach().requires_grad_() for name, parameter in learner.parameters.items()}
        made: list[Any] = []

        def module(*inputs: Any) -> Any:
            return functional_call(learner.plain_model, weights, inputs)

        self._forward = capture(lambda: made.append(compute(self.dropout, module)), family="networks")
        grammar = made[0]
        if grammar.penalty is not None:
            raise ValueError("a penalty cannot be captured: `Family.can_capture` has to be False")
        self.gradients = [torch.zeros_like(tensor) for tensor in grammar.tensors]
        #: What micro-batches work on and leave their gradients at.
        self.leaves = grammar.detached().resident(self.gradients)
        numbers: list[Tensor] = []

        def backward() -> None:
            tensors, of_tensors = differentiable(grammar, self.gradients)
            found = torch.autograd.grad(tensors, list(weights.values()), of_tensors, allow_unused=True)
            for parameter, gradient in zip(parameters, found, strict=True):
                parameter.grad = in_layout_of(parameter, gradient)
            numbers.append(learner.apply_on_device(self.nll))

        try:
            self._backward = capture(backward, self._forward.pool(), "networks")
        finally:
            for parameter in parameters:
                parameter.grad = None  # the graph has its own
        self._numbers = numbers[0]

    def model(self, dropout: Dropout) -> Distribution:
        """Return the model of this step: the same tensors every time, with new values and no gradients."""
        send(dropout.tensors, self.dropout.tensors)
        for leaf in self.leaves.tensors:
            leaf.grad = None
        self._forward.replay()
        return self.leaves

    def update(self, nll: Tensor, recomputed: float, learning_rate: float) -> Callable[[], Update]:
        """Update the weights from the gradients at the leaves, as Learner.update does."""
        for leaf, gradient in zip(self.leaves.tensors, self.gradients, strict=True):
            if leaf.grad is None:
                gradient.zero_()
            elif leaf.grad.data_ptr() != gradient.data_ptr():  # else it was written there
                gradient.copy_(leaf.grad)
            leaf.grad = None
        self.nll.copy_(nll)
        self.learner.set_learning_rate(learning_rate)
        self._backward.replay()
        return self.learner.reader(self._numbers, recomputed)


def send(values: Sequence[Tensor], to: Sequence[Tensor]) -> None:
    """Copy to the device without waiting: from pinned memory, which is kept until it is copied."""
    for value, target in zip(values, to, strict=True):
        target.copy_(value.pin_memory(), non_blocking=True)


def differentiable(grammar: Distribution, gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that depend on parameters (the features of tables do not), and their gradients."""
    pairs = zip(grammar.tensors, gradients, strict=True)
    tensors, of_tensors = zip(*((tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad), strict=True)
    return list(tensors), list(of_tensors)


def in_layout_of(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Copy a gradient that is a slice of a wider matrix: fused Adam treats both as flat memory."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
