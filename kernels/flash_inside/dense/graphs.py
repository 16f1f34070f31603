"""CUDA graphs of the two passes: captured for the lengths of a batch, and replayed.

The passes are some 5,000 small operations, which take the host longer to launch than the GPU to compute. A batch that
has the lengths, symbols and number formats of an earlier one does the same operations on the same shapes, so it can
replay them, and its results are bitwise the same.

A graph reads its inputs from fixed memory, and writes there what the backward needs and what it found. Its other memory
is in a pool, which all graphs share: they never run at the same time. So are the rules, the largest of the inputs: all
graphs read them at one place, and write their counts over them. A batch that still waits for its backward when its
graph is needed again is copied out first.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from flash_inside.dense.plan import Plan
from flash_inside.dense.reference import columns_of
from flash_inside.dense.scaled import (
    Found,
    Gradients,
    Incoming,
    Inputs,
    Saved,
    backward_pass,
    compute_type,
    forward_pass,
)
from flash_inside.dense.tables import KINDS, PairTables
from flash_inside.devices import Replay, graphs_allowed

MOST_GRAPHS = 64
MOST_BYTES = 1 << 30  # of the memory of all graphs, without that of the rules
#: Rules or a chart of more bytes get no graph: products take longer than launches there, and a graph keeps its memory.
LARGEST_RULES, LARGEST_CHART = 1 << 30, 1 << 28


class Key(NamedTuple):
    """Batches with the same key do the same operations on the same shapes."""

    lengths: tuple[int, ...]
    device: torch.device
    pairs: torch.Size
    root: torch.Size
    emissions: torch.dtype
    precision: str
    bracketed: bool


class Graph:
    """The passes of a key, with the memory they read and write. Each is captured when it runs a second time."""

    def __init__(
        self, plan: Plan, root: Tensor, emissions: Tensor, allowed: Tensor | None, tables: PairTables, precision: str
    ):
        own_allowed = None if allowed is None else torch.empty_like(allowed)
        self.inputs = Inputs(tables, torch.empty_like(root), torch.empty_like(emissions), own_allowed)
        believed = torch.empty(len(plan.lengths), dtype=torch.bool, device=root.device)
        d_log_z = torch.empty(len(plan.lengths), dtype=compute_type(precision), device=root.device)
        self.incoming = Incoming(self.inputs.root, self.inputs.allowed, believed, d_log_z)
        self.plan, self.precision, self.memory = plan, precision, tables.of
        self.holder: weakref.ref[Held] | None = None  # whose chart is here
        # Nothing here may refer back to this object, so that its memory is free as soon as the graph is dropped.
        inputs, incoming, memory = self.inputs, self.incoming, self.memory
        self._results: list[tuple[Saved, Found]] = []
        self._gradients: list[Gradients] = []
        results, gradients = self._results, self._gradients

        def forward() -> None:
            new = forward_pass(plan, inputs, precision)
            if results:
                for old, of_this in zip(results[0], new, strict=True):
                    _copy(of_this, old)
            else:  # launched for the first time: this memory is not of the pool
                results.append(new)

        def backward() -> None:
            new = backward_pass(plan, results[0][0], incoming, precision, memory)
            if gradients:  # the tables are in the memory that was given
                _copy((new.root, new.emissions), (gradients[0].root, gradients[0].emissions))
            else:
                gradients.append(new)

        self.forward, self.launch_backward = Replay(forward, "dense"), backward
        self.backward = Replay(backward, "dense")

    @property
    def results(self) -> tuple[Saved, Found]:
        """Those of the batch that is here."""
        return self._results[0]

    def run(self, root: Tensor, pairs: Tensor, emissions: Tensor, allowed: Tensor | None) -> Held:
        previous = self.holder() if self.holder is not None else None
        if previous is not None:
            previous.leave()
        self.holder = None
        PairTables.cut(pairs, self.plan, self.memory["NN"].dtype, self.memory)
        self.inputs.root.copy_(root)
        self.inputs.emissions.copy_(emissions)
        if allowed is not None and self.inputs.allowed is not None:
            self.inputs.allowed.copy_(allowed)
        self.forward()
        held = Held(self, self.results[0])
        self.holder = weakref.ref(held)
        return held

    def gradients(self, given: Incoming) -> Gradients:
        """Compute the gradients of the batch that is here. The tables stay where they are, the others are copies."""
        for own, values in zip(self.incoming, given, strict=True):
            if own is not None and values is not None:
                own.copy_(values)
        if self.forward.graph is None:  # its results may lie elsewhere from now on
            self.launch_backward()
        else:
            try:
                self.backward()
            except torch.OutOfMemoryError:
                _no_memory()
                self.launch_backward()
        found = self._gradients[0]
        return found._replace(root=found.root.clone(), emissions=found.emissions.clone())


def _copy(sources: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


class Held:
    """The chart of one batch between its forward and its backward."""

    def __init__(self, graph: Graph, saved: Saved):
        self.graph = graph
        self.saved: Saved | None = saved
        self.here, self.used = True, False

    def leave(self) -> None:
        """Make room for another batch: copy what this one's backward still needs (after a backward: nothing)."""
        if self.here and self.saved is not None:
            self.saved = None if self.used else Saved(*(tensor.clone() for tensor in self.saved))
        self.here = False

    def gradients(self, incoming: Incoming) -> Gradients:
        if self.saved is None:
            raise RuntimeError(
                "a second backward through flash_inside.dense after another batch was computed: its chart is gone"
            )
        self.used = True
        if self.here:
            return self.graph.gradients(incoming)
        return backward_pass(self.graph.plan, self.saved, incoming, self.graph.precision)


