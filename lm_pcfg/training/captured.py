"""The networks' passes and the update as two CUDA graphs, for one process on a GPU.

Of some 350 launches of a step most are the networks' and the optimizer's, the same in every step. Replayed they took a
step of N 2048 on an H200 from 10.7 to 4.9 ms, of which the GPU works 3.4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from flash_inside.cuda_graphs import capture
from lm_pcfg.grammar.boundary import Grammar
from lm_pcfg.grammar.feature_dropout import FeatureDropout
from lm_pcfg.grammar.state_dropout import Kept
from lm_pcfg.training.learner import Learner, Update

#: Computes a grammar, as the module of the networks does.
Model = Callable[..., Grammar]
#: Nonterminals of a step. More hide the launches, and the graphs' own memory (gradients of the rules, logits) would be
#: gigabytes.
LARGEST_N = 8192


class CapturedNetworks:
    """For so many kept symbols. Everything a step changes lies in fixed memory: symbols kept, dropout, gradients, rate.

    The model must have been through some steps of this size, so that all kernels are compiled and Adam has its state.
    """

    def __init__(
        self, learner: Learner, compute: Callable[[Kept | None, FeatureDropout, Model], Grammar], kept: Kept | None,
        dropout: FeatureDropout, device: torch.device,
    ):  # fmt: skip
        self.learner = learner
        self.kept = None if kept is None else kept.to(device)
        self.dropout = dropout._replace(keys=dropout.keys.to(device))
        self.nll = torch.zeros((), dtype=torch.float64, device=device)
        parameters = list(learner.parameters.values())
        # The same memory under new leaves of autograd: those of the parameters, which DeepSpeed keeps alive, belong to
        # the stream of the first steps, and a backward pass would make that stream wait for the capture's.
        weights = {name: parameter.detach().requires_grad_() for name, parameter in learner.parameters.items()}
        made: list[Grammar] = []

        def model(*inputs: Any) -> Grammar:
            return functional_call(learner.plain_model, weights, inputs)

        self._forward = capture(lambda: made.append(compute(self.kept, self.dropout, model)), family="networks")
        grammar = made[0]
        #: What micro-batches work on and leave their gradients at.
        self.leaves = grammar.detached()
        self.gradients = [torch.zeros_like(tensor) for tensor in grammar.entrance_tensors]
        self.of_rules = self.gradients[1], self.gradients[2]
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

    def grammar(self, kept: Kept | None, dropout: FeatureDropout) -> Grammar:
        """Of this step: the same tensors every time, with new values and no gradients."""
        if kept is not None and self.kept is not None:
            _send(kept, self.kept)
        if dropout.drops:
            _send([dropout.keys], [self.dropout.keys])
        for leaf in self.leaves.tensors:
            leaf.grad = None
        self._forward.replay()
        return self.leaves

    def update(self, nll: Tensor, recomputed: float, learning_rate: float) -> Callable[[], Update]:
        """From the gradients at the leaves; as Learner.update."""
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


def differentiable(grammar: Grammar, gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Of a grammar's tensors those that come from parameters (the features of tables do not), and their gradients."""
    pairs = zip(grammar.entrance_tensors, gradients, strict=True)
    tensors, of_tensors = zip(*((tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad), strict=True)
    return list(tensors), list(of_tensors)


def in_layout_of(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Fused Adam takes both for flat memory: a gradient that is a part of a wider matrix has to be copied."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _send(values: Iterable[Tensor], to: Iterable[Tensor]) -> None:
    """Without waiting: from pinned memory, which is kept until it is copied."""
    for value, target in zip(values, to, strict=True):
        target.copy_(value.pin_memory(), non_blocking=True)
