"""The rules as the triton backend multiplies with them: one grammar for all sentences, or one a sentence.

No copy is made of rules in the storage type of the chart, and the gradients are written where they belong. With one
grammar the rows of all sentences are one product. With one a sentence, the rows of sentences of one length are a view
[sentences, rows, symbols] (packing.py), and a batched product with the rules of these sentences reads those once: one
product a width where all sentences have one length, and one for each of a few lengths. Where there are more lengths,
the rows of a width are gathered into one padded batch: they are few next to the rules, which are then read at once.

Such rules must lie in the order of the layout. If sentences do not come sorted by length, they are copied for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_inside.devices import copy_to_device
from flash_inside.packing import Layout, Padding, Run

#: Sentences of more lengths than these are one padded batch.
MOST_LENGTHS = 2


class Weights:
    """left and right [N, N+P] in the storage type, read in place; as one [2N, N+P] if right follows left."""

    #: D of any value that products make on their way is at most so many times the largest D of the chart.
    reach = 1

    def __init__(self, left: Tensor, right: Tensor, storage: torch.dtype):
        self.n = self.middle = left.shape[0]
        self.joint: Tensor | None = None
        if left.dtype != storage or right.dtype != storage:
            self.joint = torch.empty(2 * self.n, left.shape[1], dtype=storage, device=left.device)
            self.joint[: self.n], self.joint[self.n :] = left, right
            left, right = self.joint.split(self.n)
        elif _follows(left, right):
            self.joint = left.as_strided((2 * self.n, left.shape[1]), left.stride())
        self.left, self.right = left, right

    def columns(self, width: int) -> slice:
        """Return the columns of the rules that rows of a width are multiplied with: of preterminals for one word."""
        return slice(self.middle, None) if width == 1 else slice(0, self.middle)

    def to_children(self, rows: Tensor, out: Tensor, width: int) -> None:
        """[eta | zeta] = rows [left; right]^T: [R, N], or [R, P] for one word -> [R, 2N]."""
        columns = self.columns(width)
        if self.joint is not None:
            write_product(rows, self.joint[:, columns].T, out)
        else:
            write_product(rows, self.left[:, columns].T, out[:, : self.n])
            write_product(rows, self.right[:, columns].T, out[:, self.n :])

    def with_residuals(self, rows: Tensor, residuals: Tensor, factors: Tensor, out: Tensor, width: int) -> None:
        """Do as `to_children` with rows and residuals of the last rows: one product, so that the rules are read once.

        factors: working memory; out: [rows and residuals, 2N] fp32
        """
        all_rows = rows.shape[0] + residuals.shape[0]
        joined = factors[: all_rows * rows.shape[1]].view(all_rows, -1)
        torch.cat((rows, residuals), out=joined)
        self.to_children(joined, out[:all_rows], width)

    def from_children(self, d_children: Tensor, out: Tensor, width: int) -> None:
        """D by the rows = D_eta left + D_zeta right: [R, 2N] -> [R, N], or [R, P] for one word."""
        columns = self.columns(width)
        if self.joint is not None:
            torch.mm(d_children, self.joint[:, columns], out=out)
        else:
            torch.mm(d_children[:, : self.n], self.left[:, columns], out=out)
            out.addmm_(d_children[:, self.n :], self.right[:, columns])

    def write_counts(self, d_children: Tensor, leaves: Tensor, beta: Tensor, out: Sequence[Tensor]) -> None:
        """out = D^T rows for left and right. d_children: [rows below the longest width, 2N]; leaves, beta: rows."""
        n, words, below = self.n, leaves.shape[0], d_children.shape[0]
        for side, gradient in enumerate(out):
            columns = slice(side * n, (side + 1) * n)
            of_spans, of_words = gradient[:, self.columns(2)], gradient[:, self.columns(1)]
            _sum_of_products(d_children[words:below, columns], beta[: max(below - words, 0)], of_spans)
            _sum_of_products(d_children[:words, columns], leaves, of_words)


class FactoredWeights(Weights):
    """The factors of `FactoredRules` in the storage type: left and right [N, M+P], and inner [M, N].

    A product with the rules is two, over the M middle values of a row. These are rounded to the storage type; of short
    sentences what this leaves is kept, too.
    """

    def __init__(self, left: Tensor, right: Tensor, inner: Tensor, storage: torch.dtype):
        super().__init__(left, right, storage)
        self.inner = inner.to(storage)
        self.middle = len(inner)
        self.reach = 2 * self.n  # D of a middle value is a sum of 2N entries of D times probabilities

    def to_children(self, rows: Tensor, out: Tensor, width: int) -> None:
        super().to_children(rows if width == 1 else self._middle(rows), out, width)

    def with_residuals(self, rows: Tensor, residuals: Tensor, factors: Tensor, out: Tensor, width: int) -> None:
        if width == 1:
            joined = torch.cat((rows, residuals))
        else:
            values = self._middle(torch.cat((rows, residuals)), torch.float32)
            rest = values[: len(rows)]
            rest[len(rows) - len(residuals) :] += values[len(rows) :]
            rounded = rest.to(rows.dtype)
            joined = torch.cat((rounded, (rest - rounded)[len(rows) - len(residuals) :].to(rows.dtype)))
        super().to_children(joined, out[: len(joined)], width)

    def from_children(self, d_children: Tensor, out: Tensor, width: int) -> None:
        if width == 1:
            super().from_children(d_children, out, width)
        else:
            torch.mm(self._d_middle(d_children), self.inner, out=out)

    def write_counts(self, d_children: Tensor, leaves: Tensor, beta: Tensor, out: Sequence[Tensor]) -> None:
        """Do as `Weights` does, and write the gradient of inner as the third."""
        words, below = leaves.shape[0], d_children.shape[0]
        beta = beta[: max(below - words, 0)]
        super().write_counts(d_children, leaves, self._middle(beta), out[:2])
        _sum_of_products(self._d_middle(d_children[words:below]), beta, out[2])

    def _middle(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Values of the middle symbols: [R, N] -> [R, M]."""
        values = rows.new_empty(len(rows), self.middle, dtype=dtype or rows.dtype)
        write_product(rows, self.inner.T, values)
        return values

    def _d_middle(self, d_children: Tensor) -> Tensor:
        """D of the middle values: [R, 2N] -> [R, M]."""
        d_values = d_children.new_empty(len(d_children), self.middle)
        super().from_children(d_children, d_values, 2)
        return d_values


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

    reach = 1

    def __init__(self, left: Tensor, right: Tensor, storage: torch.dtype, layout: Layout, order: Tensor):
        """order: [B] the caller's number of a sorted sentence, on the device"""
        self.n, self.middle, self.layout = left.shape[1], left.shape[1], layout
        self.order = None if layout.sorted else order
        self.joint: Tensor | None = None
        if self.order is not None:
            left, right = left[self.order], right[self.order]
        elif left.dtype == storage and right.dtype == storage and _each_follows(left, right):
            self.joint = left.as_strided((left.shape[0], 2 * self.n, left.shape[2]), left.stride())
        self.left, self.right = left.to(storage), right.to(storage)
        self.plans: dict[tuple[int, int], _Plan] = {}

    def columns(self, width: int) -> slice:
        return slice(self.n, None) if width == 1 else slice(0, self.n)

    def to_children(self, rows: Tensor, out: Tensor, width: int) -> None:
        """Do as `Weights` does, with the rules of each sentence: [R, K] -> [R, 2N] of a width."""
        self._to_children(self.plan(width, len(rows)), rows, out, self.columns(width))

    def with_residuals(self, rows: Tensor, residuals: Tensor, factors: Tensor, out: Tensor, width: int) -> None:
        """Do as `Weights` does; `factors` are not needed."""
        last = out[len(rows) : len(rows) + len(residuals)]
        self._to_children(self.plan(width, len(rows)), rows, out[: len(rows)], self.columns(width))
        self._to_children(self.plan(width, len(residuals)), residuals, last, self.columns(width))

    def _to_children(self, plan: _Plan, rows: Tensor, out: Tensor, columns: slice) -> None:
        for sentences, batch, target in plan.batches(rows, out):
            if self.joint is not None:
                write_product(batch, self.joint[sentences, :, columns].mT, target)
            else:
                write_product(batch, self.left[sentences, :, columns].mT, target[..., : self.n])
                write_product(batch, self.right[sentences, :, columns].mT, target[..., self.n :])

    def from_children(self, d_children: Tensor, out: Tensor, width: int) -> None:
        """D by the rows of a width = D_eta left + D_zeta right, each of its sentence: [R, 2N] -> [R, K]."""
        columns = self.columns(width)
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

    def write_counts(self, d_children: Tensor, leaves: Tensor, beta: Tensor, out: Sequence[Tensor]) -> None:
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
