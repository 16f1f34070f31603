"""metrics.jsonl is valid JSON line by line, survives crashes and full disks, and forgets what a resume repeats."""

import errno
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_pcfg.storage import metrics_file
from lm_pcfg.storage.metrics_file import MetricsFile, check_metrics, read_metrics


def strict_lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def file_with_steps(path: Path, steps: range) -> MetricsFile:
    metrics = MetricsFile(path, pytest.fail)
    for step in steps:
        metrics.append(step, {"loss": step / 3})
    return metrics


def test_times_are_in_milliseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.23456)
    MetricsFile(tmp_path / "metrics.jsonl", pytest.fail).append(1, {})
    assert strict_lines(tmp_path / "metrics.jsonl")[0]["time"] == 1.235


def test_each_line_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run" / "metrics.jsonl"
    metrics = MetricsFile(path, pytest.fail)
    for step in range(3):
        metrics.append(step, {"loss": 1 / (step + 1), "split": "train", "words": 7, "time": "not this one"})
        lines = strict_lines(path)
        assert len(lines) == step + 1
        assert list(lines[-1]) == ["step", "time", "loss", "split", "words", "check"]
        assert lines[-1]["loss"] == 1 / (step + 1)
        assert lines[-1]["time"] > 1.7e9


def test_values_of_all_kinds(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = {
        "nan": math.nan,
        "up": math.inf,
        "down": torch.tensor(-math.inf),
        "tensor": torch.tensor(3),
        "nested": {"list": [1.5, math.nan]},
        "none": None,
        "yes": True,
    }
    MetricsFile(path, pytest.fail).append(1, values)
    (line,) = strict_lines(path)
    del line["time"], line["check"]
    assert line == {
        "step": 1,
        "nan": "NaN",
        "up": "Infinity",
        "down": "-Infinity",
        "tensor": 3,
        "nested": {"list": [1.5, "NaN"]},
        "none": None,
        "yes": True,
    }
    (read,) = read_metrics(path)
    assert math.isnan(read["nan"])
    assert (read["up"], read["down"]) == (math.inf, -math.inf)


@pytest.mark.parametrize("rest", [b'{"step": 3, "lo', b"{", b"\xff\x00", b'{"step": 3, "time": 1.0, "loss": 1.0}'])
def test_half_a_last_line_spoils_nothing(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    file_with_steps(path, range(3)).close()
    with path.open("ab") as file:
        file.write(rest)
    whole = rest.endswith(b"}")
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2] + [3] * whole
    file_with_steps(path, range(4, 6))
    assert [line["step"] for line in strict_lines(path)] == [0, 1, 2] + [3] * whole + [4, 5]


def test_truncate_after_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = file_with_steps(path, range(10))
    metrics.append(4, {"valid/perplexity": 100.0})
    with path.open("ab") as file:
        file.write(b'{"step": 4, "hal')
    resumed = MetricsFile(path, pytest.fail)
    assert resumed.truncate_after(4) == 6
    assert [line["step"] for line in strict_lines(path)] == [0, 1, 2, 3, 4, 4]
    assert resumed.truncate_after(4) == 0
    resumed.append(5, {"loss": 0.5})
    assert [line["step"] for line in strict_lines(path)] == [0, 1, 2, 3, 4, 4, 5]
    assert resumed.truncate_after(3) == 3
    resumed.append(4, {"loss": 0.5})
    assert [line["step"] for line in strict_lines(path)] == [0, 1, 2, 3, 4]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncating_what_is_not_there(tmp_path: Path) -> None:
    assert MetricsFile(tmp_path / "metrics.jsonl", pytest.fail).truncate_after(4) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_crash_while_truncating_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = file_with_steps(path, range(10))
    before = path.read_bytes()

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            metrics.truncate_after(4)
    assert path.read_bytes() == before
    assert metrics.truncate_after(4) == 5
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_lines_wait_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    warnings: list[str] = []
    metrics = MetricsFile(path, warnings.append)
    metrics.append(0, {"loss": 1.0})
    real_write = os.write
    room = 30  # less than a line: the disk fills up in its middle

    def write(descriptor: int, content: bytes) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real_write(descriptor, content[:room])
        room -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        for step in (1, 2, 3):
            metrics.append(step, {"loss": 1.0})
        assert len(strict_lines(path)) == 1
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]
    metrics.append(4, {"loss": 1.0})
    assert [line["step"] for line in strict_lines(path)] == [0, 1, 2, 3, 4]
    metrics.close()
    assert len(warnings) == 1


