"""`lm_pcfg bench scaling` predicts the efficiency of data parallelism from 1 to 1,024 GPUs.

It computes from the time of a step, message sizes and links, and measures nothing. The command prints its assumptions.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lm_pcfg.errors import UserError
from lm_pcfg.grammar.families.shared.sections import SNPCFGSection, TablesSection

Model = SNPCFGSection | TablesSection

# Inside algorithm, forward + backward, 16 sentences of 40 words, P = 2N, bf16, one H200: docs/lab/kernels.md, medians.
MEASURED_INSIDE_MS = {512: 1.26, 2048: 3.26, 4096: 7.03, 8192: 20.69}
MEASURED_SENTENCES, MEASURED_WORDS = 16, 40
# From the same file: a bf16 product of side 8192, and reading the rules of N 8192 (2 N^2 bf16 numbers) once.
BF16_TFLOPS = 805.5
READ_RULES_8192_MS = 0.083
# Assumed, see `assumptions`.
TF32_TFLOPS = BF16_TFLOPS / 2
BYTES_PER_MS = 2 * 8192**2 * 2 / READ_RULES_8192_MS
SOFTMAX_PASSES = 8  # write and read logits, probabilities, the probabilities' gradients, and the logits' gradients
EMISSION_PASSES = 4  # a chunk is written and read, forward and backward; its logits never reach memory as a whole
OPTIMIZER_PASSES = 7  # Adam reads gradient, weight and two moments, and writes the last three
H200_MEGABYTES = 141_000
REDUCED_SCALARS = 3  # all-reduces of a few numbers a step: counts, loss, whether to stop


@dataclass(frozen=True)
class Link:
    """How fast one GPU sends in one direction, and how long an empty message takes."""

    name: str
    gigabytes_per_second: float
    microseconds: float

    def milliseconds(self, size: float, messages: float) -> float:
        return size / (self.gigabytes_per_second * 1e6) + messages * self.microseconds / 1e3


# Nominal rates of one direction; latencies are rough. Ethernet is one card of the node, shared by its 8 GPUs.
LINKS = {
    "nvlink": Link("NVLink 4, 450 GB/s a GPU", 450.0, 3.0),
    "pcie": Link("PCIe 5 x16, 64 GB/s a GPU", 64.0, 5.0),
    "infiniband": Link("InfiniBand NDR, 400 Gb/s a GPU", 50.0, 5.0),
    "infiniband-hdr": Link("InfiniBand HDR, 200 Gb/s for each two GPUs", 12.5, 5.0),
    "ethernet-100": Link("Ethernet, 100 Gb/s for each 8 GPUs", 100 / 8 / 8, 30.0),
    "ethernet-10": Link("Ethernet, 10 Gb/s for each 8 GPUs", 10 / 8 / 8, 50.0),
}


@dataclass(frozen=True)
class Machines:
    gpus_per_node: int = 8
    within: Link = LINKS["nvlink"]
    between: Link = LINKS["infiniband"]
    attained: float = 0.7  # of a link's nominal rate

    def all_reduce_ms(self, size: float, gpus: int) -> float:
        """Return the time for `size` bytes: reduce-scatter in nodes, all-reduce between nodes, all-gather in nodes."""
        local = min(gpus, self.gpus_per_node)
        nodes = math.ceil(gpus / self.gpus_per_node)
        size /= self.attained
        inside = self.within.milliseconds(2 * size * (local - 1) / local, 2 * math.log2(local))
        outside = self.between.milliseconds(2 * size / local * (nodes - 1) / nodes, 2 * math.log2(nodes))
        return inside + outside


@dataclass(frozen=True)
class Step:
    """Milliseconds of one optimizer step on one GPU, by what they depend on."""

    inside: float  # falls with the sentences of a GPU, down to inside_floor
    rules: float  # the networks and softmaxes of the rules: repeated on every rank
    emission: float  # the normalisers of the emission: divided by the emission shards
    optimizer: float  # repeated on every rank
    inside_floor: float  # reading the rules once for each width of span, in both directions
    sentences: int = MEASURED_SENTENCES  # of a GPU, for `inside`
    words: int = MEASURED_WORDS  # of a sentence

    def inside_of(self, sentences: float) -> float:
        return max(self.inside * sentences / self.sentences, min(self.inside, self.inside_floor))

    def compute(self, sentences: float, emission_shards: int) -> float:
        return self.inside_of(sentences) + self.rules + self.emission / emission_shards + self.optimizer


@dataclass(frozen=True)
class Prediction:
    gpus: int
    nodes: int
    sentences: float  # of all GPUs in a step
    compute_ms: float
    waiting_ms: float  # for the slowest rank
    gradients_ms: float
    normalizers_ms: float
    scalars_ms: float
    step_ms: float
    words_per_second: float
    efficiency: float  # words a second of a GPU, over those of a single GPU with the same settings


def parameters(model: Model, words: int) -> int:
    """Count the numbers that the modules of the two families hold."""
    symbols = model.nonterminals + model.preterminals
    roots = symbols if model.root == "all" else model.nonterminals
    if isinstance(model, TablesSection):
        return roots + 2 * model.nonterminals * symbols + model.preterminals * words
    d = model.dimension
    layer = d * d + d
    tables = d + (symbols + words) * d + 3 * layer  # start, symbols and words; left child, right child, parent
    tables += (model.root == "all") + (2 * d * d if model.children == "rotated" else 0)
    if model.parameterization != "paper":
        return tables + 7 * layer
    return tables + 2 * 5 * layer + roots * d


def step_on_one_gpu(model: Model, words: int, *, step_ms: float | None = None, inside_ms: float | None = None) -> Step:
    """Divide a step into its parts.

    step_ms, inside_ms: measured with 16 sentences of 40 words; without them, the table of docs/lab/kernels.md is used.
    """
    n, p = model.nonterminals, model.preterminals
    d = 0 if isinstance(model, TablesSection) else model.dimension  # tables: no products, only softmaxes
    rules_flops = 3 * 2 * 2 * n * (n + p) * d  # left and right; forward, and twice that backward
    emission_flops = 4 * 2 * p * words * d  # forward, again in the backward, and twice that backward
    rules = rules_flops / (TF32_TFLOPS * 1e9) + SOFTMAX_PASSES * 2 * n * (n + p) * 4 / BYTES_PER_MS
    emission = emission_flops / (TF32_TFLOPS * 1e9) + EMISSION_PASSES * p * words * 4 / BYTES_PER_MS
    optimizer = OPTIMIZER_PASSES * parameters(model, words) * 4 / BYTES_PER_MS
    floor = 2 * (MEASURED_WORDS - 1) * 2 * n * n * 2 / BYTES_PER_MS
    if step_ms is not None:
        inside_ms = step_ms - rules - emission - optimizer
        if inside_ms <= 0:
            raise UserError(
                f"--step-ms {step_ms:g}: the networks alone should take {rules + emission + optimizer:.2f} ms; "
                "was it measured with this model?"
            )
    elif inside_ms is None:
        if n not in MEASURED_INSIDE_MS:
            known = ", ".join(map(str, MEASURED_INSIDE_MS))
            raise UserError(
                f"no time was measured for {n} nonterminals (but for {known}): give --step-ms or --inside-ms"
            )
        inside_ms = MEASURED_INSIDE_MS[n]
    return Step(inside_ms, rules, emission, optimizer, floor)


def predict(
    model: Model, words: int, step: Step, machines: Machines, gpus: int, *, sentences: int = MEASURED_SENTENCES,
    all_sentences: int | None = None, emission_shards: int | None = None, spread: float = 0.0,
) -> Prediction:  # fmt: skip
    """Predict the step of so many GPUs.

    sentences: of each GPU (the batch grows with the GPUs); all_sentences: of all together (it does not).
    emission_shards: None stands for all GPUs, as the trainer's `auto`.
    spread: standard deviation of a rank's time in the inside algorithm, as a part of it.
    """
    own = all_sentences / gpus if all_sentences is not None else float(sentences)
    shards = gpus if emission_shards is None else min(emission_shards, gpus)
    compute = step.compute(own, shards)
    # How far the slowest of so many normally distributed times is from their mean, in deviations (Blom).
    slowest = statistics.NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25)) if gpus > 1 else 0.0
    waiting = spread * step.inside_of(own) * slowest
    gradients = normalizers = scalars = 0.0
    if gpus > 1:
        gradients = machines.all_reduce_ms(4.0 * parameters(model, words), gpus)
        scalars = REDUCED_SCALARS * machines.all_reduce_ms(16.0, gpus)
        if shards > 1:  # P floats are gathered in the forward pass and P are summed in the backward pass
            normalizers = 1.5 * machines.all_reduce_ms(4.0 * model.preterminals, shards)
    total = compute + waiting + gradients + normalizers + scalars
    rate = own * gpus * step.words / total * 1e3
    efficiency = 1.0
    if gpus > 1:
        alone = predict(model, words, step, machines, 1, sentences=sentences, all_sentences=all_sentences)
        efficiency = rate / gpus / alone.words_per_second
    nodes = math.ceil(gpus / machines.gpus_per_node)
    return Prediction(
        gpus, nodes, own * gpus, compute, waiting, gradients, normalizers, scalars, total, rate, efficiency
    )  # fmt: skip


def zero_bytes(count: int, gpus: int, stage: int) -> float:
    """Return the memory of weights, gradients and Adam's two moments on each GPU, all in fp32; stage 0 is DDP.

    DeepSpeed keeps a second copy of the part of the weights that a GPU updates.
    """
    whole, divided = {0: (16, 0), 1: (8, 12), 2: (4, 16), 3: (0, 20)}[stage]
    return count * (whole + divided / gpus)


def assumptions(
    model: Model, words: int, step: Step, machines: Machines, measured: str, spread: float,
    emission_shards: int | None,
) -> list[str]:  # fmt: skip
    """List in words what the prediction takes for granted."""
    count, repeated, alone = parameters(model, words), step.rules + step.optimizer, step.compute(step.sentences, 1)
    within, between = machines.within, machines.between
    return [
        f"model: {count:,} parameters (N {model.nonterminals}, P {model.preterminals}, {words} words), "
        "gradients all-reduced in fp32",
        f"inside algorithm: {step.inside:.2f} ms for {step.sentences} sentences of {step.words} words, {measured}; in "
        f"proportion to a GPU's sentences, not below {step.inside_of(0):.2f} ms (reading the rules for every width)",
        f"rules: {step.rules:.2f} ms, emission: {step.emission:.2f} ms, optimizer: {step.optimizer:.2f} ms, not "
        f"measured but computed: products at {TF32_TFLOPS:.0f} TFLOP/s (half of a bf16 product measured on an H200), "
        f"memory at {BYTES_PER_MS / 1e9:.1f} TB/s (measured there), no gaps between kernels",
        f"rules and optimizer are repeated on every rank: {repeated:.2f} of {alone:.2f} ms ({repeated / alone:.0%}) "
        "which more GPUs do not shorten; only the emission falls, by its shards: "
        + ("all GPUs (emission.shards: auto)" if emission_shards is None else f"{emission_shards} GPUs at most"),
        f"within a node of {machines.gpus_per_node}: {within.name}, {within.microseconds:g} us a message; between "
        f"nodes: {between.name}, {between.microseconds:g} us; {machines.attained:.0%} of the nominal rates is attained",
        "nothing is sent while something is computed, although DDP could while the networks' backward pass runs",
        f"the times of ranks in the inside algorithm deviate by {spread:.0%}; all wait for the slowest",
        "the data arrives in time, and checkpoints are written beside training",
    ]


def gpu_counts(most: int) -> list[int]:
    """Return 1, 2, 4, ... and `most` itself."""
    counts = [2**power for power in range(most.bit_length())]
    return counts if counts[-1] == most else [*counts, most]


def link(name: str, gigabytes_per_second: float | None) -> Link:
    """Return the link of this name, at another rate if one is given."""
    if name not in LINKS:
        raise UserError(f"unknown link {name!r}: one of {', '.join(LINKS)}")
    if gigabytes_per_second is None:
        return LINKS[name]
    return replace(LINKS[name], name=f"{gigabytes_per_second:g} GB/s a GPU", gigabytes_per_second=gigabytes_per_second)


def model_and_words(
    config: Path | None, overrides: list[str], nonterminals: int, words: int | None
) -> tuple[Model, int]:
    """Return the model and the size of its vocabulary, from a config or by default."""
    if config is None:
        if overrides:
            raise UserError(f"{overrides[0]} changes a config: give one with --config")
        return SNPCFGSection(nonterminals=nonterminals), words or 10_000
    from lm_pcfg.settings_file import load_settings

    settings = load_settings(config, overrides)
    size = words or settings.data.vocabulary.size
    if size is None:
        raise UserError(f"{config} keeps all words: say how many there are with --words")
    if not isinstance(settings.model, Model):
        raise UserError(f"bench scaling knows nothing of family {settings.model.family}")
    return settings.model, size


def report(
    model_and_vocabulary: tuple[Model, int], *, step_ms: float | None, inside_ms: float | None,
    gpus_per_node: int, within: tuple[str, float | None], between: tuple[str, float | None], most_gpus: int,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Compute everything that the command prints, for 1, 2, 4, ... GPUs; options are those of `predict`."""
    model, words = model_and_vocabulary
    step = step_on_one_gpu(model, words, step_ms=step_ms, inside_ms=inside_ms)
    machines = Machines(gpus_per_node, link(*within), link(*between))
    given = step_ms is not None or inside_ms is not None
    measured = "from the time given" if given else "measured on one H200 in bf16 (docs/lab/kernels.md)"
    counts = gpu_counts(most_gpus)
    predictions = [predict(model, words, step, machines, gpus, **options) for gpus in counts]
    count = parameters(model, words)
    return {
        "parameters": count,
        "step_on_one_gpu_ms": asdict(step),
        "message_bytes": {"gradients": 4 * count, "normalizers": 4 * model.preterminals},
        "options": options,
        "assumptions": assumptions(
            model, words, step, machines, measured, options["spread"], options["emission_shards"]
        ),
        "predictions": [asdict(prediction) for prediction in predictions],
        "zero_megabytes_a_gpu": {  # stages 0 (DDP) to 3
            gpus: [zero_bytes(count, gpus, stage) / 1e6 for stage in range(4)]
            for gpus in counts
            if gpus in (8, 1024)
        },
    }  # fmt: skip


