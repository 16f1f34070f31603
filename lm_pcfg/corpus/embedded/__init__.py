"""A small English-like treebank that needs no download, drawn from a hand-written PCFG of our own.

Because the source is known, so is the best possible score on it: the source grammar's own (`best_possible`).

    source_grammar.py  rules and knobs       templates.py  the plain PCFG they stand for    sampling.py  drawing from it
    lexicon.py         words                 inside.py     exact string probabilities       entropy.py   closed forms
    files.py           the files             checksums.py  what their bytes must be
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from lm_pcfg.corpus.embedded.files import materialise, resolve
from lm_pcfg.corpus.embedded.templates import source_pcfg

if TYPE_CHECKING:  # numpy is imported where it is needed
    from lm_pcfg.corpus.embedded.inside import InsideScorer, SourceScore

__all__ = ["best_possible", "derivation_entropy", "expected_length", "materialise", "resolve", "source_pcfg"]


@lru_cache(maxsize=1)
def _scorer() -> "InsideScorer":
    from lm_pcfg.corpus.embedded.inside import InsideScorer

    return InsideScorer(source_pcfg())


def best_possible(lines: Iterable[Sequence[str]]) -> "SourceScore":
    """The source grammar's own score of these sentences, exactly: no model can be better in expectation."""
    from lm_pcfg.corpus.embedded.inside import score

    return score(_scorer(), lines)


def derivation_entropy() -> float:
    """Return the entropy of a derivation of the source, in nats."""
    from lm_pcfg.corpus.embedded.entropy import derivation_entropy

    return derivation_entropy(source_pcfg())


def expected_length() -> float:
    """Return the mean number of words of a sentence of the source."""
    from lm_pcfg.corpus.embedded.entropy import expected_length

    return expected_length(source_pcfg())
