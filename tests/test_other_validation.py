"""A resume that validates on something else: the best so far is forgotten, and stays on the disk."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint
from lm_pcfg.training import loop, resumption
from lm_pcfg.training.position import Position
from texts import write_config, write_text

SHORT = {"training": {"epochs": 9, "max_steps": 8}}


def train(folder: Path, *overrides: str) -> Path:
    return loop.train(load_settings(write_config(folder, **SHORT), list(overrides)))


@pytest.fixture(scope="module")
def validated(tmp_path_factory) -> Path:
    """A run of 8 steps, the best of which is the 4th."""
    ranked = Position.take_evaluation
    values = iter([1.0, 2.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Position, "take_evaluation", lambda self, *_: ranked(self, next(values), 0))
        folder = tmp_path_factory.mktemp("validated")
        return train(folder, "evaluation.every_steps=4", "checkpoint.keep_last=1")


def continue_validated(run: Path, folder: Path, *overrides: str) -> tuple[Path, Position]:
    """Make two steps more of a copy, with an evaluation after each."""
    copy = Path(shutil.copytree(run, folder / "runs" / "small", symlinks=True))
    before = load_settings(run / "config.yaml").data
    texts = [f"data.train={before.train}", f"data.valid={before.valid}"]
    more = ["training.max_steps=10", "evaluation.every_steps=1", "checkpoint.keep_last=1", "resume=auto"]
    train(folder, *texts, *more, *overrides)
    return copy, Position.of(checkpoint.verify(checkpoint.latest(copy)))


def test_the_best_of_another_validation_text_is_forgotten_and_its_checkpoint_stays(validated, tmp_path, capsys):
    other = write_text(tmp_path / "other.txt", 12, seed=7)
    run, position = continue_validated(validated, tmp_path, f"data.valid={other}")
    said = capsys.readouterr().err
    former = run / "checkpoints" / "step-00000004"
    line = "warning: the best checkpoint is chosen on other lines from now on: the best so far is forgotten, and "
    assert f"{line}the next evaluation is the best again; its checkpoint stays: {former}\n" in said
    assert position.best_step in (9, 10)
    assert (run / "best").resolve().name == f"step-{position.best_step:08d}"
    assert former.is_dir()
    assert f"at step {position.best_step}; to continue" in said.splitlines()[-1]
    assert position.evaluations_since_best == 10 - position.best_step


def test_another_length_of_validation_lines_forgets_the_best(validated, tmp_path, capsys):
    _, position = continue_validated(validated, tmp_path, "evaluation.max_length=5")
    assert "is chosen on other lines from now on" in capsys.readouterr().err
    assert position.best_step in (9, 10)


def test_a_validation_text_of_another_content_under_the_same_name_is_told(validated, tmp_path, capsys):
    text = Path(load_settings(validated / "config.yaml").data.valid)
    before = text.read_bytes()
    try:
        write_text(text, 12, seed=9)
        _, position = continue_validated(validated, tmp_path)
    finally:
        text.write_bytes(before)
    assert "warning: the validation text has another content than before, under the same" in capsys.readouterr().err
    assert position.best_step in (9, 10)


@pytest.mark.parametrize("version", ["this one", "an earlier one"])
def test_the_same_validation_text_keeps_the_best(validated, tmp_path, capsys, monkeypatch, version):
    """By whatever name. A checkpoint of an earlier version has no fingerprint: there the name has to do."""
    names = []
    if version == "this one":
        names = [
            f"data.valid={shutil.copy(load_settings(validated / 'config.yaml').data.valid, tmp_path / 'same.txt')}"
        ]
    else:
        original = Position.of
        monkeypatch.setattr(Position, "of", lambda state: original({**state, "validated": ""}))
    _, position = continue_validated(validated, tmp_path, *names)
    assert "forgotten" not in capsys.readouterr().err
    assert (position.best_step, position.evaluations_since_best) == (4, 3)


def test_without_a_fingerprint_another_name_forgets_the_best(validated, tmp_path, capsys, monkeypatch):
    original = Position.of
    monkeypatch.setattr(Position, "of", lambda state: original({**state, "validated": ""}))
    other = write_text(tmp_path / "other.txt", 12, seed=7)
    continue_validated(validated, tmp_path, f"data.valid={other}")
    assert "is chosen on other lines from now on" in capsys.readouterr().err


def test_a_finished_run_with_another_validation_text_is_left_alone(validated, tmp_path, capsys):
    other = write_text(tmp_path / "other.txt", 12, seed=7)
    _, position = continue_validated(validated, tmp_path, f"data.valid={other}", "training.max_steps=8")
    said = capsys.readouterr().err
    assert "Nothing is left to train" in said
    assert "forgotten" not in said
    assert position.best_step == 4


def test_the_best_of_every_validation_text_stays(tmp_path, monkeypatch):
    position = Position(step=9, best_nll=1.0, best_step=9, ranking=[[0, 1.0, 9]], former_bests=[4], validated="before")
    settings = SimpleNamespace(evaluation=SimpleNamespace(select="likelihood"))
    steps = SimpleNamespace(position=position, corpora=None, settings=settings)
    monkeypatch.setattr(resumption, "measured_on", lambda *_: "now")
    assert "under the same name" in resumption.forget_other_best(steps, resumption.Changes(), tmp_path)
    assert (position.best_step, position.best_steps(1)) == (None, [4, 9])


def test_no_more_former_bests_are_written_than_are_read(tmp_path):
    position = Position(step=1001, best_nll=1.0, best_step=1001, former_bests=list(range(1, 1001)))
    position.set_best_aside()
    assert position.former_bests == list(range(2, 1002))
    position.set_best_aside()  # there was no best since
    assert position.former_bests == list(range(2, 1002))
    tensors = {"weight": torch.zeros(2)}
    saved = checkpoint.save(tmp_path, 1001, model=tensors, optimizer=tensors, ema=None, state=asdict(position))
    assert Position.of(checkpoint.verify(saved)) == position


def test_a_run_without_patience_left_stays_as_it_is(validated, tmp_path, capsys):
    """Else a line more in the validation text would train it further, and make a worse model the best."""
    other = write_text(tmp_path / "other.txt", 12, seed=7)
    copy = Path(shutil.copytree(validated, tmp_path / "runs" / "small", symlinks=True))
    train_text = load_settings(validated / "config.yaml").data.train
    overrides = [f"data.train={train_text}", f"data.valid={other}", "resume=auto", "evaluation.patience=1"]
    train(tmp_path, *overrides, "training.max_steps=20")
    assert checkpoint.latest(copy).name == "step-00000008"
    assert (copy / "best").resolve().name == "step-00000004"
    assert "forgotten" not in capsys.readouterr().err
