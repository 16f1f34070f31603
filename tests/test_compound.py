"""Compound PCFGs: p(x | z) against enumeration, the bound against quadrature over z, noise, training and commands."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call

import processes
import training_runs
from command_line import lm_pcfg, ran, refusal
from flash_inside.dense import PairRules
from flash_inside.softmax import log_normalizers, normalizers
from lm_pcfg import load
from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyOptions
from lm_pcfg.distributed.engine import Engine
from lm_pcfg.grammar import compound, families
from lm_pcfg.grammar.compound import Posterior, sentence_noise
from lm_pcfg.grammar.computation import EXACT, Computation, backward_through
from lm_pcfg.grammar.dropout import Dropout, Latent, draw_kept
from lm_pcfg.inference.bounds import Bounds
from lm_pcfg.inference.sample import Drawn, draw_samples
from lm_pcfg.inference.trained import TrainedGrammar, load_trained
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.metrics_file import read_metrics
from lm_pcfg.training.steps import Steps
from test_brackets import packed_limits
from test_dense import enumerated
from test_rank_families import softmax
from test_softmax import LargestTensor
from test_zero import assert_same_weights_and_moments, told
from texts import write_config
from zero_scenario import BROKEN

FAMILIES = ["sc_pcfg", "c_pcfg"]
N, P, V, K = 2, 3, 4, 2
SENTENCES = [[3], [1, 2], [0, 3, 1], [2, 0, 1, 1], [1, 3, 0, 2]]
WORDS, LENGTHS = torch.tensor([*itertools.chain(*SENTENCES)]), [len(sentence) for sentence in SENTENCES]


def make_model(name, *, seed=0, words=V, dtype=torch.float64, **changes):
    """A tiny module whose probabilities are far from uniform."""
    family = families.get(name)
    sizes = {"nonterminals": N, "preterminals": P, "dimension": 5, "latent": K, "encoder": 3, "init": "normal(1, 1)"}
    return family.build(family.section(family=name, **(sizes | changes)), ["word"] * words, seed).to(dtype)


def some_z(count, seed=0, dtype=torch.float64):
    return torch.randn(count, K, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- p(x | z) -------------------------------------------------------------------------------------------------------


class Definition:
    """Root, T[A, B, C] and the emission [P, V] of one z, in numpy, by the equations of the files."""

    def __init__(self, module, z):
        self.w = {name: tensor.numpy() for name, tensor in module.networks.state_dict().items()}
        w, n, self.z = self.w, N, z.numpy()
        symbols = w["symbols"]
        tags, size = symbols[n:], len(symbols)
        if "pairs.weight" in w:
            first = self.network("root_network.linear", "root_network.pairs", w["start"], True)
            self.rules = softmax(self.linear("pairs", symbols[:n], True), 1).reshape(n, size, size)
        else:
            first = self.network("root_network.0", "root_network", w["start"], False, (1, 2))

            def g(name, x, with_z):
                return np.maximum(self.linear(f"{name}.linear", x, with_z), 0) + x

            left, right = (softmax(g("parent", symbols[:n], True) @ g(f"{side}_child", symbols, False).T, 1)
                           for side in ("left", "right"))  # fmt: skip
            self.rules = left[:, :, None] * right[:, None, :]
        share = 1 / (1 + math.exp(-w["one_word"].item()))
        logits = w["root_output"] @ first[0]
        self.root = np.concatenate((softmax(logits[:n], 0) * (1 - share), softmax(logits[n:], 0) * share))
        features = self.network("emission_network.linear", "emission_network.pairs", tags, True)
        self.emission = softmax(features @ w["words"].T, 1)

    def linear(self, name, x, with_z):
        if with_z:
            x = np.concatenate((x, np.broadcast_to(self.z, (len(x), len(self.z)))), 1)
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def network(self, first, pairs, x, with_z, numbers=(0, 1)):
        x = self.linear(first, x, with_z)
        for pair in numbers:
            inner = np.maximum(self.linear(f"{pairs}.{pair}.first", x, False), 0)
            x = np.maximum(self.linear(f"{pairs}.{pair}.second", inner, False), 0) + x
        return x

    def enumerated(self, words):
        rules = PairRules(torch.from_numpy(self.root), torch.from_numpy(self.rules))
        return enumerated(rules, torch.from_numpy(np.log(self.emission[:, words]).T))

    def lengths(self, longest):
        """Probability of each length 1..longest, from T alone."""
        mass = np.zeros((longest + 1, N + P))
        mass[1, N:] = 1.0
        for length in range(2, longest + 1):
            pairs = sum(np.outer(mass[k], mass[length - k]) for k in range(1, length))
            mass[length, :N] = np.einsum("abc,bc->a", self.rules, pairs)
        result = mass[:, :N] @ self.root[:N]
        result[1] += self.root[N:].sum()
        return result[1:]


@pytest.mark.parametrize("family", FAMILIES)
def test_given_z_strings_and_spans_are_those_of_all_trees(family):
    module, z = make_model(family), some_z(len(SENTENCES))
    with torch.no_grad():
        grammar = module().given(z, LENGTHS)
        log_p = grammar.log_likelihood(WORDS, LENGTHS, precision="fp64").tolist()
        tables = grammar.span_marginals(WORDS, LENGTHS, precision="fp64")
    for words, own_z, found, table in zip(SENTENCES, z, log_p, tables, strict=True):
        total, spans = Definition(module, own_z).enumerated(words)
        assert found == pytest.approx(math.log(total), rel=1e-10)
        np.testing.assert_allclose(table.numpy(), spans, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_given_z_all_strings_sum_to_one(family):
    module, z = make_model(family, init="normal(0.3, 1)", words=2), some_z(1, seed=1)[0]
    masses, longest = Definition(module, z).lengths(60), 5
    with torch.no_grad():
        for length, mass in enumerate(masses[:longest], start=1):
            strings = torch.tensor(list(itertools.product(range(2), repeat=length)))
            lengths = [length] * len(strings)
            grammar = module().given(z.expand(len(strings), -1), lengths)
            log_p = grammar.log_likelihood(strings.flatten(), lengths, precision="fp64")
            assert log_p.exp().sum().item() == pytest.approx(mass, rel=1e-10)
    assert masses[:longest].sum() <= 1.0 + 1e-12
    assert masses.sum() <= 1.0 + 1e-12


@pytest.mark.parametrize("root", ["all", "nonterminals"])
@pytest.mark.parametrize(("family", "plain"), [("sc_pcfg", "sn_pcfg"), ("c_pcfg", "n_pcfg")])
def test_without_weights_for_z_it_is_the_plain_model_for_every_z(family, plain, root):
    module = make_model(family, root=root)
    base = families.get(plain)
    sizes = {"nonterminals": N, "preterminals": P, "dimension": 5, "init": "normal(1, 1)", "root": root}
    other = base.build(base.section(family=plain, **sizes), ["word"] * V, 3).double()
    own, names = module.networks.state_dict(), {}
    for name, tensor in other.state_dict().items():
        network, _, rest = name.partition(".")
        if f"{network}.linear.weight" in own and network.endswith("network"):  # Linear, Res, Res
            number, _, rest = rest.partition(".")
            name = f"{network}.linear.{rest}" if number == "0" else f"{network}.pairs.{int(number) - 1}.{rest}"
        names[name] = tensor
    assert names.keys() == own.keys()
    for name, tensor in names.items():
        own[name] = torch.zeros_like(own[name])
        own[name][..., : tensor.shape[-1]] = tensor  # what is left are the weights of z
    module.networks.load_state_dict(own)
    with torch.no_grad():
        expected = other().log_likelihood(WORDS, LENGTHS, precision="fp64")
        for seed in range(3):
            found = module().given(5 * some_z(len(LENGTHS), seed), LENGTHS)
            torch.testing.assert_close(found.log_likelihood(WORDS, LENGTHS, precision="fp64"), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_the_grammar_of_what_is_kept(family):
    module, z = make_model(family, nonterminals=5, preterminals=6), some_z(2)
    kept = draw_kept(5, 6, 0.4, seed=1, step=2)
    with torch.no_grad():
        grammar = module(Computation(dropout=Dropout(kept))).given(z, [2, 1])
        whole = module().given(z, [2, 1])
    both = torch.cat((kept.nonterminals, kept.preterminals + 5))
    if family == "sc_pcfg":
        share = whole.left[:, kept.nonterminals][:, :, both]
        torch.testing.assert_close(grammar.left, share / share.sum(2, keepdim=True))
    else:
        share = whole.pairs[:, kept.nonterminals][:, :, both][:, :, :, both]
        torch.testing.assert_close(grammar.pairs, share / share.sum((2, 3), keepdim=True))
    words = torch.tensor([0, 3, 1])
    torch.testing.assert_close(
        grammar.emission.log_probabilities(words), whole.emission.log_probabilities(words)[:, kept.preterminals]
    )


# ---- q(z | x), noise and bounds -------------------------------------------------------------------------------------


def test_divergence_and_ratio_are_those_of_normal_distributions():
    posterior, noise = Posterior(some_z(4), some_z(4, 1)), some_z(4, 2)
    q, prior = Normal(posterior.mean, (posterior.log_variance / 2).exp()), Normal(0.0, 1.0)
    torch.testing.assert_close(posterior.divergence(), kl_divergence(q, prior).sum(1))
    z = posterior.at(noise)
    torch.testing.assert_close(posterior.log_ratio(noise), (q.log_prob(z) - prior.log_prob(z)).sum(1))


def test_noise_depends_on_seed_step_draw_and_words_alone():
    latent = Latent(seed=3, step=7)
    noise = sentence_noise(WORDS, LENGTHS, 6, latent)
    backwards = torch.tensor([*itertools.chain(*SENTENCES[::-1])])
    assert torch.equal(sentence_noise(backwards, LENGTHS[::-1], 6, latent).flip(0), noise)
    assert torch.equal(sentence_noise(torch.tensor(SENTENCES[2]), [3], 6, latent)[0], noise[2])
    others = [
        sentence_noise(WORDS, LENGTHS, 6, Latent(seed=4, step=7)),
        sentence_noise(WORDS, LENGTHS, 6, Latent(seed=3, step=8)),
        sentence_noise(WORDS, LENGTHS, 6, Latent(seed=3)),
        sentence_noise(WORDS, LENGTHS, 6, latent, draw=1),
        noise,
    ]
    rows = torch.cat(others)
    assert len(rows.unique(dim=0)) == len(rows)
    many = sentence_noise(torch.arange(4000), [1] * 4000, 5, latent)
    assert abs(many.mean()) < 0.03
    assert abs(many.std() - 1) < 0.03


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sentence_has_the_same_bound_in_any_batch(family, monkeypatch):
    model = make_model(family)(Computation(dropout=Dropout(latent=Latent(2, 5, 0.5))))
    with torch.no_grad():
        whole = model.log_likelihood(WORDS, LENGTHS, precision="fp64")
        unchecked, trusted = model.log_likelihood_unchecked(WORDS, LENGTHS, precision="fp64")
        monkeypatch.setattr(compound, "CHUNK", 0.0)  # of the memory
        in_chunks = model.log_likelihood(WORDS, LENGTHS, precision="fp64")
        limits = packed_limits([[(0, max(1, length - 1))] for length in LENGTHS], LENGTHS)
        held = model.log_likelihood(WORDS, LENGTHS, precision="fp64", limits=limits)
    torch.testing.assert_close(unchecked, whole)
    torch.testing.assert_close(in_chunks, whole)
    assert trusted.all()
    assert (held <= whole + 1e-9).all()
    assert (held < whole - 1e-6).any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_the_bound_counts_so_much_of_the_divergence(weight, family):
    """With the same noise; `log_likelihood_unchecked` is what training computes."""
    module, found = make_model(family), {}
    with torch.no_grad():
        divergence = module().posterior(WORDS, LENGTHS).divergence()
        for of_divergence in (weight, 1.0):
            model = module(Computation(dropout=Dropout(latent=Latent(2, 5, of_divergence))))
            checked = model.log_likelihood(WORDS, LENGTHS, precision="fp64")
            unchecked, _ = model.log_likelihood_unchecked(WORDS, LENGTHS, precision="fp64")
            found[of_divergence] = torch.stack((checked, unchecked))
    torch.testing.assert_close(found[weight], found[1.0] + (1.0 - weight) * divergence)


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_and_tags_are_of_the_grammar_of_the_posterior_mean(family):
    with torch.no_grad():
        model = make_model(family)()
        spans = model.span_marginals(WORDS, LENGTHS, precision="fp64")
        tags = model.word_posteriors(WORDS, LENGTHS, precision="fp64")
        siblings = model.last_siblings(WORDS, LENGTHS)
        for number, (words, length) in enumerate(zip(WORDS.split(LENGTHS), LENGTHS, strict=True)):
            grammar, alone = model.given(model.posterior(words, [length]).mean, [length]), (words, [length])
            torch.testing.assert_close(spans[number], grammar.span_marginals(*alone, precision="fp64")[0])
            torch.testing.assert_close(tags[number], grammar.word_posteriors(*alone, precision="fp64")[0])
            torch.testing.assert_close(siblings[number], grammar.last_siblings(*alone)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_root_over_nonterminals_is_renormalised(family):
    """In the grammar of every sentence; one of a single word has no tree then."""
    module = make_model(family)
    with torch.no_grad():
        module.networks.one_word.fill_(0.5)  # S -> preterminal has 62 % of the mass
        model, paper, z = module(), module().with_root_over_nonterminals(), some_z(len(LENGTHS))
        mass = model.given(z, LENGTHS).root[:, :N].sum(1)
        assert ((mass > 0.3) & (mass < 0.4)).all()
        of_z = [some.given(z, LENGTHS).log_likelihood(WORDS, LENGTHS, precision="fp64") for some in (model, paper)]
        bounds = [some.log_likelihood(WORDS, LENGTHS, precision="fp64") for some in (model, paper)]
    for plain, changed in (of_z, bounds):
        assert changed[0] == -math.inf
        torch.testing.assert_close(changed[1:], (plain - mass.log())[1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_bounds_are_below_the_likelihood_by_quadrature(family):
    """With z of one number, p(x) is an integral over a line."""
    module = make_model(family, latent=1, seed=1)
    with torch.no_grad():
        for name, parameter in module.encoder.named_parameters():
            if name == "moments.bias":
                parameter.copy_(torch.tensor([0.4, -0.5]))  # neither the prior nor the true posterior
        model, words = module(), torch.tensor([1, 3, 0])
        grid = torch.linspace(-8, 8, 401, dtype=torch.float64)
        log_p = model.given(grid[:, None], [3] * 401).log_likelihood(words.repeat(401), [3] * 401, precision="fp64")
        log_prior, step = Normal(0.0, 1.0).log_prob(grid), (grid[1] - grid[0]).log()
        truth = (log_p + log_prior + step).logsumexp(0).item()
        posterior = model.posterior(words, [3])
        log_q = Normal(posterior.mean[0], (posterior.log_variance[0] / 2).exp()).log_prob(grid)
        elbo = (log_q.exp() * (log_p + log_prior - log_q)).sum().item() * step.exp().item()
        draws = 100
        log_w = torch.stack([
            model.estimating("weight", draw=draw).log_likelihood(words, [3], precision="fp64") for draw in range(draws)
        ]).numpy()  # fmt: skip
        bounds = torch.stack([
            model.estimating("bound", draw=draw).log_likelihood(words, [3], precision="fp64") for draw in range(40)
        ])  # fmt: skip
    assert elbo < truth - 1e-3
    error = log_w.std() / math.sqrt(draws)
    assert log_w.mean() == pytest.approx(elbo, abs=4 * error)
    assert bounds.mean().item() == pytest.approx(elbo, abs=4 * bounds.std().item() / math.sqrt(40))
    by_hand = Bounds(draws)
    by_hand.add(log_w, [words.numpy()])
    assert by_hand.elbo[0] <= by_hand.weighted[0]
    assert math.sqrt(by_hand.elbo_variance) == pytest.approx(error, rel=0.01)
    assert by_hand.weighted[0] == pytest.approx(truth, abs=4 * math.sqrt(by_hand.weighted_variance))
    few = [np.log(np.exp(part).mean()) for part in np.split(log_w[:, 0], 20)]  # of five samples each
    assert elbo < np.mean(few) < truth + 4 * np.std(few) / math.sqrt(20)


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_have_grammars_of_latent_vectors_from_the_prior(family):
    """The mean share of a word among the words of each preterminal, drawn and by quadrature."""
    with torch.no_grad():
        model, number = make_model(family, latent=1)(), 300
        grid = torch.linspace(-8, 8, 401, dtype=torch.float64)
        emission = model.given(grid[:, None], [1] * 401).emission.log_probabilities(torch.zeros(401, dtype=torch.int64))
        expected = (emission.exp() * Normal(0.0, 1.0).log_prob(grid).exp()[:, None]).sum(0) * (grid[1] - grid[0])
        drawn = torch.stack([
            grammar.emission.log_probabilities(torch.tensor([0]))[0].exp() for grammar in model.drawn(number, seed=3)
        ])  # fmt: skip
        again = next(model.drawn(1, seed=3)).emission.log_probabilities(torch.tensor([0]))[0].exp()
    assert torch.equal(again, drawn[0])
    assert ((drawn.mean(0) - expected).abs() < 4 * drawn.std(0) / math.sqrt(number)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_sample_has_a_latent_vector_of_its_own(family):
    """Here the sign of z decides the words: those of one sample are the same, those of samples are not."""
    module = make_model(family, latent=1, words=2)
    networks = module.networks
    with torch.no_grad():
        for table in (networks.words, *networks.emission_network.parameters()):
            table.zero_()
        networks.emission_network.linear.weight[0, -1] = 1.0  # the first feature is z
        networks.words[1, 0] = 1e6
        vocabulary = Vocabulary(["<unk>", "a"], VocabularyOptions())
        one = TrainedGrammar(module(), vocabulary, None, Path("nowhere"), {}, "raw", 0, fewest_symbols=1)
        samples = list(draw_samples([one], 100, seed=1, max_length=50, drawn=Drawn()))
    words = [set(sample.text.split()) for sample in samples]
    assert all(len(of_sample) == 1 for of_sample in words)
    assert any(len(sample.text.split()) > 2 for sample in samples)
    assert all(words.count({word}) > len(words) / 4 for word in vocabulary.words)


# ---- gradients and memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_through_encoder_and_networks(family):
    module = make_model(family, dimension=3, words=3)
    names = [name for name, _ in module.named_parameters()]
    values = [parameter.detach().clone().requires_grad_() for parameter in module.parameters()]
    words, lengths = torch.tensor([0, 2, 1, 0, 1, 1]), [3, 1, 2]

    def bound(*tensors):
        model = functional_call(module, dict(zip(names, tensors, strict=True)), (EXACT,))
        return model.log_likelihood(words, lengths, precision="fp64")

    assert torch.autograd.gradcheck(bound, values, fast_mode=True)
    model = module()
    leaves = model.detached()
    leaves.log_likelihood(words, lengths, precision="fp64").sum().backward()
    backward_through(model, leaves).backward()
    direct = torch.autograd.grad(bound(*values).sum(), values)
    for parameter, gradient in zip(module.parameters(), direct, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert all(parameter.grad.any() for parameter in module.encoder.parameters())


def test_narrow_rules_have_wide_gradients():
    """With more than 256 nonterminals bf16 charts have rules in bf16."""
    module = make_model("sc_pcfg", dtype=torch.float32, nonterminals=272, preterminals=30, dimension=16)
    gradients = []
    for charts in ("bf16", "fp64"):
        model = module(Computation(charts=charts))
        leaves = model.detached()
        grammar = leaves.given(some_z(5, dtype=torch.float32), LENGTHS)
        assert grammar.left.dtype == (torch.bfloat16 if charts == "bf16" else torch.float32)
        leaves.log_likelihood(WORDS, LENGTHS, precision=charts).sum().backward()
        module.zero_grad()
        backward_through(model, leaves).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in module.named_parameters()})
    for name, gradient in gradients[1].items():
        assert gradient.any(), name
        assert (gradients[0][name] - gradient).norm() < 0.05 * gradient.norm(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_of_preterminals_by_words_by_sentences_is_made(family, monkeypatch):
    monkeypatch.setattr(log_normalizers, "__defaults__", ("fp32", 2000, True))  # logits at a time, whatever the sizes
    monkeypatch.setattr(normalizers, "KEPT_FROM", {"cpu": 1})  # probabilities of one grammar are kept; these are not
    words, tags, sentences = 6000, 20, 8
    module = make_model(family, words=words, preterminals=tags, dimension=4, encoder=4, dtype=torch.float32)
    ids = torch.arange(4 * sentences)
    with LargestTensor() as seen:
        model = module()
        leaves = model.detached()
        leaves.log_likelihood(ids, [4] * sentences).sum().backward()
        backward_through(model, leaves).backward()
    assert seen.elements < tags * words  # those of one sentence: 120,000


# ---- training and commands ------------------------------------------------------------------------------------------


def config_of(family, folder, **changes):
    model = {"family": family, "latent": 3, "encoder": 4, "state_dropout": 0.2, "kl_warmup_steps": 4}
    training = {"max_steps": 6, "log_every": 1}
    return write_config(folder, family, model=model, training=training, **changes)


def losses_of(run):
    return [line["train/loss"] for line in read_metrics(run / "metrics.jsonl") if "train/loss" in line]


@pytest.mark.parametrize("family", FAMILIES)
def test_through_the_commands(family, tmp_path):
    config = str(config_of(family, tmp_path, data={"curriculum": {"start": 7}}))
    ran(tmp_path, "train", "--config", config, "name=whole")
    for steps in (2, 6):
        ran(tmp_path, "train", "--config", config, "name=parts", "resume=auto", f"training.max_steps={steps}")
    assert "best validation perplexity at most " in (tmp_path / "runs/whole/FINISHED").read_text()
    ends = [checkpoint.latest(tmp_path / "runs" / name) for name in ("whole", "parts")]
    assert {end.name for end in ends} == {"step-00000006"}
    whole, parts = (checkpoint.load(end, with_optimizer=True) for end in ends)
    for of_whole, of_parts in ((whole.model, parts.model), (whole.optimizer, parts.optimizer)):
        assert of_whole.keys() == of_parts.keys()
        assert all(torch.equal(tensor, of_parts[name]) for name, tensor in of_whole.items())
    assert len(losses_of(tmp_path / "runs/whole")) == 6
    assert np.isfinite(losses_of(tmp_path / "runs/whole")).all()
    assert any(line.get("valid/kl", -1) > 0 for line in read_metrics(tmp_path / "runs/whole/metrics.jsonl"))

    here = ("--checkpoint", "runs/whole")
    report = json.loads(ran(tmp_path, "score", "valid.txt", *here, "--samples", "3", "--json"))
    assert (report["lines"], report["samples"]) == (12, 3)
    assert report["ppl"] == pytest.approx(report["ppl_at_most_elbo"])
    assert report["ppl_at_most_importance_weighted"] <= report["ppl_at_most_elbo"]
    assert 0 < report["ppl_at_most_elbo_se"] < report["ppl_at_most_elbo"]
    assert report["ppl_at_most_importance_weighted_se"] > 0
    assert "upper bound" in report["ppl_is"]
    for_people = ran(tmp_path, "score", "valid.txt", *here, "--samples", "1")
    assert "at most" in for_people
    assert "(standard error -)" in for_people
    seeds = [ran(tmp_path, "score", "valid.txt", *here, "--json", "--seed", seed) for seed in ("1", "1", "2")]
    assert seeds[0] == seeds[1] != seeds[2]
    model = load(tmp_path / "runs" / "whole", device="cpu")
    lines = (tmp_path / "valid.txt").read_text().splitlines()
    assert np.array_equal(model.score(lines), model.score(lines))
    assert -model.score(lines).sum() == pytest.approx(report["nll"], rel=0.1)
    assert "give one --checkpoint" in refusal(tmp_path, "score", "valid.txt", *here, *here)
    paper = ran(tmp_path, "score", "valid.txt", *here, "--root", "nonterminals", "--json")
    assert json.loads(paper)["lines"] < 12  # one word has no probability

    text = b"the cat sees a dog\n"
    assert ran(tmp_path, "parse", "-", *here, text=text).startswith("(X")
    (tmp_path / "gold.mrg").write_text("(S (NP (DT the) (NN cat)) (VP (VBZ sees) (NP (DT a) (NN dog))))\n")
    assert 0 <= json.loads(ran(tmp_path, "evaluate", "gold.mrg", *here, "--json"))["s_f1"] <= 100
    drawn = [ran(tmp_path, "sample", "-n", "10", "--trees", *here, "--seed", seed) for seed in ("4", "4", "5")]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0].startswith("(")
    assert json.loads(ran(tmp_path, "info", *here, "--json"))["family"] == family
    if family == "sc_pcfg":
        assert ran(tmp_path, "parse", "-", *here, "--method", "viterbi", text=text).startswith("(N")
        assert ran(tmp_path, "sample", "--posterior", "valid.txt", "-n", "1", *here).startswith("(")
        assert "N0" in ran(tmp_path, "info", *here, "--grammar")
    else:
        assert "have no Viterbi trees" in refusal(tmp_path, "parse", "valid.txt", *here, "--method", "viterbi")
        assert "rules over pairs of children only" in refusal(tmp_path, "info", *here, "--grammar")
    assert "use normal(symbols, words)" in refusal(tmp_path, "train", "--config", config, "model.init=contexts(1, 1)")


def test_the_logged_divergence_is_the_mean_of_the_sentences(tmp_path):
    """Whatever the batches of the evaluation."""
    model = {"family": "sc_pcfg", "latent": 3, "encoder": 4}
    folder = training_runs.run(tmp_path, model=model, training={"max_steps": 1}, evaluation={"batch_cost": 100})
    (logged,) = [line["valid/kl"] for line in read_metrics(folder / "metrics.jsonl") if "valid/kl" in line]
    trained = load_trained(folder, device="cpu")
    lines = (tmp_path / "valid.txt").read_text().splitlines()
    with torch.no_grad():
        divergences = [
            trained.grammar.posterior(torch.tensor(ids), [len(ids)]).divergence().item()
            for ids in trained.vocabulary.tokenise(lines)
        ]
    assert logged == pytest.approx(np.mean(divergences), rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_explicit_ends_brackets_and_gold_trees(family, tmp_path):
    config = str(config_of(family, tmp_path))
    (tmp_path / "gold.mrg").write_text("(S (NP (DT the) (NN cat)) (VP (VBZ sees) (NP (DT a) (NN dog))))\n")
    ran(tmp_path, "train", "--config", config, "name=ends", "model.eos=explicit", "training.max_steps=2",
        f"evaluation.trees={tmp_path / 'gold.mrg'}")  # fmt: skip
    assert any("valid/s_f1" in line for line in read_metrics(tmp_path / "runs/ends/metrics.jsonl"))
    tree = ran(tmp_path, "parse", "-", "--checkpoint", "runs/ends", text=b"the cat sees a dog\n")
    assert tree.count("(T ") == 5
    ran(tmp_path, "train", "--config", config, "name=free")
    ran(tmp_path, "train", "--config", config, "name=right", "data.brackets=right-branching")
    losses = zip(*(losses_of(tmp_path / "runs" / name) for name in ("free", "right")), strict=True)
    free, right = next(both for both in losses if both[0] != both[1])  # a batch of one or two words has one tree
    assert right > free  # fewer trees count


def test_samples_are_refused_where_probabilities_are_exact(tmp_path):
    config = write_config(tmp_path, training={"max_steps": 1})
    assert lm_pcfg("train", "--config", str(config), cwd=tmp_path).returncode == 0
    message = refusal(tmp_path, "score", "valid.txt", "--checkpoint", "runs/small", "--samples", "2")
    assert "--samples is of compound models: the probabilities of family sn_pcfg are exact" in message


def test_the_weight_of_the_divergence_rises(tmp_path):
    family = families.get("sc_pcfg")
    model = family.section(family="sc_pcfg", nonterminals=3, kl_warmup_steps=4)
    weights = [family.dropout(model, seed=1, step=step, total_steps=9).latent.kl_weight for step in range(6)]
    assert weights == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert family.dropout(model, seed=1, step=2, total_steps=9).latent == Latent(1, 2, 0.75)


def test_zero_3_is_refused(tmp_path):
    settings = load_settings(config_of("sc_pcfg", tmp_path))
    engine = Engine(settings)
    engine.zero_stage = 3
    with pytest.raises(Exception, match="use DDP, or ZeRO 1 or 2"):
        Steps(settings, engine)


@pytest.mark.long
def test_zero_1_and_2_make_the_steps_of_plain_training(tmp_path):
    model = {"family": "sc_pcfg", "latent": 3, "encoder": 4, "dimension": 7}
    write_config(tmp_path, optimizer={"clip": 0.5}, inside={"precision": "fp64"}, model=model)
    processes.run_ranks(1, [str(processes.ROOT / "tests" / "zero_scenario.py"), str(tmp_path), "1", "2"])
    for run in ("zero1", "zero1-buckets", "zero2", "zero2-buckets"):
        assert_same_weights_and_moments(tmp_path, "plain", run)
        assert told(tmp_path, run)["skipped"] == told(tmp_path, "plain")["skipped"] == len(BROKEN)
