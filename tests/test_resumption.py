"""A resume that can be trusted: the command that continues a run, changed settings, finished and failed runs."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from command_line import lm_pcfg
from lm_pcfg.distributed import launcher
from lm_pcfg.errors import UserError
from lm_pcfg.inference.verification import verify
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint, run_folder
from lm_pcfg.storage.metrics_file import read_metrics
from lm_pcfg.storage.run_folder import RunFolder, earlier_configs
from lm_pcfg.training import loop, resumption
from lm_pcfg.training.position import Position, figure
from texts import write_config, write_text

SHORT = {"training": {"epochs": 9, "max_steps": 8, "log_every": 4}, "data": {"valid": None}}
DIVERGING = ["optimizer.learning_rate=1e15", "model.init=xavier_normal", "data.valid=train.txt", "training.max_steps=6"]


def train(folder: Path, *overrides: str) -> Path:
    return loop.train(load_settings(write_config(folder, **SHORT), list(overrides)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run that has finished its first epoch, of 8 steps."""
    return train(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def run(tmp_path, trained) -> Path:
    """A copy of the run that a test may change; its texts are in the working folder."""
    for text in ("train.txt", "valid.txt"):
        shutil.copy(trained.parents[1] / text, tmp_path)
    copy = shutil.copytree(trained, tmp_path / "runs" / "small", symlinks=True)
    for config in [copy / "config.yaml", checkpoint.latest(copy) / "config.yaml"]:
        assert str(trained.parents[1]) in config.read_text()
    return Path(copy)


def resume(run: Path, *overrides: str) -> Path:
    """Continue the copy with the texts of the original, so that only the overrides differ."""
    before = load_settings(run / "config.yaml").data
    return train(run.parents[1], f"data.train={before.train}", "resume=auto", *overrides)


def last_step(run: Path) -> int:
    return list(read_metrics(run / "metrics.jsonl", pytest.fail))[-1]["step"]


# ---- the command that continues a run -------------------------------------------------------------------------------


def test_the_command_of_the_stop_message_continues_that_very_run(tmp_path, monkeypatch, capsys):
    """The second run of a name has another one; with the first command, resume=auto would mean the first run."""
    monkeypatch.chdir(tmp_path)
    first = train(tmp_path, "training.max_steps=1")
    original = loop.Steps.step

    def step(self, batches):
        os.kill(os.getpid(), signal.SIGINT)
        return original(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Steps, "step", step)
        second = train(tmp_path, "runs_folder=runs", "seed=3", "training.max_steps=2")
    assert second == Path("runs/small-2")
    *_, said = capsys.readouterr().err.splitlines()
    stopped, _, command = said.partition("; to continue it: ")
    assert stopped == "stopped by SIGINT after step 1"
    assert command == "lm_pcfg train --config runs/small-2/config.yaml resume=auto"
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    result = lm_pcfg(*shlex.split(command)[1:], cwd=tmp_path)
    assert result.returncode == 0, result.stderr.decode()
    assert "run runs/small-2, continued from step 1" in result.stderr.decode()
    assert "settings that change" not in result.stderr.decode()
    assert (second / "FINISHED").exists()
    assert load_settings(second / "config.yaml").seed == 3
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before


def test_a_run_that_reached_its_most_steps_says_how_to_go_on(run, tmp_path, capsys):
    resume(run, "training.max_steps=9")
    *_, said = capsys.readouterr().err.splitlines()
    command = said.partition("; to continue it: ")[2]
    assert command == f"lm_pcfg train --config {run}/config.yaml resume=auto training.max_steps=null"


@pytest.mark.parametrize(
    ("typed", "launch", "words"),
    [
        ("/nowhere/bin/lm_pcfg", [], "/nowhere/bin/lm_pcfg train"),
        ("/some/lm_pcfg/__main__.py", [], "PYTHON -m lm_pcfg train"),
        ("a script of one's own.py", [], "lm_pcfg train"),
        ("lm_pcfg/train.py", [], "PYTHON lm_pcfg/train.py"),
        (
            "/repo/lm_pcfg/train.py",
            [
                "/usr/bin/python3",
                "/nowhere/accelerate",
                "launch",
                "--config_file",
                "my file",
                "lm_pcfg/train.py",
                "x=1",
            ],
            "/nowhere/accelerate launch --config_file 'my file' lm_pcfg/train.py",
        ),
        (
            "lm_pcfg/train.py",
            ["python-of-another", "-m", "torch.distributed.run", "--nproc-per-node=2", "lm_pcfg/train.py"],
            "python-of-another -m torch.distributed.run --nproc-per-node=2 lm_pcfg/train.py",
        ),
    ],
)
def test_the_command_begins_as_it_was_typed(monkeypatch, typed, launch, words):
    monkeypatch.setattr("sys.argv", [typed, "train"])
    monkeypatch.setattr("sys.executable", "PYTHON")
    monkeypatch.setattr(launcher, "command_line", lambda: launch)
    wanted = f"to continue it: {words} --config 'runs/a b/config.yaml' resume=auto"
    assert resumption.how_to_continue(Path("runs/a b")) == wanted
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert resumption.how_to_continue(Path("runs/a b")) == f"{wanted} (here; on the other hosts likewise)"
    monkeypatch.setattr(launcher, "has_launcher", lambda: True)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert resumption.how_to_continue(Path("runs/a b")) == "the same job, submitted or requeued, continues it"


# ---- finished runs, changed settings --------------------------------------------------------------------------------


def test_a_finished_run_says_so_and_stays_as_it_is(run, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    resume(run, "optimizer.learning_rate=0.5")
    said = capsys.readouterr().err
    assert f"{run} has ended before: finished after step 8. Nothing is left to train." in said
    assert "not used: optimizer.learning_rate: 0.002 -> 0.5\n" in said
    assert "raise training.epochs" in said
    assert "not finished" not in said
    second = run.with_name("small-2")
    second.mkdir()
    (second / "config.yaml").touch()
    resume(run)
    command = f"lm_pcfg train --config {second}/config.yaml resume=auto name=small-2"
    assert f"{second} has not finished; to continue it: {command}\n" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


def test_a_finished_run_keeps_the_checkpoints_that_its_new_settings_would_delete(run, capsys):
    shutil.copytree(checkpoint.latest(run), run / "checkpoints" / "step-00000004")
    resume(run, "checkpoint.keep_last=1")
    assert "not used: checkpoint.keep_last: 2 -> 1\n" in capsys.readouterr().err
    assert [folder.name for folder in checkpoint.list_checkpoints(run)] == ["step-00000004", "step-00000008"]
    resume(run, "checkpoint.keep_last=1", "training.max_steps=9")
    assert [folder.name for folder in checkpoint.list_checkpoints(run)] == ["step-00000009"]


def test_changed_settings_are_told_and_the_earlier_ones_are_kept(run, capsys):
    before = (run / "config.yaml").read_bytes()
    changes = ["optimizer.learning_rate=0.5", "seed=7", "model.state_dropout=0.25"]
    resume(run, *changes, "training.max_steps=9", f"data.train={run.parents[1] / 'train.txt'}")  # of the same content
    said = capsys.readouterr().err.splitlines()
    begin = said.index(f"settings that change from here on (the earlier ones are in {run / 'config.1.yaml'}):")
    text, *others = sorted(said[begin + 1 : begin + 6])
    assert text.startswith("  data.train: /")
    assert others == [
        "  model.state_dropout: 0.0 -> 0.25", "  optimizer.learning_rate: 0.002 -> 0.5", "  seed: 0 -> 7",
        "  training.max_steps: 8 -> 9",
    ]  # fmt: skip
    assert (run / "config.1.yaml").read_bytes() == before
    assert load_settings(run / "config.yaml").optimizer.learning_rate == 0.5
    assert last_step(run) == 9
    assert verify(run).damaged == []
    (run / "config.1.yaml").write_text("a_setting_of_another_version: 1")
    assert verify(run).damaged == []
    (run / "config.1.yaml").write_text("model: [")
    assert [line for line in verify(run).damaged if "config.1.yaml" in line]


def test_the_checkpoint_of_an_earlier_stretch_is_no_damage(run, monkeypatch, capsys):
    """The run was stopped before it saved a checkpoint with its new settings."""
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "run", lambda self: None)
        resume(run, "optimizer.learning_rate=0.5", "training.max_steps=9")
    assert load_settings(run / "config.yaml").optimizer.learning_rate == 0.5
    capsys.readouterr()
    assert verify(run).damaged == []
    resume(run, "optimizer.learning_rate=0.5", "training.max_steps=9")  # the change is new to the checkpoint
    said = capsys.readouterr().err
    assert "  optimizer.learning_rate: 0.002 -> 0.5\n" in said
    assert "warning" not in said
    assert [file.name for file in earlier_configs(run)] == ["config.1.yaml"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("data.vocabulary.size=5", "data.vocabulary.size: 10000 -> 5"),
        ("data.vocabulary.lowercase=true", "data.vocabulary.lowercase: false -> true"),
        ("data.sentencepiece=other.model", "data.sentencepiece: null -> other.model"),
        ("model.eos=explicit", "model.eos: implicit -> explicit"),
        ("model.init=normal(0.1, 0.1)", "model.init: normal(0.5, 0.5) -> normal(0.1, 0.1)"),
        ("model.family=tables", "model.family: sn_pcfg -> tables"),
    ],
)
def test_what_a_checkpoint_depends_on_cannot_change(run, change, told):
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(UserError) as caught:
        resume(run, change, "training.max_steps=9")
    message = str(caught.value)
    assert f"cannot continue with another vocabulary or model: {told}" in message
    assert "or start another run" in message
    assert "\n" not in message
    assert (run / "config.yaml").read_bytes() == before
    assert not (run / "config.1.yaml").exists()
    assert (run / "FINISHED").exists()


