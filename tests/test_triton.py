"""The Triton kernels against log space: natively where there is a GPU, else in Triton's interpreter.

The interpreter must be chosen before the kernels are imported, and would change every other test of the process: so
without a GPU one test runs this file again in a process of its own, where TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import flash_inside
import interpreter
from flash_inside import ResidentRules, Rules
from grammars import random_emissions, random_rules, rules_that_lose_a_row, rules_with_a_faint_split

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if GPU else "cpu"
runs_kernels = pytest.mark.gpu if GPU else pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")


if INTERPRETED:
    interpreter.speed_up()


@pytest.mark.skipif(GPU or INTERPRETED, reason="the kernels run in this process")
@pytest.mark.parametrize("tests", ["not long", pytest.param("long", marks=pytest.mark.kernels)])
def test_in_the_interpreter(tests):
    others = ("softmax", "dropout", "per_sentence", "prefixes", "forward", "graph_layouts", "residual", "factored")
    files = [__file__, *(str(Path(__file__).with_name(f"test_triton_{name}.py")) for name in others)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-m", tests]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


@pytest.fixture(autouse=True)
def poisoned_memory():
    """What is read before it is written is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def cut_rows(monkeypatch):
    """Small or large blocks in place of those tuned for a GPU."""
    from flash_inside.triton import chart as triton_chart
    from flash_inside.triton.chart import Blocks

    def cut(columns: int, splits: int) -> None:
        monkeypatch.setattr(triton_chart, "split_sum_blocks", lambda n: Blocks(columns, splits, 4))
        monkeypatch.setattr(triton_chart, "outside_blocks", lambda n: Blocks(columns, splits, 4))

    return cut


def gradients(rules, emissions, lengths, weight, precision, backend, inside=flash_inside.inside, **options):
    inputs = [tensor.clone().requires_grad_() for tensor in (*rules, emissions)]
    log_z = inside(Rules(*inputs[:3]), inputs[3], lengths, precision, backend, **options)
    possible = torch.where(log_z.isinf(), 0.0, log_z)
    return log_z.detach().double(), torch.autograd.grad((possible * weight).sum(), inputs)


def compare(
    n, p, lengths, *, precision="fp32", root="all", spread=1.0, seed=0, tolerance=(1e-6, 1e-5), inside=None, **options
):
    """Log Z, and every gradient as expected counts, against fp64 log space on the same rounded tensors."""
    rules_type = torch.bfloat16 if precision == "bf16" else torch.float32
    rules = Rules(*(t.to(DEVICE) for t in random_rules(n, p, root=root, spread=spread, seed=seed, dtype=rules_type)))
    emissions = random_emissions(sum(lengths), p, spread=spread, seed=seed, dtype=torch.float32).to(DEVICE)
    weight = torch.linspace(0.5, 2.0, len(lengths)).to(DEVICE)
    ours = gradients(rules, emissions, lengths, weight, precision, "triton", inside or flash_inside.inside, **options)
    wide = Rules(*(t.double() for t in rules))
    truth = gradients(wide, emissions.double(), lengths, weight, "fp64", "reference", **options)
    allowed = tolerance[0] * torch.maximum(truth[0].abs(), torch.tensor(lengths, dtype=torch.float64, device=DEVICE))
    assert torch.equal(ours[0].isinf(), truth[0].isinf())
    possible = ~truth[0].isinf()
    assert ((ours[0] - truth[0]).abs() <= allowed)[possible].all()
    for probability, got, want in zip((*wide, torch.ones((), device=DEVICE)), ours[1], truth[1], strict=True):
        assert got.isfinite().all()
        assert ((got.double() - want) * probability).norm() <= tolerance[1] * (want * probability).norm() + 1e-12


@runs_kernels
@pytest.mark.parametrize("root", ["all", "nonterminals"])
@pytest.mark.parametrize(
    ("n", "p", "lengths"),
    [(1, 1, [1]), (1, 3, [3, 1, 2]), (7, 5, [2, 9, 1, 3]), (32, 31, [3, 1, 4]), (100, 65, [2, 3])],
    ids=str,
)
def test_every_output_and_gradient(n, p, lengths, root):
    compare(n, p, lengths, root=root)


BRACKETS = {1: [], 3: [(1, 3)], 6: [(0, 2), (2, 6), (3, 5)], 9: [(0, 9), (1, 8), (1, 4), (5, 8)]}


