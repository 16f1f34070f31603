"""CUDA graphs: the passes over the widths, captured once for a bucket of shapes and replayed.

A graph is captured for so many sentences of so many words (its capacity). A batch is put into the first slots; tables
on the device say how long each sentence is, and rows beyond its words hold zeros, so one graph serves every batch that
fits. All graphs of a device work in one arena: they never run at the same time. What the backward needs stays there; a
batch that is still waiting for its backward when the arena is needed again is copied out first.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flash_inside.devices import Replay, copy_to_device, graphs_allowed
from flash_inside.packing import Layout
from flash_inside.precision import gradient_type
from flash_inside.rules import ResidentRules, Rules
from flash_inside.triton.chart import Chart, ChartResults, Precise, SavedChart, Tables
from flash_inside.triton.gradients import Gradients, RuleMemory, Wanted, computed_type, gradients
from flash_inside.triton.weights import Weights

#: Above this many nonterminals products take longer than launches. Rows without words are then real work, and a graph
#: must fit its batch closely.
LARGEST_LAUNCH_BOUND_N = 1024
#: A graph's layout has at most this many rows for each row of the batch, where launches bound the time and elsewhere.
MOST_PADDING = {True: 4.0, False: 1.15}
#: Up to this many nonterminals the gradients are computed in the graph too, and copied out of it.
LARGEST_N_OF_GRADIENT_GRAPH = 2048
#: Up to this many nonterminals a graph has its own copy of the rules, and serves any. Beyond, and for ResidentRules
#: from LARGEST_LAUNCH_BOUND_N on, it reads them where they lie, and serves only rules at those addresses.
LARGEST_N_OF_COPIED_RULES = 4096
#: Beyond this many nonterminals a chart of more bytes than that gets no graph: the products hide most of the launches,
#: and an arena keeps its memory.
LARGEST_N_OF_LARGE_CHARTS, MOST_BYTES_BEYOND = 4096, 1 << 31
#: A graph keeps what rounding left of all its sentences or of none. So beyond LARGEST_LAUNCH_BOUND_N a batch gets no
#: graph if it has a short sentence and one of more words than these.
MOST_WORDS_BESIDE_SHORT = 24
MOST_GRAPHS = 64
GROWTH = 1 << 24  # bytes of arena, at least, that larger batches make it grow by
MOST_TABLES = 64  # of a graph: batches of one length come again and again


@dataclass(frozen=True)
class Bucket:
    device: int
    n: int
    p: int
    root_size: int
    precision: str
    storage: torch.dtype
    types: tuple[torch.dtype, ...]  # of the gradients of root, rules and emissions; of the emissions
    sentences: int
    words: int  # of the longest sentence
    precise: bool  # all sentences are, or none
    bracketed: bool = False
    rules_at: tuple[int, int] | None = None  # where left and right lie, if the graph reads them there


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def bucket_of(
    rules: Rules,
    emissions: Tensor,
    lengths: Sequence[int],
    precision: str,
    storage: torch.dtype,
    precise: bool,
    bracketed: bool = False,
) -> Bucket | None:
    """Return the bucket of a batch, or None if it gets no graph."""
    n, sentences, longest = rules.nonterminals, len(lengths), max(lengths)
    launch_bound = n <= LARGEST_LAUNCH_BOUND_N
    slots = sentences if sentences <= 8 else _round_up(sentences, 8 if launch_bound else 4)
    words = _round_up(longest, 4) if launch_bound else longest
    room = slots * words * (words + 1) // 2
    if longest < 2 or room > MOST_PADDING[launch_bound] * sum(length * (length + 1) // 2 for length in lengths):
        return None
    if precise and not launch_bound and longest > MOST_WORDS_BESIDE_SHORT:
        return None
    rules_at = None
    if n > (LARGEST_LAUNCH_BOUND_N if isinstance(rules, ResidentRules) else LARGEST_N_OF_COPIED_RULES):
        of_chart = room * 6 * n * storage.itemsize  # beta, eta and zeta, and what is derived by them
        if n > LARGEST_N_OF_LARGE_CHARTS and of_chart > MOST_BYTES_BEYOND:
            return None
        if not (rules.left.dtype == rules.right.dtype == storage):
            return None
        if not (rules.left.is_contiguous() and rules.right.is_contiguous()):
            return None
        rules_at = rules.left.data_ptr(), rules.right.data_ptr()
    device, root_size = emissions.device.index or 0, rules.root.shape[0]
    types = gradient_type(rules.root), gradient_type(rules.left), gradient_type(emissions), emissions.dtype
    shape = n, rules.preterminals, root_size
    return Bucket(device, *shape, precision, storage, types, slots, words, precise, bracketed, rules_at)


class Arena:
    """One block of device memory from which a graph's tensors are cut, again from the start for every graph."""

    ALIGNMENT = 256

    def __init__(self, size: int, device: torch.device):
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.used = 0
        self.holder: weakref.ref[Held] | None = None  # whose chart is in the arena

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = int(np.prod(shape)) * dtype.itemsize
        start = self.used
        self.used = _round_up(start + size, self.ALIGNMENT)
        return self.memory[start : start + size].view(dtype).view(shape)

    def hand_to(self, holder: Held) -> None:
        previous = self.holder() if self.holder is not None else None
        if previous is not None:
            previous.leave_arena()
        self.holder = weakref.ref(holder)


