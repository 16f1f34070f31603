"""`lm_pcfg`, or `python -m lm_pcfg`: the command line, with an answer to a Ctrl-C even while it is being imported."""

import sys


def main() -> None:
    try:
        from lm_pcfg.cli import main as run_command
    except KeyboardInterrupt:
        print("lm_pcfg: interrupted", file=sys.stderr)
        sys.exit(130)
    run_command()


if __name__ == "__main__":  # processes that prepare or read data import this module again
    main()
