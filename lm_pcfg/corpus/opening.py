"""The one way from settings, or from plain names, to a corpus: which files, which vocabulary, in memory or streamed."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lm_pcfg.console import warn
from lm_pcfg.corpus.batches import Batch, BatchOptions
from lm_pcfg.corpus.lengths import Limits
from lm_pcfg.corpus.pieces import AnyVocabulary, open_model
from lm_pcfg.corpus.preparation import ptb
from lm_pcfg.corpus.sentences import Sentences, load_sentences
from lm_pcfg.corpus.shards.blocks import ShardedCorpus, Source, StreamedText
from lm_pcfg.corpus.shards.files import find_shards, is_json, is_parquet
from lm_pcfg.corpus.shards.manifest import is_prepared, read_manifest
from lm_pcfg.corpus.shards.plan import ShardPlan
from lm_pcfg.corpus.shards.prepared import PreparedCorpus, unfinished, vocabulary_of
from lm_pcfg.corpus.shards.raw import IndexStore, RawCorpus, RawOptions, build_vocabulary
from lm_pcfg.corpus.stream import BatchStream, Plan, TextPlan
from lm_pcfg.corpus.text import COMPRESSION, EMBEDDED_PREFIX, read_words
from lm_pcfg.corpus.treebank import PENN_PUNCTUATION, Tree, load_trees, without
from lm_pcfg.corpus.unknown import percent
from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyError, VocabularyOptions
from lm_pcfg.errors import UserError
from lm_pcfg.settings import DataSection, EvaluationSection, Settings

MOST_UNKNOWN = 0.2  # of the words of gold trees, before a warning
MOST_TOO_LONG = 1 / 3  # of the sentences of a text, before a warning

Text = Sentences | StreamedText
Weighted = tuple[list[str], Fraction]  # the names of a corpus, and how often an epoch reads it


@dataclass(frozen=True)
class Corpora:
    vocabulary: AnyVocabulary
    train: Text
    valid: Sentences | None
    trees: list[Tree] | None = None  # gold ones, without punctuation, of two words or more


@dataclass(frozen=True)
class OpeningOptions:
    """How texts are read, and which vocabulary they get where they bring none."""

    raw: RawOptions
    index_folder: Path
    words: VocabularyOptions
    sentencepiece: str | Path | None = None  # a model of pieces, in place of words
    verify: Literal["off", "once", "always"] = "off"  # compare shards with the hashes of their manifest or index


def load_corpora(settings: Settings, vocabulary: AnyVocabulary | None, min_length: int) -> Corpora:
    """Open the texts of a run.

    vocabulary: that of a resumed run; None takes that of a prepared corpus, or builds it from the training text.
    min_length: fewest symbols, with `<eos>`, of a sentence that can have a probability.
    """
    data = settings.data
    weighted, options = _checked_inputs(data), _options(settings)
    limits = Limits(data.max_length, min_length)
    streamed = is_streamed(data.train, data.streaming)
    train, vocabulary = open_corpus(weighted, vocabulary, limits, options, streamed=streamed)
    if not train.lines:
        names = ", ".join(name for names, _ in weighted for name in names)
        way_out = "check data.max_length" + (", or use model.root=all for one-word lines" if min_length > 1 else "")
        raise UserError(f"{names}: no sentence of {min_length} to {limits.max_length} {vocabulary.unit}; {way_out}")
    if data.valid is None:
        if settings.evaluation.trees is not None:
            raise UserError("evaluation.trees is looked at with the validation text: give data.valid, too")
        return Corpora(vocabulary, train, None)

    limits = Limits(settings.evaluation.max_length, min_length)
    valid = whole_text(data.valid, vocabulary, limits, options)
    if not valid.lines:
        raise UserError(
            f"{data.valid}: no sentence of {min_length} to {limits.max_length} {vocabulary.unit}; is it the right file?"
        )
    return Corpora(vocabulary, train, valid, _gold_trees(settings.evaluation, vocabulary))


def whole_training_text(settings: Settings, vocabulary: AnyVocabulary, index_folder: Path) -> Sentences:
    """Read the training text of a run into memory, encoded as the run did: lines of all lengths, every corpus once."""
    weighted, streamed = _checked_inputs(settings.data), is_streamed(settings.data.train, settings.data.streaming)
    options = replace(_options(settings), index_folder=index_folder)
    return in_memory(open_corpus(weighted, vocabulary, Limits(), options, streamed=streamed)[0])


def whole_text(name: str, vocabulary: AnyVocabulary, limits: Limits, options: OpeningOptions) -> Sentences:
    """Read a text into memory to score it: all that can be read of it has to be read."""
    options = replace(options, raw=replace(options.raw, on_error="fail"))
    return in_memory(open_corpus([([name], Fraction(1))], vocabulary, limits, options, streamed=is_streamed(name))[0])


def in_memory(text: Text) -> Sentences:
    return text if isinstance(text, Sentences) else text.in_memory()


def _options(settings: Settings) -> OpeningOptions:
    data = settings.data
    return OpeningOptions(
        raw=RawOptions(data.field, data.block_lines, data.on_error),
        index_folder=Path(data.index_folder),
        words=VocabularyOptions(**data.vocabulary.model_dump(), end_of_sentence=settings.model.eos == "explicit"),
        sentencepiece=data.sentencepiece,
        verify=data.verify,
    )


def _gold_trees(evaluation: EvaluationSection, vocabulary: AnyVocabulary) -> list[Tree] | None:
    """Read the trees of evaluation.trees that are compared, and say how well the vocabulary knows their words."""
    if evaluation.trees is None:
        return None
    most = evaluation.max_length or math.inf
    whole = [without(tree, PENN_PUNCTUATION) for tree in load_trees(evaluation.trees)]
    trees = [tree for tree in whole if 2 <= len(tree.words) <= most]
    if not trees:
        raise UserError(f"{evaluation.trees}: no tree of 2 to {most} words; is it a file of bracketed trees?")
    ids = [id for line in vocabulary.tokenise([" ".join(tree.words) for tree in trees]) for id in line]
    unknown = ids.count(vocabulary.unknown_id) / len(ids)
    if unknown > MOST_UNKNOWN:
        warn(f"{evaluation.trees}: {100 * unknown:.0f} % of its words are unknown; is it of the same kind of text?")
    return trees


# ---- what was asked for ---------------------------------------------------------------------------------------------


def training_inputs(data: DataSection) -> list[Weighted]:
    """Return the inputs and the weight of each corpus of data.train."""
    if isinstance(data.train, str):
        return [([data.train], Fraction(1))]
    if isinstance(data.train[0], str):
        return [(data.train, Fraction(1))]
    return [([item["path"]], Fraction(str(item["weight"]))) for item in data.train]


def is_streamed(train: Any, streaming: bool | str = "auto") -> bool:
    """Whether a text, given as in data.train, stays in its shards; auto: yes, unless it is one plain text file."""
    several = not (isinstance(train, str) and _is_plain_text(train))
    if streaming == "auto":
        return several
    if several and streaming is False:
        raise UserError("data.streaming=false reads one plain text file; leave it at auto for shards and folders")
    return bool(streaming)


def _is_plain_text(name: str) -> bool:
    path = Path(name)
    return name.startswith(EMBEDDED_PREFIX) or (
        not path.is_dir() and not (glob.has_magic(name) and not path.exists())
        and not is_parquet(path) and not is_json(path) and path.suffix.lower() not in COMPRESSION
    )  # fmt: skip


def _checked_inputs(data: DataSection) -> list[Weighted]:
    """Return the inputs; report a missing Penn Treebank of a recipe before anything else is done."""
    weighted = training_inputs(data)
    names = [("data.train", name) for names, _ in weighted for name in names]
    for key, name in [*names, ("data.valid", data.valid)]:
        if name is None or name.startswith(EMBEDDED_PREFIX) or glob.has_magic(name) or Path(name).exists():
            continue
        if ptb.is_expected(name):
            raise UserError(ptb.missing(key, name))
    return weighted


# ---- opening --------------------------------------------------------------------------------------------------------


def open_corpus(
    weighted: Sequence[Weighted], vocabulary: AnyVocabulary | None, limits: Limits, options: OpeningOptions, *,
    streamed: bool,
) -> tuple[Text, AnyVocabulary]:  # fmt: skip
    """Open a text and its vocabulary. A text that is not streamed is one plain file, and is read into memory."""
    if streamed:
        text = open_streamed(weighted, vocabulary, limits, options)
        return text, text.vocabulary
    ((name,), _) = weighted[0]
    vocabulary = vocabulary or _vocabulary([name], None, options)
    return load_sentences(name, vocabulary, limits=limits), vocabulary


def open_streamed(
    weighted: Sequence[Weighted], vocabulary: AnyVocabulary | None, limits: Limits, options: OpeningOptions
) -> StreamedText:
    files = [_find(names) for names, _ in weighted]  # mistakes in the names are reported before the work begins
    if vocabulary is None:
        every_name = [name for names, _ in weighted for name in names]
        vocabulary = _vocabulary(every_name, [file for some in files for file in some], options)
    sources = []
    for (names, weight), own in zip(weighted, files, strict=True):
        sources.append(Source(_open(names, own, vocabulary, options), weight))
    return StreamedText(sources, vocabulary, limits)


def _find(names: list[str]) -> list[Path]:
    """Find the raw shards of a corpus; a prepared one has none."""
    for name in names:
        if unfinished(name):
            raise UserError(f"{name}: was not prepared to its end; the same lm_pcfg prepare command finishes it")
        if len(names) > 1 and is_prepared(name):
            raise UserError(f"{name}: is a prepared corpus; several of them are a mixture: - {{path: ..., weight: 1}}")
    return [] if is_prepared(names[0]) else find_shards(names)


def _open(names: list[str], files: list[Path], vocabulary: AnyVocabulary, options: OpeningOptions) -> ShardedCorpus:
    always = options.verify == "always"
    if files:
        raw = RawCorpus(", ".join(names), files, options.raw, vocabulary, IndexStore(options.index_folder))
        if options.verify != "off":
            raw.verify(always=always)
        return raw
    corpus = PreparedCorpus(Path(names[0]), vocabulary, options.raw.block_lines)
    corpus.check_sizes(options.raw.on_error)
    if options.verify != "off":
        corpus.verify(options.raw.on_error, always=always)
    return corpus


def _vocabulary(names: list[str], files: list[Path] | None, options: OpeningOptions) -> AnyVocabulary:
    """Take the vocabulary of the first prepared corpus, else the SentencePiece model, else build one from the words.

    files: raw shards; None: the text is one plain file.
    """
    prepared = next((name for name in names if is_prepared(name)), None)
    vocabulary: AnyVocabulary
    if prepared is not None:
        if options.sentencepiece is not None:
            raise UserError("a prepared corpus brings its vocabulary; leave data.sentencepiece out")
        vocabulary = vocabulary_of(read_manifest(Path(prepared)))
    elif options.sentencepiece is not None:
        vocabulary = open_model(Path(options.sentencepiece))
    else:
        try:
            if files is None:
                return Vocabulary.build(read_words(names[0]), options.words)
            return build_vocabulary(files, options.raw, options.words, IndexStore(options.index_folder))
        except VocabularyError as error:
            raise UserError(f"{', '.join(names)}: {error}") from None
    return vocabulary.with_end_of_sentence() if options.words.end_of_sentence else vocabulary


# ---- for the trainer ------------------------------------------------------------------------------------------------


def training_stream(
    settings: Settings, train: Text, *, rank: int, world_size: int, workers: int | None = None
) -> BatchStream:
    """workers: processes that read ahead; None: `data.workers`"""
    data, seed, curriculum = settings.data, settings.seed, settings.data.curriculum.max_length_for_epoch
    options = BatchOptions(**settings.batch.model_dump())
    plan: Plan
    if isinstance(train, Sentences):
        epochs = data.brackets["epochs"] if isinstance(data.brackets, dict) else None
        plan = TextPlan(train, options, seed=seed, curriculum=curriculum, bracketed_epochs=epochs)
    else:
        workers = data.workers if workers is None else workers
        plan = ShardPlan(train, options, seed=seed, curriculum=curriculum, workers=workers,
                         on_error=data.on_error, warn=warn)  # fmt: skip
    return BatchStream(plan, rank=rank, world_size=world_size)


def first_text(settings: Settings, train: Text, words: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, lengths) of a text in memory, or of the first batches of a streamed one, about so many words.

    It is the same for any number of ranks.
    """
    if isinstance(train, Sentences):
        return train.ids, train.lengths
    batches: list[Batch] = []
    taken = 0
    stream = training_stream(settings, train, rank=0, world_size=1, workers=0)  # others would take seconds to start
    for _ in range(stream.steps_per_epoch(0)):
        step = stream.next_step()
        batches += step
        taken += sum(batch.n_words for batch in step)
        if taken >= words:
            break
    return np.concatenate([batch.words for batch in batches]), np.concatenate([batch.lengths for batch in batches])


