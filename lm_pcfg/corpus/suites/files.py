"""Files of syntactic test suites: minimal pairs of BLiMP (.jsonl) and Zorro (.txt), suites of SyntaxGym (.json).

They are natural language: punctuation stands at words, and sentences begin with capital letters. `Spelling` makes words
of it that a model knows.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from lm_pcfg.corpus.suites.formulas import Formula, FormulaError, parse_formula
from lm_pcfg.corpus.text import TextError, read_lines
from lm_pcfg.errors import UserError

LARGEST_FILE = 64 << 20  # bytes; suites have less than one MiB
#: What a region's value is made of: the surprisals of its words
METRICS: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "mean": lambda bits: sum(bits) / len(bits),
    "median": median,
    "range": lambda bits: max(bits) - min(bits),
    "max": max,
    "min": min,
}

# An apostrophe belongs to its word ('s, dogs'), and so does a hyphen (-LRB-); -- stands alone.
_OPENING, _CLOSING, _DOUBLE = '"([{“”„«‘', '")]}“”»’.,:;!?…', ("``", "''")
_SIGN = re.compile(r"\.\.\.|``|''|.")
_DASH = re.compile("-+|–|—")


@dataclass(frozen=True)
class Spelling:
    """How the text of a suite becomes words."""

    lowercase: bool = False
    keep_punctuation: bool = True

    def words(self, text: str) -> list[str]:
        """Split at white space, and punctuation off the ends of words; then keep it as words of its own, or drop it."""
        found: list[str] = []
        for word in text.split():
            before, inner, after = _without_edges(word)
            is_dash = _DASH.fullmatch(inner) is not None
            if self.keep_punctuation:
                found += _SIGN.findall(before)
            if inner and (self.keep_punctuation or not is_dash):
                found.append(inner.lower() if self.lowercase else inner)
            if self.keep_punctuation:
                found += _SIGN.findall(after)
        return found


def _without_edges(word: str) -> tuple[str, str, str]:
    """Return the punctuation that a word begins with, the word itself, and the punctuation that it ends with."""
    first, end = 0, len(word)
    while first < end and (step := 2 if word[first : first + 2] in _DOUBLE else int(word[first] in _OPENING)):
        first += step
    while first < end and (step := 2 if word[max(first, end - 2) : end] in _DOUBLE else int(word[end - 1] in _CLOSING)):
        end -= step
    return word[:first], word[first:end], word[end:]


@dataclass(frozen=True)
class Pair:
    """A minimal pair: the good sentence should be the more probable one."""

    place: str  # file and line, for messages
    phenomenon: str
    paradigm: str
    good: str  # words between single spaces
    bad: str

    @property
    def sentences(self) -> list[str]:
        return [self.good, self.bad]


@dataclass(frozen=True, eq=False)
class Suite:
    """A suite of SyntaxGym, without its items."""

    name: str
    metric: str
    formulas: tuple[Formula, ...]

    @cached_property
    def conditions(self) -> list[str]:
        """Those that a formula names; others are not computed."""
        return list(dict.fromkeys(region.condition for formula in self.formulas for region in formula.regions))


@dataclass(frozen=True)
class SuiteItem:
    """An item of SyntaxGym: all formulas of its suite should hold."""

    place: str
    suite: Suite
    conditions: dict[str, dict[int, list[str]]]  # the words of each region, regions in their order

    @property
    def phenomenon(self) -> str:
        return self.suite.name

    @property
    def paradigm(self) -> str:
        return self.suite.name

    @property
    def sentences(self) -> list[str]:
        return [self.sentence(condition) for condition in self.suite.conditions]

    def sentence(self, condition: str) -> str:
        return " ".join(word for words in self.conditions[condition].values() for word in words)


Item = Pair | SuiteItem


def read_suite(path: Path, spelling: Spelling) -> list[Item]:
    """Read the items of a file; what is wrong with it is said in one line with its name and place."""
    readers: dict[str, Callable[[Path, Spelling], Iterator[Item]]] = {
        ".jsonl": _read_blimp,
        ".txt": _read_zorro,
        ".json": _read_syntaxgym,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path}: give a file of BLiMP (.jsonl), Zorro (.txt) or SyntaxGym (.json)")
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise UserError(f"{path}: not a plain file; give a file of BLiMP, Zorro or SyntaxGym")
        if stat.S_ISREG(status.st_mode) and status.st_size > LARGEST_FILE:
            size = LARGEST_FILE >> 20
            raise UserError(f"{path}: larger than {size} MiB, which no suite is; break it up, or check the path")
    except (OSError, ValueError):
        pass  # who opens it says why it cannot be
    items = list(reader(path, spelling))
    if not items:
        raise UserError(f"{path}: no item in it; give a file of BLiMP, Zorro or SyntaxGym")
    return items


# ---- minimal pairs --------------------------------------------------------------------------------------------------


def _read_blimp(path: Path, spelling: Spelling) -> Iterator[Pair]:
    for number, line in read_lines(path):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        fields = _object(_parsed(line, place), place)
        good, bad = (_text(fields, name, place) for name in ("sentence_good", "sentence_bad"))
        paradigm = _name(fields, "UID", place) or path.stem
        phenomenon = _name(fields, "linguistics_term", place) or paradigm
        yield Pair(place, phenomenon, paradigm, _joined(spelling, good), _joined(spelling, bad))


def _read_zorro(path: Path, spelling: Spelling) -> Iterator[Pair]:
    """The first line of a pair is ungrammatical, the second is grammatical; files are named phenomenon-paradigm.txt."""
    lines = [line for _, line in read_lines(path)]
    while lines and not lines[-1].strip():
        lines.pop()
    if len(lines) % 2:
        raise UserError(f"{path}: {len(lines):,} lines are no pairs; give a bad and a good sentence on two lines each")
    for first in range(0, len(lines), 2):
        bad, good = (_joined(spelling, line) for line in lines[first : first + 2])
        yield Pair(f"{path}, line {first + 1}", path.stem.split("-")[0] or path.stem, path.stem, good, bad)


def _joined(spelling: Spelling, text: str) -> str:
    return " ".join(spelling.words(text))


# ---- SyntaxGym ------------------------------------------------------------------------------------------------------


def _read_syntaxgym(path: Path, spelling: Spelling) -> Iterator[SuiteItem]:
    place = str(path)
    whole = _object(_parsed("\n".join(line for _, line in read_lines(path)), place), place)
    meta = _object(whole.get("meta", {}), f"{place}, meta")
    metric = meta.get("metric", "sum")
    if not isinstance(metric, str) or metric not in METRICS:
        raise UserError(f"{place}, meta: the metric {_shown(metric)} is none of {', '.join(METRICS)}")
    formulas = []
    for number, one in enumerate(_list(whole, "predictions", place), start=1):
        where = f"{place}, prediction {number}"
        fields = _object(one, where)
        if fields.get("type", "formula") != "formula":
            raise UserError(f"{where}: the type {_shown(fields['type'])} is not known; formula is")
        try:
            formulas.append(parse_formula(_text(fields, "formula", where)))
        except FormulaError as error:
            raise UserError(f"{where}: {error}") from None
    suite = Suite(_name(meta, "name", f"{place}, meta") or path.stem, metric, tuple(formulas))
    for number, one in enumerate(_list(whole, "items", place), start=1):
        yield _suite_item(suite, _object(one, f"{place}, item {number}"), f"{place}, item {number}", spelling)


def _suite_item(suite: Suite, fields: dict[str, Any], where: str, spelling: Spelling) -> SuiteItem:
    conditions: dict[str, dict[int, list[str]]] = {}
    for number, one in enumerate(_list(fields, "conditions", where), start=1):
        inside = f"{where}, condition {number}"
        condition = _object(one, inside)
        name = _text(condition, "condition_name", inside).strip()
        if name in conditions:
            raise UserError(f"{inside}: a second condition {_shown(name)}")
        regions: dict[int, list[str]] = {}
        for count, part in enumerate(_list(condition, "regions", inside), start=1):
            place = f"{inside}, region {count}"
            region = _object(part, place)
            label = region.get("region_number")
            if not re.fullmatch("[0-9]{1,9}", str(label)):
                raise UserError(f"{place}: region_number should be a whole number, not {_shown(label)}")
            if (own := int(str(label))) in regions:
                raise UserError(f"{place}: a second region {own}")
            regions[own] = spelling.words(_text(region, "content", place))
        conditions[name] = regions
    for formula in suite.formulas:
        for wanted in formula.regions:
            if wanted.condition not in conditions:
                raise UserError(f"{where}: no condition {_shown(wanted.condition)}, but a prediction names {wanted}")
            if wanted.number is not None and wanted.number not in conditions[wanted.condition]:
                raise UserError(f"{where}: no region {wanted.number}, but a prediction names {wanted}")
    return SuiteItem(where, suite, conditions)


# ---- JSON from anywhere ---------------------------------------------------------------------------------------------


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise TextError(f"{place}: brackets nested too deep") from None
    except ValueError as error:  # also a number of thousands of digits
        raise TextError(f"{place}: not JSON ({' '.join(str(error).split())[:100]})") from None


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{place}: should be an object, not {_shown(value)}")
    return value


def _list(fields: dict[str, Any], name: str, place: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list) or not value:
        raise UserError(f"{place}: {name} should be a list that is not empty, not {_shown(value)}")
    return value


def _text(fields: dict[str, Any], name: str, place: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise UserError(f"{place}: {name} should be a text, not {_shown(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{place}: {name} has half of a character (a lone surrogate)") from None
    return value


def _name(fields: dict[str, Any], name: str, place: str) -> str:
    """Return a text that may be missing, on one line and without what a terminal obeys."""
    if fields.get(name) is None:
        return ""
    text = " ".join(_text(fields, name, place).split())
    return "".join(character if character.isprintable() else "?" for character in text)


def _shown(value: Any) -> str:
    """A value of JSON in a message: its beginning."""
    kinds = {dict: "an object", list: "a list", type(None): "nothing"}
    return kinds.get(type(value)) or ascii(value)[:40]
