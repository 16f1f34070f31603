"""The gradients of a model that is no larger than one of DeepSpeed's buckets: reduced at once, after the backward pass.

DeepSpeed would do parameter by parameter what takes one launch: copy a gradient into the bucket and out of it, measure
its norm; and it would ask the device again and again whether that is finite. Here an update is 22 launches and no wait,
as it is without DeepSpeed (test_zero.py). Weights, optimizer state and their parts are DeepSpeed's as ever.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, free_param
from torch import Tensor, nn

from lm_pcfg.training.collectives import Collectives

LARGEST = 500_000_000  # parameters: DeepSpeed's own bucket size; twice as many would be two flat tensors under ZeRO 3


def fits_one_bucket(model: nn.Module, zero: dict[str, Any]) -> bool:
    """zero: DeepSpeed's settings of that name."""
    size = zero.get("reduce_bucket_size", LARGEST)
    limit = LARGEST if size == "auto" else min(LARGEST, float(size))
    return sum(parameter.numel() for parameter in model.parameters()) <= limit


def prepare_for_one_bucket(zero: dict[str, Any]) -> None:
    """In DeepSpeed's settings: under ZeRO 3 weights are gathered together, and none is kept or handled by itself."""
    if zero["stage"] == 3:
        zero.pop("sub_group_size", None)
        zero |= {
            "stage3_param_persistence_threshold": 0,
            "memory_efficient_linear": False,
            "contiguous_gradients": False,  # no memory for a bucket of DeepSpeed's
        }


class OneBucket:
    def __init__(self, model: nn.Module, zero: Any, processes: Collectives, in_pieces: bool):
        self._zero, self._processes, self._in_pieces = zero, processes, in_pieces
        for hook in zero._grad_acc_hooks:
            hook.remove()
        #: This process's part of the weights, as the optimizer has it.
        (self._part,) = zero.fp32_partitioned_groups_flat if in_pieces else zero.single_partition_of_fp32_groups
        (self._parameters,) = zero.fp16_groups if in_pieces else zero.round_robin_bit16_groups
        self._gaps = [] if in_pieces else self._gaps_between()
        if in_pieces:
            zero.parameter_offload.destroy()  # its hooks, which gather and release module by module
            model.register_forward_pre_hook(lambda *_: self._gather())

    def reduced_gradient(self) -> Tensor:
        """Of this process's part of the weights, the mean over processes. Parameters have none any more."""
        world_size = self._processes.world_size
        flat = self._of_pieces() if self._in_pieces else self._of_whole()
        for parameter in self._parameters:
            parameter.grad = None
            if self._in_pieces:
                free_param(parameter)  # the gathered weights
        if world_size == 1:
            return flat
        flat /= world_size
        part = torch.empty_like(self._part, requires_grad=False)
        torch.distributed.reduce_scatter_tensor(part, flat)
        return part

    def step(self, gradient: Tensor) -> None:
        """Update this process's part and gather all of them (ZeRO 3: when they are needed)."""
        zero = self._zero
        self._part.grad = gradient
        if self._in_pieces:
            zero._optimizer_step(0)
            zero._reassign_or_swap_out_partitioned_parameters(0)
        else:
            zero.optimizer.step()
            zero.update_lp_params()
        self._part.grad = None

    def _gather(self) -> None:
        """One collective. DeepSpeed would make the host of a lone process wait for the device, though nothing moves."""
        if self._parameters[0].ds_status is ZeroParamStatus.AVAILABLE:
            return
        if self._processes.world_size > 1:
            self._parameters[0].all_gather_coalesced(self._parameters).wait()
            return
        for parameter in self._parameters:
            parameter.data = parameter.ds_tensor.data.view(parameter.ds_shape)
            parameter.ds_status = ZeroParamStatus.AVAILABLE

    def _of_whole(self) -> Tensor:
        """One parameter after another, then zeros: every process has an equal part."""
        pairs = zip(self._parameters, self._gaps, strict=True)
        return torch.cat([tensor for parameter, gap in pairs for tensor in (_gradient(parameter), *gap)])

    def _gaps_between(self) -> list[list[Tensor]]:
        zero = self._zero
        sizes = list(zero.round_robin_bit16_padding[0])
        used = sum(parameter.numel() for parameter in self._parameters) + sum(sizes)
        sizes[-1] += zero.bit16_groups_flat[0].numel() - used
        return [[torch.zeros(size, device=self._part.device)] if size else [] for size in sizes]

    def _of_pieces(self) -> Tensor:
        """One process after another, each with its piece of every parameter; the last pieces are padded."""
        world_size = self._processes.world_size
        rows = []
        for parameter in self._parameters:
            size = math.ceil(parameter.ds_numel / world_size)
            missing = size * world_size - parameter.ds_numel
            gradient = _gradient(parameter)
            rows.append((F.pad(gradient, (0, missing)) if missing else gradient).view(world_size, size))
        return torch.cat(rows, 1).view(-1)


def _gradient(parameter: Any) -> Tensor:
    """Flat; a parameter that was not used has zeros."""
    if parameter.grad is None:
        return torch.zeros(getattr(parameter, "ds_numel", parameter.numel()), device=parameter.device)
    return parameter.grad.reshape(-1)
