"""The model and its optimizer under DeepSpeed: ZeRO 1 and 2 split optimizer state over processes, ZeRO 3 weights too.

DeepSpeed keeps a second copy of its part of the weights, flat, which its optimizer updates; what is loaded goes into
both. Its own step clips and updates in one, so the learning rate and all that may forbid a step come before it; models
that are no larger than a bucket do without it (one_bucket.py), if all their parameters learn at one rate.
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

from lm_pcfg.settings import OptimizerSection
from lm_pcfg.training.checkpoint import CheckpointError
from lm_pcfg.training.engine import Engine
from lm_pcfg.training.learner import Learner, Tensors, Update
from lm_pcfg.training.one_bucket import OneBucket, fits_one_bucket, prepare_for_one_bucket
from lm_pcfg.training.optimization import parameter_groups
from lm_pcfg.training.zero_config import configure

# DeepSpeed calls what torch 2.13 has given new names; a line on every rank and every step would bury all others.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
_MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroLearner(Learner):
    def __init__(self, model: nn.Module, settings: OptimizerSection, engine: Engine):
        config = engine.accelerator.state.deepspeed_plugin.deepspeed_config
        engine.together(lambda: configure(config, settings))
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.in_pieces = engine.zero_stage == 3
        one_group = len(parameter_groups(model, settings)) == 1
        small = one_group and fits_one_bucket(model, config["zero_optimization"])
        if small:
            prepare_for_one_bucket(config["zero_optimization"])
        super().__init__(model, settings, engine)
        engine.limit_waiting()
        self.zero: Any = self.optimizer.optimizer  # DeepSpeed's, around torch's
        self.bucket = OneBucket(model, self.zero, engine, self.in_pieces) if small else None
        if self.bucket is not None:
            self.model = self.model.module  # what DeepSpeed's engine does around it serves its own reduction
        # As in Learner. Under ZeRO 3 the host makes and releases tensors of weights, which is not for CUDA graphs.
        alone = engine.world_size == 1 and engine.device.type == "cuda"
        self.reads_late = alone and self.bucket is not None and not self.in_pieces
        self._keep_rate_on_device()

    # ---- one step ---------------------------------------------------------------------------------------------------

    def _update_on_device(
        self, through: Tensor, nll: Tensor, recomputed: float, learning_rate: float, mark: Callable[[str], None]
    ) -> Callable[[], Update]:
        through.backward()
        mark("backward")
        self.set_learning_rate(learning_rate)
        return self.reader(self.apply_on_device(nll), recomputed)

    def apply_on_device(self, nll: Tensor) -> Tensor:
        """Of one process: nothing is summed here."""
        assert self.bucket is not None
        gradient = self.bucket.reduced_gradient()
        norm = torch.linalg.vector_norm(gradient)
        numbers = torch.stack((nll.double(), norm.double()))
        self.zero.optimizer.found_inf = (~numbers.isfinite().all()).float()
        self.bucket.step(gradient.mul_((self._clip / (norm + 1e-6)).clamp(max=1.0)))
        return numbers

    def _update(
        self, through: Tensor, nll: Tensor, recomputed: float, learning_rate: float, mark: Callable[[str], None]
    ) -> Update:
        if self.bucket is None:
            return self._update_by_deepspeed(through, nll, recomputed, learning_rate, mark)
        through.backward()
        gradient = self.bucket.reduced_gradient()
        self.reduction.backward_done()
        mark("backward")
        # Squares add up over the parts; all processes come to the same sums.
        square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        own = torch.stack((nll.double(), square)).tolist()
        total_nll, total_square, recomputed = self.engine.sums([*own, recomputed])
        norm = math.sqrt(total_square)
        finite = math.isfinite(total_nll) and math.isfinite(norm)
        if finite:
            self.set_learning_rate(learning_rate)
            self.bucket.step(gradient.mul_(min(1.0, self._clip / (norm + 1e-6))))
        return Update(finite, total_nll, norm, recomputed)

    def _update_by_deepspeed(
        self, through: Tensor, nll: Tensor, recomputed: float, learning_rate: float, mark: Callable[[str], None]
    ) -> Update:
        """The loss is summed first: where it is not finite, no process enters the backward pass, which would step.

        A gradient that is not finite DeepSpeed finds itself, in the norm over all processes, and leaves the step out.
        """
        total_nll, recomputed = self.engine.sums([nll.item(), recomputed])
        if not math.isfinite(total_nll):
            return Update(False, total_nll, math.nan, recomputed)
        self.set_learning_rate(learning_rate)
        self.model.backward(through)  # as accelerator.backward would, with a look at the clock in between
        self.reduction.backward_done()
        mark("backward")
        self.model.step()
        norm = float(self.zero._global_grad_norm)  # inf after a step left out
        return Update(not self.zero.overflow, total_nll, norm, recomputed)

    # ---- weights ----------------------------------------------------------------------------------------------------

    def pieces(self) -> Tensors:
        if not self.in_pieces:
            return super().pieces()
        return {name: parameter.ds_tensor.detach() for name, parameter in self.parameters.items()}

    def whole(self, pieces: Tensors) -> Tensors:
        return {name: self._gathered(name, piece) for name, piece in pieces.items()} if self.in_pieces else pieces

    def pieces_of(self, whole: Tensors) -> Tensors:
        return {name: self._piece(name, tensor) for name, tensor in whole.items()} if self.in_pieces else whole

    def _gathered(self, name: str, piece: Tensor) -> Tensor:
        """ZeRO 3 cuts a flat parameter into equal pieces, the last one padded."""
        parts = [torch.empty_like(piece) for _ in range(self.engine.world_size)]
        torch.distributed.all_gather(parts, piece.contiguous())
        shape = self.shapes[name]
        return torch.cat(parts)[: shape.numel()].view(shape)

    def _piece(self, name: str, whole: Tensor) -> Tensor:
        size = self.parameters[name].ds_tensor.numel()
        piece = torch.zeros(size, dtype=whole.dtype, device=self.engine.device)
        part = whole.flatten()[size * self.engine.rank : size * (self.engine.rank + 1)]
        piece[: len(part)] = part
        return piece

    def _load_weights(self, weights: Tensors) -> None:
        if not self.in_pieces:
            super()._load_weights(weights)
            for name, parameter in self.parameters.items():
                safe_set_full_fp32_param(parameter, weights[name].to(self.engine.device))
            return
        parameters = list(self.parameters.values())
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):  # rank 0's are dealt out at the end
            super()._load_weights(weights)
        for name, piece in self.pieces_of(weights).items():
            safe_set_local_fp32_param(self.parameters[name], piece)

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
                    part = self._piece(name, whole) if self.in_pieces else whole.flatten()
                    of_flat.copy_(part[own])

    def _flat_tensors(self) -> list[Tensor]:
        zero = self.zero
        return list(zero.fp32_partitioned_groups_flat if self.in_pieces else zero.single_partition_of_fp32_groups)

    def _steps(self) -> float:
        """How many updates there were; 0 before torch's optimizer has any state."""
        steps = {
            float(state["step"]) for flat in self._flat_tensors() if (state := self.zero.optimizer.state.get(flat))
        }
        assert len(steps) <= 1, "one optimizer step updates all parameters"
        return steps.pop() if steps else 0.0

    def _whole_state(self, name: str, key: str) -> Tensor:
        if self.in_pieces:
            ((_, piece),) = self._fragments(name, key)
            return self._gathered(name, piece)
        whole = torch.zeros(self.shapes[name], dtype=torch.float32, device=self.engine.device)
        for own, of_flat in self._fragments(name, key):
            whole.view(-1)[own] = of_flat
        return self.engine.sum_tensor(whole)  # every element is in one process's part alone: exact

    def _fragments(self, name: str, key: str) -> Iterator[tuple[slice, Tensor]]:
        """This process's part of a parameter's state: where it lies in the flat piece or parameter; its memory."""
        parameter = self.parameters[name]
        if self.in_pieces:
            group, start, size = self.zero.grad_position[self.zero.get_param_id(parameter)]
            yield slice(size), self.zero.optimizer.state[self._flat_tensors()[group]][key][start : start + size]
        elif (mapping := parameter._hp_mapping) is not None:
            own, flat = mapping.lp_fragment_address, mapping.hp_fragment_address
            group = self._flat_tensors()[mapping.param_group_index]
            state = self.zero.optimizer.state[group][key]
            yield slice(own.start, own.start + own.numel), state[flat.start : flat.start + flat.numel]
