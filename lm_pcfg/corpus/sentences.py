"""A corpus of encoded sentences in memory."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from lm_pcfg.corpus.text import display_name, read_lines, resolve_source
from lm_pcfg.corpus.vocabularies import AnyVocabulary

LINES_AT_A_TIME = 4096  # that are tokenised together


@dataclass(frozen=True)
class Limits:
    """Which sentences are kept."""

    max_length: int | None = None  # most words, not counting <eos>
    min_length: int = 1  # fewest symbols in the chart, counting <eos>: 2 where the grammar cannot emit a single one


@dataclass
class Skipped:
    """Lines that are not in the corpus, by reason."""

    blank: int = 0
    too_long: int = 0
    too_short: int = 0

    @property
    def total(self) -> int:
        return self.blank + self.too_long + self.too_short


@dataclass(frozen=True)
class Sentences:
    """Sentence k is ids[offsets[k] : offsets[k + 1]], with `<eos>` at its end if ends are explicit."""

    ids: np.ndarray  # int32 [sum of lengths]
    offsets: np.ndarray  # int64 [lines + 1]
    line_numbers: np.ndarray  # int64 [lines], from 1, in the text
    end_of_sentence: bool
    unknown_id: int = 0
    skipped: Skipped = field(default_factory=Skipped)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sentence {index} of {len(self)}")
        index %= len(self)
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [lines]: what the chart sees, so with `<eos>`."""
        return np.diff(self.offsets)

    @property
    def word_lengths(self) -> np.ndarray:
        """int64 [lines]: words only."""
        return self.lengths - int(self.end_of_sentence)

    @property
    def lines(self) -> int:
        return len(self)

    @property
    def words(self) -> int:
        """Number of words, without `<eos>`."""
        return len(self.ids) - (self.lines if self.end_of_sentence else 0)

    @property
    def unknown(self) -> int:
        """Number of words that are `<unk>`."""
        return int(np.count_nonzero(self.ids == self.unknown_id))

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the encoded sentences."""
        digest = hashlib.sha256(np.ascontiguousarray(self.offsets, dtype="<i8").data)
        digest.update(np.ascontiguousarray(self.ids, dtype="<i4").data)
        return digest.hexdigest()

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [sum of lengths] packed one sentence after another, lengths int64 [len(indices)])."""
        starts = self.offsets[indices]
        lengths = self.offsets[indices + 1] - starts
        total = int(lengths.sum())
        packed_starts = np.cumsum(lengths) - lengths
        # position in ids = start of the sentence + position in the packed array - where the sentence begins there
        positions = np.arange(total) + np.repeat(starts - packed_starts, lengths)
        return self.ids[positions].astype(np.int64), lengths


def encode_sentences(
    numbered_lines: Iterable[tuple[int, str]], vocabulary: AnyVocabulary, limits: Limits | None = None
) -> Sentences:
    """From (line number, line) pairs. Lengths count what the vocabulary makes of a line: words, or pieces."""
    limits = limits or Limits()
    ids, offsets, numbers = array("i"), array("q", [0]), array("q")
    skipped = Skipped()
    ending = [] if vocabulary.end_id is None else [vocabulary.end_id]
    numbered_lines = iter(numbered_lines)
    while some := list(islice(numbered_lines, LINES_AT_A_TIME)):
        for (number, _), words in zip(some, vocabulary.tokenise([line for _, line in some]), strict=True):
            if not words:
                skipped.blank += 1
            elif limits.max_length is not None and len(words) > limits.max_length:
                skipped.too_long += 1
            elif len(words) + len(ending) < limits.min_length:
                skipped.too_short += 1
            else:
                ids.extend(words)
                ids.extend(ending)
                offsets.append(len(ids))
                numbers.append(number)
    return Sentences(
        ids=np.array(ids, dtype=np.int32),
        offsets=np.array(offsets, dtype=np.int64),
        line_numbers=np.array(numbers, dtype=np.int64),
        end_of_sentence=bool(ending),
        unknown_id=vocabulary.unknown_id,
        skipped=skipped,
    )


def load_sentences(path_or_name: str | Path, vocabulary: AnyVocabulary, *, limits: Limits | None = None) -> Sentences:
    """Of a path, '-' (standard input) or `embedded:train|valid|test`. May be empty: the caller decides what then."""
    lines = read_lines(resolve_source(path_or_name), name=display_name(path_or_name))
    return encode_sentences(lines, vocabulary, limits)
