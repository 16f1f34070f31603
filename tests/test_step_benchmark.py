"""`lm_pcfg bench step` measures the trainer's own step, part by part."""

from __future__ import annotations

import csv
import re
import time
from pathlib import Path

import pytest
import torch
import typer

from lm_pcfg.bench import step as step_benchmark
from lm_pcfg.commands.bench import _numbers
from lm_pcfg.distributed.engine import Engine
from lm_pcfg.errors import UserError
from lm_pcfg.settings_file import load_settings
from lm_pcfg.training.steps import Steps

REPOSITORY = Path(__file__).parents[1]
CONFIG = """
data: {train: TEXT}
model: {nonterminals: 1, dimension: 8}
tracking: {mlflow: false}
threads: 1
"""


def test_one_row_for_every_size(tmp_path, capsys):
    text, config = tmp_path / "text", tmp_path / "c.yaml"
    text.write_text("a b c\nb a\nc c a b\n" * 10)
    config.write_text(CONFIG.replace("TEXT", str(text)))
    table, plot = tmp_path / "steps.csv", tmp_path / "steps.svg"
    step_benchmark.main(config, ["model.state_dropout=0.5"], [2, 4], [1, 3], 2, table, plot)
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["nonterminals"], row["sentences"]) for row in rows] == [("2", "1"), ("2", "3"), ("4", "1"), ("4", "3")]
    for row in rows:
        assert row["preterminals"] == str(2 * int(row["nonterminals"]))
        assert float(row["state_dropout"]) == 0.5
        assert all(float(row[f"{part}_ms"]) > 0 for part in step_benchmark.PARTS)
        assert float(row["words_per_second"]) > 0
        assert float(row["peak_gib"]) > 0
        assert row["note"] == ""
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + len(rows)
    assert plot.read_text().count("<rect") == 1 + 5 + 5 * len(rows)  # background, legend, bars


def test_a_low_rank_grammar_has_as_many_rank_symbols_as_nonterminals(tmp_path, monkeypatch):
    text, config = tmp_path / "text", tmp_path / "c.yaml"
    text.write_text("a b c\nb a\n" * 5)
    config.write_text(CONFIG.replace("TEXT", str(text)).replace("dimension", "family: rank_pcfg, rank: 9, dimension"))
    seen, timed = [], step_benchmark._timed

    def looked_at(trainer, steps):
        seen.append((trainer.settings.model.nonterminals, trainer.settings.model.rank))
        return timed(trainer, steps)

    monkeypatch.setattr(step_benchmark, "_timed", looked_at)
    assert step_benchmark.main(config, [], [2, 4], [2], 1, None, None)
    assert seen == [(2, 2), (4, 4)]
    with pytest.raises(UserError, match=r"model\.rank would have no effect"):
        step_benchmark.main(config, ["model.rank=3"], [2], [2], 1, None, None)


@pytest.mark.parametrize("family", ["rank_pcfg", "lhmm", "sc_pcfg"])
def test_a_config_is_measured_as_it_is(family, tmp_path, capsys):
    table, plot = tmp_path / "steps.csv", tmp_path / "steps.svg"
    config = REPOSITORY / f"configs/tiny/{family}.yaml"
    batches = ["batch.by=cost", "batch.cost=600"] if family == "rank_pcfg" else ["batch.sentences=3"]
    changes = ["threads=1", "batch.accumulate=2", *batches]
    assert step_benchmark.main(config, changes, None, None, 1, table, plot)
    with table.open() as file:
        (row,) = csv.DictReader(file)
    model = load_settings(config, changes).model
    assert row["family"] == family
    for size in ("nonterminals", "preterminals", "rank", "states"):
        assert row[size] == str(getattr(model, size, ""))
    assert all(float(row[f"{part}_ms"]) > 0 for part in step_benchmark.PARTS)
    assert float(row["sentences"]) >= 6 if family == "rank_pcfg" else row["sentences"] == "6"
    assert f"{row['nonterminals'] or row['states']} x {row['sentences']}" in plot.read_text()
    if family == "lhmm":
        with pytest.raises(UserError, match="--nonterminals: family lhmm has none"):
            step_benchmark.main(config, changes[:1], [4], None, 1, None, None)
    with pytest.raises(UserError, match=r"batch\.\w+ would have no effect"):
        step_benchmark.main(config, changes, None, [4], 1, None, None)


