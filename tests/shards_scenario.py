"""What test_shared_gpu.py runs on every rank: python shards_scenario.py CONFIG OUT [KEY=VALUE...] (see there)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from flash_inside.softmax import rows
from lm_pcfg.distributed.engine import Engine
from lm_pcfg.settings_file import load_settings
from lm_pcfg.training.steps import Steps

STEPS, BATCHES_A_STEP = 20, 4  # of all ranks together, so that every world size makes the same steps


def main(config: Path, out: Path, overrides: list[str]) -> None:
    logits = 0  # of the emission that this rank has computed, again in the backward if no probabilities were kept

    def counting(function):
        def wrapper(values, columns, *others, **named):
            nonlocal logits
            logits += len(values) * columns
            return function(values, columns, *others, **named)

        return wrapper

    for name in ("log_sum_exp", "scaled_exp", "softmax_and_log_sum_exp"):
        setattr(rows, name, counting(getattr(rows, name)))
    accumulate = f"batch.accumulate={BATCHES_A_STEP // int(os.environ.get('WORLD_SIZE', '1'))}"
    # Replayed work would not be counted.
    settings = load_settings(config, [accumulate, "networks.cuda_graphs=false", *overrides])
    trainer = Steps(settings, Engine(settings))
    trainer.engine.close_at_exit()
    losses = []
    for _ in range(STEPS):
        before = trainer.position.window.nll
        trainer.step(trainer.stream.next_step())
        trainer.finish_update()
        losses.append(trainer.position.window.nll - before)
    assert not trainer.position.skipped
    counted = trainer.engine.all_gather(logits)
    if trainer.engine.is_main:
        out.write_text(json.dumps({"losses": losses, "logits": counted, "device": str(trainer.engine.device)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
