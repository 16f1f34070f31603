"""CUDA graphs on the CPU: what is launched in a capture is recorded, and replayed into the same memory.

As on a GPU a capture computes nothing that lasts, and a replay sees only what lies in memory. All memory that the
recorded operations make is NaN before a replay, so that a value from an earlier one is found out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, Any, bool]] = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        assert function is not torch.ops.aten._local_scalar_dense.default, "the host waits in a capture"
        result = function(*arguments, **(named or {}))
        returns = function._schema.returns
        makes_memory = bool(returns) and all(value.alias_info is None for value in returns)
        self.operations.append((function, arguments, named or {}, result, makes_memory))
        return result


class EmulatedGraph:
    def __init__(self, operations: list[tuple[Any, tuple, dict, Any, bool]]):
        self.operations = operations

    def pool(self) -> None:
        return None

    @torch.no_grad()
    def replay(self) -> None:
        for _, _, _, result, makes_memory in self.operations:
            for tensor in tree_leaves(result) if makes_memory else ():
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    tensor.detach().fill_(torch.nan)
        for function, arguments, named, result, makes_memory in self.operations:
            again = function(*arguments, **named)
            for new, old in zip(tree_leaves(again), tree_leaves(result), strict=True) if makes_memory else ():
                if isinstance(old, Tensor):
                    old.detach().copy_(new.reshape(old.shape))  # its shape may have been changed since (squeeze_)


def capturing(state: Callable[[], list[Tensor]]) -> Callable[..., EmulatedGraph]:
    """For captured.capture. state: the tensors that outlive a step; the launches of a capture do not change them."""

    def capture(launch: Callable[[], None], pool: None = None, family: str = "") -> EmulatedGraph:
        before = [tensor.detach().clone() for tensor in state()]
        with Recorder() as recorder:
            launch()
        for tensor, value in zip(state(), before, strict=True):
            tensor.data.copy_(value)  # .data: autograd need not know
        return EmulatedGraph(recorder.operations)

    return capture
