"""`python -m lm_pcfg` is the same as `lm_pcfg`."""

from lm_pcfg.cli import main

main()
