"""The family whose rules are over pairs of children: its networks, its samples, and through the commands."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch.func import functional_call

from command_line import ran, refusal
from grammars import random_rules
from lm_pcfg.errors import UserError
from lm_pcfg.grammar import families
from lm_pcfg.grammar.computation import EXACT, backward_through
from lm_pcfg.grammar.dense import DenseGrammar
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.generation import sample_derivations
from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.metrics_file import read_metrics
from test_dense import paired
from test_sampling import chi_squared
from texts import write_config


def make_model(*, words=4, seed=0, **changes):
    family = families.get("n_pcfg")
    sizes = {"nonterminals": 2, "preterminals": 3, "dimension": 3, "init": "normal(2, 1)"}
    return family.build(family.section(family="n_pcfg", **(sizes | changes)), ["w"] * words, seed).double()


def test_rules_are_their_definition():
    model = make_model()
    with torch.no_grad():
        grammar = model(EXACT)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    logits = weights["symbols"][:2] @ weights["pairs.weight"].T + weights["pairs.bias"]
    powers = np.exp(logits)
    expected = (powers / powers.sum(1, keepdims=True)).reshape(2, 5, 5)
    np.testing.assert_allclose(grammar.pairs.numpy(), expected, rtol=1e-12)
    assert grammar.root.sum().item() == pytest.approx(1.0)


def test_gradients_reach_every_weight():
    model = make_model(dimension=8, init="normal(1, 1)")
    words, lengths = torch.tensor([0, 2, 1, 2, 0, 1, 1]), [4, 1, 2]
    names, values = zip(*model.named_parameters(), strict=True)

    def log_z(*tensors):
        grammar = functional_call(model, dict(zip(names, tensors, strict=True)), ())
        return grammar.log_likelihood(words, lengths, precision="fp64")

    assert torch.autograd.gradcheck(log_z, values, fast_mode=True)
    grammar = model(EXACT)
    leaves = grammar.detached()
    leaves.log_likelihood(words, lengths, precision="fp64").sum().backward()
    backward_through(grammar, leaves).backward()
    for value, gradient in zip(values, torch.autograd.grad(log_z(*values).sum(), values), strict=True):
        assert gradient.any()
        torch.testing.assert_close(value.grad, gradient, rtol=1e-10, atol=1e-14)


def test_dropout_renormalises_over_what_is_kept():
    settings = {"nonterminals": 4, "preterminals": 6, "state_dropout": 0.5}
    model, family = make_model(**settings), families.get("n_pcfg")
    section = family.section(family="n_pcfg", **settings)
    dropout = family.dropout(section, seed=1, step=2, total_steps=9)
    with torch.no_grad():
        whole, part = model(EXACT), model(EXACT._replace(dropout=dropout))
    nonterminals, preterminals = dropout.kept
    both = torch.cat((nonterminals, preterminals + 4))
    share = whole.pairs[nonterminals][:, both][:, :, both]
    torch.testing.assert_close(part.pairs, share / share.sum((1, 2), keepdim=True))
    assert part.root.sum().item() == pytest.approx(1.0)
    words = torch.tensor([0, 3])
    expected = whole.emission.log_probabilities(words)[:, preterminals]
    torch.testing.assert_close(part.emission.log_probabilities(words), expected)


def test_the_root_over_nonterminals_is_renormalised():
    """A sentence of one word has no tree then."""
    module, words, lengths = make_model(), torch.tensor([3, 0, 2, 1, 2, 0]), [1, 2, 3]
    with torch.no_grad():
        module.one_word.fill_(0.5)  # S -> preterminal has 62 % of the mass
        grammar = module(EXACT)
        paper = grammar.with_root_over_nonterminals()
        plain, changed = (some.log_likelihood(words, lengths, precision="fp64") for some in (grammar, paper))
    assert paper.root.sum().item() == pytest.approx(1.0, rel=1e-12)
    assert changed[0] == -math.inf
    torch.testing.assert_close(changed[1:], plain[1:] - grammar.root[: grammar.nonterminals].sum().log())


def test_strings_and_samples_have_the_same_probabilities():
    with torch.no_grad():
        grammar = make_model(words=2, preterminals=5, init="normal(1, 1)")(EXACT)
    longest, found = 6, {}
    for length in range(1, longest + 1):
        strings = list(itertools.product(range(2), repeat=length))
        log_p = grammar.log_likelihood(torch.tensor(strings).flatten(), [length] * len(strings), precision="fp64")
        found |= dict(zip(strings, log_p.exp().tolist(), strict=True))
    mass = np.zeros((201, 7))  # of a symbol's strings of a length, from T alone
    mass[1, 2:] = 1.0
    for length in range(2, 201):
        pairs = sum(np.outer(mass[k], mass[length - k]) for k in range(1, length))
        mass[length, :2] = np.einsum("abc,bc->a", grammar.pairs.numpy(), pairs)
    masses = mass @ grammar.root.numpy()
    assert sum(found.values()) == pytest.approx(masses[: longest + 1].sum(), rel=1e-10)
    assert masses.sum() == pytest.approx(grammar.describe(thorough=True)["grammar/mass_of_finite_strings"], abs=1e-6)
    samples = sample_derivations(grammar, 10_000, seed=3, max_length=longest)
    drawn = Counter("cut" if sample.cut else tuple(sample.words) for sample in samples)
    assert chi_squared(drawn, found | {"cut": 1 - sum(found.values())}) > 0.001


def test_figures_are_those_of_the_simple_grammar_where_rules_factor():
    rules = random_rules(3, 8, seed=2)
    emission = Emission.of(torch.randn(8, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64))
    simple = Grammar(*rules, emission).describe(thorough=True)
    found = DenseGrammar(*paired(rules), emission).describe(thorough=True)
    assert {name: found[name] for name in simple} == pytest.approx(simple, rel=1e-9)
    assert found["entropy/pairs"] == pytest.approx(simple["entropy/left"] + simple["entropy/right"])


def test_there_are_no_triton_kernels():
    with torch.no_grad(), pytest.raises(UserError, match="no Triton kernels"):
        make_model()(EXACT).log_likelihood(torch.tensor([0, 1]), [2], backend="triton")


# ---- through the commands -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eos", ["implicit", "explicit"])
def test_through_the_commands(eos, tmp_path):
    model = {"family": "n_pcfg", "state_dropout": 0.2, "eos": eos}
    write_config(tmp_path, "n", model=model, training={"max_steps": 6, "log_every": 1})
    ran(tmp_path, "train", "--config", "n.yaml", "name=whole")
    for steps in (2, 6):
        ran(tmp_path, "train", "--config", "n.yaml", "name=parts", "resume=auto", f"training.max_steps={steps}")
    ends = [checkpoint.latest(tmp_path / "runs" / name) for name in ("whole", "parts")]
    assert {end.name for end in ends} == {"step-00000006"}
    whole, parts = (checkpoint.load(end, with_optimizer=True) for end in ends)
    for of_whole, of_parts in ((whole.model, parts.model), (whole.optimizer, parts.optimizer)):
        assert all(torch.equal(tensor, of_parts[name]) for name, tensor in of_whole.items())
    losses = [
        line["train/loss"] for line in read_metrics(tmp_path / "runs/whole/metrics.jsonl") if "train/loss" in line
    ]
    assert len(losses) == 6
    assert np.isfinite(losses).all()

    here = ("--checkpoint", "runs/whole")
    report = json.loads(ran(tmp_path, "score", "valid.txt", *here, "--json"))
    assert report["lines"] == 12
    assert math.isfinite(report["nll"])
    assert ran(tmp_path, "parse", "-", *here, text=b"the cat sees a dog\n").startswith("(X")
    (tmp_path / "gold.mrg").write_text("(S (NP (DT the) (NN cat)) (VP (VBZ sees) (NP (DT a) (NN dog))))\n")
    assert 0 <= json.loads(ran(tmp_path, "evaluate", "gold.mrg", *here, "--json"))["s_f1"] <= 100
    if eos == "implicit":
        assert ran(tmp_path, "sample", "-n", "20", *here).strip()
        assert ran(tmp_path, "sample", "-n", "20", "--trees", *here).startswith("(N")
        assert json.loads(ran(tmp_path, "info", *here, "--json"))["family"] == "n_pcfg"
        assert "rules over pairs of children only" in refusal(tmp_path, "info", *here, "--grammar")
        assert "have no Viterbi trees" in refusal(tmp_path, "parse", "valid.txt", *here, "--method", "viterbi")
        assert "no trees drawn for given" in refusal(tmp_path, "sample", "--posterior", "valid.txt", *here)
        assert "use normal(symbols, words)" in refusal(
            tmp_path, "train", "--config", "n.yaml", "model.init=contexts(1, 1)"
        )
