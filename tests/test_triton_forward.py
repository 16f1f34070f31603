"""The Triton kernels of the forward algorithm against its torch operations: natively on a GPU, else interpreted.

Without a GPU test_triton.py runs this file in a process of its own.
"""

from __future__ import annotations

import math
import os

import pytest
import torch

from flash_inside import Statistics, forward
from flash_inside.forward import Chain
from test_forward import random_chain, random_emissions

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if GPU else "cpu"
pytestmark = pytest.mark.gpu if GPU else pytest.mark.skipif(not INTERPRETED, reason="run by test_triton.py")
LENGTHS = [3, 1, 5, 2, 5, 1]
#: Of log Z and of expected counts, relative in norm. bf16: the interpreter cuts bits off where a GPU rounds.
TOLERANCE = {"fp32": (1e-6, 1e-5), "tf32": (1e-4, 2e-3), "bf16": (3e-4, 1e-2) if GPU else (5e-3, 1e-2)}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """What is read before it is written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def all_in_bf16(monkeypatch):
    """Rows in bf16 for few states and words, too."""
    monkeypatch.setattr("flash_inside.precision.LARGEST_FP32_CHART", 0)
    monkeypatch.setattr("flash_inside.precision.MOST_WORDS_OF_SHORT", 0)


def on_device(chain: Chain) -> Chain:
    return Chain(chain.start.to(DEVICE), tuple(matrix.to(DEVICE) for matrix in chain.transition))


def results(chain, emissions, lengths, precision, backend):
    """log Z, expected counts, and how many sentences were recomputed."""
    start, *matrices, words = (tensor.clone().requires_grad_() for tensor in (*chain.tensors, emissions))
    statistics = Statistics()
    log_z = forward.log_likelihood(Chain(start, tuple(matrices)), words, lengths, precision, backend, statistics)
    weights = torch.linspace(0.5, 2.0, len(log_z), device=DEVICE)
    total = (weights * torch.where(log_z.isfinite(), log_z, 0.0)).sum()
    gradients = torch.autograd.grad(total, (start, *matrices, words))
    factors = (*chain.tensors, torch.ones((), device=DEVICE))
    counts = [factor.double() * gradient.double() for factor, gradient in zip(factors, gradients, strict=True)]
    return log_z.detach().double(), counts, statistics


def compare(chain, emissions, lengths=LENGTHS, precision="fp32"):
    """Both backends give the same: return it."""
    chain, emissions = on_device(chain), emissions.to(DEVICE)
    ours = results(chain, emissions, lengths, precision, "triton")
    theirs = results(chain, emissions, lengths, precision, "torch")
    log_z, count = TOLERANCE[precision]
    torch.testing.assert_close(ours[0], theirs[0], rtol=log_z, atol=log_z)
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert (a - b).norm() <= count * b.norm()
    assert ours[2] == theirs[2]
    return ours


@pytest.mark.parametrize("rank", [None, 5])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_kernels_equal_the_torch_operations(rank, precision, all_in_bf16):
    compare(
        random_chain(37, rank, dtype=torch.float32), random_emissions(17, 37, dtype=torch.float32), LENGTHS, precision
    )


@pytest.mark.parametrize(("states", "rank"), [(1, None), (128, None), (8200, 1)])
def test_rows_of_any_length(states, rank):
    """One state, one block, several blocks of which the last is not full."""
    lengths = [2, 1, 3]
    compare(random_chain(states, rank, dtype=torch.float32), random_emissions(6, states, dtype=torch.float32), lengths)


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [4]])
def test_one_word_and_one_sentence(lengths):
    compare(random_chain(9, dtype=torch.float32), random_emissions(sum(lengths), 9, dtype=torch.float32), lengths)


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize(("precision", "spread"), [("fp32", 10.0), ("fp32", 60.0), ("fp32", 1000.0), ("bf16", 60.0)])
def test_the_same_sentences_are_recomputed(rank, precision, spread, all_in_bf16):
    lengths = [5, 2, 1, 8]
    chain = random_chain(6, rank, spread=spread, dtype=torch.float32)
    chain = Chain(*(torch.where(tensor < 1e-30, 0.0, tensor) for tensor in chain.tensors[:1]),
                  tuple(torch.where(matrix < 1e-30, 0.0, matrix) for matrix in chain.transition))  # fmt: skip
    emissions = random_emissions(sum(lengths), 6, spread=3 * spread, dtype=torch.float32)
    found = compare(chain, emissions, lengths, precision)
    assert spread < 60.0 or found[2].recomputed > 0


def test_paths_that_are_lost_twice_are_found_again():
    chain = Chain(torch.tensor([0.5, 0.5], dtype=torch.float64), (torch.eye(2),))
    emissions = torch.tensor([[0.0, -120.0]] * 2 + [[-120.0, 0.0]] * 3)
    log_z, _, statistics = compare(chain, emissions, [5])
    assert log_z.item() == pytest.approx(-240.0 + math.log(0.5), rel=1e-6)
    assert statistics.recomputed == 1


def test_a_start_that_fp32_does_not_hold():
    chain = Chain(torch.tensor([1e-60, 1.0], dtype=torch.float64), (torch.eye(2),))
    compare(chain, torch.tensor([[0.0, -math.inf]] * 3), [1, 2])


def test_rows_of_zeros_and_nan():
    """No state has a word; the states that have it are not reached; NaN, which stays with its sentence."""
    chain = Chain(torch.tensor([1.0, 0.0], dtype=torch.float64), (torch.eye(2),))
    emissions = torch.zeros(9, 2)
    emissions[1] = emissions[3, 0] = -math.inf
    emissions[4, 0] = emissions[7, 0] = math.nan
    chain, emissions = on_device(chain), emissions.to(DEVICE).requires_grad_()
    log_z, trusted = {}, {}
    for backend in ("triton", "torch"):
        given = chain, emissions, [2, 2, 1, 1, 3], "fp32", backend
        log_z[backend], trusted[backend] = forward.log_likelihood(*given), forward.log_likelihood_unchecked(*given)[1]
    found = log_z["triton"]
    assert trusted["triton"].tolist() == trusted["torch"].tolist() == [True, False, False, True, False]
    torch.testing.assert_close(found, log_z["torch"], equal_nan=True)
    assert found[:2].tolist() == [-math.inf, -math.inf]
    assert found[3] == 0.0
    (gradient,) = torch.autograd.grad(found[torch.tensor([0, 1, 3], device=DEVICE)].sum(), emissions)
    assert gradient[:4].abs().max() == 0.0
    assert gradient[5].tolist() == [1.0, 0.0]


def test_posteriors_sum_to_one():
    chain, emissions = on_device(random_chain(7, 3)), random_emissions(6, 7).to(DEVICE)
    tensors = [emissions.clone().requires_grad_()]
    log_z = forward.log_likelihood(chain, tensors[0], [4, 2], "fp32", "triton")
    (posterior,) = torch.autograd.grad(log_z.sum(), tensors)
    torch.testing.assert_close(posterior.sum(1), torch.ones(6, dtype=torch.float64, device=DEVICE), rtol=1e-5, atol=0)


def test_fp64_has_no_kernels():
    chain, emissions = on_device(random_chain(3)), random_emissions(4, 3).to(DEVICE)
    with pytest.raises(ValueError, match="not fp64"):
        forward.log_likelihood(chain, emissions, [4], "fp64", "triton")


@pytest.mark.skipif(not GPU, reason="hours in the interpreter")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize(("states", "rank"), [(4096, None), (4001, None), (8192, 1024), (32768, 512)])
def test_large_models_natively(states, rank, precision):
    """... and "auto" means the kernels."""
    lengths = [40, 17, 32, 32, 20]
    chain = on_device(random_chain(states, rank, dtype=torch.float32))
    emissions = random_emissions(sum(lengths), states, spread=8.0, dtype=torch.float32).to(DEVICE)
    ours = compare(chain, emissions, lengths, precision)
    chosen = results(chain, emissions, lengths, precision, "auto")
    assert torch.equal(ours[0], chosen[0])
