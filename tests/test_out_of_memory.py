"""Too little memory is told in one line with the batch, its lengths and the settings that help."""

from __future__ import annotations

import pytest
import torch

from command_line import lm_pcfg
from flash_inside.devices import chart_memory
from lm_pcfg.corpus.batches import describe_lengths
from lm_pcfg.errors import OutOfMemory, UserError, is_out_of_memory, memory_told
from lm_pcfg.settings_file import load_settings
from lm_pcfg.training import loop, steps
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
