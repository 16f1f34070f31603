"""What a check finds, in words that can be shown to anybody."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["ok", "none", "warning", "broken"]
_LONGEST = 400  # characters of one line
_COMMON = ("", "root", "localhost")  # names that tell nothing


@dataclass
class Finding:
    """state: ok; none: not there, and not needed; warning: it works, but worse than it could; broken: it is needed."""

    state: State
    found: str
    mend: str = ""  # what to do about it
    name: str = ""
    seconds: float = 0.0


Check = Callable[[], Finding]


def finding_of(check: Check) -> Finding:
    """Make the check. Whatever goes wrong in it is something that it found."""
    try:
        found = check()
    except Exception as error:  # also what libraries raise that are only half installed
        found = Finding("broken", f"{type(error).__name__}: {error}", "")
    found.found, found.mend = public(found.found), public(found.mend)
    return found


def public(text: str) -> str:
    """Make one line of it, without what nobody else should read.

    That is users, passwords and queries of addresses; the home folder, the name of its user and that of this machine.
    """
    text = without_secrets(" ".join(text.split()))
    for name, shown in _private().items():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown, text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def without_secrets(text: str) -> str:
    """Leave out users, passwords and queries of addresses, which stay addresses."""
    text = re.sub(r"(\w+://)[^/\s]*@", r"\1", text)
    return re.sub(r"(\w+://[^\s?#]*)[?#]\S*", r"\1", text)


def _private() -> dict[str, str]:
    """Return what is not shown, and what is shown instead; names that are those of every machine may be seen."""
    names: dict[str, str] = {}
    with suppress(RuntimeError):  # no home folder
        home = str(Path.home())
        names |= {home: "~"} if home != "/" else {}
    host = socket.gethostname()
    names |= {host: "HOST", host.partition(".")[0]: "HOST"}
    with suppress(OSError, KeyError, ImportError):  # a user without a name
        names[getpass.getuser()] = "USER"
    return {name: shown for name, shown in names.items() if name not in _COMMON}
