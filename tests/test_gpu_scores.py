"""Scores in fp32 on a GPU are those of the CPU's torch backend."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from typer.testing import CliRunner

from lm_pcfg.cli import app
from lm_pcfg.corpus.text import read_lines, resolve_source
from lm_pcfg.inference.score import TextScore, score_lines
from lm_pcfg.inference.trained import load_trained
from texts import write_config


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_trained_checkpoint_has_the_same_scores_on_gpu_and_cpu(tmp_path):
    model = {"nonterminals": 300, "preterminals": 500, "dimension": 128, "init": "normal(0.2, 0.2)"}
    data = {"train": "embedded:train", "valid": None}
    config = write_config(
        tmp_path, device="cuda", data=data, model=model, inside={"precision": "bf16"}, training={"max_steps": 300}
    )
    assert CliRunner().invoke(app, ["train", "--config", str(config)]).exit_code == 0

    text = tmp_path / "test.txt"
    text.write_text("\n".join(line for _, line in islice(read_lines(resolve_source("embedded:test")), 100)))

    def scores(device: str, backend: str) -> list[float]:
        trained = load_trained(tmp_path / "runs" / "small", device=device)
        found = score_lines(
            [trained], str(text), TextScore(), max_length=100, backend=backend, warn=pytest.fail, batch_cost=2000
        )
        return [value for value in found if value is not None]

    assert scores("cuda", "triton") == pytest.approx(scores("cpu", "torch"), rel=1e-6)
