"""The model and its optimizer under DeepSpeed: ZeRO 1 and 2 split optimizer state over processes, ZeRO 3 weights too.

DeepSpeed keeps a second, flat copy of this process's part of the weights, which its optimizer updates; what is loaded
goes into both.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param
from torch import Tensor, nn

from lm_pcfg.distributed.engine import Engine
from lm_pcfg.distributed.learner import Learner, Tensors, Update
from lm_pcfg.errors import UserError
from lm_pcfg.settings import OptimizerSection
from lm_pcfg.storage.checkpoint import CheckpointError

# DeepSpeed calls what torch 2.13 has given new names; a line on every rank and every step would bury all others.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
_MOMENTS = ("exp_avg", "exp_avg_sq")
# What splits weights otherwise than over all processes, or rounds them; and the values that switch it off. With the
# last one DeepSpeed's map of its parts is wrong: checkpoints would have other parameters' moments.
_UNSUPPORTED: dict[str, Any] = {
    "mics_shard_size": -1,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "cpu_offload": False,
    "cpu_offload_param": False,
    "round_robin_gradients": False,
}


def configure(config: dict[str, Any], settings: OptimizerSection) -> None:
    """Set in DeepSpeed's configuration what this loop decides; refuse what it cannot do."""
    for section in (config, config.get("zero_optimization") or {}):
        for key in [key for key, value in section.items() if value is None]:
            del section[key]  # null is what DeepSpeed does without the key
    zero = config.get("zero_optimization", {})
    for name in ("fp16", "bf16", "torch_autocast", "amp"):
        if config.get(name, {}).get("enabled") is True:
            raise UserError(f"DeepSpeed's {name} would round the weights; switch it off and use inside.precision")
    rounded = {
        "communication_data_type": config.get("communication_data_type"),
        "data_types.grad_accum_dtype": config.get("data_types", {}).get("grad_accum_dtype"),
    }
    for name, kind in rounded.items():
        if kind not in (None, "fp32"):
            raise UserError(f"DeepSpeed's {name}: {kind} would round the gradients; remove it from its settings (fp32)")
    for name in ("offload_optimizer", "offload_param"):
        if zero.get(name, {}).get("device") not in ("none", None):
            raise UserError(f"DeepSpeed's {name} is not supported: these models are small; remove it from its settings")
    for name in ("optimizer", "scheduler"):
        if name in config:
            raise UserError(f"DeepSpeed's {name} is set by the settings of this run; remove it there")
    for name, off in _UNSUPPORTED.items():
        if zero.get(name, off) != off:
            raise UserError(f"DeepSpeed's {name} is not supported; remove it from DeepSpeed's settings")
    if zero.get("stage", 0) not in (1, 2, 3):
        raise UserError("DeepSpeed without ZeRO does what DDP does; launch without it, or with --zero_stage 1, 2 or 3")
    zero.pop("compute_grad_norm", None)  # the norm tells whether a step may be made
    config["gradient_clipping"] = settings.clip if settings.clip is not None else 0.0
    config["gradient_accumulation_steps"] = 1  # micro-batches meet in the grammar, before the engine sees anything
    config["train_micro_batch_size_per_gpu"] = 1  # batches vary; DeepSpeed uses it for its own prints only
    config.pop("train_batch_size", None)
    config["steps_per_print"] = math.inf
    timers = config.setdefault("timers", {})
    timers["throughput"] = {"enabled": False}  # it makes the host wait for the device twice a step