def metrics(train: Text, stream: BatchStream, sums: Callable[[list[float]], list[float]]) -> dict[str, float]:
    """Count the lines left out, by reason, and what could not be read; sums: adds up over the ranks."""
    skipped, damage, losses = train.skipped, train.damage, stream.plan.losses
    by_reason: dict[str, float] = {
        "data/blank": skipped.blank,
        "data/too_long": skipped.too_long,
        "data/one_word": skipped.too_short,
    }
    if losses is None:
        return by_reason
    (lost,) = sums([float(losses.lines)])
    return {
        **by_reason,
        "data/unreadable_lines": damage.lines,
        "data/bad_shards": len(damage.files),
        "data/lost_lines": lost,  # of shards that went bad since the run began
    }


def describe(name: str, text: Text) -> str:
    """Describe `train` or `valid` in one line; warn in others of bad shards, and where much of it is too long."""
    skipped, damage = text.skipped, text.damage
    reasons = (
        (skipped.too_long, "too long"), (skipped.too_short, "of one word"), (skipped.blank, "blank"),
        (damage.lines, "unreadable"),
    )  # fmt: skip
    left_out = ", ".join(f"{count:,} {reason}" for count, reason in reasons if count)
    line = f"{name}: {text.lines:,} sentences, {text.words:,} {text.unit}, {text.remark}"
    line += f" (left out: {left_out})" if left_out else ""
    warnings = [f"{message}; left out (on_error: skip)" for message in damage.files]
    too_long = skipped.too_long / max(1, text.lines + skipped.too_long)
    if too_long > MOST_TOO_LONG:
        setting = "data.max_length" if name == "train" else "evaluation.max_length"
        counts = ", which counts pieces, not words" if text.unit == "pieces" else ""
        share = f"{percent(too_long)} of its sentences have more {text.unit} than {setting}"
        warnings.append(f"{name}: {share}{counts}, and are left out")
    return "\n".join([line, *(f"warning: {message}" for message in warnings)])
