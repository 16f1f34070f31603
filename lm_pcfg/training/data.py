"""The corpora of a run."""

from __future__ import annotations

from dataclasses import dataclass

from lm_pcfg.corpus.batches import BatchOptions, BatchStream
from lm_pcfg.corpus.sentences import Limits, Sentences, load_sentences
from lm_pcfg.corpus.text import read_words
from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyError, VocabularyOptions
from lm_pcfg.errors import UserError
from lm_pcfg.settings import Settings


@dataclass(frozen=True)
class Corpora:
    vocabulary: Vocabulary
    train: Sentences
    valid: Sentences | None


def fewest_symbols(settings: Settings) -> int:
    """Of a sentence that can have a probability: a root over nonterminals cannot rewrite to a single terminal."""
    return 2 if settings.model.root == "nonterminals" else 1


def load_corpora(settings: Settings, vocabulary: Vocabulary | None) -> Corpora:
    """vocabulary: that of a resumed run; None builds it from the training text."""
    data = settings.data
    if vocabulary is None:
        options = VocabularyOptions(**data.vocabulary.model_dump(), end_of_sentence=settings.model.eos == "explicit")
        try:
            vocabulary = Vocabulary.build(read_words(data.train), options)
        except VocabularyError as error:
            raise UserError(f"{data.train}: {error}") from None
    fewest = fewest_symbols(settings)
    train = load_sentences(data.train, vocabulary, limits=Limits(data.max_length, fewest))
    if not len(train):
        way_out = "check data.max_length" + (", or use model.root=all for one-word lines" if fewest > 1 else "")
        raise UserError(f"{data.train}: no sentence of {fewest} to {data.max_length} words; {way_out}")
    valid = None
    if data.valid is not None:
        limits = Limits(settings.evaluation.max_length, fewest)
        valid = load_sentences(data.valid, vocabulary, limits=limits)
        if not len(valid):
            raise UserError(
                f"{data.valid}: no sentence of {fewest} to {limits.max_length} words; is it the right file?"
            )
    return Corpora(vocabulary, train, valid)


def training_stream(settings: Settings, train: Sentences, *, rank: int, world_size: int) -> BatchStream:
    return BatchStream(
        train,
        BatchOptions(**settings.batch.model_dump()),
        seed=settings.seed,
        max_length_for_epoch=settings.data.curriculum.max_length_for_epoch,
        rank=rank,
        world_size=world_size,
    )


def describe(name: str, sentences: Sentences) -> str:
    skipped = sentences.skipped
    left_out = [
        f"{count} {reason}"
        for count, reason in (
            (skipped.too_long, "too long"),
            (skipped.too_short, "of one word"),
            (skipped.blank, "blank"),
        )
        if count
    ]
    text = f"{name}: {sentences.lines:,} sentences, {sentences.words:,} words, {sentences.unknown:,} unknown"
    return f"{text} (left out: {', '.join(left_out)})" if left_out else text