COLUMNS = {  # heading: field, format
    "GPUs": ("gpus", "d"),
    "nodes": ("nodes", "d"),
    "sentences": ("sentences", ",.0f"),
    "compute ms": ("compute_ms", ".2f"),
    "waiting": ("waiting_ms", ".2f"),
    "gradients": ("gradients_ms", ".2f"),
    "normalisers": ("normalizers_ms", ".3f"),
    "scalars": ("scalars_ms", ".3f"),
    "step ms": ("step_ms", ".2f"),
    "words/s": ("words_per_second", ",.0f"),
    "efficiency": ("efficiency", ".1%"),
}


def table(report: dict[str, Any]) -> str:
    """Format the report for people."""
    predictions = report["predictions"]
    lines = ["assumed:", *(f"- {assumption}" for assumption in report["assumptions"]), ""]
    cells = [[format(p[field], form) for field, form in COLUMNS.values()] for p in predictions]
    widths = [max(map(len, [heading, *column])) for heading, *column in zip(COLUMNS, *cells, strict=True)]
    rows = [list(COLUMNS), *cells]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.append("")
    for limit in (0.9, 0.5):
        kept = [p["gpus"] for p in predictions if p["efficiency"] >= limit]
        lines.append(f"at least {limit:.0%} efficient: up to {kept[-1]:,} GPUs")
    for gpus, sizes in report["zero_megabytes_a_gpu"].items():
        stages = ", ".join(f"ZeRO {stage} {size:,.0f}" for stage, size in enumerate(sizes) if stage)
        lines.append(f"weights, gradients and Adam on {gpus:,} GPUs, MB each: DDP {sizes[0]:,.0f}, {stages}")
    saved = 16 * report["parameters"] / 1e6
    lines.append(f"so ZeRO can save {saved:,.0f} MB at most, {saved / H200_MEGABYTES:.1%} of an H200's memory")
    return "\n".join(lines)
