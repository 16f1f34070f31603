"""From the lines of a text to one value a line, in the order of the lines.

`map_lines` is the frame of every command that reads text: it reads blocks of lines, skips lines that cannot be
computed, and calls one function with the other lines of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from flash_inside.devices import longest_fitting, memory_of
from lm_pcfg.console import Advance, unseen
from lm_pcfg.corpus.lengths import BLANK, KEPT, TOO_LONG, TOO_SHORT, Limits
from lm_pcfg.corpus.pieces import AnyVocabulary
from lm_pcfg.corpus.shards.files import is_json, is_parquet
from lm_pcfg.corpus.text import display_name, read_lines, resolve_source
from lm_pcfg.corpus.unknown import literals
from lm_pcfg.distributed.sharing import ALONE, Ranks
from lm_pcfg.errors import UserError
from lm_pcfg.inference.trained import TrainedGrammar

LINES_AT_A_TIME = 20_000  # a block: texts of any size are computed in bounded memory
WARNINGS_SHOWN = 5  # of each kind
REASONS = {KEPT: "", BLANK: "blank", TOO_LONG: "long", TOO_SHORT: "short"}  # why a line is skipped

Value = TypeVar("Value")
#: Called with the number of lines that are done, or with 0 and what is done now.
OnLines = Advance


class Line(NamedTuple, Generic[Value]):
    """A line of the text and what became of it."""

    number: int  # in the text, from 1
    text: str
    value: Value | None  # None: it was skipped
    skipped: str = ""  # why: "blank", "long" or "short"
    unknown: int = 0  # words (or pieces) that the vocabulary does not have
    literal: int = 0  # `<unk>` that are written in the line


class Warnings:
    """Passes on the first few warnings of each kind; `summarise` then tells how many more there were."""

    def __init__(self, warn: Callable[[str], None]):
        self.warn = warn
        self._counts: dict[str, int] = {}

    def add(self, kind: str, message: str) -> None:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        if self._counts[kind] <= WARNINGS_SHOWN:
            self.warn(message)

    def summarise(self) -> None:
        for kind, count in self._counts.items():
            if count > WARNINGS_SHOWN:
                self.warn(f"... and {count - WARNINGS_SHOWN:,} more lines ({kind})")


def map_lines(
    source: str, vocabulary: AnyVocabulary, function: Callable[[list[str], OnLines], Sequence[Value]], *, command: str,
    max_length: int | None, fitting: float = math.inf, min_length: int = 1, warnings: Warnings,
    on_lines: OnLines = unseen, at_a_time: int | None = None, ranks: Ranks = ALONE,
) -> Iterator[Line[Value]]:  # fmt: skip
    """Yield every line of the source ('-' is standard input) with the value that the function computes for it.

    function     gets the lines of a block, and returns one value for each, in their order; it calls its second argument
                 with the number of lines whenever some are done
    command      names the caller in messages
    max_length   in words or pieces; longer lines are skipped with a warning, blank lines without
    fitting      the same, as memory allows it: `longest_line`
    at_a_time    lines of a block
    min_length   in symbols that the model sees, so with `<eos>` if ends are explicit; shorter lines are skipped, too
    ranks        processes that do this together: the main one reads, all have all lines, and the function shares them
    """
    name, unit, limits = display_name(source), unit_of(vocabulary), Limits(max_length, min_length)
    why_limited = f"--max-length {max_length} is the limit (memory and time grow with its square and cube)"
    fitting = ranks.least(fitting)
    if fitting < (math.inf if max_length is None else max_length):
        limits = Limits(int(fitting), min_length)
        why_limited = f"{int(fitting):,} are what fits into memory (which grows with the square)"
    if is_json(Path(source)) or is_parquet(Path(source)):
        problem = f"{name}: {command} reads text, one sentence a line"
        raise UserError(f"{problem}; take the sentences out of their field first")
    numbered: Iterator[tuple[int, str]] = iter(())
    if ranks.is_main:
        numbered = read_lines(resolve_source(source), name=name)
    while block := ranks.on_main(lambda: list(islice(numbered, at_a_time or LINES_AT_A_TIME))):
        tokenised = vocabulary.tokenise([text for _, text in block])
        lengths = np.array([len(ids) for ids in tokenised])
        literal = [literals(text, vocabulary) for _, text in block]
        unknown = [ids.count(vocabulary.unknown_id) - own for ids, own in zip(tokenised, literal, strict=True)]
        verdicts = limits.judge(lengths, ends=vocabulary.end_id is not None).tolist()
        reasons = [REASONS[verdict] for verdict in verdicts]
        for (number, _), length, reason in zip(block, lengths.tolist(), reasons, strict=True):
            place, count = f"{name}, line {number}", f"one {unit[:-1]}" if length == 1 else f"{length:,} {unit}"
            if reason == "long":
                warnings.add("long", f"{place}: {count}, skipped; {why_limited}")
            elif reason == "short":
                warnings.add("short", f"{place}: {count}, skipped: the model gives no probability to so few")
        kept = [text for (_, text), reason in zip(block, reasons, strict=True) if not reason]
        values = iter(function(kept, on_lines) if kept else ())
        on_lines(len(block) - len(kept))
        for (number, text), reason, *counts in zip(block, reasons, unknown, literal, strict=True):
            yield Line(number, text, None if reason else next(values), reason, *counts)


def longest_line(grammars: Sequence[TrainedGrammar], precision: str) -> float:
    """Return how many words (or pieces) a line may have so that its chart fits into the memory of the device.

    It is inf for models without a chart, and where the system does not tell.
    """
    with_charts = [one.grammar for one in grammars if hasattr(one.grammar, "nonterminals")]
    fitting = [
        longest_fitting(0.8 * memory_of(one.tensors[0].device), one.nonterminals, precision) for one in with_charts
    ]
    return max(1.0, min(fitting, default=math.inf))


def warn_of_unknown(name: str, unknown: int, vocabulary: AnyVocabulary, warn: Callable[[str], None]) -> None:
    """Warn of unknown words where training saw none."""
    unit = vocabulary.unit
    # A SentencePiece model knows every character of its training text.
    none_in_training = unit == "pieces" or (vocabulary.training_words and not vocabulary.training_unknown)
    if unknown and none_in_training:
        warn(f"{name}: {unknown:,} unknown {unit}, but training saw none: their probability is arbitrary")


def unit_of(vocabulary: AnyVocabulary) -> str:
    """What lengths count: words, or pieces of words."""
    return vocabulary.unit


def count_lines(source: str) -> int | None:
    """The number of lines, for a progress bar; None where it is not known before reading."""
    path = Path(source)
    try:
        if not path.is_file() or path.suffix.lower() in (".gz", ".zst"):
            return None
        with path.open("rb") as handle:
            return sum(block.count(b"\n") for block in iter(lambda: handle.read(1 << 20), b""))
    except (OSError, ValueError):
        return None  # who reads it says why it cannot be read
