"""The state of Adam as checkpoints hold it: tensors by parameter name, for any engine and number of processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lm_pcfg.storage.state_file import CheckpointError


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the state of Adam or AdamW by parameter name: `exp_avg/<name>`, `exp_avg_sq/<name>`, `step/<name>`.

    A parameter that was never updated has only `step/<name>` = 0. The tensors are the optimizer's own, not copies.
    """
    tensors = {}
    for name, parameter, _ in _optimized(optimizer, named_parameters):
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            tensors[f"{key}/{name}"] = torch.as_tensor(value, dtype=torch.float32) if key == "step" else value
        tensors.setdefault(f"step/{name}", torch.zeros((), dtype=torch.float32))
    return tensors


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]], tensors: dict[str, Tensor]
) -> None:
    """Load what optimizer_tensors returned, bit for bit; on a mismatch the optimizer is left as it was."""
    remaining = dict(tensors)
    new_state: dict[Tensor, dict[str, Tensor]] = {}
    for name, parameter, group in _optimized(optimizer, named_parameters):

        def take(key: str, shape: torch.Size, name: str = name) -> Tensor:
            tensor = remaining.pop(f"{key}/{name}", None)
            if tensor is None:
                raise CheckpointError(f"optimizer state {key}/{name} is missing in the checkpoint")
            if tensor.shape != shape:
                expected = f"{list(tensor.shape)}, but {name} needs {list(shape)}"
                raise CheckpointError(f"optimizer state {key}/{name} has shape {expected}")
            return tensor

        step = take("step", torch.Size())
        new_state[parameter] = {}
        if f"exp_avg/{name}" not in remaining and step.item() == 0:  # never updated
            continue
        # As Adam itself places it: the step of a fused or capturable optimizer is read by a kernel.
        on_device = group.get("capturable") or group.get("fused")
        new_state[parameter]["step"] = step.to(parameter.device if on_device else "cpu", torch.float32, copy=True)
        for key in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group.get("amsgrad") else ())):
            new_state[parameter][key] = torch.empty_like(parameter).copy_(take(key, parameter.shape))
    if remaining:
        raise CheckpointError(f"optimizer state {min(remaining)} in the checkpoint belongs to no parameter")
    optimizer.state.update(new_state)


def _optimized(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]]
) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """Return (name, parameter, its group) of all that the optimizer updates, in the order of the names."""
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    named = [(name, parameter, groups.pop(parameter)) for name, parameter in named_parameters if parameter in groups]
    if groups:
        raise ValueError(f"{len(groups)} parameters of the optimizer have no name in the model")
    return named
