"""The frame of a page: its head, its colours for light and dark screens, and the plain parts that pages are made of.

A page is one file. Its policy forbids the browser to load anything, and to run any script but the page's own. Text of
users (words, names, settings) comes in through `text` and the functions below, which escape it; what they return is
HTML.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape

from lm_pcfg.inference.drawing.trees import PAGE_END, page_begin, shown

STYLE = """
:root { --cool: #56b4e9; --warm: 213, 94, 0; --card: #f6f6f4; } /* behind text, so light in light, dark in dark */
@media (prefers-color-scheme: dark) { :root { --cool: #00629b; --warm: 230, 120, 20; --card: #222; } }
* { box-sizing: border-box; }
h1 { font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.5rem 0 .4rem; }
h4 { font-size: 1rem; margin: 1rem 0 .3rem; }
h2, h3, h4, p, li, dd, td, th { overflow-wrap: anywhere; }
p { margin: .4rem 0; }
a { color: inherit; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .6rem 0; }
.faint { color: var(--faint); }
.missing { background: var(--card); border-left: 3px solid var(--faint); padding: .4rem .8rem; }
.scroll { overflow-x: auto; max-width: 100%; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr)); gap: .5rem 1.5rem; }
.grid h3 { margin: .4rem 0; }
ul.plain { list-style: none; padding: 0; margin: .4rem 0; }
details { border-top: 1px solid var(--line); padding: .4rem 0; }
summary { cursor: pointer; overflow-wrap: anywhere; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; border-top: 1px solid var(--line); }
thead th { border-top: 0; font-weight: normal; color: var(--faint); }
dl { columns: 22rem; column-gap: 2rem; margin: .4rem 0; }
dl div { display: flex; justify-content: space-between; gap: 1rem; break-inside: avoid; padding: .1rem 0; }
dt { color: var(--faint); overflow-wrap: anywhere; }
dd { margin: 0; text-align: right; min-width: 0; }
@media (max-width: 40rem) { /* a phone: a row of figures is a block of lines */
  body { margin: 1rem auto; }
  .cards thead { display: none; }
  .cards, .cards tbody, .cards tr { display: block; }
  .cards tr { padding: .4rem 0; border-top: 1px solid var(--line); }
  .cards th, .cards td { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: .1rem 0; }
  .cards td::before { content: attr(data-name); color: var(--faint); }
}
"""


def page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Return a whole page. body: HTML; script: the page's own, which may speak with the server that sent the page."""
    allowed = ["default-src 'none'", "style-src 'unsafe-inline'", "img-src data:"]
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        allowed += [f"script-src 'sha256-{digest}'", "connect-src 'self'"]
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(allowed)}">\n'
        '<link rel="icon" href="data:,">\n'  # no browser asks the server for one
    )
    ending = f"<script>{script}</script>\n" if script else ""
    return f"{page_begin(title, STYLE + style, head)}{body}\n{ending}{PAGE_END}"


def text(content: object) -> str:
    """Any content as text: what a browser would obey is escaped, what would turn or break the line is left out."""
    written = str(content)
    return escape(shown(written)) if written else ""


def section(name: str, title: str, body: str) -> str:
    """A chapter of a page, which links find by its name."""
    return f'<section id="{name}">\n<h2>{text(title)}</h2>\n{body}\n</section>\n'


def part(title: str, body: str, level: int = 3) -> str:
    return f"<h{level}>{text(title)}</h{level}>\n{body}\n"


def paragraph(content: str, kind: str = "") -> str:
    return f'<p class="{kind}">{text(content)}</p>\n' if kind else f"<p>{text(content)}</p>\n"


def missing(reason: str) -> str:
    """Say what is not there, and why."""
    return paragraph(reason, "missing")


def details(title: str, body: str, is_open: bool = False) -> str:
    """What is shown after a click on its title."""
    return f"<details{' open' * is_open}><summary>{text(title)}</summary>\n{body}\n</details>\n"


def scrolling(picture: str) -> str:
    """A picture that may be wider than the screen."""
    return f'<div class="scroll">{picture}</div>\n'


def pairs(facts: Mapping[str, object]) -> str:
    """Names and values, in as many columns as fit."""
    rows = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>\n" for name, value in facts.items())
    return f"<dl>\n{rows}</dl>\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, cards: bool = False) -> str:
    """A table; the first cell of a row is its name. cards: on a phone a row becomes a block of lines."""
    head = "".join(f"<th>{text(column)}</th>" for column in columns)
    body = []
    for name, *values in rows:
        cells = [
            f'<td data-name="{text(column)}">{text(value)}</td>'
            for column, value in zip(columns[1:], values, strict=True)
        ]
        body.append(f"<tr><th>{text(name)}</th>{''.join(cells)}</tr>\n")
    kind = ' class="cards"' if cards else ""
    whole = f"<table{kind}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{''.join(body)}</tbody>\n</table>\n"
    return whole if cards else scrolling(whole)
