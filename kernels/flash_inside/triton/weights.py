"""The rules as the triton backend multiplies with them: one grammar for all sentences, or one a sentence.

No copy is made of rules in the storage type of the chart, and the gradients are written where they belong. With one
grammar the rows of all sentences are one product. With one a sentence, the rows of sentences of one length are a view
[sentences, rows, symbols] (packing.py), and a batched product with the rules of these sentences reads those once: one
product a width where all sentences have one length, and one for each of a few lengths. Where there are more lengths,
the rows of a width are gathered into one padded batch: they are few next to the rules, which are then read at once.

Such rules must lie in the order of the layout. If sentences do not come sorted by length, they are copied for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_inside.devices import copy_to_device
from flash_inside.packing import Layout, Padding, Run

#: Sentences of more lengths than these are one padded batch.
MOST_LENGTHS = 2


class Weights:
    """left and right [N, N+P] in the storage type, read in place; as one [2N, N+P] if right follows left."""

    def __init__(self, left: Tensor, right: Tensor, storage: torch.dtype):
        self.n = left.shape[0]
        self.joint: Tensor | None = None
        if left.dtype != storage or right.dtype != storage:
            self.joint = torch.empty(2 * self.n, left.shape[1], dtype=storage, device=left.device)
            self.joint[: self.n], self.joint[self.n :] = left, right
            left, right = self.joint.split(self.n)
        elif _follows(left, right):
            self.joint = left.as_strided((2 * self.n, left.shape[1]), left.stride())
        self.left, self.right = left, right

    def to_children(self, rows: Tensor, out: Tensor, columns: slice, width: int) -> None:
        """[eta | zeta] = rows [left; right]^T for the given columns of the rules: [R, K] -> [R, 2N]."""
        if self.joint is not None:
            write_product(rows, self.joint[:, columns].T, out)
        else:
            write_product(rows, self.left[:, columns].T, out[:, : self.n])
            write_product(rows, self.right[:, columns].T, out[:, self.n :])

    def with_residuals(
        self, rows: Tensor, residuals: Tensor, factors: Tensor, out: Tensor, columns: slice, width: int
    ) -> None:
        """Do as `to_children` with rows and residuals of the last rows: one product, so that the rules are read once.

        factors: working memory; out: [rows and residuals, 2N] fp32
        """
        all_rows = rows.shape[0] + residuals.shape[0]
        joined = factors[: all_rows * rows.shape[1]].view(all_rows, -1)
        torch.cat((rows, residuals), out=joined)
        self.to_children(joined, out[:all_rows], columns, width)

    def from_children(self, d_children: Tensor, out: Tensor, columns: slice, width: int) -> None:
        """D by the rows = D_eta left + D_zeta right: [R, 2N] -> [R, K]."""
        if self.joint is not None:
            torch.mm(d_children, self.joint[:, columns], out=out)
        else:
            torch.mm(d_children[:, : self.n], self.left[:, columns], out=out)
            out.addmm_(d_children[:, self.n :], self.right[:, columns])

    def write_counts(self, d_children: Tensor, leaves: Tensor, beta: Tensor, out: tuple[Tensor, Tensor]) -> None:
        """out = D^T rows for left and right. d_children: [rows below the longest width, 2N]; leaves, beta: rows."""
        n, words, below = self.n, leaves.shape[0], d_children.shape[0]
        for side, gradient in enumerate(out):
            columns = slice(side * n, (side + 1) * n)
            _sum_of_products(d_children[words:below, columns], beta[: max(below - words, 0)], gradient[:, :n])
            _sum_of_products(d_children[:words, columns], leaves, gradient[:, n:])


class _Plan(NamedTuple):
    """How the rows of a width are multiplied with the rules of their sentences."""

    runs: list[Run]
    padding: Padding | None  # None: run by run
    there: Tensor  # of the padding, on the device
    back: Tensor

    @classmethod
    def of(cls, runs: list[Run], device: torch.device) -> _Plan:
        if len(runs) <= MOST_LENGTHS:
            return cls(runs, None, *(torch.empty(0, dtype=torch.int64) for _ in range(2)))
        padding = Padding.of(runs)
        return cls(runs, padding, copy_to_device(padding.there, device), copy_to_device(padding.back, device))

    def batches(self, rows: Tensor, out: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield sentences, their rows [sentences, each, K], and where to write [sentences, each, A].

        What was written for padded rows is brought to `out` afterwards.
        """
        if self.padding is None:
            for run in self.runs:
                yield run.sentences, run.of(rows), run.of(out)
            return
        batch = rows.index_select(0, self.there).unflatten(0, (-1, self.padding.each))
        result = out.new_empty(*batch.shape[:2], out.shape[1])
        yield self.padding.sentences, batch, result
        torch.index_select(result.flatten(0, 1), 0, self.back, out=out)