def test_another_seed_inside_an_epoch_is_refused_by_its_name(run):
    resume(run, "training.max_steps=9")
    with pytest.raises(UserError, match=r"batch 1\) belongs to other data .* \(changed: seed: 0 -> 7\)"):
        resume(run, "seed=7", "training.max_steps=12")


def test_a_text_of_another_content_under_the_same_name_is_told(tmp_path, capsys):
    run = train(tmp_path)
    write_text(tmp_path / "train.txt", 60, seed=9)
    train(tmp_path, "resume=auto", "training.max_steps=9")
    assert "warning: the training text has another content than before" in capsys.readouterr().err
    assert last_step(run) == 9


class NoVocabulary:
    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)


def test_earlier_configs_are_kept_once_and_not_without_end(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path, "")

    def begin(config: str) -> Path | None:
        return folder.begin(config, NoVocabulary())

    assert begin("a: 1\nresume: false\n") is None
    assert begin("a: 1\nresume: auto\n") is None  # that is no other setting
    assert begin("a: 2\n") == tmp_path / "config.1.yaml"
    with monkeypatch.context() as patch:  # a kill before the new one is there
        original = run_folder.replace_file
        patch.setattr(run_folder, "replace_file", lambda path, new: path.name == "config.yaml" or original(path, new))
        begin("a: 3\n")
    assert begin("a: 3\n") == tmp_path / "config.2.yaml"
    for number in range(4, 40):
        begin(f"a: {number}\n")
    kept = [file.read_text() for file in earlier_configs(tmp_path)]
    assert kept == ["a: 1\nresume: auto\n", *(f"a: {number}\n" for number in range(20, 39))]


