"""`lm_pcfg report`: figures and learning curves from metrics.jsonl, of runs in any state."""

from __future__ import annotations

import json
import math
import os
import signal
import time
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lm_pcfg import cli
from lm_pcfg.bench.plot import draw_curves
from lm_pcfg.errors import UserError
from lm_pcfg.inference.report import read_runs, summary, table
from lm_pcfg.pages.model_parts import Wanted
from lm_pcfg.pages.report import report_page
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage.metrics_file import MetricsFile
from lm_pcfg.training import loop
from texts import write_config

CONFIG = "name: x\nmodel: {nonterminals: 64}\ntraining: {epochs: 3}\n"


def train_line(step: int, ppl: float, seconds: float = 10.0, **more) -> tuple[int, dict]:
    return step, {
        "epoch": step // 100, "train/learning_rate": 1e-3, "train/ppl": ppl, "train/seconds": seconds,
        "train/words_per_second": 100.0 * step, "train/skipped": step // 100, **more,
    }  # fmt: skip


def valid_line(step: int, ppl: float, impossible: int = 0) -> tuple[int, dict]:
    return step, {"valid/ppl": ppl, "valid/impossible": impossible, "valid/seconds": 99.0}


WHOLE = [train_line(50, 200.0), valid_line(50, 150.0), train_line(100, 140.0), valid_line(100, 120.0),
         train_line(150, 115.0), valid_line(150, 118.0), train_line(200, 101.0), valid_line(200, 119.5)]  # fmt: skip


def write_run(folder: Path, lines: list[tuple[int, dict]], config: str | None = CONFIG, finished: bool = True) -> Path:
    folder.mkdir()
    metrics = MetricsFile(folder / "metrics.jsonl", pytest.fail)
    for step, line in lines:
        metrics.append(step, line)
    metrics.close()
    if config is not None:
        (folder / "config.yaml").write_text(config)
    if finished:
        (folder / "FINISHED").touch()
    return folder


def summary_of(folder: Path, reach: float | None = None) -> dict:
    (run,) = read_runs([folder], pytest.fail)
    return summary(run, reach)


def test_perplexities_of_compound_models_are_upper_bounds(tmp_path):
    """Their evaluations have a divergence."""
    lines = [(step, line | ({"valid/kl": 0.5} if "valid/ppl" in line else {})) for step, line in WHOLE]
    bound, exact = summary_of(write_run(tmp_path / "a", lines)), summary_of(write_run(tmp_path / "b", WHOLE))
    assert bound["ppl_is"].startswith("an upper bound")
    assert "ppl_is" not in exact
    assert (table([bound, exact]).count("<= 118.00"), table([bound, exact]).count("118.00")) == (1, 2)
    assert table([bound, exact]).count("<=") == 2  # of validation and of training


def test_the_figures_of_a_run(tmp_path):
    line = summary_of(write_run(tmp_path / "a", WHOLE), reach=119.0)
    assert line == {
        "run": "a", "nonterminals": 64, "finished": True, "failure": None, "epochs": 3,
        "epochs_planned": 3, "steps": 200, "unit": None, "unknown_share": None,
        "best_valid_ppl": 118.0, "best_step": 150, "impossible": 0,
        "last_train_ppl": pytest.approx(101.0),
        "skipped_share": 0.01, "words_per_second": 12_500.0, "training_seconds": 40.0,
        "reach": 119.0, "reached_step": 150, "reached_seconds": 30.0,
    }  # fmt: skip
    assert summary_of(tmp_path / "a", reach=100.0)["reached_seconds"] is None
    shown = table([line])
    assert "118.00" in shown
    assert "s to 119" in shown
    assert "unfinished" not in shown


def test_a_run_that_failed_says_so_and_why(tmp_path):
    folder = write_run(tmp_path / "a", WHOLE, finished=False)
    (folder / "FAILED").write_text("the training diverged <at> step 9\n")
    line = summary_of(folder)
    assert (line["finished"], line["failure"]) == (False, "the training diverged <at> step 9")
    assert "a (failed)" in table([line])
    page = report_page(read_runs([folder], pytest.fail), wanted=Wanted())
    assert "a (failed)" in page
    assert "a has failed: the training diverged &lt;at&gt; step 9" in page


