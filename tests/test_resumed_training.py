"""Training that is stopped, killed and continued: exact resume, signals, runs that begin from others, folders."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.metrics_file import read_metrics
from lm_pcfg.training import evaluation, loop
from texts import write_text
from training_runs import EVERYTHING_ON, metrics_without_times, run, stop_after


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
