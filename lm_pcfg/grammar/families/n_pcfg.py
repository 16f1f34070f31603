"""N-PCFG of Kim, Dyer and Rush (2019): a neural PCFG whose rules are over pairs of children.

With N nonterminals and P preterminals, E the embeddings of symbols, s that of the start symbol, u those of words:

        root *      softmax over A of u_A . f1(s)                        f1: Linear, Res, Res
        rules       p(B C | A) = softmax over all pairs of (L E_A)_BC    L: Linear, to (N+P)^2 logits
        emission    softmax over w of u_w . f2(E_T)                      f2: Linear, Res, Res

L has a bias, Res is as in sn_pcfg.py. The softmax over all (N+P)^2 pairs of children lets them depend on each other,
where those of a simple PCFG are independent given A. The price is N (N+P)^2 rules, which are made once a step, and as
many multiplications for each span of a sentence (flash_inside/dense). In the authors' code the last layers of root and
emission have biases; here they have none, as in the other families. * The mass of S -> preterminal has a parameter of
its own (`root_probabilities`).

State dropout leaves out symbols, as parents and as children, and the softmaxes are over what is left.
Trees are those of `mbr`; there is no Viterbi, and no trees drawn for a given sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from flash_inside.precision import FORMATS
from flash_inside.softmax import product_precision
from lm_pcfg.grammar.computation import EXACT, Computation
from lm_pcfg.grammar.contexts import EncodedText
from lm_pcfg.grammar.dense import DenseGrammar
from lm_pcfg.grammar.dropout import Dropout
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.families.shared.family import BYTES
from lm_pcfg.grammar.families.shared.pcfg import PCFGFamily
from lm_pcfg.grammar.families.shared.sections import Init, NPCFGSection, PCFGSection
from lm_pcfg.grammar.networks import FEW, initialise, residual_network, root_probabilities


class NeuralPCFG(nn.Module):
    """Embeddings, a linear layer to pairs of children, root and emission networks -> a `DenseGrammar`."""

    def __init__(
        self, *, nonterminals: int, preterminals: int, words: int, dimension: int, root_over: str = "all",
        init: Init, seed: int = 0,
    ):  # fmt: skip
        """root_over: "all" symbols, or "nonterminals", which give sentences of one word no probability."""
        super().__init__()
        self.nonterminals, self.preterminals = nonterminals, preterminals
        symbols = nonterminals + preterminals
        self.start = nn.Parameter(torch.empty(1, dimension))
        self.symbols = nn.Parameter(torch.empty(symbols, dimension))
        self.words = nn.Parameter(torch.empty(words, dimension))
        self.pairs = nn.Linear(dimension, symbols**2)
        self.root_network = residual_network(dimension, pairs=2)
        self.root_output = nn.Parameter(torch.empty(symbols if root_over == "all" else nonterminals, dimension))
        self.emission_network = residual_network(dimension, pairs=2)
        tables = dict.fromkeys(("start", "symbols", "root_output"), init.symbols) | {"words": init.words}
        scheme = "xavier_normal" if init.symbols is not None else init.scheme
        initialise(self, scheme, tables, torch.Generator().manual_seed(seed))
        self.one_word = nn.Parameter(torch.tensor([FEW])) if root_over == "all" else None

    def forward(self, computation: Computation = EXACT) -> DenseGrammar:
        """Compute every tensor that micro-batches need: under ZeRO 3 parameters are empty outside of forward.

        With state dropout, a grammar over the kept symbols, renumbered in their order.
        """
        n = self.nonterminals
        parents, tags = self.symbols.split([n, self.preterminals])
        root_output, weight, bias = (part.view_as(part) for part in (self.root_output, *self.pairs.parameters()))
        if computation.dropout.kept is not None:
            kept = computation.dropout.kept.to(self.symbols.device)
            parents, tags = parents[kept.nonterminals], tags[kept.preterminals]
            both = kept.columns(n)
            root_output = root_output[kept.nonterminals if self.one_word is None else both]
            pairs = (both[:, None] * len(self.symbols) + both).flatten()  # their rows in the layer
            weight, bias = weight[pairs], bias[pairs]
        with product_precision(computation.precision):
            logits = nn.functional.linear(parents, weight, bias)  # [N, (N+P)^2]
            size = len(parents) + len(tags)
            rules = logits.softmax(1).view(len(parents), size, size)
            root_logits = (root_output @ self.root_network(self.start).T).squeeze(1)
            root = root_probabilities(root_logits, len(parents), self.one_word)
            # A view of the word table: the micro-batches' gradients must reach it through this graph alone.
            words = self.words.view_as(self.words)
            emission = Emission.of(self.emission_network(tags), words, computation.precision, computation.shards)
        return DenseGrammar(root, rules, emission)


class NPCFG(PCFGFamily):
    name, section = "n_pcfg", NPCFGSection

    def build(
        self, model: NPCFGSection, words: Sequence[str], seed: int, text: EncodedText | None = None
    ) -> NeuralPCFG:
        return NeuralPCFG(
            nonterminals=model.nonterminals, preterminals=model.preterminals, words=len(words),
            dimension=model.dimension, root_over=model.root, init=model.init, seed=seed,
        )  # fmt: skip

    def model_memory(self, model: PCFGSection, words: int, device: torch.device | str) -> float:
        """Count the weights, and on a CPU the rules of a step."""
        rules = model.nonterminals * (model.nonterminals + model.preterminals) ** 2
        of_a_step = rules * self.share_of_a_step(model) ** 3 if torch.device(device).type == "cpu" else 0
        return BYTES * (self.fewest_weights(model, words) + of_a_step)

    def fewest_weights(self, model: Any, words: int) -> int:
        return ((model.nonterminals + model.preterminals) ** 2 + words) * model.dimension

    def chart_type(self, model: PCFGSection, precision: str) -> torch.dtype:
        return FORMATS[precision].compute  # dense charts are never bf16

    def can_capture(self, model: PCFGSection, dropout: Dropout) -> bool:
        return False


FAMILY = NPCFG()
