"""Which checkpoint is meant: the list of a run, its best one, what pruning spares, and what --checkpoint accepts."""

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.checkpoint import CheckpointError
from lm_pcfg.storage.run_folder import Start, choose_start
from texts import write_config


def save(run: Path, step: int) -> Path:
    return checkpoint.save(run, step, model={"weight": torch.ones(3)}, optimizer={}, ema=None, state={})


def temporary_names(run: Path) -> list[str]:
    return [entry.name for entry in (run / "checkpoints").iterdir() if entry.name.startswith(".")]


class TestListBestPrune:
    def test_list_is_by_step_and_knows_only_whole_names(self, tmp_path: Path) -> None:
        for step in (20, 3, 123456789, 100):
            save(tmp_path, step)
        for name in ("step-", "step-5x", "step-5.tmp", "xstep-5", ".writing-step-00000005.h.1"):
            (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / "step-00000006").touch()
        names = [folder.name for folder in checkpoint.list_checkpoints(tmp_path)]
        assert names == ["step-00000003", "step-00000020", "step-00000100", "step-123456789"]
        latest = checkpoint.latest(tmp_path)
        assert latest is not None
        assert latest.name == "step-123456789"
        assert checkpoint.latest(tmp_path / "nowhere") is None

    def test_best_is_a_relative_link_and_moves(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        first, second = save(run, 1), save(run, 2)
        assert checkpoint.best(run) is None
        checkpoint.point_best(run, first)
        assert os.readlink(run / "best") == "checkpoints/step-00000001"
        checkpoint.point_best(run, second)
        assert checkpoint.best(run) == second
        run.rename(tmp_path / "moved")
        assert checkpoint.best(tmp_path / "moved") == tmp_path / "moved" / "checkpoints" / "step-00000002"
        assert sorted(entry.name for entry in (tmp_path / "moved").iterdir()) == ["best", "checkpoints"]

    def test_best_that_dangles_or_was_copied(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        first = save(tmp_path, 1)
        checkpoint.point_best(tmp_path, save(tmp_path, 2))
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000002")
        assert checkpoint.best(tmp_path) is None
        assert capsys.readouterr().err == ""
        assert checkpoint.resolve_checkpoint(tmp_path) == (tmp_path, first)
        assert "which is no checkpoint of this run: the newest is used" in capsys.readouterr().err
        (tmp_path / "best").unlink()
        shutil.copytree(first, tmp_path / "best")
        assert checkpoint.best(tmp_path) == tmp_path / "best"
        assert checkpoint.resolve_checkpoint(tmp_path / "best") == (tmp_path, tmp_path / "best")
        checkpoint.point_best(tmp_path, first)
        assert checkpoint.best(tmp_path) == first

    def test_best_must_belong_to_the_run(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no checkpoint of"):
            checkpoint.point_best(tmp_path / "one", save(tmp_path / "other", 1))

    @pytest.mark.parametrize("call", ["symlink", "replace"])
    def test_an_interrupted_move_keeps_the_old_best(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        first, second = save(tmp_path, 1), save(tmp_path, 2)
        checkpoint.point_best(tmp_path, first)

        def fail(*_: Any) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, call, fail)
        with pytest.raises(CheckpointError, match="cannot point"):
            checkpoint.point_best(tmp_path, second)
        assert checkpoint.best(tmp_path) == first
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["best", "checkpoints"]

    def test_a_link_that_cannot_be_made_is_told_in_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*arguments: Any, **options: Any) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        saved = save(tmp_path, 1)
        monkeypatch.setattr(os, "symlink", refuse)
        with pytest.raises(CheckpointError, match=r"cannot point .*best to step-00000001: Operation not permitted$"):
            checkpoint.point_best(tmp_path, saved)

    @pytest.mark.parametrize("keep_last", [0, 1, 2])
    def test_so_many_are_kept_as_are_asked_for(self, tmp_path: Path, keep_last: int) -> None:
        folders = [save(tmp_path, step) for step in range(3)]
        checkpoint.prune(tmp_path, keep_last)
        assert checkpoint.list_checkpoints(tmp_path) == folders[3 - keep_last :]

    def test_prune_spares_the_last_the_best_and_the_kept(self, tmp_path: Path) -> None:
        folders = [save(tmp_path, step) for step in range(1, 8)]
        checkpoint.point_best(tmp_path, folders[1])
        checkpoint.prune(tmp_path, keep_last=2, keep={folders[3]})
        assert checkpoint.list_checkpoints(tmp_path) == [folders[1], folders[3], folders[5], folders[6]]
        checkpoint.prune(tmp_path, keep_last=10, keep=set())
        assert len(checkpoint.list_checkpoints(tmp_path)) == 4
        checkpoint.prune(tmp_path, keep_last=0, keep=set())
        assert checkpoint.list_checkpoints(tmp_path) == [folders[1]]

    def test_prune_interrupted_leaves_nothing_half_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save(tmp_path, 1)
        newest = save(tmp_path, 2)

        def crash(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", crash)
            with pytest.raises(KeyboardInterrupt):
                checkpoint.prune(tmp_path, keep_last=1, keep=set())
        assert checkpoint.list_checkpoints(tmp_path) == [newest]
        assert len(temporary_names(tmp_path)) == 1
        save(tmp_path, 3)
        assert temporary_names(tmp_path) == []


class TestResolve:
    def test_from_checkpoint_run_and_link(self, tmp_path: Path) -> None:
        run = tmp_path / "runs" / "one"
        first, second = save(run, 1), save(run, 2)
        assert checkpoint.resolve_checkpoint(first) == (run, first)
        assert checkpoint.resolve_checkpoint(run) == (run, second)
        checkpoint.point_best(run, first)
        assert checkpoint.resolve_checkpoint(run) == (run, first)
        assert checkpoint.resolve_checkpoint(run / "best") == (run, first)

    def test_default_is_the_run_written_to_last(self, tmp_path: Path) -> None:
        runs = tmp_path / "runs"
        now = time.time()
        for age, name in enumerate(["b", "c", "a"]):
            os.utime(save(runs / name, 1), (now - 100 * age,) * 2)
        (runs / "just-started").mkdir()
        (runs / "notes.txt").touch()
        assert checkpoint.resolve_checkpoint(None, runs)[0].name == "b"
        os.utime(save(runs / "a", 2), (now + 100,) * 2)
        assert checkpoint.resolve_checkpoint(None, runs)[1] == runs / "a" / "checkpoints" / "step-00000002"

    def test_relative_to_the_working_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = save(tmp_path / "runs" / "one", 1)
        monkeypatch.chdir(tmp_path)
        assert checkpoint.resolve_checkpoint() == (folder.parents[1], folder)

    def test_errors_name_the_way_out(self, tmp_path: Path) -> None:
        runs = tmp_path / "runs"

        def message(path: Path | None) -> str:
            with pytest.raises(CheckpointError) as caught:
                checkpoint.resolve_checkpoint(path, runs)
            assert "\n" not in str(caught.value)
            return str(caught.value)

        way_out = "train one with `lm_pcfg train --config configs/tiny.yaml`, or name one with --checkpoint"
        assert message(None) == f"no run under {runs}/: {way_out}"
        (runs / "new").mkdir(parents=True)
        assert message(None) == f"no run under {runs}/ has a checkpoint yet: {way_out}"
        assert "neither a run nor a checkpoint folder" in message(runs / "new")
        (runs / "new" / "config.yaml").touch()
        assert "has no checkpoint yet" in message(runs / "new")
        # Some commands have an argument for it, others the option --checkpoint.
        assert (
            message(runs / "nowhere") == f"{runs}/nowhere does not exist: name the folder of a run or of a checkpoint"
        )
        assert message(runs / "new").endswith("or name another")
        assert "is not a folder" in message(runs / "new" / "config.yaml")
        (runs / "new" / "FAILED").write_text("it diverged\n")
        assert message(runs / "new") == f"{runs}/new has no checkpoint: it has FAILED (it diverged)"


class TestBesideATraining:
    @pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "gone"), CheckpointError("damaged")])
    def test_a_checkpoint_that_goes_while_it_is_read_is_chosen_again(self, tmp_path: Path, error: Exception) -> None:
        first, second = save(tmp_path, 1), save(tmp_path, 2)

        def read(folder: Path) -> Path:
            if folder == second:
                shutil.rmtree(second)
                raise error
            return folder

        assert checkpoint.with_chosen(tmp_path, read) == first

    def test_five_times_at_most(self, tmp_path: Path) -> None:
        folders = [save(tmp_path, step) for step in range(1, 7)]
        calls = []

        def read(folder: Path) -> None:
            calls.append(folder)
            shutil.rmtree(folder)
            raise CheckpointError("damaged")

        with pytest.raises(CheckpointError, match="faster than they are read; try again"):
            checkpoint.with_chosen(tmp_path, read)
        assert calls == folders[:0:-1]

    def test_another_error_is_told_at_once(self, tmp_path: Path) -> None:
        calls = []

        def read(folder: Path) -> None:
            calls.append(folder)
            raise OSError(errno.EIO, "Input/output error")

        newest = save(tmp_path, 1)
        with pytest.raises(OSError, match="Input/output error"):
            checkpoint.with_chosen(tmp_path, read)
        assert calls == [newest]


