"""`lm_pcfg bench step`: what a training step costs, and which part of it, of a config or over a grid of sizes.

The step is the trainer's own. Its time is measured twice, on the same batches: over many steps in a row, nothing waited
for (step_ms, words per second, everything included); and part by part, without CUDA graphs of the networks, where the
clock waits at the end of every part:

    networks    rules and features from the parameters        emission    its normalisers
    inside      columns of the emission, charts, and their gradients by the grammar's tensors
    backward    from there to the parameters, through normalisers, softmaxes and networks
    optimizer   clipping, the update, the moving average

On a GPU a third time: many steps in a row as in the first, with marks on the device between (what it waits for the host
belongs to the part it waits in)

    grammar     networks and emission          inside          update      backward, optimizer

A sentence that left the range of the number format is computed again, which takes long: `recomputed` of the first
measurement are such.

Peak memory is that of the GPU's tensors; without a GPU, of the whole process, where Linux tells ("-" elsewhere). That
includes what libraries keep for themselves, also of a larger size before it: measure from small to large.

A config is measured as it is, whatever its family. In a grid of nonterminals there are twice as many preterminals, and
a step is one batch of so many sentences, whatever the config says.
"""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from flash_inside import free_memory
from flash_inside.benchmarks.arguments import default_grid, why_not_all_written
from flash_inside.benchmarks.results import Results, Row, out_of_memory
from flash_inside.benchmarks.sizes import ptb_lengths
from lm_pcfg.bench.plot import draw_steps
from lm_pcfg.corpus.batches import Batch
from lm_pcfg.distributed.engine import Engine
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.families.shared.sections import PCFGSection
from lm_pcfg.settings import Settings
from lm_pcfg.settings_file import load_settings
from lm_pcfg.training.graphs import STEPS_BEFORE_CAPTURE
from lm_pcfg.training.steps import Steps

PARTS = ("networks", "emission", "inside", "backward", "optimizer")
#: Parts that can be separated where a step's networks are two CUDA graphs, and the last of PARTS in each.
PARTS_ON_DEVICE = {"grammar": "emission", "inside": "inside", "update": "optimizer"}
FIELDS = (
    "family", "nonterminals", "preterminals", "rank", "states", "sentences",
    "state_dropout", "inside_precision", "networks_precision",
    *(f"{part}_ms" for part in PARTS), "step_ms", "words_per_second", "words_per_step", "peak_gib", "recomputed",
    *(f"{part}_on_device_ms" for part in PARTS_ON_DEVICE),
    "vocabulary", "config", "data", "device", "torch", "date", "note",
)  # fmt: skip
#: What Linux tells of this process.
PROCESS = Path("/proc/self")
#: Settings of a model that are its sizes, as far as its family has them.
SIZES = ("nonterminals", "preterminals", "rank", "states")
#: Nonterminals and sentences that are measured without a config, and nonterminals where there is no GPU.
GRID, GRID_WITHOUT_GPU, SENTENCES = "512,2048,4096,8192", "64,128,256", 16
#: Settings that --nonterminals and --sentences decide, and how to.
DECIDED_BY_NONTERMINALS = {
    "model.nonterminals": "use --nonterminals",
    "model.preterminals": "they are twice the nonterminals",
    "model.rank": "it is the number of nonterminals",
}
DECIDED_BY_SENTENCES = {
    "batch.by": "use --sentences",
    "batch.sentences": "use --sentences",
    "batch.cost": "use --sentences",
    "batch.accumulate": "a step is one batch",
}


def main(
    config: Path | None,
    overrides: list[str],
    nonterminals: list[int] | None,
    sentences: list[int] | None,
    steps: int | None,
    table: Path | None,
    plot: Path | None,
) -> bool:
    """Print a line for every size as it is measured; write the CSV and the plot. Return whether any could be measured.

    nonterminals  None: those of the config; without one, what a GPU does in a minute or two, or less without a GPU
    sentences     None: the batches of the config; with a grid of nonterminals, 16
    """
    on_gpu = torch.cuda.is_available()
    steps = steps or (100 if on_gpu else 10)
    if nonterminals is None and config is None:
        grid = default_grid(on_gpu, "--nonterminals", GRID, GRID_WITHOUT_GPU)
        nonterminals = [int(n) for n in grid.split(",")]
    if sentences is None and nonterminals is not None:
        sentences = [SENTENCES]
    decided = (DECIDED_BY_NONTERMINALS if nonterminals else {}) | (DECIDED_BY_SENTENCES if sentences else {})
    for override in overrides:
        given, _, value = override.partition("=")
        for key, what_to_do in decided.items():
            section, _, name = key.partition(".")
            if given.strip() == key or (given.strip() == section and re.search(rf"\b{name}\b", value)):
                raise UserError(f"command line: {key} would have no effect in bench step; {what_to_do}")
    if problem := why_not_all_written((table, plot)):  # before anything is measured
        raise UserError(problem)
    results = Results(FIELDS, table, plot, draw_steps)
    with _settings(config, overrides) as settings:
        for row in bench_steps(settings, nonterminals, sentences, steps):
            if not results.rows:
                heads = (*PARTS, "step ms", "words/s", "GiB", "again")
                print(f"{'N':>6} {'batch':>5} " + " ".join(f"{head:>9}" for head in heads))
            results.add(row)
            print(_line(row), flush=True)
    return not all(row["note"] for row in results.rows)


