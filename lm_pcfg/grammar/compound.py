"""Compound PCFGs: every sentence has a grammar of its own, made from its latent vector z ~ N(0, I).

    log p(x) = log of the mean over z of p(x | z)  >=  E_q [log p(x | z)] - KL(q(z | x) || N(0, I))

An encoder reads the sentence and gives q(z | x), a normal distribution with a mean and a variance for each coordinate.
The bound is estimated with one z ~ q, drawn as mean + deviation x noise, so that gradients reach the encoder.

The noise of a sentence is a function of the seed, the step and the sentence's own words: ranks, the order of batches, a
resume and a recomputation change nothing. Scores draw z as well: with the mean of q nothing would be bounded. Trees are
those of the grammar of the mean.

What a step computes once is nothing but views of the weights: grammars depend on sentences, so that each micro-batch
makes its own, and leaves its gradients at the weights.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from flash_inside import Statistics
from flash_inside.devices import memory_of
from flash_inside.packing import taken
from flash_inside.softmax import product_precision
from lm_pcfg.grammar.computation import EXACT, Computation
from lm_pcfg.grammar.dropout import Latent
from lm_pcfg.grammar.emission import padded_ids
from lm_pcfg.grammar.generation import Derivation
from lm_pcfg.grammar.grammar import Grammar

#: Without gradients, sentences are computed in chunks whose rules and charts take this part of the device's memory.
CHUNK = 0.1
#: With gradients, in chunks that take this part of it. They have logits and gradients, too: so many times the memory.
CHUNK_WITH_GRADIENTS, MORE_WITH_GRADIENTS = 0.5, 4
#: What `log_likelihood` estimates: the bound, log p(x, z) - log q(z | x) (an importance weight), or the KL term.
Estimate = Literal["bound", "weight", "kl"]


# ---- q(z | x) -------------------------------------------------------------------------------------------------------


class Posterior(NamedTuple):
    """Normal distributions of the latent vectors of some sentences."""

    mean: Tensor  # [B, k]
    log_variance: Tensor  # [B, k]

    def at(self, noise: Tensor) -> Tensor:
        """Return the z of standard normal noise."""
        return self.mean + (0.5 * self.log_variance).exp() * noise

    def divergence(self) -> Tensor:
        """KL(q || N(0, I)) in nats: [B]."""
        return 0.5 * (self.mean.square() + self.log_variance.exp() - 1.0 - self.log_variance).sum(1)

    def log_ratio(self, noise: Tensor) -> Tensor:
        """log q(z) - log N(z; 0, I) at the z of this noise: [B]. Its mean over the noise is the divergence."""
        return 0.5 * (self.at(noise).square() - noise.square() - self.log_variance).sum(1)


class _LSTM(nn.LSTM):
    def flatten_parameters(self) -> None:
        """Leave the weights where they are: micro-batches give others."""


class Encoder(nn.Module):
    """q(z | x): word embeddings, a bidirectional LSTM, the maximum over the words, a linear layer to both moments."""

    def __init__(self, words: int, dimension: int, latent: int, generator: torch.Generator):
        super().__init__()
        self.embeddings = nn.Parameter(torch.empty(words, dimension))
        self.states = _LSTM(dimension, dimension, bidirectional=True)
        self.moments = nn.Linear(2 * dimension, 2 * latent)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter, generator=generator)
            else:
                nn.init.uniform_(parameter, -(dimension**-0.5), dimension**-0.5, generator=generator)

    def forward(self, words: Tensor, lengths: Sequence[int]) -> Posterior:
        """words: [sum(lengths)] ids on any device"""
        ids, _ = padded_ids(words, lengths)
        embedded = nn.functional.embedding(ids.T.to(self.embeddings.device, non_blocking=True), self.embeddings)
        packed = pack_padded_sequence(embedded, torch.tensor(lengths), enforce_sorted=False)
        with (
            warnings.catch_warnings()
        ):  # weights of a micro-batch's graph are never one chunk of memory; they are small
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk of memory")
            found, _ = self.states(packed)
        states, _ = pad_packed_sequence(found, padding_value=-math.inf)  # [longest, B, 2 dimension]
        mean, log_variance = self.moments(states.amax(0)).chunk(2, dim=1)
        return Posterior(mean, log_variance)


def sentence_noise(words: Tensor, lengths: Sequence[int], size: int, latent: Latent, draw: int = 0) -> Tensor:
    """Draw standard normal noise for each sentence from (seed, step, draw, its words) alone: fp64 [B, size]."""
    beginning = f"{latent.seed} {latent.step} {draw} ".encode()
    ends = np.cumsum(lengths).tolist()
    ids = words.cpu().numpy().astype(np.int64)
    noise = np.empty((len(lengths), size))
    for row, length, end in zip(noise, lengths, ends, strict=True):
        key = hashlib.blake2b(beginning + ids[end - length : end].tobytes(), digest_size=16).digest()
        np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).standard_normal(out=row)
    return torch.from_numpy(noise)


# ---- networks whose weights are given -------------------------------------------------------------------------------


class Network(NamedTuple):
    """A module, and the weights that it computes with instead of its own."""

    weights: tuple[Tensor, ...]
    module: Any

    @classmethod
    def of(cls, module: nn.Module) -> Network:
        """Take views: micro-batches' gradients must reach the parameters through the graph of the step alone."""
        return cls(tuple(parameter.view_as(parameter) for parameter in module.parameters()), module)

    def __call__(self, *inputs: Any) -> Any:
        names = (name for name, _ in self.module.named_parameters())
        return functional_call(self.module, dict(zip(names, self.weights, strict=True)), inputs)

    def detached(self) -> Network:
        return self._replace(weights=tuple(weight.detach().requires_grad_() for weight in self.weights))