@runs_kernels
@pytest.mark.parametrize(("precision", "columns"), [("fp32", 16), ("fp32", 4), ("bf16", 16)])
def test_trees_that_cross_brackets_do_not_count(precision, columns, cut_rows):
    """In one block of a row and in several, and with what rounding leaves of short sentences."""
    cut_rows(columns, 2)
    lengths = [6, 9, 1, 3, 6]
    limits = np.concatenate([flash_inside.span_limits(BRACKETS[length], length) for length in lengths])
    statistics = flash_inside.Statistics()
    tolerance = (1e-6, 1e-5) if precision == "fp32" else (2e-3, 2e-2)
    compare(7, 5, lengths, precision=precision, tolerance=tolerance, limits=limits, statistics=statistics)
    assert statistics.recomputed == 0


@runs_kernels
@pytest.mark.long
@pytest.mark.parametrize(
    ("n", "lengths"), [(7, [33, 2]), (32, [31, 1]), (1, [63]), (7, [65])], ids=lambda value: f"{value}"
)
def test_long_sentences(n, lengths, cut_rows):
    cut_rows(32, 64)  # wide blocks: the interpreter's time is the number of its steps
    compare(n, n + 2, lengths)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="hours in the interpreter")
@pytest.mark.parametrize("n", [1, 7, 32, 100])
def test_all_lengths_natively(n):
    lengths = [1, 2, 3, 31, 33, 63, 65]
    for some in (lengths, *([length] for length in lengths)):
        compare(n, n + 2, some)
    compare(n, n + 2, lengths, precision="tf32", tolerance=(1e-4, 2e-3))


@runs_kernels
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_word_sentences_are_recomputed_without_the_rules(precision, monkeypatch):
    """S -> T with 1e-60 in all, as a young grammar has it: fp32 does not hold that, but fp64 rules are not needed."""
    fine = random_rules(4, 5, seed=6)
    root = torch.cat((fine.root[:4], fine.root[4:] * 1e-60))
    rules = Rules((root / root.sum()).to(DEVICE), *(t.float().to(DEVICE) for t in fine[1:]))
    lengths, emissions = [1, 3, 1], random_emissions(5, 5, seed=6, dtype=torch.float32).to(DEVICE)
    weight = torch.tensor([1.0, -2.0, 0.5], device=DEVICE)
    truth = gradients(Rules(*(t.double() for t in rules)), emissions.double(), lengths, weight, "fp64", "reference")
    statistics = flash_inside.Statistics()

    def inside(*arguments):
        return flash_inside.inside(*arguments, statistics)

    def refuse(*_):
        raise AssertionError("the rules were brought to fp64")

    monkeypatch.setattr("flash_inside.scaled.inside", refuse)
    ours = gradients(rules, emissions, lengths, weight, precision, "triton", inside)
    assert statistics.recomputed == 2
    torch.testing.assert_close(ours[0], truth[0], rtol=1e-6, atol=0)
    for probability, got, want in zip((*rules, torch.ones((), device=DEVICE)), ours[1], truth[1], strict=True):
        assert ((got - want) * probability).norm() <= 1e-5 * (want * probability).norm()


@runs_kernels
@pytest.mark.parametrize("few", [1024, 0], ids=["several splits at a time", "one by one"])
def test_rows_of_several_blocks(few, cut_rows, monkeypatch):
    monkeypatch.setattr("flash_inside.triton.chart.FEW_PROGRAMS", few)
    cut_rows(16, 2)
    compare(100, 33, [5, 1, 3])


@runs_kernels
@pytest.mark.parametrize("spread", [1.0, 10.0])
@pytest.mark.parametrize("columns", [32, 64])
def test_bf16_chart(spread, columns, cut_rows, monkeypatch):
    """A chart in bf16, which a grammar as small as this one does not get otherwise. The interpreter cuts bits off where
    a GPU rounds, hence the tolerance."""

    monkeypatch.setattr("flash_inside.precision.LARGEST_FP32_CHART", 0)
    cut_rows(columns, 4)
    for most_words in (0, 4):  # none, and the last two, are computed with what rounding left
        monkeypatch.setattr("flash_inside.precision.MOST_WORDS_OF_SHORT", most_words)
        compare(33, 40, [5, 1, 3], precision="bf16", spread=spread, tolerance=(1e-2, 5e-2))


