"""Python programmes without the seconds that their imports take: a process that has imported PyTorch forks them.

`start(command, environment)` is `subprocess.Popen([sys.executable, *command])`, with `-m MODULE` or a script. What only
a programme of its own shows (its start, what it imports) is tested with launchers: test_faults.py, test_two_hosts.py.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULES = ("lm_pcfg.cli", "lm_pcfg.training.loop", "accelerate", "safetensors.torch", "torch._dynamo")


class Fork:
    """A programme that was started."""

    def __init__(self, pid: int, output: Path, status: Callable[[], int | None]):
        """status: None while it runs."""
        self.pid, self._output, self._status, self._ended = pid, output, status, False

    def wait(self, timeout: float) -> tuple[int, str]:
        """Its exit status, negative for a signal, and what it wrote; a TimeoutError if it runs longer."""
        deadline = time.monotonic() + timeout
        while (status := self._status()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} runs for more than {timeout} s: {self._output.read_text()}")
            time.sleep(0.02)
        self._ended = True
        text = self._output.read_text(errors="replace")
        self._output.unlink()
        return status, text

    def kill(self) -> None:
        if not self._ended:  # afterwards the number may be another's
            os.kill(self.pid, signal.SIGKILL)


def start(command: list[str], environment: dict[str, str]) -> Fork:
    """Start `python command...` in the working folder of this process; as a new process where it may use a GPU."""
    descriptor, output = tempfile.mkstemp(prefix="fork-")
    try:
        if environment.get("CUDA_VISIBLE_DEVICES"):
            whole = [sys.executable, *command]
            process = subprocess.Popen(whole, env=environment, stdout=descriptor, stderr=subprocess.STDOUT)
            return Fork(process.pid, Path(output), process.poll)
        pid = _ask(["start", command, environment, os.getcwd(), output])
        return Fork(pid, Path(output), lambda: _ask(["status", pid]))
    finally:
        os.close(descriptor)


def _ask(request: list) -> Any:
    process = _server(os.getpid())
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps(request), file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())


@functools.cache
def _server(_: int) -> subprocess.Popen:
    """One for each process that runs tests. It ends when its standard input does."""
    from processes import environment

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, __file__], env=environment(), text=True, **pipes)


# ---- in the process that forks --------------------------------------------------------------------------------------


def serve() -> tuple[list[str], dict[str, str]]:
    """Answer requests; return in a forked process, with the command that it shall run and its environment."""
    for module in MODULES:
        __import__(module)
    gc.freeze()  # forked processes need not look through what was imported, not even at their end
    for line in sys.stdin:
        what, *request = json.loads(line)
        if what == "start":
            command, environment, folder, output = request
            pid = os.fork()
            if pid == 0:
                os.chdir(folder)
                for descriptor, target in ((0, os.devnull), (1, output), (2, output)):
                    os.dup2(os.open(target, os.O_RDWR | os.O_APPEND), descriptor)
                random.seed()  # of its own, as in a new process
                return command, environment
            print(json.dumps(pid), flush=True)
        else:
            ended, status = os.waitpid(*request, os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if ended else None), flush=True)
    os._exit(0)


def run(command: list[str], environment: dict[str, str]) -> int:
    """Run it as `python` would; return its exit status."""
    os.environ.clear()
    os.environ |= environment
    try:
        if command[0] == "-m":
            sys.argv, sys.path[0] = command[1:], os.getcwd()
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    status = run(*serve())
    # An orderly end, but for taking apart what was imported: that takes a second, and what is frozen would be told as
    # leaked.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
