"""The forward algorithm against enumeration of states, log space, and FlashInside on the same model as a grammar."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch

import flash_inside
from flash_inside import Rules, Statistics, forward, packing
from flash_inside.forward import Chain
from flash_inside.packing import steps_of
from flash_inside.precision import TOLERANCE
from grammars import raising

END = 0  # `<eos>` of the tiny models here
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


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "tf32", "bf16"])
def test_likelihood_is_that_of_all_sequences_of_states(rank, precision):
    chain, emissions = random_chain(3, rank), random_emissions(sum(LENGTHS), 3)
    statistics = Statistics()
    found = forward.log_likelihood(chain, emissions, LENGTHS, precision, statistics=statistics)
    assert statistics == Statistics(sentences=len(LENGTHS))
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


@pytest.mark.parametrize("rank", [None, 264])
def test_bf16(rank):
    """With more than 256 states and sentences of more than 16 words, rows are stored in bf16."""
    lengths = [20, 31, 17]
    chain = random_chain(272, rank, dtype=torch.bfloat16)
    emissions = random_emissions(sum(lengths), 272, spread=8.0, dtype=torch.float32)
    found = counts(lambda *given: forward.log_likelihood(*given, lengths, "bf16"), chain, emissions)
    exact = counts(lambda *given: forward.log_likelihood(*given, lengths, "fp64"), chain, emissions)
    log_z, count = TOLERANCE["bf16"]
    error = (found[0] - exact[0]).abs() / exact[0].abs()
    assert 0 < error.max() < log_z
    for own, true in zip(found[1], exact[1], strict=True):
        assert (own - true).norm() <= count * true.norm()


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
    statistics = Statistics()
    found = forward.log_likelihood(chain, emissions, [2, 2, 1, 1], statistics=statistics)
    assert statistics == Statistics(sentences=4, recomputed=2, recomputed_in_log_space=2)  # the two in the middle
    assert found[:2].tolist() == [-math.inf, -math.inf]
    assert found[2].isnan()
    assert found[3] == 0.0
    (gradient,) = torch.autograd.grad(found[torch.tensor([0, 1, 3])].sum(), emissions)
    assert gradient[:4].abs().max() == 0.0
    assert gradient[5].tolist() == [1.0, 0.0]


def test_no_gradient_goes_through_a_sentence_that_counts_for_nothing():
    """Whatever comes in, by log p = -inf of an impossible sentence or by a value that is not trusted, is left out."""
    chain = Chain(torch.tensor([0.5, 0.5], dtype=torch.float64), (torch.eye(2),))
    emissions = torch.zeros(6, 2)
    emissions[1] = -math.inf  # no state has this word
    emissions[2:4] = torch.tensor([[0.0, -300.0], [-900.0, 0.0]])  # state 1 is lost at the first word, and meant
    emissions.requires_grad_()
    log_z, trusted = forward.log_likelihood_unchecked(chain, emissions, [2, 2, 2], "fp32")
    assert trusted.tolist() == [True, False, True]
    assert log_z[0] == -math.inf
    incoming = torch.tensor([math.inf, 1.0, 1.0])
    (gradient,) = torch.autograd.grad(log_z, emissions, incoming, retain_graph=True)
    assert gradient.tolist() == [[0.0, 0.0]] * 4 + [[0.5, 0.5]] * 2


def test_a_sentence_does_not_depend_on_the_others():
    chain, emissions = random_chain(4, 3), random_emissions(sum(LENGTHS), 4)
    alone = [forward.log_likelihood(chain, words, [len(words)], "fp64") for words in emissions.split(LENGTHS)]
    assert torch.allclose(forward.log_likelihood(chain, emissions, LENGTHS, "fp64"), torch.cat(alone), rtol=1e-13)


def test_tables_of_the_same_lengths_are_kept_unless_they_are_large(monkeypatch):
    """... and serve training if they were made in inference mode."""
    lengths, device = (2, 9, 4), torch.device("cpu")
    chain, emissions = random_chain(3), random_emissions(15, 3).requires_grad_()
    with torch.inference_mode():
        expected = forward.log_likelihood(chain, emissions, lengths, "fp64")
    log_z = forward.log_likelihood(chain, emissions, lengths, "fp64")
    assert torch.autograd.grad(log_z.sum(), emissions)[0].sum().item() == pytest.approx(15)
    assert log_z.tolist() == expected.tolist()
    assert steps_of(lengths, device) is steps_of(lengths, device)
    monkeypatch.setattr(packing, "MOST_WORDS_KEPT", 14)
    assert steps_of(lengths, device) is not steps_of(lengths, device)


def test_factors_are_their_product():
    chain, emissions = random_chain(5, 3), random_emissions(sum(LENGTHS), 5)
    of_product = forward.log_likelihood(Chain(chain.start, (dense(chain),)), emissions, LENGTHS, "fp64")
    assert torch.allclose(forward.log_likelihood(chain, emissions, LENGTHS, "fp64"), of_product, rtol=1e-13)
    emissions.requires_grad_()
    for given, rank in ((chain, 3), (random_chain(5), 0)):  # without factors nothing lies between them
        log_z = forward.log_likelihood(given, emissions, LENGTHS, "fp64")  # what it keeps is freed with it
        kept = log_z.grad_fn.saved_tensors
        assert [tensor.shape[-1] for tensor in kept] == [5, rank, 5, rank, 5, len(LENGTHS)]


def test_posteriors_are_those_of_all_sequences():
    chain, emissions = random_chain(3), random_emissions(4, 3, spread=3.0)
    table = torch.zeros(4, 3, dtype=torch.float64)
    for states in product(range(3), repeat=4):
        p = chain.start[states[0]] * emissions[0, states[0]].exp()
        for place in range(1, 4):
            p *= dense(chain)[states[place - 1], states[place]] * emissions[place, states[place]].exp()
        table[torch.arange(4), torch.tensor(states)] += p
    assert torch.allclose(forward.posteriors(chain, emissions, [4], "fp64"), table / table[0].sum(), rtol=1e-12)
    emissions[3] = -math.inf
    statistics = Statistics()
    impossible = forward.posteriors(chain, emissions, [2, 2], "fp64", statistics)
    assert impossible.sum(1).tolist() == pytest.approx([1, 1, 0, 0])
    assert statistics == Statistics(sentences=2)


def test_inputs_that_cannot_be_meant_are_refused():
    chain, emissions = random_chain(3), random_emissions(4, 3)
    for bad, lengths, options, message in (
        (chain, [3], {}, r"emissions must be \[3, 3\]"),
        (chain, [4, 0], {}, "length below 1"),
        (Chain(chain.start[:2], chain.transition), [4], {}, r"start must be \[S\]"),
        (Chain(chain.start[None], chain.transition), [4], {}, r"start must be \[S\]"),
        (Chain(chain.start, ()), [4], {}, r"transition \[S, S\] or two factors"),
        (Chain(chain.start, (torch.ones(3, 2), torch.ones(3, 2))), [4], {}, r"not \[3\] and \[3, 2\], \[3, 2\]"),
        (Chain(chain.start.to("meta"), chain.transition), [4], {}, r"not on \['cpu', 'meta'\]"),
        (chain, [4], {"backend": "reference", "precision": "tf32"}, "fp64 or fp32, not tf32"),
        (chain, [4], {"backend": "cuda"}, "has no forward algorithm"),
        (chain, [4], {"backend": "triton"}, "needs CUDA tensors"),
        (chain, [4], {"precision": "int8"}, "unknown precision"),
    ):
        with pytest.raises(ValueError, match=message):
            forward.log_likelihood(bad, emissions, lengths, **options)
    for precision, kind in (("fp64", torch.float64), ("bf16", torch.float32)):
        words = emissions[:0].clone().requires_grad_()
        start = chain.start.clone().requires_grad_()
        nothing = forward.log_likelihood(Chain(start, chain.transition), words, [], precision)
        assert (nothing.shape, nothing.dtype) == ((0,), kind)
        assert not torch.autograd.grad(nothing.sum(), (start, words))[0].any()
        log_z, trusted = forward.log_likelihood_unchecked(chain, emissions[:0], [], precision)
        assert log_z.shape == trusted.shape == (0,)
    log_z, trusted = forward.log_likelihood_unchecked(chain, emissions, [1, 3], "fp64", "reference")
    assert trusted.tolist() == [True, True]
    assert torch.equal(log_z, forward.log_likelihood(chain, emissions, [1, 3], "fp64", "reference"))


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


def test_the_backend_that_was_asked_for_computes(monkeypatch):
    chain, emissions = random_chain(3), random_emissions(4, 3)
    monkeypatch.setattr(forward, "in_log_space", raising("reference"))
    monkeypatch.setattr(forward, "_scaled", raising("torch"))
    for function in (forward.log_likelihood, forward.log_likelihood_unchecked):
        for backend in ("torch", "reference"):
            with pytest.raises(NotImplementedError, match=backend):
                function(chain, emissions, [4], "fp64", backend)


def test_log_space_computes_in_the_precision_that_was_asked_for():
    """... and in fp64 no gradient leaves the range of an fp32 tensor: by a start of 1e-40 it is 1e40."""
    chain, emissions = random_chain(2, dtype=torch.float32), torch.tensor([[0.0, -math.inf], [0.0, 0.0]])
    start = torch.tensor([1e-40, 1.0], requires_grad=True)
    for precision, kind in (("fp32", torch.float32), ("fp64", torch.float64)):
        log_z = forward.log_likelihood(Chain(start, chain.transition), emissions, [2], precision, "reference")
        assert log_z.dtype == kind
    assert torch.autograd.grad(log_z.sum(), start)[0].isfinite().all()


def test_a_second_derivative_is_refused():
    emissions, weight = random_emissions(4, 3).requires_grad_(), torch.ones(1, dtype=torch.float64, requires_grad=True)
    log_z = forward.log_likelihood(random_chain(3), emissions, [4], "fp64", "torch")
    (gradient,) = torch.autograd.grad((weight * log_z).sum(), emissions, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_short_sentence_makes_its_batch_fp32():
    """Up to 16 words rounding errors of bf16 do not average out."""
    chain = random_chain(272, dtype=torch.float32)
    emissions = random_emissions(37, 272, dtype=torch.float32)
    for lengths, same in (([20, 17], False), ([21, 16], True)):
        bf16, fp32 = (forward.log_likelihood(chain, emissions, lengths, precision) for precision in ("bf16", "fp32"))
        assert torch.equal(bf16, fp32) == same
