"""The corpora of a run: in memory, or streamed from shards."""

from __future__ import annotations

import glob
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import Tensor

from lm_pcfg.console import warn
from lm_pcfg.corpus import ptb
from lm_pcfg.corpus.batches import Batch, BatchOptions, BatchSource, BatchStream
from lm_pcfg.corpus.blocks import Histogram, filtered_of, in_memory, kept_of
from lm_pcfg.corpus.pieces import open_model
from lm_pcfg.corpus.prepared import PreparedCorpus, is_prepared, read_manifest, unfinished, vocabulary_of
from lm_pcfg.corpus.processes import worth_using
from lm_pcfg.corpus.raw_corpus import IndexStore, RawCorpus, RawOptions, build_vocabulary
from lm_pcfg.corpus.sentences import Limits, Sentences, Skipped, load_sentences
from lm_pcfg.corpus.shard_files import find_shards, is_json, is_parquet
from lm_pcfg.corpus.shard_stream import ShardStream, Source
from lm_pcfg.corpus.text import COMPRESSION, EMBEDDED_PREFIX, read_words
from lm_pcfg.corpus.vocabularies import AnyVocabulary
from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyError, VocabularyOptions
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.contexts import context_vectors
from lm_pcfg.settings import DataSection, Settings

TEXT_FOR_CONTEXTS = 5_000_000  # words of streamed text that tell how words begin, with `init: contexts`


@dataclass(frozen=True)
class StreamedText:
    """Training text that stays in its shards."""

    sources: list[Source]
    vocabulary: AnyVocabulary
    limits: Limits

    @property
    def names(self) -> str:
        return ", ".join(source.corpus.name for source in self.sources)

    @cached_property
    def _kept(self) -> Histogram:
        ends = self.vocabulary.end_id is not None
        return Histogram.sum([kept_of(source.corpus.histogram, self.limits, ends) for source in self.sources])

    @property
    def lines(self) -> int:
        return self._kept.lines

    @property
    def words(self) -> int:
        return self._kept.words

    @cached_property
    def skipped(self) -> Skipped:
        ends = self.vocabulary.end_id is not None
        return filtered_of(Histogram.sum([source.corpus.histogram for source in self.sources]), self.limits, ends)


@dataclass(frozen=True)
class Corpora:
    vocabulary: AnyVocabulary
    train: Sentences | StreamedText
    valid: Sentences | None


def fewest_symbols(settings: Settings) -> int:
    """Of a sentence that can have a probability: a root over nonterminals cannot rewrite to a single terminal."""
    return 2 if settings.model.root == "nonterminals" else 1


def load_corpora(settings: Settings, vocabulary: AnyVocabulary | None) -> Corpora:
    """vocabulary: that of a resumed run; None takes that of a prepared corpus, or builds it from the training text."""
    data = settings.data
    weighted = training_inputs(data)
    _check_all_there(data, [name for names, _ in weighted for name in names])
    explicit = settings.model.eos == "explicit"
    limits = Limits(data.max_length, fewest_symbols(settings))
    train: Sentences | StreamedText
    if is_streamed(data):
        train = _streamed(data, weighted, vocabulary, limits, explicit)
        vocabulary = train.vocabulary
    else:
        name = weighted[0][0][0]
        vocabulary = vocabulary or _vocabulary_in_memory(data, name, explicit)
        train = load_sentences(name, vocabulary, limits=limits)
    if not train.lines:
        names = ", ".join(name for names, _ in weighted for name in names)
        way_out = "check data.max_length" + (
            ", or use model.root=all for one-word lines" if limits.min_length > 1 else ""
        )
        raise UserError(f"{names}: no sentence of {limits.min_length} to {limits.max_length} words; {way_out}")
    return Corpora(vocabulary, train, _validation_text(settings, vocabulary))


# ---- what was asked for ---------------------------------------------------------------------------------------------


def training_inputs(data: DataSection) -> list[tuple[list[str], Fraction]]:
    """(names of a corpus, weight) for each corpus of data.train."""
    if isinstance(data.train, str):
        return [([data.train], Fraction(1))]
    if isinstance(data.train[0], str):
        return [(data.train, Fraction(1))]
    return [([item["path"]], Fraction(str(item["weight"]))) for item in data.train]


def is_streamed(data: DataSection) -> bool:
    if not isinstance(data.train, str):
        several = True
    else:
        path = Path(data.train)
        one_text = data.train.startswith(EMBEDDED_PREFIX) or (
            not path.is_dir() and not (glob.has_magic(data.train) and not path.exists())
            and not is_parquet(path) and not is_json(path) and path.suffix.lower() not in COMPRESSION
        )  # fmt: skip
        several = not one_text
    if data.streaming == "auto":
        return several
    if several and data.streaming is False:
        raise UserError("data.streaming=false reads one plain text file; leave it at auto for shards and folders")
    return bool(data.streaming)


