"""`score` with several checkpoints: the even mixture of their grammars."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from lm_pcfg.cli import app
from texts import write_config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds, a size of another vocabulary, and the text to score."""
    folder = tmp_path_factory.mktemp("mixture")
    config = write_config(folder, training={"max_steps": 3})
    paths = {}
    for name, changes in {"one": [], "two": ["seed=1"], "fewer": ["data.vocabulary.size=5"]}.items():
        arguments = ["train", "--config", str(config), f"name={name}", *changes]
        assert CliRunner().invoke(app, arguments).exit_code == 0
        paths[name] = str(folder / "runs" / name)
    return paths | {"text": str(folder / "valid.txt")}


def score(runs, names, *options):
    chosen = [part for name in names for part in ("--checkpoint", runs[name])]
    return CliRunner().invoke(app, ["score", runs["text"], *chosen, "--device", "cpu", *options])


def per_sentence(runs, *names):
    return np.array([float(line) for line in score(runs, names, "--per-sentence").stdout.split()])


def test_a_mixture_has_the_mean_of_the_probabilities(runs):
    one, two, both = per_sentence(runs, "one"), per_sentence(runs, "two"), per_sentence(runs, "one", "two")
    assert not np.allclose(one, two)
    np.testing.assert_allclose(both, np.logaddexp(one, two) - np.log(2), rtol=1e-7)
    report = json.loads(score(runs, ["one", "two"], "--json").stdout)
    assert report["nll"] == pytest.approx(-both.sum(), rel=1e-7)
    assert (report["lines"], report["skipped"]) == (12, 0)
    assert report["checkpoint"].count(" + ") == 1


def test_a_grammar_mixed_with_itself_is_itself(runs):
    np.testing.assert_allclose(per_sentence(runs, "one", "one"), per_sentence(runs, "one"), rtol=1e-9)


def test_different_vocabularies_do_not_mix(runs):
    result = score(runs, ["one", "fewer"])
    assert result.exit_code == 1
    assert "different vocabularies" in str(result.exception or result.output)
