"""CUDA graphs of the dense inside algorithm: replayed is bitwise launched. On a CPU they are emulated."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch

from flash_inside import dense, devices
from flash_inside.dense import PairRules, graphs, plan
from graph_emulation import capturing
from test_brackets import packed_limits, some_brackets

ROUNDS = 5  # launched; launched in memory of its own; forward captured; backward captured; both replayed
#: Equal lengths, unsorted ones, one-word sentences, one sentence, the shortest with a split.
BATCHES = ([5, 5, 5], [3, 6, 1, 4, 6], [7], [2, 2])


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Where graphs are captured; nothing is left of other tests."""
    graphs.clear()
    plan.clear()
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
    else:
        monkeypatch.setattr(graphs, "graphs_allowed", lambda _: devices._allowed)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(devices, "lasting_pool", lambda _: None)
        monkeypatch.setattr(devices, "capture", capturing(list))
    yield torch.device("cuda:0" if request.param == "cuda" else "cpu")
    graphs.clear()
    plan.clear()


def test_graphs_are_of_the_current_device_alone(monkeypatch):
    """A capture takes the streams of the current device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    allowed = [
        devices.graphs_allowed(SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))) for index in (0, 1)
    ]
    assert allowed == [True, False]


def some_inputs(lengths, device, *, seed, n=3, p=4, kind="plain", dtype=torch.float32):
    """Root, pairs and emissions. kind: "per sentence", "zeros" (of rules and emissions), "extreme" (leaves fp32)."""
    generator = torch.Generator().manual_seed(seed)
    sentences = (len(lengths),) if kind == "per sentence" else ()
    spread = 30.0 if kind == "extreme" else 1.0
    logits = spread * torch.randn(*sentences, n, (n + p) ** 2, dtype=torch.float64, generator=generator)
    pairs = logits.softmax(-1).unflatten(-1, (n + p, n + p))
    root = torch.randn(*sentences, n + p, dtype=torch.float64, generator=generator).softmax(-1)
    emissions = spread * torch.randn(sum(lengths), p, dtype=torch.float64, generator=generator)
    if kind == "zeros":
        pairs[pairs < pairs.median()] = 0.0
        emissions[emissions < 0] = -math.inf
    return [tensor.to(device).requires_grad_() for tensor in (root, pairs.to(dtype), emissions.to(dtype))]


def forward(inputs, lengths, precision, limits=None):
    return dense.inside_unchecked(PairRules(*inputs[:2]), inputs[2], lengths, precision, limits=limits)


def gradients(log_z, inputs):
    weights = torch.arange(1, len(log_z) + 1, device=log_z.device).to(log_z)
    return torch.autograd.grad(log_z, inputs, weights)


def computed(inputs, lengths, precision, limits=None):
    log_z, trusted = forward(inputs, lengths, precision, limits)
    return [log_z.detach(), trusted, *gradients(log_z, inputs)]


def launched(*arguments):
    before = devices.allow_graphs(False)
    try:
        return computed(*arguments)
    finally:
        devices.allow_graphs(before)


def assert_same(found, expected):
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), number


@pytest.mark.parametrize("kind", ["plain", "per sentence", "zeros", "extreme", "bracketed", "fp64", "tf32"])
def test_replayed_is_bitwise_launched(kind, device):
    precision = kind if kind in ("fp64", "tf32") else "fp32"
    dtype = torch.float64 if precision == "fp64" else torch.float32
    distrusted = 0
    for round in range(ROUNDS):
        for lengths in BATCHES if device.type == "cuda" else BATCHES[:2]:
            limits = None
            if kind == "bracketed":  # others in each round
                limits = packed_limits([some_brackets(length, round + b) for b, length in enumerate(lengths)], lengths)
            inputs = some_inputs(lengths, device, seed=round, kind=kind, dtype=dtype)
            found = computed(inputs, lengths, precision, limits)
            assert_same(found, launched(inputs, lengths, precision, limits))
            distrusted += int((~found[1]).sum())
    assert (distrusted > 0) == (kind == "extreme")
    for graph in graphs._graphs.values():
        assert graph.forward.graph is not None
        assert graph.backward.graph is not None
    assert graphs._graphs


def test_many_symbols_and_long_sentences(device):
    if device.type == "cpu":
        pytest.skip("for a GPU")
    lengths = [40, 38, 40, 31]
    for round in range(ROUNDS):
        for kind, (n, p) in {"plain": (64, 128), "per sentence": (30, 60)}.items():
            inputs = some_inputs(lengths, device, seed=round, n=n, p=p, kind=kind)
            assert_same(computed(inputs, lengths, "tf32"), launched(inputs, lengths, "tf32"))


def test_a_batch_that_waits_for_its_backward_keeps_its_chart(device):
    lengths = [4, 3]
    expected, waiting = [], []
    for round in range(ROUNDS + 1):
        inputs = some_inputs(lengths, device, seed=round)
        expected.append(launched(inputs, lengths, "fp32"))
        if round < ROUNDS - 2:  # until all is captured
            computed(inputs, lengths, "fp32")
            continue
        waiting.append((round, inputs, forward(inputs, lengths, "fp32")[0]))
    for round, inputs, log_z in waiting[::-1]:  # the last one is in the graph's memory, the others were copied
        assert_same(gradients(log_z, inputs), expected[round][2:])


def test_gradients_belong_to_the_caller_and_a_second_backward_is_right_or_refused(device):
    lengths, before = [4, 3], []
    for round in range(ROUNDS + 1):
        inputs = some_inputs(lengths, device, seed=round)
        expected = launched(inputs, lengths, "fp32")[2:]
        log_z, _ = forward(inputs, lengths, "fp32")
        if round:  # before that there is no graph, and autograd itself refuses a second one
            weights = torch.tensor([1.0, 2.0], device=device)
            first = torch.autograd.grad(log_z, inputs, 3 * weights, retain_graph=True)
            before.append((first, [gradient.clone() for gradient in first]))
        assert_same(gradients(log_z, inputs), expected)
    for found, as_they_were in before:
        assert_same(found, as_they_were)
    log_z, _ = forward(inputs, lengths, "fp32")
    torch.autograd.grad(log_z.sum(), inputs, retain_graph=True)
    forward(some_inputs(lengths, device, seed=99), lengths, "fp32")
    with pytest.raises(RuntimeError, match="a second backward"):
        torch.autograd.grad(log_z.sum(), inputs)


def test_lengths_that_come_once_get_no_graph_and_memory_is_bounded(device, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    for lengths in ([2], [3], [4]):
        inputs = some_inputs(lengths, device, seed=0)
        computed(inputs, lengths, "fp32")
        assert not any(key.lengths == tuple(lengths) for key in graphs._graphs)
        computed(inputs, lengths, "fp32")
    assert [key.lengths for key in graphs._graphs] == [(3,), (4,)]
    gc.disable()
    try:
        dropped = weakref.ref(graphs._graphs[graphs.Key(*next(iter(graphs._graphs)))])
        wide = some_inputs([4], device, seed=0, n=6, p=9)  # the memory of the rules has to grow
        for _ in range(2):
            computed(wide, [4], "fp32")
        assert dropped() is None  # without the garbage collector
    finally:
        gc.enable()
    assert len(graphs._graphs) == 1
    monkeypatch.setattr(graphs, "LARGEST_CHART", 10)
    for _ in range(2):
        computed(some_inputs([5], device, seed=0), [5], "fp32")
    assert len(graphs._graphs) == 1


def test_scores_without_gradients_and_training_share_a_graph(device):
    lengths = [4, 3]
    for round in range(ROUNDS):
        inputs = some_inputs(lengths, device, seed=round)
        expected = launched(inputs, lengths, "fp32")
        with torch.inference_mode():
            assert_same(forward(inputs, lengths, "fp32"), expected[:2])
        assert_same(computed(inputs, lengths, "fp32"), expected)


@pytest.mark.parametrize("captures", [0, 1])  # that there is memory for; the second is the backward's
def test_no_memory_for_graphs_is_said_once_and_changes_nothing(captures, device, monkeypatch):
    devices.lasting_pool("dense")  # has a graph of its own
    capture, met = devices.capture, []

    def no_memory(*arguments):
        met.append(arguments)
        if len(met) > captures:
            raise torch.OutOfMemoryError
        return capture(*arguments)

    monkeypatch.setattr(graphs, "_room", True)  # and as it was afterwards
    monkeypatch.setattr(devices, "capture", no_memory)
    inputs = some_inputs([4, 3], device, seed=0)
    expected = launched(inputs, [4, 3], "fp32")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(ROUNDS):
            assert_same(computed(inputs, [4, 3], "fp32"), expected)
    assert len(said) == 1
    assert len(met) == captures + 1
    assert "no memory for CUDA graphs" in str(said[0].message)


def test_on_a_cpu_nothing_is_captured():
    plan.clear()
    inputs = some_inputs([4, 3], torch.device("cpu"), seed=0)
    for _ in range(3):
        computed(inputs, [4, 3], "fp32")
    assert not graphs._graphs


def test_plans_are_kept_within_bounds(monkeypatch):
    plan.clear()
    cpu = torch.device("cpu")
    one = plan.plan_of([3, 2], cpu)
    assert plan.plan_of([3, 2], cpu) is one
    assert plan.plan_of([2, 3], cpu) is not one
    monkeypatch.setattr(plan, "MOST_BYTES", one.size)
    other = plan.plan_of([2, 2], cpu)
    assert plan.plan_of([2, 2], cpu) is other
    assert plan.plan_of([3, 2], cpu) is not one
    assert plan.plan_of([9, 9], cpu) is not plan.plan_of([9, 9], cpu)  # too large to be kept
    plan.clear()
