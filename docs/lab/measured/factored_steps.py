"""Time training steps of a Rank PCFG that keep the factors of its rules, and steps that multiply them out, on one GPU.

Prints a line for each size: milliseconds a step and GiB, both ways. Needs data/ptb (`lm_pcfg prepare ptb`).
    python docs/lab/measured/factored_steps.py
"""

from __future__ import annotations

import gc

import torch
from family_steps import measure

from lm_pcfg.grammar.families import rank_pcfg

#: Rank symbols and nonterminals.
SIZES = [(2048, 512), (4096, 512), (4096, 1024), (4096, 1536), (8192, 512), (8192, 1024), (8192, 2048)]
SENTENCES, WORDS = 16, 24


def main() -> None:
    for rank, nonterminals in SIZES:
        changes = [f"model.rank={rank}", f"model.nonterminals={nonterminals}", "model.preterminals=4096"]
        for way in ("multiplied", "factors"):
            rank_pcfg.factors_pay = lambda *_, kept=way == "factors": kept
            print(f"{way}: {measure('ptb_lm_rank_4096', changes, SENTENCES, WORDS)}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
