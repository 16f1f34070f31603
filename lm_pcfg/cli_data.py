"""The commands about data, `lm_pcfg prepare` and `lm_pcfg bench data`. Arguments only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lm_pcfg.cli_output import Json, show
from lm_pcfg.errors import UserError


def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT...", help="Files, folders, patterns, a hub name; or the word ptb with --source."),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder of the prepared corpus.")] = None,
    vocabulary: Annotated[
        str, typer.Option(help="words, unigram, bpe; or a SentencePiece model, a prepared corpus, a vocab folder.")
    ] = "words",
    size: Annotated[int | None, typer.Option(min=0, help="Most words (10000; 0: all), or pieces (8000).")] = None,
    min_count: Annotated[int, typer.Option(min=1, help="Rarer words become <unk>.")] = 1,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Lowercase all words.")] = False,
    fold_numbers: Annotated[bool, typer.Option("--fold-numbers", help="Numbers become N.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="Take the options of words from data.vocabulary of this config.")
    ] = None,
    byte_fallback: Annotated[
        bool, typer.Option("--byte-fallback", help="Pieces: rare characters as bytes, so that none is unknown.")
    ] = False,
    field: Annotated[str, typer.Option(help="Which field of JSON lines or Parquet holds the text.")] = "text",
    trees: Annotated[bool, typer.Option("--trees", help="Inputs are bracketed trees: keep text and trees.")] = False,
    split: Annotated[
        str | None, typer.Option(help="Of a hub text (default train), or of a folder laid out like one.")
    ] = None,
    configuration: Annotated[str | None, typer.Option(help="Of a hub text.")] = None,
    shard_lines: Annotated[int, typer.Option(min=1, help="Lines a shard.")] = 250_000,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Default: one a core, unless there is little to do.")
    ] = None,
    on_error: Annotated[
        Literal["fail", "skip"], typer.Option(help="What cannot be read: stop, or leave it out and count it.")
    ] = "fail",
    source: Annotated[str | None, typer.Option(help="With ptb: the folder that has Mikolov's files, or hub.")] = None,
    as_json: Json = False,
) -> None:
    """Make a prepared corpus: vocabulary, tokenised shards, manifest. After a kill, the same command goes on.

    `lm_pcfg prepare ptb --source DIR` puts the Penn Treebank's language-modelling text where the configs expect it.
    """
    if inputs == ["ptb"] and (source is not None or out is None):
        _prepare_ptb(source, out)
        return
    if source is not None:
        raise typer.BadParameter("--source belongs to `prepare ptb`; give the inputs themselves")
    if out is None:
        raise typer.BadParameter("--out FOLDER is missing: where should the prepared corpus go?")
    of_words = {"--min-count": min_count != 1, "--lowercase": lowercase, "--fold-numbers": fold_numbers}
    _refuse_unused(vocabulary, {"--size": size is not None, **of_words, "--config": config is not None,
                                "--byte-fallback": byte_fallback})  # fmt: skip
    if vocabulary in ("unigram", "bpe") and size == 0:
        raise typer.BadParameter(f"--size 0 is for words; say how many pieces --vocabulary {vocabulary} should have")
    from lm_pcfg.corpus import prepare as preparing
    from lm_pcfg.corpus.prepared import describe

    kind, existing = (vocabulary, None) if vocabulary in ("words", "unigram", "bpe") else ("words", vocabulary)
    options = preparing.PrepareOptions(
        text_field=field, trees=trees, split=split, configuration=configuration,
        kind=kind, existing=existing,  # type: ignore[arg-type]
        words=_word_options(config, size, min_count, lowercase, fold_numbers),
        pieces=size or 8000, byte_fallback=byte_fallback, shard_lines=shard_lines, on_error=on_error,
    )  # fmt: skip
    manifest = preparing.prepare(inputs, out, options, processes=processes)
    show(describe(manifest), as_json)


def _refuse_unused(vocabulary: str, given: dict[str, bool]) -> None:
    """Options that this kind of vocabulary would not heed."""
    used = {
        "words": given.keys() - {"--byte-fallback"},
        "unigram": {"--size", "--byte-fallback"},
        "bpe": {"--size", "--byte-fallback"},
    }.get(vocabulary, set())
    if unused := [name for name, there in given.items() if there and name not in used]:
        which = f"--vocabulary {vocabulary}" if used else f"the vocabulary {vocabulary}, which exists already"
        raise typer.BadParameter(f"{', '.join(unused)} would change nothing with {which}; leave it out")


def _word_options(config: Path | None, size: int | None, min_count: int, lowercase: bool, fold_numbers: bool) -> Any:
    from lm_pcfg.corpus.vocabulary import VocabularyOptions

    if config is None:
        most = 10_000 if size is None else size or None
        return VocabularyOptions(most, min_count, lowercase, fold_numbers)
    if size is not None or min_count != 1 or lowercase or fold_numbers:
        raise typer.BadParameter("--config has the options of words; give no others beside it")
    from lm_pcfg.settings_file import load_settings

    return VocabularyOptions(**load_settings(config).data.vocabulary.model_dump())


def _prepare_ptb(source: str | None, out: Path | None) -> None:
    from lm_pcfg.corpus import ptb

    if source is None:
        raise UserError("prepare ptb needs --source DIR, the folder with ptb.train.txt and the others, or --source hub")
    for path in ptb.prepare_ptb(source, out or ptb.FOLDER):
        print(path)


def info_about(corpus: Path, as_json: bool) -> None:
    from lm_pcfg.corpus.prepared import describe, read_manifest, verify, vocabulary_of

    manifest = read_manifest(corpus)
    verify(manifest)
    vocabulary_of(manifest)
    show(describe(manifest), as_json)


def bench_data(
    source: Annotated[
        list[str] | None,
        typer.Argument(metavar="[INPUT]...", help="A prepared corpus or raw shards; default: made up."),
    ] = None,
    lines: Annotated[int, typer.Option(min=1, help="Of the made-up corpus, with PTB's lengths.")] = 1_000_000,
    sentencepiece: Annotated[Path | None, typer.Option(help="Model for raw shards; default: their words.")] = None,
    field: Annotated[str, typer.Option(help="Which field of JSON lines or Parquet holds the text.")] = "text",
    by: Annotated[Literal["cost", "sentences"], typer.Option(help="As batch.by.")] = "cost",
    max_length: Annotated[int, typer.Option(min=0, help="As data.max_length; 0: none.")] = 40,
    workers: Annotated[int, typer.Option(min=0, help="As data.workers.")] = 0,
    as_json: Json = False,
) -> None:
    """Stream one epoch through the batcher, without a model: words a second, memory, evenness of the batches."""
    from lm_pcfg.corpus.bench import measure

    report = measure(
        source or [], lines=lines, sentencepiece=sentencepiece, field=field, by=by, max_length=max_length or None,
        workers=workers,
    )  # fmt: skip
    show(report, as_json)
