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

import torch
from torch import Tensor

from flash_inside import rules_type
from flash_inside.devices import chunks_of_sentences
from flash_inside.softmax import child_probabilities
from lm_pcfg.grammar.compound import CompoundModule, CompoundSimple
from lm_pcfg.grammar.computation import Computation
from lm_pcfg.grammar.contexts import EncodedText
from lm_pcfg.grammar.families.shared.compound import CompoundFamily, CompoundTables
from lm_pcfg.grammar.families.shared.sections import CPCFGSection, SCPCFGSection
from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.grammar.networks import (
    LatentResidualLayer,
    ResidualLayer,
    residual_network,
    root_probabilities,
)


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
