"""Train the Rank PCFG of ../families.md and print, every 250 steps, how large its features and logits have become.

On one GPU, some 100 s for 11,000 steps. Needs data/ptb (`lm_pcfg prepare ptb`). Stops when updates are not finite.
    python docs/lab/measured/rank_features.py [STEPS] [KEY=VALUE ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from lm_pcfg.distributed.engine import Engine
from lm_pcfg.grammar.families.rank_pcfg import LowRankPCFG
from lm_pcfg.settings_file import load_settings
from lm_pcfg.training.steps import Steps

CONFIG = Path(__file__).parents[3] / "configs/paper/ptb_lm_rank_4096.yaml"
CHANGES = ["tracking.mlflow=false", "training.epochs=14", "optimizer.schedule.kind=linear", "batch.sentences=16"]
EVERY = 250


@torch.no_grad()
def sizes(model: LowRankPCFG) -> str:
    """Return the largest features, logits and weights, and the mean entropy of the words of a preterminal."""
    features = model.emission_network(model.symbols[model.nonterminals :])
    logits = features @ model.words.T
    log_p = logits.log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1).mean()
    weights = max(parameter.abs().max().item() for parameter in model.parameters())
    return (
        f"features {features.abs().max():.3g}, logits of words {logits.abs().max():.3g}, weights {weights:.3g}, "
        f"entropy of words {entropy:.2f}"
    )


def main(last: int, changes: list[str]) -> None:
    settings = load_settings(CONFIG, [*CHANGES, *changes])
    training = Steps(settings, Engine(settings))
    window, nll, words = training.position.window, 0.0, 0.0
    while training.position.step < last and training.position.skipped_in_a_row < 3:
        training.next()
        if training.position.step % EVERY == 0 or training.position.skipped_in_a_row:
            training.finish_update()
            loss = (window.nll - nll) / max(1.0, window.words - words)
            nll, words = window.nll, window.words
            skipped = f", {training.position.skipped} updates skipped" if training.position.skipped else ""
            model = training.learner.plain_model
            assert isinstance(model, LowRankPCFG)
            print(f"{training.position.step:6} {loss:.3f} nats a word, {sizes(model)}{skipped}", flush=True)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 11_000
    main(steps, sys.argv[2:])
