"""What a recipe may add to the paper's networks: dropout of coordinates, rotated children, a temperature, a bound."""

from __future__ import annotations

import pytest
import torch

from lm_pcfg.grammar.computation import Computation, backward_through
from lm_pcfg.grammar.dropout import Dropout, FeatureDropout, draw_kept
from lm_pcfg.grammar.families.sn_pcfg import SimplePCFG
from lm_pcfg.grammar.networks import LARGEST_RMS, ResidualPair, residual_network, shortened

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


# ---- residual pairs whose inputs are bounded ------------------------------------------------------------------------


def test_longer_rows_are_shortened_and_the_others_stay_bit_for_bit():
    x = torch.randn(6, 4, dtype=torch.float64) * torch.tensor([0.0, 0.1, 0.5, 5.0, 1e3, 1e18]).double()[:, None]
    lengths, after = x.norm(dim=1), shortened(x, 2.0)
    assert (lengths > 2).any()
    assert (lengths < 2).any()
    assert torch.equal(after[lengths <= 2], x[lengths <= 2])
    torch.testing.assert_close(after[lengths > 2], 2 * x[lengths > 2] / lengths[lengths > 2, None])
    for dtype in (torch.float32, torch.bfloat16):  # lengths are those of fp32: squares of bf16 would be too coarse
        narrow = x.to(dtype)
        assert shortened(narrow, 2.0).dtype == dtype
        expected = narrow.double().norm(dim=1).clamp(max=2.0)
        assert (shortened(narrow, 2.0).double().norm(dim=1) - expected).abs().max() < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("scale", [0.01, 30.0], ids=["within", "beyond"])
def test_gradients_of_a_bounded_pair(scale):
    torch.manual_seed(1)
    pair = ResidualPair(4, bounded=True).double()
    x = (scale * torch.randn(3, 4, dtype=torch.float64)).requires_grad_()
    added = torch.relu(pair.second(torch.relu(pair.first(x))))
    rms = added.square().mean(1, keepdim=True).sqrt()
    assert (rms > LARGEST_RMS).any() if scale > 1 else (rms < LARGEST_RMS).all()
    torch.testing.assert_close(pair(x), added * (LARGEST_RMS / rms).clamp(max=1.0) + x)
    assert torch.autograd.gradcheck(lambda x, *_: pair(x), (x, *pair.parameters()))


def test_a_bounded_pair_in_bf16_is_that_of_fp32():
    torch.manual_seed(0)
    pair, x = ResidualPair(16, bounded=True), 3 * torch.randn(8, 16)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        pair.zero_grad()
        given = x.detach().to(dtype).requires_grad_()
        out = pair(given)
        assert out.dtype == dtype
        out.float().sum().backward()
        found[dtype] = [out.detach(), given.grad, *(parameter.grad.clone() for parameter in pair.parameters())]
    for wide, narrow in zip(*found.values(), strict=True):
        assert ((narrow.float() - wide).norm() / wide.norm()).item() < 0.02


def test_bounded_pairs_add_to_features_and_do_not_multiply_them():
    """Where weights of all layers point the same way, a pair makes features a hundred times as long."""
    x, longest = torch.ones(2, 16, dtype=torch.float64), {}
    for bounded in (False, True):
        network = residual_network(16, 3, bounded).double()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.fill_(0.6 if parameter.dim() == 2 else 0.0)  # the largest singular value is 9.6
        longest[bounded] = network(x).norm(dim=1).max().item()
    assert longest[False] > 1e7
    assert longest[True] == pytest.approx(4 * 9.6 + 3 * 4 * LARGEST_RMS)


def test_a_bounded_model_is_the_released_one_until_rows_are_long():
    small, large = ({"parameterization": name, "init": "xavier_normal"} for name in ("released", "bounded"))
    for deviation, same in ((0.01, True), (3.0, False)):
        models = [
            SimplePCFG(nonterminals=N, preterminals=P, words=V, dimension=D, symbol_deviation=deviation, **options)
            for options in (small, large)
        ]
        for model in models:  # biases alone are long where there are so few coordinates
            model.load_state_dict({k: 0.0 * v if k.endswith("bias") else v for k, v in model.state_dict().items()})
        released, bounded = (model() for model in models)
        assert torch.equal(released.emission.features, bounded.emission.features) == same
        for name in ("root", "left", "right"):  # their networks have one layer
            assert torch.equal(getattr(released, name), getattr(bounded, name))


@pytest.mark.parametrize("rows", [0, 3])
def test_an_evaluation_tells_the_longest_feature(rows):
    model = make_model()
    with torch.no_grad():
        model.symbols[N:] = 0.1
        model.symbols[N + rows] = 50.0
    grammar = model()
    lengths = grammar.emission.features.norm(dim=1)
    assert lengths.argmax() == rows
    assert grammar.describe()["emission/longest_feature"] == pytest.approx(lengths[rows].item())
