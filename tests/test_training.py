"""The loop: accumulation, the loss, evaluation, best and last checkpoints, schedules, statuses."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lm_pcfg.corpus.batches import Batch
from lm_pcfg.distributed.engine import Engine
from lm_pcfg.settings import EvaluationSection
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.metrics_file import read_metrics
from lm_pcfg.training import evaluation, loop, tracking
from lm_pcfg.training.position import Position
from lm_pcfg.training.schedules import MovingAverage, learning_rate_factor
from texts import write_config
from training_runs import break_steps, run, stop_after


def trainer(folder: Path, *overrides: str, **changes) -> loop.Steps:
    settings = load_settings(write_config(folder, **changes), list(overrides))
    return loop.Steps(settings, Engine(settings))


@pytest.mark.parametrize("normalise", ["sentences", "tokens"])
def test_accumulation_computes_the_grammar_once_and_equals_one_large_batch(tmp_path, monkeypatch, normalise):
    """The same eight sentences in one batch, and in four micro-batches of two."""
    # Where a gradient is rounding alone (a bias that cancels in the softmax), Adam would make it a full step.
    monkeypatch.setattr("lm_pcfg.distributed.learner.EPSILON", 1e-3)
    options = [f"loss.normalise={normalise}", "model.state_dropout=0.25", "optimizer.clip=null"]
    large = trainer(tmp_path, "batch.sentences=8", *options)
    small = trainer(tmp_path, "batch.sentences=2", "batch.accumulate=4", *options)
    indices = small.stream.plan._indices(0)[:4]
    pieces = [Batch(**vars(batch)) for batch in (small_batch(small, index) for index in indices)]
    whole = small_batch(large, torch.cat([torch.from_numpy(index) for index in indices]).numpy())
    forwards = []
    monkeypatch.setattr(small.learner.model, "forward", counted(small.learner.model.forward, forwards))
    assert large.step([whole])
    assert small.step(pieces)
    assert len(forwards) == 1
    for one, other in zip(large.learner.parameters.values(), small.learner.parameters.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_cpu_updates_large_models_in_one_pass(tmp_path, monkeypatch):
    """Small ones, whose runs can be repeated bit for bit, tensor by tensor."""
    monkeypatch.setattr("lm_pcfg.distributed.learner.EPSILON", 1e-3)
    small = trainer(tmp_path)
    weights = sum(parameter.numel() for parameter in small.learner.parameters.values())
    monkeypatch.setattr("lm_pcfg.distributed.learner.FUSED_FROM", weights)
    large = trainer(tmp_path)
    assert [made.learner.optimizer.param_groups[0]["fused"] for made in (small, large)] == [False, True]
    for made in (small, large):
        assert all(made.step(made.stream.next_step()) for _ in range(2))
    ours, theirs = (made.learner.optimizer_tensors() for made in (large, small))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)
    for one, other in zip(large.learner.parameters.values(), small.learner.parameters.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def small_batch(trained: loop.Steps, indices):
    from lm_pcfg.corpus.batches import make_batch

    return make_batch(trained.stream.plan.sentences, indices)


def counted(function, calls):
    def wrapper(*arguments):
        calls.append(arguments)
        return function(*arguments)

    return wrapper


def test_the_loss_is_normalised_by_what_was_asked_for(tmp_path):
    gradients = {}
    for normalise in ("sentences", "tokens"):
        made = trainer(tmp_path, f"loss.normalise={normalise}", "optimizer.clip=null", "training.max_steps=1")
        batch = made.stream.next_step()
        captured = {}
        made.learner.optimizer.step = lambda made=made, captured=captured: captured.update(
            symbols=made.learner.plain_model.symbols.grad.clone()
        )
        made.step(batch)
        gradients[normalise] = captured["symbols"], batch[0]
    batch = gradients["tokens"][1]
    ratio = batch.n_tokens / batch.n_sentences
    torch.testing.assert_close(gradients["sentences"][0], gradients["tokens"][0] * ratio)


def test_clipping_limits_the_gradient(tmp_path):
    made = trainer(tmp_path, "optimizer.clip=0.01")
    norms = []
    made.learner.optimizer.step = lambda: norms.append(
        torch.nn.utils.get_total_norm([parameter.grad for parameter in made.learner.parameters.values()]).item()
    )
    made.step(made.stream.next_step())
    assert norms[0] == pytest.approx(0.01, rel=1e-3)
    assert made.position.window.gradient_norm > 0.01


def test_the_last_steps_are_in_the_metrics_without_an_evaluation_too(tmp_path):
    folder = run(tmp_path, "training.max_steps=5", "training.log_every=2", "data.valid=null")
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == [2, 4, 5]


def test_the_best_evaluation_has_the_fewest_impossible_sentences():
    position = Position(step=1)
    assert position.take_evaluation(2.0, impossible=1)
    assert not position.take_evaluation(1.0, impossible=3)
    assert not position.take_evaluation(None, impossible=9)
    assert position.evaluations_since_best == 2
    position.step = 4
    assert position.take_evaluation(5.0, impossible=0)
    assert (position.best_step, position.evaluations_since_best) == (4, 0)


# ---- evaluation, patience, checkpoints ------------------------------------------------------------------------------


def evaluated_steps(folder: Path) -> list[int]:
    return [line["step"] for line in read_metrics(folder / "metrics.jsonl") if "valid/ppl" in line]


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["training.epochs=2"], [8, 16]),
        (["training.epochs=2", "evaluation.every_epochs=0.5"], [4, 8, 12, 16]),
        (["training.epochs=4", "evaluation.every_epochs=2"], [16, 32]),
        (["training.epochs=1", "evaluation.every_epochs=null", "evaluation.every_steps=3"], [3, 6, 8]),
        (["training.max_steps=5"], [5]),
    ],
    ids=lambda value: ",".join(map(str, value)),
)
def test_evaluations_happen_when_asked_for(tmp_path, overrides, steps):
    assert evaluated_steps(run(tmp_path, "optimizer.learning_rate=1e-4", *overrides)) == steps


@pytest.mark.parametrize(("batches", "due_every"), [(10, 1), (20, 2), (30, 3)])
def test_a_tenth_of_an_epoch_is_not_missed_by_rounding(batches, due_every):
    """0.3 / 0.1 is 2.9999999999999996."""
    section = EvaluationSection(every_epochs=0.1)
    due = []
    for epoch in range(4):
        for batch in range(batches):
            last = batch + 1 == batches
            state = {"epoch": epoch + last, "batch": 0 if last else batch + 1}
            stream = SimpleNamespace(batches_per_epoch=lambda _: batches, state=lambda state=state: state)
            due.append(evaluation.is_due(section, epoch * batches + batch + 1, stream, epoch, batch))
    assert due == [step % due_every == 0 for step in range(1, 4 * batches + 1)]


def test_patience_ends_a_run_and_best_stays_with_the_best(tmp_path, monkeypatch):
    scores = iter([3.0, 2.0, 2.5, 2.4, 9.9])
    real = evaluation.corpus_score
    monkeypatch.setattr(
        evaluation, "corpus_score", lambda sentences, log_p: loop_score(real(sentences, log_p), next(scores))
    )
    folder = run(tmp_path, "training.epochs=9", "evaluation.patience=2", "checkpoint.keep_last=1")
    assert evaluated_steps(folder) == [8, 16, 24, 32]
    assert (folder / "best").resolve().name == "step-00000016"
    assert [path.name for path in checkpoint.list_checkpoints(folder)] == ["step-00000016", "step-00000032"]
    assert "no improvement" in (folder / "FINISHED").read_text()
    assert run(tmp_path, "resume=auto", "training.epochs=9", "evaluation.patience=2") == folder  # nothing left to do
    assert evaluated_steps(folder) == [8, 16, 24, 32]


def loop_score(score, nll_per_token):
    from dataclasses import replace

    return replace(score, nll=nll_per_token * score.tokens)


def test_training_lowers_the_loss_and_the_average_is_what_is_evaluated(tmp_path):
    folder = run(tmp_path, "ema.decay=0.5", "training.epochs=12", "evaluation.patience=null")
    lines = list(read_metrics(folder / "metrics.jsonl"))
    perplexities = [line["valid/ppl"] for line in lines if "valid/ppl" in line]
    assert perplexities[-1] < 0.85 * perplexities[0]
    from lm_pcfg.inference.trained import load_trained

    averaged, raw = (load_trained(folder, weights=weights, device="cpu") for weights in ("auto", "raw"))
    assert (averaged.weights, raw.weights) == ("ema", "raw")
    assert not torch.equal(averaged.grammar.left, raw.grammar.left)


def test_one_word_lines_are_left_out_where_the_root_cannot_make_them(tmp_path):
    made = trainer(tmp_path, "model.root=nonterminals")
    assert made.corpora.train.skipped.too_short > 0
    assert made.corpora.train.lengths.min() == 2
    explicit = trainer(tmp_path, "model.root=nonterminals", "model.eos=explicit")
    assert explicit.corpora.train.skipped.too_short == 0
    assert explicit.corpora.train.lengths.min() == 2  # the word and <eos>
    assert explicit.step(explicit.stream.next_step())


def test_explicit_ends_count_the_same_tokens(tmp_path):
    implicit, explicit = (
        trainer(tmp_path, f"model.eos={eos}").stream.next_step()[0] for eos in ("implicit", "explicit")
    )
    assert sum(explicit.lengths) == sum(implicit.lengths) + len(implicit.lengths)
    assert explicit.n_tokens == implicit.n_tokens == implicit.n_words + implicit.n_sentences


# ---- schedules and averages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.5, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.5, 0.0]),
    ],
)
def test_learning_rates(kind, expected):
    from lm_pcfg.settings import ScheduleSection

    schedule = ScheduleSection(kind=kind, warmup_steps=2)
    factors = [learning_rate_factor(schedule, step, 102) for step in (0, 1, 2, 52, 102)]
    assert factors == pytest.approx(expected)


def test_moving_average():
    average = MovingAverage({"weight": torch.zeros(1)}, decay=0.999)
    average.update({"weight": torch.ones(1)})
    assert average.weights["weight"].item() == pytest.approx(1 - 1 / 10)  # (1 + 0) / (10 + 0) of the old value


# ---- MLflow ---------------------------------------------------------------------------------------------------------


def tracked(folder: Path):
    from mlflow import MlflowClient

    run_id = (folder / "mlflow_run_id").read_text().strip()
    return MlflowClient(os.environ["MLFLOW_TRACKING_URI"]).get_run(run_id)


def test_statuses_and_one_mlflow_run_over_a_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/tracking.db")
    monkeypatch.chdir(tmp_path)
    on = {"tracking": {"mlflow": True}}
    monkeypatch.setattr(loop, "SECONDS_FOR_TRACKING", 120.0)  # a busy machine must not make this test fail
    with monkeypatch.context() as patch:
        stop_after(patch, 3, signal.SIGINT)
        folder = run(tmp_path, **on)
    first = tracked(folder)
    assert first.info.status == "KILLED"
    assert run(tmp_path, "resume=auto", **on) == folder
    second = tracked(folder)
    assert second.info.run_id == first.info.run_id
    assert second.info.status == "FINISHED"
    assert second.data.params["model.nonterminals"] == "4"
    assert second.data.metrics["valid/ppl"] == pytest.approx(
        [line["valid/ppl"] for line in read_metrics(folder / "metrics.jsonl") if "valid/ppl" in line][-1]
    )
    finish = tracking.Tracker.finish
    with monkeypatch.context() as patch:
        patch.setattr(
            tracking.Tracker, "finish", lambda self, status, _: finish(self, status, 120.0)
        )  # busy, see above
        break_steps(patch, lambda call: True)
        with pytest.raises(loop.TrainingStopped):
            run(tmp_path, "training.epochs=4", name="failing", **on)
    assert tracked(tmp_path / "runs" / "failing").info.status == "FAILED"


def test_a_dead_tracking_server_does_not_stop_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr(tracking.Tracker.finish, "__defaults__", (2.0,))
    folder = run(tmp_path, "training.max_steps=3", tracking={"mlflow": True})
    assert (folder / "FINISHED").exists()
    assert "metrics lost" in capsys.readouterr().err
