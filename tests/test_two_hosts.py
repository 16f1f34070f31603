"""Two hosts with a network of their own between them train together, by the command that launch/README.md shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

import namespaces
from lm_pcfg.training.metrics_file import read_metrics
from namespaces import Host
from processes import environment
from texts import write_config

REPOSITORY = Path(__file__).resolve().parents[1]
TWO_HOSTS = "accelerate launch --config_file launch/accelerate/nodes.yaml --num_machines 2"
ONE_HOST = "accelerate launch --config_file launch/accelerate/cpu.yaml lm_pcfg/train.py"
DEEPSPEED = "accelerate launch --config_file launch/accelerate/cpu.yaml --use_deepspeed"
ADDRESSES = {"alpha": "10.78.0.1", "beta": "10.78.0.2"}

reason = namespaces.skip_reason(namespaces.missing())


def documented(start: str, **variables: str) -> list[str]:
    """The command of launch/README.md that starts like this, up to its config."""
    text = (REPOSITORY / "launch" / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    words = shlex.split(re.sub(r"\$(\w+)", lambda name: variables[name[1]], line.partition(" --config ")[0]))
    files = [str(REPOSITORY / word) if word.startswith(("launch/", "lm_pcfg/")) else word for word in words[2:]]
    return [sys.executable, "-m", "accelerate.commands.launch", *files]


def losses(run: Path) -> list[tuple[float, ...]]:
    names = ("step", "train/loss", "train/gradient_norm", "valid/nll")
    return [tuple(line[name] for name in names if name in line) for line in read_metrics(run / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.skipif(reason is not None, reason=f"no simulated hosts: {reason}")
def test_two_hosts_train_as_two_processes_of_one(tmp_path):
    settings = ["--config", str(write_config(tmp_path, training={"log_every": 1}, engine={"world_size": 2}))]
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
        processes = []
        for rank, host in enumerate(hosts):
            command = documented(TWO_HOSTS, MACHINE_RANK=str(rank), FIRST_HOST=ADDRESSES["alpha"])
            inside = host.inside(*command, *settings, "name=hosts")
            env = environment(GLOO_SOCKET_IFNAME="eth0")
            processes.append(subprocess.Popen(inside, env=env, stdout=PIPE, stderr=STDOUT, text=True))
        outputs = [process.communicate(timeout=180)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert "DDP, 2 processes on 2 hosts" in outputs[0]

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
