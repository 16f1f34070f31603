"""Hypothesis strategies for JSON that is nearly right: one place of it is taken out, or holds something else."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

NUMBERS = st.sampled_from([0, -1, 1, 2**31, 2**53, 2**63, -(2**63) - 1, 10**400, 1.5, 1e308, float("nan"), True])
NAMES = st.sampled_from(
    ["", ".", "..", "../x", "/dev/zero", "/etc/passwd", "a/b", "a\0b", "a\nb", "\ud800", "x" * 300, "pipe", "zero"]
)
ANYTHING = st.recursive(
    st.none() | NUMBERS | NAMES | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values inside, each a tuple of keys and positions."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, child in children for place in ((*above, key), *places(child, (*above, key)))]


@st.composite
def nearly(draw: Any, right: dict[str, Any]) -> Any:
    """Draw a change of one to three places of what is right; in one of twenty, something else altogether."""
    if draw(st.integers(0, 19)) == 0:
        return draw(ANYTHING)
    value = copy.deepcopy(right)
    for _ in range(draw(st.integers(1, 3))):
        all_places = places(value)
        if not all_places:
            break
        *above, last = draw(st.sampled_from(all_places))
        inside = value
        for key in above:
            inside = inside[key]
        if draw(st.booleans()):
            inside[last] = draw(ANYTHING)
        elif isinstance(inside, dict) or draw(st.booleans()):
            del inside[last]
        else:
            inside.append(copy.deepcopy(inside[last]))
    return value
