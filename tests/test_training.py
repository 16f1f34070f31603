"""The loop: exact resume, accumulation, skipped updates, evaluation, best and last checkpoints, statuses."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from lm_pcfg.corpus.batches import Batch
from lm_pcfg.distributed.engine import Engine
from lm_pcfg.distributed.learner import Learner
from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.settings import EvaluationSection
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.metrics_file import read_metrics
from lm_pcfg.training import evaluation, loop, steps, tracking
from lm_pcfg.training.position import Position
from lm_pcfg.training.schedules import MovingAverage, learning_rate_factor
from texts import write_config, write_text

EVERYTHING_ON = {
    "model": {
        "state_dropout": 0.25,
        "feature_dropout": 0.2,
        "children": "rotated",
        "init": "contexts(0.3, 0.2)",
    },
    "ema": {"decay": 0.9},
    "batch": {"sentences": 4, "accumulate": 2},
    "data": {"curriculum": {"start": 6}},
    "optimizer": {"name": "adamw", "weight_decay": 0.01, "schedule": {"kind": "cosine", "warmup_steps": 4}},
    "training": {"epochs": 3},
    "evaluation": {"every_epochs": 0.5},
}


def run(folder: Path, *overrides: str, name: str = "small", **changes) -> Path:
    return loop.train(load_settings(write_config(folder, name, **changes), list(overrides)))


def stop_after(monkeypatch, steps: int, number: int = signal.SIGTERM) -> None:
    """Send this process a signal right after a step, as a scheduler would."""
    original = loop.Steps.step

    def step(self, batches):
        result = original(self, batches)
        if self.position.step == steps:
            os.kill(os.getpid(), number)
        return result

    monkeypatch.setattr(loop.Steps, "step", step)


def metrics_without_times(run_folder: Path) -> list[dict]:
    timed = ("time", "ranks/", "train/words_per_second", "train/sentences_per_second", "train/seconds", "valid/seconds")
    return [
        {key: value for key, value in line.items() if not key.startswith(timed)}
        for line in read_metrics(run_folder / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run with everything on that nobody disturbed."""
    return run(tmp_path_factory.mktemp("whole"), name="whole", **EVERYTHING_ON)


@pytest.mark.parametrize("steps", [1, 4, 5, 8, 10, 16, 17])  # evaluations after 3, 5, 8, 11, 14 and the last, 17
def test_a_resumed_run_continues_bit_for_bit(tmp_path, monkeypatch, whole, steps):
    with monkeypatch.context() as patch:
        stop_after(patch, steps)
        stopped = run(tmp_path, name="stopped", **EVERYTHING_ON)
    assert not (stopped / "FINISHED").exists()
    assert checkpoint.verify(checkpoint.latest(stopped))["step"] == steps
    assert metrics_without_times(stopped)[-1]["step"] == steps  # `report` counts them; a resume writes them again
    again = run(tmp_path, "resume=auto", name="stopped", **EVERYTHING_ON)
    assert again == stopped
    assert (again / "FINISHED").exists()
    assert checkpoint.latest(whole).name == checkpoint.latest(again).name
    assert (whole / "best").resolve().name == (again / "best").resolve().name
    for file in ("model", "optimizer", "ema"):
        one, other = (load_file(checkpoint.latest(folder) / f"{file}.safetensors") for folder in (whole, again))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), file
    assert metrics_without_times(whole) == metrics_without_times(again)


@pytest.mark.parametrize("which", [1, 6])  # the second and the last of its evaluations
def test_a_signal_in_an_evaluation_ends_it_at_once(tmp_path, monkeypatch, which):
    """The run is saved with the evaluation still to do, and ends as if nobody had disturbed it."""
    options = {**EVERYTHING_ON, "evaluation": {"every_epochs": 0.5, "batch_cost": 30}}  # several batches
    whole = run(tmp_path, name="whole", **options)
    original, calls, batches = evaluation.sentence_log_probabilities, [], []

    def disturbed(grammar, sentences, **how):
        calls.append(None)
        check = how["on_batch"]

        def on_batch(lines):
            batches.append(lines)
            if len(calls) == which and len(batches) % 2:
                os.kill(os.getpid(), signal.SIGTERM)
            check(lines)

        batches.clear()
        return original(grammar, sentences, **{**how, "on_batch": on_batch})

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "sentence_log_probabilities", disturbed)
        stopped = run(tmp_path, name="stopped", **options)
    assert len(calls) == which
    assert sum(batches) < 12  # not all lines
    assert not (stopped / "FINISHED").exists()
    assert checkpoint.verify(checkpoint.latest(stopped))["evaluation_pending"]
    again = run(tmp_path, "resume=auto", name="stopped", **options)
    assert (again / "FINISHED").exists()
    assert metrics_without_times(whole) == metrics_without_times(again)


