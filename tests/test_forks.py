"""Forked programmes are what new processes would be: arguments, environment, folder, output, exit status, a kill."""

from __future__ import annotations

import signal

import pytest

import forks
from processes import environment, run_ranks, wait_until

PROGRAM = """
import atexit, os, random, sys, time
atexit.register(print, "at the end")
print(sys.argv[1:], os.environ["RANK"], "PATH" in os.environ, os.getcwd(), __name__, random.random())
sys.stdout.flush()
print("torch" in sys.modules, file=sys.stderr)
if sys.argv[1] == "wait":
    open("waits", "w").close()
    time.sleep(600)
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""


@pytest.mark.long
def test_a_fork_is_like_a_new_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    outputs = run_ranks(2, [str(program), "0", "x y"])
    for rank, output in enumerate(outputs):
        assert output.startswith(f"['0', 'x y'] {rank} True {tmp_path} __main__ ")
        assert output.endswith("\nTrue\nat the end\n")  # what it would have to import is there, and nothing is told
    assert outputs[0].split()[-5] != outputs[1].split()[-5]  # each draws numbers of its own
    with pytest.raises(AssertionError, match=r"(?s)rank 1 ended with 3:.*'3'"):
        run_ranks(2, [str(program), "3"])

    waiting = forks.start([str(program), "wait"], {"RANK": "0"})
    wait_until((tmp_path / "waits").exists, what="the programme runs")
    waiting.kill()
    status, output = waiting.wait(60)
    assert status == -signal.SIGKILL
    assert "0 False" in output  # the environment is what was given, and nothing else


@pytest.mark.long
def test_a_module_and_a_time_limit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").write_text("import sys, time; print(__name__, sys.argv[1:]); time.sleep(float(sys.argv[1]))")
    assert forks.start(["-m", "here", "0"], environment()).wait(60) == (0, "__main__ ['0']\n")
    slow = forks.start(["-m", "here", "600"], environment())
    with pytest.raises(TimeoutError, match=r"more than 0\.1 s"):
        slow.wait(0.1)
    slow.kill()
    assert slow.wait(60)[0] == -signal.SIGKILL
