"""`lm_pcfg fit`: scaling laws of runs, from their folders."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as xml
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lm_pcfg import cli
from lm_pcfg.bench import laws
from lm_pcfg.bench.laws import Law, Trained
from lm_pcfg.bench.plot import draw_laws
from lm_pcfg.errors import UserError
from lm_pcfg.inference.report import Run, read_runs
from lm_pcfg.storage.metrics_file import MetricsFile

SIZES, TEXTS = (256, 1024, 4096), (1e6, 4e6, 1.6e7)
TRUE = Law(("nonterminals", "words"), 3.2, (12.0, 400.0), (0.4, 0.45))


def run_of(size: int, words: float, loss: float | None = None, epochs: float = 4.0) -> Trained:
    seconds = 1e-7 * size**1.2 * words * epochs
    return Trained(f"{size}-{words:g}", size, words, epochs, seconds, TRUE.at(size, words) if loss is None else loss)


def grid(sizes: Iterable[int] = SIZES, texts: Iterable[float] = TEXTS) -> list[Trained]:
    return [run_of(size, words) for size in sizes for words in texts]


def test_a_law_is_found_again() -> None:
    law = laws.fit(grid()).law
    assert law.variables == TRUE.variables
    assert law.constant == pytest.approx(TRUE.constant, rel=1e-4)
    assert law.exponents == pytest.approx(TRUE.exponents, rel=1e-3)
    assert law.coefficients == pytest.approx(TRUE.coefficients, rel=1e-2)
    assert law.at(256, 1e6) == pytest.approx(3.2 + 12 * 256**-0.4 + 400 * 1e6**-0.45, rel=1e-6)


def test_a_law_says_what_its_runs_do_not_tell() -> None:
    assert laws.fit(grid()).law.untold == []
    alike = [run._replace(loss=3.2 + 400 * run.words**-0.45) for run in grid()]  # whatever their N
    little = [run._replace(loss=run.loss + 0.01 * (run.nonterminals / 1024) ** -0.4) for run in alike]
    assert laws.fit(little).law.untold == []  # a hundredth of a nat is more than rounding
    fitted = laws.fit(alike)
    assert fitted.law.untold == ["nonterminals"]
    assert "do not tell how the loss falls with N" in laws.table(fitted)
    assert laws.report(fitted)["law"]["untold"] == ["nonterminals"]


def test_a_run_is_predicted_by_the_others_alone() -> None:
    runs = grid()
    runs[-1] = runs[-1]._replace(loss=runs[-1].loss * 1.05)  # the largest does not follow the law
    fitted = laws.fit(runs)
    assert fitted.largest.name == "4096-1.6e+07"
    assert fitted.left_out[fitted.largest.name] == pytest.approx(TRUE.of(runs[-1]), rel=1e-4)
    assert laws.report(fitted)["largest_error"] == pytest.approx(1 / 1.05 - 1, abs=1e-4)
    assert "(-4.76%)" in laws.table(fitted)


def test_of_each_size_and_text_the_best_takes_part() -> None:
    worse = [run_of(1024, 4e6 * 1.01, loss=9.0, epochs=2.0), run_of(1024, 4e6 * 0.99, loss=9.0, epochs=8.0)]
    fitted = laws.fit(grid() + worse)
    assert len(fitted.runs) == 9
    assert fitted.law.exponents == pytest.approx(TRUE.exponents, rel=1e-3)


@pytest.mark.parametrize(
    ("runs", "variables"),
    [(grid(sizes=[64, 256, 1024, 4096], texts=[1e6]), ("nonterminals",)),
     (grid(sizes=[256], texts=[1e6, 2e6, 4e6, 8e6]), ("words",)),
     (grid(sizes=[256, 1024], texts=[1e6, 2e6, 4e6, 8e6]), ("words",))],
    ids=["one text", "one size", "two sizes"],
)  # fmt: skip
def test_what_hardly_differs_has_no_exponent(runs: list[Trained], variables: tuple[str, ...]) -> None:
    assert laws.fit(runs).law.variables == variables


@pytest.mark.parametrize(
    ("runs", "message"),
    [([], "at least three numbers of nonterminals"),
     (grid(sizes=[256, 1024], texts=[1e6, 2e6]), "at least three numbers of nonterminals"),
     (grid(sizes=SIZES, texts=[1e6]), "3 runs are too few for a law of nonterminals: it needs 4"),
     ([run_of(256, 1e6), run_of(1024, 4e6), run_of(4096, 1.6e7)], "it needs 6")],
    ids=["none", "two of each", "three", "a diagonal"],
)  # fmt: skip
def test_too_few_runs_are_refused(runs: list[Trained], message: str) -> None:
    with pytest.raises(UserError, match=message):
        laws.fit(runs)


def test_the_law_of_compute_is_that_of_runs_no_cheaper_one_beats() -> None:
    fitted = laws.fit(grid())
    assert fitted.compute is not None
    costs, losses = zip(*((run.seconds, run.loss) for run in fitted.frontier), strict=True)
    assert list(costs) == sorted(costs)
    assert list(losses) == sorted(losses, reverse=True)
    assert all(abs(fitted.compute.of(run) / run.loss - 1) < 0.05 for run in fitted.frontier)
    beaten = [run for run in fitted.runs if run not in fitted.frontier]
    assert beaten
    assert all(any(one.seconds < run.seconds and one.loss <= run.loss for one in fitted.runs) for run in beaten)


def test_a_short_schedule_may_be_what_no_cheaper_run_beats(tmp_path: Path) -> None:
    short = [run_of(run.nonterminals, run.words, loss=run.loss + 0.03, epochs=2.0) for run in grid()]
    runs = [*grid(), *short]
    fitted = laws.fit(runs)
    assert fitted.runs == laws.fit(grid()).runs
    assert any(run in short for run in fitted.frontier)
    for run in runs:
        beaten = any(one.seconds <= run.seconds and one.loss < run.loss for one in runs)
        assert (run in fitted.frontier) is not beaten, run
    assert {run["name"] for run in laws.report(fitted)["frontier"]} == {run.name for run in fitted.frontier}
    drawn = xml.fromstring(draw_laws(fitted)).findall(".//{http://www.w3.org/2000/svg}circle")
    assert len(drawn) == 3 * 9 + len([run for run in fitted.frontier if run in short])


def test_a_run_that_the_others_do_not_know_is_named() -> None:
    runs = grid()
    assert "is something wrong" not in laws.table(laws.fit(runs))
    runs[4] = runs[4]._replace(loss=9.9)
    assert "off at 1024-4e+06: is something wrong with this run?" in laws.table(laws.fit(runs))


class TestAdvice:
    def test_it_takes_the_largest_that_fits(self) -> None:
        fitted = laws.fit(grid())
        rich, poor = laws.advise(fitted, 1.6e7, 1e9), laws.advise(fitted, 1.6e7, run_of(1024, 1.6e7).seconds * 1.01)
        assert rich is not None
        assert poor is not None
        assert (rich.nonterminals, rich.words) == (4096, 1.6e7)  # the largest run, and no more
        assert "; there is time for more nonterminals" in laws.advice_line(fitted, rich, 1.6e7, 1e9)
        assert (poor.nonterminals, poor.words) == (1024, 1.6e7)
        assert poor.seconds == pytest.approx(run_of(1024, 1.6e7).seconds, rel=1e-6)
        assert poor.loss == pytest.approx(TRUE.at(1024, 1.6e7), rel=1e-4)
        assert laws.advice_line(fitted, poor, 1.6e7, 3600.0).endswith(f"perplexity {math.exp(poor.loss):.1f}")
        assert "take N 1024, about 4 epochs" in laws.advice_line(fitted, poor, 1.6e7, 3600.0)

    def test_a_part_of_the_text_may_be_better_than_a_tiny_grammar(self) -> None:
        fitted = laws.fit(grid())
        advice = laws.advise(fitted, 1.6e7, run_of(256, 4e6).seconds * 1.01)
        assert advice is not None
        assert (advice.nonterminals, advice.words) == (256, 4e6)
        assert "on 4,000,000 of the words" in laws.advice_line(fitted, advice, 1.6e7, 3600.0)

    def test_times_are_those_measured(self) -> None:
        """A step is as long with few nonterminals as with somewhat more, and four times as long with twice many."""
        step = {256: 1.5e-6, 1024: 2e-6, 4096: 1.6e-5}  # seconds a word
        runs = [run._replace(seconds=step[run.nonterminals] * run.words * run.epochs) for run in grid()]
        fitted = laws.fit(runs)
        for size, seconds in step.items():
            assert laws.seconds_per_word(runs, size) == pytest.approx(seconds)
        cost = step[4096] * 1.6e7 * 4.0
        enough, little = (laws.advise(fitted, 1.6e7, cost * share) for share in (1.001, 0.999))
        assert enough is not None
        assert little is not None
        assert (enough.nonterminals, enough.words, enough.seconds) == (4096, 1.6e7, pytest.approx(cost))
        assert little.nonterminals < 4096 or little.words < 1.6e7
        assert step[1024] < laws.seconds_per_word(runs, 2048) < step[4096]

    def test_a_text_unlike_those_of_the_runs_is_a_guess(self) -> None:
        fitted = laws.fit(grid())
        for words in (1e4, 1e12):
            advice = laws.advise(fitted, words, 1e12)
            assert advice is not None
            assert advice.epochs == pytest.approx(4.0)
            assert "a guess, since these runs have" in laws.advice_line(fitted, advice, words, 1e12)
        some = laws.advise(fitted, 1e9, run_of(256, 1e6).seconds * 1.1)  # of a text far too long for that time
        assert some is not None
        assert (some.nonterminals, some.words) == (256, 1e6)

    def test_no_time_is_no_advice(self) -> None:
        fitted = laws.fit(grid())
        assert laws.advise(fitted, 1.6e7, 1e-3) is None
        assert "not even N 256 is trained in that time on 1,000,000 words" in laws.advice_line(
            fitted, None, 1.6e7, 1e-3
        )


# ---- the command -----------------------------------------------------------------------------------------------------


def write_run(folder: Path, run: Trained, finished: bool = True) -> None:
    folder.mkdir(parents=True)
    folder.joinpath("config.yaml").write_text(f"model: {{nonterminals: {run.nonterminals}}}\ntraining: {{epochs: 4}}\n")
    metrics = MetricsFile(folder / "metrics.jsonl", pytest.fail)
    for epoch in range(int(run.epochs)):
        passed = run.seconds / run.epochs
        line = {"epoch": epoch, "train/learning_rate": 1e-3, "train/ppl": 99.0, "train/seconds": passed}
        metrics.append(100 * (epoch + 1), {**line, "train/words_per_second": run.words / passed})
        metrics.append(100 * (epoch + 1), {"valid/ppl": math.exp(run.loss), "valid/impossible": 0})
    metrics.close()
    if finished:
        folder.joinpath("FINISHED").touch()


def test_an_epoch_that_was_cut_short_makes_no_text_smaller(tmp_path: Path) -> None:
    write_run(tmp_path / "cut", run_of(256, 1e6, epochs=3.0))
    line = {"epoch": 3, "train/learning_rate": 1e-3, "train/ppl": 99.0, "train/seconds": 10.0}
    metrics = MetricsFile(tmp_path / "cut" / "metrics.jsonl", pytest.fail)
    metrics.append(350, {**line, "train/words_per_second": 5e4})  # half of the fourth epoch
    metrics.close()
    config = tmp_path / "cut" / "config.yaml"
    config.write_text(config.read_text().replace("epochs: 4", "epochs: 4, max_steps: 350"))
    found = trained(tmp_path / "cut")
    assert (found.words, found.epochs) == pytest.approx((1e6, 3.5))


def test_what_passes_between_steps_adds_no_words(tmp_path: Path) -> None:
    write_run(tmp_path / "saving", run_of(256, 1e6, epochs=0.0))
    metrics = MetricsFile(tmp_path / "saving" / "metrics.jsonl", pytest.fail)
    for epoch in range(4):  # of 100 steps of 0.1 s, and 5 s for a checkpoint
        line = {"epoch": epoch, "train/learning_rate": 1e-3, "train/ppl": 99.0, "train/seconds": 15.0}
        times = {"time/data": 0.01, "time/compute": 0.08, "time/communication": 0.01}
        metrics.append(100 * (epoch + 1), {**line, **times, "train/words_per_second": 1e5})
    metrics.append(400, {"valid/ppl": 99.0, "valid/impossible": 0})
    metrics.close()
    found = trained(tmp_path / "saving")
    assert (found.words, found.epochs, found.seconds) == pytest.approx((1e6, 4.0, 60.0))


def test_words_that_are_written_need_no_speed(tmp_path: Path) -> None:
    """The first line after a resumption has the speed of the steps since then, but the words of all its steps."""
    write_run(tmp_path / "resumed", run_of(256, 1e6, epochs=0.0))
    metrics = MetricsFile(tmp_path / "resumed" / "metrics.jsonl", pytest.fail)
    for epoch in range(4):
        line = {"epoch": epoch, "train/learning_rate": 1e-3, "train/ppl": 99.0, "train/seconds": 10.0}
        speed = {} if epoch == 2 else {"train/words_per_second": 7e4 if epoch == 1 else 1e5}
        metrics.append(100 * (epoch + 1), {**line, **speed, "train/words": 1e6})
    metrics.append(400, {"valid/ppl": 99.0, "valid/impossible": 0})
    metrics.close()
    found = trained(tmp_path / "resumed")
    assert (found.words, found.epochs) == pytest.approx((1e6, 4.0))


def trained(folder: Path) -> Trained:
    (run,) = read_runs([folder], pytest.fail)
    found = laws.trained(run)
    assert isinstance(found, Trained), found
    return found


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "scaling"
    for run in grid():
        write_run(folder / run.name, run)
    write_run(folder / "running", run_of(512, 2e6), finished=False)
    return folder


def test_the_command_fits_the_folder_of_a_search(search: Path, tmp_path: Path) -> None:
    picture = tmp_path / "laws.svg"
    result = CliRunner().invoke(
        cli.app, ["fit", str(search), "--plot", str(picture), "--words", "1e7", "--hours", "1", "--json"]
    )
    assert result.exit_code == 0, result.output
    assert "running takes no part: it is not finished" in result.stderr
    found = json.loads(result.stdout)
    assert found["law"]["exponents"] == pytest.approx(TRUE.exponents, rel=1e-2)
    assert found["largest"] == "4096-1.6e+07"
    assert abs(found["largest_error"]) < 0.01
    assert [run["words"] for run in found["runs"][:3]] == pytest.approx(TEXTS)
    assert found["advice"]["nonterminals"] >= 256
    drawn = xml.parse(picture).getroot()
    assert len(drawn.findall(".//{http://www.w3.org/2000/svg}circle")) == 3 * 9  # each run in each of three panels


def test_runs_that_trained_at_the_same_time_are_named(search: Path) -> None:
    alone, first, second = (Run(name, seconds=100.0) for name in ("alone", "first", "second"))
    alone.periods = [(0.0, 50.0), (500.0, 550.0)]  # stopped, and resumed when the others had ended
    first.periods = [(50.0, 100.0), (100.0, 150.0)]
    second.periods = [(90.0, 190.0)]
    assert (
        laws.common_seconds(first.periods, second.periods) == laws.common_seconds(second.periods, first.periods) == 60
    )
    assert laws.trained_beside_others([alone, first, second]) == ["first", "second"]
    assert laws.trained_beside_others([alone, first]) == []
    said = CliRunner().invoke(cli.app, ["fit", str(search)]).stderr  # all were written at once
    assert "and others trained while another run did: unless each had a machine of its own" in said


def test_the_table_is_for_people(search: Path) -> None:
    result = CliRunner().invoke(cli.app, ["fit", str(search / "256-1e+06"), *map(str, sorted(search.glob("*e+0[67]")))])
    assert result.exit_code == 0, result.output
    assert "L = 3.2" in result.stdout
    assert "the largest run, 4096-1.6e+07" in result.stdout


@pytest.mark.parametrize(
    "arguments", [["--words", "1e6"], ["--words", "0", "--hours", "1"], ["--plot", "x.png"]], ids=str
)
def test_wrong_options_are_refused_in_one_line(search: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(cli.app, ["fit", str(search), *arguments])
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_losses_of_different_vocabularies_are_no_law(tmp_path: Path) -> None:
    for number, run in enumerate(grid()):
        write_run(tmp_path / run.name, run)
        (tmp_path / run.name / "vocab").mkdir()
        description = {"kind": "words", "types": 100, "sha256": str(number % 2)}
        (tmp_path / run.name / "vocab" / "vocabulary.json").write_text(json.dumps(description))
    result = CliRunner().invoke(cli.app, ["fit", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "these runs have different vocabularies (100 types)" in result.stderr


def test_losses_per_word_and_per_piece_have_no_law_in_common(search: Path, tmp_path: Path) -> None:
    for name, kind in (("a", "words"), ("b", "sentencepiece")):
        write_run(tmp_path / name, run_of(256, 1e6))
        (tmp_path / name / "vocab").mkdir()
        (tmp_path / name / "vocab" / "vocabulary.json").write_text(json.dumps({"kind": kind}))
    with pytest.raises(UserError, match="per word and per piece"):
        cli.COMMANDS["fit"]([tmp_path])
