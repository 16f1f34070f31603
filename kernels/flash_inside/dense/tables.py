"""T, cut into its blocks by kind of split, and the products with it: one for all spans, or one a sentence.

With rules per sentence the products over a block of spans are batched: one for each run of sentences that have equally
many spans in the block (packing.py), so one in all where sentences have one length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_inside.dense.plan import Plan
from flash_inside.dense.reference import block_of, columns_of

KINDS = ("NN", "NP", "PN", "PP")


class PairTables:
    """T of each kind of split: [N, left x right], or of every sorted sentence: [B, N, left x right].

    Spans are those of a block of a width: `rows` of the chart.
    """

    def __init__(self, plan: Plan, per_sentence: bool, memory: dict[str, Tensor] | None = None):
        """memory: of each kind, for counts; without it they get new memory."""
        self.plan, self.per_sentence, self.memory = plan, per_sentence, memory
        self.of: dict[str, Tensor] = {}

    @classmethod
    def cut(cls, pairs: Tensor, plan: Plan, dtype: torch.dtype, memory: dict[str, Tensor] | None = None) -> PairTables:
        """Copy the blocks of T in this type. pairs: [N, N+P, N+P] or [B, N, N+P, N+P], caller's order."""
        tables = cls(plan, pairs.dim() == 4, memory)
        for kind in KINDS:
            if memory is None:
                block = block_of(pairs, kind).to(dtype)
                tables.of[kind] = plan.sort(block) if tables.per_sentence else block
            else:
                left, right = columns_of(kind, pairs.shape[-3])
                block = pairs[..., left, right]
                memory[kind].view(block.shape).copy_(plan.sort(block) if tables.per_sentence else block)
                tables.of[kind] = memory[kind]
        return tables

    @property
    def n(self) -> int:
        return self.of["NN"].shape[-2]

    def possible(self) -> PairTables:
        """Return ones where T is positive, and zeros."""
        tables = PairTables(self.plan, self.per_sentence)
        tables.of = {kind: (table > 0).to(table.dtype) for kind, table in self.of.items()}
        return tables

    def most_of_a_parent(self) -> Tensor:
        """Return the largest sum of T[A] of any A, but at least 1: of all, or [B]."""
        of_a_parent = sum(table.sum(-1) for table in self.of.values())
        assert isinstance(of_a_parent, Tensor)
        return of_a_parent.amax(-1).clamp(min=1.0)

    def add_parents(self, kind: str, pairs: Tensor, out: Tensor, width: int, rows: slice) -> None:
        """v += X T^T of each span. pairs: X, [r, left x right]; out: [r, N]"""
        if not self.per_sentence:
            out.addmm_(pairs, self.of[kind].T)
            return
        for run in self.plan.runs(width, rows):
            run.of(out).baddbmm_(run.of(pairs), self.of[kind][run.sentences].mT)

    def by_pairs(self, kind: str, d_values: Tensor, width: int, rows: slice) -> Tensor:
        """G = D_v T of each span: [r, N] -> [r, left x right]."""
        table = self.of[kind]
        if not self.per_sentence:
            return d_values @ table
        out = d_values.new_empty(len(d_values), table.shape[2])
        for run in self.plan.runs(width, rows):
            torch.bmm(run.of(d_values), table[run.sentences], out=run.of(out))
        return out

    def add_counts(self, kind: str, d_values: Tensor, pairs: Tensor, width: int, rows: slice) -> None:
        """T += sum over spans of D_v^T X. A kind that is met for the first time begins with zeros."""
        if kind not in self.of:
            sentences = (len(self.plan.lengths),) if self.per_sentence else ()
            shape = *sentences, d_values.shape[1], pairs.shape[1]
            self.of[kind] = pairs.new_zeros(shape) if self.memory is None else self.memory[kind].zero_()
        if not self.per_sentence:
            self.of[kind].addmm_(d_values.T, pairs)
            return
        for run in self.plan.runs(width, rows):
            self.of[kind][run.sentences].baddbmm_(run.of(d_values).mT, run.of(pairs))

    def joined(self, n: int, p: int, like: Tensor) -> Tensor:
        """Return T as one tensor, zero for kinds never met: [N, N+P, N+P], or [B, ...] in the caller's order."""
        sentences = (len(self.plan.lengths),) if self.per_sentence else ()
        joined = like.new_zeros(*sentences, n, n + p, n + p)
        for kind, table in self.of.items():
            left, right = columns_of(kind, n)
            block = joined[..., left, right]
            block.copy_(table.view(block.shape))
        return self.plan.unsort(joined) if self.per_sentence and not self.plan.sorted else joined