def test_a_file_that_cannot_be_looked_into_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def pread(descriptor: int, *_: int) -> bytes:
        opened.append(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    warnings: list[str] = []
    metrics = MetricsFile(tmp_path / "metrics.jsonl", warnings.append)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread)
        metrics.append(1, {"loss": 1.0})
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
    metrics.append(2, {"loss": 1.0})
    metrics.close()
    assert [line["step"] for line in strict_lines(metrics.path)] == [1, 2]
    assert warnings == [
        f"cannot write {metrics.path}: Input/output error; its lines wait in memory until it works again"
    ]


def test_a_line_longer_than_what_is_looked_at_is_cut_off_or_completed(tmp_path: Path) -> None:
    """The end of the file is looked at, a mebibyte of it."""
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 0, "loss": 1}\n'
    for rest, steps in ((b'{"step": 1, "te', [0, 2]), (b'{"step": 1, "text": "%s"}' % (b"x" * 999_000), [0, 1, 2])):
        path.write_bytes(b" " * (1 << 20) + b"\n" + whole + rest)
        file_with_steps(path, range(2, 3)).close()
        assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()[1:]] == steps


def test_a_sync_that_fails_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    metrics = MetricsFile(tmp_path / "metrics.jsonl", warnings.append)
    metrics.sync()  # no line yet
    metrics.append(1, {"loss": 1.0})

    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    metrics.sync()
    metrics.sync()
    assert warnings == [f"{metrics.path} may not survive a power cut: Input/output error"]