class ZeroLearner(Learner):
    def __init__(self, model: nn.Module, settings: OptimizerSection, engine: Engine):
        config = engine.accelerator.state.deepspeed_plugin.deepspeed_config
        engine.on_all(lambda: configure(config, settings))
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.partitioned = engine.zero_stage == 3
        super().__init__(model, settings, engine)
        engine.limit_waiting()
        self.zero: Any = self.optimizer.optimizer  # DeepSpeed's, around torch's

    # ---- one step ---------------------------------------------------------------------------------------------------

    def update(self, through: Tensor, nll: Tensor, recomputed: float, learning_rate: float) -> Callable[[], Update]:
        """DeepSpeed clips and steps in one, and leaves out a step whose gradient norm over all processes is not finite.

        It knows nothing of the loss, and keeps the gradients of a backward pass until it steps: if the loss is not
        finite, no process enters the backward pass.
        """
        total_nll, recomputed = self.engine.sums([nll.item(), recomputed])
        norm = math.nan
        if math.isfinite(total_nll):
            self.backward(through)
            self.set_learning_rate(learning_rate)
            self.model.step()
            norm = float(self.zero._global_grad_norm)  # inf after a step left out
        update = Update(total_nll, recomputed, norm)
        return lambda: update

    def backward(self, through: Tensor) -> None:
        self.model.backward(through)  # accelerator.backward would also step
        self.reduction.backward_done()

    # ---- weights ----------------------------------------------------------------------------------------------------

    def local_weights(self) -> Tensors:
        if not self.partitioned:
            return super().local_weights()
        return {name: parameter.ds_tensor.detach() for name, parameter in self.parameters.items()}

    def gathered(self, parts: Tensors) -> Tensors:
        if not self.partitioned:
            return parts
        return {name: self._gather_part(name, part) for name, part in parts.items()}

    def local_parts(self, tensors: Tensors) -> Tensors:
        if not self.partitioned:
            return tensors
        return {name: self._local_part(name, tensor) for name, tensor in tensors.items()}

    def _gather_part(self, name: str, part: Tensor) -> Tensor:
        """Gather a whole parameter: ZeRO 3 flattens it and cuts it into equal parts, the last one padded."""
        parts = [torch.empty_like(part) for _ in range(self.engine.world_size)]
        torch.distributed.all_gather(parts, part.contiguous())
        shape = self.shapes[name]
        return torch.cat(parts)[: shape.numel()].view(shape)

    def _local_part(self, name: str, whole: Tensor) -> Tensor:
        size = self.parameters[name].ds_tensor.numel()
        padded = torch.zeros(size, dtype=whole.dtype, device=self.engine.device)
        part = whole.flatten()[size * self.engine.rank : size * (self.engine.rank + 1)]
        padded[: len(part)] = part
        return padded

    def _load_weights(self, weights: Tensors) -> None:
        if not self.partitioned:
            super()._load_weights(weights)
            for name, parameter in self.parameters.items():
                safe_set_full_fp32_param(parameter, weights[name].to(self.engine.device))
            return
        parameters = list(self.parameters.values())
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):  # rank 0's are dealt out at the end
            super()._load_weights(weights)
        for name, part in self.local_parts(weights).items():
            safe_set_local_fp32_param(self.parameters[name], part)

    # ---- optimizer state: torch's optimizer has flat tensors that hold parts of many parameters ---------------------

    def optimizer_tensors(self) -> Tensors:
        tensors = {}
        steps = self._steps()
        for name in self.parameters:
            tensors[f"step/{name}"] = torch.tensor(steps, dtype=torch.float32)
            for key in _MOMENTS if steps else ():
                tensors[f"{key}/{name}"] = self._whole_state(name, key)
        return tensors

    def load(self, weights: Tensors, optimizer: Tensors) -> None:
        self._load_weights(weights)
        steps = {tensor.item() for name, tensor in optimizer.items() if name.startswith("step/")}
        if len(steps) > 1:
            raise CheckpointError("its parameters had different numbers of updates, which DeepSpeed cannot continue")
        step = steps.pop() if steps else 0.0
        keys = ("step", *_MOMENTS) if step else ("step",)
        if odd := optimizer.keys() ^ {f"{key}/{name}" for name in self.parameters for key in keys}:
            raise CheckpointError(f"optimizer state {min(odd)} is missing in the checkpoint or belongs to no parameter")
        if not step:
            return
        fused = self.zero.optimizer.defaults["fused"]  # then a kernel reads the step
        for flat in self._flat_tensors():
            self.zero.optimizer.state[flat] = {
                "step": torch.tensor(step, dtype=torch.float32, device=flat.device if fused else "cpu"),
                **{key: torch.zeros_like(flat, requires_grad=False) for key in _MOMENTS},
            }
        for name in self.parameters:
            for key in _MOMENTS:
                whole = optimizer[f"{key}/{name}"].to(self.engine.device)
                if whole.shape != self.shapes[name]:
                    raise CheckpointError(f"optimizer state {key}/{name} has another shape than {name}")
                for own, of_flat in self._fragments(name, key):
                    part = self._local_part(name, whole) if self.partitioned else whole.flatten()
                    of_flat.copy_(part[own])

    def _flat_tensors(self) -> list[Tensor]:
        zero = self.zero
        return list(zero.fp32_partitioned_groups_flat if self.partitioned else zero.single_partition_of_fp32_groups)

    def _steps(self) -> float:
        """Return how many updates there were; 0 before torch's optimizer has any state."""
        steps = {
            float(state["step"]) for flat in self._flat_tensors() if (state := self.zero.optimizer.state.get(flat))
        }
        assert len(steps) <= 1, "one optimizer step updates all parameters"
        return steps.pop() if steps else 0.0

    def _whole_state(self, name: str, key: str) -> Tensor:
        if self.partitioned:
            ((_, part),) = self._fragments(name, key)
            return self._gather_part(name, part)
        whole = torch.zeros(self.shapes[name], dtype=torch.float32, device=self.engine.device)
        for own, of_flat in self._fragments(name, key):
            whole.view(-1)[own] = of_flat
        return self.engine.all_reduce(whole)  # every element is in one process's part alone: exact

    def _fragments(self, name: str, key: str) -> Iterator[tuple[slice, Tensor]]:
        """Yield this process's part of a parameter's state: its place in the flat parameter or part, its memory."""
        parameter = self.parameters[name]
        if self.partitioned:
            group, start, size = self.zero.grad_position[self.zero.get_param_id(parameter)]
            yield slice(size), self.zero.optimizer.state[self._flat_tensors()[group]][key][start : start + size]
        elif (mapping := parameter._hp_mapping) is not None:
            own, flat = mapping.lp_fragment_address, mapping.hp_fragment_address
            group = self._flat_tensors()[mapping.param_group_index]
            state = self.zero.optimizer.state[group][key]
            yield slice(own.start, own.start + own.numel), state[flat.start : flat.start + flat.numel]
