"""Hidden Markov models: the forward algorithm against enumeration, log space and FlashInside; their families.

Seeds are fixed, so that a test that passes always does.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import flash_inside
import processes
from command_line import lm_pcfg
from flash_inside import Rules, Statistics, forward
from flash_inside.forward import Chain
from flash_inside.precision import TOLERANCE
from lm_pcfg import load
from lm_pcfg.errors import UserError
from lm_pcfg.grammar import families, markov
from lm_pcfg.grammar.computation import EXACT, backward_through
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.generation import sample_sequences
from lm_pcfg.grammar.markov import HiddenMarkovModel
from lm_pcfg.settings_file import load_settings, settings_class
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.metrics_file import read_metrics
from test_sampling import chi_squared
from texts import write_config

END = 0  # `<eos>` of the tiny models here
NAMES = ("nhmm", "lhmm", "rank_hmm")
SMALL = {
    "nhmm": {"states": 5},
    "lhmm": {"states": 5, "features": 3},
    "rank_hmm": {"states": 6, "rank": 4},
}
LENGTHS = [3, 1, 5, 2, 5]


def random_chain(states, rank=None, *, spread=1.0, dtype=torch.float64, seed=0) -> Chain:
    generator = torch.Generator().manual_seed(seed)

    def rows(*shape):
        return (spread * torch.randn(*shape, generator=generator, dtype=torch.float64)).softmax(-1).to(dtype)

    start = rows(states).double()
    return Chain(start, (rows(states, states),) if rank is None else (rows(states, rank), rows(rank, states)))


def random_emissions(words, states, *, spread=1.0, dtype=torch.float64, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 100)
    return (-spread * torch.rand(words, states, generator=generator, dtype=torch.float64)).to(dtype)


def dense(chain: Chain) -> torch.Tensor:
    return chain.transition[0] if len(chain.transition) == 1 else chain.transition[0] @ chain.transition[1]


def enumerated(chain: Chain, words: torch.Tensor) -> float:
    """log p of a sentence, by listing all sequences of states."""
    start, transition, emission = chain.start.tolist(), dense(chain).tolist(), words.exp().tolist()
    total = 0.0
    for states in product(range(chain.states), repeat=len(words)):
        p = start[states[0]] * emission[0][states[0]]
        for place, (before, state) in enumerate(pairwise(states), start=1):
            p *= transition[before][state] * emission[place][state]
        total += p
    return math.log(total)


def tiny_model(name: str, words: int = 3, seed: int = 1, **changes) -> torch.nn.Module:
    """In fp64."""
    values = {"family": name, "eos": "explicit", "dimension": 3, "init": "normal(1, 1)", **SMALL[name], **changes}
    section = families.section_of(name).model_validate(values)
    return families.get(name).build(section, [f"w{number}" for number in range(words)], seed).double()


# ---- the forward algorithm ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "tf32", "bf16"])
def test_likelihood_is_that_of_all_sequences_of_states(rank, precision):
    chain, emissions = random_chain(3, rank), random_emissions(sum(LENGTHS), 3)
    found = forward.log_likelihood(chain, emissions, LENGTHS, precision)
    exact = [enumerated(chain, words) for words in emissions.split(LENGTHS)]
    assert found.tolist() == pytest.approx(exact, rel=1e-12 if precision == "fp64" else 1e-5)
    assert forward.log_likelihood(chain, emissions, LENGTHS, "fp64", "reference").tolist() == pytest.approx(exact)


@pytest.mark.parametrize("rank", [None, 2])
def test_gradcheck(rank):
    chain, emissions = random_chain(3, rank), random_emissions(sum(LENGTHS), 3)
    tensors = [tensor.requires_grad_() for tensor in (*chain.tensors, emissions)]

    def of(start, *rest):
        return forward.log_likelihood(Chain(start, rest[:-1]), rest[-1], LENGTHS, "fp64")

    assert torch.autograd.gradcheck(of, tensors)


def counts(function, chain: Chain, emissions: torch.Tensor):
    """Log-likelihoods and expected counts: p times the derivative by p."""
    tensors = [tensor.clone().requires_grad_() for tensor in (*chain.tensors, emissions)]
    log_z = function(Chain(tensors[0], tuple(tensors[1:-1])), tensors[-1])
    weights = torch.linspace(0.5, 2.0, len(log_z), dtype=log_z.dtype)
    *by_probability, by_log = torch.autograd.grad((weights * log_z).sum(), tensors)
    own = [p.double() * d.double() for p, d in zip(chain.tensors, by_probability, strict=True)]
    return log_z.detach().double(), [*own, by_log.double()]


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("spread", [1.0, 10.0, 60.0, 1000.0])
def test_scaled_space_is_log_space_for_any_parameters(rank, precision, spread):
    """With spread 1000 many transitions are 0, and emissions differ by e^3000.

    Transitions so small that the derivative by them, count / p, has no number in the format, are 0 here, too.
    """
    lengths = [7, 2, 1, 12, 7, 30]
    dtype = torch.float64 if precision == "fp64" else torch.float32
    chain = random_chain(6, rank, spread=spread, dtype=dtype)
    smallest = 1e-290 if precision == "fp64" else 1e-30
    start, *matrices = (torch.where(tensor < smallest, 0.0, tensor) for tensor in chain.tensors)
    chain = Chain(start, tuple(matrices))
    emissions = random_emissions(sum(lengths), 6, spread=3 * spread, dtype=dtype)
    statistics = Statistics()
    found = counts(lambda *given: forward.log_likelihood(*given, lengths, precision, statistics=statistics),
                   chain, emissions)  # fmt: skip
    exact = counts(lambda *given: forward.in_log_space(*given, lengths), chain, emissions)
    log_z, count = TOLERANCE[precision]
    size = exact[0].abs().clamp(min=10.0)
    possible = exact[0] > -math.inf
    assert (found[0] == exact[0])[~possible].all()
    assert ((found[0] - exact[0]).abs() / size)[possible].max() < log_z
    for own, true in zip(found[1], exact[1], strict=True):
        assert (own - true).norm() <= count * true.norm()
    assert statistics.sentences == len(lengths)
    if spread == 1.0:
        assert statistics.recomputed == statistics.recomputed_in_log_space == 0


def test_paths_that_are_lost_twice_are_found_again():
    """In fp32 two words of state b are lost, and later words make it the only one that matters."""
    transition = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    chain = Chain(torch.tensor([0.5, 0.5], dtype=torch.float64), (transition,))
    for unlikely in (80.0, 120.0, 300.0):
        ahead = torch.tensor([[0.0, -unlikely]]).expand(2, 2)
        behind = torch.tensor([[-unlikely, 0.0]]).expand(3, 2)
        emissions, statistics = torch.cat((ahead, behind)), Statistics()
        found = forward.log_likelihood(chain, emissions, [5], "fp32", statistics=statistics)
        assert found.item() == pytest.approx(-2 * unlikely + math.log(0.5), rel=1e-6)
        assert statistics.recomputed == 1
        trusted = forward.log_likelihood_unchecked(chain, emissions, [5], "fp32")[1]
        assert not trusted.item()


def test_what_leaves_fp64_is_computed_in_log_space():
    transition = torch.eye(2, dtype=torch.float64)
    chain = Chain(torch.tensor([0.5, 0.5], dtype=torch.float64), (transition,))
    emissions = torch.tensor([[0.0, -2000.0], [-4000.0, 0.0]], dtype=torch.float64).requires_grad_()
    statistics = Statistics()
    found = forward.log_likelihood(chain, emissions, [2], "fp64", statistics=statistics)
    assert found.item() == pytest.approx(-2000 + math.log(0.5))
    assert statistics.recomputed_in_log_space == 1
    (gradient,) = torch.autograd.grad(found.sum(), emissions)
    assert gradient.tolist() == [[0.0, 1.0], [0.0, 1.0]]


def test_sentences_without_a_path_and_with_nan():
    chain = Chain(torch.tensor([1.0, 0.0], dtype=torch.float64), (torch.eye(2),))
    emissions = torch.zeros(6, 2)
    emissions[1] = -math.inf  # no state has this word
    emissions[3, 0] = -math.inf  # state 0 never leaves, and does not have this word
    emissions[4, 0] = math.nan
    emissions.requires_grad_()
    found = forward.log_likelihood(chain, emissions, [2, 2, 1, 1])
    assert found[:2].tolist() == [-math.inf, -math.inf]
    assert found[2].isnan()
    assert found[3] == 0.0
    (gradient,) = torch.autograd.grad(found[torch.tensor([0, 1, 3])].sum(), emissions)
    assert gradient[:4].abs().max() == 0.0
    assert gradient[5].tolist() == [1.0, 0.0]


def test_a_sentence_does_not_depend_on_the_others():
    chain, emissions = random_chain(4, 3), random_emissions(sum(LENGTHS), 4)
    alone = [forward.log_likelihood(chain, words, [len(words)], "fp64") for words in emissions.split(LENGTHS)]
    assert torch.allclose(forward.log_likelihood(chain, emissions, LENGTHS, "fp64"), torch.cat(alone), rtol=1e-13)


def test_factors_are_their_product():
    chain, emissions = random_chain(5, 3), random_emissions(sum(LENGTHS), 5)
    of_product = forward.log_likelihood(Chain(chain.start, (dense(chain),)), emissions, LENGTHS, "fp64")
    assert torch.allclose(forward.log_likelihood(chain, emissions, LENGTHS, "fp64"), of_product, rtol=1e-13)


def test_posteriors_are_those_of_all_sequences():
    chain, emissions = random_chain(3), random_emissions(4, 3, spread=3.0)
    table = torch.zeros(4, 3, dtype=torch.float64)
    for states in product(range(3), repeat=4):
        p = chain.start[states[0]] * emissions[0, states[0]].exp()
        for place in range(1, 4):
            p *= dense(chain)[states[place - 1], states[place]] * emissions[place, states[place]].exp()
        table[torch.arange(4), torch.tensor(states)] += p
    assert torch.allclose(forward.posteriors(chain, emissions, [4], "fp64"), table / table[0].sum(), rtol=1e-12)


def test_inputs_that_cannot_be_meant_are_refused():
    chain, emissions = random_chain(3), random_emissions(4, 3)
    for bad, lengths, options, message in (
        (chain, [3], {}, r"emissions must be \[3, 3\]"),
        (chain, [4, 0], {}, "length below 1"),
        (Chain(chain.start[:2], chain.transition), [4], {}, r"start must be \[S\]"),
        (chain, [4], {"backend": "triton"}, "has no forward algorithm"),
        (chain, [4], {"precision": "int8"}, "unknown precision"),
    ):
        with pytest.raises(ValueError, match=message):
            forward.log_likelihood(bad, emissions, lengths, **options)
    assert forward.log_likelihood(chain, emissions[:0], []).shape == (0,)


def test_an_hmm_is_a_right_branching_grammar():
    """N_s -> P_s N_s' with T[s, s'] (1 - e[s']), N_s -> P_s <eos> with sum_s' T[s, s'] e[s']; P_s has the other words.

    e[s] is the probability of <eos> in state s. The root takes N_s with start[s] (1 - e[s]), or <eos> at once.
    """
    s, v, lengths = 4, 6, [4, 1, 2, 7]
    chain = random_chain(s)
    generator = torch.Generator().manual_seed(5)
    log_p = torch.randn(s, v, generator=generator, dtype=torch.float64).log_softmax(1)
    ending = log_p[:, END].exp()
    words = torch.cat([torch.tensor([*torch.randint(1, v, (length - 1,), generator=generator).tolist(), END])
                       for length in lengths])  # fmt: skip
    by_forward = forward.log_likelihood(chain, log_p[:, words].T, lengths, "fp64")

    n, p = s, s + 1  # the last preterminal is that of <eos>
    left, right = (torch.zeros(n, n + p, dtype=torch.float64) for _ in range(2))
    left[:, n : n + s] = torch.eye(s)
    right[:, :n] = dense(chain) * (1 - ending)
    right[:, -1] = dense(chain) @ ending
    root = torch.zeros(n + p, dtype=torch.float64)
    root[:n], root[-1] = chain.start * (1 - ending), chain.start @ ending
    assert torch.allclose(torch.stack((left.sum(1), right.sum(1))), torch.ones(2, n, dtype=torch.float64))
    emissions = torch.full((len(words), p), -math.inf, dtype=torch.float64)
    emissions[words == END, -1] = 0.0
    others = words != END
    emissions[others, :s] = (log_p - (1 - ending).log()[:, None])[:, words[others]].T
    by_inside = flash_inside.inside(Rules(root, left, right), emissions, lengths, "fp64")
    assert torch.allclose(by_inside, by_forward, rtol=1e-12)


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


def test_posterior_decoding():
    """Word 1 comes from state 0, word 2 from state 1, the end from either."""
    features = torch.tensor([[5.0, 40.0, 0.0], [5.0, 0.0, 40.0]])
    model = HiddenMarkovModel(
        torch.tensor([0.5, 0.5], dtype=torch.float64),
        (torch.tensor([[0.9, 0.1], [0.2, 0.8]]),),
        Emission.of(features, torch.eye(3)),
    )
    words = torch.tensor([1, 1, END, 2, END])
    assert model.decode(words, [3, 2]) == [[0, 0, 0], [1, 1]]
    for table in model.posteriors(words, [3, 2]):
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
        assert "HiddenMarkovModel has no trees" in refusal(*arguments, cwd=tmp_path)
    figures = json.loads(run("info", *here, "--json", cwd=tmp_path))
    assert figures["family"] == name
    assert figures["entropy/transition"] > 0


def test_implicit_ends_and_triton_are_refused_in_one_line(tmp_path):
    config = str(config_of("nhmm", tmp_path))
    message = refusal("train", "--config", config, "model.eos=implicit", cwd=tmp_path)
    assert "a hidden Markov model ends in a word, so use eos: explicit" in message
    assert "init: contexts belongs to family sn_pcfg" in refusal(
        "train", "--config", config, "model.init=contexts(1, 1)", cwd=tmp_path
    )
    with torch.no_grad(), pytest.raises(UserError, match="no Triton kernels; use inside"):
        tiny_model("nhmm")(EXACT).log_likelihood(torch.tensor([END]), [1], backend="triton")
    settings = load_settings(Path(config), [])
    assert settings_class("nhmm").model_validate(settings.model_dump()) == settings


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_are_one_with_twice_the_batches(name, tmp_path):
    config = str(config_of(name, tmp_path, batch={"sentences": 4}))
    train = ["-m", "lm_pcfg", "train", "--config", config]
    processes.run_ranks(2, [*train, "name=two"])
    processes.run_ranks(1, [*train, "name=one", "batch.accumulate=2"])
    one, two = (checkpoint.load(checkpoint.latest(tmp_path / "runs" / name), with_optimizer=False)
                for name in ("one", "two"))  # fmt: skip
    for key, tensor in one.model.items():
        torch.testing.assert_close(tensor, two.model[key])
