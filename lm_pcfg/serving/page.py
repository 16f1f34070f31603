"""The pages of the service: one to type a sentence into, and one that lists the API. They need no network."""

from __future__ import annotations

import json
import math
from html import escape
from importlib.resources import files
from typing import Any

from lm_pcfg.errors import UserError
from lm_pcfg.inference.drawing.trees import PAGE_END, as_svg, page_begin, shown
from lm_pcfg.serving.answers import AnalyseRequest, Answers, alternatives

STYLE = """
form { display: flex; gap: 0.5em; flex-wrap: wrap; } input { flex: 1 1 16em; font: inherit; padding: 0.4em; }
button { font: inherit; padding: 0.4em 1em; } figure { margin: 1em 0; overflow-x: auto; }
"""


def script() -> str:
    return (files("lm_pcfg.serving") / "page.js").read_text()


def first_page(about: dict[str, Any]) -> str:
    """The page where one types a sentence and sees what the model makes of it."""
    models = ", ".join(f"{one['checkpoint']} ({one['family']})" for one in about["models"])
    limit = f"at most {about['limits']['words']:,} {about['unit']}"
    return (
        page_begin("lm_pcfg", STYLE)
        + f"<p>{escape(shown(models))}, {about['vocabulary']:,} {about['unit']} in the vocabulary. <a href='docs'>API</a></p>"
        f'<form><input aria-label="a sentence, {limit}" placeholder="a sentence, {limit}" autofocus>'
        '<button>Analyse</button></form><p id="said" role="status"></p><div id="found"></div>'
        f'<script src="page.js"></script>\n{PAGE_END}'
    )


def analysis(answers: Answers, asked: AnalyseRequest) -> dict[str, Any]:
    """Draw what the model says of a line: {"html": ..., "log_probability": ...}.

    What the family of the model cannot tell is one line in its place.
    """
    line, model = asked.line, answers.model
    answers.check([line])
    if not line.split():
        raise UserError("a line without words has nothing to show")
    (log_p,) = model.score([line]).tolist()
    parts = [f"<p>log p = {log_p:.4f}</p>" if math.isfinite(log_p) else "<p>The grammar cannot generate this.</p>"]
    return {"html": "".join(parts), "log_probability": log_p if math.isfinite(log_p) else None}


def api_page(schema: dict[str, Any]) -> str:
    """List the routes with their requests, from the OpenAPI schema."""
    parts = [page_begin("lm_pcfg: API"), "<p>The same for programmes: <a href='openapi.json'>openapi.json</a></p>"]
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            parts.append(f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(route.get('description', ''))}</p>")
            if "requestBody" in route:
                reference = route["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                request = schema["components"]["schemas"][reference.rpartition("/")[2]]
                shape = {"properties": request["properties"], "required": request.get("required", [])}
                parts.append(f"<pre>{escape(json.dumps(shape, indent=2))}</pre>")
    return "".join([*parts, PAGE_END])
