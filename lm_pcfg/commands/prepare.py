"""`lm_pcfg prepare` makes a prepared corpus of text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lm_pcfg.commands.output import Json, show
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
    size: Annotated[
        int | None,
        typer.Option(min=0, help="Most words (default 10000; 0: all) or pieces (8000)."),
    ] = None,
    min_count: Annotated[int, typer.Option(min=1, help="Replace rarer words by <unk>.")] = 1,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Lowercase all words.")] = False,
    fold_numbers: Annotated[bool, typer.Option("--fold-numbers", help="Replace numbers by N.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="Take the options of words from data.vocabulary of this config.")
    ] = None,
    byte_fallback: Annotated[
        bool,
        typer.Option("--byte-fallback", help="Pieces write rare characters as bytes: none is unknown."),
    ] = False,
    field: Annotated[str, typer.Option(help="Field of JSON lines or Parquet that holds the text.")] = "text",
    trees: Annotated[bool, typer.Option("--trees", help="Read bracketed trees, and keep text and trees.")] = False,
    split: Annotated[
        str | None, typer.Option(help="Split of a hub text (default train), or of a folder laid out like one.")
    ] = None,
    configuration: Annotated[str | None, typer.Option(help="Configuration of a hub text.")] = None,
    shard_lines: Annotated[int, typer.Option(min=1, help="Number of lines in a shard.")] = 250_000,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Number of processes; default: one a core, unless there is little to do.")
    ] = None,
    on_error: Annotated[
        Literal["fail", "skip"], typer.Option(help="Stop at what cannot be read, or leave it out and count it.")
    ] = "fail",
    part: Annotated[
        str | None,
        typer.Option(
            metavar="K/N",
            help="Do one part of N that several machines do. Run all parts, and after a count of words all "
            "of them again: the last one completes the corpus.",
        ),
    ] = None,
    source: Annotated[str | None, typer.Option(help="With ptb: the folder that has Mikolov's files, or hub.")] = None,
    as_json: Json = False,
) -> None:
    """Make a prepared corpus: vocabulary, tokenised shards, manifest. If it is stopped, the same command continues.

    `lm_pcfg prepare ptb --source DIR` puts the Penn Treebank's language-modelling text where the configs expect it.
    """
    if inputs == ["ptb"] and (source is not None or out is None):
        if part is not None:
            raise typer.BadParameter("--part is for corpora of many files, not for `prepare ptb`")
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
    from lm_pcfg.corpus.preparation import prepare as preparing
    from lm_pcfg.corpus.shards.prepared import describe

    kind, existing = (vocabulary, None) if vocabulary in ("words", "unigram", "bpe") else ("words", vocabulary)
    options = preparing.PrepareOptions(
        text_field=field, trees=trees, split=split, configuration=configuration,
        kind=kind, existing=existing,  # type: ignore[arg-type]
        words=_word_options(config, size, min_count, lowercase, fold_numbers),
        pieces=size or 8000, byte_fallback=byte_fallback, shard_lines=shard_lines, on_error=on_error,
    )  # fmt: skip
    if part is None:
        show(describe(preparing.prepare(inputs, out, options, processes=processes)), as_json)
        return
    from lm_pcfg.corpus.preparation.parts import Part, Unfinished, prepare_part

    result = prepare_part(inputs, out, options, Part.parse(part), processes=processes)
    show(result.report() if isinstance(result, Unfinished) else describe(result), as_json)


def _refuse_unused(vocabulary: str, given: dict[str, bool]) -> None:
    """Refuse options that have no effect on this kind of vocabulary."""
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
    from lm_pcfg.corpus.preparation import ptb

    if source is None:
        raise UserError("prepare ptb needs --source DIR, the folder with ptb.train.txt and the others, or --source hub")
    for path in ptb.prepare_ptb(source, out or ptb.FOLDER):
        print(path)
