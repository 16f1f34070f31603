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

from lm_pcfg.corpus.lengths import KEPT, Histogram, Limits, Skipped
from lm_pcfg.corpus.pieces import AnyVocabulary
from lm_pcfg.corpus.text import display_name, read_lines, resolve_source
from lm_pcfg.corpus.unknown import Unknown, literals

LINES_AT_A_TIME = 4096  # that are tokenised together


@dataclass
class Damage:
    """What could not be read."""

    files: list[str] = field(default_factory=list)  # one message a file, each beginning with its name
    lines: int = 0  # single lines (invalid UTF-8 or JSON)


@dataclass(frozen=True)
class Sentences:
    """Sentence k is ids[offsets[k] : offsets[k + 1]], with `<eos>` at its end if ends are explicit."""

    ids: np.ndarray  # int32 [sum of lengths]
    offsets: np.ndarray  # int64 [lines + 1]
    line_numbers: np.ndarray  # int64 [lines], from 1, in the text
    end_of_sentence: bool
    unknown_id: int = 0
    unit: str = "words"  # what the ids are of: words, or pieces of words
    literal_unknown: int | None = 0  # `<unk>` that are written in the text; None: not known, of a prepared corpus
    limits: np.ndarray | None = None  # int32 [sum of lengths, 2]: brackets, see brackets.py; None: there are none
    skipped: Skipped = field(default_factory=Skipped)
    damage: Damage = field(default_factory=Damage)  # always none: a text in memory is whole

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sentence {index} of {len(self)}")
        index %= len(self)
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Lengths as the chart sees them, with `<eos>`: int64 [lines]."""
        return np.diff(self.offsets)

    @property
    def word_lengths(self) -> np.ndarray:
        """Lengths in words, without `<eos>`: int64 [lines]."""
        return self.lengths - int(self.end_of_sentence)

    @property
    def lines(self) -> int:
        return len(self)

    @property
    def words(self) -> int:
        """Number of words, without `<eos>`."""
        return len(self.ids) - (self.lines if self.end_of_sentence else 0)

    def longest(self, count: int) -> list[int]:
        """Return the lengths in the chart, with `<eos>`, of so many of the longest lines."""
        return Histogram.of(self.lengths).longest(count)

    @property
    def unknown(self) -> int:
        """Number of words that are `<unk>`, also those that are written so in the text."""
        return int(np.count_nonzero(self.ids == self.unknown_id))

    @cached_property
    def unknown_words(self) -> Unknown:
        """What to say beside a perplexity."""
        return Unknown(self.unknown - (self.literal_unknown or 0), self.literal_unknown, self.words, self.unit)

    @property
    def remark(self) -> str:
        """What `describe` adds about this kind of text."""
        return str(self.unknown_words)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the encoded sentences."""
        digest = hashlib.sha256(np.ascontiguousarray(self.offsets, dtype="<i8").data)
        digest.update(np.ascontiguousarray(self.ids, dtype="<i4").data)
        return digest.hexdigest()

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ids, int64 [sum of lengths], packed one sentence after another, and lengths, int64 [len(indices)]."""
        positions, lengths = self.positions(indices)
        return self.ids[positions].astype(np.int64), lengths

    def positions(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where the words of these sentences are in `ids`, int64 [sum of lengths], and lengths."""
        starts = self.offsets[indices]
        lengths = self.offsets[indices + 1] - starts
        total = int(lengths.sum())
        packed_starts = np.cumsum(lengths) - lengths
        # position in ids = start of the sentence + position in the packed array - where the sentence begins there
        return np.arange(total) + np.repeat(starts - packed_starts, lengths), lengths


def with_ends(ids: np.ndarray, lengths: np.ndarray, end_id: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Add `<eos>` after each of the packed sentences, and to their lengths; end_id None: leave them as they are."""
    if end_id is None:
        return ids, lengths
    return np.insert(ids, np.cumsum(lengths), end_id), lengths + 1


def sentences_within(
    limits: Limits, ids: np.ndarray, lengths: np.ndarray, line_numbers: np.ndarray, vocabulary: AnyVocabulary,
    literal: np.ndarray | None = None,
) -> Sentences:  # fmt: skip
    """Return the lines that the limits keep. ids: packed one line after another, without `<eos>`.

    literal: how many `<unk>` are written in each line, where that is known: [lines]. Pieces have none (unknown.py).
    """
    if literal is None and vocabulary.unit != "words":
        literal = np.zeros(len(lengths), np.int64)
    ends = vocabulary.end_id is not None
    kept = limits.judge(lengths, ends) == KEPT
    words, chart_lengths = with_ends(ids[np.repeat(kept, lengths)], lengths[kept], vocabulary.end_id)
    return Sentences(
        ids=words.astype(np.int32, copy=False),
        offsets=np.concatenate([[0], np.cumsum(chart_lengths)]).astype(np.int64),
        line_numbers=line_numbers[kept],
        end_of_sentence=ends,
        unknown_id=vocabulary.unknown_id,
        unit=vocabulary.unit,
        literal_unknown=None if literal is None else int(literal[kept].sum()),
        skipped=Histogram.of(lengths).skipped(limits, ends),
    )


def encode_sentences(
    numbered_lines: Iterable[tuple[int, str]], vocabulary: AnyVocabulary, limits: Limits | None = None
) -> Sentences:
    """Encode (line number, line) pairs. Lengths count what the vocabulary makes of a line: words, or pieces."""
    ids, lengths, numbers, literal = array("i"), array("q"), array("q"), array("q")
    numbered_lines = iter(numbered_lines)
    while some := list(islice(numbered_lines, LINES_AT_A_TIME)):
        numbers.extend(number for number, _ in some)
        literal.extend(literals(line, vocabulary) for _, line in some)
        for words in vocabulary.tokenise([line for _, line in some]):
            ids.extend(words)
            lengths.append(len(words))
    packed, of_lines, line_numbers = np.array(ids, np.int32), np.array(lengths, np.int64), np.array(numbers, np.int64)
    return sentences_within(limits or Limits(), packed, of_lines, line_numbers, vocabulary, np.array(literal, np.int64))


def load_sentences(path_or_name: str | Path, vocabulary: AnyVocabulary, *, limits: Limits | None = None) -> Sentences:
    """Load a path, '-' (standard input) or `embedded:train|valid|test`. An empty text is left to the caller."""
    lines = read_lines(resolve_source(path_or_name), name=display_name(path_or_name))
    return encode_sentences(lines, vocabulary, limits)