def test_a_grammar_that_does_not_fit_into_memory_gets_a_note(tmp_path, monkeypatch, capsys):
    text, config = tmp_path / "text", tmp_path / "c.yaml"
    text.write_text("a b c\n" * 5)
    config.write_text(CONFIG.replace("TEXT", str(text)))
    timed = step_benchmark._timed

    def too_large_for_four(trainer, steps):
        if trainer.settings.model.nonterminals == 4:  # as PyTorch says it of the host's memory
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
        return timed(trainer, steps)

    monkeypatch.setattr(step_benchmark, "_timed", too_large_for_four)
    assert step_benchmark.main(config, [], [4, 2], [2], 1, None, None)
    _, large, small = capsys.readouterr().out.splitlines()
    assert large.split() == ["4", "2", "out", "of", "memory"]
    assert len(small.split()) == 11
    assert not step_benchmark.main(config, [], [4], [2], 1, None, None)  # nothing was measured
    monkeypatch.setattr(step_benchmark, "_timed", lambda *_: (_ for _ in ()).throw(RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        step_benchmark.main(config, [], [4], [2], 1, None, None)


class Mark:
    """As an event of CUDA, on the host."""

    def __init__(self, enable_timing):
        self.at = None

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, later):
        return 1e3 * (later.at - self.at)


def test_parts_of_steps_in_a_row(tmp_path, monkeypatch):
    text, config = tmp_path / "text", tmp_path / "c.yaml"
    text.write_text("a b c\n" * 5)
    config.write_text(CONFIG.replace("TEXT", str(text)))
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    settings = load_settings(config, [])
    trainer = Steps(settings, Engine(settings))
    began = time.perf_counter()
    parts = step_benchmark._parts_on_device(trainer, [trainer.stream.next_step() for _ in range(3)])
    seconds = time.perf_counter() - began
    assert parts.keys() == {f"{part}_on_device_ms" for part in ("grammar", "inside", "update")}
    assert all(part > 0 for part in parts.values())
    assert 3 * sum(parts.values()) < 1e3 * seconds


def test_memory_that_is_not_told_is_left_open(tmp_path, monkeypatch, capsys):
    text, config = tmp_path / "text", tmp_path / "c.yaml"
    text.write_text("a b c\n" * 5)
    config.write_text(CONFIG.replace("TEXT", str(text)))
    monkeypatch.setattr(step_benchmark, "PROCESS", tmp_path / "none")
    step_benchmark.main(config, [], [2], [2], 1, None, None)
    assert capsys.readouterr().out.splitlines()[-1].split()[-2:] == ["-", "0"]


def test_without_a_gpu_the_default_is_small(monkeypatch, capsys):
    measured = []
    monkeypatch.setattr(step_benchmark, "bench_steps", lambda _, *grid: measured.append(grid) or [])
    for on_gpu, expected in ((False, ([64, 128, 256], [16], 10)), (True, ([512, 2048, 4096, 8192], [16], 100))):
        monkeypatch.setattr(step_benchmark.torch.cuda, "is_available", lambda on_gpu=on_gpu: on_gpu)
        step_benchmark.main(None, [], None, [16], None, None, None)
        assert measured.pop() == expected
        assert ("without a GPU" in capsys.readouterr().err) is not on_gpu


def test_a_batch_that_the_text_cannot_fill_is_not_measured(tmp_path, capsys):
    text, config = tmp_path / "text", tmp_path / "c.yaml"
    text.write_text("a b c\n" * 5)
    config.write_text(CONFIG.replace("TEXT", str(text)))
    step_benchmark.main(config, [], [2], [6], 1, None, None)
    assert "the text has no batch of more than 5 sentences" in capsys.readouterr().out


def test_what_cannot_be_done_is_found_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step_benchmark, "bench_steps", lambda *_: pytest.fail("measured"))
    circle = tmp_path / "circle"  # nobody can write there, root neither
    circle.symlink_to(circle)
    wrong_files = (
        (tmp_path, f"{tmp_path} is a folder; name a file in it"),
        (tmp_path / "none" / "a.csv", f"there is no folder {tmp_path / 'none'}; make it first"),
        (circle, f"{circle}: cannot be written: Too many levels of symbolic links"),
        (tmp_path / ("a" * 300), "cannot be written: File name too long"),
    )
    for file, said in wrong_files:
        for table, plot in ((file, None), (None, file)):
            with pytest.raises(UserError, match=re.escape(said)):
                step_benchmark.main(None, [], [1], [1], 1, table, plot)
    with pytest.raises(UserError, match="is named for two things"):
        step_benchmark.main(None, [], [1], [1], 1, tmp_path / "same", tmp_path / "same")
    for key, said in (("model.preterminals", "twice the nonterminals"), ("batch.sentences", "use --sentences")):
        with pytest.raises(UserError, match=f"{key} would have no effect in bench step; .*{said}"):
            step_benchmark.main(None, [f"{key}=5"], [1], [1], 1, None, None)
        section, _, name = key.partition(".")
        with pytest.raises(UserError, match=f"{key} would have no effect"):
            step_benchmark.main(None, [f"{section}={{{name}: 5}}"], [1], [1], 1, None, None)
    for text in ("0", "x", "4,", str(2**31)):
        with pytest.raises(typer.BadParameter, match="whole numbers from 1 to 2\\^30"):
            _numbers("--sentences", text)
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == [circle]


def test_synthetic_text_has_the_lengths_of_the_treebank():
    lengths = [len(line.split()) for line in step_benchmark._synthetic_lines(lines=5000, types=100)]
    assert abs(sum(lengths) / len(lengths) - 20.04) < 0.5
    assert min(lengths) >= 1
    assert max(lengths) <= 40
