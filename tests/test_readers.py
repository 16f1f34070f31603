"""Files of a run that are too large, absurd, no files at all, or of others: told in one line, quickly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lm_pcfg.errors import SettingsError
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import state_file
from lm_pcfg.storage.state_file import CheckpointError, read_state, state_bytes
from lm_pcfg.yaml_text import parse_yaml, read_yaml
from texts import write_config

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
