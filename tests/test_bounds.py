"""Bounds of compound models: standard errors, labels; training whose memory is planned in chunks of sentences."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from lm_pcfg.cli import app
from lm_pcfg.corpus.sentences import encode_sentences
from lm_pcfg.errors import UserError
from lm_pcfg.grammar import compound, families
from lm_pcfg.grammar.computation import EXACT, backward_through
from lm_pcfg.grammar.dropout import Dropout, Latent
from lm_pcfg.inference.bounds import Bounds
from lm_pcfg.inference.trained import load_trained
from lm_pcfg.settings_file import load_settings
from lm_pcfg.training import loop
from small_runs import write_untrained_run
from texts import write_config

SMALL = {"nonterminals": 3, "preterminals": 4, "dimension": 6, "latent": 3, "encoder": 5, "init": "normal(1, 1)"}
both = pytest.mark.parametrize("family", ["sc_pcfg", "c_pcfg"])


# ---- standard errors ------------------------------------------------------------------------------------------------


def of_lines(log_w: np.ndarray, lines: list[int], at_a_time: int) -> Bounds:
    bounds = Bounds(samples=len(log_w))
    for first in range(0, len(lines), at_a_time):
        some = lines[first : first + at_a_time]
        bounds.add(log_w[:, some], [np.array([line, 7], dtype=np.int32) for line in some])
    return bounds


@pytest.mark.parametrize("at_a_time", [1, 3, 100])
def test_errors_of_equal_lines_add_up(at_a_time):
    """Three copies of a text, whose z are the same, have three times its error, not the root of three."""
    log_w = np.random.default_rng(0).normal(size=(5, 4))
    once, thrice = of_lines(log_w, [0, 1, 2, 3], 100), of_lines(log_w, [0, 1, 2, 3] * 3, at_a_time)
    assert thrice.elbo == once.elbo * 3
    assert thrice.elbo_variance == pytest.approx(9 * once.elbo_variance)
    assert thrice.weighted_variance == pytest.approx(9 * once.weighted_variance)


@pytest.mark.parametrize("lines", [["the cat sees a dog"] * 4, None], ids=["one line", "different lines"])
def test_stated_errors_are_those_of_many_seeds(tmp_path, lines):
    """Of weights that are not far apart: an error of their mean that is larger than it cannot be seen in 10 of them."""
    run = write_untrained_run(tmp_path, "sc_pcfg", {"family": "sc_pcfg", **SMALL, "init": "normal(0.4, 0.4)"})
    one = load_trained(run)
    some = lines or (tmp_path / "train.txt").read_text().splitlines()[:4]
    sentences = encode_sentences(enumerate(some), one.vocabulary)
    reports = []
    for seed in range(16):
        bounds = Bounds(samples=10, seed=seed)
        bounds.score(one, sentences, precision="fp32", backend="auto", batch_cost=8000)
        reports.append(bounds.report(len(sentences.ids)))
    for name in ("elbo", "importance_weighted"):
        found = np.array([report[f"ppl_at_most_{name}"] for report in reports])
        stated = np.sqrt(np.mean([report[f"ppl_at_most_{name}_se"] ** 2 for report in reports]))
        assert 0.5 < found.std(ddof=1) / stated < 1.6, f"{name}: {found.std(ddof=1)}, stated {stated}"


def test_evaluate_says_that_its_perplexity_is_a_bound(tmp_path):
    run = write_untrained_run(tmp_path, "sc_pcfg", {"family": "sc_pcfg", **SMALL})
    gold = tmp_path / "gold.mrg"
    gold.write_text("(S (NP (D the) (N cat)) (VP (V sees) (N dog)))\n")
    command = ["evaluate", str(gold), "--checkpoint", str(run)]
    assert "perplexity at most " in CliRunner().invoke(app, command).stdout
    report = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert report["ppl_is"] == "an upper bound (evidence lower bound)"


# ---- memory ---------------------------------------------------------------------------------------------------------


def loss_and_gradients(family: str, estimate: str = "bound") -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    section = families.section_of(family).model_validate({"family": family, **SMALL})
    module = families.get(family).build(section, [f"w{number}" for number in range(9)], 1).double()
    model = module(EXACT._replace(dropout=Dropout(latent=Latent(3, 5, 0.5)))).estimating(estimate)
    leaves = model.detached()
    words, lengths = torch.arange(20) % 9, [4, 2, 9, 5]
    log_p, trusted = leaves.log_likelihood_unchecked(words, lengths, precision="fp64")
    assert trusted.all()
    (log_p @ torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)).backward()
    backward_through(model, leaves).backward()
    return log_p.detach(), {name: parameter.grad for name, parameter in module.named_parameters()}


@both
def test_training_in_chunks_of_sentences_is_that_of_all_at_once(family, monkeypatch):
    whole, of_whole = loss_and_gradients(family)
    monkeypatch.setattr(compound, "memory_of", lambda device: 1)
    chunks = []
    compute = compound.Compound._of_chunk
    monkeypatch.setattr(
        compound.Compound, "_of_chunk",
        lambda self, some, then: (chunks.append(some.lengths), compute(self, some, then))[1],
    )  # fmt: skip
    parts, of_parts = loss_and_gradients(family)
    assert sorted(chunks) == sorted([[4], [2], [9], [5]] * 2)  # once forward, once for the backward pass
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)
    for name, gradient in of_whole.items():
        torch.testing.assert_close(of_parts[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


# ---- what a family does not have ------------------------------------------------------------------------------------


def test_trees_of_a_hidden_markov_model_are_refused_before_training(tmp_path):
    gold = tmp_path / "gold.mrg"
    gold.write_text("(S (N cat) (V sleeps))\n")
    config = write_config(tmp_path, evaluation={"trees": str(gold)})
    changed = yaml.safe_load(config.read_text())
    changed["model"] = {"family": "nhmm", "states": 4, "dimension": 4, "eos": "explicit"}
    config.write_text(yaml.safe_dump(changed))
    settings = load_settings(config)
    with pytest.raises(UserError, match=r"evaluation\.trees needs a model with trees, and family nhmm has none"):
        loop.train(settings)
    assert not (tmp_path / "runs").exists()
