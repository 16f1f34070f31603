"""Sentences and trees drawn from a PCFG, the same on every machine: integers only, with a generator of our own."""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from lm_pcfg.corpus.embedded.templates import WordPCFG

_MASK = (1 << 64) - 1


class SplitMix64:
    """The splitmix64 generator (Steele, Lea and Flood, 2014) in plain integers."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK
        self._state = self.next()  # neighbouring seeds start far apart

    def next(self) -> int:
        """The next integer, uniform in [0, 2^64)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def below(self, bound: int) -> int:
        """An integer, exactly uniform in [0, bound): the incomplete last block of 2^64 is drawn again."""
        limit = (_MASK + 1) - (_MASK + 1) % bound
        while (value := self.next()) >= limit:
            pass
        return value % bound


@dataclass(frozen=True)
class Derivation:
    """One draw: its words, its tree as a bracketed line, and the log-probability of exactly this derivation."""

    words: tuple[str, ...]
    tree: str
    log_probability: float


@dataclass(frozen=True)
class _Choice:
    """What a symbol may become: outcome i when the draw is below cumulative[i] but not below cumulative[i - 1]."""

    cumulative: list[int]
    outcomes: list[tuple[str, ...]]  # children of a nonterminal in reading order; (word,) of a preterminal
    log_probabilities: list[float]
    emits: bool


class Sampler:
    """Draws derivations of `grammar`, a sequence that depends on the grammar and the seed only."""

    def __init__(self, grammar: WordPCFG, seed: int) -> None:
        self._start = grammar.start
        self._generator = SplitMix64(seed)
        self._choices: dict[str, _Choice] = {}
        for symbol, rules in grammar.rules_of.items():
            self._choices[symbol] = self._choice(
                [rule.weight for rule in rules], [rule.children for rule in rules], emits=False
            )
        for symbol, weights in grammar.words.items():
            self._choices[symbol] = self._choice(list(weights.values()), [(word,) for word in weights], emits=True)

    @staticmethod
    def _choice(weights: list[int], outcomes: list[tuple[str, ...]], emits: bool) -> _Choice:
        total = sum(weights)
        return _Choice(list(accumulate(weights)), outcomes, [math.log(weight / total) for weight in weights], emits)

    def draw(self) -> Derivation:
        words: list[str] = []
        tree: list[str] = []
        log_probability = 0.0
        below, choices = self._generator.below, self._choices
        pending = [self._start]  # a stack: symbols still to be rewritten, and closing brackets
        while pending:
            symbol = pending.pop()
            if symbol == ")":
                tree.append(")")
                continue
            choice = choices[symbol]
            cumulative = choice.cumulative
            index = bisect_right(cumulative, below(cumulative[-1])) if len(cumulative) > 1 else 0
            outcome = choice.outcomes[index]
            log_probability += choice.log_probabilities[index]
            if choice.emits:
                words.append(outcome[0])
                tree.append(f" ({symbol} {outcome[0]})")
            else:
                tree.append(f" ({symbol}")
                pending.append(")")
                pending.extend(reversed(outcome))
        return Derivation(tuple(words), "".join(tree).lstrip(), log_probability)

    def __iter__(self) -> Iterator[Derivation]:
        while True:
            yield self.draw()