def test_lines_never_written_are_counted(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    warnings: list[str] = []
    metrics = MetricsFile(tmp_path / "file" / "metrics.jsonl", warnings.append)
    metrics.append(1, {"loss": 1.0})
    metrics.append(2, {"loss": 1.0})
    metrics.close()
    assert len(warnings) == 2
    assert "Not a directory" in warnings[0] or "File exists" in warnings[0]
    assert warnings[1].startswith("2 lines of ")


def known_lines(path: Path, warnings: list[str]) -> list[dict[str, Any]]:
    names = ("step", "time", "loss")
    return [{name: line.get(name) for name in names} for line in read_metrics(path, warnings.append)]


def test_any_flipped_bit_is_told_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file_with_steps(path, range(4)).close()
    intact = path.read_bytes()
    before = known_lines(path, [])
    assert len(before) == 4
    for bit in range(8 * len(intact)):
        content = bytearray(intact)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        warnings: list[str] = []
        after = known_lines(path, warnings)
        assert len(warnings) == 1 or after == before, (bit // 8, bit % 8)
        assert all(line in before for line in after)  # never a wrong one


def test_a_damaged_line_is_named_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file_with_steps(path, range(4)).close()
    path.write_bytes(path.read_bytes().replace(b'"loss": 0.6666', b'"loss": 0.7666'))
    warnings: list[str] = []
    assert [line["step"] for line in read_metrics(path, warnings.append)] == [0, 1, 3]
    assert warnings == [f"{path}: line 3 is damaged, and left out"]


def test_several_damaged_lines_are_counted_from_the_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file_with_steps(path, range(6)).close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(b"{" + line if number in (1, 2, 4) else line for number, line in enumerate(lines)))
    warnings: list[str] = []
    assert [line["step"] for line in read_metrics(path, warnings.append)] == [0, 3, 5]
    assert warnings == [f"{path}: 3 lines from line 2 on are damaged, and left out"]
    assert check_metrics(path) == (6, warnings)


def test_metrics_that_are_no_file_are_told(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert check_metrics(path) == (0, [])
    path.mkdir()
    assert check_metrics(path) == (0, [f"{path} is not a regular file"])


@pytest.mark.parametrize(
    "line", [b"[1]", b"7", b"null", b"{}", b'{"step": "1"}', b'{"step": 1.0}', b'{"step": true}', b"[" * 100_000]
)
def test_json_that_is_no_line_of_ours_is_left_out(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    file_with_steps(path, range(2)).close()
    path.write_bytes(line + b"\n" + path.read_bytes())
    warnings: list[str] = []
    assert [line["step"] for line in read_metrics(path, warnings.append)] == [0, 1]
    assert warnings == [f"{path}: line 1 is damaged, and left out"]


def test_lines_of_the_version_before_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 1.5, "loss": "NaN"}\n{"step": 2, "time": 2.5, "loss": 3}\n')
    metrics = MetricsFile(path, pytest.fail)
    assert metrics.truncate_after(2) == 0
    metrics.append(3, {"loss": 1})
    lines = list(read_metrics(path, pytest.fail))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all("check" not in line for line in lines)


class TestWhatACheckpointRemembers:
    def test_exactly_its_lines_are_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        metrics = file_with_steps(path, range(5))
        mark = metrics.mark()
        metrics.append(4, {"valid/ppl": 3.0})  # an evaluation that a resumed run makes again
        metrics.append(5, {"loss": 1.0})
        resumed = MetricsFile(path, pytest.fail)
        assert resumed.truncate_after(4, mark) == 2
        assert [line["step"] for line in strict_lines(path)] == [0, 1, 2, 3, 4]
        assert resumed.mark() == mark
        assert check_metrics(path, mark)[1] == []

    @pytest.mark.parametrize(
        ("keep", "message"),
        [(4, "1 of 5 lines are missing"), (3, "2 of 5 lines are missing"), (0, "5 of 5 lines are missing")],
    )
    def test_what_a_power_cut_took_is_told(self, tmp_path: Path, keep: int, message: str) -> None:
        path = tmp_path / "metrics.jsonl"
        mark = file_with_steps(path, range(5)).mark()
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:keep]))
        (problem,) = check_metrics(path, mark)[1]
        assert message in problem
        if not keep:
            path.unlink()
        warnings: list[str] = []
        resumed = MetricsFile(path, warnings.append)
        resumed.truncate_after(4, mark)
        assert warnings == [f"{path} is not as it was written up to step 4: {message}; training goes on"]
        resumed.append(5, {"loss": 1.0})
        assert check_metrics(path, resumed.mark())[1] == []  # from here on it is as it is

    def test_a_changed_line_without_a_check_is_told(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1, "loss": 3}\n')
        metrics = MetricsFile(path, pytest.fail)
        metrics.truncate_after(1)
        mark = metrics.mark()
        path.write_text('{"step": 1, "loss": 4}\n')
        warnings: list[str] = []
        MetricsFile(path, warnings.append).truncate_after(1, mark)
        assert "they were changed" in warnings[0]


def test_lines_of_a_run_that_begins_again_are_kept_beside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert MetricsFile(path, pytest.fail).set_aside() is None
    for number in (1, 2):
        metrics = file_with_steps(path, range(number))
        beside = metrics.set_aside()
        assert beside == tmp_path / f"metrics-{number}.jsonl"
        assert len(strict_lines(beside)) == number
    assert not path.exists()


def test_a_closed_file_is_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    metrics = file_with_steps(tmp_path / "metrics.jsonl", range(3))
    assert len(os.listdir("/proc/self/fd")) == before + 1
    metrics.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_not_json_by_the_standard_is_never_written() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        metrics_file._checked({"loss": math.nan})