class Graph:
    """A pass over the widths, with the inputs it reads; captured when it runs a second time.

    Captured or not, it does the same work on the same shapes, so results stay bitwise equal. On a CPU (Triton's
    interpreter) it is never captured.
    """

    def __init__(self, bucket: Bucket, arena: Arena):
        self.bucket, self.arena = bucket, arena
        device = arena.memory.device
        self.layout, self.precise = _layout(bucket)
        self.tables = self._tables([0] * bucket.sentences, device)
        if bucket.bracketed:
            self.tables.limits = torch.zeros(self.layout.words, 2, dtype=torch.int32, device=device)
        self.known_tables: dict[tuple[int, ...], Tables] = {}
        arena.used = 0
        self.root, self.d_log_z, self.emissions, joint, self.chart, self.gradient_start = _memory(
            bucket, self.layout, self.precise, arena
        )
        self.rules: tuple[Tensor, ...] | None = None if joint is None else joint.split(bucket.n)
        # Nothing here may refer back to this object, so that its memory is free as soon as the graph is dropped. Nor
        # may it hold the rules of others, which could never be freed: they are in this list only while it works.
        self.weights: list[Weights] = []
        chart, weights = self.chart, self.weights
        arguments = self.root, self.emissions, self.layout, self.tables
        self.forward = Replay(lambda: chart.compute(weights[0], *arguments), "charts")
        self.backward: dict[Wanted, tuple[Replay, list[Gradients]]] = {}

    @staticmethod
    def size(bucket: Bucket) -> int:
        """Return how many bytes of the arena a graph needs."""
        counter = _Counter()
        _memory(bucket, *_layout(bucket), counter)
        return counter.largest

    def _tables(self, lengths: list[int], device: torch.device) -> Tables:
        """Make the tables. Slot b is the caller's sentence b; the leaf row of a slot without a word has word -1."""
        words = np.array(lengths, dtype=np.int64)
        position = np.arange(self.bucket.words)[None, :]
        first_word = (np.cumsum(words) - words)[:, None]
        word_of_leaf = np.where(position < words[:, None], first_word + position, -1).ravel()
        layout = self.layout
        where = [layout.offset, layout.prefix, layout.lengths, words]
        return Tables.from_arrays([*where, np.arange(len(lengths)), word_of_leaf, self.precise.offset], device)

    def run(
        self, root: Tensor, left: Tensor, right: Tensor, emissions: Tensor, lengths: Sequence[int],
        limits: np.ndarray | None = None,
    ) -> Held:  # fmt: skip
        """Compute the chart of a batch, in the arena."""
        padded = (*lengths, *[0] * (self.bucket.sentences - len(lengths)))
        if padded not in self.known_tables:
            if len(self.known_tables) >= MOST_TABLES:
                self.known_tables.clear()
            self.known_tables[padded] = self._tables(list(padded), emissions.device)
        held = Held(self, self.known_tables[padded])
        self.arena.hand_to(held)
        self.tables.packed.copy_(held.tables.packed)
        if self.tables.limits is not None and limits is not None:
            self.tables.limits[: len(limits)].copy_(copy_to_device(limits, emissions.device), non_blocking=True)
        self.root.copy_(root)
        if self.rules is not None:
            for own, given in zip(self.rules, (left, right), strict=True):
                own.copy_(given)
        self.emissions[: emissions.shape[0]].copy_(emissions)
        with self._rules(left, right):
            self.forward()
        return held

    @contextmanager
    def _rules(self, left: Tensor, right: Tensor) -> Iterator[None]:
        if self.rules is not None:
            left, right = self.rules
        self.weights.append(Weights(left, right, self.bucket.storage))
        try:
            yield
        finally:
            self.weights.clear()

    def gradients(self, left: Tensor, right: Tensor, d_log_z: Tensor, wanted: Wanted) -> Gradients:
        """Compute the gradients of the batch in the arena; they overwrite working memory of the pass, no results."""
        if wanted not in self.backward:
            arena, start, found, weights = self.arena, self.gradient_start, list[Gradients](), self.weights
            before = (self.root, self.d_log_z, self.layout.words, self.layout, self.tables, wanted)
            saved = self.chart.saved

            def launch() -> None:
                arena.used = start
                found[:] = [gradients(saved, weights[0], *before, arena.allocate, arena.allocate)]

            self.backward[wanted] = Replay(launch, "charts"), found
        replay, found = self.backward[wanted]
        self.d_log_z[: d_log_z.shape[0]].copy_(d_log_z)
        with self._rules(left, right):
            replay()
        return found[0]


