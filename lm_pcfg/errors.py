"""What a user can mend. The command line prints these as one line and exits with 1; anything else is a bug."""


class UserError(Exception):
    """The message is one line: what is wrong, where, and the way out."""


class FailedElsewhere(UserError):
    """Another process failed and says why; this one ends without a word."""


class LostContact(UserError):
    """Other processes of the run are gone, or did not answer in time."""
