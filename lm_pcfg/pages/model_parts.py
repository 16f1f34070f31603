"""What a trained model shows in a page: samples, trees, posteriors of spans, surprisals, symbols.

Not every family can do all of it. What one cannot is told in its place, in the words of the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from lm_pcfg.corpus.shards.files import is_json, is_parquet
from lm_pcfg.corpus.text import display_name, read_lines, resolve_source
from lm_pcfg.corpus.unknown import literals
from lm_pcfg.errors import UserError
from lm_pcfg.inference.drawing.symbol_tables import STYLE as SYMBOLS_STYLE
from lm_pcfg.inference.drawing.symbol_tables import symbols_html
from lm_pcfg.inference.drawing.trees import TREES_STYLE, picture
from lm_pcfg.inference.lines import unit_of
from lm_pcfg.inference.model import Model
from lm_pcfg.inference.sample import Drawn, counted
from lm_pcfg.pages import heat_map as heat_maps
from lm_pcfg.pages import surprisals
from lm_pcfg.pages.heat_map import heat_map
from lm_pcfg.pages.shell import details, missing, paragraph, part, scrolling, text
from lm_pcfg.pages.surprisals import surprisal_strip

FALLBACK_TEXT = "embedded:valid"
LINES_READ = 5000  # of a text, to find some worth showing
FEWEST_WORDS, MOST_WORDS = 3, 30  # of such a line, if there are enough
SENTENCE_WORDS = range(6, 15)  # of the one sentence that is shown in detail
LONGEST_SAMPLE = 100
OPEN_TREES = 3  # whose pictures are shown before a click
SYMBOLS, CHOICES = 15, 8  # of each kind; words or children of each
STYLE = TREES_STYLE + SYMBOLS_STYLE + heat_maps.STYLE + surprisals.STYLE


class Text(NamedTuple):
    """The lines of a text that are shown."""

    name: str
    lines: list[str]
    note: str = ""  # why it is this one


class Wanted(NamedTuple):
    """How much of it."""

    trees: int = 10
    samples: int = 10
    sentence: str | None = None  # None: one of the text


# ---- the text -------------------------------------------------------------------------------------------------------


def read_text(source: str, most: int) -> Text:
    """Read the first lines of a text that are neither very short nor very long; if there are too few, others too."""
    if is_json(Path(source)) or is_parquet(Path(source)):
        raise UserError(f"{source}: the page shows text, one sentence a line")
    lines = [line for _, line in islice(read_lines(resolve_source(source), name=display_name(source)), LINES_READ)]
    lengths = [len(line.split()) for line in lines]
    fitting = [number for number, length in enumerate(lengths) if FEWEST_WORDS <= length <= MOST_WORDS]
    if len(fitting) < most:
        fitting = [number for number, length in enumerate(lengths) if 1 <= length <= heat_maps.MOST_WORDS]
    if not fitting:
        limit = heat_maps.MOST_WORDS
        raise UserError(f"{display_name(source)}: no line of 1 to {limit} words; give another text with --text")
    return Text(display_name(source), [lines[number] for number in fitting[:most]])


def own_text(model: Model, most: int) -> Text:
    """Take the validation text of the model's run; if it cannot be read, the embedded corpus."""
    valid = model.grammars[0].settings.data.valid
    why = "The run has no validation text"
    if valid is not None:
        try:
            return read_text(valid, most)
        except (UserError, OSError) as error:
            why = f"The validation text of the run cannot be shown ({error})"
    return read_text(FALLBACK_TEXT, most)._replace(note=f"{why}: this is the embedded corpus; --text shows another.")


# ---- the parts ------------------------------------------------------------------------------------------------------


