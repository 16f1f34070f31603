"""Too little memory is told in one line with the batch, its lengths and the settings that help."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from command_line import lm_pcfg
from flash_inside.devices import chart_memory
from lm_pcfg.corpus.batches import describe_lengths, make_batch
from lm_pcfg.corpus.sentences import Sentences
from lm_pcfg.errors import OutOfMemory, UserError, is_out_of_memory, memory_told
from lm_pcfg.grammar import families
from lm_pcfg.grammar.likelihood import sentence_log_probabilities
from lm_pcfg.settings import Settings
from lm_pcfg.settings_file import load_settings
from lm_pcfg.training import loop, steps
from lm_pcfg.training.position import Position
from texts import WORDS, write_config

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."
CPU = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(CUDA), RuntimeError(CPU), MemoryError()])
def test_errors_of_memory_are_recognised(error):
    assert is_out_of_memory(error)
    line = r"^not enough memory for a test; try less"
    with pytest.raises(OutOfMemory, match=line) as told, memory_told(lambda: "a test", lambda: "less"):
        raise error
    assert "\n" not in str(told.value)
    assert is_out_of_memory(told.value)  # for `bench step`, which goes on with the next size


def test_other_errors_stay_as_they_are():
    bug = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError) as raised, memory_told(lambda: "", lambda: ""):
        raise bug
    assert raised.value is bug


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([40], "a batch of one sentence of 40 words"),
        ([7, 3, 5], "a batch of 3 sentences of 3 to 7 words, 15 in all"),
        ([1000, 1000], "a batch of 2 sentences of 1,000 words, 2,000 in all"),
        ([], "a batch without sentences"),
    ],
)
def test_lengths_in_words(lengths, said):
    assert describe_lengths(lengths) == said
    assert describe_lengths(lengths, "pieces") == said.replace("words", "pieces")


def some_sentences(unit: str, *lengths: int) -> Sentences:
    offsets = np.cumsum([0, *lengths])
    return Sentences(np.zeros(offsets[-1], np.int32), offsets, np.arange(1, len(offsets)), False, unit=unit)


def test_lengths_are_of_what_the_vocabulary_has():
    def no_memory(*_, **__):
        raise torch.OutOfMemoryError(CUDA)

    sentences = some_sentences("pieces", 3, 5)
    with pytest.raises(OutOfMemory, match="2 sentences of 3 to 5 pieces, 8 in all"):
        sentence_log_probabilities(SimpleNamespace(log_likelihood=no_memory), sentences, batch_cost=100)
    training = SimpleNamespace(
        corpora=SimpleNamespace(train=sentences),
        position=Position(),
        engine=SimpleNamespace(device=torch.device("cpu")),
    )
    said = steps.Steps._describe(training, [make_batch(sentences, np.array([1]))])
    assert said == "step 1 on cpu, whose largest batch is a batch of one sentence of 5 pieces"


@pytest.mark.parametrize(
    ("family", "sizes", "precision", "offered"),
    [
        ("sn_pcfg", {"nonterminals": 512, "preterminals": 512}, "fp32", True),
        ("sn_pcfg", {"nonterminals": 512, "preterminals": 512}, "bf16", False),
        ("sn_pcfg", {"nonterminals": 256, "preterminals": 512}, "tf32", False),  # its chart stays fp32
        ("sn_pcfg", {"nonterminals": 512, "preterminals": 512, "state_dropout": 0.5}, "fp32", False),
        ("rank_pcfg", {"nonterminals": 16, "preterminals": 16, "rank": 512}, "fp32", True),
        ("n_pcfg", {"nonterminals": 512, "preterminals": 512}, "fp32", False),  # dense
        ("n_pcfg", {"nonterminals": 512, "preterminals": 512}, "fp64", True),  # which is fp32 then
        ("c_pcfg", {"nonterminals": 512, "preterminals": 512}, "fp32", False),
        ("nhmm", {"states": 512, "eos": "explicit"}, "fp32", True),
        ("rank_hmm", {"states": 512, "rank": 16, "eos": "explicit"}, "fp32", False),
    ],
)
def test_bf16_is_offered_where_a_chart_is_smaller_with_it(family, sizes, precision, offered):
    settings = Settings.model_validate({
        "data": {"train": "x"}, "inside": {"precision": precision},
        "model": families.section_of(family).model_validate({"family": family, **sizes}),
    })  # fmt: skip
    training = SimpleNamespace(
        settings=settings, family=families.get(family), engine=SimpleNamespace(device=torch.device("cuda"))
    )
    said = steps.Steps._less_memory(training, [make_batch(some_sentences("words", 3), np.array([0]))])
    assert ("inside.precision=bf16" in said) == offered


def step_fails(monkeypatch):
    def no_memory(*_, **__):
        raise torch.OutOfMemoryError(CUDA)

    monkeypatch.setattr(steps, "accumulate_gradients", no_memory)


@pytest.mark.parametrize(
    ("change", "way_out"),
    [
        ({}, "batch.sentences=4 batch.accumulate=2, data.max_length="),
        ({"batch": {"by": "cost", "cost": 100, "accumulate": 3}}, "batch.cost=50 batch.accumulate=6, data.max_length="),
    ],
)
def test_a_step_without_memory_names_its_batch_and_the_settings(tmp_path, monkeypatch, change, way_out):
    step_fails(monkeypatch)
    result = lm_pcfg("train", "--config", str(write_config(tmp_path, **change)), cwd=tmp_path)
    last = result.stderr.decode().splitlines()[-1]
    assert result.returncode == 1
    assert last.startswith("lm_pcfg: error: not enough memory for step 1 on cpu, whose largest batch is a batch of ")
    assert way_out in last
    assert "model.nonterminals" in last
    assert "Tried to allocate 2.00 GiB" in last
    assert "Traceback" not in result.stderr.decode()


def test_an_evaluation_without_memory_names_its_batch_cost(tmp_path, monkeypatch):
    def no_memory(*_, **__):
        raise RuntimeError(CPU)

    monkeypatch.setattr("lm_pcfg.grammar.grammar.Grammar.log_likelihood", no_memory)
    settings = load_settings(write_config(tmp_path), ["training.max_steps=1", "evaluation.batch_cost=600"])
    with pytest.raises(OutOfMemory, match=r"for a batch of \d+ sentences of .* words.* evaluation.batch_cost=300"):
        loop.train(settings)


@pytest.mark.parametrize(("batch", "name"), [({"sentences": 16}, "sentences"), ({"by": "cost", "cost": 9000}, "cost")])
def test_a_batch_that_cannot_fit_is_refused_with_a_size_that_fits(tmp_path, monkeypatch, batch, name):
    config = write_config(tmp_path, batch=batch)
    text = tmp_path / "train.txt"
    text.write_text((" ".join(WORDS * 2)[:200].rsplit(" ", 1)[0] + "\n") * 20)
    monkeypatch.setattr(steps, "memory_of", lambda: chart_memory([32] * 4, 4, "fp32"))
    with pytest.raises(UserError, match=r"a batch of the \d+ longest sentences, up to \d+ words, takes") as told:
        loop.train(load_settings(config, ["training.max_steps=1"]))
    way_out = next(word for word in str(told.value).split() if word.startswith(f"batch.{name}="))
    loop.train(load_settings(config, ["training.max_steps=1", way_out, "name=fitting"]))


@pytest.mark.parametrize("family", ["sc_pcfg", "c_pcfg"])
def test_rules_of_a_sentence_are_counted_once(tmp_path, monkeypatch, family):
    """A step of a compound model takes weights, charts and each sentence's own rules, twice: with gradients."""
    n, p, dimension, encoder, words, lengths = 3, 4, 6, 5, 8 + 1, [8, 7, 7]  # and <unk>
    weights, rules = (n + p + words) * dimension + words * encoder, 2 * n * (n + p)
    if family == "c_pcfg":
        weights, rules = ((n + p) ** 2 + words) * dimension + words * encoder, n * (n + p) ** 2
    needed = 4 * (2 * weights + 2 * rules * len(lengths)) + chart_memory(lengths, n, "fp32")
    config = write_config(tmp_path, batch={"sentences": len(lengths)})
    settings = load_settings(config, ["training.max_steps=1"])
    sizes = {"nonterminals": n, "preterminals": p, "dimension": dimension, "encoder": encoder, "latent": 2}
    settings = settings.model_copy(update={"model": families.get(family).section(family=family, **sizes)})
    (tmp_path / "train.txt").write_text("".join(f"{' '.join(WORDS[-length:])}\n" for length in (7, 8, 7, 7, 1)))
    monkeypatch.setattr(steps, "memory_of", lambda: needed - 1)
    with pytest.raises(UserError, match="a batch of the 3 longest sentences, up to 8 words, takes"):
        loop.train(settings)
    monkeypatch.setattr(steps, "memory_of", lambda: needed)
    loop.train(settings.model_copy(update={"name": "fitting"}))


