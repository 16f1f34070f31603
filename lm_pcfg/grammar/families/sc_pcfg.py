"""SC-PCFG of Liu, Yang, Kim and Tu (2023): a simple neural PCFG whose rules and words depend on each sentence's z.

With z ~ N(0, I) of k numbers, E the embeddings of symbols, s that of the start symbol, u the output tables:

        root *      softmax over A of u_A . f1(s)                 f1: Linear, Res, Res; the same for all sentences
        left        softmax over B of g2(B) . g3(A, z)            g3(A, z) = relu(Linear [E_A; z]) + E_A
        right       softmax over C of g4(C) . g3(A, z)            g2(B) = relu(Linear E_B) + E_B, g4 likewise
        emission    softmax over w of u_w . f5(T, z)              f5: Linear [E_T; z], Res, Res

Res is as in sn_pcfg.py. Where the weights of z are 0, every sentence has the SN-PCFG of the other weights.
* The mass of S -> preterminal has a parameter of its own (`root_probabilities`).

lm_pcfg/grammar/compound.py has the encoder, the bound that is trained, and what is done with z elsewhere. State dropout
leaves out symbols, as in sn_pcfg.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flash_inside import rules_type
from flash_inside.devices import chunks_of_sentences
from flash_inside.softmax import child_probabilities
from lm_pcfg.grammar.compound import CompoundModule, CompoundSimple, Encoder, SentenceNetworks
from lm_pcfg.grammar.computation import Computation
from lm_pcfg.grammar.contexts import EncodedText
from lm_pcfg.grammar.dropout import Dropout, Latent
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.families.pcfg import BYTES, PCFGFamily
from lm_pcfg.grammar.families.sections import CPCFGSection, PCFGSection, SCPCFGSection
from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.grammar.networks import (
    FEW,
    LatentNetwork,
    LatentResidualLayer,
    ResidualLayer,
    initialise,
    residual_network,
    root_probabilities,
)


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
            rows = torch.cat((kept.nonterminals, kept.preterminals + self.nonterminals))
        return nonterminals[kept.nonterminals], preterminals[kept.preterminals], self.root_output[rows]

    def emission(self, preterminals: Tensor, z: Tensor, lengths: Sequence[int], precision: str) -> Emission:
        return Emission.of_sentences(self.emission_network(preterminals, z), self.words, lengths, precision)


class SimpleSentenceNetworks(CompoundTables):
    """Embeddings and networks of an SC-PCFG -> the `Grammar` of each sentence."""

    def __init__(self, model: CPCFGSection, words: int, generator: torch.Generator):
        super().__init__(model, words)
        d = model.dimension
        self.root_network = residual_network(d, pairs=2)
        self.left_child, self.right_child = ResidualLayer(d), ResidualLayer(d)  # without z, as in the paper
        self.parent = LatentResidualLayer(d, model.latent)
        self.initialise(model, generator)

    def chunks(self, lengths: Sequence[int], precision: str, memory: float) -> list[slice]:
        return chunks_of_sentences(lengths, self.nonterminals, self.preterminals, precision, memory)

    def forward(self, z: Tensor, lengths: Sequence[int], computation: Computation) -> Grammar:
        nonterminals, preterminals, root_output = self.kept(computation)
        symbols = torch.cat((nonterminals, preterminals))
        left, right, *entrances = child_probabilities(
            self.parent(nonterminals, z), self.left_child(symbols), self.right_child(symbols),
            rules_type(computation.charts, len(nonterminals)), computation.precision,
        )  # [B, N, N+P] each  # fmt: skip
        root_logits = (root_output @ self.root_network(self.start).T).squeeze(1)
        root = root_probabilities(root_logits, len(nonterminals), self.one_word)
        emission = self.emission(preterminals, z, lengths, computation.precision)
        return Grammar(root.expand(len(z), -1), left, right, emission, (entrances[0], entrances[1]))


class CompoundFamily(PCFGFamily):
    """A family of compound PCFGs."""

    shares_emission = False  # sentences have their own
    works_with_weights = True

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


class SCPCFG(CompoundFamily):
    name, section = "sc_pcfg", SCPCFGSection

    def build(
        self, model: SCPCFGSection, words: Sequence[str], seed: int, text: EncodedText | None = None
    ) -> CompoundModule:
        generator = torch.Generator().manual_seed(seed)
        networks = SimpleSentenceNetworks(model, len(words), generator)
        return CompoundModule(networks, self.encoder(model, len(words), generator), CompoundSimple)

    def rules_of_a_sentence(self, model: SCPCFGSection) -> float:
        rules = 2 * model.nonterminals * (model.nonterminals + model.preterminals)
        return rules * self.share_of_a_step(model) ** 2

    def fewest_weights(self, model: SCPCFGSection, words: int) -> int:
        return (model.nonterminals + model.preterminals + words) * model.dimension + words * model.encoder


FAMILY = SCPCFG()
