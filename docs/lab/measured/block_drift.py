"""How much a streamed training adapts to the block it reads: mean log perplexity by the place in a block.

    python docs/lab/measured/block_drift.py RUN [FIRST_STEP]

A block is what `data.block_lines` shuffles together. Takes the lines of RUN/metrics.jsonl from FIRST_STEP (4000)
to the end of the first epoch, subtracts a quadratic trend over steps and the mean of each block, and prints means and
standard errors. Needs the corpus of the run, at the place where the run had it.
"""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np

from lm_pcfg.corpus.opening import load_corpora, training_stream
from lm_pcfg.corpus.shards.plan import ShardPlan
from lm_pcfg.settings_file import load_settings

PLACES = (0, 75, 150, 300, 500, 800, 1200)  # steps since the block began


def main(run: Path, first_step: int) -> None:
    settings = load_settings(run / "config.yaml", ["tracking.mlflow=false"])
    plan = training_stream(settings, load_corpora(settings, None, 1).train, rank=0, world_size=1).plan
    assert isinstance(plan, ShardPlan), "the text was not streamed"
    _, starts = plan._order_of_pass(0, 0)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "train/ppl" in line and first_step <= line["step"] < starts[-1]]
    steps = (
        np.array([line["step"] for line in lines]) - settings.training.log_every / 2
    )  # the middle of what a line sums
    log_ppl = np.log([line["train/ppl"] for line in lines])
    log_ppl -= np.polyval(np.polyfit(steps, log_ppl, 2), steps)
    block = np.searchsorted(starts, steps, side="right") - 1
    for number in np.unique(block):
        log_ppl[block == number] -= log_ppl[block == number].mean()
    print(f"{len(starts) - 1} blocks, {len(lines)} lines of metrics")
    for first, last in pairwise(PLACES):
        some = log_ppl[(steps - starts[block] >= first) & (steps - starts[block] < last)]
        if len(some):
            error = some.std() / math.sqrt(len(some))
            print(f"steps {first:>5} to {last:>5} of a block: {some.mean():+.3f} (standard error {error:.3f})")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4000)
