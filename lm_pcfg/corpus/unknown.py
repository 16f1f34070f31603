"""Unknown words: how many a text has, and what they do to a perplexity.

The model predicts one symbol for all of them, which is easier than to predict the words. So a perplexity falls with the
share of unknown words, and one of 51 % says little. A `<unk>` that the text itself has, as the Penn Treebank's, is a
word that is predicted like others: it is counted apart. For pieces of words it is a word like others anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lm_pcfg.corpus.pieces import AnyVocabulary
from lm_pcfg.corpus.vocabulary import UNKNOWN, Vocabulary

WARN_FROM = 0.05  # share of a text


@dataclass(frozen=True)
class Unknown:
    """The unknown words (or pieces) of a text, without the `<unk>` that are written in it.

    A prepared corpus does not tell the two apart: then `count` is of both, and their share is not known.
    """

    count: int
    literal: int | None  # `<unk>` that are written in the text; None: not known
    of: int  # words or pieces of the text
    unit: str = "words"

    @property
    def share(self) -> float | None:
        """Of the text; None: not known."""
        if self.literal is None and self.count:
            return None
        return self.count / self.of if self.of else 0.0

    @property
    def brief(self) -> str:
        """0.51 % unknown words"""
        share = self.share
        return f"share of unknown {self.unit} not known" if share is None else f"{percent(share)} unknown {self.unit}"

    def report(self) -> dict[str, Any]:
        """What stands beside a perplexity in a report; for pieces, `unknown_words` are unknown pieces."""
        return {"unknown_words": self.count, "unknown_share": self.share, "literal_unknown": self.literal}

    def __str__(self) -> str:
        """What stands beside a perplexity in a sentence: 12 unknown words (0.51 %)"""
        unit = self.unit[:-1] if self.count == 1 else self.unit
        if self.share is None:
            return f"{self.count:,} {UNKNOWN}, for unknown {self.unit} or in the text itself"
        literal = f", {self.literal:,} {UNKNOWN} in the text itself" if self.literal else ""
        return f"{self.count:,} unknown {unit} ({percent(self.share)}){literal}"

    def warning(self, name: str) -> str | None:
        """Warn where the share is so high that a perplexity says little."""
        if self.share is None or self.share < WARN_FROM:
            return None
        return (
            f"{name}: {percent(self.share)} of its {self.unit} are unknown, and cost only what {UNKNOWN} costs: "
            "perplexity and surprisal are lower than those of the text, and only comparable with the same vocabulary"
        )


def percent(share: float) -> str:
    """0.51 %, but 100 %"""
    return f"{100 * share:.3g} %" if share >= 1 else f"{100 * share:.2f} %"


def literals(line: str, vocabulary: AnyVocabulary) -> int:
    """How many words of a line are `<unk>` as it stands there."""
    if not isinstance(vocabulary, Vocabulary):
        return 0
    if vocabulary.options.lowercase:
        line = line.lower()
    return line.split().count(UNKNOWN) if UNKNOWN in line else 0
