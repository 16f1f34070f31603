"""The steps of the forward and the backward algorithm of hidden Markov models (../forward.py says what they compute).

A step is one matrix product, or two for two factors, and one kernel in which one program works on the row of one
sentence. With few sentences a step is short, and what counts is how few launches it takes.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_inside.triton.chart import Launcher
from flash_inside.triton.kernels import nan_to_inf
from flash_inside.triton.weights import write_product


@triton.jit(do_not_specialize=["first"])
def alpha_kernel(
    predicted,  # [sentences of this step, S] fp32: alpha~ T; of the first step start [S] fp64
    words,  # [rows, S]: e~
    alpha,  # [rows, S]: alpha~
    divisor,  # [rows] fp64
    largest_input,  # [rows] fp32: largest predicted, or 1
    first,  # row of the first sentence
    s,
    FIRST_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """alpha~ = predicted e~ / its maximum. A row of zeros, or one that is not finite, is not divided. Grid: (B,)."""
    sentence = tl.program_id(0).to(tl.int64)
    row = first + sentence
    if not FIRST_STEP:
        predicted += sentence * s
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], predicted.dtype.element_ty)
    largest_predicted = tl.full([BLOCK], 1.0, predicted.dtype.element_ty)
    for begin in range(0, s, BLOCK):
        inside = begin + columns < s
        values = tl.load(predicted + begin + columns, mask=inside, other=0.0)
        largest_predicted = tl.maximum(largest_predicted, nan_to_inf(values))
        values *= tl.load(words + row * s + begin + columns, mask=inside, other=0.0).to(values.dtype)
        largest = tl.maximum(largest, nan_to_inf(values))
    scale = tl.max(largest, 0)
    scale = tl.where((scale > 0) & (scale < float("inf")), scale, 1.0)
    tl.store(divisor + row, scale.to(tl.float64))
    tl.store(largest_input + row, tl.max(largest_predicted, 0).to(tl.float32))
    for begin in range(0, s, BLOCK):
        inside = begin + columns < s
        values = tl.load(predicted + begin + columns, mask=inside, other=0.0)
        values *= tl.load(words + row * s + begin + columns, mask=inside, other=0.0).to(values.dtype)
        if FIRST_STEP:
            values = (values / scale).to(tl.float32)
        else:
            values = tl.div_rn(values, scale)
        tl.store(alpha + row * s + begin + columns, values.to(alpha.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "longer"])
def derivative_kernel(
    posterior,  # [rows, S] fp32: D of alpha~ where a sentence goes on, as the product left it; written here
    ending,  # [B] fp32: D of all alpha~ of the last step
    words,  # [rows, S]
    alpha,  # [rows, S]
    divisor,  # [rows] fp64
    largest_input,  # [rows] fp32
    predicted,  # [rows, S]: D of alpha~ T
    largest,  # [rows] fp32: largest D
    first,  # row of the first sentence
    longer,  # so many sentences go on
    s,
    BLOCK: tl.constexpr,
):
    """D of one step: of alpha~, of alpha before its division, and of what e~ was multiplied by. Grid: (B,)."""
    sentence = tl.program_id(0).to(tl.int64)
    row = first + sentence
    goes_on = sentence < longer
    at_end = tl.load(ending + sentence)
    scale = tl.load(divisor + row).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    running = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, s, BLOCK):
        inside = begin + columns < s
        places = row * s + begin + columns
        d_alpha = tl.load(posterior + places, mask=inside, other=0.0)
        d_alpha = tl.where(goes_on, d_alpha, at_end)  # what was not written is not looked at
        running = tl.maximum(running, nan_to_inf(d_alpha))
        tl.store(posterior + places, tl.load(alpha + places, mask=inside).to(tl.float32) * d_alpha, mask=inside)
        d_predicted = tl.div_rn(d_alpha, scale) * tl.load(words + places, mask=inside).to(tl.float32)
        tl.store(predicted + places, d_predicted.to(predicted.dtype.element_ty), mask=inside)
    top = tl.max(running, 0)
    # The largest quotient is the quotient of the largest: division and rounding keep the order.
    before_division = tl.div_rn(top, scale) * tl.load(largest_input + row)
    tl.store(largest + row, tl.maximum(top, nan_to_inf(before_division)))


def _launcher(kernel, s: int, **constants: bool) -> Launcher:
    """Few rows are at work at a time, so each gets many threads: 8 values each at a time."""
    block = min(8192, max(128, triton.next_power_of_2(s)))
    return Launcher(kernel, max(1, block // 256), **constants, BLOCK=block)


def alphas(
    start: Tensor,  # [S] fp64
    matrices: Sequence[Tensor],  # T, or its two factors, storage type
    words: Tensor,  # [rows, S] storage type
    alive: list[int],  # sentences at each step
    alpha: Tensor,  # [rows, S] storage type
    middle: Tensor,  # [rows, r] storage type
    divisor: Tensor,  # [rows] fp64
    largest_input: Tensor,  # [rows] fp32
) -> None:
    """Write alpha~ of all rows, what scales it, and what the second factor is multiplied by."""
    s = words.shape[1]
    steps, middles = alpha.split(alive), middle.split(alive)
    predicted = words.new_empty(alive[0], s, dtype=torch.float32)
    launch, first = _launcher(alpha_kernel, s, FIRST_STEP=True), 0
    source = start.contiguous()
    with torch.cuda.device_of(words):
        for step, count in enumerate(alive):
            if step == 1:
                launch, source = _launcher(alpha_kernel, s, FIRST_STEP=False), predicted
            if step:
                before = steps[step - 1][:count]
                if len(matrices) > 1:
                    write_product(before, matrices[0], middles[step])
                    before = middles[step]
                write_product(before, matrices[-1], predicted[:count])
            launch((count, 1, 1), source, words, alpha, divisor, largest_input, first, s)
            first += count
    if len(matrices) > 1:
        torch.maximum(largest_input, middle.amax(1).float(), out=largest_input)


def derivatives(
    ending: Tensor,  # [B] fp32
    matrices: Sequence[Tensor],
    words: Tensor,
    alive: list[int],
    alpha: Tensor,
    divisor: Tensor,
    largest_input: Tensor,
    predicted: Tensor,  # [rows, S] storage type: from here on what is written
    middle: Tensor,  # [rows, r] storage type, zeros
    posterior: Tensor,  # [rows, S] fp32
    largest: Tensor,  # [rows] fp32
) -> None:
    """Write D of all rows, from the last step back."""
    s = words.shape[1]
    d_steps, middles, d_alphas = predicted.split(alive), middle.split(alive), posterior.split(alive)
    begins = [0, *accumulate(alive)]
    transposed = [matrix.T for matrix in matrices]
    launch = _launcher(derivative_kernel, s)
    longer = 0
    with torch.cuda.device_of(words):
        for step in reversed(range(len(alive))):
            if longer:
                d_after = d_steps[step + 1]
                if len(matrices) > 1:
                    write_product(d_after, transposed[1], middles[step + 1])
                    d_after = middles[step + 1]
                write_product(d_after, transposed[0], d_alphas[step][:longer])
            launch(
                (alive[step], 1, 1),
                posterior, ending, words, alpha, divisor, largest_input, predicted, largest, begins[step], longer, s,
            )  # fmt: skip
            longer = alive[step]
    if len(matrices) > 1:
        torch.maximum(largest, middle.amax(1).float(), out=largest)