class SentenceNetworks(nn.Module):
    """Networks of a family: `forward(z, lengths, computation)` makes the grammars of sentences from z [B, k]."""

    nonterminals: int
    latent: int  # k

    def chunks(self, lengths: Sequence[int], precision: str, memory: float) -> list[slice]:
        """Cut sentences into chunks whose rules and charts take so many bytes, or that have one sentence."""
        raise NotImplementedError


class CompoundModule(nn.Module):
    """All parameters of a compound PCFG. `forward` computes nothing yet."""

    def __init__(self, networks: SentenceNetworks, encoder: Encoder, distribution: type[Compound]):
        super().__init__()
        self.networks, self.encoder, self.distribution = networks, encoder, distribution

    def forward(self, computation: Computation = EXACT) -> Compound:
        return self.distribution(Network.of(self.networks), Network.of(self.encoder), computation)


# ---- the distribution -----------------------------------------------------------------------------------------------


class Compound(NamedTuple):
    """The distribution over sentences of a compound PCFG; log-likelihoods are estimates of a lower bound."""

    networks: Network
    encoder: Network
    computation: Computation
    estimate: Estimate = "bound"
    draw: int = 0  # which of many z of a sentence
    over_nonterminals: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.networks.weights, *self.encoder.weights)

    @property
    def penalty(self) -> None:
        return None

    @property
    def nonterminals(self) -> int:
        return self.networks.module.nonterminals

    def detached(self) -> Compound:
        return self._replace(networks=self.networks.detached(), encoder=self.encoder.detached())

    def estimating(self, estimate: Estimate, *, draw: int = 0, seed: int = 0) -> Compound:
        """The same with another estimate in `log_likelihood`, or with the z of another draw."""
        dropout = self.computation.dropout
        computation = self.computation._replace(dropout=dropout._replace(latent=dropout.latent._replace(seed=seed)))
        return self._replace(estimate=estimate, draw=draw, computation=computation)

    @property
    def sentence_figures(self) -> dict[str, Compound]:
        """What an evaluation logs the mean of: figure -> a distribution that has it as its log-likelihood."""
        return {"kl": self.estimating("kl")}  # nats

    def with_root_over_nonterminals(self) -> Compound:
        """The paper's root in every grammar: see `Grammar.with_root_over_nonterminals`."""
        return self._replace(over_nonterminals=True)

    # ---- sentences --------------------------------------------------------------------------------------------------

    def log_likelihood(
        self, words: Tensor, lengths: list[int], *, precision: str = "fp32", backend: str = "auto",
        statistics: Statistics | None = None, limits: np.ndarray | None = None,
    ) -> Tensor:  # fmt: skip
        """Estimate the evidence lower bound of each sentence, in nats, with one z: [B]. Arguments as of a `Grammar`."""

        def compute(grammar: Any, some: _Chunk) -> tuple[Tensor, ...]:
            how = {"precision": precision, "backend": backend, "statistics": statistics}
            return (grammar.log_likelihood(some.words, some.lengths, limits=some.limits, **how),)

        return self._estimated(words, lengths, limits, compute)[0]

    def log_likelihood_unchecked(
        self, words: Tensor, lengths: list[int], *, precision: str = "fp32", backend: str = "auto",
        limits: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The same before it is known which sentences have to be recomputed; see `flash_inside.inside_unchecked`."""

        def compute(grammar: Any, some: _Chunk) -> tuple[Tensor, ...]:
            how = {"precision": precision, "backend": backend}
            return grammar.log_likelihood_unchecked(some.words, some.lengths, limits=some.limits, **how)

        estimates, trusted = self._estimated(words, lengths, limits, compute)
        return estimates, trusted

    def _estimated(
        self, words: Tensor, lengths: list[int], limits: np.ndarray | None,
        compute: Callable[[Any, _Chunk], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """compute: log p(x | z) of a chunk of sentences from their grammars, and perhaps more"""
        if not lengths:
            nothing = self.tensors[0].new_zeros(0)
            return nothing, nothing.bool()
        chunks = list(self._chunks(words, lengths, limits))
        again = torch.is_grad_enabled() and len(chunks) > 1
        parts = [self._of_chunk_twice(some, compute) if again else self._of_chunk(some, compute) for some in chunks]
        return tuple(torch.cat(of_all) for of_all in zip(*parts, strict=True))

    def _of_chunk(self, some: _Chunk, compute: Callable[[Any, _Chunk], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        posterior, latent = self.posterior(some.words, some.lengths), self.computation.dropout.latent
        if self.estimate == "kl":
            return (posterior.divergence(),)
        noise = sentence_noise(some.words, some.lengths, self.networks.module.latent, latent, self.draw)
        noise = noise.to(posterior.mean.dtype).to(posterior.mean.device, non_blocking=True)
        if self.estimate == "bound":
            cost = latent.kl_weight * posterior.divergence()
        else:
            cost = posterior.log_ratio(noise)
        grammar = self.given(posterior.at(noise), some.lengths)
        log_p, *others = _through_entrances(grammar, lambda leaves: compute(leaves, some))
        return (log_p - cost, *others)

    def _of_chunk_twice(self, some: _Chunk, compute: Callable[[Any, _Chunk], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Compute a chunk without what its backward pass needs, which is made anew there: one chunk's at a time."""
        of_networks = len(self.networks.weights)

        def with_weights(*weights: Tensor) -> tuple[Tensor, ...]:
            networks = self.networks._replace(weights=weights[:of_networks])
            encoder = self.encoder._replace(weights=weights[of_networks:])
            return self._replace(networks=networks, encoder=encoder)._of_chunk(some, compute)

        return checkpoint(with_weights, *self.tensors, use_reentrant=True, preserve_rng_state=False)

    def posterior(self, words: Tensor, lengths: list[int]) -> Posterior:
        with product_precision(self.computation.precision):
            return self.encoder(words, lengths)

    def given(self, z: Tensor, lengths: Sequence[int]) -> Any:
        """Return the grammars of sentences of these lengths with these latent vectors: [B, k]."""
        with product_precision(self.computation.precision):
            grammar = self.networks(z, lengths, self.computation)
        return grammar.with_root_over_nonterminals() if self.over_nonterminals else grammar

    def _chunks(self, words: Tensor, lengths: list[int], limits: np.ndarray | None = None) -> Iterator[_Chunk]:
        """Yield so many sentences at a time as there is memory for."""
        memory = float(memory_of(self.tensors[0].device))
        memory *= CHUNK_WITH_GRADIENTS / MORE_WITH_GRADIENTS if torch.is_grad_enabled() else CHUNK
        chunks = self.networks.module.chunks(lengths, self.computation.charts, memory)
        if len(chunks) == 1:
            yield _Chunk(words, lengths, limits)
            return
        for chunk in chunks:
            some = range(chunk.start, chunk.stop)
            own_limits = None if limits is None else taken(limits, lengths, some)
            own_words = torch.from_numpy(taken(words.cpu().numpy(), lengths, some))
            yield _Chunk(own_words, [lengths[sentence] for sentence in some], own_limits)

    # ---- trees: of the grammar of the posterior mean ----------------------------------------------------------------

    def of_means(self, words: Tensor, lengths: list[int]) -> Iterator[tuple[Any, _Chunk]]:
        """Yield chunks of the sentences with their grammars."""
        for some in self._chunks(words, lengths):
            yield self.given(self.posterior(some.words, some.lengths).mean, some.lengths), some

    def _of_means(self, method: str, words: Tensor, lengths: list[int], **arguments: Any) -> list[Any]:
        """Return what a method of these grammars says of each sentence."""
        return [
            of_sentence
            for grammar, some in self.of_means(words, lengths)
            for of_sentence in getattr(grammar, method)(some.words, some.lengths, **arguments)
        ]

    @torch.no_grad()
    def span_marginals(
        self, words: Tensor, lengths: list[int], *, precision: str = "fp32", backend: str = "auto",
        statistics: Statistics | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Posterior of every span: see `Grammar.span_marginals`."""
        how = {"precision": precision, "backend": backend, "statistics": statistics}
        return self._of_means("span_marginals", words, lengths, **how)

    @torch.no_grad()
    def word_posteriors(
        self, words: Tensor, lengths: list[int], *, precision: str = "fp32", backend: str = "auto",
        statistics: Statistics | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Posterior of the preterminals at every word: see `Grammar.word_posteriors`."""
        how = {"precision": precision, "backend": backend, "statistics": statistics}
        return self._of_means("word_posteriors", words, lengths, **how)

    @torch.no_grad()
    def last_siblings(self, words: Tensor, lengths: list[int]) -> list[Tensor]:
        """Posterior of where the sibling of the last word begins: see `flash_inside.last_siblings`."""
        return self._of_means("last_siblings", words, lengths)

    # ---- grammars without a sentence --------------------------------------------------------------------------------

    @torch.no_grad()
    def at(self, z: Tensor) -> Any:
        """Return the grammar of one latent vector [k]: a `Grammar` or a `DenseGrammar`."""
        return self.given(z[None], [1]).of_sentence(0)

    def of_prior_mean(self) -> Any:
        """Return the grammar of z = 0, which stands for all of them where one is described."""
        return self.at(self.tensors[0].new_zeros(self.networks.module.latent))

    def drawn(self, number: int, *, seed: int) -> Iterator[Any]:
        """Yield grammars of latent vectors from N(0, I). The same seed draws the same ones."""
        random, first = np.random.default_rng(seed), self.tensors[0]
        for _ in range(number):
            yield self.at(torch.from_numpy(random.standard_normal(self.networks.module.latent)).to(first))

    def sample(self, number: int, *, seed: int, max_length: int, end_id: int | None = None) -> Iterator[Derivation]:
        """Draw so many sentences with their trees, each of a grammar of its own."""
        seeds = np.random.SeedSequence([seed, 1]).generate_state(number, np.uint64).tolist()
        for grammar, own_seed in zip(self.drawn(number, seed=seed), seeds, strict=True):
            yield from grammar.sample(1, seed=own_seed, max_length=max_length)

    @property
    def warning(self) -> str | None:
        return self.of_prior_mean().warning

    def describe(self, thorough: bool = False) -> dict[str, float]:
        """Describe the grammar of z = 0."""
        return self.of_prior_mean().describe(thorough)


class CompoundSimple(Compound):
    """Where the grammars of sentences are simple PCFGs, which have more kinds of trees."""

    @torch.no_grad()
    def viterbi(
        self, words: Tensor, lengths: list[int], *, precision: str = "fp32", backend: str = "auto"
    ) -> list[tuple[float, list[tuple[int, int, int]]]]:
        """Find the most probable labelled tree of every sentence, as `flash_inside.viterbi` returns it."""
        return self._of_means("viterbi", words, lengths, precision=precision, backend=backend)

    @torch.no_grad()
    def sample_trees(
        self, words: Tensor, lengths: list[int], samples: int, generator: torch.Generator
    ) -> list[list[tuple[float, list[tuple[int, int, int]]]]]:
        """Draw trees of every sentence, as `flash_inside.sample_trees` returns them."""
        return self._of_means("sample_trees", words, lengths, samples=samples, generator=generator)


class _Chunk(NamedTuple):
    """Some sentences."""

    words: Tensor
    lengths: list[int]
    limits: np.ndarray | None


# ---- narrow rules with wide gradients -------------------------------------------------------------------------------


def _through_entrances(grammar: Any, compute: Callable[[Any], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Compute log-probabilities, and perhaps more, of grammars; narrow rules take no gradients but at `entrances`."""
    if not isinstance(grammar, Grammar) or grammar.entrances is None or grammar.entrances[0] is grammar.left:
        return compute(grammar)
    if not torch.is_grad_enabled():
        return compute(grammar)
    leaves = grammar.detached()
    log_p, *others = compute(leaves)
    return _Entered.apply([log_p], leaves.tensors, *grammar.tensors), *others


class _Entered(torch.autograd.Function):
    """Log-probabilities computed on leaves, whose gradients then enter at the tensors that these are copies of."""

    @staticmethod
    def forward(ctx: Any, log_p: list[Tensor], leaves: tuple[Tensor, ...], *tensors: Tensor) -> Tensor:
        ctx.inner = log_p[0], leaves
        return log_p[0].detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (log_p, leaves), ctx.inner = ctx.inner, None  # its charts are needed once
        torch.autograd.backward(log_p, gradient)
        return None, None, *(leaf.grad for leaf in leaves)
