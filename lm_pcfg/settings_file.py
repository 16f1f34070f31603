"""Settings from and to YAML files, with `dotted.key=value` overrides, and messages that help."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError as PydanticError
from pydantic.fields import FieldInfo

from lm_pcfg.errors import UserError
from lm_pcfg.settings import Section, Settings


class SettingsError(UserError, ValueError):
    """Settings that cannot be used; the message is one line for the user."""


# ---- YAML -----------------------------------------------------------------------------------------------------------

# YAML 1.2 rather than 1.1: 2e-3 is a number; on, off, yes, no and dates are text; no octal, no base 60.
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),  # the last ones are the first characters
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)"
              r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.0123456789")),
)  # fmt: skip


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever YAML 1.1 or our loader would not read back as text."""


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, None if text.isprintable() else '"'),
)
_Dumper.add_representer(list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, True))


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SettingsError(f"{where}: {line}{error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SettingsError(f"{where}: not valid YAML ({' '.join(str(error).split())})") from None


def dump_yaml(settings: Settings) -> str:
    """All settings, defaults included, in the order of their definition; `load_settings` reads them back the same."""
    return yaml.dump(settings.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


# ---- loading --------------------------------------------------------------------------------------------------------


def load_settings(path: Path, overrides: list[str] | None = None) -> Settings:
    """The settings of a YAML file with `dotted.key=value` overrides, whose values are YAML too."""
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8 text (byte {error.start}); is it a YAML file?") from None
    except OSError as error:  # no such file, a folder, no permission
        raise SettingsError(f"{path}: cannot be read ({error.strerror}); check --config") from None
    values = _checked_section(parse_yaml(text, str(path)), Settings, [], str(path))
    overridden = [_apply_override(values, override) for override in overrides or []]
    if values.get("name") is None:
        values["name"] = re.sub(r"[^A-Za-z0-9._+=-]+", "-", path.stem).lstrip(".+=-") or "run"
    try:
        return Settings.model_validate(values)
    except PydanticError as error:
        raise SettingsError(_first_problem(error, values, path, overridden)) from None


def _checked_section(value: Any, kind: type[Section], keys: list[str], where: str) -> dict[str, Any]:
    """The section's values with known keys only and with every section in it, so that missing keys have full names."""
    value = {} if value is None else value  # nothing after the colon
    if not isinstance(value, dict):
        what, first = ".".join(keys) or "the file", next(iter(kind.model_fields))
        raise SettingsError(f"{where}: {what} = {reprlib.repr(value)} should be a section with keys such as {first!r}")
    for key in value:
        if key not in kind.model_fields:
            raise SettingsError(f"{where}: {_unknown_key([*keys, str(key)], kind)}")
    result = dict(value)
    for key, field in kind.model_fields.items():
        if child := _section_of(field):
            result[key] = _checked_section(value.get(key), child, [*keys, key], where)
    return result


def _apply_override(values: dict[str, Any], override: str) -> str:
    """Sets one `dotted.key=value` in values, and returns the key."""
    where = "command line"
    dotted, equals, text = override.strip().partition("=")
    if not equals or not dotted:
        raise SettingsError(f"{where}: {override!r} should be of the form dotted.key=value")
    *above, last = keys = dotted.split(".")
    kind: type[Section] = Settings
    place = values
    for depth, key in enumerate(above):
        child = _section_of(kind.model_fields.get(key))
        if child is None:
            raise SettingsError(f"{where}: {_unknown_key(keys[: depth + 1], kind)}")
        kind, place = child, place[key]
    if last not in kind.model_fields:
        raise SettingsError(f"{where}: {_unknown_key(keys, kind)}")
    # A lone - would be a list of nothing; it means standard input.
    value = "-" if text.strip() == "-" else parse_yaml(text, f"{where}: {dotted}")
    section = _section_of(kind.model_fields[last])
    place[last] = _checked_section(value, section, keys, where) if section else value
    return dotted


def _section_of(field: FieldInfo | None) -> type[Section] | None:
    kind = field.annotation if field else None
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _all_keys(kind: type[Section] = Settings, prefix: str = "") -> Iterator[str]:
    for key, field in kind.model_fields.items():
        yield prefix + key
        if child := _section_of(field):
            yield from _all_keys(child, f"{prefix}{key}.")


def _unknown_key(keys: list[str], kind: type[Section]) -> str:
    """Says what may have been meant: a similar key of this section, or the same key (else a similar one) elsewhere."""
    from difflib import get_close_matches  # 20 ms, for errors only

    *above, name = keys
    if name in kind.model_fields:
        return f"{'.'.join(keys)!r} is not a section: it has no keys"
    paths: dict[str, list[str]] = {}  # last part of a key -> keys
    for key in _all_keys():
        paths.setdefault(key.rsplit(".", 1)[-1], []).append(key)
    here = [".".join([*above, key]) for key in get_close_matches(name, kind.model_fields, n=1)]
    elsewhere = [key for key in paths.get(name, []) if key not in here]
    similar = [key for last in get_close_matches(name, paths, n=1) for key in paths[last]]
    meant = " or ".join(repr(key) for key in (here + elsewhere or similar)[:4])
    hint = f"did you mean {meant}?" if meant else f"keys here: {', '.join(kind.model_fields)}"
    return f"unknown key {'.'.join(keys)!r} ({hint})"


_PLAIN_WORDS = {
    "a valid integer": "a whole number", "a valid number": "a number", "a valid string": "text (in quotes if need be)",
    "a valid boolean": "true or false", "a valid list": "a list", " after validation": "",
    "greater than or equal to": "at least", "less than or equal to": "at most",
    "greater than": "above", "less than": "below",
}  # fmt: skip


def _first_problem(error: PydanticError, values: dict[str, Any], path: Path, overridden: list[str]) -> str:
    problem, *others = error.errors(include_url=False)
    keys = [str(part) for part in problem["loc"] if not isinstance(part, int)]  # betas.0 is betas
    dotted = ".".join(keys)
    kind: type[Section] | None = Settings
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
