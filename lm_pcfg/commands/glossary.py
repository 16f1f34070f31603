"""`lm_pcfg glossary` says what the figures mean."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from lm_pcfg import glossary as terms
from lm_pcfg.errors import UserError


def glossary(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Figures, such as ppl_words.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print all of it as docs/glossary.md has it.")] = False,
) -> None:
    """Say what the figures mean that commands print and runs log."""
    if markdown:
        print(terms.markdown(), end="")
        return
    for name in names or []:
        if (text := terms.find(name)) is None:
            like = terms.nearest(name)
            way_out = f"it has {', '.join(like)}" if like else "`lm_pcfg glossary` lists all"
            raise UserError(f"the glossary does not have {name}: {way_out}")
        print(f"{name}: {text}")
    if not names:
        for section, entries in terms.GLOSSARY.items():
            print(section)
            for term, text in entries.items():
                print(textwrap.fill(f"{term}: {text}", 100, initial_indent="  ", subsequent_indent="      "))
