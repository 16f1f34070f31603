"""A family of models is one file: a bag of words, written here, goes through every command without another change."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lm_pcfg
import processes
from lm_pcfg.commands.bench import bench_step
from lm_pcfg.commands.info import info
from lm_pcfg.commands.text.score import score
from lm_pcfg.commands.train import train
from lm_pcfg.distributed.engine import Engine
from lm_pcfg.errors import UserError
from lm_pcfg.grammar import families
from lm_pcfg.grammar.families.shared.family import Family
from lm_pcfg.grammar.generation import Derivation
from lm_pcfg.settings import ModelSection, setting
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.metrics_file import read_metrics
from lm_pcfg.training.steps import Steps

TEXT = "the cat sleeps\nthe dog sleeps\na dog sees the cat\nthe cat sees a dog\n" * 8


# ---- the whole family -----------------------------------------------------------------------------------------------


class BagSection(ModelSection):
    more: float = setting(0.9, "probability that another word follows", gt=0, lt=1)
    pull: float = setting(0.0, "weight of a penalty on large logits", ge=0)


class Bag(NamedTuple):
    """Words are drawn one by one from one distribution; after each the sentence ends with probability 1 - more."""

    log_p: Tensor  # [V]
    more: float
    penalty: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.log_p,)

    def detached(self) -> Bag:
        return Bag(self.log_p.detach().requires_grad_(), self.more)

    def log_likelihood(self, words, lengths, *, precision="fp32", backend="auto", statistics=None) -> Tensor:
        sums = torch.stack([part.sum() for part in self.log_p[words].split(lengths)])
        return sums + (torch.tensor(lengths) - 1) * math.log(self.more) + math.log1p(-self.more)

    def sample(self, number, *, seed, max_length, end_id=None):
        random, probabilities = np.random.default_rng(seed), self.log_p.detach().double().exp().numpy()
        for _ in range(number):
            length = int(random.geometric(1 - self.more))
            words = random.choice(len(probabilities), size=length, p=probabilities / probabilities.sum()).tolist()
            nodes = [(place, place + 1, 0) for place in range(length)]
            cut = length > max_length
            yield Derivation([] if cut else words, [] if cut else nodes, math.nan if cut else 0.0, cut)

    def describe(self, thorough: bool = False) -> dict[str, float]:
        return {"entropy/words": -(self.log_p.exp() * self.log_p).sum().item()}


class BagOfWords(nn.Module):
    def __init__(self, words: int, more: float, pull: float):
        super().__init__()
        self.logits, self.more, self.pull = nn.Parameter(torch.zeros(words)), more, pull
        self.centre = nn.Parameter(torch.zeros(()))  # of the penalty alone

    def forward(self, computation) -> Bag:
        sentences = sum(batch.n_sentences for batch in computation.batches)
        return Bag(
            self.logits.log_softmax(0), self.more, self.pull * sentences * (self.logits - self.centre).square().sum()
        )


class BagFamily(Family):
    name, section, wants_batches = "bag", BagSection, True

    def build(self, model: BagSection, words, seed, text=None) -> BagOfWords:
        return BagOfWords(len(words), model.more, model.pull)


# ---- through the commands -------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(families, "_registered", dict(families._registered))
    families.register(BagFamily())
    Path("text.txt").write_text(TEXT)
    path = tmp_path / "bag.yaml"
    path.write_text(
        "threads: 1\ndata: {train: text.txt, valid: text.txt}\nmodel: {family: bag, more: 0.8}\nbatch: {sentences: 4}\n"
        "optimizer: {learning_rate: 0.1}\ntraining: {max_steps: 20, log_every: 5}\ntracking: {mlflow: false}\n"
    )
    return path


def test_it_is_trained_checkpointed_resumed_and_scored(config, capsys):
    train(config=config)
    run = Path("runs/bag")
    assert checkpoint.latest(run).name == "step-00000020"
    first, *_, last = [line["train/loss"] for line in read_metrics(run / "metrics.jsonl") if "train/loss" in line]
    assert last < first
    train(config=config, overrides=["resume=auto", "training.max_steps=40"])
    assert checkpoint.verify(checkpoint.latest(run))["step"] == 40
    assert "entropy/words" in (run / "metrics.jsonl").read_text()
    capsys.readouterr()

    score(file="text.txt", checkpoint=[run], as_json=True)
    report = json.loads(capsys.readouterr().out)
    words = TEXT.split()
    entropy = -sum(math.log(words.count(word) / len(words)) for word in words)  # the best a bag can do
    ends = -(len(words) - 32) * math.log(0.8) - 32 * math.log(0.2)
    assert report["lines"] == 32
    assert entropy + ends <= report["nll"] < 1.05 * (entropy + ends)
    info(checkpoint=run, as_json=True)
    assert json.loads(capsys.readouterr().out)["family"] == "bag"
    with pytest.raises(UserError, match="family bag has no rules, so no symbols can be shown"):
        info(checkpoint=run, grammar=True)
    with pytest.raises(UserError, match="family bag has no such root"):
        score(file="text.txt", checkpoint=[run], root="nonterminals")


def test_its_step_is_timed(config, capsys):
    bench_step(config=config, steps=2)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_its_sentences_are_drawn_and_what_it_lacks_is_refused(config):
    train(config=config)
    model = lm_pcfg.load("runs/bag")
    samples = model.sample(200, seed=3, max_length=30)
    lengths = [len(sample.text.split()) for sample in samples]
    assert 3.5 < sum(lengths) / len(lengths) < 6.5  # 1 / (1 - 0.8)
    assert {word for sample in samples for word in sample.text.split()} <= {*TEXT.split(), "<unk>"}
    with pytest.raises(UserError, match="family bag has no next-word probabilities"):
        model.surprisal(["the cat"])


def test_a_run_in_two_parts_is_the_run_in_one(config):
    train(config=config, overrides=["name=whole"])
    train(config=config, overrides=["name=parts", "training.max_steps=8"])
    train(config=config, overrides=["name=parts", "resume=auto"])
    folders = [checkpoint.latest(Path("runs", name)) for name in ("whole", "parts")]
    whole, parts = (checkpoint.load(folder, with_optimizer=True) for folder in folders)
    assert all(torch.equal(tensor, parts.model[name]) for name, tensor in whole.model.items())
    assert all(torch.equal(tensor, parts.optimizer[name]) for name, tensor in whole.optimizer.items())


def test_a_loss_may_have_a_second_part_that_depends_on_the_batch(config):
    """The gradient of likelihood and penalty, each over the sentences of the step."""
    gradients = []
    for pull in (0.0, 0.25):
        settings = load_settings(config, [f"model.pull={pull}", "optimizer.clip=null"])
        steps = Steps(settings, Engine(settings))
        module = steps.learner.plain_model
        with torch.no_grad():
            module.logits.copy_(torch.arange(len(module.logits)) / 10)
        found = []
        steps.learner.optimizer.step = lambda module=module, found=found: found.append(module.logits.grad.clone())
        steps.step(steps.stream.next_step())
        gradients.append(found[0])
    torch.testing.assert_close(gradients[1] - gradients[0], 0.25 * 2 * torch.arange(len(module.logits)) / 10)


def test_a_section_that_is_registered_anew_is_used(config):
    class OtherSection(ModelSection):
        other: int = setting(3, "another setting")

    class OtherFamily(BagFamily):
        section = OtherSection

    assert load_settings(config, []).model.more == 0.8
    families.register(OtherFamily())
    with pytest.raises(UserError, match=r"unknown key 'model\.more'"):
        load_settings(config, [])


def test_state_outside_of_parameters_is_refused(config, monkeypatch):
    def with_buffer(self, model, words, seed, text=None):
        module = BagOfWords(len(words), model.more, model.pull)
        module.register_buffer("counts", torch.zeros(3))
        return module

    monkeypatch.setattr(BagFamily, "build", with_buffer)
    with pytest.raises(ValueError, match="buffers are not saved"):
        train(config=config)


@pytest.mark.long
def test_two_processes_are_one_with_twice_the_batches(config, tmp_path):
    """Also where a parameter is reached through the penalty alone, and one process runs out of sentences."""
    processes.run_ranks(2, [__file__, str(config), "name=two", "model.pull=0.1"])
    processes.run_ranks(1, [__file__, str(config), "name=one", "model.pull=0.1", "batch.accumulate=2"])
    one, two = (checkpoint.load(checkpoint.latest(Path("runs", name)), with_optimizer=False) for name in ("one", "two"))
    for name, tensor in one.model.items():
        torch.testing.assert_close(tensor, two.model[name])


def test_a_config_never_names_python_code(config):
    with pytest.raises(UserError) as caught:
        load_settings(config, ["model.family=os.system"])
    assert f"model.family = 'os.system' should be one of {', '.join(families.names())}" in str(caught.value)
    assert {"bag", "nhmm", "sn_pcfg"} <= set(families.names())


if __name__ == "__main__":  # on every rank: python test_families.py CONFIG [KEY=VALUE]...
    families.register(BagFamily())
    train(config=Path(sys.argv[1]), overrides=sys.argv[2:])
