"""Long lines: memory is estimated before it is taken, split rows are made block by block, and progress names them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import flash_inside
from command_line import lm_pcfg as command
from flash_inside import devices, trees
from flash_inside.devices import cgroup_limit, chart_memory, longest_fitting, memory_of
from flash_inside.packing import Layout
from flash_inside.scaled import chart as scaled
from grammars import random_emissions, random_rules
from lm_pcfg import console
from lm_pcfg.errors import UserError
from lm_pcfg.grammar import likelihood
from lm_pcfg.grammar.families import family_of
from lm_pcfg.settings_file import load_settings
from lm_pcfg.training import loop, steps
from texts import WORDS, write_config

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    loop.train(load_settings(write_config(folder), ["training.max_steps=2", "name=small"]))
    (folder / "text").write_text(f"{'the cat ' * 6}\nthe dog\n")
    return folder


# ---- split rows -----------------------------------------------------------------------------------------------------


def test_a_block_of_splits_is_a_part_of_all():
    layout = Layout([7, 3, 7, 1])
    for width in range(2, 8):
        both = layout.splits(width)
        for block in (slice(0, 1), slice(1, 4), slice(2, None)):
            for whole, part in zip(both, layout.splits(width, block), strict=True):
                np.testing.assert_array_equal(whole[block], part)


@pytest.fixture
def asked_for(monkeypatch) -> list[int]:
    """How many split rows are made at a time."""
    made: list[int] = []
    original = Layout.splits

    def splits(self, width, block=slice(None)):
        both = original(self, width, block)
        made.append(both[0].size)
        return both

    monkeypatch.setattr(Layout, "splits", splits)
    return made


def inside_and_gradients(lengths: list[int]) -> list[torch.Tensor]:
    rules = random_rules(4, 5, dtype=torch.float32)
    emissions = random_emissions(sum(lengths), 5, dtype=torch.float32)
    tensors = [tensor.requires_grad_() for tensor in (*rules, emissions)]
    log_z = flash_inside.inside(rules, emissions, lengths, backend="torch")
    return [log_z, *torch.autograd.grad(log_z.sum(), tensors)]


def test_blocks_of_split_rows_change_no_bit(monkeypatch, asked_for):
    lengths = [40, 31, 7, 1]
    monkeypatch.setattr(scaled, "LARGEST_SQUARES", 0)  # which need no numbers of rows
    torch.manual_seed(0)
    whole = inside_and_gradients(lengths)
    assert len(asked_for) == 39  # each width once, and kept for the derivatives
    monkeypatch.setattr(scaled, "MOST_SPLITS_KEPT", 100)
    monkeypatch.setattr(scaled, "LARGEST_BLOCK", 4 * 64)
    asked_for.clear()
    torch.manual_seed(0)
    for one, other in zip(whole, inside_and_gradients(lengths), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # sums over other blocks
    assert max(asked_for) <= 100
    monkeypatch.setattr(scaled, "LARGEST_BLOCK", 1 << 22)  # the blocks of before, and nothing kept
    torch.manual_seed(0)
    for one, other in zip(whole, inside_and_gradients(lengths), strict=True):
        assert torch.equal(one, other)


def test_trees_take_split_rows_block_by_block(monkeypatch, asked_for):
    rules, emissions = random_rules(4, 5), random_emissions(30, 5)
    whole = flash_inside.viterbi(rules, emissions, [30], "fp64", backend="torch")
    monkeypatch.setattr(trees, "LARGEST_BLOCK", 4 * 64)
    asked_for.clear()
    assert flash_inside.viterbi(rules, emissions, [30], "fp64", backend="torch") == whole
    assert max(asked_for) <= 64


# ---- how much memory there is ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/job/step\n", {"job/memory.max": "3000\n", "job/step/memory.max": "max\n"}, 3000),
        ("0::/job/step\n", {"job/memory.max": "3000\n", "job/step/memory.max": "2000\n"}, 2000),
        ("0::/not/seen/here\n", {"memory.max": "1000\n"}, 1000),  # a container sees its own group as the topmost one
        ("5:cpu:/x\n4:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "4000\n"}, 4000),
        ("4:cpu,memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 9223372036854771712),
        ("0::/\n", {}, math.inf),
        ("", {}, math.inf),
    ],
)
def test_the_limit_of_a_cgroup(tmp_path, own, files, limit):
    (tmp_path / "own").write_text(own)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert cgroup_limit(tmp_path, tmp_path / "own") == limit


def test_the_limit_of_a_cgroup_is_what_there_is(monkeypatch):
    monkeypatch.setattr(devices, "cgroup_limit", lambda: 12345.0)
    assert memory_of() == 12345.0
    monkeypatch.setattr(devices, "cgroup_limit", lambda: math.inf)
    assert memory_of() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_what_fits_is_the_inverse_of_what_is_taken():
    for precision in ("fp32", "fp64"):
        for length in (1, 40, 5000):
            assert longest_fitting(chart_memory([length], 64, precision), 64, precision) == pytest.approx(length)
    assert longest_fitting(math.inf, 64, "fp32") == math.inf


MEASURE = """
import torch
from flash_inside import Rules, inside
from flash_inside.scaled import chart as scaled
from flash_inside.devices import chart_memory

