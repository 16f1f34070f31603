"""What a recipe may add to the paper's networks: dropout of coordinates, rotated children, a temperature."""

from __future__ import annotations

import pytest
import torch

from lm_pcfg.grammar.computation import Computation, backward_through
from lm_pcfg.grammar.dropout import Dropout, FeatureDropout, draw_kept
from lm_pcfg.grammar.families.sn_pcfg import SimplePCFG

N, P, V, D = 5, 7, 11, 6
ONES = torch.ones(400, 500)


def make_model(**options) -> SimplePCFG:
    return SimplePCFG(nonterminals=N, preterminals=P, words=V, dimension=D, symbol_deviation=0.5, **options).double()


def grammar_with(model: SimplePCFG, dropout: FeatureDropout):
    return model(Computation("fp64", dropout=Dropout(features=dropout)))


# ---- which coordinates are dropped ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_asked_for_fraction_is_dropped_and_the_rest_grows(rate):
    kept = FeatureDropout(rate)(ONES)
    deviation = (rate * (1 - rate) / ONES.numel()) ** 0.5
    assert abs((kept == 0).double().mean().item() - rate) < 5 * deviation
    assert torch.equal(kept[kept != 0].unique(), torch.tensor([1 / (1 - rate)]))
    for dimension in (0, 1):  # neither a symbol nor a coordinate is dropped more often than others
        size = ONES.shape[dimension]
        fractions = (kept == 0).double().mean(dimension)
        assert (fractions - rate).abs().max() < 6 * (rate * (1 - rate) / size) ** 0.5


def test_seed_and_step_decide_alone():
    masks = [FeatureDropout.of_step(0.5, seed=s, step=n)(ONES) for s, n in ((1, 2), (1, 3), (2, 2))]
    torch.manual_seed(5)  # no generator of PyTorch's has a part in it
    assert torch.equal(masks[0], FeatureDropout.of_step(0.5, seed=1, step=2)(ONES))
    for number, one in enumerate(masks):
        for other in masks[number + 1 :]:
            assert abs((one == other).double().mean().item() - 0.5) < 0.01  # independent: half of them agree by chance


def test_the_choice_never_changes():
    """A run has to be resumable by later versions, on any device: these are the kept ones of the first sixteen."""
    kept = FeatureDropout.of_step(0.5, seed=7, step=123)(torch.ones(16))
    assert kept.nonzero().flatten().tolist() == [2, 4, 8, 11, 13, 14]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_drops_the_same():
    dropout = FeatureDropout.of_step(0.3, seed=1, step=2)
    assert torch.equal(dropout(ONES), dropout(ONES.cuda()).cpu())


# ---- grammars -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameterization", ["paper", "released"])
def test_feature_dropout_changes_the_emission_alone(parameterization):
    model = make_model(parameterization=parameterization)
    dropout = FeatureDropout.of_step(0.4, seed=1, step=1)
    plain, dropped = model(), grammar_with(model, dropout)
    for name in ("root", "left", "right"):
        torch.testing.assert_close(getattr(plain, name), getattr(dropped, name))
    features = dropout(plain.emission.features)
    assert (features == 0).any()
    expected = (features @ model.words.T).log_softmax(1).T
    torch.testing.assert_close(dropped.emission.log_probabilities(torch.arange(V)), expected)


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
    assert FeatureDropout()(ONES) is ONES


def test_temperature_divides_the_logits_of_words():
    plain, warm = make_model(), make_model(emission_temperature=2.5)
    logits = plain().emission.features @ plain.words.T
    torch.testing.assert_close(warm().emission.log_probabilities(torch.arange(V)), (logits / 2.5).log_softmax(1).T)
    torch.testing.assert_close(warm().left, plain().left)


@pytest.mark.parametrize("rotated", [False, True])
def test_gradients_gathered_on_the_grammar_equal_plain_autograd(rotated):
    model = make_model(emission_temperature=0.8, rotated_children=rotated)
    kept = draw_kept(N, P, 0.3, seed=1, step=2)
    how = Computation("fp64", dropout=Dropout(kept, FeatureDropout.of_step(0.3, seed=1, step=2)))
    batches = [(torch.tensor([1, 4, 4, 0]), [3, 1]), (torch.tensor([2, 3, 5]), [3])]
    grammar = model(how)
    leaves = grammar.detached()
    for words, lengths in batches:
        leaves.log_likelihood(words, lengths, precision="fp64").sum().backward()
    backward_through(grammar, leaves).backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    plain = model(how)
    sum(plain.log_likelihood(*batch, precision="fp64").sum() for batch in batches).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-10, atol=1e-14, msg=name)
