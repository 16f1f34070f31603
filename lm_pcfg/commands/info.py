"""`lm_pcfg info` describes a checkpoint, the symbols of its grammar, or a prepared corpus."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lm_pcfg.commands.output import DeviceOption, Json, WeightsOption, show
from lm_pcfg.console import progress
from lm_pcfg.errors import UserError


def _has_model(folder: Path) -> bool:
    """Whether a folder is a run or a checkpoint, as far as its files tell."""
    return any((folder / part).exists() for part in ("state.json", "checkpoints", "best", "config.yaml", "config.json"))


def info(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="A run, a checkpoint or a prepared corpus.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Run, checkpoint or exported folder; default: the best of the newest run under runs/."),
    ] = None,
    as_json: Json = False,
    weights: WeightsOption = "auto",
    device: DeviceOption = "auto",
    grammar: Annotated[
        bool, typer.Option("--grammar", help="Print the most used symbols with their words and children, too.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write these symbols here, as one page for a browser.")] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Count uses in the trees of this text (one sentence a line), not in the grammar's own."),
    ] = None,
    most: Annotated[int, typer.Option(min=1, help="Words or children to list for a symbol.")] = 10,
    symbols: Annotated[int, typer.Option(min=1, help="Nonterminals to list, and as many preterminals.")] = 50,
    max_length: Annotated[
        int, typer.Option(min=1, help="Leave out lines of the text of more words (or pieces).")
    ] = 250,
) -> None:
    """Describe a checkpoint and its grammar, or a prepared corpus."""
    wants_symbols = grammar or html is not None
    if folder is not None and checkpoint is not None:
        raise typer.BadParameter("FOLDER and --checkpoint both name what to describe: give one of them")
    corpus = folder if folder is not None and not _has_model(folder) else None
    checkpoint = checkpoint if corpus is not None else folder or checkpoint
    if corpus is not None and (wants_symbols or text is not None):
        raise typer.BadParameter("--grammar, --html and --text are for a checkpoint, not for a prepared corpus")
    if text is not None and not wants_symbols:
        raise typer.BadParameter("--text is for the symbols of a grammar: add --grammar or --html PAGE")
    if corpus is not None:
        from lm_pcfg.corpus.shards import prepared

        if not (prepared.is_prepared(corpus) or prepared.unfinished(corpus)):
            raise UserError(f"{corpus} is neither a run, a checkpoint nor a prepared corpus; give one like runs/tiny")
        manifest = prepared.read_manifest(corpus)
        prepared.verify(manifest)
        prepared.vocabulary_of(manifest)  # an error if it does not fit
        show(prepared.describe(manifest), as_json)
        return
    from lm_pcfg import load
    from lm_pcfg.inference.trained import describe

    trained = load(*([checkpoint] if checkpoint else []), weights=weights, device=device, prepare_cpu=True).grammars[0]
    if not wants_symbols:
        show(describe(trained), as_json)
        return
    from lm_pcfg.inference.drawing.symbol_tables import symbol_tables, symbols_page
    from lm_pcfg.inference.lines import count_lines
    from lm_pcfg.inference.symbols import load_text, symbols_of

    with progress("lines read", count_lines(text) if text else None, show=text is not None) as bar:
        sentences = None
        if text is not None:
            sentences = load_text(
                trained, text, max_length=max_length, warn=lambda message: bar.message(f"warning: {message}"),
                on_lines=lambda lines: bar.advance(lines),
            )  # fmt: skip
        table = symbols_of(
            trained, sentences, name=text or "", most=most, listed=symbols, on_batch=lambda lines: bar.advance(lines)
        )
    if html is not None:
        try:
            html.write_text(symbols_page(table, f"Symbols of {trained.checkpoint}"), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {html}: {error.strerror}") from None
    report = describe(trained)
    show(report | ({"symbols": asdict(table)} if grammar and as_json else {}), as_json)
    if grammar and not as_json:
        print(f"\n{symbol_tables(table)}")
