"""SN-PCFG: the simple neural PCFG of Liu, Yang, Kim and Tu (2023), as the paper writes it and as its code has it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flash_inside import rules_type
from flash_inside.softmax import child_probabilities, operand, product_precision
from lm_pcfg.grammar.computation import EXACT, Computation
from lm_pcfg.grammar.contexts import TEXT_FOR_CONTEXTS, EncodedText, context_vectors
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.families.shared.pcfg import PCFGFamily, cut_rows
from lm_pcfg.grammar.families.shared.sections import PCFGSection, SNPCFGSection
from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.grammar.networks import FEW, ResidualLayer, initialise, residual_network, root_probabilities, rotation


class SimplePCFG(nn.Module):
    """Symbol and word embeddings -> a `Grammar`.

    With E the symbol embeddings (nonterminals, then preterminals), s the start embedding, u the output tables:

                    paper (appendix A)                           released (the authors' code)
        root *      softmax(u_A . f1(s)),  f1: Linear, Res, Res  softmax(s . E_A)
        left        softmax over B of f2(E_B) . f3(E_A)          the same
        right       softmax over C of f4(E_C) . f3(E_A)          the same
        emission    softmax over w of u_w . f5(E_T)              the same
                    f5: Linear, Res, Res                         f5: Linear, Res, Res, Res and an outer skip

    f2, f3, f4 are relu(W x + b) + x;  Res(x) = relu(W2 relu(W1 x + b1) + b2) + x.

    * over nonterminals, of mass 1 - q, and likewise over preterminals (S -> T, one-word sentences), of mass q, with one
    parameter of its own: q = sigmoid(g); `root_probabilities` has the reason.

    Ours, off by default:
    - rotated_children: f2 and f4 are relu(W x + b) + R x, each with a matrix R that begins as a random rotation;
      without, E_A . E_A is by far the largest of the E_B . E_A once embeddings are larger than Xavier's: of deviation
      0.15, N 2048, every symbol begins as its own left and its own right child with probability 0.90, and what is never
      used stays so; and left and right begin almost alike (log probabilities correlate by 0.83).
    - emission_temperature divides the emission's logits.
    - parameterization "bounded": those of released, but each Res is a bounded one (`networks.ResidualPair`).
    """

    def __init__(
        self,
        *,
        nonterminals: int,
        preterminals: int,
        words: int,
        dimension: int = 512,
        emission_temperature: float = 1.0,
        rotated_children: bool = False,
        parameterization: str = "paper",
        root_over: str = "all",
        init: str = "xavier_normal",
        symbol_deviation: float | None = None,
        word_deviation: float | None = None,
        word_vectors: Tensor | None = None,
        seed: int = 0,
    ):
        """init: scheme of the matrices; symbol_deviation, word_deviation: normal(symbols, words) for the tables.

        word_vectors: [words, dimension] of mean square 1, where words begin instead of at random.
        """
        super().__init__()
        self.nonterminals, self.preterminals = nonterminals, preterminals
        self.parameterization = parameterization
        self.emission_temperature = emission_temperature
        roots = nonterminals + preterminals if root_over == "all" else nonterminals
        self.roots = roots
        self.start = nn.Parameter(torch.empty(1, dimension))
        self.symbols = nn.Parameter(torch.empty(nonterminals + preterminals, dimension))
        self.words = nn.Parameter(torch.empty(words, dimension))
        self.left_child = ResidualLayer(dimension)
        self.right_child = ResidualLayer(dimension)
        self.parent = ResidualLayer(dimension)
        if parameterization == "paper":
            self.root_network = residual_network(dimension, pairs=2)
            self.root_output = nn.Parameter(torch.empty(roots, dimension))
            self.emission_network = residual_network(dimension, pairs=2)
        elif parameterization in ("released", "bounded"):
            self.emission_network = residual_network(dimension, pairs=3, bounded=parameterization == "bounded")
        else:
            raise ValueError(f"unknown parameterization {parameterization!r}: paper, released or bounded")
        tables = {"symbols": symbol_deviation, "start": symbol_deviation, "root_output": symbol_deviation}
        generator = torch.Generator().manual_seed(seed)
        initialise(self, init, {**tables, "words": word_deviation}, generator)
        if word_vectors is not None:
            with torch.no_grad():
                self.words.copy_(word_vectors * (word_deviation or 1.0))
        # After the others, which begin the same with and without these.
        self.one_word = nn.Parameter(torch.tensor([FEW])) if root_over == "all" else None
        self.left_rotation = rotation(dimension, generator) if rotated_children else None
        self.right_rotation = rotation(dimension, generator) if rotated_children else None

    def forward(self, computation: Computation = EXACT) -> Grammar:
        """Compute every tensor that micro-batches need: under ZeRO 3 parameters are empty outside of forward.

        With state dropout, a grammar over the kept symbols, renumbered in their order.
        """
        with product_precision(computation.precision):
            return self._grammar(computation)

    def _grammar(self, computation: Computation) -> Grammar:
        # In bf16 all networks but the root's compute in it. Weights are fp32, and so are sums of their gradients; what
        # flows back to the symbols is bf16.
        table = operand(self.symbols, computation.precision)
        nonterminals, preterminals = table.split([self.nonterminals, self.preterminals])
        of_root: Tensor = self.root_output if self.parameterization == "paper" else self.symbols
        if computation.dropout.kept is not None:
            kept = computation.dropout.kept.to(self.symbols.device)
            nonterminals, preterminals = nonterminals[kept.nonterminals], preterminals[kept.preterminals]
            root_rows = kept.nonterminals
            if self.roots > self.nonterminals:
                root_rows = kept.columns(self.nonterminals)
            of_root = of_root[root_rows]
        elif self.roots < len(of_root):  # a slice of all rows would cost two passes over its gradient
            of_root = of_root[: self.roots]
        symbols = torch.cat((nonterminals, preterminals))  # [N+P, d]

        left, right, *entrances = child_probabilities(
            self.parent(nonterminals),
            self.left_child(symbols, self.left_rotation and self.left_rotation(symbols)),
            self.right_child(symbols, self.right_rotation and self.right_rotation(symbols)),
            rules_type(computation.charts, len(nonterminals)),
            computation.precision,
        )  # [N, N+P] each

        features = self.emission_network(preterminals)  # [P, d]
        if self.parameterization == "paper":
            root_logits = (of_root @ self.root_network(self.start).T).squeeze(1)
        else:
            features = features + preterminals
            root_logits = (of_root @ self.start.T).squeeze(1)
        root = root_probabilities(root_logits, len(nonterminals), self.one_word)
        features = features.to(self.words.dtype)
        features = computation.dropout.features(features)
        if self.emission_temperature != 1.0:
            features = features / self.emission_temperature
        # A view of the word table: the micro-batches' gradients must reach it through this graph alone.
        emission = Emission.of(features, self.words.view_as(self.words), computation.precision, computation.shards)
        return Grammar(root, left, right, emission, (entrances[0], entrances[1]))


class SNPCFG(PCFGFamily):
    name, section = "sn_pcfg", SNPCFGSection

    def build(
        self, model: SNPCFGSection, words: Sequence[str], seed: int,
        text: EncodedText | None = None
    ) -> SimplePCFG:  # fmt: skip
        init = model.init
        return SimplePCFG(
            nonterminals=model.nonterminals,
            preterminals=model.preterminals,
            words=len(words),
            dimension=model.dimension,
            emission_temperature=model.emission_temperature,
            rotated_children=model.children == "rotated",
            parameterization=model.parameterization,
            root_over=model.root,
            init="xavier_normal" if init.symbols is not None else init.scheme,
            symbol_deviation=init.symbols,
            word_deviation=init.words,
            word_vectors=None if text is None else context_vectors(text, len(words), model.dimension, seed),
            seed=seed,
        )

    def fewest_weights(self, model: SNPCFGSection, words: int) -> int:
        return (model.nonterminals + model.preterminals + words) * model.dimension

    def text_wanted(self, model: SNPCFGSection) -> int:
        return TEXT_FOR_CONTEXTS if model.init.scheme == "contexts" else 0

    def cut(
        self, model: SNPCFGSection, tensors: dict[str, Tensor], nonterminals: Tensor, preterminals: Tensor
    ) -> tuple[PCFGSection, dict[str, Tensor]]:
        return cut_rows(model, tensors, nonterminals, preterminals, ["symbols", "root_output"])

    def feature_rate(self, model: SNPCFGSection) -> float:
        return model.feature_dropout


FAMILY = SNPCFG()
