"""What the symbols of a grammar mean: how often each is used, and which words and children it has.

A symbol is named by its number: nonterminal k is N{k}, preterminal k is P{k}. Uses are expected counts, either in one
derivation of the grammar or, given the sentences of a text, in their trees. A sentence of l words uses l preterminals
and l - 1 nonterminals. Symbols are listed by falling use, and only the first of them get their words and children: a
large grammar has more symbols than anyone reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import flash_inside
from flash_inside import Rules
from flash_inside.devices import check_memory
from flash_inside.softmax import product_precision
from lm_pcfg.corpus.batches import BatchOptions, make_batch, plan_batches
from lm_pcfg.corpus.lengths import Limits
from lm_pcfg.corpus.pieces import AnyVocabulary
from lm_pcfg.corpus.sentences import Sentences, load_sentences
from lm_pcfg.corpus.shards.files import is_json, is_parquet
from lm_pcfg.corpus.text import display_name
from lm_pcfg.errors import UserError
from lm_pcfg.grammar import analysis
from lm_pcfg.grammar.compound import Compound
from lm_pcfg.grammar.dense import DenseGrammar
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.grammar.parsing import symbol_name
from lm_pcfg.inference.trained import TrainedGrammar

ROWS = 512  # of symbols whose words or children are looked at together


class Choice(NamedTuple):
    """A word or a symbol, and its probability."""

    name: str
    probability: float


@dataclass(frozen=True)
class Choices:
    """A distribution over words or children."""

    likeliest: list[Choice]  # the most probable first; none of probability 0
    entropy: float  # in nats
    effective: float  # exp(entropy): so many equally probable ones would be as varied


@dataclass(frozen=True)
class Nonterminal:
    name: str
    uses: float
    root: float  # probability of being the top of a tree
    left: Choices
    right: Choices


@dataclass(frozen=True)
class Preterminal:
    name: str
    uses: float
    words: Choices  # as the grammar has them
    emitted: Choices | None  # as the text has them: the words it stands over in the trees of the text


@dataclass(frozen=True)
class Kind:
    """All nonterminals, or all preterminals."""

    symbols: int
    uses: float
    effective: float  # exp(entropy of the uses): so many equally frequent symbols would be as varied


@dataclass(frozen=True)
class SymbolTable:
    """The most used symbols, and how many there are."""

    text: str | None  # the name of the text whose trees were looked at; None: derivations of the grammar
    ending: bool  # uses are those of the derivations that end, since others grow without end
    sentences: int  # of the text, without impossible ones
    words: int  # likewise, with <eos> if ends are explicit
    impossible: int  # sentences of the text that have no tree
    all_nonterminals: Kind
    all_preterminals: Kind
    nonterminals: list[Nonterminal]  # by falling use
    preterminals: list[Preterminal]  # by falling use


# ---- how often symbols are used -------------------------------------------------------------------------------------


class TextUses(NamedTuple):
    """How often the trees of a text use each symbol, summed over all trees by their posterior probabilities."""

    symbols: Tensor  # fp64 [N+P]
    distinct: Tensor  # int64 [W] ids of the words that the text has
    emitted: Tensor  # fp32 [W, P] how often each of these is below each preterminal
    sentences: int
    words: int
    impossible: int


def uses_in_text(
    grammar: Grammar, text: Sentences, *, precision: str = "fp32", backend: str = "auto", batch_cost: int = 8000,
    on_batch: Callable[[int], None] = lambda lines: None,
) -> TextUses:  # fmt: skip
    """Add up the posteriors of a text, batch by batch. They are derivatives of log Z.

    A preterminal's uses at a word are d log Z / d (log emission there), those of nonterminal A over all spans are
    sum over B of left[A, B] x d log Z / d left[A, B]. Memory: that of a batch, one [N, N+P] and one [W, P].
    """
    leaves = grammar.detached()
    for tensor in (leaves.root, leaves.right):
        tensor.requires_grad_(False)  # their gradients are not asked for
    n, p, device = leaves.rules.nonterminals, leaves.rules.preterminals, leaves.left.device
    distinct = np.unique(text.ids)
    check_memory(4.0 * (len(distinct) * p + leaves.left.numel()), device)
    emitted = torch.zeros(len(distinct), p, device=device)
    sentences = words = 0
    with product_precision("fp32"):  # of the emission's columns, as for scores
        for indices in plan_batches(text.lengths, BatchOptions(by="cost", cost=batch_cost)):
            batch = make_batch(text, indices)
            with torch.no_grad():
                emissions = leaves.emission.log_probabilities(torch.from_numpy(batch.words))
            emissions.requires_grad_()
            log_z = flash_inside.inside(leaves.rules, emissions, batch.lengths, precision, backend)
            log_z.sum().backward()
            assert emissions.grad is not None
            places = torch.from_numpy(np.searchsorted(distinct, batch.words)).to(device)
            emitted.index_add_(0, places, emissions.grad.float())
            possible = log_z.detach().isfinite().cpu()
            sentences += int(possible.sum())
            words += int(torch.tensor(batch.lengths)[possible].sum())
            on_batch(len(indices))
    nonterminals = torch.zeros(n, dtype=torch.float64, device=device)
    if leaves.left.grad is not None:
        pairs = zip(leaves.left.detach().split(ROWS), leaves.left.grad.split(ROWS), strict=True)
        # Where a probability is 0 its derivative may be anything.
        parts = [torch.where(left > 0, left.double() * gradient.double(), 0.0).sum(1) for left, gradient in pairs]
        nonterminals = torch.cat(parts)
    symbols = torch.cat((nonterminals, emitted.sum(0, dtype=torch.float64)))
    return TextUses(symbols, torch.from_numpy(distinct).long(), emitted, sentences, words, len(text) - sentences)


# ---- the table ------------------------------------------------------------------------------------------------------


def symbols(
    grammar: Grammar, vocabulary: AnyVocabulary, *, text: Sentences | None = None, name: str = "the text",
    most: int = 10, listed: int = 50, precision: str = "fp32", backend: str = "auto", batch_cost: int = 8000,
    on_batch: Callable[[int], None] = lambda lines: None,
) -> SymbolTable:  # fmt: skip
    """Return the most used symbols of a grammar: `listed` of each kind, each with at most `most` words or children.

    text, name  count the uses in the trees of this text, which goes by this name; None: in derivations of the grammar
    """
    with torch.no_grad():
        grammar = grammar.whole()
        rules, emission = grammar.rules, grammar.emission
        n, of_text, ending = rules.nonterminals, None, False
        if text is None:
            uses = analysis.expected_uses(rules)
            if uses.isinf().any():  # derivations grow without end: look at those that do not
                uses, ending = analysis.expected_uses(analysis.conditioned_on_ending(rules)), True
        else:
            with torch.enable_grad():
                of_text = uses_in_text(
                    grammar, text, precision=precision, backend=backend, batch_cost=batch_cost, on_batch=on_batch
                )
            uses = of_text.symbols
        if uses.isinf().any():
            raise UserError(
                "derivations of this grammar grow without end, so that the uses of its symbols are infinite; count "
                "those in a text (--text)"
            )
        if not (uses.isfinite().all() and emission.log_normalizers.isfinite().all()):
            raise UserError("this grammar has probabilities that are not numbers; take an earlier checkpoint")
        upper = _first(uses[:n], listed)
        lower = _first(uses[n:], listed)
        return SymbolTable(
            text=None if of_text is None else name,
            ending=ending,
            sentences=of_text.sentences if of_text else 0,
            words=of_text.words if of_text else 0,
            impossible=of_text.impossible if of_text else 0,
            all_nonterminals=_kind(uses[:n]),
            all_preterminals=_kind(uses[n:]),
            nonterminals=_nonterminals(rules, uses, upper, most),
            preterminals=_preterminals(emission, vocabulary.words, uses[n:], lower, most, of_text),
        )


def symbols_of(
    trained: TrainedGrammar, text: Sentences | None = None, *, name: str = "the text", most: int = 10, listed: int = 50,
    on_batch: Callable[[int], None] = lambda lines: None,
) -> SymbolTable:  # fmt: skip
    """Do as `symbols` for a trained model; one line for the user if its family has no rules.

    Of a compound model, whose sentences have grammars of their own, it is the grammar of z = 0.
    """
    grammar = trained.grammar.of_prior_mean() if isinstance(trained.grammar, Compound) else trained.grammar
    if not isinstance(grammar, Grammar):
        family = trained.settings.model.family
        rules = "rules over pairs of children only" if isinstance(grammar, DenseGrammar) else "no rules"
        raise UserError(f"{trained.checkpoint}: a model of family {family} has {rules}, so no symbols can be shown")
    return symbols(grammar, trained.vocabulary, text=text, name=name, most=most, listed=listed, on_batch=on_batch)


def load_text(
    trained: TrainedGrammar, source: str, *, max_length: int, warn: Callable[[str], None],
    on_lines: Callable[[int], None] = lambda lines: None,
) -> Sentences:  # fmt: skip
    """Read the text whose trees are looked at, as `score` reads it."""
    name = display_name(source)
    if is_json(Path(source)) or is_parquet(Path(source)):
        raise UserError(f"{name}: info reads text, one sentence a line; take the sentences out of their field first")
    text = load_sentences(source, trained.vocabulary, limits=Limits(max_length, trained.fewest_symbols))
    if not len(text):
        raise UserError(f"{name}: no line has a tree (blank, too short, or longer than {max_length} words)")
    if skipped := text.skipped.too_long + text.skipped.too_short:
        warn(f"{name}: {skipped:,} lines are left out, too short or longer than {max_length} words")
    on_lines(text.skipped.total)
    return text


def _first(uses: Tensor, count: int) -> Tensor:
    """The numbers of the most used symbols, the smaller number first where two are used alike."""
    return uses.argsort(descending=True, stable=True)[:count]


def _kind(uses: Tensor) -> Kind:
    total = uses.sum().item()
    effective = analysis.entropy(uses / total).exp().item() if total > 0 else 0.0
    return Kind(len(uses), total, effective)


def _nonterminals(rules: Rules, uses: Tensor, chosen: Tensor, most: int) -> list[Nonterminal]:
    def name(symbol: int) -> str:
        return symbol_name(symbol, rules.nonterminals)

    found = []
    for part in chosen.split(ROWS):
        children = (_choices(side[part].double(), name, most) for side in (rules.left, rules.right))
        for symbol, left, right in zip(part.tolist(), *children, strict=True):
            found.append(Nonterminal(name(symbol), uses[symbol].item(), rules.root[symbol].item(), left, right))
    return found


def _preterminals(
    emission: Emission, words: Sequence[str], uses: Tensor, chosen: Tensor, most: int, of_text: TextUses | None
) -> list[Preterminal]:
    words_of_text = [words[word] for word in of_text.distinct.tolist()] if of_text else []
    found = []
    for part in chosen.split(ROWS):
        rows = emission._replace(features=emission.features[part], log_normalizers=emission.log_normalizers[part])
        probabilities = rows.log_probabilities(torch.arange(len(words))).T.double().exp()  # [rows, V]
        own = _choices(probabilities, words.__getitem__, most)
        emitted: Sequence[Choices | None] = [None] * len(part)
        if of_text is not None:
            counts = of_text.emitted[:, part].T.double()  # [rows, W]
            shares = counts / counts.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
            emitted = _choices(shares, words_of_text.__getitem__, most)
        for preterminal, in_grammar, in_text in zip(part.tolist(), own, emitted, strict=True):
            found.append(Preterminal(f"P{preterminal}", uses[preterminal].item(), in_grammar, in_text))
    return found


def _choices(probabilities: Tensor, name: Callable[[int], str], most: int) -> list[Choices]:
    """Describe every row of a matrix [rows, choices]; name gives that of a column. A row of zeros has no choices."""
    ordered, columns = probabilities.sort(dim=1, descending=True, stable=True)
    entropies = analysis.entropy(probabilities)
    effective = torch.where(ordered[:, 0] > 0, entropies.exp(), 0.0)
    found = []
    for values, places, entropy, number in zip(
        ordered[:, :most].tolist(), columns[:, :most].tolist(), entropies.tolist(), effective.tolist(), strict=True
    ):
        pairs = zip(places, values, strict=True)
        found.append(Choices([Choice(name(place), value) for place, value in pairs if value > 0], entropy, number))
    return found
