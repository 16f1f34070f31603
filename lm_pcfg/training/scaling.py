"""Efficiency of data parallelism from 1 to 1,024 GPUs, on paper: from the time of a step, message sizes and links.

Pure arithmetic. What it takes for granted is in `assumptions`, which the command prints.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from lm_pcfg.errors import UserError
from lm_pcfg.settings import ModelSection

# Inside algorithm, forward + backward, 16 sentences of 40 words, P = 2N, bf16, one H200: kernels/README.md, medians.
MEASURED_INSIDE_MS = {512: 1.26, 2048: 3.26, 4096: 7.03, 8192: 20.69}
MEASURED_SENTENCES, MEASURED_WORDS = 16, 40
# From the same file: a bf16 product of side 8192, and reading the rules of N 8192 (2 N^2 bf16 numbers) once.
BF16_TFLOPS = 805.5
READ_RULES_8192_MS = 0.083
# Assumed, see `assumptions`.
TF32_TFLOPS = BF16_TFLOPS / 2
BYTES_PER_MS = 2 * 8192**2 * 2 / READ_RULES_8192_MS
SOFTMAX_PASSES = (
    8  # logits written and read, probabilities written and read, their gradients likewise, logits' gradients
)
EMISSION_PASSES = 4  # a chunk is written and read, forward and backward; its logits never reach memory as a whole
OPTIMIZER_PASSES = 7  # Adam reads gradient, weight and two moments, and writes the last three
REDUCED_SCALARS = 3  # all-reduces of a few numbers a step: counts, loss, whether to stop


@dataclass(frozen=True)
class Link:
    """What one GPU can send at a time in one direction, and the time of an empty message."""

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
        """Of `size` bytes: reduce-scatter in each node, all-reduce of the parts between nodes, all-gather in a node."""
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


def parameters(model: ModelSection, words: int) -> int:
    """How many numbers the networks hold; the sum over `lm_pcfg.grammar.build.build_model`.

    Without the parts of spellings: how many they are depends on the words.
    """
    symbols, d = model.nonterminals + model.preterminals, model.dimension
    roots = symbols if model.root == "all" else model.nonterminals
    if model.parameterization == "tables":
        return roots + 2 * model.nonterminals * symbols + model.preterminals * words
    layer = d * d + d
    tables = d + (symbols + words) * d + 3 * layer  # start, symbols and words; left child, right child, parent
    tables += (model.root == "all") + words * ((model.word_bias == "zipf") + (model.emission_smoothing > 0))
    tables += 2 * d * d if model.children == "rotated" else 0
    if model.parameterization == "released":
        return tables + 7 * layer
    return tables + 2 * 5 * layer + roots * d


def step_on_one_gpu(
    model: ModelSection, words: int, *, step_ms: float | None = None, inside_ms: float | None = None
) -> Step:
    """step_ms, inside_ms: measured with 16 sentences of 40 words; without them, the table of kernels/README.md."""
    n, p, d = model.nonterminals, model.preterminals, model.dimension
    tables = model.parameterization == "tables"  # no products, only softmaxes
    rules_flops = 0 if tables else 3 * 2 * 2 * n * (n + p) * d  # left and right; forward, and twice that backward
    emission_flops = 0 if tables else 4 * 2 * p * words * d  # forward, again in the backward, and twice that backward
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
    model: ModelSection,
    words: int,
    step: Step,
    machines: Machines,
    gpus: int,
    *,
    sentences: int = MEASURED_SENTENCES,
    all_sentences: int | None = None,
    emission_shards: int | None = None,
    spread: float = 0.0,
) -> Prediction:
    """sentences: of each GPU (the batch grows with the GPUs); all_sentences: of all together (it does not).

    emission_shards: None - all GPUs, as the trainer's `auto`.
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
        alone = predict(
            model, words, step, machines, 1, sentences=sentences, all_sentences=all_sentences
        ).words_per_second
        efficiency = rate / gpus / alone
    nodes = math.ceil(gpus / machines.gpus_per_node)
    return Prediction(
        gpus, nodes, own * gpus, compute, waiting, gradients, normalizers, scalars, total, rate, efficiency
    )  # fmt: skip


def zero_bytes(count: int, gpus: int, stage: int) -> float:
    """Of weights, gradients and Adam's two moments on each GPU; stage 0: DDP. All fp32.

    DeepSpeed keeps a second copy of the part of the weights that a GPU updates.
    """
    whole, divided = {0: (16, 0), 1: (8, 12), 2: (4, 16), 3: (0, 20)}[stage]
    return count * (whole + divided / gpus)


def assumptions(
    model: ModelSection,
    words: int,
    step: Step,
    machines: Machines,
    *,
    measured: str,
    spread: float,
    emission_shards: int | None = None,
) -> list[str]:
    """In words, for the command to print."""
    count, repeated, alone = parameters(model, words), step.rules + step.optimizer, step.compute(step.sentences, 1)
    within, between = machines.within, machines.between
    return [
        f"model: {count:,} parameters (N {model.nonterminals}, P {model.preterminals}, {words} words, dimension "
        f"{model.dimension}), gradients all-reduced in fp32",
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
    """1, 2, 4, ... and the last itself."""
    counts = [2**power for power in range(most.bit_length())]
    return counts if counts[-1] == most else [*counts, most]


def link(name: str, gigabytes_per_second: float | None) -> Link:
    """A preset, or one of another rate."""
    if name not in LINKS:
        raise UserError(f"unknown link {name!r}: one of {', '.join(LINKS)}")
    if gigabytes_per_second is None:
        return LINKS[name]
    return replace(LINKS[name], name=f"{gigabytes_per_second:g} GB/s a GPU", gigabytes_per_second=gigabytes_per_second)
