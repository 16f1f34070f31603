"""Train a config and print, every so many steps, how large features and logits of words have become.

For ../families.md (the Rank PCFG that failed) and ../stability.md. Stops when three updates in a row were left out.
    python docs/lab/measured/feature_sizes.py CONFIG STEPS EVERY [KEY=VALUE ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from lm_pcfg.distributed.engine import Engine
from lm_pcfg.settings_file import load_settings
from lm_pcfg.training.steps import Steps


@torch.no_grad()
def sizes(model: nn.Module) -> str:
    """Describe the features of all preterminals, after each layer of their network, and what they make of words."""
    x: Tensor = model.symbols[model.nonterminals :] if getattr(model, "tags", None) is None else model.tags
    features, after = x, []
    for layer in model.emission_network:
        features = layer(features)
        after.append(f"{features.norm(dim=1).max():.3g}")
    if getattr(model, "parameterization", "paper") != "paper":
        features = features + x
    lengths = features.norm(dim=1)
    largest = max(part.abs().max().item() for part in (features @ model.words.T).split(1024))
    matrices = [weight for weight in model.emission_network.parameters() if weight.dim() == 2]
    singular = " ".join(f"{torch.linalg.matrix_norm(weight, 2):.1f}" for weight in matrices)
    weights = max(weight.abs().max().item() for weight in model.parameters())
    return (
        f"features: median length {lengths.median():.3g}, longest {lengths.max():.3g}, "
        f"{(lengths > 100).sum()} above 100 (after each layer {' '.join(after)}); "
        f"largest logit {largest:.3g}, weight {weights:.3g}, singular values {singular}"
    )


def main(config: Path, last: int, every: int, changes: list[str]) -> None:
    settings = load_settings(config, ["tracking.mlflow=false", *changes])
    training = Steps(settings, Engine(settings))
    window, nll, words = training.position.window, 0.0, 0.0
    while training.position.step < last and training.position.skipped_in_a_row < 3:
        training.next()
        if training.position.step % every == 0 or training.position.skipped_in_a_row:
            training.finish_update()
            loss = (window.nll - nll) / max(1.0, window.words - words)
            nll, words = window.nll, window.words
            skipped = f", {training.position.skipped} updates skipped" if training.position.skipped else ""
            print(
                f"{training.position.step:6} {loss:.3f} nats a word, {sizes(training.learner.plain_model)}{skipped}",
                flush=True,
            )


if __name__ == "__main__":
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
