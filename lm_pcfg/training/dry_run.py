"""What a training would take, found out by a step of it."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

from lm_pcfg.settings import Settings
from lm_pcfg.training.engine import Engine, peak_memory
from lm_pcfg.training.loop import Trainer
from lm_pcfg.training.steps import STEPS_BEFORE_CAPTURE


def dry_run(settings: Settings) -> dict[str, Any]:
    """Build everything, make a step of the most expensive batches, write no run folder; what it took (main process)."""
    trainer = Trainer(settings, Engine(settings), None)
    batches = trainer.stream.costliest_step(settings.training.epochs - 1)  # what has to fit
    began = time.perf_counter()
    trainer.step(batches)
    trainer.settle()
    seconds = time.perf_counter() - began
    window = replace(trainer.position.window)
    if trainer.captures:  # CUDA graphs have memory of their own
        for _ in range(STEPS_BEFORE_CAPTURE + 1):
            trainer.step(batches)
        trainer.settle()
    device = trainer.engine.describe()
    if not trainer.engine.is_main:
        return {}
    return {
        "device": device,
        "parameters": sum(tensor.numel() for tensor in trainer.skeleton.parameters()),
        "vocabulary": len(trainer.corpora.vocabulary),
        "steps_per_epoch": trainer.stream.steps_per_epoch(0),
        "total_steps": trainer.total_steps,
        "sentences": sum(batch.n_sentences for batch in batches),
        "words": sum(batch.n_words for batch in batches),
        "nll_per_sentence": window.nll / max(1.0, window.sentences) if not trainer.position.skipped else math.inf,
        "first_step_seconds": round(seconds, 3),
        "peak_memory": peak_memory(trainer.engine.device),
    }
