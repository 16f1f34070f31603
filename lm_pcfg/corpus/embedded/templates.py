"""Expand rule templates and word lists into a plain PCFG with integer weights.

Everything up to the probabilities is integer arithmetic, so the grammar is the same on every machine.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import product

from lm_pcfg.corpus.embedded import lexicon, source_grammar

_SYMBOL = re.compile(r"(\w+)(?:\[([\w,]+)\])?")


@dataclass(frozen=True)
class Rule:
    """parent -> children with probability weight / (sum of the parent's weights); one or two children."""

    parent: str
    children: tuple[str, ...]
    weight: int


@dataclass(frozen=True)
class WordPCFG:
    """A PCFG whose rules have one or two children and whose preterminals emit words; all weights are integers.

    words[preterminal] maps each word to its weight. A symbol has either rules or words.
    """

    start: str
    rules: tuple[Rule, ...]
    words: Mapping[str, Mapping[str, int]]

    def __post_init__(self) -> None:
        parents = {rule.parent for rule in self.rules}
        children = {child for rule in self.rules for child in rule.children}
        if both := parents & set(self.words):
            raise ValueError(f"symbols with both rules and words: {sorted(both)}")
        if undefined := (children | {self.start}) - parents - set(self.words):
            raise ValueError(f"symbols with neither rules nor words: {sorted(undefined)}")
        if any(rule.weight <= 0 or not 1 <= len(rule.children) <= 2 for rule in self.rules):
            raise ValueError("a rule needs one or two children and a positive weight")

    @cached_property
    def nonterminals(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rule.parent for rule in self.rules))

    @cached_property
    def preterminals(self) -> tuple[str, ...]:
        return tuple(self.words)

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        return self.nonterminals + self.preterminals

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        return tuple(sorted({word for weights in self.words.values() for word in weights}))

    @cached_property
    def rules_of(self) -> dict[str, list[Rule]]:
        grouped: dict[str, list[Rule]] = {symbol: [] for symbol in self.nonterminals}
        for rule in self.rules:
            grouped[rule.parent].append(rule)
        return grouped

    def rule_probabilities(self) -> list[tuple[Rule, float]]:
        totals = {symbol: sum(rule.weight for rule in rules) for symbol, rules in self.rules_of.items()}
        return [(rule, rule.weight / totals[rule.parent]) for rule in self.rules]

    def word_probabilities(self, preterminal: str) -> dict[str, float]:
        weights = self.words[preterminal]
        total = sum(weights.values())
        return {word: weight / total for word, weight in weights.items()}


@dataclass(frozen=True)
class Symbol:
    """A symbol of a template: `NP[pl]` is ("NP", ("pl",))."""

    name: str
    features: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Symbol":
        match = _SYMBOL.fullmatch(text)
        if match is None:
            raise ValueError(f"not a symbol: {text!r}")
        return cls(match[1], tuple(match[2].split(",")) if match[2] else ())

    def bind(self, values: Mapping[str, str]) -> str:
        """The label of one copy, in the style of Penn function tags: `NP-pl`."""
        return "-".join((self.name, *(values.get(feature, feature) for feature in self.features)))


def expand_rules(text: str, variables: Mapping[str, Mapping[str, int]]) -> tuple[Rule, ...]:
    """All copies of the templates in `text`; variables[v] gives the values of v and their weights."""
    shares: dict[str, dict[tuple[str, ...], Fraction]] = {}  # parent -> children -> weight
    for line in filter(str.strip, text.splitlines()):
        left, _, right = line.partition("->")
        *child_texts, weight_text = right.split()
        parent = Symbol.parse(left.strip())
        children = [Symbol.parse(child) for child in child_texts]
        bound = [v for v in variables if v in parent.features]
        free = [v for v in variables if v not in bound and any(v in child.features for child in children)]
        for parent_values in product(*(variables[v] for v in bound)):
            outer = dict(zip(bound, parent_values, strict=True))
            alternatives = shares.setdefault(parent.bind(outer), {})
            for child_values in product(*(variables[v] for v in free)):
                share = Fraction(int(weight_text))
                for variable, value in zip(free, child_values, strict=True):
                    share *= Fraction(variables[variable][value], sum(variables[variable].values()))
                values = outer | dict(zip(free, child_values, strict=True))
                key = tuple(child.bind(values) for child in children)
                alternatives[key] = alternatives.get(key, Fraction(0)) + share
    return tuple(
        Rule(parent, children, weight)
        for parent, alternatives in shares.items()
        for children, weight in zip(alternatives, integer_weights(alternatives.values()), strict=True)
    )


def integer_weights(shares: Iterable[Fraction]) -> list[int]:
    """The smallest integers in the same proportions."""
    fractions = list(shares)
    denominator = math.lcm(*(share.denominator for share in fractions))
    numerators = [int(share * denominator) for share in fractions]
    divisor = math.gcd(*numerators)
    return [numerator // divisor for numerator in numerators]


def zipf_weights(words: Sequence[str]) -> dict[str, int]:
    weights: dict[str, int] = {}
    for rank, word in enumerate(words, start=1):
        weights[word] = weights.get(word, 0) + source_grammar.ZIPF_SCALE // (rank + source_grammar.ZIPF_SHIFT)
    return weights


def expand_words(symbol: str, text: str, numbers: Sequence[str]) -> dict[str, dict[str, int]]:
    """Preterminal -> word -> weight for one word list; `singular/plural` pairs make one preterminal per number."""
    entries = [entry.split("/") for entry in text.split()]
    forms = {len(entry) for entry in entries}
    if forms == {1}:
        return {symbol: zipf_weights([word for (word,) in entries])}
    if forms == {len(numbers)}:
        return {
            f"{symbol}-{number}": zipf_weights([entry[index] for entry in entries])
            for index, number in enumerate(numbers)
        }
    raise ValueError(f"the word list of {symbol} mixes words and singular/plural pairs")


@lru_cache(maxsize=1)
def source_pcfg() -> WordPCFG:
    """The grammar of the embedded corpus."""
    numbers = source_grammar.NUMBER_WEIGHTS
    rules = expand_rules(source_grammar.RULES, {"n": numbers, "m": numbers})
    words: dict[str, dict[str, int]] = {}
    for name, text in lexicon.WORDS.items():
        words |= expand_words(name, text, list(numbers))
    return WordPCFG(source_grammar.START, rules, words)
