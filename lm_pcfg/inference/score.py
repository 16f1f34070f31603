"""Log-probabilities of the lines of a text, and its perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from flash_inside import Statistics
from lm_pcfg.corpus.sentences import Sentences, encode_sentences
from lm_pcfg.corpus.shard_files import is_json, is_parquet
from lm_pcfg.corpus.text import display_name, read_lines, resolve_source
from lm_pcfg.corpus.vocabulary import Vocabulary
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.likelihood import CorpusScore, corpus_score, sentence_log_probabilities
from lm_pcfg.inference.model import TrainedGrammar

LINES_AT_A_TIME = 20_000  # a text of any size is scored in bounded memory
WARNINGS_SHOWN = 5  # of each kind

Line = float | None  # a log-probability (-inf: skipped), None: a blank line


@dataclass
class TextScore:
    """The sums of `CorpusScore`, over all blocks of lines, and what was left out."""

    nlls: list[float] = field(default_factory=list)
    pieces: int = 0  # what the vocabulary makes of the lines: words, or pieces of words
    words: int = 0  # between white space
    bytes: int = 0  # of the words joined by single spaces
    lines: int = 0
    skipped: int = 0
    blank: int = 0
    unknown_words: int = 0
    statistics: Statistics = field(default_factory=Statistics)  # of all grammars of a mixture together

    @property
    def total(self) -> CorpusScore:
        """Per piece: with a word vocabulary the same as per word."""
        return CorpusScore(nll=math.fsum(self.nlls), words=self.pieces, lines=self.lines, impossible=0)

    @property
    def perplexity_per_word(self) -> float:
        """Comparable between vocabularies: the end of a line counts as one word, as in `total`."""
        return CorpusScore(math.fsum(self.nlls), self.words, self.lines, impossible=0).perplexity

    @property
    def perplexity_per_byte(self) -> float:
        """Comparable between vocabularies: the end of a line is its newline, one byte."""
        return CorpusScore(math.fsum(self.nlls), self.bytes, self.lines, impossible=0).perplexity


def score_lines(
    mixture: Sequence[TrainedGrammar],
    source: str,
    result: TextScore,
    *,
    max_length: int,
    precision: str = "fp32",
    backend: str = "auto",
    batch_cost: int = 25_600,
    warn: Callable[[str], None],
    on_lines: Callable[[int], None] = lambda lines: None,
) -> Iterator[Line]:
    """One value a line of the source ('-': standard input), in its order; adds the sums to `result` on the way.

    mixture: grammars of one vocabulary. Several, each with the same share, are one grammar again: that of all their
    symbols, whose root first chooses one of them.
    """
    name, trained = display_name(source), mixture[0]
    for other in mixture:
        if other.vocabulary.hash != trained.vocabulary.hash:
            raise UserError(
                f"{trained.checkpoint} and {other.checkpoint} have different vocabularies; a mixture needs one for all"
            )
    if is_json(Path(source)) or is_parquet(Path(source)):
        raise UserError(f"{name}: score reads text, one sentence a line; take the sentences out of their field first")
    numbered = read_lines(resolve_source(source), name=name)
    one_word = any(one.grammar.root.shape[0] > one.grammar.rules.nonterminals for one in mixture)
    fewest = 1 if one_word or trained.vocabulary.end_id is not None else 2
    warnings = _Warnings(warn)
    unit = "words" if isinstance(trained.vocabulary, Vocabulary) else "pieces"
    while block := list(islice(numbered, LINES_AT_A_TIME)):
        values: list[Line] = [None] * len(block)
        kept = []
        ids = trained.vocabulary.tokenise([line for _, line in block])
        for position, (number, _) in enumerate(block):
            length = len(ids[position])
            if length == 0:
                result.blank += 1
            elif length > max_length:
                values[position] = -math.inf
                warnings.add("long", f"{name}, line {number}: {length:,} {unit}, skipped; --max-length {max_length} is "
                             "the limit (memory and time grow with its square and cube)")  # fmt: skip
            elif length < fewest:
                values[position] = -math.inf
                warnings.add(
                    "short",
                    f"{name}, line {number}: one {unit[:-1]}, skipped: a root over nonterminals gives it no tree",
                )
            else:
                kept.append(position)
        sentences = encode_sentences([block[position] for position in kept], trained.vocabulary)
        log_p = _mixed(mixture, sentences, result.statistics, batch_cost, precision, backend, on_lines)
        score = corpus_score(sentences, log_p)
        result.nlls.append(score.nll)
        result.pieces += score.words
        result.lines += score.lines
        for position, value in zip(kept, log_p.tolist(), strict=True):
            values[position] = value
            if value == -math.inf:
                warnings.add("impossible", f"{name}, line {block[position][0]}: probability 0, skipped")
            else:
                words = block[position][1].split()
                result.words += len(words)
                result.bytes += len(" ".join(words).encode("utf-8"))
        result.unknown_words += _unknown_words(sentences.ids, sentences.offsets, log_p, trained.vocabulary.unknown_id)
        result.skipped += sum(value == -math.inf for value in values)
        on_lines(len(block) - len(kept))  # the others were told of batch by batch
        yield from values
    vocabulary = trained.vocabulary
    # A SentencePiece model knows every character of its training text.
    none_in_training = unit == "pieces" or (vocabulary.training_words and not vocabulary.training_unknown)
    if result.unknown_words and none_in_training:
        warn(f"{name}: {result.unknown_words:,} unknown {unit}, but training saw none: their probability is arbitrary")
    warnings.summarise()


def _mixed(
    mixture: Sequence[TrainedGrammar],
    sentences: Sentences,
    statistics: Statistics,
    batch_cost: int,
    precision: str,
    backend: str,
    on_lines: Callable[[int], None],
) -> np.ndarray:
    """Logarithms of mean probabilities: fp64 [lines]. Lines are told of when the last grammar has them."""
    parts = []
    for one in mixture:
        log_p = sentence_log_probabilities(
            one.grammar, sentences, batch_cost=batch_cost, precision=precision, backend=backend, statistics=statistics,
            on_batch=on_lines if one is mixture[-1] else lambda lines: None,
        )  # fmt: skip
        parts.append(log_p)
    return np.logaddexp.reduce(parts) - math.log(len(mixture))


def _unknown_words(ids: np.ndarray, offsets: np.ndarray, log_p: np.ndarray, unknown_id: int) -> int:
    """Among the lines that were scored."""
    scored = np.repeat(np.isfinite(log_p), np.diff(offsets))
    return int(np.count_nonzero((ids == unknown_id) & scored))


class _Warnings:
    """The first few of each kind, then only their number."""

    def __init__(self, warn: Callable[[str], None]):
        self._warn = warn
        self._counts: dict[str, int] = {}

    def add(self, kind: str, message: str) -> None:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        if self._counts[kind] <= WARNINGS_SHOWN:
            self._warn(message)

    def summarise(self) -> None:
        for kind, count in self._counts.items():
            if count > WARNINGS_SHOWN:
                self._warn(f"... and {count - WARNINGS_SHOWN:,} more lines ({kind})")
