"""Several processes that train together, as a launcher would start them, and the real launchers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import forks

ROOT = Path(__file__).resolve().parents[1]
TRAIN = str(ROOT / "lm_pcfg" / "train.py")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment(**changes: str) -> dict[str, str]:
    """One thread a process, no GPU, nothing of a launcher around the tests."""
    launchers = ("ACCELERATE_", "TORCHELASTIC_", "MLFLOW_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests"), kept.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    return kept | own | changes


def run_ranks(world_size: int, command: list[str], timeout: float = 600.0, **env: str) -> list[str]:
    """Run `python command...` on every rank to its end; what each wrote. All have to succeed."""
    port = str(free_port())
    ranks = []
    try:
        for rank in range(world_size):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
            rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": str(world_size)}
            ranks.append(forks.start(command, environment(**place, **rendezvous, **env)))
        ends = [process.wait(timeout) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, (status, output) in enumerate(ends):
        assert status == 0, f"rank {rank} ended with {status}:\n{output[-3000:]}"
    return [output for _, output in ends]


def launch_command(processes: int, *arguments: str, zero_stage: int | None = None, restarts: int = 0) -> list[str]:
    """`accelerate launch` of this many processes of lm_pcfg/train.py on the CPU."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    common = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    if zero_stage is not None:
        kind = ["--use_deepspeed", "--zero_stage", str(zero_stage)]
    else:
        kind = ["--multi_gpu"] if processes > 1 else ["--cpu"]
    if restarts:
        common += ["--max_restarts", str(restarts)]
    return [*launcher, *kind, "--num_processes", str(processes), *common, TRAIN, *arguments]


@contextmanager
def launched(command: list[str], log: Path, **env: str) -> Iterator[subprocess.Popen]:
    """A command in a process group of its own, its output in `log`; whatever is left of it is killed at the end."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=environment(**env), stdout=output, stderr=output, start_new_session=True, cwd=log.parent
        )
    try:
        yield process
    finally:
        for pid in [*descendants(process.pid), process.pid]:
            kill(pid)
        process.wait()


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found: list[int] = []
    for child in _children(pid):
        found += [child, *descendants(child)]
    return found


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def workers(launcher: int) -> list[int]:
    """Those of a launcher's descendants that run train.py, in the order of their ranks."""
    found = {}
    for pid in [launcher, *descendants(launcher)]:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if len(command) > 2 and TRAIN.encode() in command[1:3]:
            rank = next((int(line[5:]) for line in variables if line.startswith(b"RANK=")), 0)
            found.setdefault(rank, pid)  # not a child that it has just forked, which still looks like it
    return [found[rank] for rank in sorted(found)]


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition, timeout: float = 60.0, every: float = 0.05, what: str = "") -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(every)
