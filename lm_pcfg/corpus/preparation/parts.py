"""A corpus that several machines prepare together: each call with `--part` does what its part can do by then.

First each part counts the words of its inputs. Whoever then finds the words of all parts counted makes the vocabulary.
With it each part makes the shards of its inputs, and whoever finds all of them writes the manifest. What one machine
would have made is the same, byte for byte. A part may be killed and repeated at any time.

    parts/begun.json      what all parts have in common: the plan of the corpus, their number, the versions of libraries
    parts/counted-K.json  the words of part K, if the vocabulary is to be made of them
    parts/encoded-K.json  the shards of part K
    parts/*.lock          held by whoever works on a part, and by whoever puts something together

All machines see the folder; it is removed when the manifest is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lm_pcfg.console import say
from lm_pcfg.corpus.pieces import AnyVocabulary
from lm_pcfg.corpus.preparation.prepare import (
    PrepareOptions,
    alone,
    count_words,
    difference,
    existing_vocabulary,
    find_inputs,
    make_shards,
    plan_of,
    processes_for,
    saved_vocabulary,
    tidy,
    versions,
    word_vocabulary,
    write_manifest,
)
from lm_pcfg.corpus.preparation.shards import (
    Finished,
    Input,
    Reading,
    ReadOptions,
    remove_leftovers,
    remove_leftovers_of,
)
from lm_pcfg.corpus.shards.manifest import Manifest, is_prepared, read_manifest
from lm_pcfg.corpus.shards.prepared import PARTS, PLAN, SHARDS, VOCABULARY
from lm_pcfg.corpus.shards.shapes import (
    BegunShape,
    CountedShape,
    EncodedShape,
    PlanShape,
    Shape,
    ShapeError,
    check_checksum,
    checked,
    checksum_of,
    parse_json,
    with_checksum,
)
from lm_pcfg.corpus.text import read_bounded
from lm_pcfg.errors import UserError
from lm_pcfg.storage.durable import make_folder, replace_file

BEGUN = "begun.json"
MOST_PARTS = 100_000
AnyRecord = TypeVar("AnyRecord", bound=Shape)


@dataclass(frozen=True)
class Part:
    """Part `number`, from 1, of so many."""

    number: int
    parts: int

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"

    @classmethod
    def parse(cls, text: str) -> Part:
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MOST_PARTS:
            raise UserError(f"--part {text}: should be K/N, part K of N: 1/16, 2/16, ..., 16/16")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class Unfinished:
    """How far the parts are, where the corpus is not whole yet."""

    corpus: Path
    part: Part
    counted: int  # parts whose words are
    encoded: int  # parts whose shards are made

    def report(self) -> dict[str, Any]:
        return {"corpus": str(self.corpus), "part": str(self.part), "counted": self.counted, "encoded": self.encoded}


def deal(inputs: Sequence[Input], parts: int) -> list[list[Input]]:
    """Give each input, the largest first, to the part that has least; each part has its own in their order."""
    heap = [(0, number) for number in range(parts)]
    dealt: list[list[Input]] = [[] for _ in range(parts)]
    for item in sorted(inputs, key=lambda one: (-one.size, one.number)):
        load, number = heapq.heappop(heap)
        dealt[number].append(item)
        heapq.heappush(heap, (load + item.size + 1, number))
    return [sorted(own, key=lambda one: one.number) for own in dealt]


def prepare_part(
    inputs: Sequence[str], out: Path, options: PrepareOptions, part: Part, *, processes: int | None = None
) -> Manifest | Unfinished:
    """Do what this part can do now. Return the manifest if the corpus is whole then."""
    if options.existing is None and options.kind != "words":
        raise UserError(
            "--part goes with words, or with a model of pieces that exists: make one of a sample first (lm_pcfg "
            f"prepare SAMPLE --vocabulary {options.kind} --out DIR), then give --vocabulary DIR"
        )
    found = find_inputs(inputs, options, out)
    if part.parts > len(found):
        files = "one input file" if len(found) == 1 else f"{len(found):,} input files"
        raise UserError(
            f"--part {part}: there {'is' if len(found) == 1 else 'are'} {files}, and a part has at least one"
        )
    plan, own = plan_of(found, options), deal(found, part.parts)[part.number - 1]
    work = _Work(out, found, options, part, processes or processes_for(own))
    with alone(out, shared=True):
        if not is_prepared(out):
            _refuse_strangers(out)
            make_folder(out / PARTS)
            with work.locked(f"part-{part.number}", at_work=f"{out}: another lm_pcfg prepare makes part {part}"):
                try:
                    work.do(plan, own)
                    if not is_prepared(out):
                        return work.unfinished()
                except FileNotFoundError:  # the records of parts are gone when the last part has made the corpus whole
                    if not is_prepared(out):
                        raise
        if _stored_plan(out) != plan:
            raise _other_corpus(out, plan)
        manifest = read_manifest(out)
        tidy(out, manifest)
        return manifest


@dataclass
class _Work:
    out: Path
    inputs: list[Input]  # of all parts
    options: PrepareOptions
    part: Part
    processes: int
    begun: str = ""  # the checksum of BEGUN

    @property
    def read(self) -> ReadOptions:
        return ReadOptions(self.options.text_field, self.options.trees, self.options.on_error)

    @contextlib.contextmanager
    def locked(self, name: str, at_work: str = "") -> Iterator[None]:
        """Hold a lock of the parts. at_work: the error if another call has it; without it, wait."""
        with (self.out / PARTS / f"{name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if at_work else 0))
            except BlockingIOError:
                raise UserError(at_work) from None
            yield

    def do(self, plan: dict[str, Any], own: Sequence[Input]) -> None:
        """Do all that can be done now."""
        self.begin(plan)
        if is_prepared(self.out):  # while this call waited
            return
        vocabulary = self.vocabulary(own)
        if vocabulary is not None:
            self.encode(own, vocabulary)
            self.merge(vocabulary)

    # ---- what all parts have in common ------------------------------------------------------------------------------

    def begin(self, plan: dict[str, Any]) -> None:
        """Write down what this corpus is made of and by how many parts, or refuse what others have begun otherwise."""
        common = {"plan": checksum_of(plan), "parts": self.part.parts, "versions": versions()}
        self.begun = checksum_of(common)
        with self.locked("together"):
            if is_prepared(self.out):
                return
            if not (self.out / PLAN).exists():
                replace_file(self.out / PLAN, (json.dumps(plan, indent=2) + "\n").encode())
            elif _stored_plan(self.out) != plan:
                raise _other_corpus(self.out, plan)
            file = self.out / PARTS / BEGUN
            stored = _read(file, BegunShape)
            if not isinstance(stored, BegunShape):
                replace_file(file, (json.dumps(with_checksum(common)) + "\n").encode())
            elif stored.parts != self.part.parts:
                raise UserError(f"{self.out}: was begun in {stored.parts} parts; use --part K/{stored.parts}")
            elif stored.versions != common["versions"]:
                raise UserError(f"{self.out}: was begun with {_other_version(stored.versions)}; use one for all parts")
            (self.out / SHARDS).mkdir(exist_ok=True)

    # ---- records ----------------------------------------------------------------------------------------------------

    def record(self, kind: str, number: int, shape: type[AnyRecord], **fields: str) -> AnyRecord | None:
        """Return the record of a part with these fields. One of this part that cannot be used is made again: None."""
        file = self.out / PARTS / f"{kind}-{number}.json"
        found = _read(file, shape)
        if isinstance(found, shape):
            if all(getattr(found, name) == value for name, value in {"begun": self.begun, **fields}.items()):
                return found
            found = "it is of other inputs, options or versions"
        if found is not None and number != self.part.number:
            raise UserError(f"{file}: {found}; run part {number}/{self.part.parts} again")
        return None

    def note(self, kind: str, content: dict[str, Any]) -> None:
        record = with_checksum({"begun": self.begun, **content})
        replace_file(self.out / PARTS / f"{kind}-{self.part.number}.json", (json.dumps(record) + "\n").encode())

    def present(self, kind: str) -> int:
        """How many parts have such a record."""
        return len(list((self.out / PARTS).glob(f"{kind}-*.json")))

    def unfinished(self) -> Unfinished:
        counted = self.part.parts if self.saved_vocabulary() else self.present("counted")
        if counted < self.part.parts:
            say(
                f"part {self.part}: its words are counted; run it again when those of all parts are, to make its shards"
            )
        return Unfinished(self.out, self.part, counted, self.present("encoded"))

    # ---- vocabulary -------------------------------------------------------------------------------------------------

    def saved_vocabulary(self) -> AnyVocabulary | None:
        with self.locked("together"):
            return saved_vocabulary(self.out)

    def vocabulary(self, own: Sequence[Input]) -> AnyVocabulary | None:
        """Return the vocabulary of the corpus; None: words of other parts are not counted yet."""
        if (found := self.saved_vocabulary()) is not None:
            return found
        if self.options.existing is None:
            if self.record("counted", self.part.number, CountedShape) is None:
                self.note("counted", {"words": count_words(own, self.read, self.processes)})
            if self.present("counted") < self.part.parts:
                return None
        with self.locked("together"):
            if (found := saved_vocabulary(self.out)) is not None:
                return found
            if self.options.existing is not None:
                vocabulary = existing_vocabulary(self.options.existing)
            elif (counts := self.all_words()) is not None:
                vocabulary = word_vocabulary(counts, self.options)
            else:
                return None
            vocabulary.save(self.out / VOCABULARY)
            return vocabulary

    def all_words(self) -> Counter[str] | None:
        total: Counter[str] = Counter()
        for number in range(1, self.part.parts + 1):
            if (counted := self.record("counted", number, CountedShape)) is None:
                return None
            total.update(counted.words)
        return total

    # ---- shards and manifest ----------------------------------------------------------------------------------------

    def encode(self, own: Sequence[Input], vocabulary: AnyVocabulary) -> None:
        if self.record("encoded", self.part.number, EncodedShape, vocabulary=vocabulary.hash) is not None:
            return
        if is_prepared(self.out):  # this call repeats a part, and the last one was done meanwhile
            return
        remove_leftovers_of(self.out, own)
        reading = Reading()
        made = make_shards(own, self.read, self.out, self.options, vocabulary, self.processes, reading)
        shards = [item.to_json() for item in made]
        damage = {str(number): message for number, message in reading.damage.items()}
        self.note("encoded", {"vocabulary": vocabulary.hash, "shards": shards, "rows": reading.rows, "damage": damage})

    def merge(self, vocabulary: AnyVocabulary) -> None:
        """Write the manifest if the shards of all parts are there."""
        if self.present("encoded") < self.part.parts:
            return
        with self.locked("together"):
            if is_prepared(self.out):
                return
            made: list[Finished] = []
            reading = Reading()
            for number in range(1, self.part.parts + 1):
                if (record := self.record("encoded", number, EncodedShape, vocabulary=vocabulary.hash)) is None:
                    return
                made += map(Finished.of, record.shards)
                reading.rows |= record.rows
                reading.damage |= {int(input_number): message for input_number, message in record.damage.items()}
            for item in made:
                self._check_size(item)
            made.sort(key=lambda item: int(item.entry.file.split("-")[1]))  # of one input they are in order
            remove_leftovers(self.out)
            write_manifest(self.out, self.inputs, self.options, vocabulary, made, reading)

    def _check_size(self, item: Finished) -> None:
        file = self.out / SHARDS / item.entry.file
        if not file.is_file() or file.stat().st_size != item.entry.size:
            number = int(item.entry.file.split("-")[1])
            dealt = deal(self.inputs, self.part.parts)
            owner = next(k for k, own in enumerate(dealt, start=1) if any(one.number == number for one in own))
            (self.out / PARTS / f"encoded-{owner}.json").unlink(missing_ok=True)
            raise UserError(f"{file}: is missing or cut; run part {owner}/{self.part.parts} again")


def _read(file: Path, shape: type[AnyRecord]) -> AnyRecord | str | None:
    """Return a record; None if it is not there, a string that says why if it cannot be used."""
    try:
        content = parse_json(read_bounded(file))
        check_checksum(content)
        return checked(shape, content)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    except ShapeError as error:
        return f"damaged ({error})"


def _refuse_strangers(out: Path) -> None:
    if not (out / PLAN).exists():
        strangers = [entry.name for entry in out.iterdir() if entry.name not in (".lock", PARTS)]
        strangers = [name for name in strangers if not name.startswith(f"{PLAN}.")]
        if strangers and not (out / PLAN).exists():  # which another part may have written meanwhile
            raise UserError(f"{out}: is not empty (it has {strangers[0]}); choose another --out")


def _stored_plan(out: Path) -> dict[str, Any] | None:
    try:
        content = parse_json(read_bounded(out / PLAN))
        checked(PlanShape, content)
        return content
    except (OSError, ShapeError):
        return None


def _other_corpus(out: Path, plan: dict[str, Any]) -> UserError:
    changed = difference(_stored_plan(out), plan)
    return UserError(
        f"{out}: is made of other inputs or options ({changed}); choose another --out, or remove the folder"
    )


def _other_version(stored: dict[str, str]) -> str:
    """Name a library that others have in another version, and the version here."""
    here = versions()
    name = next(name for name in sorted(here.keys() | stored.keys()) if here.get(name) != stored.get(name))
    return f"{name} {stored.get(name, 'absent')}, and here is {here.get(name, 'none')}"
