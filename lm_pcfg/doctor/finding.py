"""What a check finds, in words that can be shown to anybody."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "none", "warning", "broken"]
_LONGEST = 400  # characters of one line


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
    """Make one line of it, without what nobody else should read: users, passwords and queries of addresses."""
    text = " ".join(text.split())
    text = re.sub(r"(\w+://)[^/\s]*@", r"\1", text)
    text = re.sub(r"(\w+://[^\s?#]*)[?#]\S*", r"\1", text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
