"""The pages of the service: one to type a sentence into, and one that lists the API. They need no network."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from lm_pcfg.errors import UserError
from lm_pcfg.inference.drawing.trees import picture
from lm_pcfg.inference.model import Model
from lm_pcfg.pages import model_parts, shell
from lm_pcfg.serving.answers import AnalyseRequest, Answers, alternatives, finite

STYLE = """
form { display: flex; gap: .5rem; flex-wrap: wrap; margin: 1rem 0; }
input { flex: 1 1 16rem; font: inherit; padding: .4rem; min-width: 0; } button { font: inherit; padding: .4rem 1rem; }
pre { overflow-x: auto; background: var(--card); padding: .6rem; }
"""


def first_page(about: dict[str, Any]) -> str:
    """The page where one types a sentence and sees what the model makes of it."""
    models = ", ".join(f"{one['checkpoint']} ({one['family']})" for one in about["models"])
    unit, limit = about["unit"], f"a sentence of at most {about['limits']['words']:,} {about['unit']}"
    body = (
        shell.paragraph(f"{models}, with a vocabulary of {about['vocabulary']:,} {unit}.", "faint")
        + f'<form><input aria-label="{limit}" placeholder="{limit}" autocomplete="off" autofocus>'
        '<button>Analyse</button></form>\n<p id="said" role="status"></p>\n<div id="found"></div>\n'
        '<p><a href="docs">For programmes</a></p>\n'
    )
    script = (files("lm_pcfg.serving") / "page.js").read_text("utf-8")
    return shell.page("lm_pcfg", body, style=model_parts.STYLE + STYLE, script=script)


def analysis(answers: Answers, asked: AnalyseRequest) -> dict[str, Any]:
    """Draw what the model says of a line; what the model's family cannot tell is one line in its place."""
    line, model = " ".join(asked.line.split()), answers.model
    answers.check([line])
    if not line:
        raise UserError("there are no words to look at: type a sentence")
    (log_p,) = model.score([line]).tolist()
    about = "is at least about" if model.is_bound else "is"
    summary = f"The natural logarithm of its probability {about} {log_p:.3f}. "
    if not math.isfinite(log_p):
        summary = "The grammar cannot generate this sentence. "
    makers: dict[str, Callable[[], str]] = {
        "Tree and posteriors": lambda: model_parts.sentence_part(model, line),
        "Other trees": lambda: _alternatives(model, line),
        "Surprisals": lambda: model_parts.surprisals_part(model, [line]),
    }
    parts = [shell.paragraph(summary + model_parts.unknown_note(model, [line]))]
    for title, make in makers.items():
        try:
            body = make()
        except UserError as error:
            body = model_parts.not_shown(model, error)
        parts.append(shell.part(title, body, level=2))
    return {"html": "".join(parts), "log_probability": finite(log_p)}


def _alternatives(model: Model, line: str) -> str:
    """Draw the shapes of trees that have the largest shares of the probability."""
    about = "Shapes of trees, and their shares of 200 trees that were drawn from those of the sentence."
    found = alternatives(model, line)
    drawn = [
        shell.details(f"{share:.0%}", shell.scrolling(picture(tree)), is_open=number < 2)
        for number, (share, tree) in enumerate(found)
    ]
    return shell.paragraph(about) + "".join(drawn)


def api_page(schema: dict[str, Any]) -> str:
    """List the routes with their requests, from the OpenAPI schema."""
    parts = ['<p>Requests and answers are JSON. The same for programmes: <a href="openapi.json">openapi.json</a></p>\n']
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            body = shell.paragraph(route.get("description", ""))
            if "requestBody" in route:
                reference = route["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                request = schema["components"]["schemas"][reference.rpartition("/")[2]]
                shape = {"properties": request["properties"], "required": request.get("required", [])}
                body += f"<pre>{shell.text(json.dumps(shape, indent=2))}</pre>\n"
            parts.append(shell.part(f"{method.upper()} {path}", body, level=2))
    return shell.page("lm_pcfg: the API", "".join(parts), style=STYLE)
