"""What lies in a run folder besides tensors: nothing of it is lost or trusted without a word."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lm_pcfg.errors import UserError
from lm_pcfg.inference.trained import load_trained
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint, durable, notes, run_folder
from lm_pcfg.storage.metrics_file import read_metrics
from lm_pcfg.training import loop
from lm_pcfg.training.resumption import good_checkpoint
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


class TestRenamedCheckpoint:
    def test_it_is_named_and_no_resume_begins_with_it(self, run, capsys):
        """Its name says that it is the newest: each resume would begin with it again, and drop what came since."""
        renamed = run / "checkpoints" / "step-00000040"
        (run / "checkpoints" / "step-00000002").rename(renamed)
        for last in (4, 5):
            train(run.parents[1], "resume=auto", f"training.max_steps={last}")
            said = capsys.readouterr().err.splitlines()
            (told,) = [line for line in said if line.startswith("warning")]
            assert (
                f"passed over: {renamed} has another name than it was written with: rename it to step-0000000" in told
            )
            assert f"continued from step {last - 1}" in " ".join(said)
        assert steps(run) == [1, 2, 3, 4, 5]

    def test_it_is_no_checkpoint_to_go_back_to(self, run):
        for number in (2, 3):
            shutil.rmtree(run / "checkpoints" / f"step-0000000{number}")
        first = run / "checkpoints" / "step-00000001"
        assert good_checkpoint(run, 5) == first
        first.rename(first.with_name("step-00000004"))
        assert good_checkpoint(run, 5) is None


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


class TestDurability:
    def test_a_file_is_synced_then_renamed_then_its_folder_is_synced(self, tmp_path, monkeypatch):
        calls, fsync, replace = [], os.fsync, os.replace

        def recorded_fsync(descriptor):
            calls.append("fsync folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "fsync file")
            fsync(descriptor)

        def recorded_replace(*names):
            calls.append("rename")
            replace(*names)

        monkeypatch.setattr(os, "fsync", recorded_fsync)
        monkeypatch.setattr(os, "replace", recorded_replace)
        durable.replace_file(tmp_path / "file", b"content")
        assert calls == ["fsync file", "rename", "fsync folder"]

    def test_every_file_and_folder_of_a_run_is_synced(self, tmp_path, monkeypatch):
        synced, fsync = set(), os.fsync

        def recorded(descriptor):
            synced.add(os.fstat(descriptor).st_ino)
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", recorded)
        (tmp_path / "other").mkdir()
        other = train(tmp_path / "other")
        folder = train(tmp_path, f"resume={other}", "training.max_steps=5", "runs_folder=" + str(tmp_path / "a" / "b"))
        loop.RunFolder(folder, "").remember_tracking_id("0" * 32)
        written = {path for path in folder.rglob("*") if path.name != ".lock"}
        assert {"started_from", "mlflow_run_id", "FINISHED", "last_checkpoint"} < {path.name for path in written}
        not_synced = [path for path in {*written, folder, *folder.parents[:3]} if path.stat().st_ino not in synced]
        assert not_synced == []

    def test_litter_of_the_dead_is_swept_at_the_next_start(self, run):
        dead, random = 2**22 + 1, "0123456789abcdef" * 2
        litter = [
            run / f".writing-best.{durable._host()}.{dead}",
            run / f"config.yaml.{random}.{durable._host()}.{dead}.tmp",
            run / f"config.yaml.{random}.tmp",  # of the version before
            run / f"config.yaml.{random}.{durable._host()}.{10**30}.tmp",
            run / ".metrics.jsonl.new",
            run / "vocab" / f"words.txt.{random}.{durable._host()}.{dead}.tmp",
            run / "checkpoints" / f".writing-step-00000009.{durable._host()}.{dead}",
        ]
        litter[0].symlink_to("checkpoints/step-00000001")
        for file in litter[1:6]:
            file.touch()
            os.utime(file, (0, 0))
        (litter[6] / "vocab").mkdir(parents=True)
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
            living = run / f"FINISHED.{random}.{durable._host()}.{other.pid}.tmp"
            living.touch()
            claimed = run_folder.RunFolder(run, "")
            claimed.claim()
            claimed.release()
            other.communicate(b"\n")
        assert [path for path in litter if os.path.lexists(path)] == []
        assert living.exists()
        assert checkpoint.verify(checkpoint.latest(run))


class Words:
    """In place of a vocabulary."""

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)


class TestEarlierSettings:
    @staticmethod
    def begin(folder: Path, config: str) -> str | None:
        kept = run_folder.RunFolder(folder, "").begin(config, Words())
        assert (folder / "config.yaml").read_text() == config
        return kept and kept.name

    def test_they_are_kept_under_numbers_if_they_differ(self, tmp_path):
        assert self.begin(tmp_path, "seed: 1\nresume: false\n") is None
        assert self.begin(tmp_path, "seed: 1\nresume: auto\n") is None  # how the command was given is no difference
        assert self.begin(tmp_path, "seed: 2\nresume: auto\n") == "config.1.yaml"
        assert self.begin(tmp_path, "seed: 3\n") == "config.2.yaml"
        assert self.begin(tmp_path, "seed: 3\n") is None
        texts = [file.read_text() for file in run_folder.earlier_configs(tmp_path)]
        assert texts == ["seed: 1\nresume: auto\n", "seed: 2\nresume: auto\n"]
        (tmp_path / "config.2.yaml").rename(tmp_path / "config.11.yaml")
        assert self.begin(tmp_path, "seed: 4\n") == "config.12.yaml"
        assert [file.name for file in run_folder.earlier_configs(tmp_path)] == [
            "config.1.yaml", "config.11.yaml", "config.12.yaml",
        ]  # fmt: skip

    def test_a_kill_in_between_keeps_them_once(self, tmp_path):
        self.begin(tmp_path, "seed: 1\n")
        self.begin(tmp_path, "seed: 2\n")
        (tmp_path / "config.yaml").write_text("seed: 1\n")
        assert self.begin(tmp_path, "seed: 2\n") == "config.1.yaml"
        assert len(run_folder.earlier_configs(tmp_path)) == 1

    def test_of_many_the_first_and_the_newest_stay(self, tmp_path):
        for seed in range(24):
            self.begin(tmp_path, f"seed: {seed}\n")
            expected = list(range(1, seed + 1))
            if len(expected) > 20:
                expected = [1, *expected[-19:]]
            found = [file.name for file in run_folder.earlier_configs(tmp_path)]
            assert found == [f"config.{number}.yaml" for number in expected]

    def test_a_file_that_is_no_config_is_not_kept(self, tmp_path):
        (tmp_path / "config.yaml").write_bytes(b"#" * ((1 << 20) + 1))
        assert self.begin(tmp_path, "seed: 1\n") is None
        (tmp_path / "config.yaml").write_bytes(b"#" * (1 << 20))
        assert self.begin(tmp_path, "seed: 1\n") == "config.1.yaml"


class TestClaim:
    def test_the_lock_has_the_newest_launcher_alone(self, tmp_path):
        for launcher in ("a long name of a launcher", "another"):
            folder = run_folder.RunFolder(tmp_path / "runs" / "new", launcher)
            assert folder.claim()
            with pytest.raises(UserError, match="is in use by another training; give this one another name="):
                run_folder.RunFolder(folder.path, "").claim()
            assert run_folder._launched_by(folder.path) == launcher
            folder.release()
        assert not folder.claim(lambda: False)
        assert folder.claim()  # it was let go again
        folder.release()
        assert run_folder._launched_by(tmp_path) == ""

    @pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EIO])
    def test_file_systems_without_locks(self, tmp_path, monkeypatch, number):
        def flock(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(run_folder.fcntl, "flock", flock)
        folder = run_folder.RunFolder(tmp_path, "")
        if number == errno.EIO:
            with pytest.raises(UserError, match=r"cannot write to .*: Input/output error; set runs_folder=\.\.\."):
                folder.claim()
        else:
            assert folder.claim()
        folder.release()


class TestNotes:
    def test_what_a_run_says_of_itself(self, tmp_path):
        folder = run_folder.RunFolder(tmp_path, "")
        assert (folder.finished, folder.tracking_id, run_folder.failure_of(tmp_path)) == (None, None, None)
        folder.mark("FINISHED", "the last epoch")
        folder.mark("FAILED", "the loss is not finite")
        folder.remember_tracking_id("0123abcd")
        folder.remember_environment("{}")
        assert (folder.finished, folder.tracking_id) == ("the last epoch", "0123abcd")
        assert run_folder.failure_of(tmp_path) == "the loss is not finite"
        assert (tmp_path / "environment.json").read_text() == "{}"
        assert notes.damaged_notes(tmp_path) == []
        (tmp_path / "FAILED").write_bytes(b"\0")
        (tmp_path / "started_from").write_bytes(b"x" * ((1 << 16) + 1))
        (tmp_path / "last_checkpoint").write_bytes(b"x" * (1 << 16))  # just so many bytes
        assert run_folder.failure_of(tmp_path) == "its reason cannot be read"
        assert notes.damaged_notes(tmp_path) == [f"{tmp_path / name} is damaged" for name in ("started_from", "FAILED")]
        folder.begin("", Words())
        assert (folder.finished, run_folder.failure_of(tmp_path)) == (None, None)
        assert not (tmp_path / "started_from").exists()

    def test_only_a_damaged_id_of_the_tracking_is_told(self, tmp_path, capsys):
        folder = run_folder.RunFolder(tmp_path, "")
        assert folder.tracking_id is None
        folder.remember_tracking_id("0123abcd")
        assert folder.tracking_id == "0123abcd"
        assert capsys.readouterr().err == ""
        folder.remember_tracking_id("../x")
        assert folder.tracking_id is None
        assert "mlflow_run_id is damaged: a new MLflow run begins" in capsys.readouterr().err

    def test_where_a_run_began(self, tmp_path):
        own, other = (tmp_path / name / "checkpoints" / "step-00000001" for name in ("own", "other"))
        for source in (own, other):
            source.mkdir(parents=True)
        folder = run_folder.RunFolder(tmp_path / "own", "")
        folder.begin("", Words(), own)
        assert not (tmp_path / "own" / "started_from").exists()  # it goes on with its own
        folder.begin("", Words(), other)
        assert (tmp_path / "own" / "started_from").read_text() == f"{other}\n"
        folder.begin("", Words(), own)
        assert (tmp_path / "own" / "started_from").exists()

    def test_runs_of_a_name_that_have_not_ended(self, tmp_path):
        ends = (None, "FINISHED", None, "FAILED")
        for number, end in enumerate(ends, start=1):
            run = tmp_path / ("run" if number == 1 else f"run-{number}")
            run_folder.RunFolder(run, "").claim()
            (run / "config.yaml").touch()
            if end:
                (run / end).touch()
        assert run_folder.unfinished(tmp_path / "run") == [tmp_path / "run", tmp_path / "run-3"]

    def test_a_note_that_cannot_be_written_is_one_line(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match=r"^cannot write checkpoint step-1 into last_checkpoint: Not a directory$"):
            run_folder.remember_checkpoint(tmp_path / "file", Path("step-1"))
        with pytest.raises(UserError, match=r"^cannot write to .*file: Not a directory$"):
            run_folder.RunFolder(tmp_path / "file", "").mark("FINISHED", "")


class TestChoice:
    def test_a_folder_that_another_training_took_meanwhile_is_left_alone(self, tmp_path, monkeypatch):
        """It is chosen before the lock; another run begins and ends there until the lock is taken."""
        settings = load_settings(write_config(tmp_path, **SHORT), [])
        original = run_folder.choose_start
        others: list[Path] = []

        def choose_start(*given):
            start = original(*given)
            if not others:
                others.append(start.folder)
                start.folder.mkdir(parents=True)
                (start.folder / "config.yaml").write_text("of another run")
                (start.folder / ".lock").write_text("another launcher")
            return start

        monkeypatch.setattr(run_folder, "choose_start", choose_start)
        start, folder = run_folder.claim_start(settings, "this launcher")
        folder.release()
        assert start.folder.name == "small-2"
        assert (others[0] / "config.yaml").read_text() == "of another run"
        assert (others[0] / ".lock").read_text() == "another launcher"

    def test_starts_of_one_name_at_the_same_time_get_a_folder_each(self, tmp_path, run):
        """None of them has written anything yet: what another holds is no run, but taken."""
        config = write_config(tmp_path, **SHORT)
        new = load_settings(config, ["name=new"])
        begun = [run_folder.claim_start(new, f"launcher {number}") for number in range(3)]
        assert [start.folder.name for start, _ in begun] == ["new", "new-2", "new-3"]
        assert [run_folder._launched_by(start.folder) for start, _ in begun] == [f"launcher {k}" for k in range(3)]
        from_another = load_settings(config, ["name=new", f"resume={run}"])
        begun.append(run_folder.claim_start(from_another, ""))
        assert begun[-1][0] == run_folder.Start(tmp_path / "runs" / "new-4", checkpoint.latest(run).resolve())
        for _, folder in begun:
            folder.release()
        assert [path.name for path in run.parent.iterdir()] == ["small"]

    @pytest.mark.parametrize("resume", ["auto", "the run", "its newest checkpoint"])
    def test_a_run_that_another_training_holds_is_not_continued_elsewhere(self, run, resume):
        named = {"auto": "auto", "the run": run, "its newest checkpoint": checkpoint.latest(run)}[resume]
        settings = load_settings(write_config(run.parents[1], **SHORT), [f"resume={named}"])
        holder = run_folder.RunFolder(run, "")
        assert holder.claim()
        with pytest.raises(UserError, match=rf"^{run} is in use by another training; give this one another name=\S*$"):
            run_folder.claim_start(settings, "")
        holder.release()

    def test_a_run_whose_checkpoints_and_settings_are_gone_is_still_one(self, run):
        """Its note of the last checkpoint is left, as after a clean-up of large and old files."""
        for file in run.iterdir():
            if file.name != "last_checkpoint":
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        start, folder = run_folder.claim_start(load_settings(write_config(run.parents[1], **SHORT), []), "")
        folder.release()
        assert start.folder.name == "small-2"

    def test_a_checkpoint_that_is_no_longer_the_newest_starts_a_run_of_its_own(self, run, monkeypatch):
        settings = load_settings(write_config(run.parents[1], **SHORT), [f"resume={checkpoint.latest(run)}"])
        original = run_folder.RunFolder.claim

        def claim(self, is_right=lambda: True):
            if self.path == run:
                shutil.copytree(run / "checkpoints" / "step-00000003", run / "checkpoints" / "step-00000004")
            return original(self, is_right)

        monkeypatch.setattr(run_folder.RunFolder, "claim", claim)
        start, folder = run_folder.claim_start(settings, "")
        folder.release()
        assert start.folder.name == "small-2"

    def test_workers_that_are_started_again_go_on_in_the_run_of_their_launcher(self, tmp_path, monkeypatch):
        settings = load_settings(write_config(tmp_path, **SHORT), [])
        for launcher, name in (("one", "small"), ("two", "small-2")):
            start, folder = run_folder.claim_start(settings, launcher)
            assert start == run_folder.Start(tmp_path / "runs" / name)
            folder.begin("", Words())
            folder.release()
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        assert run_folder.choose_start(settings, "two") == run_folder.Start(tmp_path / "runs" / "small-3")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        chosen = [run_folder.choose_start(settings, launcher) for launcher in ("one", "two", "three")]
        assert [start.folder.name for start in chosen] == ["small", "small-2", "small-3"]
        assert [start.continued for start in chosen] == [True, True, False]
        shutil.rmtree(tmp_path / "runs" / "small")  # or its start failed while small-2 was begun
        assert run_folder.choose_start(settings, "two") == run_folder.Start(
            tmp_path / "runs" / "small-2", continued=True
        )

    def test_a_failed_run_names_the_file_to_remove(self, tmp_path):
        run_folder.RunFolder(tmp_path, "").mark("FAILED", "the loss is not finite")
        with pytest.raises(
            UserError, match=rf"\(the loss is not finite\); .* or remove {tmp_path / 'FAILED'} to begin anew"
        ):
            run_folder.Start(tmp_path, continued=True).find_checkpoint(pytest.fail)


class TestSmallFiles:
    @pytest.mark.parametrize("content", [b"0123\xff\n", b"", b"../../x\n", b"a\x00b"])
    def test_a_damaged_mlflow_run_id_is_told_and_a_new_run_begins(self, run, capsys, content):
        (run / "mlflow_run_id").write_bytes(content)
        assert run_folder.RunFolder(run, "").tracking_id is None
        assert capsys.readouterr().err == f"warning: {run / 'mlflow_run_id'} is damaged: a new MLflow run begins\n"
        (run / "mlflow_run_id").write_text("0123abcd\n")
        assert run_folder.RunFolder(run, "").tracking_id == "0123abcd"

    @pytest.mark.parametrize("content", [b"/runs/\xff/checkpoints/step-1\n", b"a\x00b", b"", b"/nowhere/step-1\n"])
    def test_a_damaged_started_from_is_one_line(self, run, content):
        shutil.rmtree(run / "checkpoints")
        (run / "last_checkpoint").unlink()
        (run / "started_from").write_bytes(content)
        with pytest.raises(UserError, match=r"is missing|is damaged: it should name a checkpoint"):
            train(run.parents[1], "resume=auto")

    def test_a_run_that_starts_anew_forgets_where_another_began(self, run):
        shutil.rmtree(run)
        run.mkdir()
        (run / "started_from").write_text("/nowhere/step-1\n")  # killed before it was a run
        assert train(run.parents[1]) == run
        assert not (run / "started_from").exists()


class TestBest:
    def test_a_link_that_a_kill_left_behind_is_repaired(self, run):
        (run / "best").unlink(missing_ok=True)
        checkpoint.repair_best(run, 99)  # of no checkpoint
        assert not (run / "best").exists()
        checkpoint.repair_best(run, 3)
        assert (run / "best").readlink() == Path("checkpoints/step-00000003")

    def test_a_dangling_link_is_told_before_it_is_replaced(self, run, capsys):
        (run / "best").symlink_to("checkpoints/step-00000099")
        checkpoint.repair_best(run, None)
        checkpoint.resolve_checkpoint(run)
        checkpoint.point_best(run, checkpoint.latest(run))
        said = capsys.readouterr().err.splitlines()
        begin = f"warning: {run / 'best'} points to checkpoints/step-00000099, which is no checkpoint of this run: "
        ends = ["it stays so until an evaluation is better", "the newest is used", "it is replaced by step-00000003"]
        assert said == [begin + end for end in ends]
        checkpoint.point_best(run, checkpoint.latest(run))
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("target", ["/dev", "../other/checkpoints/step-00000001", "."])
    def test_a_link_out_of_the_run_is_not_followed(self, run, target):
        shutil.copytree(run, run.parent / "other")
        (run / "best").symlink_to(target)
        assert checkpoint.best(run) is None


class TestBesideATraining:
    def test_a_checkpoint_that_is_pruned_while_it_is_read_is_chosen_again(self, run, monkeypatch):
        first, _, newest = checkpoint.list_checkpoints(run)
        checkpoint.point_best(run, first)
        original = checkpoint.load_file

        def load_file(path, device):
            if first.exists():  # the training finds a better one
                checkpoint.point_best(run, newest)
                checkpoint.prune(run, keep_last=1)
                raise RuntimeError("unable to mmap: No such file or directory")  # as safetensors says it
            return original(path, device)

        monkeypatch.setattr(checkpoint, "load_file", load_file)
        assert load_trained(run, device="cpu").checkpoint == newest

    def test_in_the_end_one_line_says_so(self, run, monkeypatch):
        def load_file(path, device):
            shutil.copytree(path.parent, run / "copy")
            shutil.rmtree(path.parent)
            (run / "copy").rename(path.parent)
            os.utime(path.parent, (0, os.stat(path.parent).st_ino))
            raise FileNotFoundError(2, "No such file or directory")

        monkeypatch.setattr(checkpoint, "load_file", load_file)
        with pytest.raises(UserError, match="a training replaces its checkpoints faster than they are read; try again"):
            load_trained(run, device="cpu")

    def test_other_errors_are_told_at_once(self, run, monkeypatch):
        calls = []

        def load_file(path, device):
            calls.append(path)
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(checkpoint, "load_file", load_file)
        with pytest.raises(UserError, match=r"cannot be read: Input/output error"):
            load_trained(run, device="cpu")
        assert len(calls) == 1
