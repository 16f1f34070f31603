"""`lm_pcfg search`: variants of a config, each trained once, compared with their control."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lm_pcfg import cli
from lm_pcfg.bench.search import settings_of
from lm_pcfg.errors import UserError
from lm_pcfg.training import loop
from processes import alive, descendants, kill, launched, wait_until
from texts import write_config

VARIANTS = "variants:\n  ema: [ema.decay=0.9]\n  wild: [optimizer.learning_rate=1e30, training.epochs=4]\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_config(tmp_path, "base", training={"epochs": 1})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "try.yaml").write_text(f"config: base.yaml\ncommon: [model.nonterminals=3]\n{VARIANTS}")
    return tmp_path / "try.yaml"


def search(*arguments: object) -> str:
    return CliRunner().invoke(cli.app, ["search", *map(str, arguments)], catch_exceptions=False).stdout


def test_variants_are_trained_once_and_compared(file, monkeypatch):
    table = search(file)
    head, _, control, ema, wild = table.splitlines()
    assert head.startswith("| run | changes | valid | against control |")
    assert control.startswith("| control | `model.nonterminals=3` | ")
    name, changes, valid, against = (cell.strip() for cell in ema.split("|")[1:5])
    assert (name, changes) == ("ema", "`ema.decay=0.9`")
    assert float(against) == pytest.approx(float(valid) - float(control.split("|")[3]), abs=0.011)
    assert "wild (failed)" in wild  # and the search went on past it
    assert (file.parent / "runs" / "try" / "ema" / "FINISHED").exists()
    monkeypatch.setattr(loop, "train", lambda settings: pytest.fail("trained again"))
    assert search(file) == search(file, "--table") == table


def test_variants_that_cannot_be_compared_are_told(file):
    file.write_text("config: base.yaml\ncommon: [training.max_steps=1]\nvariants:\n  few: [data.vocabulary.size=9]\n")
    result = CliRunner().invoke(cli.app, ["search", str(file)], catch_exceptions=False)
    assert "warning: these runs have different vocabularies (9 and 17 types)" in result.stderr


def test_changes_on_the_command_line_leave_a_variant_what_it_is_about(file):
    overrides = ["model.nonterminals=4", "ema.decay=0.5", "training.max_steps=1"]
    runs = settings_of(file, overrides)
    assert {name: (of_run.model.nonterminals, of_run.ema.decay) for name, of_run in runs.items()} == {
        "control": (4, 0.5), "ema": (4, 0.9), "wild": (4, 0.5)
    }  # fmt: skip
    _, _, control = search(file, "--only", "control", *overrides).splitlines()
    assert control.startswith("| control | `model.nonterminals=3` `model.nonterminals=4` `ema.decay=0.5` ")


def test_a_stopped_search_continues_where_it_was(file, monkeypatch):
    original = loop.Steps.step

    def step(self, batches):
        result = original(self, batches)
        if self.settings.name == "ema" and self.position.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(loop.Steps, "step", step)
        stopped = search(file)
    assert "ema (unfinished)" in stopped
    assert "wild" not in stopped
    continued = search(file)
    assert "unfinished" not in continued
    assert "wild (failed)" in continued


@pytest.mark.long
def test_several_at_once_are_what_one_after_another_are(file):
    alone = search(file, "--only", "ema")
    assert "| ema |" in alone
    assert "| control |" not in alone
    together = search(file, "--at-once", 3)
    assert (file.parent / "runs" / "try" / "control.log").read_text().count("finished after step") == 1
    assert not (file.parent / "runs" / "try" / "ema.log").exists()  # finished before
    assert "wild (failed)" in together

    def figures(table: str) -> list[str]:
        return [line.rpartition("|")[0].rpartition("|")[0] for line in table.splitlines()]  # not the seconds

    (file.parent / "runs").rename(file.parent / "before")
    assert figures(search(file)) == figures(together)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_search_that_is_stopped_stops_what_it_trains_at_once(file, number):
    file.write_text(
        "config: base.yaml\ncommon: [training.epochs=1000000]\nvariants: {two: [seed=2], three: [seed=3]}\n"
    )
    runs, log = file.parent / "runs" / "try", file.parent / "log"
    command = [sys.executable, "-m", "lm_pcfg", "search", str(file), "--at-once", "2"]
    with launched(command, log) as process:
        wait_until(lambda: all((runs / name / "metrics.jsonl").exists() for name in ("control", "two")), 120)
        trained = descendants(process.pid)
        process.send_signal(number)
        try:
            status = process.wait(60)
            wait_until(lambda: not any(map(alive, trained)))
        finally:
            for pid in trained:
                kill(pid)
    for name in ("control", "two"):
        assert "; the same search continues it" in (runs / f"{name}.log").read_text()
    assert not (runs / "three").exists()
    if number != signal.SIGKILL:
        assert status == 0
        assert "the search was stopped; the same command continues it" in log.read_text()


def test_a_variant_that_cannot_be_trained_at_once_with_others_is_an_error(file):
    file.write_text("config: base.yaml\nvariants: {huge: [model.nonterminals=1000000000]}\n")
    search(file, "--only", "control")  # in this process, which has PyTorch
    with pytest.raises(UserError, match=r"huge could not be trained .* with --table shows the others"):
        search(file, "--at-once", 2)
    assert "not enough memory" in (file.parent / "runs" / "try" / "huge.log").read_text()
    assert "| control |" in search(file, "--table")


def test_runs_of_other_settings_are_not_taken_for_these(file):
    search(file, "--only", "control")
    with pytest.raises(UserError, match=r"control/config.yaml has other settings .* rename the variant"):
        search(file, "seed=3")


def test_a_variant_that_is_not_there_is_told_with_those_that_are(file):
    with pytest.raises(UserError, match=r"has no variant em: use one of control, ema, wild"):
        search(file, "--only", "em")


def test_a_table_says_when_there_is_nothing_and_takes_no_variant(file):
    result = CliRunner().invoke(cli.app, ["search", str(file), "--table"])
    assert len(result.stdout.splitlines()) == 2
    assert "no run of this search is there yet" in result.stderr
    assert CliRunner().invoke(cli.app, ["search", str(file), "--table", "--only", "ema"]).exit_code == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("config: base.yaml\nvariants: [ema]\n", "should have config: FILE"),
        ("variants: {}\n", "should have config: FILE"),
        ("config: base.yaml\nvariants: {control: []}\n", "is there already"),
        ("config: base.yaml\nvariants: {a: [model.nonsense=1]}\n", "variant a: .*unknown"),
        ("config: none.yaml\n", "cannot be read"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(file, text, message):
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        search(file)
    assert not (file.parent / "runs").exists()
