"""The adapter for the LM evaluation harness: its interface, and answers beside next-word probabilities."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import lm_pcfg
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.inference.harness import HarnessModel
from lm_pcfg.inference.model import Model
from small_runs import train_small_runs

# The abstract methods of lm_eval.api.model.LM (0.4.13), and what they take
INTERFACE = {"loglikelihood": ["self", "requests"], "loglikelihood_rolling": ["self", "requests"],
             "generate_until": ["self", "requests"]}  # fmt: skip


def asked(*arguments: tuple) -> list[SimpleNamespace]:
    """Requests, as `lm_eval.api.instance.Instance` has them."""
    return [SimpleNamespace(args=one) for one in arguments]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds, explicit ends, pieces, a hidden Markov model and a dense PCFG."""
    return train_small_runs(tmp_path_factory.mktemp("harness"), ["one", "two", "ends", "pieces", "nhmm", "n_pcfg"])


def test_the_interface_is_that_of_the_harness():
    for name, parameters in INTERFACE.items():
        assert list(inspect.signature(getattr(HarnessModel, name)).parameters) == parameters


def test_it_inherits_together_with_the_class_of_the_harness(runs):
    api = pytest.importorskip("lm_eval.api.model")
    assert set(INTERFACE) == api.LM.__abstractmethods__

    class GrammarLM(HarnessModel, api.LM):
        pass

    model = GrammarLM(lm_pcfg.load(runs / "one"))
    assert (model.rank, model.world_size) == (0, 1)
    assert len(model.loglikelihood(asked(("the", " cat")))) == 1


@pytest.mark.parametrize("names", [("one",), ("one", "two"), ("nhmm",)])
def test_continuations_have_the_product_of_next_word_probabilities(runs, names):
    model = lm_pcfg.load(*(runs / name for name in names))
    model.precision = "fp64"
    pairs = [("the cat", " sees a dog"), ("", "the cat"), ("the zebra ", "sleeps"), ("the cat", " zebra"), ("the", "")]
    for (context, continuation), (log_p, is_greedy) in zip(
        pairs, HarnessModel(model).loglikelihood(asked(*pairs)), strict=True
    ):
        words, expected, greedy = context.split(), 0.0, True
        for word in continuation.split():
            following = model.log_probabilities(" ".join(words))
            (id,) = model.vocabulary.tokenise([word])[0]
            expected += following[id]
            greedy = greedy and np.argmax(following) == id and word != "zebra"
            words.append(word)
        assert log_p == pytest.approx(expected, rel=1e-5)
        assert is_greedy is bool(greedy)


def test_continuations_of_pieces(runs):
    model = lm_pcfg.load(runs / "pieces")
    ((log_p, _),) = HarnessModel(model).loglikelihood(asked(("the cat", " sees a dog")))
    (found,) = model.surprisal(["the cat sees a dog"])
    assert log_p == pytest.approx(-found.bits[2:].sum() * math.log(2), rel=1e-9)


def with_one_sentence(runs) -> Model:
    """A model of sentences of four words, hardly any but `the cat sees dog`: S -> P0 A, A -> P1 B, B -> P2 P3."""
    left, right = torch.zeros(2, 3, 7, dtype=torch.float64)
    left[[0, 1, 2], [3, 4, 5]] = right[[0, 1, 2], [1, 2, 6]] = 1.0
    root = torch.eye(7, dtype=torch.float64)[0]
    trained = lm_pcfg.load(runs / "one").grammars[0]
    words = [trained.vocabulary.words.index(word) for word in ("the", "cat", "sees", "dog")]
    embeddings = torch.zeros(len(trained.vocabulary), 4, dtype=torch.float64)
    embeddings[words, range(4)] = 10.0
    emission = Emission.of(torch.eye(4, dtype=torch.float64), embeddings)
    return Model([replace(trained, grammar=Grammar(root, left, right, emission))])


def test_what_is_generated_is_greedy(runs):
    harness = HarnessModel(with_one_sentence(runs))
    texts = harness.generate_until(asked(
        ("", {"until": ["\n"]}), ("the", {"max_gen_toks": 2}), ("a zebra ", {"until": "og"}),
        ("the", {"until": ["", "t s"]}), ("the cat sees dog", {}),
    ))  # fmt: skip
    assert texts == ["the cat sees dog", "cat sees", "sees d", "ca", ""]
    found = harness.loglikelihood(asked(
        ("the", " cat sees"), ("the", " cat dog"), ("a zebra", " sees"), ("the", " zebra"), ("the", "")
    ))  # fmt: skip
    assert [is_greedy for _, is_greedy in found] == [True, False, True, False, True]
    assert found[0][0] == pytest.approx(0.0, abs=1e-2)
    assert found[1][0] == pytest.approx(-10.0, abs=1e-2)


def test_it_stops_where_the_sentence_ends(runs):
    for name in ("one", "pieces", "nhmm"):
        model = lm_pcfg.load(runs / name)
        (text,) = HarnessModel(model).generate_until(asked(("the cat", {"until": [], "max_gen_toks": 6})))
        assert "<eos>" not in text
        if text and name != "pieces":
            assert HarnessModel(model).loglikelihood(asked(("the cat", text)))[0][1]


def test_explicit_ends_are_no_words(runs):
    """`<eos>` is never generated, and never the likeliest word beside which another is not greedy."""
    model = lm_pcfg.load(runs / "ends")
    context, words = "the cat", []
    (text,) = HarnessModel(model).generate_until(asked((context, {"max_gen_toks": 5})))
    while len(words) < 5:
        ((word, _),) = model.next_word(" ".join([context, *words]), most=1)
        if word == "<end>":
            break
        words.append(word)
    assert text.split() == words
    assert "<eos>" not in words
    if words and "<unk>" not in words:
        assert HarnessModel(model).loglikelihood(asked((context, text)))[0][1]


def test_texts_are_sentences_a_line(runs):
    model = lm_pcfg.load(runs / "one")
    text = "the cat sees a dog\n\na bird sleeps\n"
    found = HarnessModel(model).loglikelihood_rolling(asked((text,), ("",), ("the cat",)))
    scores = model.score(["the cat sees a dog", "a bird sleeps", "the cat"])
    assert found == pytest.approx([scores[0] + scores[1], 0.0, scores[2]], rel=1e-6)


def test_what_cannot_be_answered_is_refused_in_a_line(runs, monkeypatch):
    with pytest.raises(UserError, match="family n_pcfg has no next-word probabilities"):
        HarnessModel(lm_pcfg.load(runs / "n_pcfg"))
    model = lm_pcfg.load(runs / "one")
    with pytest.raises(UserError, match="do_sample"):
        HarnessModel(model).generate_until(asked(("the", {"do_sample": True})))
    monkeypatch.setattr(model, "longest_line", lambda: 3.0)
    with pytest.raises(UserError, match=r"a text of 4 words .* at most 3 fit into memory"):
        HarnessModel(model).loglikelihood(asked(("the cat", " sees the")))
    (text,) = HarnessModel(model).generate_until(asked(("the cat", {"until": []})))
    assert len(text.split()) <= 1


def test_a_context_of_probability_0_has_no_continuation(runs):
    harness = HarnessModel(with_one_sentence(runs))
    found = harness.loglikelihood(asked(("the cat sees dog a", " dog"), ("the cat sees dog", " a")))
    assert found == [(-math.inf, False), (-math.inf, False)]
    with pytest.raises(UserError, match="these words begin no sentence"):
        harness.generate_until(asked(("the cat sees dog a", {})))
