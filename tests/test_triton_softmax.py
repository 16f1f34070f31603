"""The Triton kernels of the softmaxes against PyTorch: natively where there is a GPU, else in Triton's interpreter.

Without a GPU test_triton.py runs this file in a process of its own.
"""

from __future__ import annotations

import os

import pytest
import torch

from flash_inside.softmax import child_probabilities, children, log_normalizers, normalizers

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if GPU else "cpu"
pytestmark = pytest.mark.gpu if GPU else pytest.mark.skipif(not INTERPRETED, reason="run by test_triton.py")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """What is read before it is written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def rows_of(rows, columns, dtype=torch.float32, scale=3.0):
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return (torch.randn(rows, columns, generator=generator) * scale).to(dtype).to(DEVICE)


#: Rows that are one block and nothing of the others, up to three blocks, and four.
SIZES = [
    (1, 1),
    (3, 2),
    (2, 127),
    (5, 129),
    (2, 384),
    (2, 385),
    (2, 4096),
    (2, 4097),
    (1, 9001),
    (1, 12288),
    (1, 16401),
]


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_row_passes_equal_pytorch(rows, columns, monkeypatch):
    from flash_inside.triton import rows as kernels

    logits, gradient = rows_of(rows, columns), rows_of(rows, columns, scale=1.0)
    wide = logits.double()
    normalizers = torch.empty(rows, device=DEVICE)
    padded = rows_of(rows, columns + 5, scale=100.0)  # what lies beyond the columns counts for nothing
    padded[:, :columns] = logits
    kernels.log_sum_exp(padded, columns, normalizers)
    torch.testing.assert_close(normalizers.double(), wide.logsumexp(1), rtol=1e-6, atol=1e-6)

    probabilities = torch.empty_like(logits)
    factor = gradient[:, 0].contiguous()
    expected = torch.zeros_like(padded, dtype=torch.float64)
    expected[:, :columns] = wide.softmax(1) * factor[:, None].double()
    kernels.scaled_exp(padded, columns, normalizers, factor, padded)
    torch.testing.assert_close(padded.double(), expected, rtol=1e-4, atol=1e-12)

    p, g = wide.softmax(1), gradient.double()
    of_logits = p * (g - (p * g).sum(1, keepdim=True))
    for longest in (kernels.LONGEST_WHOLE_ROW, 1):  # a row is read once, or twice in blocks
        monkeypatch.setattr(kernels, "LONGEST_WHOLE_ROW", longest)
        kernels.softmax(logits, probabilities.fill_(torch.nan))
        torch.testing.assert_close(probabilities.double(), wide.softmax(1), rtol=1e-5, atol=1e-12)
        padded[:, :columns], padded[:, columns:] = logits, 100.0
        kernels.softmax_and_log_sum_exp(padded, columns, padded, normalizers.fill_(torch.nan))
        torch.testing.assert_close(padded[:, :columns].double(), wide.softmax(1), rtol=1e-5, atol=1e-12)
        torch.testing.assert_close(normalizers.double(), wide.logsumexp(1), rtol=1e-6, atol=1e-6)
        assert (padded[:, columns:] == 0).all()
        d_logits = torch.full_like(logits, torch.nan)
        kernels.softmax_gradient(probabilities, gradient, d_logits)
        torch.testing.assert_close(d_logits.double(), of_logits, rtol=1e-4, atol=1e-6)
        # what is common to a row does not come through, however much the probabilities sum to
        kernels.softmax_gradient(probabilities * 0.875, torch.full_like(gradient, 64.0), d_logits.fill_(torch.nan))
        assert d_logits.abs().max() <= 1e-4


@pytest.mark.parametrize("columns", [100, 300, 385, 500])
@pytest.mark.parametrize("largest", [0, -1])
def test_a_large_logit_anywhere_in_a_row(columns, largest):
    """The other 128 columns of its piece, and those of other pieces, would be e^200 without it as the maximum."""
    from flash_inside.triton import rows as kernels

    logits = rows_of(4, columns)
    for row, place in enumerate(range(0, columns, 128)):
        logits[row, min(place, columns - 1) if largest == 0 else min(place + 127, columns - 1)] = 200.0
    probabilities = torch.empty_like(logits)
    kernels.softmax(logits, probabilities)
    torch.testing.assert_close(probabilities.double(), logits.double().softmax(1), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("longest", [1 << 15, 1])
@pytest.mark.parametrize("columns", [5, 200, 385])
def test_rows_may_lie_anywhere_in_memory(columns, longest, monkeypatch):
    """Each table has a stride of its own, and nothing is written beside it."""
    from flash_inside.triton import rows as kernels

    monkeypatch.setattr(kernels, "LONGEST_WHOLE_ROW", longest)
    logits, gradient = (rows_of(3, columns + beside)[:, :columns] for beside in (1, 3))
    around = torch.full((3, columns + 7), -7.0, device=DEVICE)
    out = around[:, 2 : 2 + columns]
    kernels.softmax(logits, out)
    p = logits.double().softmax(1)
    torch.testing.assert_close(out.double(), p, rtol=1e-5, atol=1e-12)
    further = torch.full((3, columns + 12), -7.0, device=DEVICE)
    of_logits = further[:, 5 : 5 + columns]
    kernels.softmax_gradient(out, gradient, of_logits)
    g = gradient.double()
    torch.testing.assert_close(of_logits.double(), p * (g - (p * g).sum(1, keepdim=True)), rtol=1e-4, atol=1e-6)
    for table, first in ((around, 2), (further, 5)):
        assert (table[:, :first] == -7).all()
        assert (table[:, first + columns :] == -7).all()


def test_whole_functions_equal_fp64():
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(rows, 16, generator=generator).to(DEVICE).requires_grad_() for rows in (33, 101, 101)]
    wide = [table.detach().double().requires_grad_() for table in tables]

    def weighted(function, inputs):
        outputs = function(*inputs)
        weights = [torch.arange(output.numel(), device=DEVICE).view_as(output) % 7 for output in outputs]
        total = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
        return outputs, torch.autograd.grad(total, inputs)

    for function, count in (
        (lambda a, b: [log_normalizers(a, b, largest_block=1000)], 2),
        (lambda *three: child_probabilities(*three, largest_block=1000)[:2], 3),
    ):
        ours, theirs = weighted(function, tables[:count]), weighted(function, wide[:count])
        for a, b in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
            assert (a.double() - b).norm() <= 1e-5 * b.norm()


def test_bf16_probabilities_and_their_gradients(monkeypatch):
    """What training runs: logits in fp16, probabilities in bf16, wide gradients at the entrances."""
    types, product = [], children.product
    monkeypatch.setattr(children, "product", lambda a, b, result: types.append(result) or product(a, b, result))
    tables = [rows_of(n, 16, scale=1.0).requires_grad_() for n in (33, 70, 70)]
    wide = [table.detach().double().requires_grad_() for table in tables]
    left, right, *entrances = child_probabilities(*tables, dtype=torch.bfloat16, precision="bf16", largest_block=1000)
    assert left.dtype == right.dtype == torch.bfloat16
    assert set(types) == {torch.float16}
    assert [tuple(entrance.shape) for entrance in entrances] == [(33, 70)] * 2
    dense = [(wide[0] @ table.T).softmax(1) for table in wide[1:]]
    for ours, truth in zip((left, right), dense, strict=True):
        assert (ours.double() - truth).norm() <= 2e-2 * truth.norm()
    weights = 64 + rows_of(33, 70, scale=1.0)  # what is common to a row must not come through
    gradients = torch.autograd.grad(entrances, tables, [weights, weights])
    truths = torch.autograd.grad(dense, wide, [weights.double(), weights.double()])
    for a, b in zip(gradients, truths, strict=True):
        assert (a.double() - b).norm() <= 5e-2 * b.norm()


@pytest.mark.parametrize("kept", [True, False])
def test_bf16_normalizers(kept, monkeypatch):
    monkeypatch.setattr(normalizers, "KEPT_FROM", dict.fromkeys(("cpu", "cuda"), 1 if kept else 1 << 40))
    tables = [rows_of(n, 16, scale=1.0).requires_grad_() for n in (33, 70)]
    wide = [table.detach().double().requires_grad_() for table in tables]
    weights = rows_of(1, 33, scale=1.0)[0]
    ours = log_normalizers(*tables, precision="bf16", largest_block=1000)
    truth = torch.logsumexp(wide[0] @ wide[1].T, 1)
    torch.testing.assert_close(ours.double(), truth, rtol=0, atol=5e-2)
    gradients = torch.autograd.grad(ours @ weights, tables)
    for a, b in zip(gradients, torch.autograd.grad(truth @ weights.double(), wide), strict=True):
        assert (a.double() - b).norm() <= 3e-2 * b.norm()
