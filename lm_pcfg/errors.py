"""What a user can mend. The command line prints these as one line and exits with 1; anything else is a bug."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """The message is one line: what is wrong, where, and the way out."""


class SettingsError(UserError, ValueError):
    """Settings that cannot be used."""


class FailedElsewhere(UserError):
    """Another process failed and says why; this one ends without a word."""


class LostContact(UserError):
    """Other processes of the run are gone, or did not answer in time."""


class OutOfMemory(UserError, MemoryError):
    """Something that is named does not fit into the memory of a GPU or of this process."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether there was too little memory; PyTorch says so in the words of a RuntimeError."""
    signs = ("out of memory", "you tried to allocate")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )


@contextmanager
def memory_told(what: Callable[[], str], way_out: Callable[[], str]) -> Iterator[None]:
    """Have too little memory reported with what was computed, and with the settings that help."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
            raise
        reason = f" ({str(error).splitlines()[0].rstrip('.')})" if str(error) else ""
        raise OutOfMemory(f"not enough memory for {what()}; try {way_out()}{reason}") from None
