"""Settings from and to YAML files, with `dotted.key=value` overrides, and messages that help."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError as PydanticError
from pydantic import create_model
from pydantic.fields import FieldInfo

from lm_pcfg.console import say, warn
from lm_pcfg.errors import SettingsError
from lm_pcfg.grammar import families
from lm_pcfg.settings import ModelSection, Section, Settings, run_name, setting
from lm_pcfg.yaml_text import format_yaml, parse_yaml, read_yaml


def dump_yaml(settings: Settings) -> str:
    """All settings, defaults included, in the order of their definition; `load_settings` reads them back the same."""
    return format_yaml(settings.model_dump(mode="json"))


# ---- loading --------------------------------------------------------------------------------------------------------


def find_config(path: Path) -> Path:
    """Return the path, or for `configs/...` that is not here the file that came with the package: it says so."""
    if path.exists() or path.is_absolute() or path.parts[:1] != ("configs",) or ".." in path.parts:
        return path
    package = Path(__file__).resolve().parent
    for folder in (package, package.parent):  # of an installation, of a clone
        if (folder / path).is_file():
            if os.environ.get("RANK", "0") == "0":
                say(f"{path} is not here: the one of the package is used")
            return folder / path
    return path


def load_settings(path: Path, overrides: list[str] | None = None) -> Settings:
    """The settings of a YAML file with `dotted.key=value` overrides, whose values are YAML too."""
    path = find_config(Path(path))
    given = read_yaml(path)
    if isinstance(given, dict):
        _upgrade(given, str(path))
    family = _family(given, overrides or [], str(path))
    kind = settings_class(family)
    values = _checked_section(given, kind, [], str(path))
    overridden = [_apply_override(values, kind, override) for override in overrides or []]
    values["model"]["family"] = family
    if values.get("name") is None:
        values["name"] = run_name(path.stem) or "run"
    try:
        return kind.model_validate(values)
    except PydanticError as error:
        raise SettingsError(_first_problem(error, kind, values, path, overridden)) from None


def settings_class(family: str) -> type[Settings]:
    """Return the settings of runs whose model is of this family."""
    return _with_model(families.section_of(family))


@cache
def _with_model(section: type[ModelSection]) -> type[Settings]:
    return create_model("Settings", __base__=Settings, model=(section, setting(..., "the grammar")))


def _family(given: Any, overrides: list[str], where: str) -> str:
    """Find model.family before the other settings are checked, since they depend on it.

    Where the command line chooses another family than the file, what the file says of its networks is taken out.
    """
    model = given.get("model") if isinstance(given, dict) else None
    model = model if isinstance(model, dict) else {}
    in_file = family = model.get("family", DEFAULT_FAMILY)
    for override in overrides:
        key, _, text = override.strip().partition("=")
        if key not in ("model", "model.family", "model.parameterization"):
            continue
        value, where = parse_yaml(text, f"command line: {key}"), "command line"
        if key == "model.family":
            family = value
        elif key == "model" and isinstance(value, dict):
            _upgrade({"model": value}, where)
            family = value.get("family", DEFAULT_FAMILY)
        elif key == "model.parameterization" and (value == "tables" or family == "tables"):
            family = "tables" if value == "tables" else DEFAULT_FAMILY
    if family not in families.names():
        raise SettingsError(f"{where}: model.family = {family!r} should be one of {', '.join(families.names())}")
    if family != in_file and in_file in families.names():
        own = families.section_of(family).model_fields
        for key in ("parameterization", "dimension"):
            choices = get_args(own[key].annotation) if key in own else ()
            if key in model and (key not in own or (choices and model[key] not in choices)):
                del model[key]
        _drop_defaults_of_others(model, family)
    return family


# ---- what earlier versions wrote ------------------------------------------------------------------------------------

DEFAULT_FAMILY: str = ModelSection.model_fields["family"].default
#: Settings that were removed, and the defaults they had. The last commit that has them is 828ad98.
REMOVED: dict[str, Any] = {
    "model.word_dimension": None, "model.spelling": None, "model.emission_smoothing": 0.0, "model.word_bias": "none",
    "model.embedding_dropout": 0.0, "model.rule_dropout": 0.0, "optimizer.network_rate": 1.0,
    "tracking.wait_seconds": 20.0, "optimizer.schedule.final_fraction": 0.0, "optimizer.max_skipped_in_a_row": 20,
    "optimizer.eps": 1e-8,
}  # fmt: skip
#: Removed, too, but they change no result: any value is dropped with a word on what is in their place.
WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "tracking.experiment": ("lm_pcfg", "the environment variable MLFLOW_EXPERIMENT_NAME"),
}


def _upgrade(given: dict[str, Any], where: str) -> None:
    """Translate what earlier versions wrote, in place, so that every run folder opens.

    Removed settings are taken out if they have their old defaults, and refused otherwise. `parameterization: tables` is
    the older name of `family: tables`. Then all families had the same settings: those of others are taken out, too.
    """
    removed = []
    for dotted in (*REMOVED, *WITHOUT_EFFECT):
        *above, key = dotted.split(".")
        section: Any = given
        for name in above:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and key in section:
            _refuse_removed(dotted, section.pop(key), where)
            removed += [dotted] * (dotted in REMOVED)
    model = given.get("model")
    if not isinstance(model, dict):
        return
    tables = model.get("parameterization") == "tables"
    if tables:
        if model.get("family", "tables") != "tables":
            raise SettingsError(f"{where}: parameterization: tables contradicts family: {model['family']}; remove one")
        del model["parameterization"]
        model.pop("dimension", None)  # it was allowed, and of no effect
        model["family"] = "tables"
    if (removed or tables) and model.get("family", DEFAULT_FAMILY) in families.names():
        _drop_defaults_of_others(model, model.get("family", DEFAULT_FAMILY))


def _drop_defaults_of_others(model: dict[str, Any], family: str) -> None:
    """Take out settings of other families that have their defaults."""
    own = families.section_of(family).model_fields
    for key in [key for key in model if key not in own and _is_default_of_another(key, model[key])]:
        del model[key]


def _is_default_of_another(key: str, value: Any) -> bool:
    sections = [families.section_of(name).model_fields for name in families.names()]
    return value in [fields[key].default for fields in sections if key in fields]


def _refuse_removed(dotted: str, value: Any, where: str) -> None:
    if dotted in WITHOUT_EFFECT:
        default, instead = WITHOUT_EFFECT[dotted]
        if value != default:
            warn(f"{where}: {dotted} = {reprlib.repr(value)} is no longer a setting; use {instead}")
        return
    if value != REMOVED[dotted]:
        raise SettingsError(
            f"{where}: {dotted} = {reprlib.repr(value)} is no longer supported; leave it out, or use commit 828ad98"
        )


# ---- sections and overrides -----------------------------------------------------------------------------------------


def _checked_section(
    value: Any, kind: type[Section], keys: list[str], where: str, settings: type[Section] | None = None
) -> dict[str, Any]:
    """The section's values with known keys only and with every section in it, so that missing keys have full names."""
    value = {} if value is None else value  # nothing after the colon
    if not isinstance(value, dict):
        what, first = ".".join(keys) or "the file", next(iter(kind.model_fields))
        raise SettingsError(f"{where}: {what} = {reprlib.repr(value)} should be a section with keys such as {first!r}")
    for key in value:
        if key not in kind.model_fields:
            raise SettingsError(f"{where}: {_unknown_key([*keys, str(key)], kind, settings or kind)}")
    result = dict(value)
    for key, field in kind.model_fields.items():
        if child := _section_of(field):
            result[key] = _checked_section(value.get(key), child, [*keys, key], where, settings or kind)
    return result


