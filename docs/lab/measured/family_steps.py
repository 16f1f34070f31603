"""Time training steps of the paper's other families on one GPU: the table of ../families.md, "Steps on one H200".

Batches are sentences of the Penn Treebank cut to one length. Prints the mean of 30 steps in a row after 10 others, the
peak of the GPU's tensors, and how the loss falls. Needs data/ptb (`lm_pcfg prepare ptb`).
    python docs/lab/measured/family_steps.py
"""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import torch

from lm_pcfg.corpus.batches import Batch
from lm_pcfg.distributed.engine import Engine
from lm_pcfg.settings_file import load_settings
from lm_pcfg.training.steps import Steps

CONFIGS, TEXT = Path(__file__).parents[3] / "configs/paper", Path("data/ptb/ptb.train.txt")
#: Config, changes, sentences and words a batch.
STEPS = [
    ("ptb_lm_sc_2048", [], 16, 40),
    ("ptb_lm_sc_512", [], 16, 40),
    ("ptb_lm_n_pcfg_128", ["model.nonterminals=256", "model.preterminals=512"], 4, 40),
    ("ptb_lm_n_pcfg_128", [], 4, 40),
    ("ptb_lm_c_pcfg_30", [], 4, 40),
    ("ptb_lm_rank_hmm_32768", [], 8, 32),
    ("ptb_lm_rank_hmm_32768", ["model.state_dropout=0"], 8, 32),
    ("ptb_lm_rank_hmm_32768", [], 12, 21),
    ("ptb_lm_nhmm_4096", [], 8, 32),
]
BEFORE, TIMED = 10, 30


def batches(training: Steps, sentences: int, words: int) -> list[Batch]:
    number = {word: id_ for id_, word in enumerate(training.corpora.vocabulary.words)}
    lines = [line.split()[:words] for line in TEXT.read_text().splitlines()]
    whole = iter([number[word] for word in line] for line in lines if len(line) == words)
    made = []
    for _ in range(BEFORE + TIMED):
        ids = np.array([next(whole) for _ in range(sentences)], dtype=np.int64)
        made.append(Batch(ids.ravel(), [words] * sentences, np.arange(sentences), ids.size))
    return made


def measure(config: str, changes: list[str], sentences: int, words: int) -> str:
    settings = load_settings(CONFIGS / f"{config}.yaml", ["tracking.mlflow=false", *changes])
    engine = Engine(settings)
    training = Steps(settings, engine)
    window, made = training.position.window, batches(training, sentences, words)
    torch.cuda.reset_peak_memory_stats()
    for batch in made[:BEFORE]:
        training.step([batch])
    training.finish_update()
    nll, count = window.nll, window.words
    torch.cuda.synchronize()
    began = time.perf_counter()
    for batch in made[BEFORE:]:
        training.step([batch])
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    training.finish_update()
    engine.accelerator.free_memory()
    peak = torch.cuda.max_memory_allocated() / 2**30
    loss, skipped = (window.nll - nll) / (window.words - count), training.position.skipped
    what = " ".join([config, *changes])
    return (
        f"{what}, {sentences} x {words}: {1e3 * seconds / TIMED:.1f} ms a step, {peak:.1f} GiB, "
        f"nll a word {nll / count:.3f}, then {loss:.3f}, {skipped} skipped"
    )


if __name__ == "__main__":
    for step in STEPS:
        print(measure(*step), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