@runs_kernels
@pytest.mark.parametrize("columns", [32, 64])
@pytest.mark.parametrize(
    "spread", [1.0, 10.0, *(pytest.param(spread, marks=pytest.mark.long) for spread in (3.0, 5.0))]
)
def test_short_sentences_are_precise_in_bf16(spread, columns, cut_rows, monkeypatch):
    """Without what rounding left, errors of log Z are ten to a hundred times as large."""

    monkeypatch.setattr("flash_inside.precision.LARGEST_FP32_CHART", 0)
    cut_rows(columns, 4)
    compare(33, 40, [4, 1, 3, 2, 3], precision="bf16", spread=spread, tolerance=(2e-5, 5e-2))


@runs_kernels
def test_the_first_gradients_of_resident_rules_lie_in_their_memory_and_later_ones_are_added():
    leaves = [tensor.to(DEVICE).requires_grad_() for tensor in random_rules(7, 9, dtype=torch.float32)]
    memory = [torch.full_like(leaf, torch.nan) for leaf in leaves[1:]]
    rules, total = ResidentRules(*leaves, gradient_memory=(memory[0], memory[1])), 0
    for lengths in ([2, 3], [4, 1]):
        emissions = random_emissions(5, 9, seed=lengths[0], dtype=torch.float32).to(DEVICE)
        flash_inside.inside_unchecked(rules, emissions, lengths, "fp32", "triton")[0].sum().backward()
        alone = flash_inside.inside(rules, emissions, lengths, "fp32", "triton").sum()
        total = total + torch.stack(torch.autograd.grad(alone, leaves[1:]))
        assert torch.equal(torch.stack([leaf.grad for leaf in leaves[1:]]), total)
        assert [leaf.grad.data_ptr() for leaf in leaves[1:]] == [part.data_ptr() for part in memory]


@runs_kernels
def test_span_marginals():
    lengths = [4, 1, 6]
    rules = Rules(*(t.float().to(DEVICE) for t in random_rules(7, 9)))
    emissions = random_emissions(11, 9, dtype=torch.float32).to(DEVICE)
    ours = flash_inside.span_marginals(rules, emissions, lengths, "fp32", "triton")
    truth = flash_inside.span_marginals(rules, emissions, lengths, "fp64", "reference")
    for got, want in zip(ours, truth, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)


@runs_kernels
def test_impossible_sentences_have_minus_infinity_and_a_zero_gradient():
    rules = Rules(*(t.float().to(DEVICE) for t in random_rules(4, 5, root="nonterminals")))
    lengths = [3, 1, 4]  # a nonterminal never emits one word
    emissions = random_emissions(8, 5, dtype=torch.float32).to(DEVICE)
    emissions[5] = float("-inf")  # no preterminal emits this word of the last sentence
    statistics = flash_inside.Statistics()
    inputs = [tensor.clone().requires_grad_() for tensor in (*rules, emissions)]
    log_z = flash_inside.inside(Rules(*inputs[:3]), inputs[3], lengths, "fp32", "triton", statistics)
    assert log_z.isinf().tolist() == [False, True, True]
    assert statistics.recomputed == 0  # impossible by structure: nothing to recompute
    log_z.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in inputs)
    assert not inputs[3].grad[3:].any()
    tables = flash_inside.span_marginals(rules, emissions, lengths, "fp32", "triton")
    assert [table.sum().item() for table in tables] == pytest.approx([5, 0, 0], abs=1e-5)


@runs_kernels
def test_what_leaves_the_range_is_recomputed():
    """Logits of standard deviation 30: nothing wrong, nothing infinite, and some sentences are indeed recomputed."""
    statistics = flash_inside.Statistics()
    lengths = [5, 4, 6, 3]
    for seed in range(4):
        rules = Rules(*(t.float().to(DEVICE) for t in random_rules(16, 32, spread=30.0, seed=seed)))
        emissions = random_emissions(sum(lengths), 32, spread=30.0, seed=seed, dtype=torch.float32).to(DEVICE)
        ours = flash_inside.inside(rules, emissions, lengths, "fp32", "triton", statistics).double()
        wide = Rules(*(t.double() for t in rules))
        truth = flash_inside.inside(wide, emissions.double(), lengths, "fp64", "reference")
        torch.testing.assert_close(ours, truth, rtol=1e-6, atol=1e-5)
    assert 0 < statistics.recomputed < statistics.sentences


