"""Imports point one way: text -> corpus -> grammar -> flash_inside -> training -> inference -> cli."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
FORBIDDEN = {
    "kernels/flash_inside": ["lm_pcfg"],
    "lm_pcfg/corpus": ["flash_inside", "torch", *(f"lm_pcfg.{room}" for room in ("grammar", "training", "inference"))],
    "lm_pcfg/baselines": ["torch", *(f"lm_pcfg.{room}" for room in ("grammar", "training", "inference"))],
    "lm_pcfg/grammar": ["lm_pcfg.training", "lm_pcfg.inference"],
    "lm_pcfg/training": ["lm_pcfg.inference"],
    "lm_pcfg/inference": ["lm_pcfg.training.loop"],
}


def imported_modules(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_does_not_import_from_the_rooms_after_it(room):
    files = sorted((REPOSITORY / room).rglob("*.py"))
    assert files
    for file in files:
        for name in imported_modules(file):
            for forbidden in [*FORBIDDEN[room], "lm_pcfg.cli"]:
                assert not f"{name}.".startswith(f"{forbidden}."), f"{file} imports {name}"


def test_no_file_uses_pickle():
    for file in [*(REPOSITORY / "lm_pcfg").rglob("*.py"), *(REPOSITORY / "kernels").rglob("*.py")]:
        assert not {"pickle", "torch.load", "torch.save"} & imported_modules(file), file
        assert "torch.load(" not in file.read_text(encoding="utf-8"), file
