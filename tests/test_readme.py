"""Every command the README shows is started here, in a folder of its own, as a newcomer would."""

from __future__ import annotations

import atexit
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def commands() -> list[str]:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def environment() -> dict[str, str]:
    ours = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    for name in ("MLFLOW_TRACKING_URI", "VENV", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS"):
        ours.pop(name, None)  # `make test` hands its own variables down, and prints folders when below another
    return ours


def start(command: list[str], folder: Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout, env=environment())
    assert result.returncode == 0, f"{shlex.join(command)}\n{result.stdout}\n{result.stderr}"
    return result


@cache
def start_demo() -> tuple[tempfile.TemporaryDirectory, subprocess.Popen[str]]:
    """`make demo` in a checkout of its own, with the environment of this test in place of a new one.

    Three minutes of training: begun before the first test (conftest.py), at the lowest priority.
    """
    checkout = tempfile.TemporaryDirectory()
    for name in ("Makefile", "pyproject.toml", "configs", "lm_pcfg", "kernels"):
        Path(checkout.name, name).symlink_to(REPOSITORY / name)
    demo = ["nice", "-n", "19", "make", "demo", f"BIN={BIN}", "-o", ".venv/.installed"]  # -o: taken as up to date
    with open(Path(checkout.name, "demo.out"), "w") as out, open(Path(checkout.name, "demo.err"), "w") as err:
        process = subprocess.Popen(
            demo, cwd=checkout.name, stdout=out, stderr=err, text=True, env=environment(), start_new_session=True
        )

    def end() -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    atexit.register(end)
    return checkout, process


BEGIN_EARLY = {
    "test_the_demo_comes_within_five_percent_of_the_best_possible": start_demo,
    "test_every_command_of_the_readme_runs": start_demo,
}


@pytest.fixture(scope="module")
def after_demo() -> tuple[Path, str]:
    """A checkout in which `make demo` has run."""
    checkout, process = start_demo()
    folder = Path(checkout.name)
    code = process.wait(timeout=900)
    assert code == 0, (folder / "demo.out").read_text() + (folder / "demo.err").read_text()
    return folder, (folder / "demo.out").read_text()


@pytest.mark.slow
def test_the_demo_comes_within_five_percent_of_the_best_possible(after_demo):
    _, output = after_demo
    last = output.strip().splitlines()[-1]
    match = re.fullmatch(r"perplexity ([0-9.]+), best possible ([0-9.]+), ratio ([0-9.]+)", last)
    assert match, output
    perplexity, best, ratio = map(float, match.groups())
    assert ratio == pytest.approx(perplexity / best, rel=1e-3)
    assert 1.0 <= ratio <= 1.05


@pytest.mark.slow
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
    result = start(words, folder)
    if words[0] == "lm_pcfg" and words[1] in ("score", "info"):
        assert result.stdout.strip()


def test_the_python_of_the_readme_runs():
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 1
    names: dict = {}
    exec(blocks[0], names)
    assert names["log_z"].shape == (2,)
    assert len(names["trees"]) == 2


def test_the_readme_shows_commands():
    assert len(commands()) >= 8
