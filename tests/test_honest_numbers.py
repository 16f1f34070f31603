"""Figures say what they are: unknown words beside perplexities, bounds, units, a glossary, the time of a training."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from lm_pcfg import glossary
from lm_pcfg.bench import ngram
from lm_pcfg.cli import app
from lm_pcfg.corpus import opening
from lm_pcfg.corpus.lengths import Limits
from lm_pcfg.corpus.pieces import load_vocabulary
from lm_pcfg.corpus.sentences import encode_sentences
from lm_pcfg.corpus.unknown import Unknown, literals
from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyOptions
from lm_pcfg.distributed.engine import Engine
from lm_pcfg.settings import DataSection, EvaluationSection
from lm_pcfg.settings_file import load_settings
from lm_pcfg.training import dry_run as trial
from lm_pcfg.training.steps import Steps
from small_runs import train_small_runs
from texts import write_config

REPOSITORY = Path(__file__).resolve().parents[1]
KNOWN, STRANGE = "the cat sees a dog\n" * 4, "the zebra sees <unk>\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the runs `one` (words) and `pieces`, and texts without and with unknown words."""
    folder = tmp_path_factory.mktemp("numbers")
    train_small_runs(folder, ["one", "pieces"])
    (folder / "known").write_text(KNOWN)
    (folder / "strange").write_text(KNOWN + STRANGE)  # 1 of 24 words
    (folder / "stranger").write_text(KNOWN + STRANGE * 2)  # 2 of 28
    (folder / "gold.mrg").write_text("(S (NP (D the) (N zebra)) (VP (V sees) (N <unk>)))\n")
    return folder