def _check_all_there(data: DataSection, names: list[str]) -> None:
    """Missing data gets an answer before anything else is done."""
    for key, name in [*(("data.train", name) for name in names), ("data.valid", data.valid)]:
        if name is None or name.startswith(EMBEDDED_PREFIX) or glob.has_magic(name) or Path(name).exists():
            continue
        if ptb.is_expected(name):
            raise UserError(ptb.missing(key, name))


# ---- training text --------------------------------------------------------------------------------------------------


def _vocabulary_in_memory(data: DataSection, name: str, explicit: bool) -> AnyVocabulary:
    if data.sentencepiece is not None:
        return _existing_pieces(data.sentencepiece, explicit)
    try:
        return Vocabulary.build(read_words(name), _word_options(data, explicit))
    except VocabularyError as error:
        raise UserError(f"{name}: {error}") from None


def _word_options(data: DataSection, explicit: bool) -> VocabularyOptions:
    return VocabularyOptions(**data.vocabulary.model_dump(), end_of_sentence=explicit)


def _existing_pieces(path: str, explicit: bool) -> AnyVocabulary:
    pieces = open_model(Path(path))
    return pieces.with_end_of_sentence() if explicit else pieces


def _streamed(
    data: DataSection, weighted: list[tuple[list[str], Fraction]], vocabulary: AnyVocabulary | None, limits: Limits,
    explicit: bool,
) -> StreamedText:  # fmt: skip
    prepared = [is_prepared(names[0]) if len(names) == 1 else False for names, _ in weighted]
    for names, _ in weighted:
        for name in names:
            if unfinished(name):
                raise UserError(f"{name}: was not prepared to its end; the same lm_pcfg prepare command finishes it")
            if len(names) > 1 and is_prepared(name):
                raise UserError(
                    f"{name}: is a prepared corpus; several of them are a mixture: - {{path: ..., weight: 1}}"
                )
    options = RawOptions(data.field, data.block_lines, data.on_error)
    store = IndexStore(Path(data.index_folder))
    files = {k: find_shards(names) for k, (names, _) in enumerate(weighted) if not prepared[k]}
    if vocabulary is None:
        vocabulary = _vocabulary_of_shards(data, weighted, prepared, files, options, store, explicit)
    sources = []
    for number, (names, weight) in enumerate(weighted):
        if prepared[number]:
            corpus = PreparedCorpus(Path(names[0]), data.block_lines)
            _check_vocabulary(names[0], vocabulary)
            corpus.check_sizes(data.on_error)
            sources.append(Source(corpus, weight))
        else:
            raw = RawCorpus(
                ", ".join(names), files[number], options, vocabulary, store, processes=worth_using(files[number])
            )
            sources.append(Source(raw, weight))
    return StreamedText(sources, vocabulary, limits)


def _vocabulary_of_shards(
    data: DataSection, weighted: list[tuple[list[str], Fraction]], prepared: list[bool],
    files: dict[int, list[Path]], options: RawOptions, store: IndexStore, explicit: bool,
) -> AnyVocabulary:  # fmt: skip
    """The first prepared corpus's; else the SentencePiece model of the settings; else built from all raw shards."""
    if any(prepared):
        if data.sentencepiece is not None:
            raise UserError("a prepared corpus brings its vocabulary; leave data.sentencepiece out")
        first = Path(weighted[prepared.index(True)][0][0])
        vocabulary = vocabulary_of(read_manifest(first))
        return vocabulary.with_end_of_sentence() if explicit else vocabulary
    if data.sentencepiece is not None:
        return _existing_pieces(data.sentencepiece, explicit)
    every_file = [file for number in sorted(files) for file in files[number]]
    try:
        return build_vocabulary(every_file, options, _word_options(data, explicit), store, worth_using(every_file))
    except VocabularyError as error:
        raise UserError(f"{', '.join(name for names, _ in weighted for name in names)}: {error}") from None


def _check_vocabulary(name: str, vocabulary: AnyVocabulary) -> None:
    """A prepared corpus was made without <eos>, which a model may add."""
    made_with = vocabulary_of(read_manifest(Path(name)))
    if vocabulary.end_id is not None:
        made_with = made_with.with_end_of_sentence()
    if made_with.hash != vocabulary.hash:
        raise UserError(
            f"{name}: was prepared with another vocabulary than this run has; prepare it with --vocabulary FOLDER "
            "(the other corpus, or the run's vocab/)"
        )


# ---- validation text ------------------------------------------------------------------------------------------------


