"""A process of tests that is killed takes with it what it started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import watchdog
from processes import alive, environment, wait_until

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")

#: As a test that runs a launcher, which has a session of its own and starts a rank with another one.
TESTS = """
import sys, time
from pathlib import Path
import watchdog
from processes import launched
watchdog.start()
launcher = '''
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
print(rank.pid, flush=True)
time.sleep(300)
'''
log = Path(sys.argv[1])
with launched([sys.executable, "-c", launcher], log) as process:
    while not log.read_text().strip():
        time.sleep(0.02)
    print(process.pid, log.read_text().strip(), flush=True)
    time.sleep(300)
"""


def test_a_killed_test_leaves_no_launcher_and_no_rank(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TESTS, str(tmp_path / "log")]
    with (
        subprocess.Popen(["sleep", "300"], start_new_session=True) as bystander,  # of this process, which lives
        subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as tests,
    ):
        try:
            assert tests.stdout is not None
            started = [int(pid) for pid in tests.stdout.readline().split()]
            assert len(started) == 2
            assert all(map(alive, started))
            tests.kill()
            wait_until(lambda: not any(map(alive, started)), 20, what="launcher and rank to end")
            assert alive(bystander.pid)
        finally:
            tests.kill()
            bystander.kill()


def test_these_tests_have_a_watchdog() -> None:
    assert watchdog.MARK in os.environ
    with subprocess.Popen(["sleep", "300"]) as child:
        wait_until(lambda: child.pid in watchdog.marked(os.environ[watchdog.MARK]), what="the child to be found")
        child.kill()
