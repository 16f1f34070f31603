"""The emission p(word | preterminal): a softmax over the words whose P x V logits are never kept.

They are made block by block. A backward pass makes them again, or has P x V probabilities, where these take little
enough memory to be kept (flash_inside.softmax).

Its normalisers may be chunked across processes. Each of S processes computes those of its P/S preterminals; the group
gathers the P numbers. In the backward pass the P gradients, which differ from process to process because their
sentences do, are summed, and each process takes its part through its own P/S x V logits. Arithmetic falls by S; so does
memory, if P/S x V logits are fewer than a block of them (flash_inside.softmax). What travels is P numbers, twice.

The engine averages parameter gradients over all processes. Every normaliser's gradient is carried by one process of
each group instead of by all, but as the sum over the group: the average is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from flash_inside.softmax import log_normalizers, product_precision, rounded_factors

#: Logit up to which fp32 is exact enough: logits are off by some 3e-7 of the largest. Beyond, all but training
#: computes in fp64. A training that becomes unstable goes there: with logits of 2e8 some normalisers of fp32 were off
#: by up to 42 nats.
LARGEST_OF_FP32 = 1e4


class Group(Protocol):
    """What shards need of a process group (distributed.collectives.ProcessGroup)."""

    rank: int
    size: int

    def all_gather(self, tensor: Tensor) -> list[Tensor]: ...

    def all_reduce(self, tensor: Tensor) -> Tensor: ...


class EmissionShards:
    """The part of the normalisers that this process computes. All of the group have to make the same passes."""

    def __init__(self, group: Group):
        self.group, self.count = group, group.size

    def part(self, preterminals: int, index: int | None = None) -> slice:
        """The preterminals of a shard (by default this process's): sizes differ by one at most, and may be 0."""
        index = self.group.rank if index is None else index
        return slice(preterminals * index // self.count, preterminals * (index + 1) // self.count)

    def gather(self, own: Tensor, preterminals: int) -> Tensor:
        """The normalisers of all preterminals, in order, from those of every part; differentiable."""
        return _Gathered.apply(own, self, preterminals)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, shards: EmissionShards, preterminals: int) -> Tensor:
        ctx.shards, ctx.preterminals = shards, preterminals
        parts = [shards.part(preterminals, index) for index in range(shards.count)]
        sizes = [part.stop - part.start for part in parts]
        padded = own.new_zeros(max(sizes))
        padded[: len(own)] = own.detach()
        gathered = shards.group.all_gather(padded)
        return torch.cat([values[:size] for values, size in zip(gathered, sizes, strict=True)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        total = ctx.shards.group.all_reduce(gradient.clone(memory_format=torch.contiguous_format))
        return total[ctx.shards.part(ctx.preterminals)], None, None


class Emission(NamedTuple):
    """p(word | preterminal) = softmax over the words of features . embeddings.

    Only columns for the words at hand are asked for, or, to draw words, rows of the preterminals at hand. Where each of
    B sentences has features of its own (compound models), only its own words are asked for: never P x V x B numbers.
    """

    features: Tensor  # [P, d] of the preterminals; or [B, P, d]
    embeddings: Tensor  # [V, d] of the words
    log_normalizers: Tensor  # [P] log sum over the words of exp(feature . embedding); or [B, P]
    precision: str = "fp32"  # of the products behind the normalisers
    widened: bool = False  # tables are fp64 because logits are too large for fp32; log-probabilities are fp32 still
    lengths: tuple[int, ...] | None = None  # of the B sentences that have features of their own; None: one for all

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.features, self.embeddings, self.log_normalizers

    @classmethod
    def of(
        cls, features: Tensor, embeddings: Tensor, precision: str = "fp32", shards: EmissionShards | None = None,
        keep: bool = True,
    ) -> Emission:  # fmt: skip
        """Make an emission: the only place that goes through all words of all preterminals (or of this process's).

        keep: whether their probabilities may be kept for the backward pass, where these are few enough
        """
        widened = not torch.is_grad_enabled() and precision == "fp32" and too_large_for_fp32(features, embeddings)
        if widened:
            features, embeddings = features.double(), embeddings.double()
        p = len(features)
        own = features if shards is None else features[shards.part(p)]
        normalizers = log_normalizers(own, embeddings, precision, keep=keep)
        if shards is not None:
            normalizers = shards.gather(normalizers, p)
        return cls(features, embeddings, normalizers, precision, widened)

    @classmethod
    def of_sentences(
        cls, features: Tensor, embeddings: Tensor, lengths: Sequence[int], precision: str = "fp32"
    ) -> Emission:
        """Make the emission of sentences of these lengths, each with features of its own: [B, P, d]."""
        flat = cls.of(features.flatten(0, 1), embeddings, precision, keep=False)
        return flat._replace(
            features=flat.features.view(features.shape), log_normalizers=flat.log_normalizers.view(features.shape[:2]),
            lengths=tuple(lengths),
        )  # fmt: skip

    def of_sentence(self, sentence: int) -> Emission:
        """Return the emission of one of the sentences that have their own."""
        return self._replace(
            features=self.features[sentence], log_normalizers=self.log_normalizers[sentence], lengths=None
        )

    def log_probabilities(self, words: Tensor) -> Tensor:
        """words: [n] ids on any device -> [n, P] on that of the tables. Each distinct word is computed once.

        Ids on the host are sorted there: the host need not wait for a GPU. Where sentences have features of their own,
        these are all words of the sentences, one after another.
        """
        if self.lengths is not None:
            return self._of_own_words(words)
        distinct, position = torch.unique(words, return_inverse=True)
        device = self.features.device
        distinct, position = distinct.to(device, non_blocking=True), position.to(device, non_blocking=True)
        # Rounded as for the normalisers, or the probabilities of a preterminal would not sum to 1.
        # functional.embedding: rows by number, whose gradient is summed without a sort of the numbers.
        words_given = functional.embedding(distinct, self.embeddings)
        features, embeddings = rounded_factors(self.features, words_given, self.precision)
        columns = embeddings @ features.T - self.log_normalizers  # [distinct, P]
        return functional.embedding(position, columns.float() if self.widened else columns)

    def _of_own_words(self, words: Tensor) -> Tensor:
        device = self.features.device
        ids, there = padded_ids(words, self.lengths or ())
        places = there.flatten().nonzero().squeeze(1).to(device, non_blocking=True)
        words_given = functional.embedding(ids.to(device, non_blocking=True), self.embeddings)  # [B, longest, d]
        features, embeddings = rounded_factors(self.features, words_given, self.precision)
        columns = (embeddings @ features.mT - self.log_normalizers[:, None]).flatten(0, 1)
        return functional.embedding(places, columns.float() if self.widened else columns)

    def posteriors(self, words: Tensor, lengths: list[int], log_likelihood: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Posterior of the preterminals at every word: [l, P] a sentence; zeros where it has probability 0.

        It is the gradient of the sentence's log-likelihood by the log-probabilities of its words.
        log_likelihood: log p(word | preterminal) [sum(lengths), P] -> that of each sentence [B]
        """
        with torch.no_grad(), product_precision("fp32"):
            emissions = self.log_probabilities(words)
        with torch.enable_grad():
            emissions.requires_grad_()
            (posterior,) = torch.autograd.grad(log_likelihood(emissions).sum(), emissions)
        return list(posterior.split(lengths))

    def log_probabilities_of(self, preterminals: Tensor) -> Tensor:
        """Log-probabilities of all words given some preterminals: [n] numbers on the tables' device -> [n, V]."""
        features, embeddings = rounded_factors(self.features[preterminals], self.embeddings, self.precision)
        rows = features @ embeddings.T - self.log_normalizers[preterminals, None]
        return rows.float() if self.widened else rows

    @property
    def warning(self) -> str | None:
        """Say that training has become unstable, if the logits tell."""
        if not self.widened:
            return None
        size = largest_logit(self.features.flatten(0, -2), self.embeddings)
        return (
            f"logits of the emission reach {size:.0e}: the training has become unstable, and bf16 or fp32 no "
            "longer compute it right (`score` has fp64 for words, enough up to 1e12); begin anew with another seed or "
            "a lower rate"
        )

    def describe(self) -> dict[str, float]:
        """Figures that an evaluation logs."""
        return {
            "entropy/emission": self.entropies().mean().item(),
            "emission/longest_feature": self.features.norm(dim=-1).max().item(),
        }

    def entropies(self, rows: int = 1024) -> Tensor:
        """Entropy in nats of each preterminal's words: [P], computed for some rows at a time."""
        parts = []
        for numbers in torch.arange(self.features.shape[0], device=self.features.device).split(rows):
            log_p = self.log_probabilities_of(numbers)
            parts.append(-(log_p.exp() * log_p).sum(1))
        return torch.cat(parts)


def padded_ids(words: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return ids of packed words as a table [B, longest] on the host, 0 after the end, and where there are words."""
    there = torch.arange(max(lengths, default=0)) < torch.tensor(lengths, dtype=torch.int64)[:, None]
    ids = torch.zeros(there.shape, dtype=torch.int64)
    ids[there] = words.cpu()
    return ids, there


def largest_logit(features: Tensor, embeddings: Tensor, rows: int = 1024) -> float:
    """Return the largest |feature . embedding|, computed for some rows at a time."""
    parts = [(part @ embeddings.T).abs().amax() for part in features.split(rows) if len(part)]
    return torch.stack(parts).amax().item() if parts else 0.0


def too_large_for_fp32(features: Tensor, embeddings: Tensor) -> bool:
    if features.dtype != torch.float32 or not len(features):
        return False
    bound = (features.norm(dim=1).amax() * embeddings.norm(dim=1).amax()).item()  # spares most models the products
    return bound > LARGEST_OF_FP32 and largest_logit(features, embeddings) > LARGEST_OF_FP32