def _line(row: Row) -> str:
    start = f"{row['nonterminals'] or row['states']:>6} {row['sentences']:>5} "
    columns = (*(f"{part}_ms" for part in PARTS), "step_ms", "words_per_second", "peak_gib", "recomputed")
    if row["note"]:
        return start + str(row["note"])
    on_device = [f"{part} {row[f'{part}_on_device_ms']}" for part in PARTS_ON_DEVICE if row[f"{part}_on_device_ms"]]
    line = start + " ".join(f"{str(row[column]) or '-':>9}" for column in columns)
    return f"{line}\n{'':13}of a step in a row: {', '.join(on_device)} ms" if on_device else line


def bench_steps(
    settings: Settings, nonterminals: list[int] | None, sentences: list[int] | None, steps: int
) -> Iterator[Row]:
    """Time every combination; a model that does not fit into memory gets a note. None: as in the settings."""
    engine = Engine(settings)
    if engine.world_size > 1:
        raise UserError("bench step measures one process; start it without a launcher")
    if nonterminals and not isinstance(settings.model, PCFGSection):
        raise UserError(f"--nonterminals: family {settings.model.family} has none; without it the config is measured")
    for n in nonterminals or (None,):
        for count in sentences or (None,):
            values = settings.model_dump()
            if n is not None:
                sizes = {"nonterminals": n, "preterminals": 2 * n, "rank": n}
                values["model"] |= {name: size for name, size in sizes.items() if name in values["model"]}
            if count is not None:
                values["batch"] |= {"by": "sentences", "sentences": count, "accumulate": 1}
            yield _measure(type(settings).model_validate(values), engine, steps)


def _measure(settings: Settings, engine: Engine, steps: int) -> Row:
    model: Any = settings.model
    batch = settings.batch
    row: Row = dict.fromkeys(FIELDS, "")
    row |= {name: getattr(model, name) for name in SIZES if hasattr(model, name)}
    row |= {
        "family": model.family,
        "sentences": batch.sentences * batch.accumulate if batch.by == "sentences" else "",  # or their mean
        "state_dropout": 0.0 if getattr(model, "state_dropout_until", None) else getattr(model, "state_dropout", 0.0),
        "inside_precision": settings.inside.precision,
        "networks_precision": settings.networks.precision, "config": settings.name,
        "data": Path(str(settings.data.train)).name, "device": _device_name(engine.device),
        "torch": importlib.metadata.version("torch"),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }  # fmt: skip
    try:
        row |= _timed(Steps(settings, engine), steps)
    except (RuntimeError, MemoryError) as problem:
        if not out_of_memory(problem):
            raise
        row["note"] = "out of memory"
    finally:  # Accelerate keeps what it has prepared, and the next size is to be measured alone
        engine.accelerator.free_memory()
        gc.collect()
        free_memory()
        if engine.device.type == "cuda":
            torch.cuda.empty_cache()
    return row


def _timed(training: Steps, steps: int) -> Row:
    device = training.engine.device
    training.position.step = training.total_steps  # of a state dropout that falls to 0, the steps with most symbols
    peak_is_known = _reset_peak_memory(device)
    # Lengths come again: after these steps, kernels and most graphs are there.
    batch, most_sentences = training.settings.batch, 0
    for _ in range(max(steps, STEPS_BEFORE_CAPTURE + 2)):
        batches = training.stream.next_step()
        most_sentences = max([most_sentences, *(len(batch.lengths) for batch in batches)])
        training.step(batches)
    if batch.by == "sentences" and most_sentences < batch.sentences:
        return {"note": f"the text has no batch of more than {most_sentences} sentences"}
    training.finish_update()
    recomputed_before = training.position.window.recomputed
    _synchronize(device)
    timed, began = [], time.perf_counter()
    for _ in range(steps):
        timed.append(training.stream.next_step())
        training.step(timed[-1])
    _synchronize(device)
    seconds = time.perf_counter() - began
    training.finish_update()
    recomputed = round(training.position.window.recomputed - recomputed_before)
    words = sum(batch.n_words for batches in timed for batch in batches)
    if training.position.skipped:
        return {"note": f"{training.position.skipped} updates were not finite"}

    peak: Row = {"peak_gib": _peak_memory(device) if peak_is_known else ""}
    on_device = _parts_on_device(training, timed) if device.type == "cuda" else {}
    clock = StepClock(device)
    training.capture.stop()  # a CUDA graph has no parts
    with marked(training, clock.part_ended, inside_of_model=True):
        for batches in timed:
            clock.begin()
            training.step(batches)
            training.finish_update()
            clock.part_ended("optimizer")
    parts: Row = {f"{part}_ms": round(1e3 * clock.seconds[part] / steps, 3) for part in PARTS}
    if batch.by == "cost":
        parts["sentences"] = round(sum(one.n_sentences for batches in timed for one in batches) / steps, 1)
    return parts | on_device | peak | {
        "step_ms": round(1e3 * seconds / steps, 3),
        "words_per_second": round(words / seconds),
        "words_per_step": round(words / steps, 1),
        "recomputed": recomputed,
        "vocabulary": len(training.corpora.vocabulary),
    }  # fmt: skip