@runs_kernels
def test_a_row_that_underflows_as_a_whole_is_noticed():
    rules, emissions = rules_that_lose_a_row(1e-37, 1e-25, 1e-30, 1e-30)
    rules, emissions = Rules(*(t.to(DEVICE) for t in rules)), emissions.to(DEVICE)
    statistics = flash_inside.Statistics()
    ours = flash_inside.inside(rules, emissions, [3], "fp32", "triton", statistics).double()
    wide = Rules(*(t.double() for t in rules))
    truth = flash_inside.inside(wide, emissions.double(), [3], "fp64", "reference")
    torch.testing.assert_close(ours, truth, rtol=1e-6, atol=0)
    assert statistics.recomputed == 1


@runs_kernels
@pytest.mark.parametrize(("inner", "outer"), [(1e-10, 1e-22), (1e-11, 1e-23), (5.6e-12, 1e-23)])
def test_a_split_whose_coefficient_is_below_the_smallest_number_counts(inner, outer):
    rules, emissions = rules_with_a_faint_split(inner, outer)
    rules, emissions = Rules(*(t.to(DEVICE) for t in rules)), emissions.to(DEVICE)
    wide, weight = Rules(*(t.double() for t in rules)), torch.ones(1, device=DEVICE)
    ours = gradients(rules, emissions, [4], weight, "fp32", "triton")
    truth = gradients(wide, emissions.double(), [4], weight, "fp64", "reference")
    torch.testing.assert_close(ours[0], truth[0], rtol=1e-6, atol=0)
    for probability, got, want in zip((*wide, torch.ones((), device=DEVICE)), ours[1], truth[1], strict=True):
        assert ((got.double() - want) * probability).norm() <= 1e-5 * (want * probability).norm()


@runs_kernels
def test_errors_do_not_add_up_along_a_tree_whose_spans_are_all_alike(cut_rows):
    """A -> T A, each time of probability exp(-20): with coefficients of fp32 exponents counts were off by 4e-6."""
    cut_rows(16, 32)
    left = torch.tensor([[-40.0, -10.0, 0.0]]).softmax(-1)
    right = torch.tensor([[-10.005, -10.0, 0.0]]).softmax(-1)
    rules = Rules(torch.ones(1, device=DEVICE), left.to(DEVICE), right.to(DEVICE))
    emissions = torch.tensor([[-2.0, float("-inf")]], device=DEVICE).expand(24, 2)
    wide, weight = Rules(*(t.double() for t in rules)), torch.ones(1, device=DEVICE)
    ours = gradients(rules, emissions, [24], weight, "fp32", "triton")[1]
    truth = gradients(wide, emissions.double(), [24], weight, "fp64", "reference")[1]
    for probability, got, want in zip((*wide, torch.ones((), device=DEVICE)), ours, truth, strict=True):
        assert ((got.double() - want) * probability).norm() <= 3e-6 * (want * probability).norm()


@runs_kernels
@pytest.mark.parametrize(("n", "lengths"), [(7, [5, 1, 8]), (33, [4]), (5, [4] * 25)], ids=str)
def test_viterbi(n, lengths):
    rules = Rules(*(t.float().to(DEVICE) for t in random_rules(n, n + 4, spread=2.0)))
    emissions = random_emissions(sum(lengths), n + 4, spread=2.0, dtype=torch.float32).to(DEVICE)
    wide = Rules(*(t.double() for t in rules))
    ours = flash_inside.viterbi(rules, emissions, lengths, "fp32", "triton")
    truth = flash_inside.viterbi(wide, emissions.double(), lengths, "fp64", "reference")
    for (our_score, our_tree), (score, tree) in zip(ours, truth, strict=True):
        assert our_score == pytest.approx(score, rel=1e-6)
        assert our_tree == tree


@runs_kernels
def test_gradients_of_fp16_rules_are_as_large_as_fp16_can_hold():
    """Counts over small probabilities leave its range; the torch backend clamps them too."""
    rules = Rules(*(t.to(DEVICE) for t in random_rules(7, 5, spread=8.0, dtype=torch.float16)))
    emissions = random_emissions(5, 5, spread=8.0, dtype=torch.float32).to(DEVICE)
    weight = torch.ones(1, device=DEVICE)
    ours, truth = (gradients(rules, emissions, [5], weight, "fp32", backend)[1] for backend in ("triton", "torch"))
    for one, other in zip(ours, truth, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-5)


