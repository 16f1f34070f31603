"""Perplexities of even mixtures word by word, also with a 5-gram, from log-probabilities that runs have left behind.

For runs whose checkpoints are gone; of those that are there, `lm_pcfg score --mix words` computes the same without
the 5-gram. `ptb_words` holds natural log-probabilities in fp16 (perplexities change by less than 0.001): of every word
and of the end of every line, in the order of the text, and no words.
    python docs/lab/measured/word_mixture.py keep RUN TEXT OUT.npy
    python docs/lab/measured/word_mixture.py mix TRAINING_TEXT TEXT FILE.npy [FILE.npy ...]
"""

from __future__ import annotations

import math
import sys
import tempfile
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import numpy as np

import lm_pcfg
from lm_pcfg.bench.kneser_ney import KneserNey
from lm_pcfg.corpus.lengths import Limits
from lm_pcfg.corpus.opening import OpeningOptions, in_memory, open_corpus, whole_text
from lm_pcfg.corpus.shards.raw import RawOptions
from lm_pcfg.corpus.vocabulary import VocabularyOptions

MOST = 5  # members of a mixture, the 5-gram counted
SHARES = (0.15, 0.2, 0.25, 0.3, 0.35)  # of the 5-gram


def keep(run: str, text: str, out: str) -> None:
    lines = [line for line in Path(text).read_text(encoding="utf-8").splitlines() if line.split()]
    found = [one for one in lm_pcfg.load(run).surprisal(lines) if one is not None]
    log_p = np.concatenate([np.append(one.bits, one.end) for one in found]) * -math.log(2)
    np.save(out, log_p.astype(np.float16))
    print(f"{len(log_p)} tokens, perplexity {perplexity(log_p):.3f}")


def perplexity(log_p: np.ndarray) -> float:
    return float(np.exp(-log_p.mean()))


def five_gram(train: str, text: str) -> np.ndarray:
    """Return the log-probability of every word and end of the text under Kneser-Ney of the training text."""
    with tempfile.TemporaryDirectory() as scratch:
        options = OpeningOptions(RawOptions(), Path(scratch), VocabularyOptions(size=None, end_of_sentence=True))
        opened, vocabulary = open_corpus([([train], Fraction(1))], None, Limits(), options, streamed=False)
        seen, scored = in_memory(opened), whole_text(text, vocabulary, Limits(), options)
    return np.log(KneserNey(seen, 5, seen.unknown > 0, len(vocabulary)).probabilities(scored))


def mix(train: str, text: str, files: list[str]) -> None:
    ngram = five_gram(train, text)
    members = [np.load(file).astype(np.float64) for file in files]  # [tokens] each
    lines = [len(line.split()) + 1 for line in Path(text).read_text(encoding="utf-8").splitlines() if line.split()]
    first = np.cumsum([0, *lines[:-1]])
    if any(len(member) != sum(lines) for member in (ngram, *members)):
        raise SystemExit(f"{text} has {sum(lines)} tokens; each file should have as many numbers")
    print(f"5-gram {perplexity(ngram):.2f}")
    print("sentences   words  with a 5-gram of the share " + "".join(f"{share:8}" for share in SHARES))
    for size in range(1, min(MOST, len(members)) + 1):
        for chosen in combinations(range(len(members)), size):
            log_p = np.stack([members[one] for one in chosen])
            words = np.logaddexp.reduce(log_p) - math.log(size)
            sentences = np.logaddexp.reduce(np.add.reduceat(log_p, first, axis=1)) - math.log(size)
            both = [np.logaddexp(math.log(1 - share) + words, math.log(share) + ngram) for share in SHARES]
            whole = math.exp(-sentences.sum() / sum(lines))
            print(
                f"{whole:9.2f} {perplexity(words):7.2f} {'':27}"
                + ("".join(f"{perplexity(one):8.2f}" for one in both) if size < MOST else " " * 8 * len(SHARES))
                + "  " + " + ".join(Path(files[one]).stem for one in chosen)
            )  # fmt: skip


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["keep", run, text, out]:
            keep(run, text, out)
        case ["mix", train, text, *files] if files:
            mix(train, text, files)
        case _:
            raise SystemExit(__doc__)
