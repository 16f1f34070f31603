"""Low-rank PCFGs in rank space against the dense grammar p(B C | A) = sum_r U[A, r] V[r, B] W[r, C], tree by tree."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import functional_call

import flash_inside
from command_line import lm_pcfg as command
from flash_inside import FactoredRules
from grammars import bracketings
from lm_pcfg.errors import OutOfMemory
from lm_pcfg.grammar import families
from lm_pcfg.grammar.computation import Computation, backward_through
from lm_pcfg.grammar.dropout import Dropout, draw_kept
from lm_pcfg.grammar.families import rank_pcfg
from lm_pcfg.grammar.networks import LARGEST_RMS
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.metrics_file import read_metrics
from lm_pcfg.training import loop
from texts import write_config

FAMILIES = ["rank_pcfg", "tn_pcfg"]
N, P, RANK, V = 2, 2, 3, 4


def make_model(name, *, seed=0, words=V, dtype=torch.float64, **changes):
    """A tiny module whose probabilities are far from uniform."""
    family = families.get(name)
    sizes = {"nonterminals": N, "preterminals": P, "rank": RANK, "dimension": 5, "init": "normal(3, 1)"}
    model = family.section(family=name, **(sizes | changes))
    return family.build(model, ["word"] * words, seed).to(dtype)


# ---- the dense grammar, from the weights by the equations of the files ----------------------------------------------


def softmax(logits, axis):
    powers = np.exp(logits - logits.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


class Dense:
    """Root, T[A, B, C] and the emission [P, V] in numpy; one word has a mass of its own if the root is over all."""

    def __init__(self, model):
        self.weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
        w, n = self.weights, model.nonterminals
        symbols = w["symbols"]

        def hidden(name, x):
            return np.maximum(self.linear(f"factors.{name}", x), 0)

        if "factors.projection" in w:
            outputs = [w["factors.projection"].T] * 3
            bias, tags = 0.0, symbols[n:]
        else:
            outputs = [w[f"factors.{name}_output.weight"].T for name in ("parent", "left", "right")]
            bias, tags = w["factors.parent_output.bias"], w["tags"]
        u = softmax(hidden("parent", symbols[:n]) @ outputs[0] + bias, 1)  # [N, r]
        v = softmax(hidden("left_child", symbols) @ outputs[1], 0)  # [N+P, r]
        other = softmax(hidden("right_child", symbols) @ outputs[2], 0)
        self.factors = u, v, other
        self.rules = np.einsum("ar,br,cr->abc", u, v, other)
        logits = w["root_output"] @ self.network("root_network", w["start"])[0]
        self.root = softmax(logits[:n], 0)
        self.one_word = np.zeros(len(symbols) - n)
        if "one_word" in w:
            share = 1 / (1 + math.exp(-w["one_word"].item()))
            self.root, self.one_word = self.root * (1 - share), softmax(logits[n:], 0) * share
        self.emission = softmax(self.network("emission_network", tags) @ w["words"].T, 1)

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def network(self, name, x):
        x = self.linear(f"{name}.0", x)
        for pair in (1, 2):
            inner = np.maximum(self.linear(f"{name}.{pair}.first", x), 0)
            x = np.maximum(self.linear(f"{name}.{pair}.second", inner), 0) + x
        return x

    def trees(self, words):
        """Every labelled tree of a sentence: its spans and its probability."""
        n, p, length = len(self.root), len(self.one_word), len(words)
        if length == 1:
            for tag in range(p):
                yield [(0, 1)], self.one_word[tag] * self.emission[tag, words[0]]
            return
        for bracketing in bracketings(0, length):
            inner = [parent for parent, _, _ in bracketing]
            spans = [*inner, *((i, i + 1) for i in range(length))]
            choices = [range(n)] * len(inner) + [range(n, n + p)] * length
            for labels in itertools.product(*choices):
                label = dict(zip(spans, labels, strict=True))
                probability = self.root[label[0, length]]
                for parent, left, right in bracketing:
                    probability *= self.rules[label[parent], label[left], label[right]]
                for i, word in enumerate(words):
                    probability *= self.emission[label[i, i + 1] - n, word]
                yield spans, probability

    def enumerated(self, words):
        """Probability of a sentence, and the posterior of every span [l+1, l+1]."""
        table = np.zeros((len(words) + 1, len(words) + 1))
        total = 0.0
        for spans, probability in self.trees(words):
            total += probability
            for i, j in spans:
                table[i, j] += probability
        return total, table / total if total else table

    def lengths(self, longest):
        """Probability of each length 1..longest, from T alone."""
        n, p = len(self.root), len(self.one_word)
        mass = np.zeros((longest + 1, n + p))  # of a symbol's strings of a length
        mass[1, n:] = 1.0
        for length in range(2, longest + 1):
            pairs = sum(np.outer(mass[k], mass[length - k]) for k in range(1, length))
            mass[length, :n] = np.einsum("abc,bc->a", self.rules, pairs)
        result = mass[:, :n] @ self.root
        result[1] += self.one_word.sum()
        return result[1:]


# ---- the same distribution ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["all", "nonterminals"])
@pytest.mark.parametrize("family", FAMILIES)
def test_strings_spans_and_mbr_trees_are_those_of_the_dense_grammar(family, root):
    model = make_model(family, root=root)
    dense, grammar = Dense(model), model()
    sentences = [[3], [1, 2], [0, 3, 1], [2, 0, 1, 1], [1, 3, 0, 2, 2]]
    words, lengths = torch.tensor([*itertools.chain(*sentences)]), [len(sentence) for sentence in sentences]
    log_z = grammar.log_likelihood(words, lengths, precision="fp64").tolist()
    tables = grammar.span_marginals(words, lengths, precision="fp64")
    truth = [dense.enumerated(sentence) for sentence in sentences]
    for found, table, (total, spans) in zip(log_z, tables, truth, strict=True):
        assert found == pytest.approx(math.log(total) if total else -math.inf, rel=1e-11)
        np.testing.assert_allclose(table.numpy(), spans, rtol=1e-9, atol=1e-15)
    assert truth[0][0] == 0.0 or root == "all"
    assert flash_inside.mbr(tables) == flash_inside.mbr([torch.from_numpy(spans) for _, spans in truth])


@pytest.mark.parametrize("family", FAMILIES)
def test_viterbis_tree_is_a_derivation_in_rank_symbols(family):
    """It is the best of those, and its bracketing is not always the best dense tree's: the documents say so."""
    others = 0
    for seed in range(6):
        model = make_model(family, seed=seed)
        dense, grammar = Dense(model), model()
        words = [1, 3, 0, 2]
        ((score, tree),) = grammar.viterbi(torch.tensor(words), [4], precision="fp64")
        best = max(dense.trees(words), key=lambda one: one[1])[0]
        assert score < math.log(dense.enumerated(words)[0])
        others += {(i, j) for i, j, _ in tree} != set(best)
        assert max(symbol for i, j, symbol in tree if j > i + 1) < RANK
    assert 0 < others < 6


