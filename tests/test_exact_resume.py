"""Three ranks under DDP: from there on a sum of gradients depends on the order, which a resumed run has to keep."""

from __future__ import annotations

import shutil

import pytest

from lm_pcfg.training import checkpoint
from processes import TRAIN, run_ranks
from texts import write_config


@pytest.mark.slow
def test_three_ranks_resume_bit_for_bit(tmp_path):
    settings = {"training": {"epochs": 9, "max_steps": 12}, "checkpoint": {"every_steps": 5, "keep_last": 9}}
    config = write_config(tmp_path, **settings)
    command = [TRAIN, "--config", str(config), "resume=auto"]
    run_ranks(3, command)
    whole, resumed = tmp_path / "runs" / "small", tmp_path / "runs" / "resumed"
    shutil.copytree(whole, resumed, symlinks=True)
    for saved in checkpoint.list_checkpoints(resumed):
        if checkpoint.step_of(saved) > 5:
            shutil.rmtree(saved)
    run_ranks(3, [*command, "name=resumed"])
    ends = [checkpoint.latest(run) for run in (whole, resumed)]
    assert [checkpoint.step_of(end) for end in ends] == [12, 12]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (ends[0] / file).read_bytes() == (ends[1] / file).read_bytes()
