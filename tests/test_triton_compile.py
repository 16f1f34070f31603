"""Every kernel, as the backend launches it for the sizes below, compiles for sm_80 and sm_90: no GPU is needed.

The launches are not written down here a second time: the passes run on CPU tensors with launching replaced by noting
what would be launched (types, alignment, divisibility, constants), and that is compiled ahead of time.
"""

from __future__ import annotations

import inspect
import os

import pytest
import torch

from flash_inside import Rules
from flash_inside.packing import Layout
from grammars import random_emissions, random_rules

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]
POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
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
#: The same for tensors without memory, the root in fp64 as the trainer has it: all that training uses
TRAINING_SIZES = [(2**k, 2 ** (k + 1), precision) for k in range(5, 16) for precision in ("bf16", "fp32")]


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
            if value.data_ptr() % 16 == 0:
                divisible.append(number)
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if specialise and value % 16 == 0:
                divisible.append(number)
        else:
            signature[parameter.name] = "fp32"
    return tuple(signature.items()), tuple(constants.items()), tuple(divisible), warps


@pytest.fixture(scope="module")
def launches():
    """{(kernel, specialisation)} of forward and backward passes in every precision."""
    from triton.runtime.jit import JITFunction

    from flash_inside import triton_backend, triton_kernels
    from flash_inside.softmax import triton_rows

    if not isinstance(triton_kernels.row_of, JITFunction):
        pytest.skip("the kernels were imported in the interpreter")
    seen = {}

    def note(self, *arguments, grid, warmup, **options):
        seen[(self, specialisation(self, arguments, options))] = None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", note)
        for n, p, precision in SIZES:
            for root in ("all", "nonterminals"):
                rules_type = torch.bfloat16 if precision == "bf16" else torch.float32
                rules = random_rules(n, p, root=root, dtype=rules_type)
                emissions = random_emissions(10, p, dtype=torch.float32)
                inputs = [tensor.requires_grad_() for tensor in (*rules, emissions)]
                lengths = [8, 2]
                result = triton_backend.inside(Rules(*inputs[:3]), inputs[3], lengths, precision, Layout(lengths))
                torch.autograd.grad(result.log_z.sum(), inputs)
        for n, p, precision in TRAINING_SIZES:
            for root_size in (n + p, n):
                rules_type = torch.bfloat16 if precision == "bf16" else torch.float32
                types = torch.float64, rules_type, rules_type, torch.float32
                shapes = (root_size,), (n, n + p), (n, n + p), (10, p)
                inputs = [
                    torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
                    for shape, dtype in zip(shapes, types, strict=True)
                ]
                result = triton_backend.inside(Rules(*inputs[:3]), inputs[3], [8, 2], precision, Layout([8, 2]))
                torch.autograd.grad(result.log_z.sum(), inputs)
        for columns in (1000, 1008, 12288):
            for out in (torch.float32, torch.bfloat16):
                logits, values = torch.empty(2, columns), torch.empty(2)
                narrow = torch.empty(2, columns, dtype=out)
                triton_rows.log_sum_exp(logits, columns - 1, values)
                triton_rows.scaled_exp(logits, columns - 1, values, values, narrow)
                triton_rows.softmax(logits, narrow)
                triton_rows.softmax_gradient(narrow, logits, narrow)
        from flash_inside import trees

        for n in (512, 33):
            rules = random_rules(n, n + 8, dtype=torch.float32)
            values = random_emissions(70, n + 8, dtype=torch.float32)
            trees._Chart(rules, values, Layout([70]), torch.float32, triton=True)
    return list(seen)


@pytest.mark.parametrize("capability", [80, 90])
def test_every_specialisation_compiles(launches, capability):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {kernel.fn.__name__ for kernel, _ in launches}
    assert len(names) >= 17
    for kernel, (signature, constants, divisible, warps) in launches:
        source = ASTSource(
            fn=kernel,
            signature=dict(signature),
            constexprs={(kernel.arg_names.index(name),): value for name, value in constants},
            attrs={(number,): [["tt.divisibility", 16]] for number in divisible},
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        assert f"sm_{capability}" in compiled.asm["ptx"]
        assert compiled.asm["cubin"]