class Held:
    """The chart of one batch between its forward and its backward."""

    def __init__(self, graph: Graph, tables: Tables):
        self.graph, self.tables = graph, tables
        self.in_arena, self.used = True, False
        self.copies: SavedChart | None = None

    def results(self, sentences: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return copies of log Z and trusted for the caller to keep. No posterior: its rows would be the graph's."""
        chart = self.graph.chart
        return chart.log_z[:sentences].clone(), chart.trusted[:sentences].bool(), chart.posterior.new_empty(0)

    def leave_arena(self) -> None:
        """Make room for another batch: copy what this one's backward still needs (after a backward: nothing)."""
        if self.in_arena and not self.used:
            self.copies = SavedChart(*(tensor.clone() for tensor in self.graph.chart.saved))
        self.in_arena = False

    def gradients(
        self, root: Tensor, left: Tensor, right: Tensor, d_log_z: Tensor, words: int, wanted: Wanted,
        memory: RuleMemory | None,
    ) -> Gradients:  # fmt: skip
        graph, bucket = self.graph, self.graph.bucket
        if self.in_arena and bucket.n <= LARGEST_N_OF_GRADIENT_GRAPH:
            self.used = True
            found = graph.gradients(left, right, d_log_z, wanted)
            if found.emissions is not None:
                found = found._replace(emissions=found.emissions[:words])
            d_left, d_right = memory or (None, None)
            return Gradients(*map(_moved, found, (None, d_left, d_right, None)))
        saved = graph.chart.saved if self.in_arena else self.copies
        if saved is None:
            raise RuntimeError(
                "a second backward through flash_inside after another batch was computed: its chart is gone"
            )
        self.used = True

        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=d_log_z.device)

        working = allocate
        if self.in_arena:  # the working memory of the pass is free again
            graph.arena.used, working = graph.gradient_start, graph.arena.allocate
        return gradients(
            saved, Weights(left, right, bucket.storage), root.float().contiguous(), d_log_z, words, graph.layout,
            self.tables, wanted, allocate, working, memory,
        )  # fmt: skip


def _moved(tensor: Tensor | None, to: Tensor | None) -> Tensor | None:
    """Copy a tensor out of the arena, into the memory that is given or into new memory."""
    if tensor is None:
        return None
    return tensor.clone() if to is None else to.copy_(tensor)


