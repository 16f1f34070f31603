"""Files of a run that are too large, absurd, no files at all, or of others: told in one line, quickly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import lm_pcfg, refusal
from lm_pcfg.errors import SettingsError, UserError
from lm_pcfg.inference import report
from lm_pcfg.inference.comparison import incomparable
from lm_pcfg.inference.verification import verify
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint, metrics_file, state_file
from lm_pcfg.storage.metrics_file import MetricsFile, read_metrics
from lm_pcfg.storage.run_folder import RunFolder
from lm_pcfg.storage.state_file import CheckpointError, read_state, state_bytes
from lm_pcfg.yaml_text import parse_yaml, read_yaml
from small_runs import write_untrained_run
from texts import write_config

MODEL = {"nonterminals": 64, "preterminals": 6, "dimension": 8}
LINES = [{"step": 1, "time": 1.5, "epoch": 0, "train/learning_rate": 0.1, "train/ppl": 50.0, "train/seconds": 2.0,
          "train/words_per_second": 9.0, "train/skipped": 0},
         {"step": 1, "time": 2.5, "valid/ppl": 40.0, "valid/impossible": 0, "valid/tokens": 30}]  # fmt: skip


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> Path:
    folder = write_untrained_run(tmp_path_factory.mktemp("readers"), "a", MODEL)
    write_metrics(folder)
    return folder


@pytest.fixture
def run(untrained, tmp_path) -> Path:
    shutil.copytree(untrained, tmp_path / "a")
    return tmp_path / "a"


def write_metrics(run: Path, **changes) -> None:
    """Lines with right checks; what a line has is changed."""
    lines = [line | {name: value for name, value in changes.items() if name in line} for line in LINES]
    (run / "metrics.jsonl").write_bytes(b"".join(map(metrics_file._checked, lines)))


def reported(run: Path) -> tuple[str, list[str]]:
    """What a report says of a run, and what it warns of."""
    warned: list[str] = []
    runs = report.read_runs([run], warned.append)
    lines = [report.summary(of, 45.0) for of in runs]
    return report.table(lines) + json.dumps(lines, allow_nan=False) + repr(incomparable(runs)), warned


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Who waits for a pipe's other end is interrupted."""

    def interrupt(number, frame):
        raise TimeoutError("waits")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# ---- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["x: [" + "1," * 499_000 + "1]", "x: [" + "[]," * 300_000 + "1]", "".join(f"k{i}: 1\n" for i in range(90_000))],
    ids=["list", "lists", "keys"],
)
def test_yaml_of_many_values_is_refused_before_it_is_read(text):
    began = time.process_time()
    with pytest.raises(SettingsError, match="more than 10,000 values are no settings"):
        parse_yaml(text, "a.yaml")
    assert time.process_time() - began < 5  # all of it: 15 to 20 s


def test_aliases_for_many_values_are_still_told_apart():
    text = "a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\n"
    text += "c: &c [*b,*b,*b,*b,*b,*b,*b,*b]\nd: [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\n"
    with pytest.raises(SettingsError, match="aliases"):
        parse_yaml(text, "a.yaml")