class SentenceWeights:
    """left and right [B, N, N+P] in the storage type; as one [B, 2N, N+P] if each right follows its left.

    Residuals of short sentences have a batched product of their own, which reads the rules of these sentences again:
    rows and residuals of one sentence would have to be copied together for one product.
    """

    def __init__(self, left: Tensor, right: Tensor, storage: torch.dtype, layout: Layout, order: Tensor):
        """order: [B] the caller's number of a sorted sentence, on the device"""
        self.n, self.layout = left.shape[1], layout
        self.order = None if layout.sorted else order
        self.joint: Tensor | None = None
        if self.order is not None:
            left, right = left[self.order], right[self.order]
        elif left.dtype == storage and right.dtype == storage and _each_follows(left, right):
            self.joint = left.as_strided((left.shape[0], 2 * self.n, left.shape[2]), left.stride())
        self.left, self.right = left.to(storage), right.to(storage)
        self.plans: dict[tuple[int, int], _Plan] = {}

    def to_children(self, rows: Tensor, out: Tensor, columns: slice, width: int) -> None:
        """Do as `Weights` does, with the rules of each sentence: [R, K] -> [R, 2N] of a width."""
        self._to_children(self.plan(width, len(rows)), rows, out, columns)

    def with_residuals(
        self, rows: Tensor, residuals: Tensor, factors: Tensor, out: Tensor, columns: slice, width: int
    ) -> None:
        """Do as `Weights` does; `factors` are not needed."""
        last = out[len(rows) : len(rows) + len(residuals)]
        self._to_children(self.plan(width, len(rows)), rows, out[: len(rows)], columns)
        self._to_children(self.plan(width, len(residuals)), residuals, last, columns)

    def _to_children(self, plan: _Plan, rows: Tensor, out: Tensor, columns: slice) -> None:
        for sentences, batch, target in plan.batches(rows, out):
            if self.joint is not None:
                write_product(batch, self.joint[sentences, :, columns].mT, target)
            else:
                write_product(batch, self.left[sentences, :, columns].mT, target[..., : self.n])
                write_product(batch, self.right[sentences, :, columns].mT, target[..., self.n :])

    def from_children(self, d_children: Tensor, out: Tensor, columns: slice, width: int) -> None:
        """D by the rows of a width = D_eta left + D_zeta right, each of its sentence: [R, 2N] -> [R, K]."""
        for sentences, batch, target in self.plan(width, len(out)).batches(d_children, out):
            if self.joint is not None:
                torch.bmm(batch, self.joint[sentences, :, columns], out=target)
            else:
                torch.bmm(batch[..., : self.n], self.left[sentences, :, columns], out=target)
                target.baddbmm_(batch[..., self.n :], self.right[sentences, :, columns])

    def plan(self, width: int, last: int) -> _Plan:
        """Plan products of the last so many rows of a width; both passes over the widths use the same."""
        if (width, last) not in self.plans:
            stop = self.layout.span_rows(width).stop
            self.plans[width, last] = _Plan.of(self.layout.runs(width, slice(stop - last, stop)), self.left.device)
        return self.plans[width, last]

    def write_counts(self, d_children: Tensor, leaves: Tensor, beta: Tensor, out: tuple[Tensor, Tensor]) -> None:
        """out = D^T rows of every sentence, [B, N, N+P] for left and right, in the caller's order.

        The rows of a sentence's widths are brought together first, so that the sum over all of them is one product.
        """
        n, words = self.n, leaves.shape[0]
        if self.layout.longest == 1:
            for gradient in out:
                gradient.zero_()
            return
        order, runs = self.layout.by_sentence()
        rows = copy_to_device(order, beta.device)
        d_spans, spans = d_children.index_select(0, rows), beta.index_select(0, rows - words)
        spans_of = {run.sentences.start: run for run in runs}
        for run in self.layout.runs(1):  # all sentences of one length
            for side, gradient in enumerate(out):
                columns = slice(side * n, (side + 1) * n)
                target = gradient[run.sentences] if self.order is None else torch.empty_like(gradient[run.sentences])
                write_product(run.of(d_children[:words])[..., columns].mT, run.of(leaves), target[..., n:])
                if (of_spans := spans_of.get(run.sentences.start)) is None:
                    target[..., :n].zero_()
                else:
                    write_product(of_spans.of(d_spans)[..., columns].mT, of_spans.of(spans), target[..., :n])
                if self.order is not None:
                    gradient[self.order[run.sentences]] = target


AnyWeights = Weights | SentenceWeights


def write_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b, or a batch of these, summed in fp32 and written in the type of out."""
    multiply = torch.mm if a.dim() == 2 else torch.bmm
    if out.dtype == a.dtype:
        multiply(a, b, out=out)
    elif a.is_cuda and out.dtype == torch.float32:
        multiply(a, b, out_dtype=torch.float32, out=out)
    else:
        out.copy_(a.float() @ b.float())


def _sum_of_products(d_rows: Tensor, rows: Tensor, out: Tensor) -> None:
    """out = d_rows^T rows: [R, N], [R, K] -> [N, K], written in place, in the type of the gradient."""
    if d_rows.shape[0] == 0:
        out.zero_()
    else:
        write_product(d_rows.T, rows, out)


def _follows(left: Tensor, right: Tensor) -> bool:
    return (
        left.is_contiguous()
        and right.is_contiguous()
        and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        and right.storage_offset() == left.storage_offset() + left.numel()
    )


def _each_follows(left: Tensor, right: Tensor) -> bool:
    """Whether left and right are the halves of one tensor [B, 2N, N+P]."""
    of_sentence = left.shape[1] * left.shape[2]
    return (
        left.stride() == right.stride() == (2 * of_sentence, left.shape[2], 1)
        and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        and right.storage_offset() == left.storage_offset() + of_sentence
    )