class _Counter:
    """Stands in for an arena to find out how large it has to be."""

    def __init__(self) -> None:
        self.used = self.largest = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.used = _round_up(self.used + int(np.prod(shape)) * dtype.itemsize, Arena.ALIGNMENT)
        self.largest = max(self.largest, self.used)
        return torch.empty(shape, dtype=dtype, device="meta")


def _layout(bucket: Bucket) -> tuple[Layout, Precise]:
    layout = Layout([bucket.words] * bucket.sentences)
    return layout, Precise(layout, 0 if bucket.precise else bucket.sentences)


def _memory(
    bucket: Bucket, layout: Layout, precise: Precise, arena: Arena | _Counter
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Chart, int]:
    """Allocate root, d log Z, emissions, copy of the rules, chart in the arena; also return where gradients begin."""
    n, p, storage = bucket.n, bucket.p, bucket.storage
    root = arena.allocate((bucket.root_size,), torch.float32)
    d_log_z = arena.allocate((bucket.sentences,), torch.float32)
    root_type, rule_type, d_emission_type, emission_type = bucket.types
    joint = arena.allocate((2 * n, n + p), storage) if bucket.rules_at is None else None
    results = ChartResults.allocate(layout, n, p, storage, arena.allocate)
    gradient_start = arena.used  # the working memory of the chart, which comes next, is free by then
    chart = Chart.around(results, layout, precise, arena.allocate)
    # Emissions are read before the first derivative is written, so they lie in its memory if there is room.
    size = layout.words * p * emission_type.itemsize
    if size <= chart.d_children.nbytes:
        emissions = chart.d_children.view(-1).view(torch.uint8)[:size].view(emission_type).view(layout.words, p)
    else:
        emissions = arena.allocate((layout.words, p), emission_type)
    if isinstance(arena, _Counter):
        arena.used = gradient_start
        if n <= LARGEST_N_OF_GRADIENT_GRAPH:
            for _ in ("left", "right"):
                arena.allocate((n, n + p), computed_type(rule_type))
            arena.allocate((layout.words, p), computed_type(d_emission_type))
            arena.allocate((bucket.root_size,), computed_type(root_type))
        for shape in ((layout.words, p), (layout.rows - layout.words, n), (layout.words, p)):
            arena.allocate(shape, storage)
    return root, d_log_z, emissions, joint, chart, gradient_start


_arenas: dict[int, Arena] = {}
_graphs: OrderedDict[Bucket, Graph] = OrderedDict()


def clear() -> None:
    """Give back the memory of all graphs."""
    _graphs.clear()
    _arenas.clear()


def find(
    rules: Rules,
    emissions: Tensor,
    lengths: Sequence[int],
    precision: str,
    storage: torch.dtype,
    precise: bool,
    bracketed: bool = False,
) -> Graph | None:
    """Find the graph for this batch, or None if it should be computed without one."""
    if not graphs_allowed(emissions):
        return None
    bucket = bucket_of(rules, emissions, lengths, precision, storage, precise, bracketed)
    if bucket is None:
        return None
    if bucket in _graphs:
        _graphs.move_to_end(bucket)
        return _graphs[bucket]
    size = Graph.size(bucket)
    arena = _arenas.get(bucket.device)
    if arena is None or arena.memory.numel() < size:  # the graphs of a smaller arena are captured again when met
        size = _round_up(size, GROWTH)
        for other in [other for other in _graphs if other.device == bucket.device]:
            del _graphs[other]
        arena = None
        _arenas.pop(bucket.device, None)
        try:
            _arenas[bucket.device] = arena = Arena(size, emissions.device)
        except torch.OutOfMemoryError:
            warnings.warn("no memory for CUDA graphs of the charts: slower, they are launched one by one", stacklevel=2)
            return None
    while len(_graphs) >= MOST_GRAPHS:
        _graphs.popitem(last=False)
    _graphs[bucket] = Graph(bucket, arena)
    return _graphs[bucket]
