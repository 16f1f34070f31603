"""The README: its demo, its Python, its links and its length. test_manual.py has its commands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def blocks_of(page: str, language: str) -> list[str]:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def environment() -> dict[str, str]:
    ours = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    for name in ("MLFLOW_TRACKING_URI", "VENV", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS"):
        ours.pop(name, None)  # `make test` hands its own variables down, and prints folders when below another
    return ours


def start(command: list[str], folder: Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout, env=environment())
    assert result.returncode == 0, f"{shlex.join(command)}\n{result.stdout}\n{result.stderr}"
    return result


@pytest.fixture(scope="module")
def after_demo(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A checkout in which `make demo` has run, with the environment of this test in place of a new one; its output."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in ("Makefile", "pyproject.toml", "configs", "lm_pcfg", "kernels"):
        (checkout / name).symlink_to(REPOSITORY / name)
    demo = ["make", "demo", f"BIN={BIN}", "-o", "install"]  # -o: taken as up to date
    return checkout, start(demo, checkout, timeout=900)


@pytest.mark.long
def test_the_demo_comes_within_five_percent_of_the_best_possible(after_demo):
    _, demo = after_demo
    *before, last = demo.stdout.strip().splitlines()
    drawn = [number for number, line in enumerate(before) if "─" in line]
    assert [before[number].split()[-1] for number in drawn] == ["the", "small", "doctor", "tastes", "the", "dogs"]
    sampled = next(filter(None, before[drawn[-1] + 1 :]))  # a sentence of the grammar, before the table of the score
    assert len(sampled.split()) > 1
    assert not sampled.startswith("ppl")
    match = re.fullmatch(r"perplexity ([0-9.]+), best possible ([0-9.]+), ratio ([0-9.]+)", last)
    assert match, demo.stdout
    perplexity, best, ratio = map(float, match.groups())
    assert ratio == pytest.approx(perplexity / best, rel=1e-3)
    assert 1.0 <= ratio <= 1.05


@pytest.mark.long
def test_the_demo_says_what_it_does_and_what_can_be_typed_next(after_demo):
    folder, demo = after_demo
    steps = [line for line in demo.stderr.splitlines() if re.match(r"[1-4]/4 ", line)]
    assert len(steps) == 4
    assert "minutes" in steps[0]
    shown = demo.stderr.splitlines()
    activate, parse, ui = (line.strip() for line in shown[shown.index("Next:") + 1 :][:3])
    script = f"{activate} && command -v lm_pcfg && {parse} | head -1"
    assert Path(start(["bash", "-c", script], folder).stdout.splitlines()[0]) == BIN / "lm_pcfg"
    assert ui == "mlflow ui --backend-store-uri sqlite:///mlruns/mlflow.db"
    assert (folder / "mlruns/mlflow.db").exists()


@pytest.mark.long
def test_the_grammar_of_the_demo_parses_far_better_than_right_branching_trees(after_demo):
    result = start(["lm_pcfg", "evaluate", "embedded:test.trees", "--checkpoint", "runs/tiny"], after_demo[0])
    s_f1 = {line[:16].strip(): float(line[16:24]) for line in result.stdout.splitlines()[1:6]}
    assert s_f1["these trees"] > s_f1["right-branching"] + 10


@pytest.mark.parametrize("page", ["README.md", "docs/kernels.md"])
def test_the_python_of_a_page_runs(page):
    names: dict = {}
    for block in blocks_of(page, "python"):  # the first one imports
        exec(block, names)
    assert names["log_z"].shape == (2,)
    assert len(names["spans"]) == len(names["trees"]) == 2


DOCUMENTS = [
    path
    for pattern in ("*.md", "*/*.md", "docs/**/*.md", "lm_pcfg/**/*.md")
    for path in sorted(REPOSITORY.glob(pattern))
    if not path.relative_to(REPOSITORY).parts[0].startswith(".")
]


def test_every_relative_link_leads_to_a_file():
    broken = [
        f"{path.relative_to(REPOSITORY)}: {link}"
        for path in DOCUMENTS
        for link in re.findall(r"\]\(([^)#\s]+)\)", path.read_text(encoding="utf-8"))
        if "://" not in link and not (path.parent / link).exists()
    ]
    assert not broken


def test_readmes_are_short():
    for path in DOCUMENTS:
        if path.name == "README.md":
            most = 120 if path.parent == REPOSITORY else 60
            assert len(path.read_text(encoding="utf-8").splitlines()) <= most, path
