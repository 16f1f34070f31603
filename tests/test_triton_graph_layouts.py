"""The layout of a CUDA graph, which serves many batches: the same kernels in it, and how much room it has.

What a graph would replay is launched, natively where there is a GPU, else in the interpreter: test_triton.py runs this
file in a process of its own.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import flash_inside
from flash_inside import Rules
from flash_inside.packing import Layout
from grammars import random_emissions, random_rules
from test_triton import BRACKETS, DEVICE, compare, poisoned_memory, runs_kernels  # noqa: F401  (a fixture)


@runs_kernels
def test_a_graph_takes_the_brackets_of_each_batch():
    from flash_inside.triton import graphs

    n, p, single = 7, 5, torch.float32
    bucket = graphs.Bucket(0, n, p, n, "fp32", single, (single,) * 4, 4, 6, False, bracketed=True)
    graph = graphs.Graph(bucket, graphs.Arena(graphs.Graph.size(bucket), torch.device(DEVICE)))
    rules = Rules(*(t.to(DEVICE) for t in random_rules(n, p, root="nonterminals", dtype=single)))
    for lengths in ([6, 3, 6], [3, 6], [3, 3, 3, 6]):
        emissions = random_emissions(sum(lengths), p, dtype=single, seed=len(lengths)).to(DEVICE)
        limits = np.concatenate([flash_inside.span_limits(BRACKETS[length], length) for length in lengths])
        log_z, trusted, _ = graph.run(*rules, emissions, lengths, limits).results(len(lengths))
        truth = flash_inside.inside(rules, emissions, lengths, "fp32", "reference", limits=limits)
        torch.testing.assert_close(log_z, truth, rtol=1e-5, atol=0)
        assert trusted.all()


@runs_kernels
@pytest.mark.parametrize("copied", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_graphs_layout_serves_batches_that_do_not_fill_it(copied):
    """Fewer sentences than slots and fewer words than room: rows beyond the words must not count."""
    from flash_inside.triton import backend as triton_backend
    from flash_inside.triton import graphs

    made = {}

    def through_graph(rules, emissions, lengths, precision, backend):
        def find(rules, emissions, lengths, precision, storage, precise, bracketed):
            types = rules.root.dtype, rules.left.dtype, emissions.dtype, emissions.dtype
            shape, rules_at = (0, 7, 5, rules.root.shape[0]), None if copied else (0, 0)
            slots = {"sentences": 4, "words": 6, "precise": precise, "bracketed": bracketed, "rules_at": rules_at}
            bucket = graphs.Bucket(*shape, precision, storage, types, **slots)
            if bucket not in made:
                arena = graphs.Arena(graphs.Graph.size(bucket), emissions.device)
                made[bucket] = graphs.Graph(bucket, arena)
            return made[bucket]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graphs, "find", find)
            return triton_backend.inside(rules, emissions, lengths, precision).log_z

    compare(7, 5, [2, 5, 1], inside=through_graph)
    compare(7, 5, [6, 3, 4, 6], inside=through_graph, seed=1)
    assert len(made) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flash_inside.precision.LARGEST_FP32_CHART", 0)
        compare(7, 5, [2, 4, 1], precision="bf16", inside=through_graph, tolerance=(2e-5, 5e-2))
    made.clear()

    # The root in fp64, as the trainer gives it.
    fine = random_rules(7, 5)
    mixed = [fine.root.to(DEVICE), *(t.float().to(DEVICE) for t in fine[1:])]
    inputs = [tensor.requires_grad_() for tensor in mixed]
    words = random_emissions(6, 5, dtype=torch.float32).to(DEVICE)
    log_z = through_graph(Rules(*inputs), words, [4, 2], "fp32", "triton")
    want = flash_inside.inside(Rules(*inputs), words, [4, 2], "fp32", "torch")
    for got, truth in zip(
        torch.autograd.grad(log_z.sum(), inputs), torch.autograd.grad(want.sum(), inputs), strict=True
    ):
        torch.testing.assert_close(got, truth, rtol=1e-4, atol=1e-6)
    made.clear()

    # A batch that waits for its backward while another one is computed keeps its chart.
    rules = Rules(*(t.float().to(DEVICE).requires_grad_() for t in random_rules(7, 5)))
    emissions = random_emissions(5, 5, dtype=torch.float32).to(DEVICE)
    waiting = through_graph(rules, emissions, [5], "fp32", "triton")
    other = through_graph(rules, emissions, [2, 3], "fp32", "triton")
    other_gradient = torch.autograd.grad(other.sum(), rules.left)[0]
    gradient = torch.autograd.grad(waiting.sum(), rules.left)[0]
    for got, lengths in ((gradient, [5]), (other_gradient, [2, 3])):
        want = torch.autograd.grad(flash_inside.inside(rules, emissions, lengths, "fp32", "torch").sum(), rules.left)[0]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@runs_kernels
def test_a_graph_has_room_for_the_gradients_of_fp16_rules():
    """They are computed in fp32."""
    from flash_inside.triton import graphs
    from flash_inside.triton.gradients import Wanted

    n, p, wide = 16, 32, torch.float32
    bucket = graphs.Bucket(0, n, p, n, "fp32", wide, (wide, torch.float16, torch.float16, torch.float16), 2, 2, False)
    arena = graphs.Arena(graphs.Graph.size(bucket), torch.device(DEVICE))
    graph = graphs.Graph(bucket, arena)
    root, left, right = (t.to(DEVICE) for t in random_rules(n, p, root="nonterminals", dtype=torch.float16))
    emissions = random_emissions(4, p, dtype=torch.float32).half().to(DEVICE)
    held = graph.run(root.float(), left, right, emissions, [2, 2])
    ones = torch.ones(2, device=DEVICE)
    found = held.gradients(root.float(), left, right, ones, 4, Wanted(wide, wide, wide), None)
    assert (found.left * left).sum().item() == pytest.approx(2.0, rel=1e-3)  # one rule a sentence


def test_a_graph_has_room_for_gradients_wider_than_the_emissions():
    from flash_inside.triton import graphs

    rules = random_rules(3, 4, dtype=torch.float32)
    emissions = random_emissions(4, 4, dtype=torch.bfloat16).requires_grad_()
    emissions.grad_dtype = torch.float32
    bucket = graphs.bucket_of(rules, emissions, [2, 2], "fp32", torch.float32, False)
    assert bucket.types[2:] == (torch.float32, torch.bfloat16)


def test_layouts_of_graphs_and_batches_agree():
    """Equal lengths: the layout of a full graph is that of the batch."""
    layout = Layout([4] * 3)
    assert layout.alive == [0, 3, 3, 3, 3]
    assert layout.rows == 30


def test_charts_without_memory_for_a_graph_are_launched_and_that_is_said(monkeypatch):
    from flash_inside.triton import graphs

    class Full(graphs.Arena):
        def __init__(self, *_):
            raise torch.OutOfMemoryError("CUDA out of memory")

    rules = Rules(*random_rules(4, 6, root="nonterminals", dtype=torch.float32))
    bucket = graphs.bucket_of(rules, random_emissions(4, 6), [2, 2], "fp32", torch.float32, False)
    emissions = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(graphs, "bucket_of", lambda *_: bucket)
    monkeypatch.setattr(graphs, "Arena", Full)
    monkeypatch.setattr(graphs, "_graphs", {})
    monkeypatch.setattr(graphs, "_arenas", {})
    with pytest.warns(UserWarning, match="no memory for CUDA graphs of the charts"):
        assert graphs.find(rules, emissions, [2, 2], "fp32", torch.float32, False) is None