# ---- runs that diverge ----------------------------------------------------------------------------------------------


class Tracker:
    status, waited = "", 0.0

    def log(self, step, metrics):
        pass

    def finish(self, status, timeout=0.0):
        self.status, self.waited = status, timeout


def test_a_run_that_diverges_fails(tmp_path, monkeypatch):
    """After too many skipped updates in a row, too: see test_search.py."""
    tracker = Tracker()
    monkeypatch.setattr(loop, "track", lambda *arguments: tracker)
    config = str(write_config(tmp_path, **SHORT))
    result = lm_pcfg("train", "--config", config, *DIVERGING, cwd=tmp_path)
    assert result.returncode == 1
    error = result.stderr.decode().splitlines()[-1]
    assert error.startswith("lm_pcfg: error: ")
    assert "at its end, step 6, no sentence of the validation text has a finite probability" in error
    assert "try a lower learning rate" in error
    run = tmp_path / "runs" / "small"
    assert (run / "FAILED").read_text() == error.removeprefix("lm_pcfg: error: ") + "\n"
    assert not (run / "FINISHED").exists()
    assert tracker.status == "FAILED"
    assert 10.0 <= tracker.waited <= 20.0  # a run of a few seconds has its MLflow still to import


@pytest.mark.parametrize(
    ("good", "why"),
    [
        (4, "no update since the evaluation before was finite; checkpoint to go back to: .*/step-0000000[48];"),
        (0, "no update was finite; checkpoint to go back to: none;"),
    ],
)
def test_a_run_whose_last_updates_were_all_skipped_fails(tmp_path, monkeypatch, good, why):
    original = loop.Steps._count

    def count(self, update, sentences, words):
        original(self, update if self.position.step <= good else replace(update, nll=math.nan), sentences, words)

    monkeypatch.setattr(loop.Steps, "_count", count)
    valid = f"data.valid={tmp_path / 'valid.txt'}" if good else "data.valid=null"
    with pytest.raises(loop.TrainingStopped, match=f"at its end, step 8, {why}"):
        train(tmp_path, valid, "evaluation.every_steps=4")
    assert (tmp_path / "runs" / "small" / "FAILED").exists()
    monkeypatch.undo()
    finished = train(tmp_path, valid, "evaluation.every_steps=4")
    assert (finished / "FINISHED").exists()