def _apply_override(values: dict[str, Any], settings: type[Settings], override: str) -> str:
    """Sets one `dotted.key=value` in values, and returns the key."""
    where = "command line"
    dotted, equals, text = override.strip().partition("=")
    if not equals or not dotted:
        raise SettingsError(f"{where}: {override!r} should be of the form dotted.key=value")
    if dotted in REMOVED or dotted in WITHOUT_EFFECT:
        _refuse_removed(dotted, parse_yaml(text, f"{where}: {dotted}"), where)
        return dotted
    # A lone - would be a list of nothing; it means standard input.
    value = "-" if text.strip() == "-" else parse_yaml(text, f"{where}: {dotted}")
    if (dotted, value) == ("model.parameterization", "tables"):
        return dotted  # that is a family, which is known by now
    if isinstance(value, dict):
        _upgrade({dotted: value}, where)
    *above, last = keys = dotted.split(".")
    kind: type[Section] = settings
    place = values
    for depth, key in enumerate(above):
        child = _section_of(kind.model_fields.get(key))
        if child is None:
            raise SettingsError(f"{where}: {_unknown_key(keys[: depth + 1], kind, settings)}")
        kind, place = child, place[key]
    if last not in kind.model_fields:
        if issubclass(kind, ModelSection) and _is_default_of_another(last, value):
            return dotted
        raise SettingsError(f"{where}: {_unknown_key(keys, kind, settings)}")
    section = _section_of(kind.model_fields[last])
    place[last] = _checked_section(value, section, keys, where, settings) if section else value
    return dotted


def _section_of(field: FieldInfo | None) -> type[Section] | None:
    kind = field.annotation if field else None
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _all_keys(kind: type[Section], prefix: str = "") -> Iterator[str]:
    for key, field in kind.model_fields.items():
        yield prefix + key
        if child := _section_of(field):
            yield from _all_keys(child, f"{prefix}{key}.")


def setting_keys() -> list[str]:
    """Return the dotted keys of all settings, with the models of all families."""
    kinds = [settings_class(family) for family in families.names()]
    return list(dict.fromkeys(key for kind in kinds for key in _all_keys(kind) if not _is_section(kind, key)))


def _is_section(kind: type[Section], dotted: str) -> bool:
    first, _, rest = dotted.partition(".")
    section = _section_of(kind.model_fields[first])
    return section is not None and (not rest or _is_section(section, rest))


