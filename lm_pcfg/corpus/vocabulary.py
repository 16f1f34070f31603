"""Word types and their ids."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from lm_pcfg.corpus.text import read_bounded
from lm_pcfg.errors import UserError
from lm_pcfg.storage.durable import make_folder, replace_file

UNKNOWN = "<unk>"
END_OF_SENTENCE = "<eos>"
NUMBER = "N"

WORDS_FILE = "words.txt"
DESCRIPTION_FILE = "vocabulary.json"
FORMAT_VERSION = 1

# At least one ASCII digit; otherwise only digits and , . - / % $   ("1,234.5", "$3.50", "12/31", "-7%", not "1990s").
# The first class has no digits, so that matching is linear.
_NUMBER_PATTERN = re.compile(r"[,./%$-]*[0-9][0-9,./%$-]*")


class VocabularyError(UserError, ValueError):
    """A vocabulary that cannot be built or loaded; the message is one line for the user."""


@dataclass(frozen=True)
class VocabularyOptions:
    size: int | None = None  # most word types, including <unk> (but not <eos>, which is no word); None: all
    min_count: int = 1  # rarer words become <unk>
    lowercase: bool = False
    fold_numbers: bool = False  # numbers become N, as in the Penn Treebank's language-modelling text
    end_of_sentence: bool = False  # sentences end explicitly, with <eos>

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise VocabularyError(f"vocabulary size {self.size} leaves no room for {UNKNOWN}; give at least 1")
        if self.min_count < 1:
            raise VocabularyError(f"vocabulary min_count {self.min_count} should be at least 1")


class Vocabulary:
    """Ids: 0 is `<unk>`, then `<eos>` if sentences end explicitly, then words by decreasing count, ties by word.

    A literal `<unk>` in a text (the Penn Treebank has them) is that same type: it gets id 0 and counts as unknown. With
    explicit ends a literal `<eos>` is an error in the training text (ends would count twice), and unknown elsewhere.
    """

    unit = "words"  # what its ids are of, and what lengths count

    def __init__(self, words: Sequence[str], options: VocabularyOptions, *, training_words: int = 0,
                 training_unknown: int = 0) -> None:  # fmt: skip
        self.words: tuple[str, ...] = tuple(words)
        self.options = options
        self.training_words = training_words  # words of the text it was built from, without <eos>
        self.training_unknown = training_unknown  # how many of them became <unk>; 0: the model never sees <unk>
        specials = (UNKNOWN, END_OF_SENTENCE) if options.end_of_sentence else (UNKNOWN,)
        if self.words[: len(specials)] != specials:
            raise VocabularyError(f"a vocabulary should begin with {' and '.join(specials)}")
        self._id_of = {word: id for id, word in enumerate(self.words)}
        if len(self._id_of) != len(self.words):
            raise VocabularyError("a vocabulary should have no word twice")
        self.unknown_id = 0
        self.end_id: int | None = None
        if options.end_of_sentence:
            self.end_id = self._id_of.pop(END_OF_SENTENCE)  # no word of a text stands for the end
        self._changes_words = options.lowercase or options.fold_numbers

    @classmethod
    def build(cls, lines: Iterable[Sequence[str]], options: VocabularyOptions) -> Vocabulary:
        """Build it from the words of each training line. Blank lines do no harm; a text without words is an error."""
        raw_counts: Counter[str] = Counter()
        for line in lines:
            raw_counts.update(line)
        return cls.from_counts(raw_counts, options)

    @classmethod
    def from_counts(cls, raw_counts: Counter[str], options: VocabularyOptions) -> Vocabulary:
        """Build it from the words of the training text as they are written, with their counts."""
        counts: Counter[str] = Counter()
        for word, count in raw_counts.items():
            if word.split() != [word]:
                raise VocabularyError(f"a word cannot be empty or contain white space: {word!r}")
            counts[normalise(word, options)] += count  # once a type is much cheaper than once a word
        total = counts.total()
        if total == 0:
            raise VocabularyError("the training text has no words; check data.train")
        if options.end_of_sentence and END_OF_SENTENCE in counts:
            raise VocabularyError(
                f"the training text already contains {END_OF_SENTENCE!r}, so sentences would end twice; "
                "remove it from the text, or use eos: implicit"
            )
        counts.pop(UNKNOWN, None)
        kept = sorted((word for word, count in counts.items() if count >= options.min_count),
                      key=lambda word: (-counts[word], word))  # fmt: skip
        if options.size is not None:
            kept = kept[: options.size - 1]  # one place is <unk>'s
        specials = [UNKNOWN, END_OF_SENTENCE] if options.end_of_sentence else [UNKNOWN]
        known = sum(counts[word] for word in kept)
        return cls(specials + kept, options, training_words=total, training_unknown=total - known)

    def __len__(self) -> int:
        return len(self.words)

    @property
    def training_unknown_share(self) -> float | None:
        """Share of the words of the training text that became `<unk>`; None: not known."""
        return self.training_unknown / self.training_words if self.training_words else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and (self.words, self.options) == (other.words, other.options)

    def __hash__(self) -> int:
        return hash((self.words, self.options))

    def tokenise(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of the words of each line, without `<eos>`."""
        id_of, unknown, options = self._id_of, self.unknown_id, self.options
        if self._changes_words:
            return [[id_of.get(normalise(word, options), unknown) for word in line.split()] for line in lines]
        return [[id_of.get(word, unknown) for word in line.split()] for line in lines]

    def word_boundaries(self, ids: Sequence[int], words: int) -> list[int] | None:
        """Return the positions between which the words of a tokenised line stand: [words + 1]. Here all of them."""
        return list(range(words + 1))

    def stored(self, ids: Any) -> Any:
        """Turn the ids of a prepared corpus (an array), which has no `<eos>`, into those of this vocabulary."""
        return ids if self.end_id is None else ids + (ids >= self.end_id)

    def with_end_of_sentence(self) -> Vocabulary:
        """Return a vocabulary of the same words, for sentences that end explicitly."""
        if END_OF_SENTENCE in self._id_of:
            raise VocabularyError(
                f"the training text already contains {END_OF_SENTENCE!r}, so sentences would end twice; "
                "remove it from the text, or use eos: implicit"
            )
        words = [UNKNOWN, END_OF_SENTENCE, *self.words[1:]]
        return Vocabulary(words, replace(self.options, end_of_sentence=True), training_words=self.training_words,
                          training_unknown=self.training_unknown)  # fmt: skip

    @property
    def hash(self) -> str:
        """The sha256 of options and words: two vocabularies with the same hash encode alike."""
        options = json.dumps(asdict(self.options), sort_keys=True)
        text = f"{FORMAT_VERSION}\n{options}\n" + "\n".join(self.words)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    def files(self) -> dict[str, bytes]:
        """Return what `save` writes: words.txt, a type a line in id order, and vocabulary.json."""
        description = {
            "format": FORMAT_VERSION,
            "types": len(self),
            "training_words": self.training_words,
            "training_unknown": self.training_unknown,
            "options": asdict(self.options),
            "sha256": self.hash,
        }
        words = "".join(f"{word}\n" for word in self.words)
        return {
            WORDS_FILE: words.encode("utf-8"),
            DESCRIPTION_FILE: (json.dumps(description, indent=2) + "\n").encode("utf-8"),
        }

    def save(self, folder: Path) -> None:
        """Write its files to a folder such as `runs/<name>/vocab`."""
        write_files(Path(folder), self.files())

    @classmethod
    def load(cls, folder: Path) -> Vocabulary:
        """Load what `save` wrote, verified by its sha256."""
        folder = Path(folder)
        try:
            # Bytes, because text mode would translate line endings, which are part of the hash.
            text = read_bounded(folder / WORDS_FILE).decode("utf-8")
            description = json.loads(read_bounded(folder / DESCRIPTION_FILE))
        except FileNotFoundError as error:
            raise VocabularyError(f"{error.filename}: no such file; is {folder} the vocab folder of a run?") from None
        except OSError as error:
            raise VocabularyError(f"{error.filename}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:  # invalid UTF-8 or JSON
            raise VocabularyError(f"{folder}: damaged vocabulary ({error}); copy it again from its run") from None
        version = description.get("format") if isinstance(description, dict) else None
        if version != FORMAT_VERSION:
            raise VocabularyError(
                f"{folder / DESCRIPTION_FILE}: format {version} cannot be read (this version reads {FORMAT_VERSION})"
            )
        try:
            known = {field.name for field in fields(VocabularyOptions)}
            options = VocabularyOptions(**{key: description["options"][key] for key in known})
            words = text.removesuffix("\n").split("\n")
            vocabulary = cls(words, options, training_words=description["training_words"],
                             training_unknown=description["training_unknown"])  # fmt: skip
            expected = description["sha256"]
            if not all(type(n) is int and n >= 0 for n in (vocabulary.training_words, vocabulary.training_unknown)):
                raise ValueError("training_words and training_unknown should be whole numbers")
        except (KeyError, TypeError, ValueError) as error:
            raise VocabularyError(f"{folder}: damaged vocabulary ({error}); copy it again from its run") from None
        if vocabulary.hash != expected:
            raise VocabularyError(
                f"{folder}: {WORDS_FILE} or the options changed since they were saved (sha256 does not match); "
                "copy the vocabulary again from its run"
            )
        return vocabulary


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    make_folder(folder)
    for name, content in files.items():
        replace_file(folder / name, content)


def normalise(word: str, options: VocabularyOptions) -> str:
    """Return the form under which a word is counted. Doing it twice changes nothing: N stays N, also with lowercase."""
    if options.fold_numbers and (word == NUMBER or _NUMBER_PATTERN.fullmatch(word)):
        return NUMBER
    return word.lower() if options.lowercase else word
