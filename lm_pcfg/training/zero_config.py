"""DeepSpeed's configuration: what this loop decides is set in it, what it cannot do is refused."""

from __future__ import annotations

import math
from typing import Any

from lm_pcfg.errors import UserError
from lm_pcfg.settings import OptimizerSection

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
