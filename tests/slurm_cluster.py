"""A real SLURM cluster of two nodes on this host, in namespaces of its own: nothing of the host is changed or met.

`Cluster` is the cluster, `Job` a job of one of the scripts in launch/slurm.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import namespaces
from lm_pcfg.storage.metrics_file import read_metrics
from namespaces import Host, find, wait_for

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPTS = REPOSITORY / "launch" / "slurm"
# A grammar small enough that 200 steps take seconds.
SETTINGS = (
    "model.nonterminals=12 model.preterminals=16 batch.sentences=16 training.max_steps=200 training.log_every=20 "
    "evaluation.every_epochs=null evaluation.batch_cost=100000 tracking.mlflow=false checkpoint.every_steps=25 "
    "engine.timeout_seconds=60 'model.init=normal(1, 1)'"
)
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
NODES = ("alpha", "beta")  # the controller runs on the last

CONFIGURATION = """\
ClusterName=tiny
SlurmctldHost={controller}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.socket
CredType=cred/munge
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
SlurmdParameters=config_overrides
GresTypes=gpu
MailProg=/bin/true
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = (  # CPUs and GPUs are only counted: the host has what it has
    "NodeName={name} NodeHostName={name} NodeAddr=127.0.0.1 Port={port} CPUs=4 Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket=4 ThreadsPerCore=1 RealMemory=8000 Gres=gpu:2 State=UNKNOWN"
)


def missing() -> str | None:
    """Why no cluster can run here, in words; None: it can."""
    if absent := [program for program in ("slurmctld", "slurmd", "munged", "sbatch") if find(program) is None]:
        return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge)"
    return namespaces.missing()


class Cluster:
    def __init__(self, folder: Path):
        self.root = folder
        for name in ("run", "log", "state", "munge"):
            (folder / name).mkdir(parents=True)
        key = folder / "munge" / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        key.parent.chmod(0o700)
        nodes = [NODE.format(name=name, port=port) for port, name in enumerate(NODES, start=17001)]
        self.configuration = folder / "slurm.conf"
        self.configuration.write_text(
            CONFIGURATION.format(root=folder, controller=NODES[-1], nodes="\n".join(nodes)), encoding="utf-8"
        )
        (folder / "gres.conf").write_text("".join(f"Name=gpu File=/dev/{name}\n" for name in ("zero", "full")))
        self.host = Host(NODES[-1], folder, hosts=f"127.0.0.1 {' '.join(NODES)}\n")
        try:
            run, log = folder / "run", folder / "log"
            self.command(
                "munged", "--force", f"--key-file={key}", f"--socket={run}/munge.socket",
                f"--pid-file={run}/munged.pid", f"--log-file={log}/munged.log", f"--seed-file={key.parent}/munge.seed",
            )  # fmt: skip
            self.command("slurmctld", "-c")
            for name in NODES:
                self.command("unshare", "--uts", "sh", "-c", f"hostname {name} && exec slurmd -N {name}")
            self.wait_for(lambda: set(self.node_states().values()) == {"idle"}, 20, "the nodes to be idle")
        except BaseException:
            self.host.stop()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.host.stop()

    # ---- commands ---------------------------------------------------------------------------------------------------

    def command(self, *words: str, cwd: Path | None = None, check: bool = True, **environment: str) -> str:
        return self.host.command(*words, cwd=cwd, check=check, SLURM_CONF=str(self.configuration), **environment)

    def sbatch(self, *words: str, cwd: Path, **environment: str) -> str:
        """Submit; returns the job's id."""
        return self.command("sbatch", "--parsable", *words, cwd=cwd, **environment).strip()

    def job(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        return dict(re.findall(r"(\w+)=(\S*)", self.command("scontrol", "show", "job", job)))

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]

    def node_states(self) -> dict[str, str]:
        lines = self.command("sinfo", "--noheader", "--Node", "--format=%N %t", check=False).splitlines()
        return dict(line.split() for line in lines)

    def start_again(self, job: str) -> None:
        """Once the job is back in the queue: not in two minutes, as SLURM has it, but now."""
        fields = {"JobState": "PENDING", "Reason": "BeginTime"}
        self.wait_for(lambda: self.job(job).items() >= fields.items(), 180, f"job {job} to be requeued")
        time.sleep(2.5)  # a node would take a job that comes back in the same second for the one it has just killed
        self.command("scontrol", "update", f"JobId={job}", "StartTime=now")

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def wait_for(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        wait_for(condition, seconds, what, self.logs)

    def wait_for_state(self, job: str, *states: str, seconds: float = 300) -> str:
        self.wait_for(lambda: self.state(job) in states, seconds, f"job {job} to be {' or '.join(states)}")
        return self.state(job)

    def logs(self) -> str:
        """The ends of the daemons' logs, for the message of a failure."""
        return "\n".join(
            f"--- {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-15:])
            for file in sorted((self.root / "log").glob("slurm*.log"))
        )


class Job:
    """A job of one of the scripts in launch/slurm."""

    def __init__(self, cluster: Cluster, folder: Path, script: str, *options: str, settings: str = "", **more: str):
        """The run is called like the script, or as name=... among the settings says."""
        self.cluster = cluster
        words = shlex.split(f"name={script} {SETTINGS} {settings}")
        name = [word for word in words if word.startswith("name=")][-1].removeprefix("name=")
        self.run = folder / "runs" / name
        self.id = cluster.sbatch(
            *options, f"--output={self.run.name}-%j.out", str(SCRIPTS / f"{script}.sbatch"), cwd=folder,
            CONFIG=str(REPOSITORY / "configs" / "tiny.yaml"), VENV=sys.prefix, OMP_NUM_THREADS="1",
            OVERRIDES=shlex.join(words), **more,
        )  # fmt: skip
        self.output = folder / f"{self.run.name}-{self.id}.out"

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def wait_for(self, text: str, seconds: float = 180) -> None:
        self.cluster.wait_for(lambda: text in self.said() or self.state() in ENDED, seconds, f"{text!r}")
        assert text in self.said(), self.said()

    def wait_for_checkpoint(self) -> None:
        """It is in mid-training then."""
        saved = self.run / "checkpoints"
        self.cluster.wait_for(lambda: any(saved.glob("step-*[0-9]")) or self.state() in ENDED, 180, "a checkpoint")
        assert self.state() == "RUNNING", self.said()

    def state(self) -> str:
        return self.cluster.state(self.id)

    def restarts(self) -> int:
        return int(self.cluster.job(self.id)["Restarts"])

    def processes(self) -> list[int]:
        return self.cluster.host.processes(f"train.py.*name={self.run.name} ")

    def end(self, *states: str) -> None:
        ended = self.cluster.wait_for_state(self.id, *ENDED)
        assert ended in (states or ("COMPLETED",)), self.said()
        assert not self.processes()

    def metrics(self) -> list[dict[str, Any]]:
        """Every line, without what was measured with a clock."""
        lines = read_metrics(self.run / "metrics.jsonl")
        timed = ("time", "second", "ranks/")
        return [{key: value for key, value in line.items() if not any(t in key for t in timed)} for line in lines]