def model_parts(model: Model, shown: Text, wanted: Wanted, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the title and the HTML of each part, for a page with STYLE. prefix: of the ids of the model's symbols."""
    lines, sentence = shown.lines[: max(wanted.trees, 1)], wanted.sentence or _one_of(shown.lines)
    makers: dict[str, Callable[[], str]] = {
        "Sampled sentences": lambda: samples_part(model, wanted.samples),
        "One sentence: its tree and the posteriors of its spans": lambda: sentence_part(model, sentence),
        f"Trees of {shown.name}": lambda: trees_part(model, lines[: wanted.trees]),
        f"Surprisals of {shown.name}": lambda: surprisals_part(model, list(dict.fromkeys([sentence, *lines]))),
        "What the symbols mean": lambda: "".join(
            symbols_html(model.symbols(most=CHOICES, listed=SYMBOLS), heading="h4", prefix=prefix)
        ),
    }
    for title, make in makers.items():
        try:
            yield title, make()
        except UserError as error:
            yield title, not_shown(model, error)


def public_name(checkpoint: Path) -> str:
    """The name of the run and of its checkpoint, or of the exported folder; never the path to it."""
    if checkpoint.parent.name == "checkpoints":
        return f"{checkpoint.absolute().parents[1].name}, {checkpoint.name}"
    return checkpoint.name


def without_paths(model: Model, message: str) -> str:
    """A message for others, who need not know where the model lies."""
    for one in model.grammars:
        message = message.replace(str(one.checkpoint), public_name(one.checkpoint))
    return message


def not_shown(model: Model, error: UserError) -> str:
    """Say why something is missing on a page."""
    return missing(f"Not shown: {without_paths(model, str(error))}.")


def unknown_note(model: Model, lines: Sequence[str]) -> str:
    """How many words of the lines the vocabulary does not have."""
    vocabulary = model.vocabulary
    ids = [word for line in vocabulary.tokenise(list(lines)) for word in line]
    unknown = ids.count(vocabulary.unknown_id) - sum(literals(line, vocabulary) for line in lines)
    if not unknown:
        return ""
    every = counted(len(ids), unit_of(vocabulary))
    return f"The vocabulary does not have {unknown:,} of the {every} shown ({unknown / len(ids):.0%})."


def samples_part(model: Model, number: int) -> str:
    drawn = Drawn()
    entries = [
        f"<li><bdi>{text(sample.text)}</bdi></li>\n"
        for sample in model.draw(number, seed=0, max_length=LONGEST_SAMPLE, drawn=drawn)
    ]
    message = drawn.message(LONGEST_SAMPLE, unit_of(model.vocabulary))
    return f"<ol>\n{''.join(entries)}</ol>\n" + (paragraph(message, "faint") if message else "")


def sentence_part(model: Model, sentence: str) -> str:
    """Draw the most probable tree with its symbols, and the posteriors, with the tree that they elect."""
    words = sentence.split()
    elected = model.parse([sentence])[0]
    if not elected.words:
        raise UserError(f"the grammar gives probability 0 to: {sentence}")
    try:
        drawn = paragraph("With the symbols of the grammar.") + scrolling(
            picture(model.parse([sentence], "viterbi")[0])
        )
    except UserError as error:
        drawn = not_shown(model, error)
    parts = [part("The most probable tree", drawn, level=4)]
    if len(words) > heat_maps.MOST_WORDS:
        most = f"a sentence of {heat_maps.MOST_WORDS} at most has a heat map"
        parts.append(
            part("Posteriors of spans", missing(f"Not shown: {counted(len(words), 'words')}; {most}."), level=4)
        )
    elif len(words) > 1:
        spans = {(first, end) for first, end, _ in elected.nodes}
        about = (
            "Each cell is a span of words, longer ones higher up; its figure is the probability, in percent, that the "
            "span is a phrase, over all trees. The cells with an edge are the phrases of the tree that has the most "
            "right spans in expectation, the one that lm_pcfg parse prints."
        )
        table = model.marginals([sentence])[0].tolist()
        drawn = scrolling(heat_map(words, table, spans))
        parts.append(part("Posteriors of spans", paragraph(about) + drawn, level=4))
    return "".join(parts)


def trees_part(model: Model, lines: Sequence[str]) -> str:
    entries = []
    for number, (line, tree) in enumerate(zip(lines, model.parse(lines), strict=True)):
        drawn = scrolling(picture(tree)) if tree.words else missing("It has no tree: its probability is 0.")
        entries.append(details(line, drawn, is_open=number < OPEN_TREES))
    return "".join(entries)


def surprisals_part(model: Model, lines: Sequence[str]) -> str:
    about = "How surprising each word is after those before it: -log2 of its probability, in bits."
    entries = [paragraph(about)]
    for line, found in zip(lines, model.surprisal(lines), strict=True):
        if found is None:
            entries.append(missing(f"The words of this line cannot be told apart: {line}"))
        else:
            entries.append(surprisal_strip(found.words, found.bits.tolist(), found.end))
    return "".join(entries)


def _one_of(lines: Sequence[str]) -> str:
    """A line that fits a screen."""
    return next((line for line in lines if len(line.split()) in SENTENCE_WORDS), lines[0])
