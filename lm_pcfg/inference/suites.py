"""Syntactic test suites: is the good sentence the more probable one, do the criteria hold (`lm_pcfg suite`)?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lm_pcfg.console import unseen
from lm_pcfg.corpus.lengths import Limits
from lm_pcfg.corpus.suites.files import METRICS, Item, Pair, Spelling, Suite, SuiteItem, read_suite
from lm_pcfg.corpus.suites.formulas import Region, Undefined
from lm_pcfg.errors import UserError
from lm_pcfg.inference.lines import REASONS, OnLines, Warnings, unit_of, warn_of_unknown
from lm_pcfg.inference.model import Model
from lm_pcfg.inference.sample import counted

RIGHT, TIE, WRONG = 2, 1, 0  # halves of an item
_WHY = {
    "blank": "a sentence without words",
    "long": "a sentence that does not fit into memory",
    "short": "a sentence so short that the model gives it no probability",
    "words": "words that the model's pieces do not tell apart",
    "no number": "its probability is no number",
    "undefined": "a prediction compares what is no number, as the surprisals after a word of probability 0 are",
}


def read_suites(files: Iterable[Path], *, lowercase: bool, keep_punctuation: bool) -> list[Item]:
    """Read the items of some files, see `lm_pcfg.corpus.suites.files`."""
    spelling = Spelling(lowercase, keep_punctuation)
    return [item for file in files for item in read_suite(file, spelling)]


def evaluate_suites(
    model: Model, items: Sequence[Item], *, warn: Callable[[str], None], on_lines: OnLines = unseen
) -> dict[str, Any]:
    """Judge the items: the report of `lm_pcfg suite`. Accuracies are percentages, None where there is no item.

    Items that cannot be scored are counted, told, and in no accuracy.
    """
    warnings = Warnings(warn)
    sentences = _Sentences(model, items, warn, on_lines)
    total, phenomena, paradigms = Tally(), dict[str, Tally](), dict[tuple[str, str], Tally]()
    predictions: dict[tuple[Suite, int], Tally] = {}
    for item in items:
        verdict, held = _judged(item, sentences)
        known = not any(sentence in sentences.unknown for sentence in item.sentences)
        if isinstance(verdict, str):
            warnings.add(f"not scored: {verdict}", f"{item.place}: not scored: {_WHY[verdict]}")
        elif not all(sentences.is_possible(sentence) for sentence in item.sentences):
            warnings.add("probability 0", f"{item.place}: a sentence of probability 0")
        own = phenomena.setdefault(item.phenomenon, Tally())
        of_paradigm = paradigms.setdefault((item.phenomenon, item.paradigm), Tally())
        for tally in (total, own, of_paradigm):
            tally.add(verdict, known)
        if isinstance(item, SuiteItem):
            for number, holds in enumerate(held):
                tally = predictions.setdefault((item.suite, number), Tally())
                tally.add(RIGHT if holds else WRONG, known)
    warnings.summarise()
    if not total.scored:
        raise UserError(f"no item could be scored ({total.unscored:,} were not)")
    return {
        "checkpoint": " + ".join(str(one.checkpoint) for one in model.grammars),
        "weights": " + ".join(one.weights for one in model.grammars),
        "precision": model.precision,
        **total.report(),
        "phenomena": [{"phenomenon": name, **tally.report()} for name, tally in phenomena.items()],
        "paradigms": [
            {"phenomenon": phenomenon, "paradigm": name, **tally.report()}
            for (phenomenon, name), tally in paradigms.items()
        ],
        "predictions": [
            {"suite": suite.name, "prediction": number + 1, "formula": suite.formulas[number].text, **tally.report()}
            for (suite, number), tally in predictions.items()
        ],
    }


@dataclass
class Tally:
    """How many items are right, all of them and those without unknown words."""

    scored: int = 0
    halves: int = 0  # two of a right item, one of a tie
    ties: int = 0
    known: int = 0  # of the scored ones
    known_halves: int = 0
    unscored: int = 0

    def add(self, verdict: int | str, known: bool) -> None:
        """Count RIGHT, TIE or WRONG, or why an item was not scored."""
        if isinstance(verdict, str):
            self.unscored += 1
            return
        self.scored += 1
        self.halves += verdict
        self.ties += verdict == TIE
        self.known += known
        self.known_halves += verdict * known

    def report(self) -> dict[str, Any]:
        return {
            "accuracy": 50.0 * self.halves / self.scored if self.scored else None,
            "items": self.scored,
            "accuracy_known": 50.0 * self.known_halves / self.known if self.known else None,
            "items_known": self.known,
            "ties": self.ties,
            "unscored": self.unscored,
        }


class _Sentences:
    """What a model says of the sentences of some items.

    A sentence is computed once, and so are those that are the same to the model because their unknown words are: two of
    them tie exactly. The same holds for surprisals after equal words.
    """

    def __init__(self, model: Model, items: Sequence[Item], warn: Callable[[str], None], on_lines: OnLines):
        self.model = model
        texts = list(dict.fromkeys(sentence for item in items for sentence in item.sentences))
        if any(isinstance(item, SuiteItem) for item in items):
            for one in model.next_words():  # families that have none refuse before anything is computed
                if message := one.warning():
                    warn(message)
        vocabulary = model.vocabulary
        self._ids = dict(zip(texts, vocabulary.tokenise(texts), strict=True))
        self.unknown = {text for text, ids in self._ids.items() if vocabulary.unknown_id in ids}
        if self.unknown:
            count = sum(self._ids[text].count(vocabulary.unknown_id) for text in self.unknown)
            warn_of_unknown("these suites", count, vocabulary, warn)
        self._reasons = self._judged_lengths(warn)
        self._first: dict[str, str] = {}  # of the sentences that are the same to the model
        by_key: dict[tuple[int, ...], str] = {}
        for text, ids in self._ids.items():
            self._first[text] = by_key.setdefault((len(text.split()), *ids), text)
        pairs, regions = (self._distinct(items, kind) for kind in (Pair, SuiteItem))
        on_lines(max(0, len(texts) - len(pairs) - len(regions)))
        if pairs and model.is_bound:
            warn("a compound PCFG has no exact probabilities: pairs compare estimates of a lower bound")
        scores = model.score(pairs, on_lines=on_lines).tolist() if pairs else []
        self._scores = dict(zip(pairs, scores, strict=True))
        self._bits = self._surprisals(regions, on_lines)

    def _judged_lengths(self, warn: Callable[[str], None]) -> dict[str, str]:
        """Return why a sentence cannot be computed; "": it can."""
        fitting, vocabulary = self.model.longest_line(), self.model.vocabulary
        fewest = min(one.fewest_symbols for one in self.model.grammars)
        limits = Limits(None if fitting == math.inf else int(fitting), fewest)
        lengths = np.array([len(ids) for ids in self._ids.values()], dtype=np.int64)
        verdicts = limits.judge(lengths, ends=vocabulary.end_id is not None).tolist()
        reasons = {text: REASONS[verdict] for text, verdict in zip(self._ids, verdicts, strict=True)}
        if "long" in reasons.values():
            most = counted(fitting, unit_of(vocabulary))
            warn(f"sentences may have at most {most} here: their charts have to fit into memory")
        return reasons

    def _distinct(self, items: Sequence[Item], kind: type) -> list[str]:
        texts = (text for item in items if isinstance(item, kind) for text in item.sentences)
        return list(dict.fromkeys(self._first[text] for text in texts if not self._reasons[text]))

    def _surprisals(self, texts: list[str], on_lines: OnLines) -> dict[str, list[float] | None]:
        """Return the bits of each word. Where sentences begin with the same words, these have the same bits."""
        bits: dict[str, list[float] | None] = {}
        children: dict[tuple[int, int], int] = {}  # a tree of prefixes: from a prefix and a symbol to a longer prefix
        bits_of: dict[int, float] = {}  # of the last word of a prefix
        found = self.model.surprisal(texts, on_lines=on_lines) if texts else []
        for text, one in zip(texts, found, strict=True):
            if one is None:
                bits[text] = None
                continue
            ids, prefix, own = self._ids[text], 0, []
            boundaries = self.model.vocabulary.word_boundaries(ids, len(one.words)) or []
            for value, (first, end) in zip(one.bits.tolist(), pairwise(boundaries), strict=True):
                for symbol in ids[first:end]:
                    prefix = children.setdefault((prefix, symbol), len(children) + 1)
                own.append(bits_of.setdefault(prefix, value))
            bits[text] = own
        return bits

    def reason(self, text: str) -> str:
        return self._reasons[text]

    def score(self, text: str) -> float:
        return self._scores[self._first[text]]

    def bits(self, text: str) -> list[float] | None:
        return self._bits[self._first[text]]

    def is_possible(self, text: str) -> bool:
        first = self._first[text]
        return self._scores.get(first, 0.0) > -math.inf and math.inf not in (self._bits.get(first) or ())


def _judged(item: Item, sentences: _Sentences) -> tuple[int | str, list[bool]]:
    """Return RIGHT, TIE, WRONG or why it cannot be said, and of a SyntaxGym item which formulas hold."""
    for sentence in item.sentences:
        if reason := sentences.reason(sentence):
            return reason, []
    if isinstance(item, Pair):
        good, bad = sentences.score(item.good), sentences.score(item.bad)
        if math.isnan(good) or math.isnan(bad):
            return "no number", []
        return (RIGHT if good > bad else TIE if good == bad else WRONG), []
    values: dict[Region, float] = {}
    for condition in item.suite.conditions:
        bits = sentences.bits(item.sentence(condition))
        if bits is None:
            return "words", []
        values |= _region_values(condition, item.conditions[condition], bits, item.suite.metric)
    try:
        held = [formula.holds(values.__getitem__) for formula in item.suite.formulas]
    except Undefined:
        return "undefined", []
    return (RIGHT if all(held) else WRONG), held


def _region_values(
    condition: str, regions: dict[int, list[str]], bits: Sequence[float], metric: str
) -> dict[Region, float]:
    """Return the value of every region of a condition, and of all of them together: their sum."""
    values, first = dict[Region, float](), 0
    for number, words in regions.items():
        own = bits[first : first + len(words)]
        values[Region(number, condition)] = float(METRICS[metric](own)) if own else 0.0
        first += len(words)
    values[Region(None, condition)] = sum(values.values())
    return values
