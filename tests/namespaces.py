"""Simulated hosts: processes, network, host name and mounts of their own, gone without a trace when stopped.

When the first process of a host is killed, or this one dies, the kernel ends all the others there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

# The first process: our own /etc/hosts, then it only waits, reaping what is left behind. A host with addresses 127.*
# alone counts as having no IPv4 (AI_ADDRCONFIG): hence another one, on the loopback device.
SET_UP = """
hostname "$1" && mount --bind "$2" /etc/hosts && ip link set lo up && ip address add 10.77.77.77/32 dev lo || exit 1
echo ready
"""
FIRST = SET_UP + "while :; do sleep 3600 & wait $!; done\n"
NAMESPACES = ("--mount", "--uts", "--net", "--pid")


def missing() -> str | None:
    """Why there can be no simulated hosts here, in words; None: there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if absent := [program for program in ("unshare", "nsenter", "setpriv", "ip") if find(program) is None]:
        return f"not installed: {', '.join(absent)} (apt-get install util-linux iproute2)"
    command = ["unshare", *NAMESPACES, "--fork", "--mount-proc", "sh", "-c", SET_UP, "sh", "x", "/etc/hosts"]
    probe = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return None if probe.stdout == "ready\n" else f"no namespaces: {probe.stderr.strip()}"


def skip_reason(reason: str | None) -> str | None:
    """For `pytest.mark.skipif`; an error where LM_PCFG_REQUIRE_SLURM says that all was installed, as in CI.

    What the kernel does not allow is no mistake of the installation, and only skipped.
    """
    if reason and reason.startswith("not installed") and os.environ.get("LM_PCFG_REQUIRE_SLURM"):
        raise RuntimeError(f"LM_PCFG_REQUIRE_SLURM is set, but there can be no cluster here: {reason}")
    return reason


def find(program: str) -> str | None:
    return shutil.which(program, path=search_path())


def search_path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def wait_for(condition: Callable[[], bool], seconds: float, what: str, details: Callable[[], str] = str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}\n{details()}"
        time.sleep(0.2)


class Host:
    """with Host("alpha", folder) as host: host.command("hostname")"""

    def __init__(self, name: str, folder: Path, hosts: str = ""):
        """hosts: lines of /etc/hosts besides localhost."""
        self.name, self.folder = name, folder
        hosts_file = folder / f"hosts-{name}"
        hosts_file.write_text(f"127.0.0.1 localhost\n10.77.77.77 loopback\n{hosts}")
        self._unshare = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc",
             "bash", "-c", FIRST, "bash", name, str(hosts_file)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != "ready\n":
            raise RuntimeError("no namespaces")
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
        self.first = int(children[0])  # process id, seen from outside, of the first process inside

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._unshare.kill()  # and with it the first process inside (--kill-child), and with that all others
        self._unshare.wait()
        wait_for(lambda: not Path(f"/proc/{self.first}").exists(), 30, "the namespace to end")

    def inside(self, *words: str, cwd: Path | None = None) -> list[str]:
        """The command that runs a command inside."""
        enter = ["nsenter", f"--target={self.first}", "--mount", "--uts", "--net", "--pid"]
        return [*enter, f"--wd={cwd or self.folder}", find(words[0]) or words[0], *words[1:]]

    def command(self, *words: str, cwd: Path | None = None, check: bool = True, **environment: str) -> str:
        """Run it, wait, and give back what was printed."""
        result = subprocess.run(
            self.inside(*words, cwd=cwd), env=plain_environment() | environment,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert not check or result.returncode == 0, f"{words}: {result.stderr}{result.stdout}"
        return result.stdout

    def processes(self, pattern: str) -> list[int]:
        """Ids, seen from outside, of living processes inside whose command line has the pattern."""
        namespace = os.readlink(f"/proc/{self.first}/ns/pid")
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if re.search(pattern, command) and os.readlink(folder / "ns/pid") == namespace:
                    found.append(int(folder.name))
            except OSError:
                continue  # it ended meanwhile
        return found


def plain_environment() -> dict[str, str]:
    """Not that of the tests: `make` and pytest have variables of their own."""
    return {"PATH": search_path(), "HOME": os.environ.get("HOME", "/root"), "LANG": "C.UTF-8"}