def test_one_skipped_update_at_the_end_is_no_divergence(tmp_path, monkeypatch):
    original = loop.Steps._count

    def count(self, update, sentences, words):
        original(self, update if self.position.step != 9 else replace(update, nll=math.nan), sentences, words)

    monkeypatch.setattr(loop.Steps, "_count", count)
    valid = f"data.valid={tmp_path / 'valid.txt'}"
    run = train(tmp_path, valid, "evaluation.every_steps=4", "training.max_steps=9")
    assert (run / "FINISHED").exists()
    assert checkpoint.latest(run).name == "step-00000009"


def test_the_failure_of_a_diverged_run_cannot_be_removed(tmp_path):
    """Nor forgotten: a kill between the last checkpoint and the file FAILED leaves the same."""
    diverging = [*DIVERGING, f"data.valid={tmp_path / 'train.txt'}", "training.max_steps=1"]
    with pytest.raises(loop.TrainingStopped) as first:
        train(tmp_path, *diverging)
    run = tmp_path / "runs" / "small"
    assert checkpoint.latest(run).name == "step-00000001"  # the diverged one, which is none to go back to
    assert "checkpoint to go back to: none;" in str(first.value)
    (run / "FAILED").unlink()
    with pytest.raises(loop.TrainingStopped) as second:
        train(tmp_path, *diverging, "resume=auto")
    assert str(second.value) == str(first.value)
    assert (run / "FAILED").exists()
    assert not (run / "FINISHED").exists()


def test_a_run_that_ends_far_above_the_vocabularys_size_fails(tmp_path, capsys):
    """Its figures are finite. The checkpoint of the first evaluation is no better: none to go back to."""
    settings = ["optimizer.learning_rate=0.3", f"data.valid={tmp_path / 'valid.txt'}", "evaluation.every_steps=4"]
    why = r"at its end, step 8, the validation perplexity, \S+, is more than 10 times the vocabulary's size, 17"
    with pytest.raises(loop.TrainingStopped, match=f"{why}; checkpoint to go back to: none"):
        train(tmp_path, *settings)
    run = tmp_path / "runs" / "small"
    assert (run / "checkpoints" / "step-00000004").is_dir()
    assert (run / "FAILED").exists()
    assert capsys.readouterr().err.count("warning: the validation perplexity, ") == 2


def test_how_far_above_the_vocabularys_size_divergence_begins():
    position = Position(step=1)
    position.take_evaluation(math.log(9_999), 0, None, 1_000)
    assert position.divergence() == ""
    position.take_evaluation(math.log(86_518_435_096.718), 0, None, 1_726)
    assert position.divergence() == ""  # there is a model that is better
    position = Position(step=1)
    position.take_evaluation(math.log(86_518_435_096.718), 0, None, 1_726)
    why = "the validation perplexity, 8.65e+10, is more than 10 times the vocabulary's size, 1,726"
    assert position.divergence() == why
    assert Position(best_nll=math.log(2e6), best_step=3).describe_best(" (so)") == (
        ", best validation perplexity 2.00e+06 (so) at step 3"
    )
    assert [figure(value) for value in (117.3694, 999_999.0, math.inf, math.nan)] == [
        "117.369", "999999.000", "inf", "nan",
    ]  # fmt: skip


