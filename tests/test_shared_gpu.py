"""Four ranks, on the CPU or sharing one GPU over gloo, against one: the same losses, a quarter of the emission each."""

from __future__ import annotations

import json

import pytest
import torch

from processes import ROOT, run_ranks
from shards_scenario import STEPS
from texts import write_config


@pytest.mark.long
@pytest.mark.parametrize(
    ("device", "inside", "networks", "rate", "warmup", "tolerance"),
    [
        ("cpu", "fp32", "fp32", 2e-3, 0, 1e-4),
        pytest.param("cuda", "fp32", "fp32", 2e-4, 0, 1e-4, marks=pytest.mark.gpu),
        pytest.param("cuda", "fp32", "fp32", 2e-3, 200, 1e-4, marks=pytest.mark.gpu),  # as the recipes begin
        pytest.param("cuda", "bf16", "bf16", 2e-3, 200, 1e-4, marks=pytest.mark.gpu),
        # Sums of 16 sentences and of 4 times 4 round differently, and Adam's first steps, of which only the sign of the
        # gradient is left, make that grow: 1.5e-4 at the 20th step on an H200, where the loss has fallen by a third.
        pytest.param("cuda", "bf16", "tf32", 2e-4, 0, 1e-3, marks=pytest.mark.gpu),
    ],
)
def test_four_ranks_share_the_emission_and_train_as_one_does(
    tmp_path, device, inside, networks, rate, warmup, tolerance
):
    on_gpu = device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        pytest.skip("no GPU")
    preterminals = 1024 if on_gpu else 10
    model = {"preterminals": preterminals} | (
        {"nonterminals": 512, "dimension": 256, "init": "normal(0.15, 0.1)"} if on_gpu else {}
    )
    config = write_config(
        tmp_path, device=device, model=model, batch={"sentences": 4}, engine={"backend": "gloo"},
        inside={"precision": inside}, networks={"precision": networks},
        # On a GPU rounding errors grow with the size of the steps.
        optimizer={"learning_rate": rate, "schedule": {"warmup_steps": warmup}},
    )  # fmt: skip
    visible = {"CUDA_VISIBLE_DEVICES": "0"} if on_gpu else {}
    results = {}
    for ranks in (1, 4):
        out = tmp_path / f"{ranks}.json"
        shards = f"emission.shards={ranks}"
        run_ranks(ranks, [str(ROOT / "tests" / "shards_scenario.py"), str(config), str(out), shards], **visible)
        results[ranks] = json.loads(out.read_text())
        assert results[ranks]["device"].startswith(device)
    one, four = results[1], results[4]
    assert len(one["losses"]) == STEPS
    assert four["losses"] == pytest.approx(one["losses"], rel=tolerance)
    (whole,) = one["logits"]
    assert whole >= STEPS * preterminals
    assert whole % (STEPS * preterminals) == 0
    column = whole // preterminals
    parts = [256] * 4 if on_gpu else [2, 3, 2, 3]  # preterminals of each rank
    assert four["logits"] == [column * part for part in parts]
