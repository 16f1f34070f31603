"""Two hosts with a network of their own between them train together, by the command that docs/clusters.md shows."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import STDOUT

import pytest

import namespaces
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.metrics_file import read_metrics
from namespaces import Host
from processes import alive, environment, wait_until
from texts import write_config

REPOSITORY = Path(__file__).resolve().parents[1]
TWO_HOSTS = "accelerate launch --config_file launch/accelerate/nodes.yaml --num_machines 2"
ONE_HOST = "accelerate launch --config_file launch/accelerate/cpu.yaml lm_pcfg/train.py"
DEEPSPEED = "accelerate launch --config_file launch/accelerate/cpu.yaml --use_deepspeed"
ADDRESSES = {"alpha": "10.78.0.1", "beta": "10.78.0.2"}

reason = namespaces.skip_reason(namespaces.missing())


def documented(start: str, **variables: str) -> list[str]:
    """The command of docs/clusters.md that starts like this, up to its config."""
    text = (REPOSITORY / "docs" / "clusters.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    words = shlex.split(re.sub(r"\$(\w+)", lambda name: variables[name[1]], line.partition(" --config ")[0]))
    files = [str(REPOSITORY / word) if word.startswith(("launch/", "lm_pcfg/")) else word for word in words[2:]]
    return [sys.executable, "-m", "accelerate.commands.launch", *files]


def losses(run: Path) -> list[tuple[float, ...]]:
    names = ("step", "train/loss", "train/gradient_norm", "valid/nll")
    return [tuple(line[name] for name in names if name in line) for line in read_metrics(run / "metrics.jsonl")]


@pytest.fixture
def hosts(tmp_path) -> Iterator[list[Host]]:
    """Two of them, with a virtual cable in between."""
    hosts_file = "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
    with ExitStack() as stack:
        hosts = [stack.enter_context(Host(name, tmp_path, hosts_file)) for name in ADDRESSES]
        one, other = (str(host.first) for host in hosts)
        cable = ["ip", "link", "add", "eth0", "netns", one, "type", "veth", "peer", "eth0", "netns", other]
        if (result := subprocess.run(cable, capture_output=True, text=True)).returncode:
            pytest.skip(str(namespaces.skip_reason(f"no virtual network: {result.stderr}")))
        for host in hosts:
            host.command("ip", "address", "add", f"{ADDRESSES[host.name]}/24", "dev", "eth0")
            host.command("ip", "link", "set", "eth0", "up")
        yield hosts


def start_on(hosts: list[Host], settings: list[str], options: list[str], folder: Path) -> list[subprocess.Popen]:
    """The documented command on each; what it says is in `folder`, in a file called like the host."""
    processes = []
    for rank, host in enumerate(hosts):
        command = documented(TWO_HOSTS, MACHINE_RANK=str(rank), FIRST_HOST=ADDRESSES["alpha"])
        command[3:3] = options
        inside = host.inside(*command, *settings)
        with (folder / host.name).open("wb") as output:
            env = environment(GLOO_SOCKET_IFNAME="eth0")
            processes.append(subprocess.Popen(inside, env=env, stdout=output, stderr=STDOUT))
    return processes


def end_well(processes: list[subprocess.Popen], folder: Path) -> str:
    """What the first host said."""
    statuses = [process.wait(timeout=180) for process in processes]
    said = [(folder / name).read_text() for name in ADDRESSES]
    assert statuses == [0, 0], "\n".join(said)
    return said[0]


@pytest.mark.long
@pytest.mark.skipif(reason is not None, reason=f"no simulated hosts: {reason}")
def test_two_hosts_train_as_two_processes_of_one(tmp_path, hosts):
    settings = ["--config", str(write_config(tmp_path, training={"log_every": 1}, engine={"world_size": 2}))]
    said = end_well(start_on(hosts, [*settings, "name=hosts"], [], tmp_path), tmp_path)
    assert "DDP, 2 processes on 2 hosts" in said

    for name, start, engine in (("host", ONE_HOST, "DDP"), ("deepspeed", DEEPSPEED, "DeepSpeed ZeRO 2")):
        command = [*documented(start), *settings, f"name={name}"]
        result = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=180)
        assert result.returncode == 0, result.stderr
        assert f"{engine}, 2 processes on 1 host" in result.stderr
    expected = losses(tmp_path / "runs" / "host")
    assert len(expected) >= 8
    assert losses(tmp_path / "runs" / "hosts") == expected  # bit for bit
    for one, other in zip(losses(tmp_path / "runs" / "deepspeed"), expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.chaos
@pytest.mark.skipif(reason is not None, reason=f"no simulated hosts: {reason}")
def test_launchers_on_two_hosts_restart_together(tmp_path, hosts):
    """A worker is killed on each host: that costs each launcher the two restarts it has, and not one more."""
    steps = {"epochs": 1000, "max_steps": 600, "log_every": 100}
    config = write_config(
        tmp_path, training=steps, engine={"world_size": 2, "timeout_seconds": 60},
        checkpoint={"every_steps": 50}, evaluation={"every_epochs": None},
    )  # fmt: skip
    settings = ["--config", str(config), "resume=auto"]
    run = tmp_path / "runs" / "hosts"
    started = start_on(hosts, [*settings, "name=hosts"], ["--max_restarts", "2"], tmp_path)
    for host, step in (("beta", 100), ("alpha", 200)):
        wait_until(lambda step=step: checkpoint.step_of(checkpoint.latest(run) or Path("step-0")) >= step, 120)
        (there,) = [other for other in hosts if other.name == host]
        (worker,) = there.processes(r"^\S*python\S* (-u )?\S*/lm_pcfg/train\.py ")
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda worker=worker: not alive(worker), 10)
    said = end_well(started, tmp_path)
    assert said.count("continued from step") == 2
    command = [*documented(ONE_HOST), *settings, "name=host"]
    subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, timeout=180, check=True)
    assert losses(run) == losses(tmp_path / "runs" / "host")  # bit for bit