def _validation_text(settings: Settings, vocabulary: AnyVocabulary) -> Sentences | None:
    data = settings.data
    if data.valid is None:
        return None
    limits = Limits(settings.evaluation.max_length, fewest_symbols(settings))
    if is_prepared(data.valid):
        corpus = PreparedCorpus(Path(data.valid))
        _check_vocabulary(data.valid, vocabulary)
        valid = in_memory(corpus, vocabulary, limits)
    elif is_streamed(data.model_copy(update={"train": data.valid, "streaming": "auto"})):
        options = RawOptions(data.field, data.block_lines)  # fail: a score is of the whole text
        store = IndexStore(Path(data.index_folder))
        files = find_shards([data.valid])
        raw = RawCorpus(data.valid, files, options, vocabulary, store, processes=worth_using(files))
        valid = in_memory(raw, vocabulary, limits)
    else:
        valid = load_sentences(data.valid, vocabulary, limits=limits)
    if not len(valid):
        raise UserError(
            f"{data.valid}: no sentence of {limits.min_length} to {limits.max_length} words; is it the right file?"
        )
    return valid


# ---- for the loop ---------------------------------------------------------------------------------------------------


def training_stream(settings: Settings, train: Sentences | StreamedText, *, rank: int, world_size: int) -> BatchSource:
    if isinstance(train, StreamedText):
        return _shard_stream(settings, train, rank=rank, world_size=world_size)
    return BatchStream(
        train, BatchOptions(**settings.batch.model_dump()), seed=settings.seed,
        max_length_for_epoch=settings.data.curriculum.max_length_for_epoch, rank=rank, world_size=world_size,
    )  # fmt: skip


def _shard_stream(settings: Settings, train: StreamedText, *, rank: int, world_size: int) -> ShardStream:
    return ShardStream(
        train.sources, train.vocabulary, BatchOptions(**settings.batch.model_dump()), train.limits, seed=settings.seed,
        max_length_for_epoch=settings.data.curriculum.max_length_for_epoch, rank=rank, world_size=world_size,
        workers=settings.data.workers, on_error=settings.data.on_error, warn=warn,
    )  # fmt: skip


def word_vectors(settings: Settings, corpora: Corpora, announce: Callable[[str], None]) -> Tensor | None:
    """For `init: contexts`, from the training text, or the first part of it where it is streamed; otherwise None."""
    model, train, types = settings.model, corpora.train, len(corpora.vocabulary)
    if model.init.scheme != "contexts":
        return None
    announce(f"init: the neighbours of {types:,} words tell where they begin (seconds to a minute)")
    ids, lengths = (train.ids, train.lengths) if isinstance(train, Sentences) else _first_text(settings, train)
    return context_vectors(ids, lengths, types, model.word_dimension or model.dimension, settings.seed)


def _first_text(settings: Settings, train: StreamedText) -> tuple[np.ndarray, np.ndarray]:
    """(ids, lengths) of the sentences that come first, whatever the number of processes."""
    batches: list[Batch] = []
    stream = _shard_stream(settings, train, rank=0, world_size=1)
    try:
        for _ in range(stream.steps_per_epoch(0)):
            batches += stream.next_step()
            if sum(batch.n_words for batch in batches) >= TEXT_FOR_CONTEXTS:
                break
    finally:
        stream.close()
    return np.concatenate([batch.words for batch in batches]), np.concatenate([batch.lengths for batch in batches])


def metrics(
    train: Sentences | StreamedText, stream: BatchSource, sums: Callable[[list[float]], list[float]]
) -> dict[str, float]:
    """Lines left out by reason, and what could not be read; sums: over the ranks."""
    skipped = train.skipped
    by_reason: dict[str, float] = {
        "data/blank": skipped.blank,
        "data/too_long": skipped.too_long,
        "data/one_word": skipped.too_short,
    }
    if not isinstance(stream, ShardStream):
        return by_reason
    (lost,) = sums([float(stream.losses.lines)])
    damage = [source.corpus.damage for source in stream.sources]
    return {
        **by_reason,
        "data/unreadable_lines": sum(one.lines for one in damage),
        "data/bad_shards": sum(len(one.files) for one in damage),
        "data/lost_lines": lost,  # of shards that went bad since the run began
    }


def describe(name: str, text: Sentences | StreamedText) -> str:
    """One line; for each bad shard another one."""
    skipped = text.skipped
    damage = [] if isinstance(text, Sentences) else [source.corpus.damage for source in text.sources]
    left_out = [
        f"{count:,} {reason}"
        for count, reason in (
            (skipped.too_long, "too long"),
            (skipped.too_short, "of one word"),
            (skipped.blank, "blank"),
            (sum(one.lines for one in damage), "unreadable"),
        )
        if count
    ]
    line = f"{name}: {text.lines:,} sentences, {text.words:,} words"
    line += f", {text.unknown:,} unknown" if isinstance(text, Sentences) else f", streamed from {text.names}"
    line += f" (left out: {', '.join(left_out)})" if left_out else ""
    bad = [f"warning: {message}; left out (on_error: skip)" for one in damage for message in one.files]
    return "\n".join([line, *bad])
