"""Families of hidden Markov models: against enumeration and their definitions, and through the commands.

Seeds are fixed, so that a test that passes always does.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from command_line import lm_pcfg
from lm_pcfg import load
from lm_pcfg.errors import UserError
from lm_pcfg.grammar import families, markov
from lm_pcfg.grammar.computation import EXACT, backward_through
from lm_pcfg.grammar.dropout import Dropout, KeptStates
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.markov import HiddenMarkovModel, sample_sequences
from lm_pcfg.settings_file import load_settings, settings_class
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.metrics_file import read_metrics
from test_forward import dense, enumerated
from test_sampling import chi_squared
from texts import write_config

END = 0  # `<eos>` of the tiny models here
NAMES = ("nhmm", "lhmm", "rank_hmm")
SMALL = {
    "nhmm": {"states": 5},
    "lhmm": {"states": 5, "features": 3},
    "rank_hmm": {"states": 6, "rank": 4},
}


def tiny_model(name: str, words: int = 3, seed: int = 1, **changes) -> torch.nn.Module:
    """In fp64."""
    values = {"family": name, "eos": "explicit", "dimension": 3, "init": "normal(1, 1)", **SMALL[name], **changes}
    section = families.section_of(name).model_validate(values)
    return families.get(name).build(section, [f"w{number}" for number in range(words)], seed).double()


# ---- the families ---------------------------------------------------------------------------------------------------


def all_strings(words: int, length: int):
    """Strings of so many symbols whose last, and no other, is the end."""
    return [(*string, END) for string in product(range(1, words), repeat=length - 1)]


def string_probabilities(model: HiddenMarkovModel, words: int, longest: int) -> dict:
    found = {}
    for length in range(1, longest + 1):
        strings = all_strings(words, length)
        log_p = model.log_likelihood(torch.tensor(strings).flatten(), [length] * len(strings), precision="fp64")
        found |= dict(zip(strings, log_p.exp().tolist(), strict=True))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_strings_of_a_family(name):
    """They have the probability of a listing, and with what goes on after six words they sum to 1."""
    with torch.no_grad():
        model = tiny_model(name)(EXACT)
    for matrix in (model.start[None], *model.transition):
        assert torch.allclose(matrix.sum(1), torch.ones(len(matrix), dtype=torch.float64))
    found = string_probabilities(model, 3, 6)
    for string in list(found)[:8]:
        words = model.emission.log_probabilities(torch.tensor(string))
        assert math.log(found[string]) == pytest.approx(enumerated(model.chain, words), rel=1e-10)
    goes_on = 1 - model.emission.log_probabilities(torch.tensor([END]))[0].exp()
    states = model.start * goes_on
    for _ in range(5):
        states = (states @ dense(model.chain)) * goes_on
    assert sum(found.values()) + states.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert states.sum() > 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck_of_a_family(name):
    """Through the parameters of the module, as a training step takes them."""
    module = tiny_model(name)
    words, lengths = torch.tensor([1, 2, END, END, 2, 2, 1, END]), [3, 1, 4]
    names, values = zip(*module.named_parameters(), strict=True)

    def of(*tensors):
        model = torch.func.functional_call(module, dict(zip(names, tensors, strict=True)), (EXACT,))
        return model.log_likelihood(words, lengths, precision="fp64")

    assert torch.autograd.gradcheck(of, values)
    model = module(EXACT)
    leaves = model.detached()
    leaves.log_likelihood(words, lengths, precision="fp64").sum().backward()
    backward_through(model, leaves).backward()
    direct = torch.autograd.grad(of(*values).sum(), values)
    for value, gradient in zip(values, direct, strict=True):
        assert torch.allclose(value.grad, gradient, rtol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_start_and_words_are_softmaxes_of_their_own_tables(name):
    module = tiny_model(name)
    with torch.no_grad():
        model = module(EXACT)
        first = (module.first_states @ module.start[0]).exp()
        words = (module.emitting @ module.words.T).exp()
        found = model.emission.log_probabilities(torch.arange(3)).exp()
    if name == "rank_hmm":  # the first value of the rank variable
        first = first @ (module.predecessors @ module.ranks).softmax(1)
    assert torch.allclose(model.start, first / first.sum())
    assert torch.allclose(found.T, words / words.sum(1, keepdim=True))


def test_nhmm_is_its_definition():
    module = tiny_model("nhmm")
    with torch.no_grad():
        products = (module.predecessors @ module.successors.T).exp()
        found = dense(module(EXACT).chain)
    assert torch.allclose(found, products / products.sum(1, keepdim=True))


def test_rank_hmm_is_the_dense_model_with_the_same_transition():
    """Over states: U, a word of the rank variable, V. Over the rank variable: an HMM with the matrix V U."""
    module = tiny_model("rank_hmm")
    with torch.no_grad():
        model = module(EXACT)
        to_ranks = (module.predecessors @ module.ranks).softmax(1)
        to_states = (module.successors @ module.ranks).softmax(0).T
        first = (module.first_states @ module.start[0]).softmax(0)
    assert torch.allclose(model.transition[0], to_states @ to_ranks)
    words = torch.tensor([2, 1, 1, END])
    emission = model.emission.log_probabilities(words).exp()  # [l, r]
    states = first
    for word in emission:  # of S states: no rank space
        states = states @ (to_ranks * word) @ to_states
    found = model.log_likelihood(words, [4], precision="fp64")
    assert found.item() == pytest.approx(states.sum().log().item(), rel=1e-12)


def test_lhmm_is_its_definition():
    module = tiny_model("lhmm")
    with torch.no_grad():
        phi, psi = ((table @ module.projection).exp() for table in (module.predecessors, module.successors))
        products = phi @ psi.T
        found = dense(module(EXACT).chain)
    assert torch.allclose(found, products / products.sum(1, keepdim=True))
    assert torch.allclose(found.sum(1), torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("name", NAMES)
def test_state_dropout_leaves_out_states(name):
    settings = {"state_dropout": 0.4} | ({"feature_dropout": 0.4} if name == "lhmm" else {})
    values = {"family": name, "eos": "explicit", "dimension": 3, **SMALL[name], **settings}
    section, family = families.section_of(name).model_validate(values), families.get(name)
    dropout, again, other = (family.dropout(section, seed=3, step=step, total_steps=9) for step in (4, 4, 5))
    assert all(map(torch.equal, dropout.tensors, again.tensors))
    assert not all(map(torch.equal, dropout.tensors, other.tensors))
    kept = len(dropout.states.states)
    assert kept == round(0.6 * section.states)
    model = family.build(section, ["<eos>", "a", "b"], 0)(EXACT._replace(dropout=dropout))
    assert len(model.start) == (4 if name == "rank_hmm" else kept)
    assert len(model.transition[0][0]) == {"nhmm": kept, "lhmm": 2, "rank_hmm": 4}[name]
    for matrix in model.transition:
        assert torch.allclose(matrix.sum(1), torch.ones(len(matrix)))
    assert torch.isfinite(model.log_likelihood(torch.tensor([1, 2, 0]), [3])).all()


@pytest.mark.parametrize("name", NAMES)
def test_state_dropout_is_the_model_of_the_kept_rows(name):
    """Tables are cut by hand. The rank variable of a rank HMM, which emits the words, stays whole."""
    kept = KeptStates(torch.tensor([1, 3, 4]), torch.tensor([0, 2]))
    whole, part = tiny_model(name), tiny_model(name, states=3, **({"features": 2} if name == "lhmm" else {}))
    tables = whole.state_dict()
    for table in ("first_states", "predecessors", "successors", *(() if name == "rank_hmm" else ("emitting",))):
        tables[table] = tables[table][kept.states]
    if name == "lhmm":
        tables["projection"] = tables["projection"][:, kept.features]
    part.load_state_dict(tables)
    words, lengths = torch.tensor([1, 2, END, END, 2, 2, 1, END]), [3, 1, 4]
    with torch.no_grad():
        expected = part(EXACT).log_likelihood(words, lengths, precision="fp64")
        model = whole(EXACT._replace(dropout=Dropout(states=kept)))
        torch.testing.assert_close(model.log_likelihood(words, lengths, precision="fp64"), expected)


def test_posterior_decoding():
    """Word 1 comes from state 0, word 2 from state 1, the end from either."""
    features = torch.tensor([[5.0, 40.0, 0.0], [5.0, 0.0, 40.0]])
    model = HiddenMarkovModel(
        torch.tensor([0.5, 0.5], dtype=torch.float64),
        (torch.tensor([[0.9, 0.1], [0.2, 0.8]]),),
        Emission.of(features, torch.eye(3)),
    )
    words = torch.tensor([1, 1, END, 2, END])
    tables = model.word_posteriors(words, [3, 2])
    assert [table.argmax(1).tolist() for table in tables] == [[0, 0, 0], [1, 1]]
    for table in tables:
        assert torch.allclose(table.sum(1), torch.ones(len(table)))


def test_scoring_in_blocks_changes_nothing(monkeypatch):
    with torch.no_grad():
        model = tiny_model("nhmm")(EXACT)
        words, lengths = torch.tensor([1, END, 2, 2, END, END, 1, 1, 1, END]), [2, 3, 1, 4]
        whole = model.log_likelihood(words, lengths, precision="fp64")
        monkeypatch.setattr(markov, "LARGEST_BLOCK", 5 * len(model.start))
        assert torch.allclose(model.log_likelihood(words, lengths, precision="fp64"), whole, rtol=1e-13)


@pytest.mark.parametrize("name", ["nhmm", "lhmm"])
def test_samples_have_the_probabilities_of_strings(name):
    with torch.no_grad():
        model = tiny_model(name, seed=4)(EXACT)
    longest, number = 6, 20_000
    samples = sample_sequences(model, number, seed=7, max_length=longest, end=END)
    exact = string_probabilities(model, 3, longest)
    drawn = Counter("cut" if sample.cut else tuple(sample.words) for sample in samples)
    assert drawn.keys() <= {*exact, "cut"}
    assert chi_squared(drawn, exact | {"cut": 1 - sum(exact.values())}) > 0.001
    again = sample_sequences(model, number, seed=7, max_length=longest, end=END)
    assert [sample.words for sample in again] == [sample.words for sample in samples]
    for sample in samples[:50]:
        if sample.cut:
            assert (sample.words, sample.nodes) == ([], [])
            assert math.isnan(sample.log_probability)
        else:
            assert len(sample.nodes) == len(sample.words)
            assert sample.log_probability <= math.log(exact[tuple(sample.words)]) + 1e-9


# ---- through the commands -------------------------------------------------------------------------------------------


def config_of(name: str, folder: Path, **changes) -> Path:
    """A small run; the settings of grammars are taken out of it."""
    path = write_config(folder, name, training={"epochs": 1, "max_steps": 6, "log_every": 1}, **changes)
    settings = yaml.safe_load(path.read_text())
    settings["model"] = {"family": name, "eos": "explicit", "dimension": 8, "state_dropout": 0.2, **SMALL[name]}
    path.write_text(yaml.safe_dump(settings))
    return path


def run(*arguments: str, cwd: Path) -> str:
    result = lm_pcfg(*arguments, cwd=cwd)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def refusal(*arguments: str, cwd: Path) -> str:
    result = lm_pcfg(*arguments, cwd=cwd)
    assert result.returncode == 1
    assert result.stderr.decode().count("\n") == 1
    return result.stderr.decode()


@pytest.mark.parametrize("name", NAMES)
def test_a_family_through_the_commands(name, tmp_path):
    config = str(config_of(name, tmp_path))
    run("train", "--config", config, "name=whole", cwd=tmp_path)
    run("train", "--config", config, "name=parts", "training.max_steps=2", cwd=tmp_path)
    run("train", "--config", config, "name=parts", "resume=auto", cwd=tmp_path)
    folders = [checkpoint.latest(tmp_path / "runs" / run_name) for run_name in ("whole", "parts")]
    whole, parts = (checkpoint.load(folder, with_optimizer=True) for folder in folders)
    assert whole.model.keys() == parts.model.keys()
    assert all(torch.equal(tensor, parts.model[key]) for key, tensor in whole.model.items())
    assert all(torch.equal(tensor, parts.optimizer[key]) for key, tensor in whole.optimizer.items())
    losses = [
        line["train/loss"] for line in read_metrics(tmp_path / "runs/whole/metrics.jsonl") if "train/loss" in line
    ]
    assert len(losses) == 6
    assert np.isfinite(losses).all()

    here = ("--checkpoint", "runs/whole")
    score = json.loads(run("score", "valid.txt", *here, "--json", cwd=tmp_path))
    assert score["lines"] == 12
    model = load(tmp_path / "runs" / "whole", device="cpu")
    lines = (tmp_path / "valid.txt").read_text().splitlines()
    assert -model.score(lines).sum() == pytest.approx(score["nll"], rel=1e-6)

    drawn = lm_pcfg("sample", *here, "-n", "40", "--seed", "3", "--max-length", "8", cwd=tmp_path)
    assert b"of 40 samples have more than 8 words" in drawn.stderr
    texts = drawn.stdout.decode().splitlines()
    assert 0 < len(texts) < 40
    assert all(0 < len(text.split()) <= 8 for text in texts)
    first = json.loads(run("sample", *here, "-n", "40", "--seed", "3", "--max-length", "8", "--json", cwd=tmp_path)
                       .splitlines()[0])  # fmt: skip
    assert first["text"] == texts[0] == " ".join(first["words"])
    assert [tag[0] for tag in first["tags"]] == ["S"] * len(first["words"])
    assert first["nodes"] == []

    for arguments in (("sample", *here, "--trees"), ("sample", *here, "--posterior", "valid.txt"),
                      ("parse", "valid.txt", *here)):  # fmt: skip
        assert "models of this family have no trees" in refusal(*arguments, cwd=tmp_path)
    figures = json.loads(run("info", *here, "--json", cwd=tmp_path))
    assert figures["family"] == name
    assert figures["entropy/transition"] > 0


def test_implicit_ends_and_triton_are_refused_in_one_line(tmp_path):
    config = str(config_of("nhmm", tmp_path))
    message = refusal("train", "--config", config, "model.eos=implicit", cwd=tmp_path)
    assert "a hidden Markov model ends in a word, so use eos: explicit" in message
    assert "init: contexts is of sn_pcfg, rank_pcfg and tn_pcfg" in refusal(
        "train", "--config", config, "model.init=contexts(1, 1)", cwd=tmp_path
    )
    with torch.no_grad(), pytest.raises(UserError, match="choose their kernels; use inside"):
        tiny_model("nhmm")(EXACT).log_likelihood(torch.tensor([END]), [1], backend="triton")
    settings = load_settings(Path(config), [])
    assert settings_class("nhmm").model_validate(settings.model_dump()) == settings