def test_resume_from_a_path_starts_a_run_of_its_own_and_leaves_the_other_alone(tmp_path):
    first = run(tmp_path, checkpoint={"keep_last": 9}, evaluation={"every_epochs": 0.5})
    early = checkpoint.list_checkpoints(first)[0]
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    second = run(tmp_path, f"resume={early}", evaluation={"every_epochs": 0.5})
    assert second != first
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before
    one, other = (load_file(checkpoint.latest(folder) / "model.safetensors") for folder in (first, second))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_settings_of_a_run_are_replaced_not_overwritten(tmp_path):
    """A kill, or a disk that is full, in the middle must not leave half of what checkpoints need to be opened."""
    folder = run(tmp_path, "training.max_steps=2")
    before = (folder / "config.yaml").read_bytes()
    os.link(folder / "config.yaml", tmp_path / "old")
    run(tmp_path, "training.max_steps=3", "resume=auto")
    assert (folder / "config.yaml").read_bytes() != before == (tmp_path / "old").read_bytes()


def test_a_run_started_from_another_has_its_own_best(tmp_path):
    first = run(tmp_path)
    second = run(tmp_path, f"resume={first}", "training.epochs=3", "optimizer.learning_rate=0.3", name="second")
    assert second != first
    assert (second / "best").resolve().parent == (second / "checkpoints").resolve()


def test_a_best_link_left_behind_by_a_kill_is_repaired(tmp_path):
    folder = run(tmp_path)
    newest = checkpoint.latest(folder)
    assert (folder / "best").resolve() == newest.resolve()
    checkpoint.point_best(folder, checkpoint.list_checkpoints(folder)[0])
    (folder / "FINISHED").unlink()  # a kill came before it, too
    run(tmp_path, "resume=auto")
    assert (folder / "best").resolve() == newest.resolve()


def test_resume_from_a_run_copied_without_links(tmp_path):
    folder = run(tmp_path)
    copy = tmp_path / "copied"
    shutil.copytree(folder, copy)  # follows links: `best` is a folder now
    again = run(tmp_path, f"resume={copy / 'best'}", "training.epochs=3")
    assert (again / "FINISHED").exists()


