"""Criteria of SyntaxGym: parsed formulas beside Python's own arithmetic, and what is said of bad ones."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_pcfg.corpus.suites.formulas import FormulaError, Region, Undefined, parse_formula

VALUES = {Region(1, "a"): 3.25, Region(2, "a"): 0.1, Region(None, "b-c_d"): -7.5, Region(12, "b-c_d"): 1e6}


def close(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=0.0, abs_tol=1e-3 + 1e-5 * abs(right))


def joined(parts: st.SearchStrategy, signs: dict[str, str]) -> st.SearchStrategy:
    """One to three parts with signs between them: the formula, and the same in Python."""
    more = st.lists(st.tuples(st.sampled_from(sorted(signs)), parts), max_size=2)

    def join(first, rest):
        formula, python = first
        for sign, (own, same) in rest:
            formula, python = f"{formula}{sign} {own}", f"{python} {signs[sign]} {same}"
        return formula, python

    return st.builds(join, parts, more)


def bracketed(parts: st.SearchStrategy) -> st.SearchStrategy:
    kinds = st.sampled_from(["({})", "[ {}]"])
    return st.builds(lambda part, kind: (kind.format(part[0]), f"({part[1]})"), parts, kinds)


NUMBERS = (
    st.sampled_from([(str(region), f"values[{region!r}]") for region in VALUES])
    | st.floats(0, 1e9).map(lambda value: (repr(value), repr(value)))
    | st.integers(0, 99).map(lambda value: (str(value), f"{value}.0"))
)
SUMS = st.recursive(
    NUMBERS,
    lambda inner: joined(inner | bracketed(inner), {"+": "+", "-": "-"}).flatmap(
        lambda part: st.sampled_from([part, (f"-({part[0]})", f"-({part[1]})")])
    ),
    max_leaves=6,
)
COMPARISONS = st.builds(
    lambda left, right, sign: (
        f"{left[0]} {sign}{right[0]}",
        f"close({left[1]}, {right[1]})" if sign == "=" else f"{left[1]} {sign} {right[1]}",
    ),
    SUMS, SUMS, st.sampled_from("<>="),
)  # fmt: skip
TRUTHS = st.recursive(
    COMPARISONS, lambda inner: joined(inner | bracketed(inner), {"&": "and", "|": "or"}), max_leaves=6
)


@settings(max_examples=200, deadline=None)
@given(TRUTHS)
def test_formulas_are_what_python_says(both):
    formula, python = both
    expected = eval(python, {"close": close, "values": VALUES, "Region": Region})
    assert parse_formula(formula).holds(VALUES.__getitem__) is bool(expected)


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("", "missing (at its end"), ("(1;%a%)", "should compare two"), ("1 < 2 < 3", "join them with &"),
        ("1 < (2", ") is missing"), ("[1 < 2)", "] is missing"), ("1 < 2)", "a bracket too many (at ')'"),
        ("1 & 2", "a number where a comparison"), ("(1 < 2) + 1 > 0", "a comparison where a number"),
        ("1 < __import__('os')", "not a number, a region"), ("1 < 2 ** 3", "not a number"), ("1e999 > 1", "too large"),
        ("(" * 51 + "1", "more than 50 brackets"), ("1<2&" * 3000 + "1<2", "at most 10,000 are read"),
        ("(x;%a%) > 1", "not a number"), ("(1;%%) > 1", "not a number"),
        ("1 > - > 1", "missing"), ("(1<2) 3", "more than one"),
    ],
)  # fmt: skip
def test_bad_formulas_are_told_in_a_line(formula, message):
    with pytest.raises(FormulaError, match=re.escape(message)) as error:
        parse_formula(formula)
    assert "\n" not in str(error.value)


def test_long_formulas_and_what_is_no_number():
    assert parse_formula("1" + "+1" * 4000 + " > 4000.5").holds(VALUES.__getitem__)
    infinite = {Region(1, "a"): math.inf, Region(2, "a"): math.inf, Region(3, "a"): math.nan}
    assert not parse_formula("(1;%a%) > (2;%a%)").holds(infinite.__getitem__)
    assert parse_formula("(1;%a%) = (2;%a%) & (1;%a%) > 5").holds(infinite.__getitem__)
    assert not parse_formula("5 = (2;%a%)").holds(infinite.__getitem__)
    for undefined in ("(3;%a%) > 1", "1 > (1;%a%) - (2;%a%)"):
        with pytest.raises(Undefined):
            parse_formula(undefined).holds(infinite.__getitem__)
