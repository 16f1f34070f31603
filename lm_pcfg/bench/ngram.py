"""`lm_pcfg bench ngram`: Kneser-Ney on exactly our tokens, those of a text or those that a run was trained on.

Every line also predicts its end, which is a token, whether the run has explicit ends or not: so `lm_pcfg score` counts.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from lm_pcfg.bench.kneser_ney import FALLBACK_DISCOUNTS, KneserNey
from lm_pcfg.corpus.lengths import Limits
from lm_pcfg.corpus.opening import (
    OpeningOptions,
    in_memory,
    is_streamed,
    open_corpus,
    training_inputs,
    whole_text,
    whole_training_text,
)
from lm_pcfg.corpus.pieces import SPACE, AnyVocabulary
from lm_pcfg.corpus.sentences import Sentences, with_ends
from lm_pcfg.corpus.shards.files import is_json, is_parquet
from lm_pcfg.corpus.shards.manifest import is_prepared
from lm_pcfg.corpus.shards.raw import RawOptions
from lm_pcfg.corpus.text import EMBEDDED_PREFIX, STANDARD_INPUT, read_words
from lm_pcfg.corpus.vocabulary import UNKNOWN, VocabularyOptions
from lm_pcfg.errors import UserError

Warn = Callable[[str], None]

MAX_LENGTH = 250  # of `lm_pcfg score`


@dataclass(frozen=True)
class Texts:
    """What is compared, in the ids of one vocabulary."""

    train: Sentences
    test: Sentences
    vocabulary: AnyVocabulary
    names: dict[str, str]  # as they are reported: train, test, the checkpoint

    def words_and_characters(self) -> tuple[int, int | None]:
        """Words of the test text between white space; its characters, a space between two words, if it is a file."""
        name, test = self.names["test"], self.test
        path = Path(name)
        if name.startswith(EMBEDDED_PREFIX) or (path.is_file() and not is_json(path) and not is_parquet(path)):
            scored, words, characters = set(test.line_numbers.tolist()), 0, 0
            for number, line in enumerate(read_words(name), start=1):
                if number in scored:
                    words += len(line)
                    characters += sum(map(len, line)) + len(line) - 1
            return words, characters
        if test.unit == "words":
            return test.words, None
        spaces = np.array([piece.count(SPACE) for piece in (*self.vocabulary.words, "")])  # each word begins with one
        return int(spaces[test.ids].sum()), None


def compare(
    train: str, test: str, order: int, vocabulary_size: int | None, warn: Warn, max_length: int | None = None
) -> dict[str, Any]:
    """Compute the perplexity of a text under an n-gram and a unigram model. vocabulary_size: None keeps all words."""
    if STANDARD_INPUT in (train, test):
        raise UserError("bench ngram reads its texts twice, so none can be standard input (-): save a file")
    prepared = is_prepared(train)
    if prepared and vocabulary_size is not None:
        raise UserError(f"{train}: a prepared corpus brings its vocabulary; leave --vocabulary-size out")
    with tempfile.TemporaryDirectory(prefix="lm_pcfg_bench_") as scratch:
        words = VocabularyOptions(size=vocabulary_size, end_of_sentence=True)
        options = OpeningOptions(RawOptions(), Path(scratch), words)
        inputs = [([train], Fraction(1))]
        opened, vocabulary = open_corpus(inputs, None, Limits(), options, streamed=is_streamed(train))
        train_text, test_text = in_memory(opened), whole_text(test, vocabulary, Limits(max_length), options)
    if test_text.unknown and not train_text.unknown and not prepared:
        raise UserError(
            f"{test}: {test_text.unknown:,} words are not in the training text, which has no {UNKNOWN} "
            f"to stand for them; use a lower --vocabulary-size (rare words become {UNKNOWN}), or replace them"
        )
    return _report(Texts(train_text, test_text, vocabulary, {"train": train, "test": test}), order, warn)


def compare_with_run(
    run: Path, test: str | None, order: int, warn: Warn, max_length: int = MAX_LENGTH
) -> dict[str, Any]:
    """Do the same with the training text and the vocabulary of a run, on the lines that `lm_pcfg score` scores.

    run: a run, checkpoint or exported folder; test: None is the run's validation text. The n-grams are of all lines of
    the training text, also of those that are too long for the run.
    """
    from lm_pcfg.grammar.families import family_of
    from lm_pcfg.inference.trained import read_stored

    stored = read_stored(run)
    settings, vocabulary = stored.settings, stored.vocabulary
    test = test or settings.data.valid
    if test is None:
        raise UserError(f"{run} has no validation text: give the text to score with --test FILE")
    if test == STANDARD_INPUT:
        raise UserError("bench ngram reads its texts twice, so none can be standard input (-): save a file")
    inputs = training_inputs(settings.data)
    if any(weight != 1 for _, weight in inputs):
        warn("the corpora of data.train are counted once each, whatever their weights")
    limits = Limits(max_length, family_of(settings.model).fewest_symbols(settings.model))
    with tempfile.TemporaryDirectory(prefix="lm_pcfg_bench_") as scratch:
        kept = Path(settings.data.index_folder)  # of the training, if it is still there
        index = kept if os.access(kept, os.W_OK) else Path(scratch)
        raw = RawOptions(settings.data.field)
        test_text = whole_text(test, vocabulary, limits, OpeningOptions(raw, index, VocabularyOptions()))
        try:
            train_text = whole_training_text(settings, vocabulary, index)
        except UserError as error:
            raise UserError(f"the text that {run} was trained on cannot be used from here: {error}") from None
    names = [name for some, _ in inputs for name in some]
    built_from = 0 if any(map(is_prepared, names)) else vocabulary.training_words
    if built_from not in (0, train_text.words):
        unit = vocabulary.unit
        warn(f"{', '.join(names)}: {train_text.words:,} {unit}, but the run had {built_from:,}: has the text changed?")
    end = len(vocabulary)
    texts = Texts(_with_ends(train_text, end), _with_ends(test_text, end), vocabulary,
                  {"checkpoint": str(stored.folder), "train": ", ".join(names), "test": test})  # fmt: skip
    # As `lm_pcfg info` counts them. The n-grams have an end of a line as well, and no <unk> where none is needed.
    return _report(texts, order, warn) | {"vocabulary": len(vocabulary)}


def _with_ends(text: Sentences, end_id: int) -> Sentences:
    """Return a text whose lines have explicit ends; of implicit ones this is the id."""
    if text.end_of_sentence:
        return text
    ids, lengths = with_ends(text.ids, text.lengths, end_id)
    return replace(text, ids=ids, offsets=np.concatenate([[0], np.cumsum(lengths)]), end_of_sentence=True)


def _report(texts: Texts, order: int, warn: Warn) -> dict[str, Any]:
    train, test, vocabulary = texts.train, texts.test, texts.vocabulary
    name = texts.names["test"]
    for text, of in ((train, "train"), (test, "test")):
        if not len(text):
            raise UserError(f"{texts.names[of]}: no sentence in it; is it the right file?")
    # <unk> is a type where it is needed. A model of pieces has it as one of them.
    unknown_is_known = train.unknown > 0 or test.unknown > 0 or vocabulary.unit != "words"
    ids = len(vocabulary) + (vocabulary.end_id is None)
    model = KneserNey(train, order, unknown_is_known, ids)
    for k in model.orders_with_fallback:
        warn(f"{texts.names['train']}: too small to estimate the discounts of order {k}, {FALLBACK_DISCOUNTS} are used")
    unigram = model if order == 1 else KneserNey(train, 1, unknown_is_known, ids)
    if message := test.unknown_words.warning(name):
        warn(message)
    if test.unknown and not train.unknown:
        unknown = f"{test.unknown:,} unknown {vocabulary.unit}"
        warn(f"{name}: {unknown}, but the training text has none: they cost what a type costs that was never seen")
    skipped = test.skipped.too_long + test.skipped.too_short
    if skipped:
        warn(f"{name}: {skipped:,} lines skipped: longer than --max-length, or too short for the run's model")
    nll, tokens, is_lower_bound = model.nll(test), len(test.ids), bool(test.unknown_words.share)  # as `lm_pcfg score`
    words, characters = texts.words_and_characters()
    per_character = None if characters is None else nll / math.log(2) / (characters + len(test))
    return {
        **texts.names,
        "order": order,
        "vocabulary": model.types,
        "unit": vocabulary.unit,
        "nll": nll,
        "words": words,
        "pieces": test.words,
        "lines": len(test),
        "tokens": tokens,
        "skipped": skipped,
        **test.unknown_words.report(),
        "ppl": math.exp(nll / tokens),
        "ppl_per_word": math.exp(nll / (words + len(test))),
        "ppl_per_word_is_lower_bound": is_lower_bound,
        **({} if per_character is None else {"bits_per_character": per_character}),
        **({} if per_character is None else {"bits_per_character_is_lower_bound": is_lower_bound}),
        "ppl_words": math.exp(nll / words),
        "unigram_ppl": math.exp(unigram.nll(test) / tokens),
    }