def test_a_model_without_room_for_the_rules_of_one_sentence_is_refused(monkeypatch):
    family = families.get("c_pcfg")
    model = family.section(family="c_pcfg", nonterminals=3, preterminals=4, dimension=6, encoder=5, latent=2)
    needed = 4 * ((7**2 + 10) * 6 + 10 * 5 + 3 * 7**2)
    assert family.model_memory(model, 10, "cpu") == needed
    monkeypatch.setattr("lm_pcfg.grammar.families.shared.family.memory_of", lambda: needed - 1)
    with pytest.raises(OutOfMemory, match="not enough memory for such a model"):
        family.check_memory(model, 10, "cpu")
    assert family.check_memory(model, 10, "cuda") == needed - 4 * 3 * 7**2  # a GPU tells by itself when it is full


@pytest.mark.parametrize(("family", "power"), [("sn_pcfg", 2), ("n_pcfg", 3), ("c_pcfg", 3), ("sc_pcfg", 2)])
def test_state_dropout_leaves_fewer_rules_unless_it_falls_to_0(family, power):
    family_of = families.get(family)
    weights = family_of.model_memory(family_of.section(family=family, nonterminals=64), 10, "cuda")

    def rules(**dropout):
        return family_of.model_memory(family_of.section(family=family, nonterminals=64, **dropout), 10, "cpu") - weights

    assert rules(state_dropout=0.5) == rules() / 2**power
    assert rules(state_dropout=0.5, state_dropout_until=0.8) == rules() > 0
