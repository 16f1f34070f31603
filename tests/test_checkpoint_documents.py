"""A checkpoint carries its settings and its vocabulary; what lies in the run for people cannot change a score."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from lm_pcfg.errors import UserError
from lm_pcfg.inference.trained import load_trained
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint, hashed_folder
from lm_pcfg.storage.checkpoint import CheckpointError
from lm_pcfg.storage.state_file import state_bytes
from lm_pcfg.training import loop
from texts import write_config

SHORT = {"training": {"epochs": 9, "max_steps": 3}, "data": {"valid": None}}


def train(folder: Path, *overrides: str) -> Path:
    return loop.train(load_settings(write_config(folder, **SHORT), list(overrides)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def run(tmp_path, trained) -> Path:
    """A copy of the run that a test may spoil."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "small", symlinks=True))


def emission(path: Path) -> torch.Tensor:
    grammar = load_trained(path, device="cpu").grammar
    return torch.cat([grammar.root.flatten(), *(tensor.flatten() for tensor in grammar.tensors)])


def as_before(run: Path) -> Path:
    """Make its checkpoint one of the version before, which carried tensors only."""
    newest = checkpoint.latest(run)
    state = json.loads((newest / "state.json").read_bytes())
    state["files"] = {name: entry for name, entry in state["files"].items() if name.endswith(".safetensors")}
    (newest / "state.json").write_bytes(state_bytes(state))
    (newest / "config.yaml").unlink()
    shutil.rmtree(newest / "vocab")
    return newest


def test_a_checkpoint_has_the_files_of_its_run(run):
    newest = checkpoint.latest(run)
    files = ["config.yaml", "vocab/vocabulary.json", "vocab/words.txt"]
    assert set(files) < set(checkpoint.verify(newest)["files"])
    for file in files:
        assert (newest / file).read_bytes() == (run / file).read_bytes()


def test_an_edited_config_is_told_and_changes_no_score(run, trained, capsys):
    before = emission(run)
    assert capsys.readouterr().err == ""
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("emission_temperature: 1.0", "emission_temperature: 3.0"))
    assert torch.equal(emission(run), before)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "config.yaml is not what the checkpoint was trained with: model.emission_temperature is 3.0 there, 1.0 in the "
        "checkpoint; the checkpoint's own is used"
    )


@pytest.mark.parametrize("damage", ["lost", "not YAML", "a pipe"])
def test_a_config_that_cannot_be_read_is_told(run, capsys, damage):
    (run / "config.yaml").unlink()
    if damage == "not YAML":
        (run / "config.yaml").write_text("model: [")
    elif damage == "a pipe":
        os.mkfifo(run / "config.yaml")
    load_trained(run, device="cpu")
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.yaml is missing or damaged" in line


@pytest.mark.parametrize("lost", [True, False])
def test_a_lost_or_changed_vocabulary_is_told_and_the_checkpoints_own_is_used(run, capsys, lost):
    if lost:
        shutil.rmtree(run / "vocab")
    else:
        (run / "vocab" / "words.txt").write_text("<unk>\n")
    assert len(load_trained(run, device="cpu").vocabulary) == 17
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {run / 'vocab'}")
    again = loop.train(load_settings(write_config(run.parents[1], **SHORT), ["resume=auto", "training.max_steps=4"]))
    assert again == run
    assert "; the checkpoint's own is used" in capsys.readouterr().err
    load_trained(run, device="cpu")
    assert capsys.readouterr().err == ""  # the training has written it again


def test_a_checkpoint_works_alone(run, tmp_path, capsys):
    alone = tmp_path / "alone"
    before = emission(run)
    shutil.copytree(checkpoint.latest(run), alone)
    shutil.rmtree(run)
    assert torch.equal(emission(alone), before)
    assert capsys.readouterr().err == ""
    continued = train(tmp_path, f"resume={alone}", "training.max_steps=4")
    assert checkpoint.latest(continued).name == "step-00000004"


@pytest.mark.parametrize("file", ["config.yaml", "vocab/words.txt", "vocab/vocabulary.json"])
def test_damage_inside_a_checkpoint_is_an_error(run, file):
    newest = checkpoint.latest(run)
    content = bytearray((newest / file).read_bytes())
    content[len(content) // 2] ^= 4
    (newest / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{file} is damaged"):
        load_trained(run, device="cpu")
    (newest / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file} is missing"):
        load_trained(run, device="cpu")


def test_a_checkpoint_of_the_version_before_opens_from_its_run(run, capsys):
    before = emission(run)
    newest = as_before(run)
    assert torch.equal(emission(run), before)
    assert capsys.readouterr().err == ""
    shutil.rmtree(run / "vocab")
    with pytest.raises(UserError, match="no such file"):
        load_trained(run, device="cpu")
    (run / "config.yaml").unlink()
    with pytest.raises(UserError, match="is not in a run folder"):
        load_trained(newest, device="cpu")


def test_files_are_as_readable_as_the_umask_says(tmp_path):
    tensors = {"weight": torch.ones(3)}
    for mask, mode in ((0o022, 0o644), (0o002, 0o664), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            folder = checkpoint.save(
                tmp_path, mask, model=tensors, optimizer=tensors, ema=tensors, state={}, documents={"vocab/words": b""}
            )
        finally:
            os.umask(before)
        files = [file for file in folder.rglob("*") if file.is_file()]
        assert len(files) == 5
        assert {file.stat().st_mode & 0o777 for file in files} == {mode}


def test_files_that_people_may_change_have_no_hash(tmp_path):
    folder = tmp_path / "exported"
    tensors = {"model.safetensors": {"weight": torch.zeros(2)}}
    hashed_folder.write_folder(
        folder, tensors, {"a.txt": b"a"}, {"step": 0}, state_name="state.json", unhashed={"README.md": b"hello"}
    )
    assert (folder / "README.md").read_bytes() == b"hello"
    (folder / "README.md").write_bytes(b"changed")
    assert sorted(checkpoint.verify(folder)["files"]) == ["a.txt", "model.safetensors"]
