"""Every command the README and the manual show is started here, in a folder of its own, as a newcomer would.

test_first_steps.py has docs/first-steps.md, test_two_hosts.py docs/clusters.md, test_trees_commands.py docs/trees.md.
"""

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


def commands() -> list[str]:
    """Without repetition, in the order of the pages."""
    pages = ("README.md", "docs/data.md", "docs/training.md", "docs/export.md", "docs/benchmarks.md", "docs/report.md")
    blocks = [block for page in pages for block in blocks_of(page, "bash")]
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))


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
def after_demo(tmp_path_factory) -> tuple[Path, str]:
    """A checkout in which `make demo` has run, with the environment of this test in place of a new one; its output."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in ("Makefile", "pyproject.toml", "configs", "lm_pcfg", "kernels"):
        (checkout / name).symlink_to(REPOSITORY / name)
    demo = ["make", "demo", f"BIN={BIN}", "-o", ".venv/.installed"]  # -o: taken as up to date
    return checkout, start(demo, checkout, timeout=900).stdout


@pytest.mark.long
def test_the_demo_comes_within_five_percent_of_the_best_possible(after_demo):
    _, output = after_demo
    *before, last = output.strip().splitlines()
    drawn = [line.split()[-1] for line in before if "─" in line]
    assert drawn == ["the", "small", "doctor", "tastes", "the", "dogs"]
    match = re.fullmatch(r"perplexity ([0-9.]+), best possible ([0-9.]+), ratio ([0-9.]+)", last)
    assert match, output
    perplexity, best, ratio = map(float, match.groups())
    assert ratio == pytest.approx(perplexity / best, rel=1e-3)
    assert 1.0 <= ratio <= 1.05


@pytest.mark.long
@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_readme_runs(command, after_demo):
    folder, output = after_demo
    words = shlex.split(command)
    if words[0] == "make":
        if words == ["make", "demo"]:
            assert "perplexity" in output  # the fixture ran it
        else:  # a test that starts all tests would never end: see that make knows how
            assert "pytest" in start([*words, "-n"], folder).stdout
        return
    if {"train", "lm_pcfg/train.py"} & set(words[:4]) and "--print-config" not in words:
        words += ["training.max_steps=2", "evaluation.batch_cost=100000"]  # the whole training is the demo's
    if words[:2] == ["lm_pcfg", "evaluate"]:
        words += ["--checkpoint", "runs/tiny"]  # the demo's; other commands have trained for two steps since
    result = start(words, folder)
    if words[:2] == ["lm_pcfg", "evaluate"]:
        s_f1 = {line[:16].strip(): float(line[16:24]) for line in result.stdout.splitlines()[1:6]}
        assert s_f1["these trees"] > s_f1["right-branching"] + 10
    if words[0] == "lm_pcfg" and words[1] in ("score", "info"):
        assert result.stdout.strip()


@pytest.mark.parametrize("page", ["README.md", "docs/kernels.md"])
def test_the_python_of_a_page_runs(page):
    names: dict = {}
    for block in blocks_of(page, "python"):  # the first one imports
        exec(block, names)
    assert names["log_z"].shape == (2,)
    assert len(names["spans"]) == len(names["trees"]) == 2


def test_the_readme_shows_commands():
    assert len(commands()) >= 20


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
