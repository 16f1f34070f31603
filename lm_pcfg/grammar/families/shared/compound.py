"""What compound PCFGs have in common: tables, the network of the emission, memory, the noise of a step.

lm_pcfg/grammar/compound.py has the encoder and the bound that is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lm_pcfg.grammar.compound import Encoder, SentenceNetworks
from lm_pcfg.grammar.computation import Computation
from lm_pcfg.grammar.dropout import Dropout, Latent
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.families.shared.family import BYTES
from lm_pcfg.grammar.families.shared.pcfg import PCFGFamily
from lm_pcfg.grammar.families.shared.sections import CPCFGSection, PCFGSection
from lm_pcfg.grammar.networks import FEW, LatentNetwork, initialise


class CompoundTables(SentenceNetworks):
    """The tables that compound PCFGs have in common, and the networks of root and emission."""

    def __init__(self, model: CPCFGSection, words: int):
        super().__init__()
        n, p, d = model.nonterminals, model.preterminals, model.dimension
        self.nonterminals, self.preterminals, self.latent = n, p, model.latent
        self.start = nn.Parameter(torch.empty(1, d))
        self.symbols = nn.Parameter(torch.empty(n + p, d))
        self.words = nn.Parameter(torch.empty(words, d))
        self.root_output = nn.Parameter(torch.empty(n + p if model.root == "all" else n, d))
        self.emission_network = LatentNetwork(d, model.latent, pairs=2)

    def initialise(self, model: CPCFGSection, generator: torch.Generator) -> None:
        """Fill all parameters, once the subclass has made its own."""
        init = model.init
        tables = dict.fromkeys(("start", "symbols", "root_output"), init.symbols) | {"words": init.words}
        initialise(self, "xavier_normal" if init.symbols is not None else init.scheme, tables, generator)
        self.one_word = nn.Parameter(torch.tensor([FEW])) if model.root == "all" else None

    def kept(self, computation: Computation) -> tuple[Tensor, Tensor, Tensor]:
        """Return what a step keeps: embeddings of nonterminals and of preterminals, and the root's output table."""
        nonterminals, preterminals = self.symbols.split([self.nonterminals, self.preterminals])
        kept = computation.dropout.kept
        if kept is None:
            return nonterminals, preterminals, self.root_output
        kept = kept.to(self.symbols.device)
        rows = kept.nonterminals
        if self.one_word is not None:
            rows = kept.columns(self.nonterminals)
        return nonterminals[kept.nonterminals], preterminals[kept.preterminals], self.root_output[rows]

    def emission(self, preterminals: Tensor, z: Tensor, lengths: Sequence[int], precision: str) -> Emission:
        return Emission.of_sentences(self.emission_network(preterminals, z), self.words, lengths, precision)


class CompoundFamily(PCFGFamily):
    """A family of compound PCFGs."""

    shares_emission = False  # sentences have their own
    works_with_weights = True
    scores_are_bounds = True

    def rules_of_a_sentence(self, model: Any) -> float:
        """Return how many rule probabilities a sentence has."""
        raise NotImplementedError

    def encoder(self, model: CPCFGSection, words: int, generator: torch.Generator) -> Encoder:
        return Encoder(words, model.encoder, model.latent, generator)

    def model_memory(self, model: PCFGSection, words: int, device: torch.device | str) -> float:
        """Count the weights, and on a CPU the rules of one sentence."""
        rules = self.rules_of_a_sentence(model) if torch.device(device).type == "cpu" else 0
        return BYTES * (self.fewest_weights(model, words) + rules)

    def check_memory(self, model: Any, words: int, device: torch.device | str, copies: int = 1) -> float:
        """Refuse a model that has no room for one sentence, and return the bytes of its weights.

        The rules of a sentence are not among them: `chart_memory` has those of all.
        """
        super().check_memory(model, words, device, copies)
        return copies * BYTES * self.fewest_weights(model, words)

    def chart_memory(self, model: PCFGSection, lengths: Sequence[int], precision: str) -> float:
        """Rules and their gradients are of each sentence."""
        rules = 2 * BYTES * len(lengths) * self.rules_of_a_sentence(model)
        return super().chart_memory(model, lengths, precision) + rules

    def dropout(self, model: Any, *, seed: int, step: int, total_steps: int) -> Dropout:
        """Add the noise of the step's latent vectors."""
        weight = min(1.0, (step + 1) / model.kl_warmup_steps) if model.kl_warmup_steps else 1.0
        dropout = super().dropout(model, seed=seed, step=step, total_steps=total_steps)
        return dropout._replace(latent=Latent(seed, step, weight))

    def can_capture(self, model: PCFGSection, dropout: Dropout) -> bool:
        return False
