"""Every kernel, as it is launched for the sizes below, compiles for sm_80 and sm_90: no GPU is needed.

The launches are not written down here a second time: the passes run on tensors without memory with launching replaced
by noting what would be launched (types, alignment, divisibility, constants), and that is compiled ahead of time, each
specialisation once.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from flash_inside import Rules, forward, span_limits
from flash_inside.benchmarks.sizes import ptb_lengths
from flash_inside.dropout import hashed_dropout
from flash_inside.forward import Chain
from flash_inside.packing import Layout
from flash_inside.residual import residual_layers
from flash_inside.softmax import child_probabilities, log_normalizers

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
}
#: (N, P, precision): one block a row, several blocks a row, sizes that nothing divides
SIZES = [
    (512, 1024, "bf16"),
    (2048, 1040, "bf16"),
    (2048, 1040, "fp32"),
    (33, 41, "fp32"),
    (1, 2, "fp32"),
    (2001, 33, "bf16"),
]
#: All that training uses, with the root in fp64 as the trainer has it
TRAINING_SIZES = [(2**k, 2 ** (k + 1), precision) for k in range(5, 16) for precision in ("bf16", "fp32")]
#: Triton compiles an integer that is 1, one that 16 divides, and any other one differently. So: one, two and sixteen
#: sentences, with each number of words of these three kinds that they can have.
BATCHES = [[1], [9], [16], [8, 2], [8, 8], [3, *[2] * 15], [2] * 16]
#: Widths with many spans, whose splits programs take one by one; with what rounding left, and without.
LARGE_BATCHES = [[12] * 128, [17] * 80]
#: Few rows, and many: blocks of the product differ.
VITERBI_BATCHES = [[3], [3] * 16, [3] * 50]
#: For every size of a block: words that 16 divides or not (rows of logits are padded to a multiple of 16)
VOCABULARIES = (99, 112, 199, 208, 499, 512, 999, 1008, 1999, 2000, 3999, 4000, 4999, 5008, 9999, 10000, 29999, 30000)


def specialisation(kernel, arguments, options):
    """Hashable description of a launch, as Triton would specialise it: (signature, constants, divisible, warps)."""
    warps = options.pop("num_warps", 4)
    bound = inspect.signature(kernel.fn).bind(*arguments, **options).arguments
    signature, constants, divisible = {}, {}, []
    for number, parameter in enumerate(kernel.params):
        value = bound[parameter.name]
        specialise = not parameter.do_not_specialize
        if parameter.is_constexpr or (isinstance(value, int) and specialise and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            if value.data_ptr() % 16 == 0:  # without memory: where it would lie in memory that begins at 0
                divisible.append(number)
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if specialise and value % 16 == 0:
                divisible.append(number)
        else:
            signature[parameter.name] = "fp32"
    return tuple(signature.items()), tuple(constants.items()), tuple(divisible), warps


@contextmanager
def noted() -> Iterator[dict]:
    """A dictionary whose keys are the (kernel, specialisation) that are launched while this lasts, none of them run."""
    from triton.runtime.jit import JITFunction

    from flash_inside import dropout, residual
    from flash_inside.softmax import children, normalizers, rows
    from flash_inside.triton import kernels

    if not isinstance(kernels.row_of, JITFunction):
        pytest.skip("the kernels were imported in the interpreter")
    seen = {}

    def note(self, *arguments, grid, warmup, **options):
        seen[(self, specialisation(self, arguments, options))] = None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", note)
        for module in (rows, children, dropout, residual):
            patch.setattr(module, "in_triton", lambda tensor: True)
        patch.setattr(normalizers, "KEPT_FROM", {"meta": 1})
        patch.setattr(normalizers, "KEPT_BYTES", {"meta": 1 << 24})
        patch.setattr(forward, "choose", lambda *_: "triton")
        yield seen


def without_memory(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def launch_inside(n, p, precision, lengths, root_type=None, bracketed=False, per_sentence=False):
    """Both passes, with and without one-word sentences."""
    from flash_inside.triton import backend

    limits = np.concatenate([span_limits([], length) for length in lengths]) if bracketed else None

    rules_type, grammars = torch.bfloat16 if precision == "bf16" else torch.float32, (len(lengths),) * per_sentence
    for root_size, layout in ((n + p, Layout(lengths)), (n, None)):  # and with and without posteriors
        root = without_memory(*grammars, root_size, dtype=root_type or rules_type)
        left, right = (without_memory(*grammars, n, n + p, dtype=rules_type) for _ in range(2))
        emissions = without_memory(sum(lengths), p)
        result = backend.inside(Rules(root, left, right), emissions, lengths, precision, layout, limits)
        torch.autograd.grad(result.log_z.sum(), (root, left, right, emissions))


def launch_viterbi(n, p, lengths, per_sentence=False):
    from flash_inside import trees

    grammars = (len(lengths),) * per_sentence
    rules = Rules(*(without_memory(*grammars, *shape) for shape in ((n + p,), (n, n + p), (n, n + p))))
    with torch.no_grad():
        trees.BestTrees(rules, without_memory(sum(lengths), p), Layout(lengths), torch.float32, triton=True)


def launch_forward(states, precision, lengths, rank=None):
    """Both algorithms of a hidden Markov model, with T in one matrix or in two factors."""
    shapes = [(states, states)] if rank is None else [(states, rank), (rank, states)]
    start, emissions = without_memory(states, dtype=torch.float64), without_memory(sum(lengths), states)
    matrices = tuple(without_memory(*shape) for shape in shapes)
    log_z, _ = forward.log_likelihood_unchecked(Chain(start, matrices), emissions, lengths, precision)
    torch.autograd.grad(log_z.sum(), (start, *matrices, emissions))


def launch_softmaxes(n, p, dimension=16):
    """Probabilities of children in fp32 and bf16, from products in fp32 and bf16, of tables in fp32 and bf16."""
    for rules_type in (torch.float32, torch.bfloat16):
        for precision, tables_type in (("fp32", torch.float32), ("bf16", torch.float32), ("bf16", torch.bfloat16)):
            tables = [without_memory(size, dimension, dtype=tables_type) for size in (n, n + p, n + p)]
            results = child_probabilities(*tables, rules_type, precision)[2:]
            torch.autograd.grad([result.sum() for result in results], tables)


def launch_residual_layers(rows, dimension=512):
    x, skip = (without_memory(rows, dimension, dtype=torch.bfloat16) for _ in range(2))
    weights = [without_memory(*shape) for shape in ((dimension, dimension), (dimension,))]
    for inputs in ((x, None, *weights), (x, skip, *weights), (x, None, *weights, *weights)):
        wanted = [tensor for tensor in inputs[: 2 + len(weights)] if tensor is not None]
        torch.autograd.grad(residual_layers(*inputs).sum(), wanted)


def launch_dropout(rows, rate, dimension=512):
    x = without_memory(rows, dimension)
    torch.autograd.grad(hashed_dropout(x, rate, torch.empty(2, dtype=torch.int64, device="meta")).sum(), x)


def launch_normalizers(words, dimension=16):
    """With probabilities that are kept, and with too many for it."""
    for precision in ("fp32", "bf16"):
        for states in (32, 1 << 20):
            tables = without_memory(states, dimension), without_memory(words, dimension)
            torch.autograd.grad(log_normalizers(*tables, precision, largest_block=1 << 40).sum(), tables)


@pytest.fixture(scope="module")
def launches():
    """{(kernel, specialisation)} of everything that is launched for these sizes and batches."""
    with noted() as seen:
        for most_words in (16, 0):  # of sentences that are precise in bf16: these are long to 0
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("flash_inside.precision.MOST_WORDS_OF_SHORT", most_words)
                for lengths in BATCHES:
                    for n, p, precision in TRAINING_SIZES:
                        launch_inside(n, p, precision, lengths, root_type=torch.float64)
                for n, p, precision in SIZES:
                    launch_inside(n, p, precision, [8, 2])
                for n, p, precision in TRAINING_SIZES:  # as the benchmarks have it
                    launch_inside(n, p, precision, [8, 2], root_type=torch.float32)
        for n, p, precision in TRAINING_SIZES:
            for lengths in LARGE_BATCHES:
                launch_inside(n, p, precision, lengths, root_type=torch.float64)
        for n, precision in ((64, "fp32"), (1024, "bf16"), (4096, "bf16")):
            for lengths in ([8, 2], *LARGE_BATCHES):
                launch_inside(n, 2 * n, precision, lengths, root_type=torch.float64, bracketed=True)
        for n, p, precision in (*TRAINING_SIZES, (33, 41, "fp32"), (2001, 33, "bf16")):
            for lengths in ([17] * 16, [20, 8, 20, 1]):
                launch_inside(n, p, precision, lengths, root_type=torch.float32, per_sentence=True)
            launch_viterbi(n, p, [3, 2, 3], per_sentence=True)
        for n, p, _ in TRAINING_SIZES[::2]:
            launch_softmaxes(n, p)
            for lengths in VITERBI_BATCHES:
                launch_viterbi(n, p, lengths)
        for n, p in ((272, 736), (301, 700), (8192, 24576)):
            launch_softmaxes(n, p)
        for n, p in ((512, 520), (33, 41)):
            launch_viterbi(n, p, [70])
        for words in VOCABULARIES:
            launch_normalizers(words)
        for states in (1, 100, *(2**k for k in range(5, 16)), 4001, 9001):
            for precision in ("bf16", "fp32"):
                launch_forward(states, precision, [20, 17])
        for dimension in (512, 33, 1):
            for rate in (0.3, 0.6):
                launch_dropout(1, rate, dimension)
        for rows in (1, 33, 4096):
            for dimension in (512, 128, 16, 33, 1):
                launch_residual_layers(rows, dimension)
    return list(seen)


@pytest.mark.long
def test_other_batches_launch_nothing_else(launches):
    with noted() as seen:
        for n, lengths in ((4096, [40] * 16), (8192, [20, 5] * 8), (512, [9]), (32, [31, 1]), (1024, [64]), (512, [3])):
            launch_inside(n, 2 * n, "bf16", lengths, root_type=torch.float64)
            launch_viterbi(n, 2 * n, lengths)
        for n, lengths in ((512, [20] * 16), (8192, [40] * 16), (8192, [25] * 64), (8192, ptb_lengths(16))):
            launch_inside(n, 2 * n, "bf16", lengths, root_type=torch.float32)  # `bench inside`
        for count in (1, 7, 16, 32, 33):
            for n in (64, 2048):
                launch_inside(n, 2 * n, "fp32", ptb_lengths(count, seed=count), root_type=torch.float64)
                launch_viterbi(n, 2 * n, ptb_lengths(count, seed=count))
        for n in (32, 512, 8192):  # rows of 96, 1536, 24,576
            launch_softmaxes(n, 2 * n)
            launch_dropout(n, 0.3)
            launch_residual_layers(n)
            launch_residual_layers(3 * n, 256)
        for states, rank in ((4096, None), (32768, 4096)):
            launch_forward(states, "bf16", [32] * 8, rank)
            launch_forward(states, "bf16", [40, 1, 32, 7], rank)
    assert {kernel.fn.__name__ for kernel, _ in seen.keys() - set(launches)} == set()


def compiled(launch, capability):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, (signature, constants, divisible, warps) = launch
    source = ASTSource(
        fn=kernel,
        signature=dict(signature),
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants},
        attrs={(number,): [["tt.divisibility", 16]] for number in divisible},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


def one_of_each():
    """Name of a kernel, and whether it is for rules per sentence -> the first launch of it."""
    with noted() as seen:
        for n, precision, lengths in ((2048, "bf16", [8, 2]), (64, "fp32", [8, 2])):
            launch_inside(n, 2 * n, precision, lengths, root_type=torch.float64)
        launch_viterbi(64, 128, [8, 2])
        launch_inside(2048, 4096, "bf16", [2, 8, 2], per_sentence=True)
        launch_viterbi(64, 128, [2, 8, 2], per_sentence=True)
        for p in (128, 40000):  # rows that a program holds, and longer ones
            launch_softmaxes(64, p)
        launch_normalizers(99)
        launch_dropout(1, 0.3)
        launch_residual_layers(64)
        launch_forward(512, "bf16", [20, 17])
    return {
        (kernel.fn.__name__, dict(launch[1]).get("PER_SENTENCE")): (kernel, launch) for kernel, launch in reversed(seen)
    }


def test_every_kernel_compiles():
    """In one specialisation; `make test-all` compiles all of them."""
    kernels = one_of_each()
    assert len(kernels) >= 20
    for launch in kernels.values():
        assert compiled(launch, 90).asm["cubin"]


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90])
def test_every_specialisation_compiles(launches, capability):
    assert {kernel.fn.__name__ for kernel, _ in launches} == {name for name, _ in one_of_each()}
    for launch in launches:
        binary = compiled(launch, capability)
        assert f"sm_{capability}" in binary.asm["ptx"]
        assert binary.asm["cubin"]
