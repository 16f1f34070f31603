"""C-PCFG of Kim, Dyer and Rush (2019): a neural PCFG whose rules, root and words depend on each sentence's z.

With z ~ N(0, I) of k numbers, E the embeddings of symbols, s that of the start symbol, u the output tables:

        root *      softmax over A of u_A . f1(s, z)                        f1: Linear [s; z], Res, Res
        rules       p(B C | A) = softmax over all pairs of (L [E_A; z])_BC  L: Linear, to (N+P)^2 logits
        emission    softmax over w of u_w . f2(T, z)                        f2: Linear [E_T; z], Res, Res

L has a bias, Res is as in sn_pcfg.py. Where the weights of z are 0, every sentence has the N-PCFG of the other weights.
* The mass of S -> preterminal has a parameter of its own (`root_probabilities`), the same for all sentences.

Every sentence has N (N+P)^2 rules of its own. lm_pcfg/grammar/compound.py has the encoder, the bound that is trained,
and what is done with z elsewhere. State dropout and trees are as in n_pcfg.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_inside.devices import chart_memory
from flash_inside.precision import FORMATS
from lm_pcfg.grammar.compound import Compound, CompoundModule
from lm_pcfg.grammar.computation import Computation
from lm_pcfg.grammar.contexts import EncodedText
from lm_pcfg.grammar.dense import DenseGrammar
from lm_pcfg.grammar.families.shared.compound import CompoundFamily, CompoundTables
from lm_pcfg.grammar.families.shared.family import BYTES
from lm_pcfg.grammar.families.shared.sections import CPCFGSection
from lm_pcfg.grammar.networks import ALL, LatentLinear, LatentNetwork, root_probabilities


class PairSentenceNetworks(CompoundTables):
    """Embeddings and networks of a C-PCFG -> the `DenseGrammar` of each sentence."""

    def __init__(self, model: CPCFGSection, words: int, generator: torch.Generator):
        super().__init__(model, words)
        d, symbols = model.dimension, model.nonterminals + model.preterminals
        self.root_network = LatentNetwork(d, model.latent, pairs=2)
        self.pairs = LatentLinear(d, model.latent, symbols**2)
        self.initialise(model, generator)

    def chunks(self, lengths: Sequence[int], precision: str, memory: float) -> list[slice]:
        """Plan with four times the rules, as logits, as probabilities and in blocks, and with charts."""
        rules = 4 * BYTES * self.nonterminals * len(self.symbols) ** 2
        longest = chart_memory([max(lengths)], self.nonterminals, precision)
        most = max(1, int(min(memory / (rules + longest), len(lengths))))
        return [slice(first, min(first + most, len(lengths))) for first in range(0, len(lengths), most)]

    def forward(self, z: Tensor, lengths: Sequence[int], computation: Computation) -> DenseGrammar:
        parents, tags, root_output = self.kept(computation)
        rows: slice | Tensor = ALL
        if (kept := computation.dropout.kept) is not None:
            both = kept.columns(self.nonterminals).to(z.device)
            rows = (both[:, None] * len(self.symbols) + both).flatten()  # of the pairs in the layer
        size = len(parents) + len(tags)
        logits = self.pairs(parents, z, rows)  # [B, N, (N+P)^2]
        rules = logits.softmax(2).view(len(z), len(parents), size, size)
        root_logits = self.root_network(self.start, z).squeeze(1) @ root_output.T
        root = root_probabilities(root_logits, len(parents), self.one_word)
        return DenseGrammar(root, rules, self.emission(tags, z, lengths, computation.precision))


class CPCFG(CompoundFamily):
    name, section = "c_pcfg", CPCFGSection

    def build(
        self, model: CPCFGSection, words: Sequence[str], seed: int, text: EncodedText | None = None
    ) -> CompoundModule:
        generator = torch.Generator().manual_seed(seed)
        networks = PairSentenceNetworks(model, len(words), generator)
        return CompoundModule(networks, self.encoder(model, len(words), generator), Compound)

    def rules_of_a_sentence(self, model: CPCFGSection) -> float:
        rules = model.nonterminals * (model.nonterminals + model.preterminals) ** 2
        return rules * self.share_of_a_step(model) ** 3

    def chart_type(self, model: Any, precision: str) -> torch.dtype:
        return FORMATS[precision].compute  # dense charts are never bf16

    def fewest_weights(self, model: CPCFGSection, words: int) -> int:
        return ((model.nonterminals + model.preterminals) ** 2 + words) * model.dimension + words * model.encoder


FAMILY = CPCFG()
