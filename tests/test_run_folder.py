"""What lies in a run folder besides tensors: nothing of it is lost or trusted without a word."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lm_pcfg.errors import UserError
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.metrics_file import read_metrics
from lm_pcfg.training import loop
from texts import write_config

SHORT = {"training": {"epochs": 9, "max_steps": 3, "log_every": 1}, "data": {"valid": None}}


def train(folder: Path, *overrides: str) -> Path:
    return loop.train(load_settings(write_config(folder, **SHORT), list(overrides)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("trained"), "checkpoint.every_steps=1", "checkpoint.keep_last=9")


@pytest.fixture
def run(tmp_path, trained) -> Path:
    """A copy of the run that a test may spoil."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "small", symlinks=True))


def steps(run: Path, name: str = "metrics.jsonl") -> list[int]:
    return [line["step"] for line in read_metrics(run / name, pytest.fail)]


class TestCheckpointsGone:
    @pytest.mark.parametrize("note", ["last_checkpoint", "best"])  # the second: a run of the version before
    def test_resume_refuses_and_touches_nothing(self, run, note):
        shutil.rmtree(run / "checkpoints")
        if note == "best":
            (run / "last_checkpoint").unlink()
            os.symlink("checkpoints/step-00000003", run / "best")
        before = (run / "metrics.jsonl").read_bytes()
        with pytest.raises(UserError, match=r"small has had checkpoints, and none is left: bring .*name=") as caught:
            train(run.parents[1], "resume=auto")
        assert "\n" not in str(caught.value)
        assert (run / "metrics.jsonl").read_bytes() == before

    def test_a_run_stopped_before_its_first_checkpoint_begins_again(self, run, capsys):
        shutil.rmtree(run / "checkpoints")
        (run / "last_checkpoint").unlink()
        again = train(run.parents[1], "resume=auto", "training.max_steps=2")
        assert again == run
        assert (steps(run), steps(run, "metrics-1.jsonl")) == ([1, 2], [1, 2, 3])
        said = capsys.readouterr().err.splitlines()
        assert [line for line in said if "its metrics are now metrics-1.jsonl" in line]


class TestMetrics:
    def test_a_hole_is_told_at_resume(self, run, capsys):
        lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        (run / "metrics.jsonl").write_bytes(lines[0])
        train(run.parents[1], "resume=auto", "training.max_steps=4")
        (told,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
        assert "not as it was written up to step 3: 2 of 3 lines are missing; training goes on" in told
        assert steps(run) == [1, 4]
        train(run.parents[1], "resume=auto", "training.max_steps=5")
        assert "warning" not in capsys.readouterr().err

    def test_a_resume_from_further_back_is_no_hole(self, run, capsys):
        shutil.rmtree(checkpoint.latest(run))
        train(run.parents[1], "resume=auto")
        assert "warning" not in capsys.readouterr().err
        assert steps(run) == [1, 2, 3]
