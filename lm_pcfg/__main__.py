"""`python -m lm_pcfg` is the same as `lm_pcfg`."""

from lm_pcfg.cli import main

if __name__ == "__main__":  # processes that prepare or read data import this module again
    main()
