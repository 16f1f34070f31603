"""The symbols of a grammar as they are shown: tables for a terminal, and one page with links between symbols."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from lm_pcfg.inference.drawing.trees import PAGE_END, page_begin, shown, width_of
from lm_pcfg.inference.symbols import Choices, Kind, SymbolTable

STYLE = """
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem; border-top: 1px solid var(--line); }
td.figure { text-align: right; font-variant-numeric: tabular-nums; }
.symbols th, .symbols td.figure { white-space: nowrap; }
small { color: var(--faint); margin-right: .5em; }
a { color: inherit; }
tr:target { background: var(--mark); }
@media (max-width: 40rem) { /* a phone: a symbol is a block of lines, not a row */
  .symbols thead { display: none; }
  .symbols tr { display: block; padding: .4rem 0; border-top: 1px solid var(--line); }
  .symbols th, .symbols td, .symbols td.figure { display: block; text-align: left; border: 0; padding: .05rem 0; }
  .symbols td { overflow-wrap: anywhere; }
  .symbols td.figure { display: inline-block; margin-right: 1em; }
  .symbols td::before { content: attr(data-name) " "; color: var(--faint); }
}
"""
HEADER = "nats: the entropy; effective: exp(entropy), so many equally probable ones would be as varied."


class _Row(NamedTuple):
    """A symbol as both forms show it."""

    name: str
    uses: str
    share: str  # of the uses of all symbols of its kind
    root: str  # "" for a preterminal
    choices: dict[str, Choices]


class _Section(NamedTuple):
    title: str
    summary: str
    rows: list[_Row]


def _sections(table: SymbolTable) -> list[_Section]:
    upper, lower = table.all_nonterminals, table.all_preterminals
    nonterminals = [
        _Row(one.name, _number(one.uses), _share(one.uses, upper), f"{one.root:.4f}",
             {"left": one.left, "right": one.right})
        for one in table.nonterminals
    ]  # fmt: skip
    preterminals = [
        _Row(one.name, _number(one.uses), _share(one.uses, lower), "",
             {"words": one.words} | ({"in text": one.emitted} if one.emitted else {}))
        for one in table.preterminals
    ]  # fmt: skip
    return [
        _Section("Nonterminals", _summary(upper, [one.uses for one in table.nonterminals]), nonterminals),
        _Section("Preterminals", _summary(lower, [one.uses for one in table.preterminals]), preterminals),
    ]


def _about(table: SymbolTable) -> str:
    if table.text is None:
        which = "of those derivations that end: the others grow without end" if table.ending else "of the grammar"
        return f"Uses: how often a symbol is expected in one derivation {which}."
    without = f", without {table.impossible:,} that have no tree" if table.impossible else ""
    return (
        f"Uses: how often a symbol is expected in the trees of {shown(table.text)} "
        f"({table.sentences:,} sentences, {table.words:,} words{without})."
    )


def _summary(kind: Kind, listed: list[float]) -> str:
    return (
        f"{len(listed):,} of {kind.symbols:,}, with {_share(sum(listed), kind)} of {_number(kind.uses)} uses; "
        f"all together as varied as {kind.effective:,.1f} equally frequent ones"
    )


def _share(uses: float, kind: Kind) -> str:
    return f"{uses / kind.uses if kind.uses > 0 else 0.0:.1%}"


def _number(value: float) -> str:
    return f"{value:,.1f}" if value >= 100 else f"{value:.4g}"


# ---- text -----------------------------------------------------------------------------------------------------------


def symbol_tables(table: SymbolTable, width: int = 120) -> str:
    """Both tables as plain text, the most used symbols first. What does not fit into the width is left out."""
    lines = [_about(table), HEADER]
    for title, summary, rows in _sections(table):
        lines += ["", f"{title}: {summary}"]
        for row in rows:
            root = f", root {row.root}" if row.root else ""
            lines.append(f"{row.name:<7} {row.uses} uses, {row.share}{root}")
            lines += [_line(what, choices, width) for what, choices in row.choices.items()]
    return "\n".join(lines)


def _line(what: str, choices: Choices, width: int) -> str:
    line = f"  {what:<8}{choices.entropy:6.2f} nats, effective {choices.effective:7,.1f}:"
    for choice in choices.likeliest:
        entry = f"  {shown(choice.name)} {choice.probability:.3f}"
        if width_of(line) + width_of(entry) > width:
            break
        line += entry
    return line


# ---- page -----------------------------------------------------------------------------------------------------------


def symbols_page(table: SymbolTable, title: str) -> str:
    """Both tables as one HTML page, which needs no script and nothing besides itself. Listed children are links."""
    return "".join([page_begin(title, STYLE), *symbols_html(table), PAGE_END])


def symbols_html(table: SymbolTable, heading: str = "h2", prefix: str = "") -> Iterator[str]:
    """Both tables as parts of a page with STYLE. heading: of each; prefix: of the ids that links lead to."""
    sections = _sections(table)
    linked = {row.name for section in sections for row in section.rows}
    yield f"<p>{escape(_about(table))} {escape(HEADER)}</p>\n"
    for name, summary, rows in sections:
        columns = ["symbol", "uses", "share", *(["root"] if rows and rows[0].root else [])]
        columns += rows[0].choices if rows else []
        head = "".join(f"<th>{column}</th>" for column in columns)
        yield f"<{heading}>{name}</{heading}>\n<p>{escape(summary)}.</p>\n"
        yield f'<table class="symbols">\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        links = linked if name == "Nonterminals" else set()
        for row in rows:
            figures = [row.uses, row.share, *([row.root] if row.root else [])]
            cells = [f"<th>{row.name}</th>"]
            cells += [
                f'<td class="figure" data-name="{column}">{figure}</td>'
                for column, figure in zip(columns[1:], figures, strict=False)
            ]
            cells += [_cell(what, choices, links, prefix) for what, choices in row.choices.items()]
            yield f'<tr id="{prefix}{row.name}">{"".join(cells)}</tr>\n'
        yield "</tbody>\n</table>\n"


def _cell(what: str, choices: Choices, linked: set[str], prefix: str) -> str:
    entries = []
    for choice in choices.likeliest:
        text = escape(shown(choice.name))
        text = f'<a href="#{prefix}{text}">{text}</a>' if choice.name in linked else f"<bdi>{text}</bdi>"
        entries.append(f"{text} <small>{choice.probability:.3f}</small>")
    figures = f"<small>{choices.entropy:.2f} nats, effective {choices.effective:,.1f}</small>"
    return f'<td data-name="{what}">{figures}<br>{" ".join(entries)}</td>'
