"""What a recipe may add to the paper's networks: dropout of coordinates, a smaller word table, a temperature."""

from __future__ import annotations

import pytest
import torch

from lm_pcfg.grammar.boundary import backward_through
from lm_pcfg.grammar.computation import Computation
from lm_pcfg.grammar.feature_dropout import FeatureDropout
from lm_pcfg.grammar.simple_pcfg import SimplePCFG
from lm_pcfg.grammar.state_dropout import draw_kept

N, P, V, D = 5, 7, 11, 6
ONES = torch.ones(400, 500)


def make_model(**options) -> SimplePCFG:
    return SimplePCFG(nonterminals=N, preterminals=P, words=V, dimension=D, symbol_deviation=0.5, **options).double()


def grammar_with(model: SimplePCFG, dropout: FeatureDropout):
    return model(None, Computation("fp64", dropout=dropout))


# ---- which coordinates are dropped ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_asked_for_fraction_is_dropped_and_the_rest_grows(rate):
    kept = FeatureDropout(feature_rate=rate).features(ONES)
    deviation = (rate * (1 - rate) / ONES.numel()) ** 0.5
    assert abs((kept == 0).double().mean().item() - rate) < 5 * deviation
    assert torch.equal(kept[kept != 0].unique(), torch.tensor([1 / (1 - rate)]))
    for dimension in (0, 1):  # neither a symbol nor a coordinate is dropped more often than others
        size = ONES.shape[dimension]
        fractions = (kept == 0).double().mean(dimension)
        assert (fractions - rate).abs().max() < 6 * (rate * (1 - rate) / size) ** 0.5


def test_seed_step_and_kind_decide_alone():
    base = FeatureDropout.of_step(0.5, 0.5, seed=1, step=2)
    masks = [base.features(ONES), base.embeddings(ONES, 0), base.embeddings(ONES, 1)]
    masks += [FeatureDropout.of_step(0.5, 0.5, seed=s, step=n).features(ONES) for s, n in ((1, 3), (2, 2))]
    torch.manual_seed(5)  # no generator of PyTorch's has a part in it
    assert torch.equal(masks[0], base.features(ONES))
    for number, one in enumerate(masks):
        for other in masks[number + 1 :]:
            assert abs((one == other).double().mean().item() - 0.5) < 0.01  # independent: half of them agree by chance


def test_the_choice_never_changes():
    """A run has to be resumable by later versions, on any device: these are the kept ones of the first sixteen."""
    kept = FeatureDropout.of_step(0, 0.5, seed=7, step=123).features(torch.ones(16))
    assert kept.nonzero().flatten().tolist() == [2, 4, 8, 11, 13, 14]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_drops_the_same():
    dropout = FeatureDropout.of_step(0.3, 0.3, seed=1, step=2)
    assert torch.equal(dropout.features(ONES), dropout.features(ONES.cuda()).cpu())


# ---- grammars -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameterization", ["paper", "released"])
def test_feature_dropout_changes_the_emission_alone(parameterization):
    model = make_model(parameterization=parameterization)
    dropout = FeatureDropout.of_step(0, 0.4, seed=1, step=1)
    plain, dropped = model(), grammar_with(model, dropout)
    for name in ("root", "left", "right"):
        torch.testing.assert_close(getattr(plain, name), getattr(dropped, name))
    features = dropout.features(plain.emission.features)
    assert (features == 0).any()
    expected = (features @ model.words.T).log_softmax(1).T
    torch.testing.assert_close(dropped.emission.log_probabilities(torch.arange(V)), expected)


def test_rule_dropout_changes_the_rules_alone():
    model = make_model(rotated_children=True)
    dropout = FeatureDropout.of_step(0, 0, 0.4, seed=1, step=1)
    plain, dropped = model(), grammar_with(model, dropout)
    torch.testing.assert_close(plain.root, dropped.root)
    for one, two in zip(plain.emission.tensors, dropped.emission.tensors, strict=True):
        torch.testing.assert_close(one, two)
    parents = dropout.parents(model.parent(model.symbols[:N]))
    assert (parents == 0).any()
    expected = (parents @ model.left_child(model.symbols, model.left_rotation(model.symbols)).T).softmax(1)
    torch.testing.assert_close(dropped.left, expected)


