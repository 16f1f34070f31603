"""A checkpoint is complete or absent, damage is found and named, and a resumed optimizer goes on bit for bit."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lm_pcfg.storage import checkpoint, durable, hashed_folder
from lm_pcfg.storage.checkpoint import CheckpointError
from lm_pcfg.storage.state_file import state_bytes

DEAD_PID = 2**22 + 1  # above the largest pid Linux hands out


def some_tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "rules.left": torch.randn(5, 7, generator=generator),
        "rules.right": torch.randn(5, 7, generator=generator).to(torch.bfloat16),
        "words": torch.randn(3, generator=generator, dtype=torch.float64),
        "count": torch.tensor(2**40 + seed),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-42]),
        "empty": torch.zeros(0, 4),
    }


def save(run: Path, step: int, seed: int = 0, ema: bool = True, **state: Any) -> Path:
    return checkpoint.save(
        run,
        step,
        model=some_tensors(seed),
        optimizer={f"exp_avg/{name}": tensor for name, tensor in some_tensors(seed + 1).items()},
        ema=some_tensors(seed + 2) if ema else None,
        state={
            "epoch": 1,
            "data": {"epoch": 3, "batch": 17, "batches": 20, "plan": "x"},
            "world_size": 2,
            "seed": seed,
            **state,
        },
    )


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, list[int]]:
        return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()

    return one.keys() == other.keys() and all(bits(one[name]) == bits(other[name]) for name in one)


def temporary_names(run: Path) -> list[str]:
    return [entry.name for entry in (run / "checkpoints").iterdir() if entry.name.startswith(".")]


class TestSaveAndLoad:
    def test_round_trip_is_bit_exact(self, tmp_path: Path) -> None:
        folder = save(tmp_path / "run", 1234)
        assert folder == tmp_path / "run" / "checkpoints" / "step-00001234"
        loaded = checkpoint.load(folder, with_optimizer=True)
        assert same_bits(loaded.model, some_tensors(0))
        assert loaded.optimizer is not None
        assert same_bits(loaded.optimizer, {f"exp_avg/{n}": t for n, t in some_tensors(1).items()})
        assert loaded.ema is not None
        assert same_bits(loaded.ema, some_tensors(2))
        assert loaded.state["step"] == 1234
        assert loaded.state["data"] == {"epoch": 3, "batch": 17, "batches": 20, "plan": "x"}
        assert loaded.folder == folder
        assert sorted(entry.name for entry in folder.iterdir()) == [
            "ema.safetensors",
            "model.safetensors",
            "optimizer.safetensors",
            "state.json",
        ]
        assert temporary_names(tmp_path / "run") == []

    def test_without_ema(self, tmp_path: Path) -> None:
        folder = save(tmp_path, 1, ema=False)
        loaded = checkpoint.load(folder, with_optimizer=True)
        assert loaded.ema is None
        assert loaded.weights() is loaded.model
        with pytest.raises(CheckpointError, match="no averaged weights"):
            loaded.weights("ema")

    def test_averaged_weights_are_the_default(self, tmp_path: Path) -> None:
        loaded = checkpoint.load(save(tmp_path, 1), with_optimizer=False)
        assert same_bits(loaded.weights(), some_tensors(2))
        assert same_bits(loaded.weights("raw"), some_tensors(0))

    def test_tied_transposed_and_sliced_tensors(self, tmp_path: Path) -> None:
        table = torch.randn(6, 4)
        model = {"table": table, "tied": table, "transposed": table.T, "slice": table[2:3], "parameter": table[:, 1]}
        folder = checkpoint.save(tmp_path, 1, model=model, optimizer={}, ema=None, state={})
        assert same_bits(checkpoint.load(folder, with_optimizer=True).model, model)

    def test_inference_does_not_need_the_optimizer(self, tmp_path: Path) -> None:
        folder = save(tmp_path, 1)
        (folder / "optimizer.safetensors").unlink()
        assert checkpoint.load(folder, with_optimizer=False).optimizer is None
        with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing"):
            checkpoint.load(folder, with_optimizer=True)

    def test_a_loaded_state_can_be_saved_again(self, tmp_path: Path) -> None:
        state = checkpoint.verify(save(tmp_path, 1))
        state |= {"step": 2, "by rank": {0: (1, 2)}}
        folder = checkpoint.save(tmp_path, 2, model=some_tensors(9), optimizer={}, ema=None, state=state)
        assert checkpoint.verify(folder)["by rank"] == {"0": [1, 2]}

    def test_state_of_another_step_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="step 3"):
            checkpoint.save(tmp_path, 4, model={}, optimizer={}, ema=None, state={"step": 3})

    @pytest.mark.parametrize("value", [float("nan"), {1, 2}])
    def test_state_that_is_not_json_is_refused(self, tmp_path: Path, value: Any) -> None:
        with pytest.raises(CheckpointError, match="JSON"):
            save(tmp_path, 1, best_perplexity=value)
        assert checkpoint.list_checkpoints(tmp_path) == []
        assert temporary_names(tmp_path) == []

    @pytest.mark.gpu
    def test_tensors_from_and_to_the_gpu(self, tmp_path: Path) -> None:
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
        model = {name: tensor.cuda() for name, tensor in some_tensors().items()}
        folder = checkpoint.save(tmp_path, 1, model=model, optimizer={}, ema=None, state={})
        loaded = checkpoint.load(folder, device="cuda", with_optimizer=False)
        assert all(tensor.is_cuda for tensor in loaded.model.values())
        assert same_bits({name: tensor.cpu() for name, tensor in loaded.model.items()}, some_tensors())


class TestSameStepTwice:
    @pytest.mark.parametrize("swap", [True, False], ids=["exchange", "two-renames"])
    def test_the_new_one_replaces_the_old(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: bool) -> None:
        if not swap:
            monkeypatch.setattr(durable, "_exchange", lambda one, other: False)
        save(tmp_path, 5, seed=0)
        folder = save(tmp_path, 5, seed=10)
        assert same_bits(checkpoint.load(folder, with_optimizer=True).model, some_tensors(10))
        assert temporary_names(tmp_path) == []

    def test_this_file_system_swaps_in_one_step(self, tmp_path: Path) -> None:
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            (tmp_path / name / name).touch()
        if not durable._exchange(tmp_path / "one", tmp_path / "other"):
            pytest.skip("renameat2 with RENAME_EXCHANGE is not supported here")
        assert (tmp_path / "one" / "other").exists()
        assert (tmp_path / "other" / "one").exists()

    def test_a_failed_second_rename_puts_the_old_one_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(tmp_path, 5, seed=0)
        monkeypatch.setattr(durable, "_exchange", lambda one, other: False)
        real_replace = os.replace

        def replace(source: Path, target: Path) -> None:
            if Path(source).name.startswith(".writing"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real_replace(source, target)

        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(CheckpointError, match="Input/output error"):
            save(tmp_path, 5, seed=10)
        (folder,) = checkpoint.list_checkpoints(tmp_path)
        assert checkpoint.verify(folder)["seed"] == 0
        assert temporary_names(tmp_path) == []

    def test_a_crash_between_two_renames_is_repaired(self, tmp_path: Path) -> None:
        folder = save(tmp_path, 5)
        folder.rename(folder.with_name(f".replaced-{folder.name}.{durable._host()}.{DEAD_PID}"))
        assert checkpoint.list_checkpoints(tmp_path) == []
        assert checkpoint.find_resumable(tmp_path, pytest.fail) == folder

    def test_a_crash_after_two_renames_keeps_the_new_one(self, tmp_path: Path) -> None:
        folder = save(tmp_path, 5, seed=10)
        replaced = folder.with_name(f".replaced-{folder.name}.{durable._host()}.{DEAD_PID}")
        save(tmp_path / "other", 5).rename(replaced)
        assert checkpoint.find_resumable(tmp_path, pytest.fail) == folder
        assert checkpoint.verify(folder)["seed"] == 10
        assert temporary_names(tmp_path) == []


class TestCrashes:
    @pytest.mark.parametrize("moment", ["first file", "fsync", "rename"])
    def test_an_exception_leaves_no_trace(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
        earlier = save(tmp_path, 1)

        def crash(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        target = {"first file": (hashed_folder, "save_file"), "fsync": (os, "fsync"), "rename": (os, "replace")}[moment]
        monkeypatch.setattr(*target, crash)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2)
        assert checkpoint.list_checkpoints(tmp_path) == [earlier]
        assert temporary_names(tmp_path) == []
        checkpoint.verify(earlier)

    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_kill_minus_nine_at_a_random_moment(self, tmp_path: Path, seed: int) -> None:
        program = textwrap.dedent("""
            import sys, torch
            from pathlib import Path
            from lm_pcfg.storage import checkpoint
            run = Path(sys.argv[1])
            model = {f"w{i}": torch.randn(100_000) for i in range(4)}
            print("ready", flush=True)
            for turn in range(100_000):
                # every third time a step that exists is replaced
                step = turn if turn % 3 else max(turn - 2, 0)
                folder = checkpoint.save(run, step, model=model, optimizer=model, ema=None, state={"turn": turn})
                checkpoint.point_best(run, folder)
                checkpoint.prune(run, keep_last=3, keep=set())
        """)
        process = subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 30
        while checkpoint.latest(tmp_path) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(random.Random(seed).uniform(0.0, 0.6))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        found = checkpoint.list_checkpoints(tmp_path)
        assert found
        for folder in found:
            checkpoint.verify(folder)
        best = checkpoint.best(tmp_path)
        assert best is None or checkpoint.verify(best)
        checkpoint.save(tmp_path, 10**6, model={}, optimizer={}, ema=None, state={})
        assert temporary_names(tmp_path) == []

    def test_only_leftovers_of_the_dead_are_removed(self, tmp_path: Path) -> None:
        host = durable._host()
        checkpoints = tmp_path / "checkpoints"
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
            living = checkpoints / f".writing-step-00000001.{host}.{other.pid}"
            dead = checkpoints / f".writing-step-00000001.{host}.{DEAD_PID}"
            own = checkpoints / f".writing-step-00000001.{host}.{os.getpid()}"
            half_deleted = checkpoints / f".deleted-step-00000001.{host}.{DEAD_PID}"
            elsewhere_fresh = checkpoints / f".writing-step-00000001.elsewhere.{DEAD_PID}"
            elsewhere_old = checkpoints / f".writing-step-00000002.elsewhere.{DEAD_PID}"
            not_ours = checkpoints / ".snapshot"
            for folder in (living, dead, own, half_deleted, elsewhere_fresh, elsewhere_old, not_ours):
                folder.mkdir(parents=True)
                (folder / "model.safetensors").touch()
            os.utime(elsewhere_old, (time.time() - 86400,) * 2)
            save(tmp_path, 3)
            other.communicate(b"\n")
        assert sorted(temporary_names(tmp_path)) == sorted(f.name for f in (living, elsewhere_fresh, not_ours))


NO_SPACE = r"^cannot write checkpoint .*step-00000002: No space left on device$"


class TestFullDisk:
    def check_intact(self, run: Path, earlier: Path) -> None:
        assert checkpoint.list_checkpoints(run) == [earlier]
        assert temporary_names(run) == []
        checkpoint.verify(earlier)

    @pytest.mark.parametrize("file", ["state.json", "folder"])
    def test_simulated(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
        earlier = save(tmp_path, 1)

        def no_space(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(Path, {"state.json": "write_bytes", "folder": "mkdir"}[file], no_space)
        with pytest.raises(CheckpointError, match=NO_SPACE):
            save(tmp_path, 2)
        self.check_intact(tmp_path, earlier)

    @pytest.fixture
    def small_disk(self, tmp_path: Path) -> Iterator[Path]:
        folder = tmp_path / "disk"
        folder.mkdir()
        mount = shutil.which("mount")
        if (
            mount is None
            or subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True).returncode
        ):
            pytest.skip("needs the right to mount a small tmpfs")
        yield folder
        subprocess.run(["umount", folder], check=True)

    def test_real(self, small_disk: Path) -> None:
        earlier = save(small_disk, 1)
        with pytest.raises(CheckpointError, match=NO_SPACE):
            checkpoint.save(small_disk, 2, model={"big": torch.zeros(1024, 1024)}, optimizer={}, ema=None, state={})
        self.check_intact(small_disk, earlier)
        save(small_disk, 3)

    def test_a_run_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError, match="Not a directory"):
            save(tmp_path / "file", 1)


FILES = ["model.safetensors", "optimizer.safetensors", "ema.safetensors", "state.json"]


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (flip_a_byte, "damaged"),
    "truncated": (truncate, "truncated|damaged"),
    "emptied": (lambda path: os.truncate(path, 0), "truncated"),
    "lengthened": (lengthen, "damaged"),
    "deleted": (Path.unlink, "missing"),
}


class TestDamage:
    @pytest.mark.parametrize("file", FILES)
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_is_found_and_named(self, tmp_path: Path, file: str, damage: str) -> None:
        folder = save(tmp_path, 7)
        inflict, word = DAMAGES[damage]
        inflict(folder / file)
        for use in (checkpoint.verify, lambda folder: checkpoint.load(folder, with_optimizer=True)):
            with pytest.raises(CheckpointError, match=word) as caught:
                use(folder)
            assert file in str(caught.value)
            assert "\n" not in str(caught.value)

    def test_any_byte_of_the_state(self, tmp_path: Path) -> None:
        folder = save(tmp_path, 7)
        intact = (folder / "state.json").read_bytes()
        for position in range(len(intact)):
            content = bytearray(intact)
            content[position] ^= 1 << position % 8
            (folder / "state.json").write_bytes(content)
            with pytest.raises(CheckpointError, match=r"state\.json"):
                checkpoint.verify(folder)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"\xff\xfe", "not JSON"),
            (b"[1, 2]", "no format version"),
            (b'{"step": 1}', "no format version"),
            (b'{"format": 99}', "unknown format 99"),
            (b'{"format": 1, "best": NaN}', "damaged"),
        ],
    )
    def test_a_state_of_another_kind(self, tmp_path: Path, content: bytes, message: str) -> None:
        folder = save(tmp_path, 7)
        (folder / "state.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            checkpoint.verify(folder)

    def test_a_state_is_written_as_ever(self) -> None:
        """What is read is compared with what would be written: other bytes would be damage in older checkpoints."""
        checksum = "66acd07fcea2043956174f61b379bbd5ff7f89e4d5408dc80e1707ffdecbb18b"
        assert state_bytes({"step": 1, "checksum": "old"}) == (
            b'{\n  "step": 1,\n  "checksum": "%s"\n}\n' % checksum.encode()
        )

    def test_a_long_key_is_cut_in_the_message(self, tmp_path: Path) -> None:
        folder = save(tmp_path, 1)
        state = checkpoint.verify(folder)
        state["files"]["n" * 41] = {"sha256": "0" * 64, "size": -1}
        (folder / checkpoint.STATE).write_bytes(state_bytes(state))
        with pytest.raises(CheckpointError, match=rf"'files\.{'n' * 40}\.size': "):
            checkpoint.verify(folder)

    def test_no_such_folder(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"state\.json is missing"):
            checkpoint.load(tmp_path / "nowhere", with_optimizer=False)

    def test_resume_takes_the_previous_one(self, tmp_path: Path) -> None:
        first, second, third = (save(tmp_path, step) for step in (1, 2, 3))
        warnings: list[str] = []
        assert checkpoint.find_resumable(tmp_path, warnings.append) == third
        flip_a_byte(third / "model.safetensors")
        truncate(second / "state.json")
        assert checkpoint.find_resumable(tmp_path, warnings.append) == first
        assert len(warnings) == 2
        assert str(third / "model.safetensors") in warnings[0]
        assert str(second / "state.json") in warnings[1]
        (first / "optimizer.safetensors").unlink()
        with pytest.raises(CheckpointError, match="none of the 3 checkpoints"):
            checkpoint.find_resumable(tmp_path, warnings.append)

    def test_nothing_to_resume(self, tmp_path: Path) -> None:
        assert checkpoint.find_resumable(tmp_path / "nowhere", pytest.fail) is None


def test_no_pickle(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    assert json.loads((folder / "state.json").read_text())["step"] == 1
    files = list(folder.glob("*.safetensors"))
    assert len(files) >= 2
    for file in files:
        content = file.read_bytes()
        assert json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])  # a JSON header, then plain numbers
