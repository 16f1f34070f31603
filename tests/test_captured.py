"""The networks as CUDA graphs against the same launches one by one: emulated on the CPU, and on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from graph_emulation import capturing
from lm_pcfg.distributed import learner
from lm_pcfg.distributed.engine import Engine
from lm_pcfg.grammar.families.shared import pcfg
from lm_pcfg.grammar.likelihood import accumulate_gradients
from lm_pcfg.settings_file import load_settings
from lm_pcfg.training import graphs
from lm_pcfg.training.steps import Steps
from texts import merged, write_config

DROPOUT = {"state_dropout": 0.2, "feature_dropout": 0.2}
CASES = {
    "plain": {},
    "dropout": {"model": DROPOUT},
    "scheduled": {"model": {"state_dropout": 0.5, "state_dropout_until": 0.3}},
    "accumulate": {"batch": {"sentences": 3, "accumulate": 2}},
    "adamw": {"optimizer": {"name": "adamw", "weight_decay": 0.1, "clip": None}},
    "released": {"model": {"parameterization": "released", "emission_temperature": 0.7}},
    "tables": {"model": {"parameterization": "tables", "state_dropout": 0.2}},
    "rank": {"model": {"family": "rank_pcfg", "rank": 5, "state_dropout": 0.2}},
    "factors": {"model": {"family": "rank_pcfg", "rank": 6144}},
    "tensor-network": {"model": {"family": "tn_pcfg", "rank": 5}},
    "rotated": {"model": {"children": "rotated", "feature_dropout": 0.2}},
    "nonterminal-root": {"model": {"root": "nonterminals"}},
    "bf16": {"networks": {"precision": "bf16"}},
    "bounded": {"model": {"parameterization": "bounded"}, "networks": {"precision": "bf16"}},
}
BASE = {
    "model": {"init": "normal(0.15, 0.1)"}, "ema": {"decay": 0.9},
    "optimizer": {"schedule": {"kind": "linear", "warmup_steps": 4}},
}  # fmt: skip


def losses_of(trainer: Steps, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        before = trainer.position.window.nll
        trainer.step(trainer.stream.next_step())
        trainer.finish_update()
        losses.append(trainer.position.window.nll - before)
    return losses


def tensors_of(trainer: Steps) -> dict[str, torch.Tensor]:
    """Everything that training changes."""
    optimizer = trainer.learner.optimizer_tensors()
    average = {f"ema.{name}": tensor for name, tensor in trainer.average.weights.items()}
    return dict(trainer.learner.parameters) | optimizer | average


# ---- emulated -------------------------------------------------------------------------------------------------------


@pytest.fixture
def emulated(monkeypatch):
    """A trainer on the CPU that thinks it has a GPU to itself: fused Adam, results read late, and graphs."""
    monkeypatch.setattr(learner, "FUSED_FROM", 0)
    monkeypatch.setattr(graphs, "send", lambda values, to: [t.copy_(v) for v, t in zip(values, to, strict=True)])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def make(config, *, captures: bool) -> Steps:
        settings = load_settings(config, [])
        trainer = Steps(settings, Engine(settings))
        trainer.learner.asynchronous, trainer.capture.allowed = True, captures
        for group in trainer.learner.optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
        optimizer = trainer.learner._torch_optimizer()

        def state() -> list[torch.Tensor]:
            moments = [tensor for values in optimizer.state.values() for tensor in values.values()]
            return [*trainer.learner.parameters.values(), *moments]

        monkeypatch.setattr(graphs, "capture", capturing(state))
        return trainer

    return make


@pytest.mark.parametrize("case", CASES)
def test_replayed_steps_are_the_launched_ones(tmp_path, emulated, case):
    config = write_config(tmp_path, **merged(BASE, CASES[case]))
    launched = emulated(config, captures=False)
    wanted = losses_of(launched, 14)
    replayed = emulated(config, captures=True)
    assert losses_of(replayed, 14) == wanted
    assert replayed.capture._captured is not None
    if case == "factors":
        assert replayed.capture._captured.leaves.inner is not None
    ours, theirs = tensors_of(replayed), tensors_of(launched)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_sizes_that_change_often_are_not_captured(tmp_path, emulated):
    model = {"nonterminals": 200, "preterminals": 300, "state_dropout": 0.5, "state_dropout_until": 1.0}
    trainer = emulated(write_config(tmp_path, **merged(BASE, {"model": model})), captures=True)
    losses_of(trainer, 6)
    assert trainer.capture._captured is None


def test_every_level_of_a_falling_dropout_is_captured(tmp_path, emulated):
    model = {"nonterminals": 512, "preterminals": 512, "state_dropout": 0.0625, "state_dropout_until": 1.0}
    config = write_config(tmp_path, **merged(BASE, {"model": model}))
    launched, replayed = emulated(config, captures=False), emulated(config, captures=True)
    shapes = []
    for _ in range(launched.total_steps):
        assert losses_of(replayed, 1) == losses_of(launched, 1)
        if replayed.capture._captured is not None:
            shapes.append(replayed.capture._captured.dropout.shape)
    assert list(dict.fromkeys(shapes)) == [(480, 480), (496, 496), ()]
    ours = tensors_of(replayed)
    for name, tensor in tensors_of(launched).items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize(("state_dropout", "captured"), [(0.5, True), (0.0, False)])
def test_a_large_grammar_is_captured_if_its_steps_are_not_large(
    tmp_path, emulated, monkeypatch, state_dropout, captured
):
    monkeypatch.setattr(pcfg, "LARGEST_CAPTURED_N", 200)
    model = {"nonterminals": 300, "preterminals": 600, "state_dropout": state_dropout}
    trainer = emulated(write_config(tmp_path, **merged(BASE, {"model": model})), captures=True)
    losses_of(trainer, 6)
    assert (trainer.capture._captured is not None) == captured


def test_a_capture_that_fails_leaves_no_trace(tmp_path, emulated, monkeypatch, capsys):
    config = write_config(tmp_path, **BASE)
    launched = emulated(config, captures=False)
    wanted = losses_of(launched, 8)
    trainer = emulated(config, captures=True)
    apply, calls = trainer.learner.apply_on_device, []

    def fail_in_the_capture(nll):
        calls.append(None)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return apply(nll)

    monkeypatch.setattr(trainer.learner, "apply_on_device", fail_in_the_capture)
    assert losses_of(trainer, 8) == wanted
    assert not trainer.capture.allowed
    assert "no memory for CUDA graphs" in capsys.readouterr().err


def test_a_restored_run_captures_anew(tmp_path, emulated):
    config = write_config(tmp_path, **BASE)
    trainer = emulated(config, captures=True)
    losses_of(trainer, 5)
    assert trainer.capture._captured is not None
    trainer.capture.forget()
    losses_of(trainer, 3)
    assert trainer.capture._captured is None
    losses_of(trainer, 1)
    assert trainer.capture._captured is not None


def test_rule_gradients_may_lie_where_the_caller_wants(tmp_path, emulated):
    """The torch backend makes its own; both ways the leaves have them, and a second batch adds to the first."""
    trainer = emulated(write_config(tmp_path, **BASE), captures=False)
    batches, inside = trainer.stream.next_step() + trainer.stream.next_step(), trainer.settings.inside
    gradients = []
    for given in (False, True):
        leaves = trainer._compute(trainer._dropout(), trainer.learner.model).detached()
        if given:
            leaves = leaves.resident([torch.zeros_like(tensor) for tensor in leaves.tensors])
        accumulate_gradients(leaves, batches, 1.0, inside)
        gradients.append([leaf.grad for leaf in leaves.tensors])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def on_gpu(config, *overrides: str) -> tuple[Steps, list[float]]:
    settings = load_settings(config, list(overrides))
    trainer = Steps(settings, Engine(settings))
    return trainer, losses_of(trainer, 12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    ("case", "nonterminals"),
    [
        *itertools.product(  # with fp32 rules; copied; in place; gradients eager
            ["plain", "dropout", "accumulate", "rotated", "bf16"], [64, 300, 1040, 2064]
        ),
        *(("tables", small) for small in (64, 300)),
        ("factors", 300),
    ],
)
def test_graphs_train_as_launches_do(tmp_path, case, nonterminals):
    model = {"nonterminals": nonterminals, "preterminals": 2 * nonterminals, "dimension": 64}
    changes = merged(BASE, {"model": model, "inside": {"precision": "bf16"}, "networks": {"precision": "tf32"}})
    config = write_config(tmp_path, device="cuda", **merged(changes, CASES[case]))
    (one, losses), (other, launched) = (on_gpu(config, f"networks.cuda_graphs={yes}") for yes in ("true", "false"))
    assert one.capture._captured is not None
    assert other.capture._captured is None
    assert losses == pytest.approx(launched, rel=1e-5)
    theirs = tensors_of(other)
    for name, tensor in tensors_of(one).items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_graph_leaves_out_an_update_that_is_not_finite(tmp_path, monkeypatch):
    config = write_config(tmp_path, device="cuda", model={"nonterminals": 64, "preterminals": 128})
    settings = load_settings(config, [])
    trainer = Steps(settings, Engine(settings))
    losses_of(trainer, 5)
    captured = trainer.capture._captured
    assert captured is not None
    before = {name: parameter.clone() for name, parameter in trainer.learner.parameters.items()}
    update = captured.update
    monkeypatch.setattr(captured, "update", lambda nll, *others: update(nll * float("nan"), *others))
    losses_of(trainer, 1)
    assert trainer.position.skipped == 1
    assert all(torch.equal(before[name], parameter) for name, parameter in trainer.learner.parameters.items())
    monkeypatch.undo()
    losses_of(trainer, 1)
    assert trainer.position.skipped == 1
    assert not torch.equal(before["symbols"], trainer.learner.parameters["symbols"])