def test_a_signal_before_the_first_step_ends_at_once(tmp_path, monkeypatch):
    original = loop.Steps.__init__

    def slow_start(self, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        original(self, *arguments)

    monkeypatch.setattr(loop.Steps, "__init__", slow_start)
    folder = run(tmp_path)
    assert not (folder / "FINISHED").exists()
    assert checkpoint.latest(folder) is None


def test_a_new_run_never_overwrites_an_old_one(tmp_path):
    folders = [run(tmp_path, "training.max_steps=1") for _ in range(3)]
    assert [folder.name for folder in folders] == ["small", "small-2", "small-3"]


def test_two_trainings_cannot_share_a_folder(tmp_path, monkeypatch):
    original = loop.Trainer.run

    def meanwhile(self):
        with pytest.raises(loop.UserError, match="in use by another training"):
            loop.RunFolder(self.folder.path, "").claim()
        original(self)

    monkeypatch.setattr(loop.Trainer, "run", meanwhile)
    assert run(tmp_path, "training.max_steps=1").exists()


def test_what_a_crash_left_is_tidied_up_by_whoever_holds_the_folder(tmp_path):
    """Of another host, where nobody can ask whether its owner lives; abandoned, by its age."""
    folder = run(tmp_path, "training.max_steps=1")
    other = loop.RunFolder(folder, "")
    other.claim()
    left = folder / "checkpoints" / ".writing-step-00000009.elsewhere.1"
    left.mkdir()
    os.utime(left, (0, 0))
    with pytest.raises(loop.UserError, match="in use by another training"):
        run(tmp_path, "resume=auto")
    assert left.exists()
    other.release()
    run(tmp_path, "resume=auto")
    assert not left.exists()


def test_other_data_on_resume_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        run(tmp_path)
    write_text(tmp_path / "train.txt", 60, seed=99)
    with pytest.raises(loop.UserError, match="belongs to other data"):
        run(tmp_path, "resume=auto")


def test_another_model_on_resume_is_refused(tmp_path):
    run(tmp_path, "training.max_steps=1")
    with pytest.raises(loop.UserError, match=r"another vocabulary or model: model.nonterminals: 4 -> 5; keep"):
        run(tmp_path, "resume=auto", "model.nonterminals=5", "training.max_steps=2")


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


# ---- updates that are not finite ------------------------------------------------------------------------------------


def read_late(monkeypatch, late: bool) -> None:
    """True: as one process on a GPU. Adam's kernel leaves an update out, and the host learns of it a step later."""
    original, adam = steps.make_learner, torch.optim.Adam

    def make_learner(*arguments):
        made = original(*arguments)
        made.asynchronous = late
        return made

    monkeypatch.setattr(steps, "make_learner", make_learner)
    monkeypatch.setattr(torch.optim, "Adam", lambda *a, **options: adam(*a, **(options | {"fused": True})))


@pytest.fixture(params=["at once", "late"])
def reading(request, monkeypatch) -> None:
    read_late(monkeypatch, request.param == "late")


def test_reading_late_changes_nothing_but_when_it_is_known(tmp_path, monkeypatch):
    lines, weights = [], []
    for late in (False, True):
        with monkeypatch.context() as patch:
            read_late(patch, late)
            break_steps(patch, lambda call: call in (2, 5, 16))
            options = EVERYTHING_ON | {"optimizer": {}, "batch": {"sentences": 4}}
            folder = run(tmp_path, f"name=late-{late}", **options)
        lines.append(metrics_without_times(folder))
        weights.append([load_file(checkpoint.latest(folder) / f"{file}.safetensors") for file in ("model", "ema")])
    assert lines[0] == lines[1]
    assert any(line.get("train/skipped") == 3 for line in lines[0])
    for one, other in zip(*weights, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_time_of_an_update_read_late_is_counted(tmp_path, monkeypatch):
    read_late(monkeypatch, True)
    original = Learner.reader

    def slow_device(*arguments):
        read = original(*arguments)
        return lambda: time.sleep(0.05) or read()

    monkeypatch.setattr(Learner, "reader", staticmethod(slow_device))
    folder = run(tmp_path, "training.max_steps=3", "training.log_every=1", "data.valid=null")
    for line in read_metrics(folder / "metrics.jsonl"):
        assert line["time/compute"] >= 0.05
        assert line["train/seconds"] >= 0.05


def test_the_last_steps_are_in_the_metrics_without_an_evaluation_too(tmp_path):
    folder = run(tmp_path, "training.max_steps=5", "training.log_every=2", "data.valid=null")
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == [2, 4, 5]


def break_steps(monkeypatch, broken, spoil=lambda log_z: log_z * math.nan) -> None:
    """Spoil the log-likelihood of some calls (counted from 0), in training alone: NaN, and so are its gradients."""
    original, calls = Grammar.log_likelihood_unchecked, []

    def log_likelihood(self, *arguments, **options):
        result, trusted = original(self, *arguments, **options)
        calls.append(None)
        return spoil(result) if broken(len(calls) - 1) else result, trusted

    monkeypatch.setattr(Grammar, "log_likelihood_unchecked", log_likelihood)


def test_a_non_finite_update_is_skipped_counted_and_reported(tmp_path, monkeypatch, capsys, reading):
    break_steps(monkeypatch, lambda call: call in (2, 5))
    folder = run(tmp_path)
    assert (folder / "FINISHED").exists()
    model = load_file(checkpoint.latest(folder) / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in model.values())
    last = [line for line in read_metrics(folder / "metrics.jsonl") if "train/skipped" in line][-1]
    assert last["train/skipped"] == 2
    told = capsys.readouterr().err
    assert told.count("not finite, update skipped") == 2
    assert "step 3: " in told
    assert "step 6: " in told


def test_an_infinite_loss_with_finite_gradients_is_no_update(tmp_path, monkeypatch, reading):
    break_steps(monkeypatch, lambda call: call == 1, lambda log_z: log_z - math.inf)
    settings = load_settings(write_config(tmp_path))
    made = steps.Steps(settings, Engine(settings))
    weights = []
    for _ in range(3):
        made.step(made.stream.next_step())
        made.finish_update()
        weights.append({name: tensor.clone() for name, tensor in made.learner.local_weights().items()})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[1][name], weights[2][name]) for name in weights[0])
    assert (made.position.skipped, made.position.skipped_in_a_row) == (1, 0)
    assert math.isfinite(made.position.window.nll)


