"""YAML as settings are written in it: 1.2 rather than 1.1, of bounded size, with errors that say where."""

from __future__ import annotations

import errno
import math
import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml

from lm_pcfg.errors import SettingsError

LARGEST_YAML = 1_000_000  # characters
MOST_YAML_VALUES = 10_000
_TOO_MANY = f"more than {MOST_YAML_VALUES:,} values are no settings; is it the right file?"


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
    values = 0  # so far, aliases not written out

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.values += 1
        if self.values > MOST_YAML_VALUES:  # before the rest is read, which would take 40 microseconds a value
            raise yaml.composer.ComposerError(None, None, _TOO_MANY, self.peek_event().start_mark)
        return super().compose_node(parent, index)

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
    if len(text) > LARGEST_YAML:
        raise SettingsError(f"{where}: more than {LARGEST_YAML:,} characters are no settings; is it the right file?")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if _expanded_size(node, {}) > MOST_YAML_VALUES:
            raise SettingsError(f"{where}: its aliases (*name) stand for too many values; write the settings out")
        return None if node is None else loader.construct_document(node)
    except SettingsError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SettingsError(f"{where}: {line}{error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SettingsError(f"{where}: not valid YAML ({' '.join(str(error).split())})") from None


def _expanded_size(node: yaml.Node | None, known: dict[int, float]) -> float:
    """Return how many values a document has with its aliases written out; one that contains itself has no end."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf  # until it is known
        children = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_expanded_size(child, known) for child in children)
    return known[id(node)]


def read_yaml(path: Path) -> Any:
    """Read a file of settings, of this version or another: only whether it is YAML is checked."""
    try:
        with os.fdopen(_open(path), "rb") as file:
            text = file.read(LARGEST_YAML + 1).decode("utf-8-sig")  # no more of what has no end
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8 text (byte {error.start}); is it a YAML file?") from None
    except OSError as error:  # no such file, a folder, no permission
        raise SettingsError(f"{path}: cannot be read ({error.strerror}); check --config") from None
    return parse_yaml(text, str(path))


def _open(path: Path) -> int:
    """Open a file. A pipe that waits for its writer is refused, unless it is the shell's: --config /dev/stdin."""
    if path.is_relative_to("/dev"):
        return os.open(path, os.O_RDONLY)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, os.strerror(code) if code == errno.EISDIR else "not a regular file", str(path))
    return descriptor


def format_yaml(values: dict[str, Any]) -> str:
    """Write values so that `parse_yaml`, and any other reader, has the same; keys stay in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