#: What settings are called elsewhere.
_ALSO_CALLED = {
    "lr": "optimizer.learning_rate", "rate": "optimizer.learning_rate", "optim": "optimizer.name",
    "warmup": "optimizer.schedule.warmup_steps", "scheduler": "optimizer.schedule.kind", "grad_clip": "optimizer.clip",
    "max_grad_norm": "optimizer.clip", "wd": "optimizer.weight_decay", "beta": "optimizer.betas",
    "batch_size": "batch.sentences", "bs": "batch.sentences", "gradient_accumulation_steps": "batch.accumulate",
    "num_epochs": "training.epochs", "steps": "training.max_steps", "early_stopping": "evaluation.patience",
    "n": "model.nonterminals", "nt": "model.nonterminals", "symbols": "model.nonterminals", "p": "model.preterminals",
    "hidden": "model.dimension", "hidden_size": "model.dimension", "hidden_dim": "model.dimension",
    "dim": "model.dimension", "dropout": "model.state_dropout", "vocab_size": "data.vocabulary.size",
    "vocab": "data.vocabulary.size", "tokenizer": "data.sentencepiece", "num_workers": "data.workers",
    "output_dir": "runs_folder", "run_name": "name", "gpu": "device",
}  # fmt: skip
_MOST_LISTED = 8  # keys of a section, in an error


def _unknown_key(keys: list[str], kind: type[Section], settings: type[Section]) -> str:
    """Says what may have been meant: a similar key of this section, or the same key (else a similar one) elsewhere."""
    from difflib import get_close_matches  # 20 ms, for errors only

    *above, name = keys
    if name in kind.model_fields:
        return f"{'.'.join(keys)!r} is not a section: it has no keys"
    if issubclass(kind, ModelSection):
        ordered = sorted(families.names(), key=lambda family: family != DEFAULT_FAMILY)  # it is the first
        owners = [family for family in ordered if name in families.section_of(family).model_fields]
        if owners:
            return f"{'.'.join(keys)!r} belongs to family {' or '.join(owners)}, not to this model's; leave it out"
    paths: dict[str, list[str]] = {}  # last part of a key -> keys
    for key in _all_keys(settings):
        paths.setdefault(key.rsplit(".", 1)[-1], []).append(key)
    here = [".".join([*above, key]) for key in get_close_matches(name, kind.model_fields, n=1)]
    elsewhere = [key for key in paths.get(name, []) if key not in here]
    called = [key for key in _all_keys(settings) if key == _ALSO_CALLED.get(name.lower())]
    similar = [key for last in get_close_matches(name, paths, n=1) for key in paths[last]]
    meant = " or ".join(repr(key) for key in (called or here + elsewhere or similar)[:4])
    known = list(kind.model_fields)
    listed = f"keys here: {', '.join(known)}" if len(known) <= _MOST_LISTED else "--print-config lists all keys"
    hint = f"did you mean {meant}?" if meant else listed
    return f"unknown key {'.'.join(keys)!r} ({hint})"


_PLAIN_WORDS = {
    "a valid integer": "a whole number", "a valid number": "a number", "a valid string": "text (in quotes if need be)",
    "a valid boolean": "true or false", "a valid list": "a list", " after validation": "",
    "greater than or equal to": "at least", "less than or equal to": "at most",
    "greater than": "above", "less than": "below",
}  # fmt: skip


def _first_problem(
    error: PydanticError, settings: type[Settings], values: dict[str, Any], path: Path, overridden: list[str]
) -> str:
    problem, *others = error.errors(include_url=False)
    keys = [str(part) for part in problem["loc"] if not isinstance(part, int)]  # betas.0 is betas
    dotted = ".".join(keys)
    kind: type[Section] | None = settings
    field: FieldInfo | None = None
    value: Any = values
    for depth, key in enumerate(keys):
        if not isinstance(value, dict):  # of a choice of types (a number or a word): which of them, not a key
            dotted = ".".join(keys[:depth])
            break
        field = kind.model_fields[key] if kind else None
        kind = _section_of(field) if field else None
        value = value.get(key)
    where = str(path)
    if any(f"{dotted}.".startswith(f"{key}.") for key in overridden):
        where = "command line"
    elif kind is not None and overridden:  # a check across several keys
        where += " and command line"
    more = f" (and {len(others)} more)" if others else ""
    if problem["type"] == "missing" and field is not None:
        return f"{where}: missing key {dotted!r} ({field.description}); set it in the file or with {dotted}=...{more}"
    message = re.sub(r"^(Input |Value error, |String |List )", "", problem["msg"])
    for technical, plain in _PLAIN_WORDS.items():
        message = message.replace(technical, plain)
    if kind is not None:  # a check across the keys of a section
        return f"{where}: {dotted}: {message}{more}"
    if field is not None and type(None) in get_args(field.annotation):
        message += " or null"
    return f"{where}: {dotted} = {reprlib.repr(value)} {message}{more}"