def test_a_config_with_thousands_of_shards_is_read(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("data:\n  train:\n" + "".join(f"  - shards/part-{i:05d}.parquet\n" for i in range(5000)))
    assert len(read_yaml(file)["data"]["train"]) == 5000


@pytest.mark.parametrize("checksum", ["right", "wrong"])
def test_a_large_state_is_refused_before_it_is_parsed(tmp_path, monkeypatch, checksum):
    content = {"format": 1, "step": 1, "files": {}, "x": [[]] * 300_000}
    file = tmp_path / "state.json"
    file.write_bytes(state_bytes(content).replace(b'"step": 1', b'"step": 1' if checksum == "right" else b'"step": 2'))
    monkeypatch.setattr(state_file.json, "loads", lambda text: pytest.fail("parsed"))
    with pytest.raises(CheckpointError, match="bytes are too many"):
        read_state(file)


def test_the_largest_state_that_a_training_writes_is_read(tmp_path):
    steps = list(range(10**9, 10**9 + 1000))
    files = {f"{'a' * 94}{number:04d}": {"sha256": "0" * 64, "size": 10**12} for number in range(1000)}
    ranking = [[0.0, 1 / (3 + step), float(step)] for step in range(10**9, 10**9 + 10_000)]
    content = {"format": 1, "step": 1, "files": files, "former_bests": steps, "skipped_steps": steps}
    (tmp_path / "state.json").write_bytes(state_bytes({**content, "ranking": ranking}))
    assert read_state(tmp_path / "state.json")["former_bests"] == steps


def test_threads_are_bounded(tmp_path):
    """A thousand million of them end libgomp, and with it the process."""
    config = write_config(tmp_path)
    assert load_settings(config, ["threads=4096"]).threads == 4096
    with pytest.raises(SettingsError, match="threads = 4097 should be at most 4096"):
        load_settings(config, ["threads=4097"])


# ---- a report takes what it says of a model from what is hashed -----------------------------------------------------


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("config.yaml", b"nonterminals: 64", b"nonterminals: 65"),
        ("config.yaml", b"nonterminals: 64", b"nonterminals: 2024-99-99"),
        ("config.yaml", b"nonterminals: 64", b"nonterminals: " + b"9" * 5000),
        ("config.yaml", b"nonterminals: 64", b"nonterminals: 0x" + b"f" * 200_000),
        ("config.yaml", b"nonterminals: 64", b"nonterminals: 1" + b":59" * 20_000),
        ("config.yaml", b"nonterminals: 64", b"nonterminals: " + b"[" * 3000),
        ("config.yaml", b"nonterminals: 64", b"nonterminals: \xff"),
        ("config.yaml", b"nonterminals: 64", b'nonterminals: "\\n\\e[2J"'),
        ("config.yaml", b"model:", b"x: [" + b"1," * 400_000 + b"1]\nmodel:"),
        ("vocab/vocabulary.json", b'"types": 17', b'"types": 19'),
        ("vocab/words.txt", b"cat\n", b"cap\n"),
    ],
    ids=["number", "date", "digits", "hex", "base 60", "depth", "encoding", "escapes", "size", "types", "words"],
)
def test_what_lies_beside_a_checkpoint_changes_no_report_and_is_told(run, name, old, new):
    before, warned = reported(run)
    assert warned == []
    assert '"nonterminals": 64' in before
    content = (run / name).read_bytes()
    assert old in content
    (run / name).write_bytes(content.replace(old, new))
    after, warned = reported(run)
    assert after == before
    (warning,) = warned
    assert str(run / name) in warning
    assert warning.endswith("the checkpoint's own is used")
    assert warning.isprintable()
    assert len(warning) < 600


