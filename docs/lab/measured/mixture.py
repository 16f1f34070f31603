"""Perplexities of even mixtures of runs, from what `lm_pcfg score TEXT --per-sentence` printed for each of them.

For runs whose checkpoints are gone; `lm_pcfg score` with several `--checkpoint`s computes the same. Choose the members
on the validation text, then score them once on the test text.
    python docs/lab/measured/mixture.py TEXT SCORES [SCORES ...]
"""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import numpy as np

MOST = 5  # members of a mixture


def main(text: Path, files: list[Path]) -> None:
    lengths = [len(line.split()) for line in text.read_text(encoding="utf-8").splitlines() if line.strip()]
    tokens = sum(lengths) + len(lengths)  # every line predicts its end, too
    scores = np.stack([np.loadtxt(file) for file in files])  # [runs, lines] natural log-probabilities
    if scores.shape[1] != len(lengths) or not np.isfinite(scores).all():
        raise SystemExit(f"{text} has {len(lengths)} lines; each file should have as many finite numbers")
    for size in range(1, min(MOST, len(files)) + 1):
        found = []
        for members in combinations(range(len(files)), size):
            log_p = np.logaddexp.reduce(scores[list(members)], axis=0) - np.log(size)
            found.append((float(np.exp(-log_p.sum() / tokens)), " ".join(files[member].name for member in members)))
        for perplexity, names in sorted(found)[:10]:
            print(f"{perplexity:8.3f}  {names}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