_graphs: OrderedDict[Key, Graph] = OrderedDict()
_rules: dict[torch.device, Tensor] = {}  # bytes: where the rules of all graphs lie
_room = True  # False: there was no memory for graphs


def clear() -> None:
    """Give back the memory of all graphs."""
    _graphs.clear()
    _rules.clear()


def run(
    plan: Plan, root: Tensor, pairs: Tensor, emissions: Tensor, allowed: Tensor | None, precision: str
) -> Held | None:
    """Do the forward pass by a graph; None if this batch gets none. root: fp64, of sorted sentences

    Lengths that were met once get none: most of those never come again.
    """
    if not _room or not graphs_allowed(emissions) or not plan.complete or plan.layout.longest < 2:
        return None
    shape = pairs.shape, root.shape, emissions.dtype
    key = Key(plan.lengths, plan.device, *shape, precision, allowed is not None)
    if key not in plan.met:
        plan.met.add(key)
        return None
    try:
        with torch.inference_mode(False), torch.no_grad():  # the memory also serves batches that need gradients
            graph = _find(key, plan, root, emissions, allowed)
            return None if graph is None else graph.run(root, pairs, emissions, allowed)
    except torch.OutOfMemoryError:
        _no_memory()
        return None


def _no_memory() -> None:
    """From now on there are no graphs."""
    global _room
    warnings.warn("no memory for CUDA graphs of the charts: slower, they are launched one by one", stacklevel=3)
    clear()
    _room = False


def _find(key: Key, plan: Plan, root: Tensor, emissions: Tensor, allowed: Tensor | None) -> Graph | None:
    """Find the graph of a key, or make it; None if it would take too much memory."""
    if key in _graphs:
        _graphs.move_to_end(key)
        return _graphs[key]
    compute = compute_type(key.precision)
    of_rules = math.prod(key.pairs) * compute.itemsize + len(KINDS) * ALIGNMENT
    if of_rules > LARGEST_RULES or _size(key, plan) > LARGEST_CHART:
        return None
    memory = _rules.get(key.device)
    if memory is None or memory.numel() < of_rules:  # the graphs that read the smaller one are captured again when met
        for other in [other for other in _graphs if other.device == key.device]:
            del _graphs[other]
        _rules.pop(key.device, None)
        memory = _rules[key.device] = torch.empty(of_rules, dtype=torch.uint8, device=key.device)
    graph = Graph(plan, root, emissions, allowed, _tables(plan, key.pairs, compute, memory), key.precision)
    _graphs[key] = graph
    while len(_graphs) > MOST_GRAPHS or sum(_size(other, its.plan) for other, its in _graphs.items()) > MOST_BYTES:
        _graphs.popitem(last=False)
    return graph


ALIGNMENT = 256


def _tables(plan: Plan, shape: torch.Size, dtype: torch.dtype, memory: Tensor) -> PairTables:
    """Lay the blocks of T into this memory."""
    tables, used, n = PairTables(plan, len(shape) == 4), 0, shape[-3]
    for kind in KINDS:
        columns = math.prod(len(range(*part.indices(shape[-1]))) for part in columns_of(kind, n))
        size = math.prod((*shape[:-2], columns)) * dtype.itemsize
        tables.of[kind] = memory[used : used + size].view(dtype).view(*shape[:-2], columns)
        used = -(-(used + size) // ALIGNMENT) * ALIGNMENT
    return tables


def _size(key: Key, plan: Plan) -> int:
    """Return about how many bytes a graph keeps: two numbers a symbol of each row, one a split, its plan."""
    n, p = key.pairs[-3], key.pairs[-1] - key.pairs[-3]
    numbers = 2 * plan.layout.rows * n + 4 * plan.layout.words * p + plan.splits_kept
    return numbers * compute_type(key.precision).itemsize + 32 * plan.layout.rows + plan.size
