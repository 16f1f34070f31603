"""What is known of runs apart from their curves: their settings, and what they ran on.

Everything is read from the run folders as it stands there, so that runs of other versions, and damaged ones, are shown.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from lm_pcfg.errors import UserError
from lm_pcfg.inference.report import Run
from lm_pcfg.pages.shell import details, missing, pairs, paragraph, part, table
from lm_pcfg.settings import Section
from lm_pcfg.settings_file import settings_class
from lm_pcfg.storage.durable import read_file
from lm_pcfg.training.documents import flat

LARGEST = 1 << 20  # bytes of a file that is read here
NAMES_OF_THE_RUN = ("name", "resume")  # settings that say nothing about its results
NOT_THERE = "-"

Facts = dict[str, Any]


def read_settings(run: Run) -> Facts:
    """The settings of a run by their dotted names; UserError if they are unknown."""
    if run.config_problem:
        raise UserError(run.config_problem)
    return flat(run.config)


def read_object(run: Run, name: str) -> Facts | None:
    """A JSON file of the run; None if it has none, or none that can be read."""
    try:
        content = json.loads(read_file(run.folder / name, LARGEST))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


# ---- settings -------------------------------------------------------------------------------------------------------


def settings_part(runs: Sequence[Run]) -> str:
    """What was chosen, where runs differ, and all settings behind a click."""
    known: dict[str, Facts] = {}
    parts = []
    for run in runs:
        try:
            known[run.name] = read_settings(run)
        except UserError as error:
            parts.append(missing(f"Settings of {run.name}: {error}."))
    if len(known) > 1:
        parts.append(part("Where they differ", differences(known)))
    for name, settings in known.items():
        chosen = {key: value for key, value in settings.items() if key not in NAMES_OF_THE_RUN}
        defaults = _defaults_of(settings)
        if defaults is not None:
            chosen = {key: v for key, v in chosen.items() if key not in defaults or _shown(defaults[key]) != _shown(v)}
        title = f"Settings of {name} that are not the default" if defaults is not None else f"Settings of {name}"
        parts.append(details(title, pairs(_all_shown(chosen)), is_open=len(known) == 1))
        parts.append(details(f"All {len(settings)} settings of {name}", pairs(_all_shown(settings))))
    return "".join(parts)


def differences(settings: dict[str, Facts]) -> str:
    """A table of the settings that are not the same in all runs."""
    keys = dict.fromkeys(key for facts in settings.values() for key in facts if key not in NAMES_OF_THE_RUN)
    rows = []
    for key in keys:
        values = [_shown(facts[key]) if key in facts else NOT_THERE for facts in settings.values()]
        if len(set(values)) > 1:
            rows.append([key, *values])
    if not rows:
        return paragraph("Their settings are the same.")
    return table(["setting", *settings], rows, cards=True)


def _defaults_of(settings: Facts) -> Facts | None:
    """The defaults of a model of this family; None if there is no such family here."""
    try:
        return flat(_section_defaults(settings_class(str(settings.get("model.family")))))
    except (UserError, KeyError, ImportError):
        return None


def _section_defaults(kind: type[Section]) -> Facts:
    """All settings of a section that have a default."""
    found: Facts = {}
    for name, field in kind.model_fields.items():
        if not field.is_required():
            value = field.get_default(call_default_factory=True)
            found[name] = value.model_dump(mode="json") if isinstance(value, Section) else value
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found[name] = _section_defaults(field.annotation)
    return found


def _all_shown(settings: Facts) -> dict[str, str]:
    return {name: _shown(value) for name, value in settings.items()}


def _shown(value: Any) -> str:
    """A setting as one writes it in a config."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


# ---- environment ----------------------------------------------------------------------------------------------------


def environment_part(run: Run) -> str:
    """What the run ran on, from its environment.json and the state of its newest checkpoint."""
    facts = environment_facts(run)
    if not facts:
        return missing("Nothing is recorded: the folder has no environment.json that can be read.")
    return pairs(facts)


def environment_facts(run: Run) -> dict[str, str]:
    found = read_object(run, "environment.json") or {}
    facts: dict[str, str] = {}
    for name, value in found.items():
        if name == "packages" and isinstance(value, dict):
            facts |= {str(package): str(version) for package, version in value.items() if version}
        elif name == "command" and isinstance(value, list):
            facts[name] = shlex.join(map(str, value))
        elif name == "gpus" and isinstance(value, list):
            facts[name] = ", ".join(map(str, value)) or "none"
        elif value is not None:
            facts[name.replace("_", " ")] = _shown(value)
    if (state := read_object(run, "best/state.json")) is not None:
        for name in ("engine", "world_size"):
            if name in state:
                facts[name.replace("_", " ")] = _shown(state[name])
    return facts


def loss_unit(runs: Sequence[Run]) -> str:
    """What the loss is counted in; "" where runs differ or do not tell."""
    units = {str(run.settings.get("loss", {}).get("normalise")) for run in runs}
    return {"sentences": "nats a sentence", "tokens": "nats a token"}.get(units.pop(), "") if len(units) == 1 else ""
