"""`lm_pcfg`, or `python -m lm_pcfg`: the command line, with an answer to a Ctrl-C even while it is being imported."""

import _signal  # type: ignore[import-not-found]  # what `signal` is made of: that would import more
import sys


def leave_on_ctrl_c() -> None:
    """Have a Ctrl-C end this process at once, with a line: until the command line is imported there is nothing to save.

    An exception would not do: Python loses those that come up in a destructor, of which imports have many, and the
    command would go on. Who started this process with Ctrl-C ignored, such as a shell script in the background, keeps
    that.
    """
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _leave)


def _leave(number: int, frame: object) -> None:
    import os  # long imported, by Python itself

    try:
        os.write(2, b"lm_pcfg: interrupted\n")
    finally:
        os._exit(130)


def main() -> None:
    leave_on_ctrl_c()
    try:
        try:
            from lm_pcfg.cli import main as run_command
        finally:
            if _signal.getsignal(_signal.SIGINT) is _leave:
                _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        run_command()
    except KeyboardInterrupt:  # between two of those who have an answer of their own
        print("lm_pcfg: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":  # processes that prepare or read data import this module again
    main()
