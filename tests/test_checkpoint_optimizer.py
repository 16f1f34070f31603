"""The state of Adam, kept by parameter name, goes on bit for bit after a checkpoint."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lm_pcfg.storage import checkpoint, optimizer_state
from lm_pcfg.storage.checkpoint import CheckpointError


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    def bits(tensor: Tensor) -> list[int]:
        return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()

    return one.keys() == other.keys() and all(bits(one[name]) == bits(other[name]) for name in one)


class TestOptimizerState:
    def network(self, seed: int = 0) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

    def train(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
            network(inputs.to(next(network.parameters()).device)).square().mean().backward()
            optimizer.step()

    @pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
    @pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"fused": True}, {"foreach": True}])
    def test_the_next_updates_are_the_same_bit_for_bit(
        self, tmp_path: Path, make: Any, options: dict[str, Any]
    ) -> None:
        options = {"lr": 0.01, "betas": (0.75, 0.999), "weight_decay": 0.01, **options}
        network = self.network()
        optimizer = make(network.parameters(), **options)
        self.train(network, optimizer, range(5))
        folder = checkpoint.save(
            tmp_path,
            5,
            model=network.state_dict(),
            optimizer=optimizer_state.optimizer_tensors(optimizer, network.named_parameters()),
            ema=None,
            state={},
        )
        self.train(network, optimizer, range(5, 8))

        resumed = self.network(seed=1)
        loaded = checkpoint.load(folder, with_optimizer=True)
        resumed.load_state_dict(loaded.model)
        # other groups in another order: the state is by name
        biases = [parameter for parameter in resumed.parameters() if parameter.ndim == 1]
        weights = [parameter for parameter in resumed.parameters() if parameter.ndim == 2]
        resumed_optimizer = make([{"params": biases}, {"params": weights}], **options)
        assert loaded.optimizer is not None
        optimizer_state.load_optimizer_tensors(resumed_optimizer, resumed.named_parameters(), loaded.optimizer)
        self.train(resumed, resumed_optimizer, range(5, 8))
        assert same_bits(resumed.state_dict(), network.state_dict())
        assert same_bits(
            optimizer_state.optimizer_tensors(resumed_optimizer, resumed.named_parameters()),
            optimizer_state.optimizer_tensors(optimizer, network.named_parameters()),
        )

    @pytest.mark.gpu
    @pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
    def test_on_the_gpu_the_step_lies_where_adam_wants_it(self, options: dict[str, Any]) -> None:
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
        network = self.network().cuda()
        optimizer = torch.optim.AdamW(network.parameters(), **options)
        self.train(network, optimizer, range(3))
        tensors = optimizer_state.optimizer_tensors(optimizer, network.named_parameters())
        on_cpu = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        resumed = copy.deepcopy(network)
        resumed_optimizer = torch.optim.AdamW(resumed.parameters(), **options)
        optimizer_state.load_optimizer_tensors(resumed_optimizer, resumed.named_parameters(), on_cpu)
        for one, other in zip(network.parameters(), resumed.parameters(), strict=True):
            assert optimizer.state[one]["step"].device == resumed_optimizer.state[other]["step"].device
        self.train(network, optimizer, range(3, 5))
        self.train(resumed, resumed_optimizer, range(3, 5))
        assert same_bits(resumed.cpu().state_dict(), network.cpu().state_dict())

    def test_names_and_the_step(self) -> None:
        network = self.network()
        optimizer = torch.optim.AdamW(network.parameters())
        self.train(network, optimizer, range(3))
        tensors = optimizer_state.optimizer_tensors(optimizer, network.named_parameters())
        names = [f"{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]
        assert set(tensors) == {f"{key}/{name}" for key in ("exp_avg", "exp_avg_sq", "step") for name in names}
        assert tensors["step/0.weight"].dtype == torch.float32
        assert tensors["step/0.weight"].shape == ()
        assert tensors["step/0.weight"].item() == 3

    def test_moments_keep_their_type_and_steps_are_tensors(self) -> None:
        weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        optimizer = torch.optim.Adam([weight])
        optimizer.state[weight] = {"step": 3, "exp_avg": torch.ones(2, dtype=torch.float64)}
        tensors = optimizer_state.optimizer_tensors(optimizer, [("weight", weight)])
        assert {name: tensor.dtype for name, tensor in tensors.items()} == {
            "step/weight": torch.float32,
            "exp_avg/weight": torch.float64,
        }

    def test_further_steps_leave_what_was_loaded_as_it_was(self) -> None:
        network = self.network()
        optimizer = torch.optim.Adam(network.parameters())
        self.train(network, optimizer, range(3))
        tensors = optimizer_state.optimizer_tensors(optimizer, network.named_parameters())
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        before = copy.deepcopy(tensors)
        optimizer_state.load_optimizer_tensors(optimizer, network.named_parameters(), tensors)
        self.train(network, optimizer, range(3, 5))
        assert same_bits(tensors, before)

    def test_parameters_not_yet_updated_or_not_optimized(self) -> None:
        network = self.network()
        first_layer, last_layer = network[0], network[2]  # type: ignore[index]
        optimizer = torch.optim.Adam(last_layer.parameters())
        tensors = optimizer_state.optimizer_tensors(optimizer, network.named_parameters())
        assert set(tensors) == {"step/2.weight", "step/2.bias"}
        optimizer_state.load_optimizer_tensors(optimizer, network.named_parameters(), tensors)
        self.train(network, optimizer, range(1))
        assert first_layer.weight not in optimizer.state
        assert optimizer.state[last_layer.weight]["step"].item() == 1

    def test_mismatches_are_named_and_change_nothing(self) -> None:
        network = self.network()
        optimizer = torch.optim.Adam(network.parameters())
        self.train(network, optimizer, range(2))
        before = {
            name: tensor.clone()
            for name, tensor in optimizer_state.optimizer_tensors(optimizer, network.named_parameters()).items()
        }

        def message(tensors: dict[str, Tensor]) -> str:
            with pytest.raises(CheckpointError) as caught:
                optimizer_state.load_optimizer_tensors(optimizer, network.named_parameters(), tensors)
            assert same_bits(optimizer_state.optimizer_tensors(optimizer, network.named_parameters()), before)
            return str(caught.value)

        zeros = {name: torch.zeros_like(tensor) + (name.startswith("step")) for name, tensor in before.items()}
        missing = {name: tensor for name, tensor in zeros.items() if name != "exp_avg/2.weight"}
        assert message(missing) == "optimizer state exp_avg/2.weight is missing in the checkpoint"
        assert "step/0.weight is missing" in message({})
        assert message({**zeros, "exp_avg/2.weight": torch.zeros(2, 8)}) == (
            "optimizer state exp_avg/2.weight has shape [2, 8], but 2.weight needs [3, 8]"
        )
        assert "exp_avg/5.weight in the checkpoint belongs to no parameter" in message(
            {**zeros, "exp_avg/5.weight": torch.zeros(1)}
        )

    def test_an_optimizer_of_another_model_is_a_mistake(self) -> None:
        optimizer = torch.optim.Adam(self.network().parameters())
        with pytest.raises(ValueError, match="have no name"):
            optimizer_state.optimizer_tensors(optimizer, self.network().named_parameters())