def most_memory():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

torch.set_num_threads(1)
scaled.MOST_SPLITS_KEPT, scaled.LARGEST_BLOCK = 0, 1 << 18  # what does not grow: together some 200 MB
n, words = 512, 120
def score(words):
    rules = Rules(*(torch.rand(*shape).softmax(-1) for shape in ((n + 8,), (n, n + 8), (n, n + 8))))
    tensors = [tensor.requires_grad_(GRADIENT) for tensor in (*rules, torch.randn(words, 8))]
    log_z = inside(Rules(*tensors[:3]), tensors[3], [words], backend="torch")
    if GRADIENT:
        log_z.sum().backward()
score(60)  # the libraries
before = most_memory()
score(words)
print((most_memory() - before) / (chart_memory([words], n, "fp32") - chart_memory([60], n, "fp32")))
"""


@pytest.mark.long
@pytest.mark.parametrize("gradient", [False, True])
def test_the_estimate_is_what_is_taken(gradient):
    result = subprocess.run(
        [sys.executable, "-c", MEASURE.replace("GRADIENT", str(gradient))], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "kernels")}, check=True,
    )  # fmt: skip
    assert 0.7 < float(result.stdout) < 1.5  # a chart is of five tables; allocators round


# ---- what does not fit is refused or skipped ------------------------------------------------------------------------


def test_a_chart_that_does_not_fit_is_not_begun(monkeypatch):
    monkeypatch.setattr(devices, "memory_of", lambda device=None: chart_memory([30], 4, "fp32"))
    rules, emissions = random_rules(4, 5, dtype=torch.float32), random_emissions(31, 5, dtype=torch.float32)
    assert flash_inside.inside(rules, emissions[:30], [30], backend="torch").isfinite()
    for function in (flash_inside.inside, flash_inside.inside_unchecked, flash_inside.span_marginals):
        with pytest.raises(MemoryError, match="are needed, and there are"):
            function(rules, emissions, [31], backend="torch")


@pytest.mark.parametrize("name", ["score", "parse"])
def test_lines_that_do_not_fit_are_skipped_with_the_right_reason(folder, monkeypatch, name):
    monkeypatch.setattr("lm_pcfg.inference.lines.memory_of", lambda device: chart_memory([11.9], 4, "fp32") / 0.8)
    result = command(name, "text", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert b"text, line 1: 12 words, skipped; 11 are what fits into memory" in result.stderr
    result = command(name, "text", "--max-length", "5", cwd=folder)
    assert b"text, line 1: 12 words, skipped; --max-length 5 is the limit (memory and time grow" in result.stderr
    result = command(name, "text", "--max-length", "50", cwd=folder)
    assert b"11 are what fits into memory" in result.stderr
    monkeypatch.undo()
    result = command(name, "text", "--max-length", "50", cwd=folder)
    assert b"skipped" not in result.stderr.replace(b"skipped   ", b"")


@pytest.mark.parametrize("by", ["sentences", "cost"])
@pytest.mark.parametrize("streamed", [False, True])
def test_training_on_a_long_line_is_refused_at_the_start(tmp_path, monkeypatch, by, streamed):
    config = write_config(tmp_path, batch={"by": by, "cost": 20, "sentences": 2})
    text = tmp_path / "train.txt"
    text.write_text(text.read_text() + " ".join(WORDS * 4) + "\n" + "the cat " * 15 + "\n")
    changes = ["data.max_length=null", f"data.streaming={str(streamed).lower()}", "training.max_steps=2"]
    settings = load_settings(config, changes)
    model = 2 * family_of(settings.model).model_memory(settings.model, len(WORDS) + 1, "cpu")  # <unk>, gradients
    needed = chart_memory([64, 30] if by == "sentences" else [64], 4, "fp32") + model
    monkeypatch.setattr(steps, "memory_of", lambda: needed - 1)
    with pytest.raises(UserError, match="64 words") as caught:
        loop.train(settings)
    message = str(caught.value)
    assert "\n" not in message
    assert ("a batch of the 2 longest sentences, up to 64 words, takes" in message) == (by == "sentences")
    way_out = next(word for word in message.split() if word.startswith("data.max_length="))
    loop.train(load_settings(config, [*changes, way_out, "name=fitting"]))
    monkeypatch.setattr(steps, "memory_of", lambda: needed)
    loop.train(load_settings(config, [*changes, "name=all"]))


def test_state_dropout_makes_charts_smaller():
    model = load_settings(
        REPOSITORY / "configs/tiny.yaml",
        ["model.state_dropout_until=null", "model.nonterminals=100", "model.state_dropout=0.5"],
    ).model
    family = family_of(model)
    assert family.chart_memory(model, [9], "fp32") == chart_memory([9], 50, "fp32")
    falling = model.model_copy(update={"state_dropout_until": 0.5})
    assert family.chart_memory(falling, [9], "fp32") == chart_memory([9], 100, "fp32")


@pytest.mark.parametrize("arguments", [["score"], ["parse"], ["sample", "--posterior"]], ids=lambda all: all[0])
def test_a_text_is_looked_for_before_a_model(tmp_path, arguments):
    result = command(*arguments, "nofile.txt", cwd=tmp_path)
    assert result.returncode == 1
    assert b"nofile.txt: no such file" in result.stderr
    result = command(*arguments, "-", cwd=tmp_path)
    assert b"no run under runs" in result.stderr


# ---- a sign of life -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["score", "parse"])
def test_progress_names_a_long_line_before_it_is_computed(folder, monkeypatch, name):
    monkeypatch.setattr(likelihood, "LONG", 12)
    said = command(name, "text", cwd=folder).stderr.decode().splitlines()
    assert said[0] == f"lines {'scored' if name == 'score' else 'parsed'} 0/2  now a line of length 12  ? left"
    monkeypatch.setattr(likelihood, "LONG", 13)
    assert "now a line" not in command(name, "text", cwd=folder).stderr.decode()


def test_what_is_done_now_is_told_once_and_then_now_and_then(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with console.progress("lines", 5, seconds_between_lines=10) as bar:
        for moment, amount, detail in (
            (0.5, 0, ""), (1, 0, "now one"), (2, 1, ""), (3, 0, "now two"), (12, 0, "now three"), (13, 1, "so far"),
            (30, 1, ""),
        ):  # fmt: skip
            now[0] = moment
            bar.advance(amount, detail)
    assert [line.split("  ")[:2] for line in capsys.readouterr().err.splitlines()] == [
        ["lines 0/5", "now one"], ["lines 1/5", "now three"], ["lines 3/5", "so far"],
    ]  # fmt: skip
