"""Three ranks under DDP: from there on a sum of gradients depends on the order, which a resumed run has to keep."""

from __future__ import annotations

import shutil

import pytest

from lm_pcfg.storage import checkpoint
from processes import ROOT, TRAIN, run_ranks

# A model for which DDP does order its buckets anew after the first backward pass.
SETTINGS = [
    "model.nonterminals=12", "model.preterminals=16", "batch.sentences=16", "training.max_steps=30", "device=cpu",
    "evaluation.every_epochs=null", "checkpoint.every_steps=15", "checkpoint.keep_last=9", "tracking.mlflow=false",
]  # fmt: skip


@pytest.mark.long
def test_three_ranks_resume_bit_for_bit(tmp_path):
    command = [TRAIN, "--config", str(ROOT / "configs" / "tiny.yaml"), *SETTINGS, f"runs_folder={tmp_path}"]
    run_ranks(3, [*command, "name=whole"])
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    shutil.copytree(whole, resumed, symlinks=True)
    shutil.rmtree(resumed / "checkpoints" / "step-00000030")
    run_ranks(3, [*command, "name=resumed", "resume=auto"])
    ends = [run / "checkpoints" / "step-00000030" for run in (whole, resumed)]
    for end in ends:
        checkpoint.verify(end)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (ends[0] / file).read_bytes() == (ends[1] / file).read_bytes()
