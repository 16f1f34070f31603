"""The words of a sentence, each as strongly coloured as it is surprising, with its surprisal in bits below it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lm_pcfg.pages.shell import text

LEVELS = 10  # of colour
MOST_BITS = 15.0  # from here on the colour is the strongest
STYLE = """
.strip { line-height: 1.25; margin: .3rem 0 .9rem; }
.strip span { display: inline-block; text-align: center; padding: .15rem .3rem; margin: 0 1px 3px 0; border-radius: 3px;
              max-width: 100%; overflow-wrap: anywhere; }
.strip small { display: block; font-size: .72em; opacity: .75; margin: 0; color: inherit; }
""" + "".join(
    f".strip .b{level} {{ background: rgba(var(--warm), {0.7 * level / LEVELS:.2f}); }}\n"
    for level in range(LEVELS + 1)
)


def surprisal_strip(words: Sequence[str], bits: Sequence[float], end: float | None = None) -> str:
    """Return the words as HTML for a page with STYLE. end: bits of the end of the sentence; None: do not show it."""
    entries = [_entry(text(word), value) for word, value in zip(words, bits, strict=True)]
    if end is not None:
        entries.append(_entry("<i>end</i>", end))
    return f'<p class="strip">{" ".join(entries)}</p>\n'


def _entry(word: str, bits: float) -> str:
    level = round(LEVELS * min(max(bits, 0.0) / MOST_BITS, 1.0)) if not math.isnan(bits) else 0
    figure = f"{bits:.1f}" if math.isfinite(bits) else "∞" if bits > 0 else "?"
    return f'<span class="b{level}"><bdi>{word}</bdi><small>{figure}</small></span>'
