"""A state.json with a right checksum and any content: one line, never a traceback, and nothing outside is touched."""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from lm_pcfg.distributed.engine import Engine
from lm_pcfg.errors import UserError
from lm_pcfg.inference.trained import describe, load_trained
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.checkpoint import CheckpointError
from lm_pcfg.storage.state_file import State, read_state, state_bytes
from lm_pcfg.training import loop, resumption
from texts import write_config

VALUES: list[Any] = [None, True, -1, 3, 10**30, 1e308, -0.5, "", "../x", [], [[1]], [[1, 2, 3]], {}, {"x": {"y": 1}}]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, loop.Steps]:
    folder = tmp_path_factory.mktemp("trained")
    settings = load_settings(write_config(folder), ["training.max_steps=3"])
    return loop.train(settings), loop.Steps(settings, Engine(settings))


def places(content: Any, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The keys of all that may be replaced, those of objects in it included."""
    if not isinstance(content, dict):
        return [above]
    return [above] * bool(above) + [place for key in content for place in places(content[key], (*above, key))]


def use(run: Path, steps: loop.Steps) -> None:
    describe(load_trained(run, device="cpu"))
    resumption.restore(steps, checkpoint.latest(run), same_run=True)


@pytest.mark.parametrize("share", [0.2, pytest.param(1.0, marks=pytest.mark.chaos)])
def test_any_value_at_any_place(trained, share):
    run, steps = trained
    chosen = random.Random(0)
    file = checkpoint.latest(run) / "state.json"
    intact = json.loads(file.read_bytes())
    refused = 0
    try:
        for place in places(intact):
            for value in [*VALUES, "gone"]:
                if chosen.random() > share:
                    continue
                state = copy.deepcopy(intact)
                within = state
                for key in place[:-1]:
                    within = within[key]
                if value == "gone":
                    del within[place[-1]]
                else:
                    within[place[-1]] = value
                file.write_bytes(state_bytes(state))
                try:
                    use(run, steps)
                except UserError as error:
                    refused += 1
                    assert "\n" not in str(error)  # noqa: PT017 - some are refused, some are not
    finally:
        file.write_bytes(state_bytes(intact))
    assert refused > 300 * share
    use(run, steps)


@pytest.mark.parametrize("name", ["../model.safetensors", "/dev/zero", "vocab/../../x", ".hidden", "a/b/c", "a\n", ""])
def test_names_cannot_leave_the_folder(tmp_path, name):
    folder = checkpoint.save(tmp_path, 1, model={"w": torch.ones(1)}, optimizer={}, ema=None, state={})
    state = checkpoint.verify(folder)
    state["files"][name] = {"sha256": "0" * 64, "size": 3}
    (folder / "state.json").write_bytes(state_bytes(state))
    with pytest.raises(CheckpointError, match="is not the state of a checkpoint"):
        checkpoint.verify(folder)


@pytest.mark.parametrize("file", ["state.json", "model.safetensors", "vocab/words.txt"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_special_files_are_refused_at_once(tmp_path, file, kind):
    folder = checkpoint.save(
        tmp_path, 1, model={"w": torch.ones(1)}, optimizer={}, ema=None, state={}, documents={"vocab/words.txt": b""}
    )
    (folder / file).unlink()
    if kind == "pipe":
        os.mkfifo(folder / file)
    elif kind == "device":
        (folder / file).symlink_to("/dev/zero")
    else:
        (folder / file).mkdir()
    with pytest.raises(CheckpointError, match=rf"{file} (cannot be read: not a regular file|is truncated|is damaged)"):
        checkpoint.load(folder, with_optimizer=True)


SMALLEST = {"format": 1, "step": 0, "files": {}}
ENTRY = {"sha256": "0" * 64, "size": 0}


@pytest.mark.parametrize(
    ("most", "beyond"),
    [
        ({"step": 2**53}, {"step": 2**53 + 1}),
        ({"step": 0}, {"step": -1}),
        ({"files": {"a" * 100: ENTRY}}, {"files": {"a" * 101: ENTRY}}),
        ({"files": {f"{k}/x": ENTRY for k in range(1000)}}, {"files": {f"{k}/x": ENTRY for k in range(1001)}}),
        ({"files": {"a": ENTRY | {"sha256": "f" * 64}}}, {"files": {"a": ENTRY | {"sha256": "0" * 65}}}),
        ({"skipped_steps": [1] * 1000}, {"skipped_steps": [1] * 1001}),
        ({"diverged": "x" * 1000}, {"diverged": "x" * 1001}),
        ({"ranking": [[1.0, 2.0, 3.0]] * 10_000}, {"ranking": [[1.0, 2.0, 3.0]] * 10_001}),
        ({"ranking": [[1.0, 2.0, 3.0]]}, {"ranking": [[1.0, 2.0]]}),
        ({"ranking": []}, {"ranking": [[1.0, 2.0, 3.0, 4.0]]}),
        ({"window": {}}, {"window": {"others": 1}}),
        ({"data": {"epoch": 0, "batch": 0, "batches": 6, "plan": "", "dealings": [[2, 3]]}},
         {"data": {"epoch": 0, "batch": 0, "batches": 5, "plan": "", "dealings": [[2, 3]]}}),
        ({"data": {"epoch": 0, "batch": 0, "batches": 9, "plan": "", "dealings": [[2, 3], [1, 3]]}},
         {"data": {"epoch": 0, "batch": 0, "batches": 9, "plan": "", "dealings": [[2, 3], [0, 3]]}}),
        ({"data": {"epoch": 0, "batch": 0, "batches": 9, "plan": ""}},
         {"data": {"epoch": 0, "batch": 0, "batches": 9, "plan": "", "dealings": [[2]]}}),
        ({"data": None}, {"data": {"epoch": 0, "batch": 0, "batches": 9, "plan": "", "dealings": [[2, 1, 1]]}}),
    ],
)  # fmt: skip
def test_limits_of_a_state(most, beyond):
    State.model_validate(SMALLEST | {"checksum": ""} | most)
    with pytest.raises(ValidationError):
        State.model_validate(SMALLEST | {"checksum": ""} | beyond)


def test_what_is_no_state_is_named_in_a_line_of_bounded_length(tmp_path):
    file = tmp_path / "state.json"

    def message(content: bytes) -> str:
        file.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            read_state(file)
        return str(caught.value).removeprefix(f"{file} ")

    unknown = "has the unknown format {}; this version reads format 1"
    assert message(b'{"format": 2}') == unknown.format(2)
    assert message(b'{"format": "%s"}' % (b"x" * 100)) == unknown.format("'" + "x" * 39)
    no_state = "is not the state of a checkpoint: "
    for content in (b"[]", b"{}", b'"format"'):
        assert message(content) == no_state + "no format version in it"
    damaged = "is damaged: its content does not match its checksum"
    assert message(b'{"format": 1}') == message(b'{"format": 1, "step": NaN}') == damaged
    assert message(state_bytes(SMALLEST).replace(b'"step": 0', b'"step": 1')) == damaged
    assert message(state_bytes({"format": 1, "files": {}})) == no_state + "'step': Field required"
    files = {"x" * 200: ENTRY}
    assert message(state_bytes(SMALLEST | {"files": files})).startswith(f"{no_state}'files.{'x' * 40}.[key]': ")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"state\.json is missing$"):
        read_state(file)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"format": 1, "step": ' + b"9" * 5000 + b"}"])
def test_json_that_python_gives_up_on(tmp_path, content):
    folder = checkpoint.save(tmp_path, 1, model={}, optimizer={}, ema=None, state={})
    (folder / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="is truncated or damaged: not JSON"):
        checkpoint.verify(folder)


def test_a_huge_state_is_not_read(tmp_path):
    folder = checkpoint.save(tmp_path, 1, model={}, optimizer={}, ema=None, state={})
    os.truncate(folder / "state.json", 1 << 40)  # a hole: it takes no space
    with pytest.raises(CheckpointError, match="are too many"):
        checkpoint.verify(folder)