def test_a_run_to_resume_from_means_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    """Not its best, which is what a run means for inference."""
    source = tmp_path / "source"
    first, second, third = (save(source, step) for step in (1, 2, 3))
    checkpoint.point_best(source, first)
    settings = load_settings(write_config(tmp_path), [f"resume={source}"])
    assert choose_start(settings, "") == Start(tmp_path / "runs" / "small", third)
    (third / checkpoint.MODEL).write_bytes(b"")
    assert choose_start(settings, "").given == second
    itself = load_settings(write_config(tmp_path), [f"resume={source}", f"runs_folder={tmp_path}", "name=source"])
    assert choose_start(itself, "") == Start(source, continued=True)


def test_a_run_that_an_earlier_version_named_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only ASCII letters were left of the name of a config file."""
    settings = load_settings(write_config(tmp_path), ["resume=auto", "name=größe"])
    runs = tmp_path / "runs"
    assert choose_start(settings, "").folder == runs / "größe"
    save(runs / "gr-e", 1)
    assert choose_start(settings, "") == Start(runs / "gr-e", continued=True)
    assert f"there is no {runs / 'größe'}: resume=auto means {runs / 'gr-e'}" in capsys.readouterr().err
    save(runs / "größe", 1)
    assert choose_start(settings, "").folder == runs / "größe"


def test_a_checkpoint_to_resume_from_goes_on_in_its_run_if_it_is_the_newest(tmp_path: Path) -> None:
    first, second = (save(tmp_path / "runs" / "small", step) for step in (1, 2))
    other = save(tmp_path / "runs" / "other", 5)

    def start(folder: Path) -> Start:
        return choose_start(load_settings(write_config(tmp_path), [f"resume={folder}"]), "")

    (tmp_path / "runs" / "small" / "config.yaml").touch()
    assert start(second) == Start(tmp_path / "runs" / "small", second)
    assert start(first) == Start(tmp_path / "runs" / "small-2", first)
    assert start(other) == Start(tmp_path / "runs" / "small-2", other)
    (first / checkpoint.MODEL).write_bytes(b"")
    with pytest.raises(CheckpointError, match="is truncated"):
        start(first)
