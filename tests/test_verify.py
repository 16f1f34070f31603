"""`lm_pcfg verify` names what is damaged; and any flipped bit is told, or changes nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import lm_pcfg
from lm_pcfg.corpus.preparation.prepare import PrepareOptions, prepare
from lm_pcfg.errors import UserError
from lm_pcfg.inference.trained import load_trained
from lm_pcfg.inference.verification import verify
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint, notes
from lm_pcfg.storage.checkpoint import CheckpointError
from lm_pcfg.storage.metrics_file import check_metrics, read_metrics
from lm_pcfg.training import loop
from lm_pcfg.training.documents import open_settings
from texts import write_config, write_text


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    config = write_config(tmp_path_factory.mktemp("trained"))
    return loop.train(load_settings(config, ["training.max_steps=4", "checkpoint.every_steps=2"]))


@pytest.fixture
def run(tmp_path, trained) -> Path:
    """A copy of the run that a test may spoil."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "small", symlinks=True))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_a_whole_run(run, tmp_path):
    result = lm_pcfg("verify", "runs/small", cwd=tmp_path)
    assert (result.returncode, result.stdout.decode()) == (
        0,
        "runs/small: 2 checkpoints, 3 metric lines: nothing damaged\n",
    )
    alone = lm_pcfg("verify", "runs/small/best", cwd=tmp_path)
    assert (alone.returncode, alone.stdout.decode()) == (0, "runs/small/best: 1 checkpoints: nothing damaged\n")


FILES = [
    "checkpoints/step-00000002/model.safetensors", "checkpoints/step-00000004/optimizer.safetensors",
    "checkpoints/step-00000002/state.json", "checkpoints/step-00000004/config.yaml",
    "checkpoints/step-00000004/vocab/words.txt", "config.yaml", "vocab/words.txt", "metrics.jsonl",
]  # fmt: skip


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", [flip, Path.unlink], ids=["flipped", "lost"])
def test_damage_is_named_and_ends_with_status_1(run, tmp_path, file, damage):
    damage(run / file)
    result = lm_pcfg("verify", "runs/small", "--json", cwd=tmp_path)
    found = json.loads(result.stdout)
    assert result.returncode == 1
    assert len(found["damaged"]) >= 1
    assert all(f"small/{file}" in line for line in found["damaged"])


def test_small_things(run):
    (run / "mlflow_run_id").write_bytes(b"\xff\x00")
    (run / "best").unlink()
    (run / "best").symlink_to("checkpoints/step-00000009")
    assert len(verify(run).damaged) == 2
    shutil.rmtree(run / "checkpoints")
    assert f"{run} has had checkpoints, and none is left" in verify(run).damaged[0]
    os.unlink(run / "metrics.jsonl")
    os.mkfifo(run / "metrics.jsonl")
    assert f"{run / 'metrics.jsonl'} is not a regular file" in verify(run).damaged


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("environment.json", b"\xff\0garbage"), ("environment.json", b"[]"), ("FINISHED", b"\xff\xfe\0"),
        ("FAILED", b"\0"), ("metrics-1.jsonl", b"\xffgarbage\n"), ("mlflow_run_id", b"../../x\n"), ("best", b"x"),
        ("last_checkpoint", b"step-99999999\n"), ("last_checkpoint", b"../vocab\n"), ("last_checkpoint", b"\0"),
        ("started_from", b"\0"), ("config.1.yaml", b"learning: [1"),
    ],
)  # fmt: skip
def test_garbage_in_a_small_file_is_told_once(run, file, content):
    (run / "best").unlink()
    (run / file).write_bytes(content)
    (line,) = verify(run).damaged
    assert str(run / file) in line
    assert "\n" not in line


def test_whole_small_files(run):
    (run / "started_from").write_text("/long/gone/checkpoints/step-00000003\n")  # it has checkpoints of its own
    (run / "mlflow_run_id").write_text("0123abcd\n")
    shutil.copy(run / "metrics.jsonl", run / "metrics-1.jsonl")
    found = verify(run)
    assert (found.damaged, found.counts) == ([], {"checkpoints": 2, "metric_lines": 6})


def test_a_copy_of_best_is_checked_like_a_checkpoint(run):
    (run / "best").unlink()
    shutil.copytree(checkpoint.latest(run), run / "best")  # as scp -r makes it
    found = verify(run)
    assert (found.damaged, found.counts["checkpoints"]) == ([], 3)
    flip(run / "best" / "model.safetensors")
    (line,) = verify(run).damaged
    assert line == f"{run / 'best' / 'model.safetensors'} is damaged: its content does not match its checksum"


def test_a_renamed_checkpoint(run):
    (run / "best").unlink()
    (run / "checkpoints" / "step-00000002").rename(run / "checkpoints" / "step-00000003")
    (line,) = verify(run).damaged
    assert "step-00000003 has another name than it was written with: rename it to step-00000002" in line
    assert verify(run / "checkpoints" / "step-00000003").damaged == [line]


def test_a_training_that_saves_meanwhile_has_lost_nothing(run, monkeypatch):
    """The note is read, then both it and the checkpoint are replaced."""
    (run / "last_checkpoint").write_text("step-00000001\n")
    original = notes.read_note

    def read_note(file):
        text = original(file)
        (run / "last_checkpoint").write_text("step-00000004\n")
        return text

    monkeypatch.setattr(notes, "read_note", read_note)
    assert notes.lost_checkpoint(run) is None