@pytest.mark.parametrize("name", ["config.yaml", "vocab/vocabulary.json"])
def test_any_flip_beside_a_checkpoint_is_told_or_changes_nothing(run, name):
    before, _ = reported(run)
    content = (run / name).read_bytes()
    for place in range(0, len(content), len(content) // 15):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        (run / name).write_bytes(flipped)
        after, warned = reported(run)
        assert after == before, place
        assert len(warned) <= 1


def test_a_config_that_says_the_same_in_other_words_is_not_told(run):
    (run / "config.yaml").write_text("# mine\n" + (run / "config.yaml").read_text())
    assert reported(run)[1] == []


def test_the_checkpoint_of_an_earlier_stretch_is_not_told(run):
    """Its settings are those with which it was trained, until the new ones have a checkpoint."""
    config = (run / "config.yaml").read_text()
    (run / "config.1.yaml").write_text(config)
    (run / "config.yaml").write_text(config.replace("epochs: 2\n", "epochs: 9\n"))
    assert reported(run)[1] == []


@pytest.mark.parametrize("damage", [b"nonterminals: [1", b"nonterminals: " + b"9" * 5000, b"x: [" + b"1," * 400_000])
def test_without_a_checkpoint_a_config_is_read_within_bounds(run, damage):
    shutil.rmtree(run / "checkpoints")
    assert '"nonterminals": 64' in reported(run)[0]
    content = (run / "config.yaml").read_bytes()
    (run / "config.yaml").write_bytes(content.replace(b"nonterminals: 64", damage))
    after, (warning,) = reported(run)
    assert '"nonterminals": null' in after
    assert "the settings of this run are unknown" in warning


def test_a_damaged_checkpoint_is_passed_over(run):
    (newest,) = checkpoint.list_checkpoints(run)
    older = newest.with_name("step-00000000")
    shutil.copytree(newest, older)
    content = (newest / "config.yaml").read_bytes()
    (newest / "config.yaml").write_bytes(content.replace(b"nonterminals: 64", b"nonterminals: 65"))
    after, (warning,) = reported(run)
    assert '"nonterminals": 64' in after
    assert "damaged checkpoint passed over" in warning
    shutil.rmtree(older)
    assert '"nonterminals": 64' in reported(run)[0]  # of config.yaml


# ---- metrics with a right check and absurd values -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train/ppl", 0.0), ("train/ppl", -5), ("train/ppl", 10**400), ("epoch", 10**400), ("step", 10**400),
        ("step", -1), ("train/seconds", 1e308), ("train/words_per_second", 1e308), ("train/skipped", 10**300),
        ("valid/ppl", 10**400), ("valid/ppl", 0), ("valid/tokens", 10**400), ("valid/impossible", 1e308),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_absurd_metrics_are_damaged_lines(run, name, value):
    write_metrics(run, **{name: value})
    _, (warning,) = reported(run)
    assert "damaged, and left out" in warning
    kept = 0 if name == "step" else 1
    assert len(list(read_metrics(run / "metrics.jsonl", lambda message: None))) == kept
    assert any("damaged" in problem for problem in metrics_file.check_metrics(run / "metrics.jsonl")[1])
    result = lm_pcfg("fit", str(run), cwd=run)  # one run is too few
    assert (result.returncode, "Traceback" in result.stderr.decode()) == (1, False)


def test_what_diverged_is_no_damage(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", pytest.fail)
    metrics.append(1, {"train/ppl": float("inf"), "valid/ppl": float("nan"), "train/gradient_norm": 1e300})
    metrics.append(2, {"train/ppl": 1e300, "epoch": 2**40})
    metrics.close()
    assert len(list(read_metrics(tmp_path / "metrics.jsonl", pytest.fail))) == 2


# ---- pipes, which never begin ---------------------------------------------------------------------------------------


def make_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def test_a_report_waits_for_no_pipe(run, no_waiting):
    before, _ = reported(run)
    make_pipe(run / "config.yaml")
    after, (warning,) = reported(run)
    assert after == before
    assert "not a regular file" in warning
    shutil.rmtree(run / "checkpoints")
    assert "not a regular file; the settings of this run are unknown" in reported(run)[1][0]
    (run / "config.yaml").unlink()
    (run / "config.yaml").touch()
    make_pipe(run / "metrics.jsonl")
    assert any("metrics.jsonl cannot be read: not a regular file" in warning for warning in reported(run)[1])


def test_verify_waits_for_no_pipe(run, no_waiting):
    make_pipe(run / "config.1.yaml")
    assert [problem for problem in verify(run).damaged if "config.1.yaml" in problem and "regular" in problem]
    shutil.rmtree(run / "checkpoints")
    make_pipe(run / "config.yaml")
    assert [problem for problem in verify(run).damaged if "config.yaml" in problem and "regular" in problem]


def test_a_resume_waits_for_no_pipe(run, no_waiting):
    make_pipe(run / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be read: not a regular file; move it away"):
        MetricsFile(run / "metrics.jsonl", pytest.fail).truncate_after(1)
    make_pipe(run / ".lock")
    with pytest.raises(UserError, match=r"\.lock is not a regular file"):
        RunFolder(run, "launcher").claim()


def test_settings_may_come_through_the_pipe_of_a_shell():
    """`--config <(sed ... config.yaml)`"""
    reading, writing = os.pipe()
    os.write(writing, b"seed: 3\n")
    os.close(writing)
    assert read_yaml(Path(f"/dev/fd/{reading}")) == {"seed": 3}
    os.close(reading)


# ---- files of others ------------------------------------------------------------------------------------------------


@pytest.fixture
def private(run, monkeypatch) -> Path:
    """A run in whose folder one may not even look, as of a colleague with umask 027."""
    stat = os.stat

    def refuse(path, *arguments, **options):
        if str(path).startswith(f"{run}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refuse)
    return run


@pytest.mark.parametrize(
    "command",
    [
        ("score", "text.txt", "--checkpoint", "a"), ("score", "text.txt", "--checkpoint", "a/best"), ("verify", "a"),
        ("report", "a"), ("fit", "a"), ("info", "--checkpoint", "a"), ("train", "--config", "a/config.yaml"),
        ("train", "--config", "small.yaml", "resume=auto", "name=a", "runs_folder=FOLDER"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_one_may_not_look_at_is_told_in_a_line(private, command):
    folder = private.parent
    (folder / "text.txt").write_text("the cat\n")
    write_config(folder)
    command = [str(folder / part) if part.split("/")[0] == "a" else part for part in command]
    command = [part.replace("FOLDER", str(folder)) for part in command]
    told = refusal(folder, *command)
    assert "Permission denied" in told
    assert "ask its owner" in told or "runs_folder" in told or "--config" in told
    assert str(private) in told


def test_a_private_run_among_others_is_passed_over(private, untrained):
    warned: list[str] = []
    runs = report.read_runs([private, untrained], warned.append)
    assert [of.folder for of in runs] == [untrained]
    assert warned == [f"{private} cannot be read: Permission denied (ask its owner for access): passed over"]


def test_checkpoints_that_one_may_not_look_at_are_an_error_of_checkpoints(private):
    with pytest.raises(CheckpointError, match="checkpoints cannot be read: Permission denied"):
        checkpoint.list_checkpoints(private)
