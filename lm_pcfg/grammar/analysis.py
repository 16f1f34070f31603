"""What a grammar is like as a whole: does it stop, how long are its sentences, how sharp are its rules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_inside import FactoredRules, Rules
from flash_inside.rules import AnyRules
from flash_inside.softmax import product_precision
from lm_pcfg.grammar.emission import Emission


def _times(matrix: Tensor, vector: Tensor, rows: int = 1024) -> Tensor:
    """matrix @ vector in fp64, without a copy of the matrix: [R, C] of any type, [C] -> [R]."""
    return torch.cat([part.double() @ vector for part in matrix.split(rows)])


class Children(NamedTuple):
    """The left or the right children of all nonterminals: whole rows [N, N+P], or factors [N, M+P] and [M, N]."""

    table: Tensor
    inner: Tensor | None

    @classmethod
    def of(cls, rules: AnyRules) -> tuple[Children, Children]:
        inner = rules.inner if isinstance(rules, FactoredRules) else None
        return cls(rules.left, inner), cls(rules.right, inner)

    @property
    def middle(self) -> int:
        return len(self.table if self.inner is None else self.inner)

    def times(self, vector: Tensor) -> Tensor:
        """Return the sum over nonterminal children of their probability times a value [N] of each: [N] in fp64."""
        values = vector if self.inner is None else _times(self.inner, vector)
        return _times(self.table[:, : self.middle], values)

    def rows(self, count: int = 1024) -> Iterator[Tensor]:
        """Yield some rows [?, N+P] at a time; factors are multiplied in fp32 at least."""
        for part in self.table.split(count):
            if self.inner is None:
                yield part
                continue
            dtype = torch.promote_types(torch.promote_types(part.dtype, self.inner.dtype), torch.float32)
            part = part.to(dtype)
            with product_precision("fp32"):
                nonterminals = part[:, : self.middle] @ self.inner.to(dtype)
            yield torch.cat((nonterminals, part[:, self.middle :]), 1)

    def mean(self) -> Tensor:
        """Return the mean row: [N+P]."""
        mean = self.table.mean(0)
        if self.inner is None:
            return mean
        return torch.cat((mean[: self.middle] @ self.inner.to(mean.dtype), mean[self.middle :]))


def spectral_radius(rules: AnyRules, iterations: int = 1000, tolerance: float = 1e-10, exact_up_to: int = 512) -> float:
    """Growth of a branching process: largest eigenvalue of M[A, B] = expected nonterminal children B of A.

    Below 1 (subcritical) every derivation ends and the probabilities of all strings sum to 1; above 1 (supercritical)
    some derivations never end, and their mass is lost. Small grammars: all eigenvalues. Large ones: power iteration,
    which converges fast for the positive matrices that softmaxes make.
    """
    n = rules.nonterminals
    if n <= exact_up_to:
        whole = rules.multiplied() if isinstance(rules, FactoredRules) else rules
        both = (whole.left[:, :n].double() + whole.right[:, :n].double()).cpu()
        return torch.linalg.eigvals(both).abs().max().item() if both.isfinite().all() else math.nan  # LAPACK may crash
    # M + 1 has the same eigenvectors and no other eigenvalue of the same size, so that the iteration converges.
    left, right = Children.of(rules)
    vector = torch.ones(n, dtype=torch.float64, device=rules.left.device)
    radius = 0.0
    for _ in range(iterations):
        grown = left.times(vector) + right.times(vector) + vector
        size = grown.norm().item()
        if not math.isfinite(size):
            return math.nan
        if abs(size - 1.0 - radius) <= tolerance * max(1.0, radius):
            return size - 1.0
        radius, vector = size - 1.0, grown / size
    return radius


def ending_probabilities(rules: Rules, iterations: int = 10_000, tolerance: float = 1e-12) -> Tensor:
    """Probability that a derivation from each nonterminal ends: fp64 [N], the least fixed point.

    It makes no copy of the rules, so it has room for large grammars. Near criticality (spectral radius 1) it converges
    like 1 / iterations; `flash_inside.prefixes` has Newton's method, which says whether it can be trusted.
    """
    n = rules.nonterminals
    left, right = rules.left, rules.right
    ends = torch.zeros(n, dtype=torch.float64, device=left.device)  # of a derivation from A within so many levels
    left_words, right_words = left[:, n:].sum(1, dtype=torch.float64), right[:, n:].sum(1, dtype=torch.float64)
    for _ in range(iterations):
        deeper = (_times(left[:, :n], ends) + left_words) * (_times(right[:, :n], ends) + right_words)
        if (deeper - ends).abs().max().item() <= tolerance:
            break
        ends = deeper
    return ends


def finite_mass(rules: Rules) -> float:
    """Probability that a derivation ends: the total mass of all strings, if words are normalised."""
    n, root = rules.nonterminals, rules.root.double()
    return (root[:n] @ ending_probabilities(rules) + root[n:].sum()).item()


def conditioned_on_ending(rules: Rules) -> Rules:
    """Return the rules of the derivations that end: a supercritical grammar becomes a subcritical one, in fp64."""
    ends = torch.cat((ending_probabilities(rules), rules.root.new_ones(rules.preterminals, dtype=torch.float64)))
    weighted = [table.double() * ends[: table.shape[-1]] for table in (rules.root, rules.left, rules.right)]
    return Rules(*(table / table.sum(-1, keepdim=True).clamp_min(1e-300) for table in weighted))


def expected_uses(rules: Rules, radius: float | None = None) -> Tensor:
    """Mean number of uses of each symbol in a derivation: [N+P]; all infinite unless the grammar is subcritical.

    Nonterminals are used by the root and by each other: u = root + M^T u. radius: the spectral radius, if known
    """
    n, root = rules.nonterminals, rules.root.double()
    if (spectral_radius(rules) if radius is None else radius) >= 1.0:
        return root.new_full((n + rules.preterminals,), float("inf"))
    children = rules.left[:, :n].double() + rules.right[:, :n]  # M[A, B]: expected nonterminal children B of A
    identity = torch.eye(n, dtype=torch.float64, device=root.device)
    nonterminals = torch.linalg.solve(identity - children.T, root[:n])
    preterminals = _times(rules.left[:, n:].T, nonterminals) + _times(rules.right[:, n:].T, nonterminals)
    if len(root) > n:
        preterminals += root[n:]
    return torch.cat((nonterminals, preterminals))


def expected_length(rules: Rules) -> float:
    """Mean number of words of a sentence; infinite unless the grammar is subcritical."""
    return expected_uses(rules)[rules.nonterminals :].sum().item()


def derivation_entropy(rules: Rules, emission: Emission, uses: Tensor | None = None) -> float:
    """Entropy in nats of a derivation with its words; infinite unless the grammar is subcritical.

    Every symbol adds the entropy of what it chooses as often as it is used. That of the string is at most as large:
    several derivations may give it. uses: `expected_uses`, if known
    """
    uses = expected_uses(rules) if uses is None else uses
    if uses.isinf().any():
        return float("inf")
    choices = _entropies(rules.left) + _entropies(rules.right)
    own = torch.cat((choices, emission.entropies().double()))
    return (entropy(rules.root.double()) + uses @ own).item()


def entropy(probabilities: Tensor) -> Tensor:
    """Return the entropy in nats over the last dimension."""
    return torch.special.entr(probabilities).sum(-1)


def _entropies(rules: Tensor, rows: int = 1024) -> Tensor:
    return torch.cat([entropy(part.double()) for part in rules.split(rows)])


def _mean_entropy(children: Children) -> float:
    return torch.cat([entropy(rows) for rows in children.rows()]).mean().item()


def _effective_number(weights: Tensor) -> float:
    """exp(entropy): so many equally frequent symbols would be as varied; 0 if there is no mass at all."""
    total = weights.sum()
    return entropy(weights / total).exp().item() if total > 0 else 0.0


def summary(rules: AnyRules, emission: Emission) -> dict[str, float]:
    """Figures that tell early whether symmetry breaks: mean entropies (nats) and effective numbers of symbols.

    The longest feature tells whether a training explodes.
    """
    n, (left, right) = rules.nonterminals, Children.of(rules)
    children = (left.mean() + right.mean()) / 2  # [N+P] as used by an average parent
    return {
        "entropy/root": entropy(rules.root).item(),
        "entropy/left": _mean_entropy(left),
        "entropy/right": _mean_entropy(right),
        **emission.describe(),
        "symbols/effective_nonterminals": _effective_number(children[:n]),
        "symbols/effective_preterminals": _effective_number(children[n:]),
        "grammar/spectral_radius": spectral_radius(rules, iterations=100, tolerance=1e-5),
    }


def criticality(rules: Rules, emission: Emission) -> dict[str, float]:
    """Say whether derivations end. Below a radius of 1 all do, and the probabilities of all strings sum to 1."""
    radius = spectral_radius(rules)
    uses = expected_uses(rules, radius)
    return {
        "grammar/spectral_radius": radius,
        "grammar/subcritical": radius < 1.0,
        "grammar/mass_of_finite_strings": finite_mass(rules),
        "grammar/expected_length": uses[rules.nonterminals :].sum().item(),
        "grammar/derivation_entropy": derivation_entropy(rules, emission, uses),
    }
