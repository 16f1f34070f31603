"""The page of `lm_pcfg report --html`: runs side by side, and what each of their models has learned, in one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version

from lm_pcfg.bench import plot
from lm_pcfg.errors import UserError
from lm_pcfg.inference import report as reports
from lm_pcfg.inference.comparison import incomparable, incomparable_losses
from lm_pcfg.inference.model import load_model
from lm_pcfg.inference.report import Run
from lm_pcfg.pages import model_parts, run_facts
from lm_pcfg.pages.model_parts import Text, Wanted
from lm_pcfg.pages.shell import details, missing, page, paragraph, part, section, table, text

STYLE = (
    plot.PAGE_STYLE
    + model_parts.STYLE
    + """
.legend svg { width: 1.6rem; height: .6rem; margin-right: .5rem; }
table.symbols { width: 100%; }
"""
)
PARTS_OF_A_MODEL = 6  # with loading it


def report_page(
    runs: Sequence[Run], *, source: str | None = None, wanted: Wanted | None = None, device: str = "auto",
    reach: float | None = None, on_part: Callable[[int], None] = lambda parts: None,
) -> str:  # fmt: skip
    """Return the page. source: the text to show; None: the validation text of each run."""
    wanted = wanted or Wanted()
    given = model_parts.read_text(source, max(wanted.trees, 1)) if source is not None else None
    chapters = {
        "figures": ("Figures", _figures(runs, reach)),
        "curves": ("Learning curves", _curves(runs)),
        "settings": ("Settings", run_facts.settings_part(runs)),
        "environment": ("Environment", _environments(runs)),
    }
    for number, run in enumerate(runs):
        title = f"The model of {run.name}" if len(runs) > 1 else "The model"
        chapters[f"model{number}"] = (title, _model(run, given, wanted, device, f"m{number}-", on_part))
    links = "".join(f'<a href="#{name}">{text(title)}</a>' for name, (title, _) in chapters.items())
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    body = [paragraph(f"Made by lm_pcfg {version('lm_pcfg')}, {when}.", "faint"), f"<nav>{links}</nav>\n"]
    body += [section(name, title, content) for name, (title, content) in chapters.items()]
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    return page(title, "".join(body), style=STYLE)


def _figures(runs: Sequence[Run], reach: float | None) -> str:
    lines = [reports.summary(run, reach) for run in runs]
    columns, rows = reports.cells(lines)
    notes = [*reports.failures(lines), *incomparable(runs), *incomparable_losses(runs)]
    return "".join(map(missing, notes)) + table(columns, rows, cards=True)


def _curves(runs: Sequence[Run]) -> str:
    pictures = plot.page_panels(runs)
    if not pictures:
        return missing("There are no metrics yet.")
    legend = "".join(
        f'<li><svg viewBox="0 0 24 8"><path d="M0 4H24" stroke="{plot.run_colour(number)}" stroke-width="4"/></svg>'
        f"{text(plot.run_label(run))}</li>\n"
        for number, run in enumerate(runs)
    )
    unit = run_facts.loss_unit(runs)
    titles = {"Training loss": f"Training loss, {unit}"} if unit else {}
    panels = "".join(f"<div>{part(titles.get(title, title), drawn)}</div>\n" for title, drawn in pictures.items())
    about = "Perplexity: validation (solid) and training (dashed)."
    return f'<ul class="plain legend">\n{legend}</ul>\n{paragraph(about, "faint")}<div class="grid">\n{panels}</div>\n'


def _environments(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return run_facts.environment_part(runs[0])
    return "".join(details(run.name, run_facts.environment_part(run)) for run in runs)


def _model(
    run: Run, given: Text | None, wanted: Wanted, device: str, prefix: str, on_part: Callable[[int], None]
) -> str:
    """What the best checkpoint of a run shows; if none can be loaded, why: the rest of the page stays."""
    try:
        model = load_model([run.folder], device=device, prepare=True)
        shown = given or model_parts.own_text(model, max(wanted.trees, 1))
    except UserError as error:
        on_part(PARTS_OF_A_MODEL)
        return missing(f"No samples, trees, surprisals or symbols: {error}.")
    on_part(1)
    best = model.grammars[0]
    parts = [paragraph(f"Checkpoint {best.checkpoint.name}, {best.weights} weights, {best.parameters:,} parameters.")]
    notes = [shown.note, model_parts.unknown_note(model, shown.lines)]
    parts += [paragraph(note, "missing") for note in notes if note]
    for title, content in model_parts.model_parts(model, shown, wanted, prefix):
        parts.append(part(title, content))
        on_part(1)
    return "".join(parts)
