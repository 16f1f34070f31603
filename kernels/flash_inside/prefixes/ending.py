"""How a derivation ends, and what a symbol begins with: one solve a grammar, which all prefixes then share.

m[A] is the probability that the derivation of A ends: the LEAST solution of m = (left m) (right m), with 1 for
preterminals. (m = 1 always solves it, too, and passes every test of sums; where it is not the least solution, the
grammar loses the mass 1 - m to derivations without end.) A word that A begins with is found down a path of left
children, whose right siblings have to end, each with probability D = right m. The sum over all such paths is
Q = (I - diag(D) left_NN)^-1, and three tensors are all that prefixes need of it:

    start  = root Q            [N]      symbols at the left edge, however deep
    again  = right_NN Q        [N, N]   a right child, and the symbols at its own left edge
    leaves = again diag(D) left_NT + right_NT   [N, P]   a right child, and the preterminal of its first word
    first  = start diag(D) left_NT + root_T     [P]      the preterminal of a sentence's first word

Symbols with m = 0 take no part. All of it is fp64, and differentiable, through m implicitly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_inside.precision import upcast
from flash_inside.rules import Rules

#: A critical grammar converges like 1 / steps; Newton's method takes over after so many.
STEPS_BEFORE_NEWTON = 200
NEWTON_STEPS = 100
#: Relative change of every component at which m is found.
TOLERANCE = 1e-15


class LeftCorners(NamedTuple):
    """What prefixes need of a grammar beside its rules; see above. fp64."""

    ends: Tensor  # [N] m: probability that a derivation ends
    start: Tensor  # [N]
    first: Tensor  # [P]
    again: Tensor  # [N, N]
    leaves: Tensor  # [N, P]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that the programme over words uses."""
        return self.start, self.first, self.again, self.leaves

    @classmethod
    def of(cls, rules: Rules) -> LeftCorners:
        """Solve for them: the work of a few products [N, N] with [N, N]."""
        root, left, right = (upcast(tensor) for tensor in rules)
        n = rules.nonterminals
        ends = _differentiable(ending_probabilities(left, right), left, right)
        right_ends = torch.where(ends > 0, right[:, :n] @ ends + right[:, n:].sum(1), 0.0)  # [N] D
        # The transpose is diagonally dominant by columns: elimination exchanges no rows, and so subtracts nothing but
        # on the diagonal. Entries of 1e-200 come out as precise as those of size 1.
        matrix = torch.eye(n, dtype=left.dtype, device=left.device) - (right_ends[:, None] * left[:, :n]).T
        solved = torch.linalg.solve(matrix, torch.cat((root[:n, None], right[:, :n].T), dim=1))  # [N, 1 + N]
        start, again = solved[:, 0], solved[:, 1:].T
        to_leaves = right_ends[:, None] * left[:, n:]  # [N, P]
        first = start @ to_leaves
        if root.shape[0] > n:
            first = first + root[n:]
        return cls(ends, start, first, again, again @ to_leaves + right[:, n:])

    def finite_mass(self, root: Tensor) -> Tensor:
        """Return the probability that a derivation from the root ends: 1 unless the grammar loses mass."""
        n = len(self.ends)
        return upcast(root)[:n] @ self.ends + upcast(root)[n:].sum()


@torch.no_grad()
def ending_probabilities(left: Tensor, right: Tensor) -> Tensor:
    """Return m [N], the least fixed point, of left and right [N, N+P] in fp64."""
    n = left.shape[0]
    identity = torch.eye(n, dtype=left.dtype, device=left.device)

    def sides(m: Tensor) -> tuple[Tensor, Tensor]:
        """Return left m and right m."""
        return left[:, :n] @ m + left[:, n:].sum(1), right[:, :n] @ m + right[:, n:].sum(1)

    can_end = torch.zeros(n, dtype=torch.bool, device=left.device)
    while True:  # at most N times
        from_left, from_right = sides(can_end.to(left.dtype))
        more = (from_left > 0) & (from_right > 0)
        if torch.equal(more, can_end):
            break
        can_end = more

    m = left.new_zeros(n)
    for step in range(STEPS_BEFORE_NEWTON + NEWTON_STEPS):  # from 0 upwards: it can only end in the least solution
        from_left, from_right = sides(m)
        before, change = m, from_left * from_right - m
        if step >= STEPS_BEFORE_NEWTON:
            jacobian = from_right[:, None] * left[:, :n] + from_left[:, None] * right[:, :n]
            change = torch.linalg.solve(identity - jacobian.masked_fill_(~can_end[:, None], 0.0), change)
        m = torch.where(can_end, m + change.clamp(min=0.0), 0.0)
        if not ((m - before).abs() > TOLERANCE * m).any():
            break
    return m


def _differentiable(ends: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return the same values with the gradient of the fixed point: one step of Newton's method, of length 0."""
    if not (torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)):
        return ends
    n = len(ends)
    from_left = left[:, :n] @ ends + left[:, n:].sum(1)
    from_right = right[:, :n] @ ends + right[:, n:].sum(1)
    residual = torch.where(ends > 0, from_left * from_right, 0.0)
    jacobian = (from_right[:, None] * left[:, :n] + from_left[:, None] * right[:, :n]).detach()
    jacobian = torch.where(ends[:, None] > 0, jacobian, 0.0)
    change = residual - residual.detach()
    return ends + torch.linalg.solve(torch.eye(n, dtype=ends.dtype, device=ends.device) - jacobian, change)