@runs_kernels
@pytest.mark.parametrize("spoilt", ["root", "left", "emissions"])
def test_nan_stays_nan(spoilt):
    """In a sentence of three words; one of two needs no rule of nonterminal children."""
    rules, emissions = random_rules(3, 4, dtype=torch.float32), random_emissions(5, 4, dtype=torch.float32)
    tensors = {**rules._asdict(), "emissions": emissions}
    tensors[spoilt].view(-1)[-1 if spoilt == "emissions" else 0] = float("nan")  # the last word is of the second
    log_z = flash_inside.inside(Rules(*(t.to(DEVICE) for t in rules)), emissions.to(DEVICE), [2, 3], "fp32", "triton")
    assert log_z.isnan().tolist() == [spoilt == "root", True]


@runs_kernels
@pytest.mark.parametrize("lengths", [[2, 3], [2, 1]], ids=str)
def test_a_sentence_that_cannot_be_used_leaves_the_others_their_gradients(lengths):
    """The last word is NaN: its sentence has no gradient, and the others have the one they have alone."""
    rules = random_rules(3, 4, dtype=torch.float32)
    emissions = random_emissions(sum(lengths), 4, dtype=torch.float32)
    emissions[-1, 1] = float("nan")

    def gradients_of(words, lengths):
        inputs = [tensor.clone().to(DEVICE).requires_grad_() for tensor in (*rules, words)]
        log_z, trusted = flash_inside.inside_unchecked(Rules(*inputs[:3]), inputs[3], lengths, "fp32", "triton")
        torch.where(trusted, log_z, 0.0).sum().backward()
        return trusted.tolist(), [tensor.grad for tensor in inputs]

    trusted, together = gradients_of(emissions, lengths)
    assert trusted == [True, False]
    _, alone = gradients_of(emissions[:2], [2])
    assert not together[3][2:].any()
    together[3] = together[3][:2]
    for got, want in zip(together, alone, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)


def passes_are_equal(n, p, lengths, precision, passes=2):
    """Log Z and every gradient of the same pass, bit by bit."""
    rules_type = torch.bfloat16 if precision == "bf16" else torch.float32
    rules = Rules(*(t.to(DEVICE) for t in random_rules(n, p, dtype=rules_type)))
    emissions = random_emissions(sum(lengths), p, dtype=torch.float32).to(DEVICE)
    weight = torch.linspace(0.5, 2.0, len(lengths)).to(DEVICE)
    runs = [gradients(rules, emissions, lengths, weight, precision, "triton") for _ in range(passes)]
    for log_z, found in runs:
        assert log_z.isfinite().all()
        assert torch.equal(log_z, runs[0][0])
        assert all(torch.equal(one, other) for one, other in zip(found, runs[0][1], strict=True))


@runs_kernels
@pytest.mark.parametrize(
    ("n", "p", "lengths", "precision"),
    [(16, 32, [7, 3, 5], "fp32"), (272, 288, [4, 1, 6, 2], "bf16")],  # the second has a chart in bf16
    ids=["fp32", "bf16"],
)
def test_two_backward_passes_are_bitwise_equal(n, p, lengths, precision):
    passes_are_equal(n, p, lengths, precision)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="hours in the interpreter")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_passes_of_a_batch_are_bitwise_equal_natively(precision):
    """As launched, as captured in a CUDA graph, and replayed."""
    lengths = [2, 40, 17, 33, 5, 28, 21, 3, 12, 38, 9, 24, 31, 19, 14, 26]
    passes_are_equal(1024, 2048, lengths, precision, passes=4)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs on a CPU")
def test_the_backend_is_refused_where_it_cannot_run_and_never_chosen_there():
    rules, emissions = random_rules(3, 4), random_emissions(3, 4)
    with pytest.raises(ValueError, match="needs CUDA tensors, not cpu"):
        flash_inside.inside(rules, emissions, [3], "fp32", "triton")
    with pytest.raises(ValueError, match="fp32, tf32 or bf16, not fp64"):
        flash_inside.inside(rules, emissions, [3], "fp64", "triton")
    assert flash_inside.inside(rules, emissions, [3], "fp32", "auto").device.type == "cpu"
