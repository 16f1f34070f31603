"""Trees of a model, or of somebody else's parser, compared with gold trees (`lm_pcfg evaluate`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lm_pcfg.console import unseen
from lm_pcfg.corpus.predictions import read_predictions
from lm_pcfg.corpus.sentences import encode_sentences
from lm_pcfg.corpus.span_f1 import SpanReport, SpanScore, baselines
from lm_pcfg.corpus.text import display_name, read_lines, resolve_source
from lm_pcfg.corpus.treebank import PENN_PUNCTUATION, Tree, load_trees, normalised, without
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.likelihood import CorpusScore
from lm_pcfg.inference.lines import OnLines, warn_of_unknown
from lm_pcfg.inference.model import Method, Model


@dataclass(frozen=True)
class GoldTrees:
    """A treebank as it is compared: its trees, and the same without punctuation, in the words that a model reads."""

    name: str
    whole: list[Tree]
    compared: list[Tree]
    removed: Collection[str]  # the tags of punctuation

    @property
    def lines(self) -> list[str]:
        return [" ".join(tree.words) for tree in self.compared]


def punctuation_tags(choice: str) -> frozenset[str]:
    """Turn `penn`, `keep` or tags between commas into tags; an empty place between commas is the comma's own tag."""
    if choice in ("penn", "keep"):
        return PENN_PUNCTUATION if choice == "penn" else frozenset()
    return frozenset(tag.strip() or "," for tag in choice.split(","))


def load_gold(
    source: str, *, punctuation: str = "penn", lowercase: bool = False, fold_numbers: bool = False
) -> GoldTrees:
    """Read a treebank: a file of bracketed trees, '-' (standard input) or embedded:test.trees."""
    removed, whole = punctuation_tags(punctuation), load_trees(source)
    if punctuation not in ("penn", "keep") and not removed & {tag for tree in whole for tag in tree.tags}:
        raise UserError(f"{display_name(source)}: no word has the tag {', '.join(sorted(removed))} (--punctuation)")
    compared = [normalised(without(tree, removed), lowercase, fold_numbers) for tree in whole]
    if not any(len(tree.words) > 1 for tree in compared):
        raise UserError(f"{display_name(source)}: no tree of two words or more; is it a file of bracketed trees?")
    return GoldTrees(display_name(source), whole, compared, removed)


def evaluate_model(
    model: Model, gold: GoldTrees, *, method: Method = "mbr", warn: Callable[[str], None],
    on_lines: OnLines = unseen,
) -> dict[str, Any]:  # fmt: skip
    """Parse the sentences of a treebank and compare: the report of `lm_pcfg evaluate`."""
    lines = gold.lines
    lengths = [len(ids) for ids in model.vocabulary.tokenise(lines)]
    longest = model.ranks.least(model.longest_line())
    for number, length in enumerate(lengths):
        if length > longest:
            what = f"{length:,} {model.vocabulary.unit} do not fit into memory"
            warn(f"{gold.name}, tree {number + 1}: {what}; it counts as without a tree")
            lines[number] = ""
    trees = model.parse(lines, method, on_lines=on_lines)
    report = compare(gold, trees)
    without_tree = sum(1 for tree, line in zip(trees, gold.lines, strict=True) if line and not tree.words)
    if without_tree:
        warn(f"{gold.name}: {without_tree:,} sentences have no tree (probability 0), and F1 0 if they have gold spans")
    return {
        "file": gold.name,
        "checkpoint": " + ".join(str(one.checkpoint) for one in model.grammars),
        "weights": " + ".join(one.weights for one in model.grammars),
        "method": method,
        **report,
        "without_tree": without_tree,
        **_likelihood(model, gold.name, lines, warn),
    }


def evaluate_predictions(predicted: str, gold: GoldTrees) -> dict[str, Any]:
    """Compare the trees of a file, in the order of the gold trees, with these."""
    name = display_name(predicted)
    lines = [line for _, line in read_lines(resolve_source(predicted), name=name)]
    return {
        "file": gold.name,
        "predicted_file": name,
        **compare(gold, read_predictions(lines, name, gold.whole, gold.removed)),
    }


def compare(gold: GoldTrees, predicted: Sequence[Tree]) -> dict[str, Any]:
    """Return S-F1 and its relatives, beside what trees without a parser reach on the same file."""
    score = SpanScore()
    for tree, own in zip(gold.compared, predicted, strict=True):
        score.add(tree, [(first, end) for first, end, _ in own.nodes])
    report: SpanReport = score.report()
    return asdict(report) | {"baselines": {name: asdict(one) for name, one in baselines(gold.compared).items()}}


def _likelihood(model: Model, name: str, lines: Sequence[str], warn: Callable[[str], None]) -> dict[str, Any]:
    """Return the perplexity of the sentences and what it is made of, and the share of unknown words.

    Perplexities are per word, as `ppl_per_word` of `score`, so that models over words and over pieces can be compared.
    Several vocabularies have no likelihood in common; the unknown words are those of the first.
    """
    sentences = encode_sentences(enumerate(lines, start=1), model.vocabulary)
    warn_of_unknown(name, sentences.unknown, model.vocabulary, warn)
    if message := sentences.unknown_words.warning(name):
        warn(message)
    known = sentences.unknown_words.report()
    if len({one.vocabulary.hash for one in model.grammars}) > 1:
        warn("the checkpoints have different vocabularies: no perplexity, and the unknown words are those of the first")
        return dict.fromkeys(("ppl", "ppl_words", "nll", "words", "lines", "tokens", "skipped_lines")) | known
    scores = model.score(lines)
    there = np.isfinite(scores)
    words = sum(len(line.split()) for line, has in zip(lines, there.tolist(), strict=True) if has)
    total = CorpusScore(-math.fsum(scores[there].tolist()), words, int(there.sum()), impossible=0)
    return {
        **({"ppl_is": "an upper bound (evidence lower bound)"} if model.is_bound else {}),
        "ppl": total.perplexity if words else None,
        "ppl_words": total.words_perplexity if words else None,
        "nll": total.nll,
        "words": words,
        "lines": total.lines,
        "tokens": total.tokens,
        "skipped_lines": sum(1 for line in lines if line) - total.lines,
    } | known
