"""What a grammar is like as a whole: does it stop, how long are its sentences, how sharp are its rules."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_inside import Rules
from lm_pcfg.grammar.emission import Emission


def _times(matrix: Tensor, vector: Tensor, rows: int = 1024) -> Tensor:
    """matrix @ vector in fp64, without a copy of the matrix: [R, C] of any type, [C] -> [R]."""
    return torch.cat([part.double() @ vector for part in matrix.split(rows)])


def spectral_radius(rules: Rules, iterations: int = 1000, tolerance: float = 1e-10, exact_up_to: int = 512) -> float:
    """Growth of a branching process: largest eigenvalue of M[A, B] = expected nonterminal children B of A.

    Below 1 (subcritical) every derivation ends and the probabilities of all strings sum to 1; above 1 (supercritical)
    some derivations never end, and their mass is lost. Small grammars: all eigenvalues. Large ones: power iteration,
    which converges fast for the positive matrices that softmaxes make.
    """
    n = rules.nonterminals
    left, right = rules.left[:, :n], rules.right[:, :n]
    if n <= exact_up_to:
        both = (left.double() + right.double()).cpu()
        return torch.linalg.eigvals(both).abs().max().item() if both.isfinite().all() else math.nan  # LAPACK may crash
    # M + 1 has the same eigenvectors and no other eigenvalue of the same size, so that the iteration converges.
    vector = torch.ones(n, dtype=torch.float64, device=left.device)
    radius = 0.0
    for _ in range(iterations):
        grown = _times(left, vector) + _times(right, vector) + vector
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


def _mean_entropy(rules: Tensor, rows: int = 1024) -> float:
    return torch.cat([entropy(part) for part in rules.split(rows)]).mean().item()


def _effective_number(weights: Tensor) -> float:
    """exp(entropy): so many equally frequent symbols would be as varied; 0 if there is no mass at all."""
    total = weights.sum()
    return entropy(weights / total).exp().item() if total > 0 else 0.0


def summary(rules: Rules, emission: Emission) -> dict[str, float]:
    """Figures that tell early whether symmetry breaks: mean entropies (nats) and effective numbers of symbols."""
    n = rules.nonterminals
    children = (rules.left.mean(0) + rules.right.mean(0)) / 2  # [N+P] as used by an average parent
    return {
        "entropy/root": entropy(rules.root).item(),
        "entropy/left": _mean_entropy(rules.left),
        "entropy/right": _mean_entropy(rules.right),
        "entropy/emission": emission.entropies().mean().item(),
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