def test_a_run_without_a_validation_text_fails_if_it_diverges(tmp_path):
    with pytest.raises(loop.TrainingStopped, match=r"at its end, step 6, \d of the last 6 updates were not finite"):
        train(tmp_path, *DIVERGING, "data.valid=null")
    assert (tmp_path / "runs" / "small" / "FAILED").exists()


def position_after(steps: int, skipped: set[int], evaluated: tuple[int, ...] = ()) -> Position:
    position = Position()
    for step in range(1, steps + 1):
        position.step = step
        if step in skipped:
            position.skip()
        else:
            position.skipped_in_a_row = 0
        if step in evaluated:
            position.take_evaluation(1.0, 0)
    return position


@pytest.mark.parametrize(
    ("steps", "skipped", "evaluated", "why"),
    [
        (9, {9}, (), ""),
        (100, {99, 100}, (), ""),
        (100, {98, 99, 100}, (), "3 of the last 20 updates were not finite"),
        (100, set(range(82, 100, 2)) | {95, 97, 99}, (), "12 of the last 20 updates were not finite"),
        (9, {2, 3, 4, 5, 6, 7, 9}, (), "7 of the last 9 updates were not finite"),
        (2, {1, 2}, (), "no update was finite"),
        (2, {1, 2}, (2,), "no update was finite"),
        (9, {9}, (4, 8, 9), ""),
        (10, {9, 10}, (4, 8, 10), ""),
        (12, {9, 10, 11, 12}, (4, 8, 12), "no update since the evaluation before was finite"),
        (12, {10, 11, 12}, (4, 8, 12), ""),
        (12, {10, 11, 12}, tuple(range(1, 13)), "no update since the evaluation before was finite"),
        (9, {2, 3, 4, 6, 7, 8}, (9,), ""),  # a finite evaluation tells that the weights can be used
    ],
)
def test_what_divergence_is(steps, skipped, evaluated, why):
    position = position_after(steps, skipped, evaluated)
    assert position.divergence() == why
    assert Position.of(json.loads(json.dumps(asdict(position)))) == position  # after a resume it is the same


def test_a_run_that_failed_is_left_alone(run, monkeypatch):
    (run / "FINISHED").unlink()
    (run / "FAILED").write_text("it diverged\n")
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(
        UserError, match=r"small has FAILED and is left alone \(it diverged\); .* remove .*small/FAILED"
    ):
        resume(run, "training.max_steps=9")
    with monkeypatch.context() as patch:  # a launcher that starts its workers again
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        (run / ".lock").write_text(launcher.identity())
        with pytest.raises(UserError, match="is left alone"):
            resume(run, "training.max_steps=9", "resume=false")
    assert (run / "config.yaml").read_bytes() == before
    assert verify(run).damaged == []
    (run / "FAILED").write_bytes(b"\xff\x00")
    assert verify(run).damaged == [f"{run / 'FAILED'} is damaged"]


def test_a_run_that_failed_before_its_first_checkpoint_can_only_begin_anew(tmp_path):
    (tmp_path / "FAILED").write_text("it diverged\n")
    start = run_folder.Start(tmp_path, continued=True)
    with pytest.raises(UserError, match=r"remove .*/FAILED to begin anew in this folder$"):
        start.find_checkpoint(pytest.fail)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(UserError, match=r"remove .*/FAILED to continue from its last checkpoint$"):
        start.find_checkpoint(pytest.fail)


@pytest.mark.parametrize("way", ["removed", "the checkpoint is named"])
def test_a_run_that_failed_can_be_continued_on_purpose(run, way):
    (run / "FAILED").write_text("it diverged\n")
    again = ["training.max_steps=9", "optimizer.learning_rate=1e-3"]
    if way == "removed":
        (run / "FAILED").unlink()
    else:
        again.append(f"resume={checkpoint.latest(run)}")
    assert resume(run, *again) == run
    assert last_step(run) == 9
    assert not (run / "FAILED").exists()