@contextmanager
def marked(training: Steps, mark: Callable[[str], None], inside_of_model: bool = False) -> Iterator[None]:
    """Call `mark` with the name of each part of a step when it is over.

    The parts are methods of the trainer's own objects, which are wrapped while this lasts: training knows nothing of
    it. inside_of_model: tell networks and emission, backward and optimizer apart, where they are no CUDA graphs.
    """

    def telling(part: str, function: Callable[..., Any], before: bool = False) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if before:
                mark(part)
            result = function(*arguments, **named)
            if not before:
                mark(part)
            return result

        return wrapped

    with ExitStack() as wrappers:
        parts: list[tuple[Any, str, str]] = [
            (training, "compute_model", "emission"),
            (training, "accumulate", "inside"),
        ]
        if inside_of_model:
            parts.append((training.learner, "backward", "backward"))
            wrappers.enter_context(patch.object(Emission, "of", telling("networks", Emission.of, before=True)))
        for owner, name, part in parts:
            wrappers.enter_context(patch.object(owner, name, telling(part, getattr(owner, name))))
        yield


def _parts_on_device(training: Steps, timed: list[list[Batch]]) -> Row:
    """Measure milliseconds between marks that the device passes: the host never waits, as in training."""
    marks = dict[str, torch.cuda.Event]()

    def mark(part: str) -> None:
        marks[part] = torch.cuda.Event(enable_timing=True)
        marks[part].record()

    passed = []
    with marked(training, mark):
        for batches in timed:
            marks = {}
            mark("")
            training.step(batches)
            mark("optimizer")
            passed.append(marks)
    training.finish_update()
    torch.cuda.synchronize()
    names = ["", *PARTS_ON_DEVICE.values()]
    return {
        f"{part}_on_device_ms": round(sum(of[begin].elapsed_time(of[end]) for of in passed) / len(passed), 3)
        for part, (begin, end) in zip(PARTS_ON_DEVICE, pairwise(names), strict=True)
    }


def _reset_peak_memory(device: torch.device) -> bool:
    """Reset the peak, and return whether that was possible: a process may be kept from it, and only Linux has it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        (PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak_memory(device: torch.device) -> float | str:
    """Return the peak of memory in GiB; "" where the system does not say."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**30, 3)
    kib = re.search(r"VmHWM:\s*(\d+) kB", (PROCESS / "status").read_text())
    return round(int(kib[1]) / 2**20, 3) if kib else ""


class StepClock:
    """Seconds of every part, summed over steps. It waits for the device at the end of each part."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._last = 0.0

    def begin(self) -> None:
        _synchronize(self.device)
        self._last = time.perf_counter()

    def part_ended(self, part: str) -> None:
        _synchronize(self.device)
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now


@contextmanager
def _settings(config: Path | None, overrides: list[str]) -> Iterator[Settings]:
    """Yield the settings of the file; without one, those of synthetic text with the lengths of the Penn Treebank."""
    if config is not None:
        yield load_settings(config, overrides)
        return
    with TemporaryDirectory() as folder:
        text, file = Path(folder) / "synthetic", Path(folder) / "synthetic.yaml"
        text.write_text("".join(_synthetic_lines()))
        file.write_text(
            f"data: {{train: {text}, max_length: 40}}\nmodel: {{nonterminals: 1}}\ntracking: {{mlflow: false}}\n"
            "inside: {precision: bf16}\nnetworks: {precision: tf32}\n"
        )
        yield load_settings(file, overrides)


def _synthetic_lines(lines: int = 20_000, types: int = 10_000) -> Iterator[str]:
    """Yield lines of words by Zipf's law, with the lengths of the Penn Treebank."""
    lengths = ptb_lengths(lines)
    weights = 1.0 / np.arange(1, types + 1)
    words = np.random.default_rng(0).choice(types, sum(lengths), p=weights / weights.sum())
    for line in np.split(words, np.cumsum(lengths)[:-1]):
        yield " ".join(f"w{word}" for word in line) + "\n"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
