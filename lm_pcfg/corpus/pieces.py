"""Subword vocabularies: a SentencePiece model (unigram or BPE), trained here or brought along."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lm_pcfg.corpus.text import read_bounded
from lm_pcfg.corpus.vocabulary import (
    DESCRIPTION_FILE,
    END_OF_SENTENCE,
    FORMAT_VERSION,
    Vocabulary,
    VocabularyError,
    write_files,
)

MODEL_FILE = "pieces.model"  # SentencePiece's own format: a protocol buffer
KIND = "sentencepiece"
SPACE = "\u2581"  # how SentencePiece writes a space, which belongs to the word after it
UNKNOWN_PIECE = "<|unknown|>"  # not <unk>, which the Penn Treebank's text has as a word


@dataclass(frozen=True)
class PieceOptions:
    end_of_sentence: bool = False


class PieceVocabulary:
    """The pieces of a SentencePiece model by its own ids, and `<eos>` after them if sentences end explicitly.

    A line is encoded as its words joined by single spaces. Lengths, limits and costs count pieces, not words.
    """

    unit = "pieces"

    def __init__(self, model: bytes, options: PieceOptions, *, training_words: int = 0, training_unknown: int = 0):
        import sentencepiece

        self.model = model
        self.options = options
        self.training_words = training_words  # pieces of the text it was trained for; 0: not known
        self.training_unknown = training_unknown
        if not model:  # SentencePiece takes that for none given, and fails later
            raise VocabularyError("not a SentencePiece model (it is empty)")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise VocabularyError(f"not a SentencePiece model ({' '.join(str(error).split())})") from None
        self.unknown_id: int = self._processor.unk_id()
        pieces: int = self._processor.get_piece_size()
        self.end_id: int | None = None
        if options.end_of_sentence:
            self.end_id = own if (own := self._processor.eos_id()) >= 0 else pieces
        self._types = max(pieces, (self.end_id or 0) + 1)

    def __reduce__(self) -> tuple[Any, ...]:  # the processor itself stays in its process
        return _restore, (self.model, self.options, self.training_words, self.training_unknown)

    def __len__(self) -> int:
        return self._types

    @property
    def training_unknown_share(self) -> float | None:
        """Share of the pieces of the training text that became unknown pieces; None: not known."""
        return self.training_unknown / self.training_words if self.training_words else None

    @property
    def words(self) -> tuple[str, ...]:
        """The pieces, as SentencePiece writes them, and `<eos>` where it is ours."""
        pieces = tuple(self._processor.id_to_piece(list(range(self._processor.get_piece_size()))))
        return pieces + (END_OF_SENTENCE,) * (self._types - len(pieces))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PieceVocabulary) and (self.model, self.options) == (other.model, other.options)

    def __hash__(self) -> int:
        return hash((self.model, self.options))

    def tokenise(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of the pieces of each line, without `<eos>`."""
        return self._processor.encode([" ".join(line.split()) for line in lines], out_type=int, num_threads=1)

    def word_boundaries(self, ids: Sequence[int], words: int) -> list[int] | None:
        """Return the positions between which the words of a tokenised line stand: [words + 1].

        None if they cannot be told apart: a piece reaches over a space, or the model's normalisation has taken a word
        away or made two of it.
        """
        pieces = self._processor.id_to_piece(list(ids))
        starts = [0, *(place for place, piece in enumerate(pieces) if place and piece.startswith(SPACE))]
        across = any(SPACE in piece[1:] for piece in pieces)
        return [*starts, len(pieces)] if len(starts) == words and pieces and not across else None

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([id for id in ids if id != self.end_id])

    def stored(self, ids: Any) -> Any:
        """Turn the ids of a prepared corpus into those of this vocabulary."""
        return ids

    def with_end_of_sentence(self) -> PieceVocabulary:
        return PieceVocabulary(self.model, PieceOptions(end_of_sentence=True), training_words=self.training_words,
                               training_unknown=self.training_unknown)  # fmt: skip

    @property
    def hash(self) -> str:
        """The sha256 of model and options: two vocabularies with the same hash encode alike."""
        digest = hashlib.sha256(f"{FORMAT_VERSION} {KIND} {self.options.end_of_sentence}\n".encode())
        digest.update(self.model)
        return digest.hexdigest()

    def files(self) -> dict[str, bytes]:
        """Return what `save` writes: pieces.model and vocabulary.json."""
        description = {
            "format": FORMAT_VERSION,
            "kind": KIND,
            "types": len(self),
            "training_words": self.training_words,
            "training_unknown": self.training_unknown,
            "options": {"end_of_sentence": self.options.end_of_sentence},
            "sha256": self.hash,
        }
        return {MODEL_FILE: self.model, DESCRIPTION_FILE: (json.dumps(description, indent=2) + "\n").encode()}

    def save(self, folder: Path) -> None:
        write_files(Path(folder), self.files())

    @classmethod
    def load(cls, folder: Path) -> PieceVocabulary:
        """Load what `save` wrote, verified by its sha256."""
        try:
            description = json.loads(read_bounded(folder / DESCRIPTION_FILE))
            options = PieceOptions(end_of_sentence=bool(description["options"]["end_of_sentence"]))
            vocabulary = cls(read_bounded(folder / MODEL_FILE), options, training_words=description["training_words"],
                             training_unknown=description["training_unknown"])  # fmt: skip
            expected = description["sha256"]
        except OSError as error:
            raise VocabularyError(f"{error.filename}: cannot be read ({error.strerror})") from None
        except (KeyError, TypeError, ValueError) as error:
            raise VocabularyError(f"{folder}: damaged vocabulary ({error}); copy it again from its run") from None
        if vocabulary.hash != expected:
            raise VocabularyError(f"{folder}: {MODEL_FILE} changed since it was saved (sha256 does not match)")
        return vocabulary


