"""Closed forms of a PCFG: the entropy of a derivation and the mean number of words, by expected numbers of symbols."""

import math

import numpy as np

from lm_pcfg.corpus.embedded.templates import WordPCFG


def _per_derivation(grammar: WordPCFG, per_symbol: dict[str, float]) -> float:
    """Expected sum, over all symbols of a derivation, of a quantity that each symbol contributes.

    Let x[A] be what a derivation from A adds up to: x = own + M x, M[A, B] the expected number of children B of
    A. This can be solved if the grammar is subcritical.
    """
    index = {symbol: position for position, symbol in enumerate(grammar.symbols)}
    children = np.zeros((len(index), len(index)))
    for rule, probability in grammar.rule_probabilities():
        for child in rule.children:
            children[index[rule.parent], index[child]] += probability
    own = np.array([per_symbol[symbol] for symbol in grammar.symbols])
    totals = np.linalg.solve(np.eye(len(index)) - children, own)
    return float(totals[index[grammar.start]])


def derivation_entropy(grammar: WordPCFG) -> float:
    """Return the entropy in nats. That of the string is at most as large: several derivations may give it."""
    per_symbol = dict.fromkeys(grammar.nonterminals, 0.0)
    for rule, probability in grammar.rule_probabilities():
        per_symbol[rule.parent] -= probability * math.log(probability)
    for preterminal in grammar.preterminals:
        probabilities = grammar.word_probabilities(preterminal).values()
        per_symbol[preterminal] = -sum(p * math.log(p) for p in probabilities)
    return _per_derivation(grammar, per_symbol)


def expected_length(grammar: WordPCFG) -> float:
    """Mean number of words of a sentence."""
    return _per_derivation(grammar, dict.fromkeys(grammar.nonterminals, 0.0) | dict.fromkeys(grammar.preterminals, 1.0))