def ran(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


def scored(folder: Path, file: str, run: str = "one") -> tuple[dict[str, Any], str]:
    result = ran("score", folder / file, "--checkpoint", folder / "runs" / run, "--json")
    return json.loads(result.stdout), result.stderr


# ---- unknown words --------------------------------------------------------------------------------------------------


def test_the_warning_begins_at_five_percent_without_what_the_text_itself_writes():
    assert Unknown(count=4, literal=90, of=100).warning("text") is None
    assert "text: 5.00 % of its words are unknown" in (Unknown(count=5, literal=0, of=100).warning("text") or "")
    assert Unknown(0, 0, 0).share == 0.0
    assert str(Unknown(1, 2, 4)) == "1 unknown word (25.00 %), 2 <unk> in the text itself"


def test_literals_are_those_that_the_vocabulary_takes_for_its_unknown_word():
    words = Vocabulary.build([["a"]], VocabularyOptions())
    assert literals("a <unk> <UNK> x<unk>", words) == 1
    assert literals("a <unk> <UNK>", Vocabulary.build([["a"]], VocabularyOptions(lowercase=True))) == 2
    text = encode_sentences(enumerate(["a b <unk>", "<unk> <unk> <unk> <unk> a", "a"]), words)
    assert text.unknown_words == Unknown(count=1, literal=5, of=9)


def test_score_has_the_share_beside_the_perplexity(folder):
    report, said = scored(folder, "strange")
    assert (report["unknown_words"], report["literal_unknown"]) == (1, 1)
    assert report["unknown_share"] == pytest.approx(1 / 24)
    assert "are unknown, and cost only" not in said
    _, said = scored(folder, "stranger")
    assert f"{folder / 'stranger'}: 7.14 % of its words are unknown" in said


@pytest.mark.parametrize("figure", ["ppl_per_word", "ppl_per_byte", "bits_per_character"])
def test_a_figure_per_word_or_byte_is_a_lower_bound_where_words_are_unknown(folder, figure):
    assert scored(folder, "strange")[0][f"{figure}_is_lower_bound"] is True
    known = scored(folder, "known")[0]
    assert (known[f"{figure}_is_lower_bound"], known["unknown_share"]) == (False, 0.0)
    shown = ran("score", folder / "strange", "--checkpoint", folder / "runs/one").stdout
    assert f"{figure:<18}  >= {scored(folder, 'strange')[0][figure]:,.4f}" in shown
    assert f"{'unknown_share':<18}  4.17 %" in shown
    assert "lower_bound" not in shown
    assert ">=" not in ran("score", folder / "known", "--checkpoint", folder / "runs/one").stdout


def test_a_bound_beside_the_best_possible_perplexity_is_called_one(folder):
    shown = ran("score", "embedded:valid", "--checkpoint", folder / "runs/one").stdout.splitlines()[-1]
    assert re.fullmatch(r"perplexity at least [\d.]+, best possible [\d.]+, ratio at least [\d.]+", shown)


def test_other_commands_have_it_too(folder):
    run = folder / "runs/one"
    evaluated = ran("evaluate", folder / "gold.mrg", "--checkpoint", run)
    assert "1 unknown words (25.00 %), 1 <unk> in the text itself" in evaluated.stdout
    assert "25.00 % of its words are unknown" in evaluated.stderr
    assert "7.14 % of its words are unknown" in ran("surprisal", folder / "stranger", "--checkpoint", run).stderr
    said: list[str] = []
    report = ngram.compare(str(folder / "known"), str(folder / "stranger"), 2, 5, said.append)
    assert report["unknown_share"] == pytest.approx(8 / 28)  # the last of the five words, "the", has no place
    assert any("28.57 % of its words are unknown" in message for message in said)


def test_a_training_says_it_at_once_and_at_every_evaluation(folder):
    changes = ["name=few", "data.vocabulary.size=4", "training.max_steps=9", "training.log_every=5"]
    said = ran("train", "--config", folder / "small.yaml", *changes).stderr
    assert "warning: valid: 84.29 % of its words are unknown" in said
    evaluations = [line for line in said.splitlines() if ": validation perplexity" in line]
    assert len(evaluations) == 2
    assert all(", 84.29 % unknown words" in line for line in evaluations)
    assert "(84.29 % unknown words) at step" in said.splitlines()[-1]
    first = said.index("step 1: epoch 1  loss ")  # before the first line of metrics, at step 5
    assert first < said.index(evaluations[0])
    described = json.loads(ran("info", "--checkpoint", folder / "runs/few", "--json").stdout)
    assert described["valid_unknown_share"] == pytest.approx(59 / 70)
    lines = [json.loads(line) for line in (folder / "runs/few/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 8, 8, 9, 9]  # the first look changed none of them
    settings = load_settings(folder / "small.yaml", changes)
    assert trial.count_evaluations(settings, total_steps=9, steps_per_epoch=8) == 2


# ---- units ----------------------------------------------------------------------------------------------------------


def test_report_has_words_and_pieces_in_different_columns(folder):
    result = ran("report", folder / "runs/one", folder / "runs/pieces")
    head, one, pieces = (line.split("  ") for line in result.stdout.splitlines())
    titles = [title.strip() for title in head if title.strip()]
    assert {"valid ppl per word", "valid ppl per piece", "train ppl per word", "words/s", "pieces/s"} <= set(titles)
    assert len([cell for cell in one if cell.strip()]) == len([cell for cell in pieces if cell.strip()])
    assert len([cell for cell in one if cell.strip()]) == len(titles) - 3  # none has figures of the other unit
    assert "per word and per piece cannot be compared" in result.stderr
    alone = ran("report", folder / "runs/pieces")
    assert "valid ppl per piece" in alone.stdout
    assert "per word" not in alone.stdout + alone.stderr
    rows = json.loads(ran("report", folder / "runs/one", folder / "runs/pieces", "--json").stdout)["runs"]
    assert [row["unit"] for row in rows] == ["words", "pieces"]
    assert [row["unknown_share"] for row in rows] == [0.0, 0.0]


def test_what_is_counted_in_pieces_is_called_so(folder):
    vocabulary = load_vocabulary(folder / "runs/pieces/vocab")
    text = encode_sentences([(1, "the cat sees")], vocabulary)
    assert f"1 sentences, {text.words} pieces, 0 unknown pieces (0.00 %)" in opening.describe("train", text)
    report, _ = scored(folder, "known", "pieces")
    assert (report["unit"], report["words"]) == ("pieces", 20)
    help_of_score = ran("score", "--help").stdout
    assert "more words (or pieces)" in " ".join(help_of_score.split())
    for section in (DataSection, EvaluationSection):
        assert "pieces" in (section.model_fields["max_length"].description or "")


@pytest.mark.parametrize(
    ("name", "setting"), [("train", "data.max_length"), ("valid", "evaluation.max_length")]
)  # fmt: skip
def test_a_text_of_which_more_than_a_third_is_too_long_is_told(folder, name, setting):
    lines = list(enumerate(["the cat", "a dog", "the cat sees", ""]))
    words = load_vocabulary(folder / "runs/one/vocab")
    third = encode_sentences(lines, words, Limits(2))
    assert opening.describe(name, third).endswith("(left out: 1 too long, 1 blank)")
    half = opening.describe(name, encode_sentences([*lines, (9, "a cat sees")], words, Limits(2))).splitlines()
    said = f"warning: {name}: 50.00 % of its sentences have more words than {setting}, and are left out"
    assert half[1:] == [said]
    pieces = opening.describe(name, encode_sentences(lines, load_vocabulary(folder / "runs/pieces/vocab"), Limits(1)))
    assert f"have more pieces than {setting}, which counts pieces, not words, and are left out" in pieces


# ---- glossary -------------------------------------------------------------------------------------------------------


def test_the_page_is_the_glossary():
    assert (REPOSITORY / "docs/glossary.md").read_text(encoding="utf-8") == glossary.markdown()
    assert ran("glossary", "--markdown").stdout == glossary.markdown()


def test_every_figure_is_in_the_glossary(folder):
    about = {"file", "checkpoint", "train", "test", "run", "method", "step", "time", "check"}  # no figures
    run = folder / "runs/one"
    names = set(scored(folder, "strange")[0])
    names |= set(json.loads(ran("evaluate", folder / "gold.mrg", "--checkpoint", run, "--json").stdout))
    names |= set(json.loads(ran("report", run, "--reach", "9", "--json").stdout)["runs"][0])
    names |= set(ngram.compare(str(folder / "known"), str(folder / "known"), 2, None, lambda message: None))
    for line in (run / "metrics.jsonl").read_text().splitlines():
        names |= set(json.loads(line))
    settings = set(type(load_settings(folder / "small.yaml").model).model_fields)
    names |= set(json.loads(ran("info", "--checkpoint", run, "--json").stdout)) - settings
    assert sorted(name for name in names - about if glossary.find(name) is None) == []


def test_commands_say_what_a_name_means_and_where_to_look():
    assert ran("glossary", "valid/kl").stdout.startswith("valid/kl: compound models: mean divergence")
    assert "spectral_radius: growth of derivations" in " ".join(ran("glossary").stdout.split())
    for command in ("score", "report", "evaluate"):
        assert "lm_pcfg glossary" in " ".join(ran(command, "--help").stdout.split())
    result = CliRunner().invoke(app, ["glossary", "radius"])
    assert str(result.exception) == "the glossary does not have radius: it has spectral_radius"


# ---- the time of a training -----------------------------------------------------------------------------------------


@pytest.fixture
def steps(tmp_path) -> Steps:
    changes = {"batch": {"sentences": 3}, "training": {"epochs": 3}}
    return Steps(settings := load_settings(write_config(tmp_path, **changes)), Engine(settings))


@pytest.mark.parametrize("scale", [1e-4, 1.0], ids=["all are timed", "time for one only"])
def test_a_dry_run_expects_the_mean_step_not_the_costliest(steps, monkeypatch, scale):
    def cost(batches) -> float:
        return scale * sum(batch.cost for batch in batches)

    monkeypatch.setattr(trial, "_seconds_of", lambda steps, batches: cost(batches))
    every = [cost([batch]) for batch in steps.stream.plan.batches(2, [(0, 20)])]
    mean, sentences = trial.time_steps(steps)
    assert mean == pytest.approx(np.mean(every), rel=0.05)
    assert max(every) > 1.5 * mean
    assert sentences == 3


def test_a_dry_run_measures_steps_with_most_symbols(tmp_path, monkeypatch):
    """State dropout that falls to 0 leaves out most at first."""
    shapes, draw = [], Steps._dropout

    def drawn(steps):
        shapes.append(draw(steps).shape)
        return draw(steps)

    monkeypatch.setattr(Steps, "_dropout", drawn)
    config = write_config(tmp_path, model={"state_dropout": 0.75, "state_dropout_until": 0.1})
    trial.dry_run(load_settings(config))
    assert set(shapes) == {()}


def test_a_dry_run_expects_the_whole_evaluation_from_a_part(steps, monkeypatch):
    now = [0.0]
    sizes = []

    def evaluate(skeleton, weights, corpora, *rest) -> None:
        sizes.append(len(corpora.valid))
        now[0] += 5.0 + 0.1 * float((corpora.valid.lengths**2).sum())

    monkeypatch.setattr(trial, "evaluate", evaluate)
    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(trial, "FEWEST_EVALUATED", 4)
    valid = steps.corpora.valid
    seconds = trial.time_evaluation(steps, of_sentence=100.0)
    assert sizes == [1, 4]
    assert seconds == pytest.approx(5.0 + 0.1 * float((valid.lengths**2).sum()))


def test_a_dry_run_tells_the_whole_time(tmp_path):
    config = write_config(tmp_path, training={"epochs": 5})
    report = trial.dry_run(load_settings(config))
    assert (report["total_steps"], report["evaluations"]) == (40, 5)
    assert 0.0 < report["step_seconds"] < 5.0
    assert 0.0 < report["evaluation_seconds"] < 5.0
    whole = 40 * report["step_seconds"] + 5 * report["evaluation_seconds"]
    assert report["expected_seconds"] == pytest.approx(whole)
    assert math.isfinite(report["nll_per_sentence"])
    assert not (tmp_path / "runs").exists()
    report |= {"total_steps": 1000, "step_seconds": 3.65, "evaluation_seconds": 2.0, "expected_seconds": 3660.0}
    said = "the whole training takes about 1:01:00: 1,000 steps x 3.65 s + 5 evaluations x 2 s"
    assert trial.expectation(report) == said
