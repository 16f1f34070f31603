"""A Ctrl-C while a command is still being imported ends it with one line, whatever is imported just then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def interrupted(script: str, module: str, how: str = "raised", action=signal.SIG_DFL) -> subprocess.CompletedProcess:
    """Run `python SCRIPT --help` with a Ctrl-C when it imports a module. script: `lm_pcfg`, or a path."""
    program = f"""
import runpy, signal, sys
class InDestructor:  # Python prints and forgets an exception that comes up here
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
class CtrlC:
    def find_spec(self, name, *_):
        if name == {module!r}:
            sys.meta_path.remove(self)
            InDestructor() if {how!r} == "forgotten" else signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, CtrlC())
sys.argv = [{script!r}, "--help"]
if {script!r} == "lm_pcfg":
    runpy.run_module("lm_pcfg", run_name="__main__", alter_sys=True)
else:
    sys.path.insert(0, "lm_pcfg")  # as Python does with the folder of a script
    runpy.run_path({script!r}, run_name="__main__")
"""
    path = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "kernels")))
    return subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": path},
        # Tests begun in the background of a shell script ignore Ctrl-C, and would hand that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, action),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("script", "module"),
    [
        ("lm_pcfg", "lm_pcfg.cli"),
        ("lm_pcfg", "typer"),
        ("lm_pcfg", "lm_pcfg.commands.text"),
        ("lm_pcfg/train.py", "lm_pcfg.distributed"),
        ("lm_pcfg/train.py", "lm_pcfg.cli"),
    ],
)
@pytest.mark.parametrize("how", ["raised", "forgotten"])
def test_ctrl_c_while_something_is_imported_is_one_line(script, module, how):
    result = interrupted(script, module, how)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "lm_pcfg: interrupted\n")


def test_ctrl_c_before_anything_is_imported_is_one_line():
    result = interrupted("lm_pcfg/train.py", "lm_pcfg")
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "lm_pcfg: interrupted\n")


def test_a_command_that_was_started_with_ctrl_c_ignored_goes_on():
    result = interrupted("lm_pcfg", "typer", action=signal.SIG_IGN)
    assert (result.returncode, result.stderr) == (0, "")
    assert "Usage" in result.stdout