def _restore(model: bytes, options: PieceOptions, training_words: int, training_unknown: int) -> PieceVocabulary:
    return PieceVocabulary(model, options, training_words=training_words, training_unknown=training_unknown)


AnyVocabulary = Vocabulary | PieceVocabulary


def load_vocabulary(folder: Path) -> AnyVocabulary:
    """Load a vocabulary of either kind that `save` wrote, as in the `vocab/` folder of a run."""
    try:
        description = json.loads(read_bounded(Path(folder) / DESCRIPTION_FILE))
        kind = description.get("kind") if isinstance(description, dict) else None
    except (OSError, ValueError, RecursionError):
        kind = None  # Vocabulary.load says what is wrong
    return PieceVocabulary.load(Path(folder)) if kind == KIND else Vocabulary.load(folder)


def open_model(path: Path) -> PieceVocabulary:
    """Open an existing SentencePiece model file."""
    try:
        return PieceVocabulary(read_bounded(path), PieceOptions())
    except OSError as error:
        raise VocabularyError(f"{path}: cannot be read ({error.strerror}); give a SentencePiece .model file") from None
    except VocabularyError as error:
        raise VocabularyError(f"{path}: {error}; give a SentencePiece .model file") from None


def train_pieces(
    lines: Iterable[str],
    *,
    kind: Literal["unigram", "bpe"],
    size: int,
    lines_used: int = 2_000_000,
    byte_fallback: bool = False,
    threads: int = 1,
    say: Callable[[str], None] = lambda message: None,
) -> PieceVocabulary:
    """Train a SentencePiece model on at most `lines_used` lines, drawn from all.

    The text is not normalised: probabilities are those of the text as it is.
    """
    import sentencepiece

    sentencepiece.set_random_generator_seed(0)
    model = io.BytesIO()
    text = (joined for line in lines if (joined := " ".join(line.split())))
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=text, model_writer=model, model_type=kind, vocab_size=size, hard_vocab_limit=False,
            byte_fallback=byte_fallback, character_coverage=0.9995 if byte_fallback else 1.0,
            normalization_rule_name="identity", max_sentence_length=1 << 16,
            input_sentence_size=lines_used, shuffle_input_sentence=True, num_threads=threads, minloglevel=2,
            unk_id=0, unk_piece=UNKNOWN_PIECE, bos_id=-1, eos_id=-1, pad_id=-1,
        )  # fmt: skip
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        way_out = "give a larger --size" if "required_chars" in reason or "smaller than" in reason else "check the text"
        raise VocabularyError(f"SentencePiece cannot train {kind} with {size:,} pieces ({reason}); {way_out}") from None
    vocabulary = PieceVocabulary(model.getvalue(), PieceOptions())
    if len(vocabulary) != size:
        say(f"the text has room for {len(vocabulary):,} pieces only, fewer than the {size:,} asked for")
    return vocabulary