def test_the_best_evaluation_has_the_fewest_impossible_sentences(tmp_path):
    lines = [train_line(1, 9.0), valid_line(1, 5.0, impossible=2), train_line(2, 9.0), valid_line(2, 7.0)]
    assert summary_of(write_run(tmp_path / "a", lines))["best_valid_ppl"] == 7.0


def test_the_best_evaluation_is_of_the_last_validation_text(tmp_path):
    """After a resume with another one: figures of two texts are not compared."""
    lines = []
    for step, (perplexity, tokens) in enumerate([(5.0, 40), (9.0, 70), (8.0, 70), (8.5, 70)], start=1):
        place, content = valid_line(step, perplexity)
        lines += [train_line(step, 9.0), (place, content | {"valid/tokens": tokens})]
    folder = write_run(tmp_path / "a", lines)
    assert summary_of(folder)["best_valid_ppl"] == 8.0
    (run,) = read_runs([folder], pytest.fail)
    assert run.reached(8.9).step == 3


def test_the_training_perplexity_is_of_the_last_tenth_of_the_steps(tmp_path):
    """... weighted by its words, so that neither a few batches at its end nor where the run began matter."""
    words = {900: 9.0, 960: 2.0, 980: 6.0, 1000: 2.0}
    ppl = {900: 500.0, 960: 200.0, 980: 100.0, 1000: 400.0}
    lines = [train_line(step, ppl[step], seconds=2.0, **{"train/words_per_second": words[step] / 2}) for step in words]
    line = summary_of(write_run(tmp_path / "a", lines))
    assert line["last_train_ppl"] == pytest.approx(200.0**0.2 * 100.0**0.6 * 400.0**0.2)
    for _, content in lines:
        del content["train/words_per_second"]  # of another version
    line = summary_of(write_run(tmp_path / "b", lines))
    assert line["last_train_ppl"] == pytest.approx((200.0 * 100.0 * 400.0) ** (1 / 3))


def test_what_is_not_finite_is_no_trouble(tmp_path):
    lines = [train_line(1, math.inf), valid_line(1, math.nan), train_line(2, 90.0), valid_line(2, math.inf),
             train_line(3, math.nan), valid_line(3, 80.0)]  # fmt: skip
    lines.append((4, {"train/learning_rate": 0.1, "train/seconds": 5.0}))
    folder = write_run(tmp_path / "a", lines)
    line = summary_of(folder, reach=85.0)
    assert (line["best_valid_ppl"], line["training_seconds"]) == (80.0, 35.0)
    assert line["last_train_ppl"] == pytest.approx(90.0)
    assert line["reached_step"] == 3
    xml.fromstring(draw_curves(read_runs([folder], pytest.fail)))


@pytest.mark.parametrize("content", [b"", b'{"step": 3, "tr', b"\x00\xff\n[]\n"], ids=["empty", "cut off", "garbage"])
def test_runs_that_have_hardly_begun(tmp_path, content):
    folder = write_run(tmp_path / "a", [], finished=False)
    (folder / "metrics.jsonl").write_bytes(content)
    messages: list[str] = []
    (run,) = read_runs([folder], messages.append)
    line = summary(run, 10.0)
    assert (line["steps"], line["best_valid_ppl"], line["training_seconds"], line["reached_step"]) == (
        0,
        None,
        None,
        None,
    )
    assert ["left out" in message for message in messages] == [True] * bool(content)
    assert "a (unfinished)" in table([line])
    xml.fromstring(draw_curves([run], 10.0))


def test_without_validation_or_settings(tmp_path):
    folder = write_run(tmp_path / "a", [train_line(50, 200.0), train_line(100, 150.0)], config=None)
    line = summary_of(folder, reach=160.0)
    assert (line["nonterminals"], line["best_valid_ppl"], line["last_train_ppl"]) == (None, None, pytest.approx(150.0))
    assert line["reached_step"] is None  # the training perplexity does not count
    messages: list[str] = []
    (folder / "config.yaml").write_text("model: [")
    assert read_runs([folder], messages.append)[0].nonterminals is None
    assert "the settings of this run are unknown" in messages[0]
    (folder / "metrics.jsonl").unlink()
    assert read_runs([folder], messages.append)[0].steps == 0


def test_lines_that_were_written_again_count_once(tmp_path):
    again = [train_line(100, 130.0, 20.0), valid_line(100, 110.0)]
    line = summary_of(write_run(tmp_path / "a", WHOLE + again))
    assert (line["steps"], line["best_valid_ppl"], line["training_seconds"]) == (100, 110.0, 10.0 + 10.0 + 20.0)