def test_where_a_run_without_a_checkpoint_began(run):
    source = Path(shutil.copytree(checkpoint.latest(run), run.parent / "step-00000004"))
    shutil.rmtree(run / "checkpoints")
    for name in ("best", "last_checkpoint"):
        (run / name).unlink()
    (run / "started_from").write_text(f"{source}\n")
    assert verify(run).damaged == []
    flip(source / "model.safetensors")
    (line,) = verify(run).damaged
    assert str(source / "model.safetensors") in line
    shutil.rmtree(source)
    (line,) = verify(run).damaged
    assert str(source) in line


def test_a_run_that_has_hardly_begun_and_a_folder_that_is_none(run, tmp_path):
    shutil.rmtree(run / "checkpoints")
    (run / "best").unlink()
    (run / "last_checkpoint").unlink()
    assert verify(run).damaged == []
    with pytest.raises(UserError, match="neither a run, a checkpoint nor a prepared corpus"):
        verify(tmp_path)


def test_a_prepared_corpus(tmp_path):
    text = write_text(tmp_path / "text.txt", 30)
    prepare([str(text)], tmp_path / "corpus", PrepareOptions())
    assert verify(tmp_path / "corpus").damaged == []
    flip(next((tmp_path / "corpus" / "shards").glob("*.parquet")))
    (line,) = verify(tmp_path / "corpus").damaged
    assert "does not match its sha256" in line


def test_the_plan_of_a_prepared_corpus(tmp_path):
    corpus = tmp_path / "corpus"
    prepare([str(write_text(tmp_path / f"{name}.txt", 30)) for name in "ab"], corpus, PrepareOptions())
    whole = (corpus / "prepare.json").read_bytes()
    plan = json.loads(whole)
    others = [
        plan | {"options": plan["options"] | {"shard_lines": 104}},
        plan | {"inputs": plan["inputs"][:1]},
        plan | {"inputs": plan["inputs"][::-1]},
        plan | {"inputs": [plan["inputs"][0], plan["inputs"][1] | {"number": 3}]},
        plan | {"inputs": [plan["inputs"][0], plan["inputs"][1] | {"split": "train"}]},
        plan | {"vocabulary": "0" * 64},
    ]
    for other in others:
        (corpus / "prepare.json").write_text(json.dumps(other))
        assert verify(corpus).damaged == [
            f"{corpus / 'prepare.json'}: is not what manifest.json says that the corpus was made of"
        ]
    (corpus / "prepare.json").write_bytes(whole)
    assert verify(corpus).damaged == []
    prepare([str(tmp_path / "a.txt")], tmp_path / "other", PrepareOptions(existing=str(corpus)))
    assert verify(tmp_path / "other").damaged == []


# ---- bits -----------------------------------------------------------------------------------------------------------


def flipped(path: Path, share: float) -> Iterator[int]:
    """Flip one bit of a file after the other, or of a share of them; at the end it is as it was."""
    intact, chosen = path.read_bytes(), random.Random(0)
    for bit in range(8 * len(intact)):
        if chosen.random() < share:
            content = bytearray(intact)
            content[bit // 8] ^= 1 << bit % 8
            path.write_bytes(content)
            yield bit
    path.write_bytes(intact)


def shares(short: float) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("share", [short, pytest.param(1.0, marks=pytest.mark.chaos)])


@shares(0.05)
@pytest.mark.parametrize("file", ["state.json", "config.yaml", "vocab/words.txt", "vocab/vocabulary.json"])
def test_any_bit_inside_a_checkpoint_is_told(run, file, share):
    newest = checkpoint.latest(run)
    for _ in flipped(newest / file, share):
        with pytest.raises(CheckpointError, match=file):
            checkpoint.verify(newest, only=set())


@shares(0.005)
def test_any_bit_of_the_config_for_people_changes_nothing_and_is_told(run, share):
    newest = checkpoint.latest(run)
    settings = open_settings(newest, pytest.fail)
    told = []
    for bit in flipped(run / "config.yaml", share):
        before = len(told)
        assert open_settings(newest, told.append) == settings
        if len(told) == before:  # then it says the same to whoever reads it
            assert load_settings(run / "config.yaml") == settings.model_copy(
                update={"resume": load_settings(run / "config.yaml").resume}
            ), bit
    assert told


@shares(0.1)
def test_any_bit_of_the_metrics_is_told_or_changes_nothing(run, share):
    path = run / "metrics.jsonl"
    intact = list(read_metrics(path, pytest.fail))
    recorded = checkpoint.verify(checkpoint.latest(run))["metrics"]
    for bit in flipped(path, share):
        told: list[str] = []
        lines = list(read_metrics(path, told.append))
        known = [{name: line.get(name) for name in one} for line, one in zip(lines, intact, strict=False)]
        assert told or (len(lines) == len(intact) and known == intact), bit
        assert check_metrics(path, recorded)[1], bit


def test_a_score_does_not_depend_on_what_is_for_people(run, capsys):
    before = load_trained(run, device="cpu")
    for file in ("config.yaml", "vocab/words.txt", "vocab/vocabulary.json", "metrics.jsonl"):
        flip(run / file)
    after = load_trained(run, device="cpu")
    assert after.settings == before.settings
    assert after.vocabulary == before.vocabulary
