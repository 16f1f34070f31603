"""The tensors of a simple PCFG, and the checks that every backend relies on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from flash_inside.precision import matmul_precision


class Rules(NamedTuple):
    """Rule probabilities of a simple PCFG with N nonterminals and P preterminals.

    root   [N] or [N+P]   probabilities of S -> A; with [N+P] also of S -> T, so that one-word sentences are possible
    left   [N, N+P]       left[A, B] = probability of the left child B given the parent A; rows sum to 1;
                          columns: the N nonterminals, then the P preterminals
    right  [N, N+P]       the same for the right child

    A leading dimension [B, ...] on all three means one grammar per sentence (compound models).
    """

    root: Tensor
    left: Tensor
    right: Tensor

    @property
    def per_sentence(self) -> bool:
        return self.left.dim() == 3

    @property
    def nonterminals(self) -> int:
        return self.left.shape[-2]

    @property
    def preterminals(self) -> int:
        return self.left.shape[-1] - self.left.shape[-2]

    def of_sentence(self, sentence: int) -> Rules:
        """Return the grammar of one sentence: its own, or the common one."""
        return Rules(*(tensor[sentence] for tensor in self)) if self.per_sentence else self

    def index_of(self, sentences: Sequence[int]) -> Tensor | None:
        """Return where the grammars of these sentences are; None: all have one."""
        return torch.tensor(sentences, device=self.left.device) if self.per_sentence else None

    def of_sentences(self, sentences: Sequence[int]) -> Rules:
        """Return the grammars of these sentences: a copy of their own, or the common one."""
        index = self.index_of(sentences)
        return self if index is None else Rules(*(tensor[index] for tensor in self))


class FactoredRules(NamedTuple):
    """Rules whose nonterminal children come in two steps: a parent draws one of M middle symbols, and this the child.

        left of `Rules` = [left[:, :M] inner | left[:, M:]]        right likewise

    root    [N] or [N+P]   as in `Rules`
    left    [N, M+P]       columns: the M middle symbols, then the P preterminals; rows sum to 1
    right   [N, M+P]
    inner   [M, N]         rows sum to 1

    Charts are those of the rules multiplied out, with N symbols. A span takes 3 M N multiplications instead of 2 N^2,
    so this pays where M is much smaller than N. Only `inside`, `inside_unchecked` and `span_marginals` take them.
    """

    root: Tensor
    left: Tensor
    right: Tensor
    inner: Tensor

    @property
    def per_sentence(self) -> bool:
        return False

    @property
    def nonterminals(self) -> int:
        return self.left.shape[-2]

    @property
    def preterminals(self) -> int:
        return self.left.shape[-1] - len(self.inner)

    def index_of(self, sentences: Sequence[int]) -> None:
        return None

    def of_sentence(self, sentence: int) -> FactoredRules:
        return self

    def of_sentences(self, sentences: Sequence[int]) -> FactoredRules:
        return self

    def multiplied(self) -> Rules:
        """Return the same grammar without factors, in their widest type, fp32 at least."""
        middle, dtype = len(self.inner), torch.float32
        for tensor in (self.left, self.right, self.inner):
            dtype = torch.promote_types(dtype, tensor.dtype)
        left, right, inner = (tensor.to(dtype) for tensor in (self.left, self.right, self.inner))
        with matmul_precision("fp32"):
            left, right = (torch.cat((side[:, :middle] @ inner, side[:, middle:]), 1) for side in (left, right))
        return Rules(self.root, left, right)


AnyRules = Rules | FactoredRules


class ResidentRules(Rules):
    """Rules of training steps, which stay at the same addresses while their values change.

    gradient_memory   [N, N+P] twice: the first backward since left and right had their gradients cleared may write
                      the new ones there

    Whoever makes such rules promises that left and right are leaves of autograd, that those of later calls lie at the
    same addresses, so that CUDA graphs may read them there, and that the backward of one batch comes before the
    forward of the next.
    """

    gradient_memory: tuple[Tensor, Tensor]

    def __new__(cls, root: Tensor, left: Tensor, right: Tensor, gradient_memory: tuple[Tensor, Tensor]) -> Self:
        rules = super().__new__(cls, root, left, right)
        rules.gradient_memory = gradient_memory
        return rules

    @property
    def have_gradients(self) -> bool:
        """Whether left or right has a gradient: a backward adds to it, and must not write over it."""
        return self.left.grad is not None or self.right.grad is not None


def check_lengths(lengths: Tensor | Sequence[int]) -> list[int]:
    """Refuse what are no lengths of sentences; return them as a list of Python integers."""
    if isinstance(lengths, Tensor):
        if lengths.dtype.is_floating_point or lengths.dim() != 1:
            raise ValueError(
                f"lengths must be a vector of integers, not {lengths.dtype} of shape {list(lengths.shape)}"
            )
        lengths = lengths.tolist()
    try:
        whole = [int(length) for length in lengths]
        if any(length != given for length, given in zip(whole, lengths, strict=True)):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError("lengths must be integers, one a sentence") from None
    lengths = whole
    if any(length < 1 for length in lengths):
        raise ValueError("every sentence needs at least one word: a length below 1 was given")
    return lengths


def check_inputs(rules: AnyRules, emissions: Tensor, lengths: Tensor | Sequence[int]) -> list[int]:
    """Refuse what cannot be meant, in one line each; return the lengths as a list of Python integers."""
    lengths = check_lengths(lengths)
    if not all(isinstance(tensor, Tensor) for tensor in (*rules, emissions)):
        raise ValueError("rules and emissions must be tensors of PyTorch")
    if isinstance(rules, FactoredRules):
        _check_factors(rules)
    if rules.left.dim() < 2 or rules.root.dim() < 1:
        raise ValueError(
            f"left must be [N, N+P] or [B, N, N+P], root [N] or [N+P] (or with B), not {list(rules.left.shape)} "
            f"and {list(rules.root.shape)}"
        )
    n, p, batch_dims = rules.nonterminals, rules.preterminals, rules.left.dim() - 2
    if batch_dims not in (0, 1) or rules.right.shape != rules.left.shape or n < 1 or p < 1:
        raise ValueError(
            f"left and right must both be [N, N+P] or [B, N, N+P], not {list(rules.left.shape)} "
            f"and {list(rules.right.shape)}"
        )
    if rules.root.shape[:-1] != rules.left.shape[:-2] or rules.root.shape[-1] not in (n, n + p):
        raise ValueError(
            f"root must end in {n} or {n + p} entries for left {list(rules.left.shape)}, not {list(rules.root.shape)}"
        )
    if rules.per_sentence and rules.left.shape[0] != len(lengths):
        raise ValueError(f"{rules.left.shape[0]} grammars for {len(lengths)} sentences: one each is needed")
    if emissions.shape != (sum(lengths), p):
        raise ValueError(
            f"emissions must be [{sum(lengths)}, {p}] (words of all sentences, P), not {list(emissions.shape)}"
        )
    if isinstance(rules, ResidentRules) and any(part.shape != rules.left.shape for part in rules.gradient_memory):
        raise ValueError(f"gradient_memory must be two tensors {list(rules.left.shape)}, as left and right are")
    devices = {tensor.device for tensor in (*rules, emissions)}
    if len(devices) > 1:
        raise ValueError(f"rules and emissions must be on one device, not on {sorted(map(str, devices))}")
    if not all(tensor.dtype.is_floating_point for tensor in (*rules, emissions)):
        raise ValueError("rules and emissions must be floating-point tensors")
    return lengths


def _check_factors(rules: FactoredRules) -> None:
    left, inner = rules.left.shape, rules.inner.shape
    if len(left) != 2 or len(inner) != 2 or inner[1] != left[0] or inner[0] >= left[1]:
        raise ValueError(
            f"factored rules must be left [N, M+P] and inner [M, N], one grammar for all sentences, not {list(left)} "
            f"and {list(inner)}"
        )
    if rules.right.shape != left:
        raise ValueError(
            f"factored rules must have left and right [N, M+P], not {list(left)} and {list(rules.right.shape)}"
        )


def connection(rules: AnyRules, emissions: Tensor) -> Tensor:
    """Return a zero that depends on every input."""
    first = [tensor.flatten()[:1] for tensor in (*rules, emissions)]
    return sum((0.0 * torch.where(value.isfinite(), value, 0.0).sum() for value in first), torch.zeros(()))


def log(probabilities: Tensor, dtype: torch.dtype) -> Tensor:
    """Take the log in the wider of the two types: fp32 cannot hold a root's 1e-60 in fp64, but can hold its log."""
    return probabilities.to(torch.promote_types(probabilities.dtype, dtype)).log().to(dtype)
