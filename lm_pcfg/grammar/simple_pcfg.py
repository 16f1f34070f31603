"""SN-PCFG: the simple neural PCFG of Liu, Yang, Kim and Tu (2023), as the paper writes it and as its code has it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from flash_inside.softmax import child_probabilities, product_precision
from lm_pcfg.grammar.boundary import Emission, Grammar
from lm_pcfg.grammar.computation import EXACT, Computation
from lm_pcfg.grammar.networks import ResidualLayer, initialise, residual_network, rotation
from lm_pcfg.grammar.spelling import Spelling
from lm_pcfg.grammar.state_dropout import Kept

FEW = -5.0  # at the beginning 0.7 % of sentences have one word (PTB: 0.3 %)


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
    parameter of its own: q = sigmoid(g). One softmax over both does not train: steps without one-word sentences, which
    are nearly all, drive S -> T below e^-700 (PTB, N 2048, after 500 steps), and then they have no probability at all.

    Ours, off by default:
    - rotated_children: f2 and f4 are relu(W x + b) + R x, each with a matrix R that begins as a random rotation;
      without, E_A . E_A is by far the largest of the E_B . E_A once embeddings are larger than Xavier's: of deviation
      0.15, N 2048, every symbol begins as its own left and its own right child with probability 0.90, and what is never
      used stays so; and left and right begin almost alike (log probabilities correlate by 0.83).
    - word_dimension: u_w = W' v_w with a smaller table v (computed as (W'^T f5) . v_w, which is cheaper).
    - spelling: u_w has a part that comes from how w is written, and is shared by all words written alike.
    - emission_temperature divides the emission's logits.
    - word_bias adds one number a word to them, which begins as log 1 / (rank + 2.7), Zipf's law for vocabularies sorted
      by frequency. (On the Penn Treebank that is within 0.03 nats of the frequencies.)
    - emission_smoothing e: p(w | T) = (1 - e) softmax + e b_w with one distribution b for all preterminals; it begins
      as Zipf's law too. For little text: there networks are too sure of what a preterminal does not emit.
    """

    def __init__(
        self,
        *,
        nonterminals: int,
        preterminals: int,
        words: int,
        dimension: int = 512,
        word_dimension: int | None = None,
        emission_temperature: float = 1.0,
        emission_smoothing: float = 0.0,
        word_bias: bool = False,
        rotated_children: bool = False,
        spelling: Spelling | None = None,
        parameterization: str = "paper",
        root_over: str = "all",
        init: str = "xavier_normal",
        symbol_deviation: float | None = None,
        word_deviation: float | None = None,
        word_vectors: Tensor | None = None,
        seed: int = 0,
    ):
        """init: scheme of the matrices; symbol_deviation, word_deviation: normal(symbols, words) for the tables.

        word_vectors: [words, dimension of the words] of mean square 1, where words begin instead of at random.
        """
        super().__init__()
        self.nonterminals, self.preterminals = nonterminals, preterminals
        self.parameterization = parameterization
        self.emission_temperature = emission_temperature
        self.emission_smoothing = emission_smoothing
        roots = nonterminals + preterminals if root_over == "all" else nonterminals
        self.roots = roots
        self.start = nn.Parameter(torch.empty(1, dimension))
        self.symbols = nn.Parameter(torch.empty(nonterminals + preterminals, dimension))
        self.words = nn.Parameter(torch.empty(words, word_dimension or dimension))
        self.word_projection = nn.Linear(dimension, word_dimension, bias=False) if word_dimension else nn.Identity()
        self.left_child = ResidualLayer(dimension)
        self.right_child = ResidualLayer(dimension)
        self.parent = ResidualLayer(dimension)
        if parameterization == "paper":
            self.root_network = residual_network(dimension, pairs=2)
            self.root_output = nn.Parameter(torch.empty(roots, dimension))
            self.emission_network = residual_network(dimension, pairs=2)
        elif parameterization == "released":
            self.emission_network = residual_network(dimension, pairs=3)
        else:
            raise ValueError(f"unknown parameterization {parameterization!r}: paper or released")
        tables = {"symbols": symbol_deviation, "start": symbol_deviation, "root_output": symbol_deviation}
        generator = torch.Generator().manual_seed(seed)
        initialise(self, init, {**tables, "words": word_deviation}, generator)
        if word_vectors is not None:
            with torch.no_grad():
                self.words.copy_(word_vectors * (word_deviation or 1.0))
        # After the others, which begin the same with and without them.
        self.one_word = nn.Parameter(torch.tensor([FEW])) if root_over == "all" else None
        self.word_bias = nn.Parameter(log_zipf(words)) if word_bias else None
        self.background = nn.Parameter(log_zipf(words)) if emission_smoothing else None
        self.left_rotation = rotation(dimension, generator) if rotated_children else None
        self.right_rotation = rotation(dimension, generator) if rotated_children else None
        self.spelling = spelling

    def forward(self, kept: Kept | None = None, how: Computation = EXACT) -> Grammar:
        """Every tensor that micro-batches need (under ZeRO 3 a parameter outside of forward is empty).

        With `kept`, a grammar over those symbols only, renumbered in their order.
        """
        with product_precision(how.precision):
            return self._grammar(kept, how)

    def _grammar(self, kept: Kept | None, how: Computation) -> Grammar:
        nonterminals, preterminals = self.symbols.split([self.nonterminals, self.preterminals])
        root_rows: Tensor | slice = slice(self.roots)
        if kept is not None:
            kept = kept.to(self.symbols.device)
            nonterminals, preterminals = nonterminals[kept.nonterminals], preterminals[kept.preterminals]
            root_rows = kept.nonterminals
            if self.roots > self.nonterminals:
                root_rows = torch.cat((kept.nonterminals, kept.preterminals + self.nonterminals))
        nonterminals = how.dropout.embeddings(nonterminals, 0)
        preterminals = how.dropout.embeddings(preterminals, 1)
        symbols = torch.cat((nonterminals, preterminals))  # [N+P, d]

        left, right, *entrances = child_probabilities(
            how.dropout.parents(self.parent(nonterminals)),
            self.left_child(symbols, self.left_rotation and self.left_rotation(symbols)),
            self.right_child(symbols, self.right_rotation and self.right_rotation(symbols)),
            how.rules,
            how.precision,
        )  # [N, N+P] each

        features = self.emission_network(preterminals)  # [P, d]
        if self.parameterization == "paper":
            root_logits = (self.root_output[root_rows] @ self.root_network(self.start).T).squeeze(1)
        else:
            features = features + preterminals
            root_logits = (self.symbols[root_rows] @ self.start.T).squeeze(1)
        root = self._root(root_logits.double(), len(nonterminals))
        features = self.word_projection(how.dropout.features(features))  # [P, d of the words]
        if self.emission_temperature != 1.0:
            features = features / self.emission_temperature
        how.mark("networks")
        # A view of the word table: the micro-batches' gradients must reach it through this graph alone.
        words = self.words.view_as(self.words) if self.spelling is None else self.words + self.spelling()
        if self.word_bias is not None:
            features, words = with_bias(features, words, self.word_bias)
        emission = Emission.of(features, words, how)
        if self.background is not None:
            emission = emission.smoothed(self.background.log_softmax(0), self.emission_smoothing)
        how.mark("emission")
        return Grammar(root, left, right, emission, (entrances[0], entrances[1]))

    def _root(self, logits: Tensor, nonterminals: int) -> Tensor:
        if self.one_word is None:
            return logits.softmax(-1)
        over_nonterminals, over_preterminals = logits.tensor_split([nonterminals])
        one_word = self.one_word.double()
        return torch.cat(
            (
                over_nonterminals.softmax(-1) * torch.sigmoid(-one_word),
                over_preterminals.softmax(-1) * one_word.sigmoid(),
            )
        )


def log_zipf(words: int) -> Tensor:
    """Of the words of a vocabulary sorted by frequency, up to a constant."""
    return -torch.log(torch.arange(words) + 2.7)


def with_bias(features: Tensor, words: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Tables whose products are features . words + bias: eight columns more, so that rows stay whole lines of memory.

    The bias takes two of them: its value in bf16, and the rest. Products in bf16 would round it by up to 0.03.
    """
    ones = functional.pad(features.new_ones(len(features), 2), (0, 6))
    coarse = bias.detach().bfloat16().to(bias.dtype)
    both = torch.stack((coarse, bias - coarse), 1)
    return torch.cat((features, ones), 1), torch.cat((words, functional.pad(both, (0, 6))), 1)
