"""How a derivation ends, and what a symbol begins with: one solve a grammar, which all prefixes then share.

m[A] is the probability that the derivation of A ends: the LEAST solution of m = (left m) (right m), with 1 for
preterminals. (m = 1 always solves it, too, and passes every test of sums; where it is not the least solution, the
grammar loses the mass 1 - m to derivations without end.) A word that A begins with is found down a path of left
children, whose right siblings have to end, each with probability D = right m. The sum over all such paths is
Q = (I - diag(D) left_NN)^-1, and four tensors are all that prefixes need of it:

    start  = root Q            [N]      symbols at the left edge, however deep
    again  = right_NN Q        [N, N]   a right child, and the symbols at its own left edge
    leaves = again diag(D) left_NT + right_NT   [N, P]   a right child, and the preterminal of its first word
    first  = start diag(D) left_NT + root_T     [P]      the preterminal of a sentence's first word

Symbols with m = 0 take no part. All of it is fp64, and differentiable, through m implicitly. Rows of left and right
that sum to 1 but for the rounding of their type are made to do so first: near criticality nothing else may solve it.

Where a symbol is its own left child almost surely, 1 - D left[A, A] is lost in fp64, though the rest of the row tells
it. Small grammars are then solved in many digits (mpmath), and for large ones a warning says what may be wrong.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from flash_inside.precision import upcast
from flash_inside.rules import Rules

#: A critical grammar converges like 1 / steps; Newton's method takes over after so many.
STEPS_BEFORE_NEWTON = 200
NEWTON_STEPS = 100
#: Relative change of every component at which m is found.
SMALLEST_CHANGE = 1e-15
#: Rows whose sum is off by so many roundings of their type are meant to sum to 1.
ROUNDINGS = 16
#: Row sums of an inverse up to which fp64 is trusted: about 1e-16 times this is lost.
LARGEST_INVERSE = 1e6
#: Nonterminals up to which many digits are affordable (seconds), and how many.
MOST_OF_MANY_DIGITS, DIGITS = 64, 250


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
        if not isinstance(rules, Rules):
            raise ValueError("left corners of factored rules are those of rules.multiplied()")
        sides = [_summing_to_one(side) for side in (rules.left, rules.right)]
        root, (left, right) = upcast(rules.root), sides
        ends, trusted = ending_probabilities(left, right)
        found = cls._solved(root, left, right, _differentiable(ends, left, right))
        if trusted and found._trusted():
            return found
        n = rules.nonterminals
        if n > MOST_OF_MANY_DIGITS:
            warnings.warn(
                f"prefix probabilities may be wrong: with {n} nonterminals, some of which are their own left child "
                "almost surely (or hardly end), they are lost in fp64",
                stacklevel=2,
            )
            return found
        precise = in_many_digits(*(tensor.detach() for tensor in (root, left, right)))
        return cls(*(_with_values(tensor, values) for tensor, values in zip(found, precise, strict=True)))

    @classmethod
    def _solved(cls, root: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> LeftCorners:
        n = len(ends)
        right_ends = torch.where(ends > 0, right[:, :n] @ ends + right[:, n:].sum(1), 0.0)  # [N] D
        # The transpose is diagonally dominant by columns: elimination exchanges no rows, and so subtracts nothing but
        # on the diagonal. Entries of 1e-200 come out as precise as the diagonal is.
        matrix = torch.eye(n, dtype=left.dtype, device=left.device) - (right_ends[:, None] * left[:, :n]).T
        solved = _solve(matrix, torch.cat((root[:n, None], right[:, :n].T), dim=1))  # [N, 1 + N]
        start, again = solved[:, 0], solved[:, 1:].T
        to_leaves = right_ends[:, None] * left[:, n:]  # [N, P]
        first = start @ to_leaves
        if root.shape[0] > n:
            first = first + root[n:]
        return cls(ends, start, first, again, again @ to_leaves + right[:, n:])

    def _trusted(self) -> bool:
        """Return whether nothing is negative, or as large as only a lost diagonal makes it."""
        values = torch.cat([tensor.detach().flatten() for tensor in self])
        return bool((values >= 0).all()) and bool(values.max() <= LARGEST_INVERSE)

    def finite_mass(self, root: Tensor) -> Tensor:
        """Return the probability that a derivation from the root ends: 1 unless the grammar loses mass."""
        n = len(self.ends)
        return upcast(root)[:n] @ self.ends + upcast(root)[n:].sum()


def _summing_to_one(side: Tensor) -> Tensor:
    """Convert left or right to fp64; rows whose sum is 1 but for rounding then sum to 1."""
    wide = upcast(side)
    sums = wide.detach().sum(1, keepdim=True)  # a correction of rounding has no gradient
    rounded = (sums - 1.0).abs() <= ROUNDINGS * torch.finfo(side.dtype).eps
    return wide / torch.where(rounded, sums, 1.0)


def _solve(matrix: Tensor, right_side: Tensor) -> Tensor:
    """Solve; a singular matrix gives NaN, which nobody trusts, and no error."""
    solution, info = torch.linalg.solve_ex(matrix, right_side)
    return torch.where(info == 0, solution, float("nan"))


@torch.no_grad()
def ending_probabilities(left: Tensor, right: Tensor) -> tuple[Tensor, bool]:
    """Return m [N], the least fixed point, of left and right [N, N+P] in fp64, and whether it can be trusted."""
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

    def derivative(m: Tensor) -> Tensor:
        from_left, from_right = sides(m)
        jacobian = from_right[:, None] * left[:, :n] + from_left[:, None] * right[:, :n]
        return identity - jacobian.masked_fill_(~can_end[:, None], 0.0)

    # Rows that sum to 1 or less have m <= 1, which Newton's steps near criticality may overshoot.
    most = 1.0 if max(side.sum(1).max().item() for side in (left, right)) <= 1.0 + 1e-12 else float("inf")
    m, found = left.new_zeros(n), False
    for step in range(STEPS_BEFORE_NEWTON + NEWTON_STEPS):  # from 0 upwards: it can only end in the least solution
        from_left, from_right = sides(m)
        before, change = m, from_left * from_right - m
        if step >= STEPS_BEFORE_NEWTON:
            change = _solve(derivative(m), change[:, None])[:, 0]
        if not change.isfinite().all():  # critical to the last digit; or rules with NaN
            break
        m = torch.where(can_end, m + change.clamp(min=0.0), 0.0).clamp(max=most)
        if not ((m - before).abs() > SMALLEST_CHANGE * m).any():
            found = True
            break
    spread = _solve(derivative(m), torch.ones_like(m)[:, None])  # how far m is off where f(m) is off by 1
    return m, found and bool((spread >= 0).all()) and bool(spread.max() <= LARGEST_INVERSE)


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
    identity = torch.eye(n, dtype=ends.dtype, device=ends.device)
    return ends + _solve(identity - jacobian, change[:, None])[:, 0]


def _with_values(tensor: Tensor, values: Tensor) -> Tensor:
    """Return other values with the gradient of the tensor, which is as good as fp64 has it."""
    return tensor + (values - tensor.detach()) if tensor.requires_grad else values


def in_many_digits(root: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
    """Return the fields of `LeftCorners`, computed with mpmath and rounded to fp64. It takes N^3 steps of Python."""
    import mpmath  # type: ignore[import-untyped]

    n, p, device = left.shape[0], left.shape[1] - left.shape[0], left.device
    with mpmath.workdps(DIGITS):
        sides = []
        for side in (left, right):
            table = [[mpmath.mpf(value) for value in row] for row in side.tolist()]
            sums = [mpmath.fsum(row) for row in table]
            near = [abs(total - 1) <= ROUNDINGS * 2.3e-16 for total in sums]  # in fp64 they are only nearly 1
            sides.append([
                [value / total for value in row] if is_near else row
                for row, total, is_near in zip(table, sums, near, strict=True)
            ])  # fmt: skip
        symbols = range(n)

        def after(side: list, m: list) -> list:
            return [
                mpmath.fdot(row[:n], m) + mpmath.fsum(row[n:]) for row in side
            ]  # fmt: skip

        can_end = [False] * n
        for _ in symbols:
            ones = [mpmath.mpf(able) for able in can_end]
            can_end = [a > 0 and b > 0 for a, b in zip(after(sides[0], ones), after(sides[1], ones), strict=True)]
        m = [mpmath.mpf(0)] * n
        for step in range(60 + 4 * DIGITS):
            from_left, from_right = after(sides[0], m), after(sides[1], m)
            change = [a * b - old for a, b, old in zip(from_left, from_right, m, strict=True)]
            if step >= 20:
                matrix = mpmath.matrix(n)
                for a in symbols:
                    for b in symbols:
                        slope = from_right[a] * sides[0][a][b] + from_left[a] * sides[1][a][b] if can_end[a] else 0
                        matrix[a, b] = (a == b) - slope
                try:
                    change = list(mpmath.lu_solve(matrix, mpmath.matrix(change)))
                except ZeroDivisionError:  # critical to the last digit
                    break
            m = [old + more if able else mpmath.mpf(0) for old, more, able in zip(m, change, can_end, strict=True)]
            if all(abs(more) <= mpmath.mpf(10) ** -(DIGITS // 4) * old for more, old in zip(change, m, strict=True)):
                break
        right_ends = [value if able else mpmath.mpf(0) for value, able in zip(after(sides[1], m), can_end, strict=True)]
        matrix = mpmath.matrix(n)
        for a in symbols:
            for b in symbols:
                matrix[b, a] = (a == b) - right_ends[a] * sides[0][a][b]  # the transpose
        inverse = mpmath.inverse(matrix)  # Q^T
        of_root = [mpmath.mpf(value) for value in root.tolist()]
        start = [mpmath.fdot([inverse[b, a] for a in symbols], of_root[:n]) for b in symbols]
        again = [[mpmath.fdot([inverse[b, a] for a in symbols], row[:n]) for b in symbols] for row in sides[1]]
        down = [[right_ends[a] * value for value in sides[0][a][n:]] for a in symbols]  # [N, P]
        columns = [[down[a][t] for a in symbols] for t in range(p)]
        of_root += [mpmath.mpf(0)] * (n + p - len(of_root))
        first = [mpmath.fdot(start, columns[t]) + of_root[n + t] for t in range(p)]
        leaves = [[mpmath.fdot(again[a], columns[t]) + sides[1][a][n + t] for t in range(p)] for a in symbols]

        def tensor(values: list) -> Tensor:
            rounded = [[float(value) for value in row] if isinstance(row, list) else float(row) for row in values]
            return torch.tensor(rounded, dtype=torch.float64, device=device)

        return tuple(tensor(values) for values in (m, start, first, again, leaves))
