"""Leave out the symbols that a text hardly uses, and renormalise what is left.

A symbol's use is its expected number in the trees of the text, summed over all trees by their posterior probabilities.

Where a symbol is a row of an embedding (`Family.cut`), the rows are left out, and the softmaxes run over those that are
left: the pruned model is a smaller one of its family. Other families have one matrix for all symbols, or symbols of the
chart that are not their own. Of these the grammar itself is cut, each row divided by what is left of it, and stored as
its tensors: root, left and right (or pairs), and the emission, which stays as it is for the preterminals that are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flash_inside import dense
from flash_inside.softmax import product_precision
from lm_pcfg.corpus.batches import BatchOptions, make_batch, plan_batches
from lm_pcfg.corpus.sentences import Sentences
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.compound import Compound
from lm_pcfg.grammar.dense import DenseGrammar
from lm_pcfg.grammar.dropout import Kept
from lm_pcfg.grammar.families import family_of
from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.inference.symbols import uses_in_text
from lm_pcfg.inference.trained import StoredModel, TrainedGrammar, grammar_tensors

BATCH_COST = 8000  # words squared of a batch
#: The settings that say how many symbols a chart has; the first that a family has counts.
SIZES = ("rank", "nonterminals")


def check_prunable(trained: TrainedGrammar) -> Grammar | DenseGrammar:
    """Return the grammar; refuse, in one line, models that have no symbols of their own to leave out."""
    grammar, family = trained.grammar, trained.settings.model.family
    if isinstance(grammar, Grammar):
        return grammar.whole()
    if isinstance(grammar, DenseGrammar):
        return grammar
    if isinstance(grammar, Compound):
        reason = "each sentence has a grammar of its own, which networks make from its latent vector"
    else:
        reason = "it has no nonterminals and preterminals"
    raise UserError(f"{trained.checkpoint}: a model of family {family} cannot be pruned: {reason}; leave --prune out")


def uses_of(
    grammar: Grammar | DenseGrammar, text: Sentences, on_batch: Callable[[int], None] = lambda lines: None
) -> Tensor:
    """Return the expected uses of every symbol in the trees of a text: fp64 [N+P]."""
    if isinstance(grammar, Grammar):
        return uses_in_text(grammar, text, batch_cost=BATCH_COST, on_batch=on_batch).symbols
    leaves = grammar.detached()
    n, p = leaves.rules.nonterminals, leaves.rules.preterminals
    preterminals = torch.zeros(p, dtype=torch.float64, device=leaves.pairs.device)
    with product_precision("fp32"):
        for indices in plan_batches(text.lengths, BatchOptions(by="cost", cost=BATCH_COST)):
            batch = make_batch(text, indices)
            with torch.no_grad():
                emissions = leaves.emission.log_probabilities(torch.from_numpy(batch.words))
            emissions.requires_grad_()
            dense.inside(leaves.rules, emissions, batch.lengths).sum().backward()
            assert emissions.grad is not None
            preterminals += emissions.grad.sum(0, dtype=torch.float64)
            on_batch(len(indices))
    gradient = torch.zeros_like(leaves.pairs) if leaves.pairs.grad is None else leaves.pairs.grad
    pairs = leaves.pairs.detach()
    used = torch.where(pairs > 0, pairs.double() * gradient.double(), 0.0)  # of 0 the derivative may be anything
    return torch.cat((used.flatten(1).sum(1).view(n), preterminals))


def pruned(stored: StoredModel, trained: TrainedGrammar, uses: Tensor, below: float) -> StoredModel:
    """Return the model without the symbols that are used less; `uses` are those of `uses_of`."""
    grammar, model = check_prunable(trained), stored.settings.model
    kept = _kept(uses >= below, uses, grammar.nonterminals)
    cut = family_of(model).cut(model, stored.tensors, *kept) if stored.form == "networks" else None
    if cut is not None:
        section, tensors = cut
        settings = stored.settings.model_copy(update={"model": section})
        return replace(stored, tensors=tensors, settings=settings)
    smaller = cut_grammar(grammar, uses, below)
    own = next(name for name in SIZES if name in type(model).model_fields)
    sizes: dict[str, Any] = {own: smaller.nonterminals, "preterminals": len(smaller.emission.features)}
    settings = stored.settings.model_copy(update={"model": model.model_copy(update=sizes)})
    return replace(stored, tensors=grammar_tensors(smaller), settings=settings, form="grammar")


def cut_grammar(grammar: Grammar | DenseGrammar, uses: Tensor, below: float) -> Grammar | DenseGrammar:
    """Leave out the symbols that are used less, and divide each row of probabilities by what is left of it."""
    n, stays = grammar.nonterminals, uses >= below
    while True:
        kept = _kept(stays, uses, n)
        smaller, possible = _cut(grammar, kept)
        if bool(possible.all()):
            return smaller
        stays[kept.nonterminals[~possible]] = False  # all its children are gone


def _kept(stays: Tensor, uses: Tensor, n: int) -> Kept:
    for kind, part in (("nonterminal", slice(n)), ("preterminal", slice(n, None))):
        if not bool(stays[part].any()):
            most = f"the most used one has {uses[part].max():.3g} uses"
            raise UserError(f"no {kind} would be left: {most}; lower --prune-below")
    return Kept(stays[:n].nonzero().squeeze(1), stays[n:].nonzero().squeeze(1))


def _cut(grammar: Grammar | DenseGrammar, kept: Kept) -> tuple[Grammar | DenseGrammar, Tensor]:
    """Return the grammar of these symbols, and which nonterminals of it have any children left."""
    n, columns = grammar.nonterminals, kept.columns(grammar.nonterminals)
    root = grammar.root[columns if len(grammar.root) > n else kept.nonterminals]
    if not bool(root.sum() > 0):
        raise UserError("no symbol that begins a tree would be left; lower --prune-below")
    emission = grammar.emission._replace(
        features=grammar.emission.features[kept.preterminals],
        log_normalizers=grammar.emission.log_normalizers[kept.preterminals],
    )
    if isinstance(grammar, DenseGrammar):
        pairs = grammar.pairs[kept.nonterminals][:, columns][:, :, columns]
        pairs, possible = _shares(pairs.flatten(1))
        pairs = pairs.view(len(kept.nonterminals), len(columns), len(columns))
        return DenseGrammar(root / root.sum(), pairs, emission), possible
    (left, has_left), (right, has_right) = (
        _shares(side[kept.nonterminals][:, columns]) for side in (grammar.left, grammar.right)
    )
    return Grammar(root / root.sum(), left, right, emission), has_left & has_right


def _shares(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Divide rows by their sums, and say which have any."""
    sums = rows.double().sum(1, keepdim=True)
    return (rows.double() / sums).to(rows.dtype), (sums > 0).squeeze(1)
