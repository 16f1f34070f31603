"""CUDA graphs of the inside pass as training uses them, against the same pass launched: needs a GPU."""

from __future__ import annotations

import pytest
import torch

import flash_inside
from flash_inside import ResidentRules
from flash_inside.devices import allow_graphs
from grammars import random_emissions, random_rules

pytest.importorskip("triton")

#: Equal and nearly equal lengths, short ones that keep residuals, fewer sentences than slots; more buckets than fit.
BATCHES = (
    [12] * 16,
    [44] * 16,
    [46, 45, 44, 44, 45, 46, 46, 44, 45, 44, 46, 45, 45, 44, 46, 44],
    [30] * 13,
    [57, 56, 55, 54, 56, 57, 55, 54, 56, 55, 57, 54, 55, 56, 57, 54],
    [2] * 16,
    [65] * 15 + [63],
    [21] * 16,
)
ROUNDS = 4  # launched, captured, replayed twice


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    ("n", "precision", "tolerance"),
    [(1040, "fp32", 1e-5), (1040, "bf16", 1e-2), (3280, "bf16", 1e-2), (4112, "bf16", 1e-2)],
    ids=str,
)
@pytest.mark.parametrize("crowded", [False, True], ids=["room", "evicted"])
def test_graphs_of_long_and_uneven_batches_do_what_launches_do(n, precision, tolerance, crowded, monkeypatch):
    from flash_inside.triton import graphs

    graphs.clear()
    if crowded:  # the arena grows and graphs are dropped all the time
        monkeypatch.setattr(graphs, "MOST_GRAPHS", 3)
        monkeypatch.setattr(graphs, "GROWTH", 1 << 20)
    p, rules_type = 2 * n, torch.bfloat16 if precision == "bf16" else torch.float32
    # As in training: rules, and the memory of their gradients, stay where they are, with new values in every step.
    root, left, right = (t.cuda() for t in random_rules(n, p, dtype=torch.float32))
    joint = torch.stack((left, right)).to(rules_type)
    memory = torch.empty_like(joint)
    inputs = (tensor.requires_grad_() for tensor in (root, joint[0], joint[1]))
    rules = ResidentRules(*inputs, gradient_memory=(memory[0], memory[1]))

    def gradients(lengths: list[int], emissions: torch.Tensor, replayed: bool) -> list[torch.Tensor]:
        before = allow_graphs(replayed)
        memory.fill_(torch.nan)
        try:
            log_z, trusted = flash_inside.inside_unchecked(rules, emissions, lengths, precision, "triton")
            found = torch.autograd.grad(log_z.sum() / len(lengths), [*rules, emissions])
        finally:
            allow_graphs(before)
        assert trusted.all()
        return [log_z.detach(), *(gradient.detach().clone() for gradient in found)]

    for repeat in range(ROUNDS):
        with torch.no_grad():
            joint.copy_(joint.flip(2))
        for number, lengths in enumerate(BATCHES):
            emissions = random_emissions(sum(lengths), p, seed=100 * repeat + number, dtype=torch.float32).cuda()
            emissions.requires_grad_()
            for name, got, want in zip(
                ("log Z", "root", "left", "right", "emissions"),
                gradients(lengths, emissions, True), gradients(lengths, emissions, False), strict=True,
            ):  # fmt: skip
                got, want = got.double(), want.double()
                error = ((got - want).norm() / want.norm()).item()
                assert error <= tolerance, f"round {repeat}, {lengths[0]} words: {name} off by {error:.1e}"
    assert graphs._graphs
    graphs.clear()