def test_too_many_in_a_row_stop_the_run_and_leave_the_last_good_checkpoint(tmp_path, monkeypatch, reading):
    break_steps(monkeypatch, lambda call: call >= 10)
    monkeypatch.setattr(loop, "MOST_SKIPPED_IN_A_ROW", 3)
    with pytest.raises(loop.TrainingStopped, match=r"3 updates in a row .*step-00000008"):
        run(tmp_path, "training.epochs=4")
    folder = tmp_path / "runs" / "small"
    assert not (folder / "FINISHED").exists()
    state = checkpoint.verify(checkpoint.latest(folder))
    assert state["step"] == 8
    assert state["skipped"] == 0


def test_checkpoints_are_not_replaced_while_updates_are_skipped(tmp_path, monkeypatch, reading):
    break_steps(monkeypatch, lambda call: call >= 10)
    monkeypatch.setattr(loop, "MOST_SKIPPED_IN_A_ROW", 5)
    with pytest.raises(loop.TrainingStopped):
        run(tmp_path, "checkpoint.every_steps=1", "training.epochs=4")
    names = [path.name for path in checkpoint.list_checkpoints(tmp_path / "runs" / "small")]
    assert names[-2:] == ["step-00000009", "step-00000010"]


def test_a_run_that_diverges_at_once_says_so(tmp_path):
    with pytest.raises(loop.TrainingStopped, match="updates in a row were not finite"):
        run(
            tmp_path, "model.parameterization=paper", "model.init=xavier_normal", "optimizer.learning_rate=1e15",
            "training.epochs=9",
        )  # fmt: skip


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


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (1, 1)])
def test_a_run_resumed_with_other_steps_still_ends_with_its_data(before, after, tmp_path):
    """Larger or smaller steps, as more or fewer ranks make them."""
    folder = run(tmp_path, f"batch.accumulate={before}", "training.max_steps=5", "training.epochs=2")
    batches = checkpoint.verify(checkpoint.latest(folder))["data"]["batches"]
    run(tmp_path, f"batch.accumulate={after}", "training.epochs=2", "resume=auto")
    state = checkpoint.verify(checkpoint.latest(folder))
    assert (state["data"]["epoch"], state["data"]["batch"]) == (2, 0)
    assert state["step"] == 5 + -(-(batches - 5 * before) // after) + -(-batches // after)


def test_a_run_from_another_ones_checkpoint_that_is_killed_early_starts_from_it_again(tmp_path, monkeypatch):
    source = run(tmp_path, "training.max_steps=4", name="source")
    stop_after(monkeypatch, steps=5)
    monkeypatch.setattr(loop.Trainer, "_save", lambda self: None)  # as if killed before its first checkpoint
    begun = run(tmp_path, f"resume={source}", "training.max_steps=9", name="begun")
    monkeypatch.undo()
    assert checkpoint.latest(begun) is None
    again = run(tmp_path, "resume=auto", "training.max_steps=9", name="begun")
    assert again == begun
    first = next(iter(read_metrics(again / "metrics.jsonl")))
    assert first["step"] > 4  # not from the beginning


def test_the_best_is_saved_even_if_an_update_was_skipped_just_before(tmp_path, monkeypatch):
    values = iter([5.0, 1.0, 4.0])
    original = loop.Steps.step

    def step(self, batches):
        applied = original(self, batches)
        if self.position.step == 8:
            self.position.skipped_in_a_row = 1
        elif self.position.step == 9:
            self.position.skipped_in_a_row = 0
        return applied

    def ranked(self, nll, impossible, s_f1=None, types=None):
        return take(self, next(values), impossible)

    take = Position.take_evaluation
    monkeypatch.setattr(loop.Steps, "step", step)
    monkeypatch.setattr(Position, "take_evaluation", ranked)
    folder = run(tmp_path, "training.max_steps=12", "evaluation.every_steps=4", "evaluation.every_epochs=null")
    assert (folder / "checkpoints" / "step-00000008").is_dir()
    assert (folder / "best").resolve().name == "step-00000008"
