"""Every recipe in configs/ can be loaded, and makes a step once it is made small."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lm_pcfg.bench.search import settings_of
from lm_pcfg.settings_file import load_settings
from lm_pcfg.training.dry_run import dry_run
from texts import write_text

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SEARCHES = sorted((CONFIGS / "search").glob("*.yaml"))
FILES = sorted(set(CONFIGS.rglob("*.yaml")) - set(SEARCHES))
NAMES = [str(path.relative_to(CONFIGS)) for path in FILES]
#: What makes a model small; a family takes those of its settings that are among them.
SMALL = {"nonterminals": 4, "preterminals": 6, "dimension": 8, "states": 6, "features": 4, "rank": 5,
         "latent": 3, "encoder": 4}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_recipe_makes_a_step(path, tmp_path):
    text = str(write_text(tmp_path / "text", 40))
    fields = type(load_settings(path).model).model_fields
    own = [f"model.{key}={size}" for key, size in SMALL.items() if key in fields]
    if load_settings(path).data.brackets is not None:
        (tmp_path / "trees").write_text("()\n" * 40)
        own += [f"data.brackets={tmp_path / 'trees'}"]
    settings = load_settings(path, [*own, "device=cpu", "threads=1", f"data.train={text}", f"data.valid={text}"])
    report = dry_run(settings)
    assert report["total_steps"] > 0
    assert math.isfinite(report["nll_per_sentence"])


@pytest.mark.parametrize("path", SEARCHES, ids=lambda path: path.stem)
def test_every_variant_of_a_search_is_a_recipe_of_its_own(path):
    variants = settings_of(path, [])
    for name, settings in variants.items():
        same = [
            other for other, of_other in variants.items() if of_other == settings.model_copy(update={"name": other})
        ]
        assert same == [name]


def test_a_recipe_for_two_cores():
    """Where a newcomer without a GPU is sent to: its steps are of a size that a CPU makes some hundreds of a minute."""
    settings = load_settings(CONFIGS / "cpu.yaml")
    assert (settings.threads, settings.inside.precision, settings.networks.precision) == (2, "fp32", "fp32")
    assert settings.model.nonterminals * settings.model.preterminals * settings.batch.sentences <= 256 * 512 * 16
    assert settings.data.max_length == 40
    assert "configs/cpu.yaml" in (CONFIGS.parent / "docs" / "first-steps.md").read_text(encoding="utf-8")


def test_the_papers_hyper_parameters():
    settings = load_settings(CONFIGS / "paper" / "ptb_lm_8192.yaml")
    model, optimizer = settings.model, settings.optimizer
    assert (model.nonterminals, model.preterminals, model.dimension) == (8192, 16384, 512)
    assert (model.parameterization, str(model.init), model.root) == ("paper", "xavier_normal", "nonterminals")
    assert (model.state_dropout, settings.ema.decay, settings.loss.normalise) == (0.0, None, "sentences")
    assert (optimizer.learning_rate, optimizer.betas, optimizer.clip) == (2e-3, [0.75, 0.999], 3.0)
    assert (settings.batch.sentences, settings.data.max_length) == (16, 40)
    assert (settings.training.epochs, settings.evaluation.patience) == (30, 5)


def test_the_papers_n_pcfg():
    settings = load_settings(CONFIGS / "paper" / "ptb_lm_n_pcfg_128.yaml")
    model, optimizer = settings.model, settings.optimizer
    assert (model.nonterminals, model.preterminals, model.dimension, model.root) == (128, 256, 256, "nonterminals")
    assert (optimizer.learning_rate, settings.batch.sentences, settings.training.epochs) == (1e-3, 4, 10)


@pytest.mark.parametrize(("file", "sizes"), [
    ("ptb_lm_c_pcfg_30", (30, 60, 256)), ("ptb_lm_sc_512", (512, 1024, 512)), ("ptb_lm_sc_2048", (2048, 4096, 512)),
])  # fmt: skip
def test_the_papers_compound_grammars(file, sizes):
    settings = load_settings(CONFIGS / "paper" / f"{file}.yaml")
    model = settings.model
    assert (model.nonterminals, model.preterminals, model.dimension) == sizes
    assert (model.latent, model.encoder, settings.data.curriculum.start) == (64, 512, 30)


@pytest.mark.parametrize(("file", "sizes"), [
    ("ptb_lm_rank_4096", (4096, 8192, 4096, 512)),
    ("ptb_lm_rank_8192", (8192, 16384, 4096, 512)),
    ("ptb_lm_tn_500", (250, 500, 500, 256)),
])  # fmt: skip
def test_the_papers_low_rank_grammars(file, sizes):
    model = load_settings(CONFIGS / "paper" / f"{file}.yaml").model
    assert (model.nonterminals, model.preterminals, model.rank, model.dimension) == sizes