def test_older_metrics_have_their_times_from_time_stamps(tmp_path):
    folder = write_run(tmp_path / "a", [])
    times = [(10, 1000.0, "train/ppl"), (10, 1003.0, "valid/ppl"), (20, 1010.0, "train/ppl"), (20, 1013.0, "valid/ppl")]
    lines = [{"step": step, "time": time, name: 5.0, "train/learning_rate" if name[0] == "t" else "x": 1}
             for step, time, name in times]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    messages: list[str] = []
    (run,) = read_runs([folder], messages.append)
    assert run.seconds == 7.0  # from the end of the first evaluation to the next line
    assert "from time stamps" in messages[0]


def test_training_time_leaves_out_evaluations_and_pauses(tmp_path, monkeypatch):
    """... and a resumed run has all of it, though it was stopped between two lines of metrics."""
    step, evaluate = loop.Steps.step, loop.evaluate

    def slow_step(self, batches):
        time.sleep(0.02)
        result = step(self, batches)
        if self.position.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    def slow_evaluation(*arguments):
        time.sleep(0.5)
        return evaluate(*arguments)

    monkeypatch.setattr(loop.Steps, "step", slow_step)
    monkeypatch.setattr(loop, "evaluate", slow_evaluation)
    changes = {"training": {"epochs": 1, "log_every": 5}, "evaluation": {"every_steps": 2}}
    settings = load_settings(write_config(tmp_path, **changes), ["resume=auto"])
    began = time.perf_counter()
    folder = loop.train(settings)
    assert not (folder / "FINISHED").exists()
    time.sleep(0.5)
    loop.train(settings)
    wall = time.perf_counter() - began
    line = summary_of(folder)
    assert (line["steps"], line["finished"]) == (8, True)
    assert 8 * 0.02 <= line["training_seconds"] <= wall - 4 * 0.5 - 0.5


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_and_draws(tmp_path):
    one, two = write_run(tmp_path / "one", WHOLE), write_run(tmp_path / "two & a half", WHOLE[:2], finished=False)
    picture = tmp_path / "curves.svg"
    runner = CliRunner()
    result = runner.invoke(cli.app, ["report", str(one), str(two), "--plot", str(picture), "--reach", "119"])
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["run", "one", "two"]
    root = xml.fromstring(picture.read_text())
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f".//{space}circle")) == 2 * (4 + 1)  # two panels, an evaluation a dot
    assert any("two & a half: 150.00" in (text.text or "") for text in root.iter(f"{space}text"))
    report = json.loads(runner.invoke(cli.app, ["report", str(one), str(two), "--json"]).stdout)
    assert [run["best_valid_ppl"] for run in report["runs"]] == [118.0, 150.0]


def test_runs_of_the_same_name_go_by_their_paths(tmp_path):
    (tmp_path / "x").mkdir()
    folders = [write_run(tmp_path / "a", WHOLE), write_run(tmp_path / "x" / "a", WHOLE)]
    assert [run.name for run in read_runs(folders, pytest.fail)] == list(map(str, folders))


def test_what_is_no_run_is_passed_over(tmp_path):
    run = write_run(tmp_path / "a", WHOLE)
    (tmp_path / "search" / "b").mkdir(parents=True)
    (tmp_path / "b.log").touch()
    warned: list[str] = []
    assert [of.name for of in read_runs([tmp_path / "search", run, tmp_path / "b.log"], warned.append)] == ["a"]
    assert [line.split(" ", 1)[1] for line in warned] == ["is not a run folder: passed over"] * 2


def test_mistakes(tmp_path):
    with pytest.raises(UserError, match="not a run folder"):
        read_runs([tmp_path], pytest.fail)
    run = str(write_run(tmp_path / "a", WHOLE))
    runner = CliRunner()
    assert runner.invoke(cli.app, ["report"]).exit_code == 2
    assert runner.invoke(cli.app, ["report", run, "--reach", "0"]).exit_code == 2
    assert runner.invoke(cli.app, ["report", run, "--plot", str(tmp_path / "a.png")]).exit_code == 2  # it is SVG
    result = runner.invoke(cli.app, ["report", run, "--plot", str(tmp_path / "no" / "a.svg")])
    assert isinstance(result.exception, UserError)
    assert "cannot write" in str(result.exception)
