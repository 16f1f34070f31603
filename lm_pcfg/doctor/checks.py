"""All checks, each in a process of its own: one that crashes, hangs or is killed is a finding and ends nothing else."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from lm_pcfg.doctor import compute, processes, stores
from lm_pcfg.doctor.finding import Check, Finding, public

CHECKS: dict[str, Check] = {
    "python": compute.python,
    "packages": compute.packages,
    "torch": compute.pytorch,
    "gpu": compute.gpu,
    "triton": compute.triton,
    "gloo": processes.gloo,
    "nccl": processes.nccl,
    "deepspeed": processes.deepspeed,
    "slurm": processes.slurm,
    "mlflow": stores.tracking,
    "disk": stores.disk,
    "embedded corpus": stores.embedded_corpus,
}
SECONDS = 120.0  # the longest that a check may take; Triton's compiler needs the most
#: What helps where a check does not know: mostly a package is missing, or belongs to another Python.
_MEND = "make demo installs what is needed into .venv; or: pip install -e ."


def examine(
    names: Iterable[str] = CHECKS, *, seconds: float = SECONDS, done: Callable[[str], None] = lambda name: None
) -> list[Finding]:
    """Make these checks, some at a time, and return what they found in their order."""

    def one(name: str) -> Finding:
        found = examine_one(name, seconds)
        done(name)
        return found

    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(one, names))


def examine_one(name: str, seconds: float = SECONDS, python: str = sys.executable) -> Finding:
    began = time.perf_counter()
    found = _in_process_of_its_own([python, "-P", "-m", "lm_pcfg.doctor", name], seconds)
    found.name, found.seconds = name, round(time.perf_counter() - began, 2)
    if found.state == "broken" and not found.mend:
        found.mend = _MEND
    return found


def _in_process_of_its_own(command: list[str], seconds: float) -> Finding:
    ours = os.pathsep.join(path for path in sys.path if path)  # also without an installation
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True, env={**os.environ, "PYTHONPATH": ours},
        )  # fmt: skip
    except OSError as error:
        return Finding("broken", f"the check could not be started: {error.strerror}", "end some processes, try again")
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Finding("broken", f"the check did not end within {seconds:g} s", "try again on an idle machine")
    finally:
        with suppress(ProcessLookupError, PermissionError):  # what it started ends, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    try:
        return Finding(**json.loads(output.splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        said = (errors.strip().splitlines() or ["without a word"])[-1]
        ended = f"signal {-process.returncode}" if process.returncode < 0 else f"status {process.returncode}"
        return Finding("broken", public(f"the check ended with {ended}: {said}"))


def about() -> dict[str, Any]:
    """Return what a bug report has to say about the machine; neither its name nor its user's."""
    return {
        "lm_pcfg": stores.installed_version("lm_pcfg") or "not installed",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
    }