@pytest.mark.parametrize("root", ["all", "nonterminals"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_sum_to_one(family, root):
    model = make_model(family, root=root, dtype=torch.float32, nonterminals=40, preterminals=50, rank=30)
    kept = draw_kept(30, 50, 0.4, seed=1, step=2)
    for dropout in (Dropout(), Dropout(kept)):
        grammar = model(Computation(dropout=dropout))
        ranks, tags = (30, 50) if dropout.kept is None else (18, 30)
        assert grammar.left.shape == grammar.right.shape == (ranks, ranks + tags)
        assert grammar.root.shape == (ranks + tags if root == "all" else ranks,)
        assert grammar.root.dtype == torch.float64
        for probabilities in grammar.rules:
            torch.testing.assert_close(probabilities.sum(-1), torch.ones_like(probabilities.sum(-1)), rtol=0, atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_probabilities_of_all_strings_sum_to_one(family):
    model = make_model(family, words=2, preterminals=5, init="normal(1, 1)")  # few children are nonterminals
    dense, grammar = Dense(model), model()
    longest = 7
    masses = dense.lengths(200)
    assert masses.sum() == pytest.approx(1.0, abs=1e-9)
    assert 1e-4 < masses[longest:].sum() < 0.5
    for length, mass in enumerate(masses[:longest], start=1):
        strings = torch.tensor(list(itertools.product(range(2), repeat=length)))
        with torch.no_grad():
            log_z = grammar.log_likelihood(strings.flatten(), [length] * len(strings), precision="fp64")
        assert log_z.exp().sum().item() == pytest.approx(mass, rel=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_renormalises_over_what_is_kept(family):
    model = make_model(family, preterminals=4, rank=5)
    kept = draw_kept(5, 4, 0.4, seed=1, step=5)
    root, parents, children = model.dense(slice(None), slice(None))
    of_root, of_parents, of_children = model.dense(*kept)
    columns = torch.cat((torch.arange(N), kept.preterminals + N))
    share = parents[:, kept.nonterminals]
    torch.testing.assert_close(of_parents, share / share.sum(1, keepdim=True))
    share = children[:, kept.nonterminals][:, :, columns]
    torch.testing.assert_close(of_children, share / share.sum(2, keepdim=True))
    torch.testing.assert_close(of_root[:N], root[:N])
    torch.testing.assert_close(of_root.sum(), torch.ones_like(of_root.sum()))
    grammar, whole = model(Computation(dropout=Dropout(kept))), model()
    words = torch.tensor([0, 3])
    expected = whole.emission.log_probabilities(words)[:, kept.preterminals]
    torch.testing.assert_close(grammar.emission.log_probabilities(words), expected)


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family):
    model = make_model(family, dimension=3, words=3)
    names = [name for name, _ in model.named_parameters()]
    values = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]

    def log_z(*tensors):
        grammar = functional_call(model, dict(zip(names, tensors, strict=True)), ())
        return grammar.log_likelihood(torch.tensor([0, 2, 1, 2, 0, 1, 1]), [4, 1, 2], precision="fp64")

    assert torch.autograd.gradcheck(log_z, values, fast_mode=True)


@pytest.fixture
def keeps_factors(monkeypatch):
    """Steps keep the factors of these small grammars, too."""
    monkeypatch.setattr(rank_pcfg, "factors_pay", lambda *_: True)


@pytest.fixture
def multiplies_out(monkeypatch):
    monkeypatch.setattr(rank_pcfg, "factors_pay", lambda *_: False)


@pytest.mark.parametrize("family", FAMILIES)
def test_bounded_networks_of_the_emission(family):
    """The features of the paper as long as no pair adds much; else those of shortened additions. Rules stay."""
    for deviation, same in ((1e-4, True), (5.0, False)):
        models = [
            make_model(family, init=f"normal({deviation}, 0.3)", parameterization=p) for p in ("paper", "bounded")
        ]
        for model in models:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.mul_(0.0 if name.endswith("bias") else 1.0)
        paper, bounded = (model(Computation("fp64")) for model in models)
        assert torch.equal(paper.emission.features, bounded.emission.features) == same
        for name in ("root", "left", "right"):
            assert torch.equal(getattr(paper, name), getattr(bounded, name))
        tags = models[1].symbols[N:] if models[1].tags is None else models[1].tags
        added = bounded.emission.features - models[1].emission_network[0](tags)  # by the two pairs
        assert added.norm(dim=1).max() <= 2 * LARGEST_RMS * 5**0.5


def errors_of_gradients(model, charts):
    """By weight: those gathered on the leaves of a grammar and taken through its graph, against fp64 charts."""
    words, lengths = torch.tensor([0, 2, 1, 2, 0, 1, 1, 3]), [5, 1, 2]
    grammar = model(Computation(charts=charts))
    leaves = grammar.detached()
    leaves.log_likelihood(words, lengths, precision=charts).sum().backward()
    backward_through(grammar, leaves).backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model().log_likelihood(words, lengths, precision="fp64").sum().backward()
    assert all(parameter.grad.any() for parameter in model.parameters())
    truth = {name: parameter.grad for name, parameter in model.named_parameters()}
    return grammar, [((ours[name] - grad).norm() / grad.norm()).item() for name, grad in truth.items()]


@pytest.mark.parametrize("charts", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_gathered_on_the_grammar_reach_every_weight(family, charts, multiplies_out):
    """With more than 256 rank symbols bf16 charts have rules in bf16, whose gradients enter at wide ones."""
    model = make_model(family, dtype=torch.float32, nonterminals=20, preterminals=30, rank=272, dimension=16)
    grammar, errors = errors_of_gradients(model, charts)
    assert grammar.left.dtype == (torch.bfloat16 if charts == "bf16" else torch.float32)
    assert grammar.right.data_ptr() - grammar.left.data_ptr() == grammar.left.nbytes  # one after the other
    assert max(errors) < (0.05 if charts == "bf16" else 1e-3)


# ---- steps that keep the factors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("charts", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_factors_reach_every_weight(family, charts, keeps_factors):
    model = make_model(family, dtype=torch.float32, nonterminals=20, preterminals=30, rank=272, dimension=16)
    grammar, errors = errors_of_gradients(model, charts)
    assert grammar.left.shape == grammar.right.shape == (272, 20 + 30)
    assert grammar.inner.shape == (20, 272)
    assert grammar.left.dtype == grammar.inner.dtype == (torch.bfloat16 if charts == "bf16" else torch.float32)
    assert max(errors) < (0.05 if charts == "bf16" else 1e-3)


def test_factors_are_kept_where_they_pay():
    assert make_model("rank_pcfg")().inner is None
    assert make_model("rank_pcfg", rank=300)().inner is not None
    sizes = ((512, 8192), (512, 4096), (64, 256), (4096, 8192))
    assert [rank_pcfg.factors_pay(*size, "cuda") for size in sizes] == [True, False, False, False]
    assert [rank_pcfg.factors_pay(*size, "cpu") for size in sizes] == [True, True, True, False]


def test_memory_is_that_of_the_rules_that_are_made():
    """And if it is not there, the setting that helps most comes first."""
    family = families.get("rank_pcfg")
    sizes = {"preterminals": 1024, "dimension": 8, "init": "normal(3, 1)"}
    few, many = (family.section(family="rank_pcfg", rank=32768, nonterminals=n, **sizes) for n in (64, 16384))
    assert family.model_memory(few, 1000, "cpu") < 2**30
    assert family.model_memory(many, 1000, "cpu") > 2 * 2 * 4 * 32768**2
    with pytest.raises(OutOfMemory, match=r"fewer symbols \(model.rank, model.preterminals, model.nonterminals\)"):
        family.check_memory(many.model_copy(update={"rank": 2**20}), 1000, "cpu")


@pytest.mark.parametrize("symbols", [40, 600])
def test_figures_of_an_evaluation_and_spans_make_no_whole_rules(symbols, monkeypatch):
    """600 rank symbols are too many for all eigenvalues of their rules."""
    made = []
    for kept in (True, False):
        monkeypatch.setattr(rank_pcfg, "factors_pay", lambda *_, kept=kept: kept)
        made.append(make_model("rank_pcfg", rank=symbols)())
    factored, whole = made
    assert factored.inner is not None
    words = torch.tensor([1, 3, 0, 2])
    wanted, spans = whole.describe(), whole.span_marginals(words, [4], precision="fp64")[0]
    if symbols > 512:
        monkeypatch.setattr(FactoredRules, "multiplied", lambda _: pytest.fail("multiplied out"))
    assert factored.describe() == pytest.approx(wanted, rel=1e-4)
    torch.testing.assert_close(factored.span_marginals(words, [4], precision="fp64")[0], spans)


def test_whatever_needs_whole_rules_gets_them(monkeypatch):
    model, made = make_model("rank_pcfg"), []
    for kept in (True, False):
        monkeypatch.setattr(rank_pcfg, "factors_pay", lambda *_, kept=kept: kept)
        made.append(model())
    factored, whole = made
    assert factored.inner is not None
    assert factored.whole().inner is None
    words = torch.tensor([1, 3, 0, 2])
    found, wanted = (one.word_posteriors(words, [4], precision="fp64")[0] for one in made)
    torch.testing.assert_close(found, wanted)
    for found, wanted in zip(factored.rules, whole.rules, strict=True):
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(factored.span_marginals(words, [4], precision="fp64")[0],
                               whole.span_marginals(words, [4], precision="fp64")[0])  # fmt: skip
    assert factored.viterbi(words, [4])[0][1] == whole.viterbi(words, [4])[0][1]
    torch.testing.assert_close(torch.tensor(list(factored.describe().values())),
                               torch.tensor(list(whole.describe().values())))  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_with_factors_is_the_run_without_up_to_rounding_and_resumes(family, tmp_path, monkeypatch, keeps_factors):
    model = {"family": family, "rank": 12, "state_dropout": 0.2}
    config = write_config(tmp_path, model=model, training={"epochs": 1})  # 8 steps
    whole = checkpoint.load(checkpoint.latest(train(config, "whole")), with_optimizer=True)
    train(config, "parts", "training.max_steps=3")
    parts = checkpoint.load(checkpoint.latest(train(config, "parts", "resume=auto")), with_optimizer=True)
    for of_whole, of_parts in ((whole.model, parts.model), (whole.optimizer, parts.optimizer)):
        assert all(torch.equal(tensor, of_parts[name]) for name, tensor in of_whole.items())
    monkeypatch.setattr(rank_pcfg, "factors_pay", lambda *_: False)
    train(config, "multiplied")
    with_factors, without = (logged(tmp_path / "runs" / name, "train/loss") for name in ("whole", "multiplied"))
    assert with_factors == pytest.approx(without, rel=1e-5)
    assert with_factors != without  # they did take another way


def train(config, name, *overrides):
    return loop.train(load_settings(config, [f"name={name}", "training.log_every=1", *overrides]))


# ---- through the commands -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rank")
    for family in FAMILIES:
        model = {"family": family, "rank": 5, "state_dropout": 0.2}
        write_config(folder, family, model=model, training={"epochs": 3}, optimizer={"learning_rate": 0.02})
        ran(folder, "train", "--config", f"{family}.yaml")
    return folder


def ran(folder, *arguments, text=b""):
    result = command(*arguments, cwd=folder, text=text)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def logged(run, figure):
    return [line[figure] for line in read_metrics(run / "metrics.jsonl") if figure in line]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_learns_and_a_run_in_two_parts_is_the_run_in_one(folder, family):
    run = folder / "runs" / family
    perplexities = logged(run, "valid/ppl")
    assert perplexities[-1] < perplexities[0]
    for steps in (5, 24):
        ran(folder, "train", "--config", f"{family}.yaml", f"name={family}-parts", "resume=auto",
            f"training.max_steps={steps}")  # fmt: skip
    ends = [checkpoint.latest(folder / "runs" / name) for name in (family, f"{family}-parts")]
    assert {end.name for end in ends} == {"step-00000024"}
    whole, parts = (checkpoint.load(end, with_optimizer=True) for end in ends)
    for of_whole, of_parts in ((whole.model, parts.model), (whole.optimizer, parts.optimizer)):
        assert of_whole.keys() == of_parts.keys()
        assert all(torch.equal(tensor, of_parts[name]) for name, tensor in of_whole.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_command_takes_it(folder, family):
    run = f"runs/{family}"
    report = json.loads(ran(folder, "score", "valid.txt", "--checkpoint", run, "--json"))
    assert report["lines"] == 12
    assert math.isfinite(report["nll"])
    assert math.isfinite(json.loads(ran(folder, "score", "valid.txt", "--checkpoint", run, "--root", "nonterminals",
                                        "--json"))["nll"])  # fmt: skip
    text = b"the cat sees a dog\nthe old bird sleeps\n"
    assert ran(folder, "parse", "-", "--checkpoint", run, text=text).count("cat") == 1
    viterbi = ran(folder, "parse", "-", "--checkpoint", run, "--method", "viterbi", text=text)
    assert viterbi.startswith("(N")
    (folder / "gold.mrg").write_text("(S (NP (DT the) (NN cat)) (VP (VBZ sees) (NP (DT a) (NN dog))))\n")
    assert 0 <= json.loads(ran(folder, "evaluate", "gold.mrg", "--checkpoint", run, "--json"))["s_f1"] <= 100
    assert ran(folder, "sample", "-n", "20", "--checkpoint", run).strip()
    assert ran(folder, "sample", "--posterior", "valid.txt", "-n", "1", "--checkpoint", run).strip()
    described = json.loads(ran(folder, "info", "--checkpoint", run, "--json"))
    assert (described["family"], described["nonterminals"], described["rank"]) == (family, 4, 5)
    symbols = ran(folder, "info", "--checkpoint", run, "--grammar")
    assert "N4" in symbols  # the fifth rank symbol; there are four nonterminals
    assert "P5" in symbols
