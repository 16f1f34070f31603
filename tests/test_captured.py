"""The networks as CUDA graphs against the same launches one by one."""

from __future__ import annotations

import pytest
import torch

from lm_pcfg.settings_file import load_settings
from lm_pcfg.training.engine import Engine
from lm_pcfg.training.loop import Trainer
from texts import write_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
DROPOUT = {"state_dropout": 0.2, "embedding_dropout": 0.1, "feature_dropout": 0.2}


def trained(config, *overrides: str) -> tuple[Trainer, list[float]]:
    settings = load_settings(config, list(overrides))
    trainer = Trainer(settings, Engine(settings), None)
    losses = []
    for _ in range(12):
        before = trainer.position.window.nll
        trainer.step(trainer.stream.next_step())
        trainer.settle()
        losses.append(trainer.position.window.nll - before)
    return trainer, losses


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["whole", "dropout"])
def test_graphs_train_as_launches_do(tmp_path, precision, dropout):
    model = {"nonterminals": 300, "preterminals": 600, "dimension": 64, "init": "normal(0.15, 0.1)"} | dropout
    config = write_config(
        tmp_path, device="cuda", model=model, inside={"precision": "bf16"}, networks={"precision": precision},
        optimizer={"schedule": {"kind": "linear", "warmup_steps": 4}}, ema={"decay": 0.9},
    )  # fmt: skip
    (one, losses), (other, launched) = (trained(config, f"networks.cuda_graphs={yes}") for yes in ("true", "false"))
    assert one._captured is not None
    assert other._captured is None
    assert losses == pytest.approx(launched, rel=1e-5)
    for name, parameter in one.learner.parameters.items():
        torch.testing.assert_close(parameter, other.learner.parameters[name], rtol=1e-3, atol=1e-4)
    for name, average in one.average.weights.items():
        torch.testing.assert_close(average, other.average.weights[name], rtol=1e-3, atol=1e-4)


def test_a_graph_leaves_out_an_update_that_is_not_finite(tmp_path, monkeypatch):
    config = write_config(tmp_path, device="cuda", model={"nonterminals": 64, "preterminals": 128})
    settings = load_settings(config, [])
    trainer = Trainer(settings, Engine(settings), None)
    for _ in range(5):
        trainer.step(trainer.stream.next_step())
    captured = trainer._captured
    assert captured is not None
    before = {name: parameter.clone() for name, parameter in trainer.learner.parameters.items()}
    update = captured.update
    monkeypatch.setattr(captured, "update", lambda nll, *others: update(nll * float("nan"), *others))
    trainer.step(trainer.stream.next_step())
    trainer.settle()
    assert trainer.position.skipped == 1
    assert all(torch.equal(before[name], parameter) for name, parameter in trainer.learner.parameters.items())
    monkeypatch.undo()
    trainer.step(trainer.stream.next_step())
    trainer.settle()
    assert trainer.position.skipped == 1
    assert not torch.equal(before["symbols"], trainer.learner.parameters["symbols"])