def test_embedding_dropout_is_a_grammar_of_other_embeddings():
    model = make_model()
    dropout = FeatureDropout.of_step(0.4, 0, seed=1, step=1)
    dropped = grammar_with(model, dropout)
    with torch.no_grad():
        nonterminals, preterminals = model.symbols.split([N, P])
        other = torch.cat((dropout.embeddings(nonterminals, 0), dropout.embeddings(preterminals, 1)))
    words = torch.tensor([1, 4, 4])
    dropped.log_likelihood(words, [3], precision="fp64").sum().backward()
    assert torch.equal(model.symbols.grad == 0, other == 0)
    with torch.no_grad():
        model.symbols.copy_(other)
    plain = model()
    pairs = zip((*plain.rules, *plain.emission.tensors), (*dropped.rules, *dropped.emission.tensors), strict=True)
    for one, two in pairs:
        torch.testing.assert_close(one, two)


def test_rotated_children_leave_the_other_weights_as_they_begin_and_no_symbol_its_own_child():
    sizes = {"nonterminals": 50, "preterminals": 100, "words": V, "dimension": 256, "symbol_deviation": 0.2}
    plain, rotated = SimplePCFG(**sizes), SimplePCFG(**sizes, rotated_children=True)
    weights = dict(rotated.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(weights[name], parameter), name
    for matrix in (rotated.left_rotation.weight, rotated.right_rotation.weight):
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(256), rtol=0, atol=1e-5)
    assert not torch.equal(rotated.left_rotation.weight, rotated.right_rotation.weight)
    own = [grammar.left.diagonal().mean().item() for grammar in (plain(), rotated())]
    assert own[0] > 0.9
    assert own[1] < 0.02  # 1 of 150 if all were alike


def test_no_dropout_is_the_same_tensor():
    assert FeatureDropout().features(ONES) is ONES
    assert FeatureDropout().embeddings(ONES, 1) is ONES


def test_a_smaller_word_table_is_taken_to_the_dimension_of_the_features():
    model = make_model(word_dimension=3)
    assert model.words.shape == (V, 3)
    embeddings = model.words @ model.word_projection.weight  # [V, d]
    features = model.emission_network(model.symbols[N:])
    expected = (features @ embeddings.T).log_softmax(1).T
    torch.testing.assert_close(model().emission.log_probabilities(torch.arange(V)), expected)


def test_temperature_divides_the_logits_of_words():
    plain, warm = make_model(), make_model(emission_temperature=2.5)
    logits = plain().emission.features @ plain.words.T
    torch.testing.assert_close(warm().emission.log_probabilities(torch.arange(V)), (logits / 2.5).log_softmax(1).T)
    torch.testing.assert_close(warm().left, plain().left)


def test_a_bias_adds_to_the_logits_of_words_and_begins_as_zipfs_law():
    model, plain = make_model(word_bias=True), make_model()
    zipf = -torch.log(torch.arange(V) + 2.7)
    torch.testing.assert_close(model.word_bias.detach(), zipf.to(model.word_bias.dtype))
    with torch.no_grad():
        model.word_bias.copy_(torch.linspace(-3, 2, V))
    logits = plain().emission.features @ plain.words.T + model.word_bias
    torch.testing.assert_close(model().emission.log_probabilities(torch.arange(V)), logits.log_softmax(1).T)
    torch.testing.assert_close(model().left, plain().left)


def test_smoothing_mixes_what_a_preterminal_emits_with_one_distribution_for_all():
    model, plain = make_model(emission_smoothing=0.25), make_model()
    for name, parameter in plain.named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], parameter), name
    with torch.no_grad():
        model.background.copy_(torch.linspace(-3, 2, V))
    softmax = (plain().emission.features @ plain.words.T).softmax(1)
    expected = 0.75 * softmax + 0.25 * model.background.softmax(0)
    torch.testing.assert_close(model().emission.log_probabilities(torch.arange(V)), expected.log().T)
    torch.testing.assert_close(model().emission.entropies(rows=2), -(expected * expected.log()).sum(1))


@pytest.mark.parametrize("more", [False, True])
def test_gradients_gathered_on_the_grammar_equal_plain_autograd(more):
    model = make_model(
        word_dimension=4, emission_temperature=0.8, word_bias=more, rotated_children=more,
        emission_smoothing=0.1 * more,
    )  # fmt: skip
    how = Computation("fp64", dropout=FeatureDropout.of_step(0.2, 0.3, 0.1, seed=1, step=2))
    kept = draw_kept(N, P, 0.3, seed=1, step=2)
    batches = [(torch.tensor([1, 4, 4, 0]), [3, 1]), (torch.tensor([2, 3, 5]), [3])]
    grammar = model(kept, how)
    leaves = grammar.detached()
    for words, lengths in batches:
        leaves.log_likelihood(words, lengths, precision="fp64").sum().backward()
    backward_through(grammar, leaves).backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    plain = model(kept, how)
    sum(plain.log_likelihood(*batch, precision="fp64").sum() for batch in batches).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-10, atol=1e-14, msg=name)
