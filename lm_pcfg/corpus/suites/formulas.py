"""The criteria of SyntaxGym's suites: `(2;%mismatch%) > (2;%match%)`.

    either     = both { "|" both }
    both       = comparison { "&" comparison }
    comparison = sum [ ( "<" | ">" | "=" ) sum ]
    sum        = term { ( "+" | "-" ) term }
    term       = [ "-" ] ( number | region | "(" either ")" | "[" either "]" )
    region     = "(" ( digits | "*" ) ";%" condition "%)"

A formula is parsed into a programme in postfix order, which a loop computes on a stack. Nothing of it is run as code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

RELATIVE, ABSOLUTE = 1e-5, 1e-3  # how close numbers are that "=" takes for equal
DEEPEST = 50  # brackets in brackets
LONGEST = 10_000  # characters

_TOKEN = re.compile(
    r"""\s*(?:
    \(\s*(?P<region>\*|[0-9]{1,9})\s*;\s*%(?P<condition>[^%]+)%\s*\)
    | (?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
    | (?P<sign>[-+<>=&|()\[\]])
    | (?P<end>\Z)
    )""",
    re.VERBOSE,
)
_CLOSING = {"(": ")", "[": "]"}


class FormulaError(ValueError):
    """A formula that cannot be read; the message says why and where, without the file."""


class Undefined(ArithmeticError):
    """A formula that compares what is no number: infinity less infinity, or what follows a word of probability 0."""


class Region(NamedTuple):
    """A region of a condition, as a formula names it; number None: all regions of the condition."""

    number: int | None
    condition: str

    def __str__(self) -> str:
        return f"({'*' if self.number is None else self.number};%{self.condition}%)"


Kind = Literal["number", "truth"]
Step = float | Region | str  # a number, a region, or what is done with the last values: + - < > = & | and neg


@dataclass(frozen=True)
class Formula:
    text: str
    steps: tuple[Step, ...]  # in postfix order

    @cached_property
    def regions(self) -> list[Region]:
        return list(dict.fromkeys(step for step in self.steps if isinstance(step, Region)))

    def holds(self, value_of: Callable[[Region], float]) -> bool:
        """Say whether the formula holds for these values of regions; raise Undefined where nobody can."""
        stack: list[float] = []  # truths are 1 and 0
        for step in self.steps:
            if isinstance(step, Region):
                stack.append(value_of(step))
            elif isinstance(step, float):
                stack.append(step)
            elif step == "neg":
                stack.append(-stack.pop())
            else:
                right, left = stack.pop(), stack.pop()
                stack.append(_combined(step, left, right))
        return bool(stack.pop())


def _combined(sign: str, left: float, right: float) -> float:
    match sign:
        case "+":
            return left + right
        case "-":
            return left - right
        case "&":
            return min(left, right)
        case "|":
            return max(left, right)
    if math.isnan(left) or math.isnan(right):
        raise Undefined
    match sign:
        case "<":
            return float(left < right)
        case ">":
            return float(left > right)
    close = abs(left - right) <= ABSOLUTE + RELATIVE * abs(right) if math.isfinite(right) else False
    return float(left == right or close)


def parse_formula(text: str) -> Formula:
    """Read a formula; FormulaError says what is wrong with it."""
    if len(text) > LONGEST:
        raise FormulaError(f"a formula of {len(text):,} characters; at most {LONGEST:,} are read")
    parser = _Parser(text)
    kind = parser.either()
    if parser.sign != "end":
        raise parser.error("more than one formula, or a bracket too many")
    if kind != "truth":
        raise parser.error("a number, but it should compare two (with <, > or =)")
    return Formula(text.strip(), tuple(parser.steps))


class _Parser:
    """Each method reads one rule of the grammar, appends its steps, and returns what kind of value they leave."""

    def __init__(self, text: str):
        self.text, self.steps = text, list[Step]()
        self._place, self._depth = 0, 0
        self.advance()

    def advance(self) -> None:
        """Read the next token into `found` and `sign` (its character, or "region", "number" or "end")."""
        self._start = self._place
        found = _TOKEN.match(self.text, self._start)
        if found is None:
            raise self.error("not a number, a region such as (2;%match%), a bracket or one of + - < > = & |")
        assert found.lastgroup is not None
        self.found, self._place = found, found.end()
        self.sign = found["sign"] or ("region" if found["region"] else found.lastgroup)

    def error(self, what: str) -> FormulaError:
        rest = self.text[self._start :].strip()
        where = f"at {rest[:30]!r}" if rest else "at its end"
        return FormulaError(f"{what} ({where} of {self.text.strip()[:80]!r})")

    def either(self) -> Kind:
        return self._chain("|", self.both)

    def both(self) -> Kind:
        return self._chain("&", self.comparison)

    def _chain(self, sign: str, part: Callable[[], Kind]) -> Kind:
        kind = part()
        while self.sign == sign:
            self._check(kind, "truth")
            self.advance()
            self._check(part(), "truth")
            self.steps.append(sign)
        return kind

    def comparison(self) -> Kind:
        kind = self.sum()
        if self.sign not in ("<", ">", "="):
            return kind
        sign = self.sign
        self._check(kind, "number")
        self.advance()
        self._check(self.sum(), "number")
        self.steps.append(sign)
        if self.sign in ("<", ">", "="):
            raise self.error("one comparison after the other; join them with &")
        return "truth"

    def sum(self) -> Kind:
        kind = self.term()
        while self.sign in ("+", "-"):
            sign = self.sign
            self._check(kind, "number")
            self.advance()
            self._check(self.term(), "number")
            self.steps.append(sign)
        return kind

    def term(self) -> Kind:
        if negative := self.sign == "-":
            self.advance()
        kind: Kind = "number"
        if self.sign == "number":
            value = float(self.found["number"])
            if not math.isfinite(value):
                raise self.error("a number too large to compute with")
            self.steps.append(value)
        elif self.sign == "region":
            number = self.found["region"]
            self.steps.append(Region(None if number == "*" else int(number), self.found["condition"].strip()))
        elif self.sign in _CLOSING:
            kind = self._bracketed(_CLOSING[self.sign])
        else:
            raise self.error("a number, a region or a bracket is missing")
        self.advance()
        if negative:
            self._check(kind, "number")
            self.steps.append("neg")
        return kind

    def _bracketed(self, closing: str) -> Kind:
        self._depth += 1
        if self._depth > DEEPEST:
            raise self.error(f"more than {DEEPEST} brackets in each other")
        self.advance()
        kind = self.either()
        if self.sign != closing:
            raise self.error(f"{closing} is missing")
        self._depth -= 1
        return kind

    def _check(self, kind: Kind, wanted: Kind) -> None:
        if kind != wanted:
            names = {"number": "number", "truth": "comparison"}
            raise self.error(f"a {names[kind]} where a {names[wanted]} should be")
