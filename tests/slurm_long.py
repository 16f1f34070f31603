"""`make slurm`: trainings of 3 and 4 ranks on the SLURM cluster, interrupted at random moments in every way there is.

Each has to end with the metrics of an undisturbed one, bit for bit. About a quarter of an hour.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import slurm_cluster
from slurm_cluster import Cluster, Job

CASES = {  # name: script, options, environment
    "DDP, 2 nodes x 2": ("ddp", ["--nodes=2"], {"PROCESSES_PER_NODE": "2"}),
    "DDP, 1 node x 3": ("single_node", [], {"PROCESSES_PER_NODE": "3"}),
    "ZeRO 2, 2 nodes x 2": ("deepspeed", ["--nodes=2"], {"PROCESSES_PER_NODE": "2", "ZERO": "2"}),
}


def requeue(job: Job) -> None:
    job.cluster.command("scontrol", "requeue", job.id)


def early_warning(job: Job) -> None:
    job.cluster.command("scancel", "--batch", "--signal=USR1", job.id)


def terminate_steps(job: Job) -> None:
    job.cluster.wait_for(lambda: bool(job.processes()), 60, "a step")
    job.cluster.command("scancel", "--signal=TERM", job.id)


def kill_a_worker(job: Job) -> None:
    pattern = rf"python\S* (-u )?\S+/train.py .*name={job.run.name} "
    job.cluster.wait_for(lambda: bool(job.cluster.host.processes(pattern)), 60, "a worker")
    os.kill(random.choice(job.cluster.host.processes(pattern)), signal.SIGKILL)


INTERRUPTIONS: list[Callable[[Job], None]] = [requeue, early_warning, terminate_steps, kill_a_worker]


def interrupted(job: Job, times: int) -> list[str]:
    """What was done to it, and when: one time in three while it starts, else after a new checkpoint."""
    done: list[str] = []
    while len(done) < times:
        job.cluster.wait_for_state(job.id, "RUNNING", *slurm_cluster.ENDED)
        before, saved = job.restarts(), newest_checkpoint(job)
        if random.random() < 1 / 3:
            time.sleep(random.uniform(0, 10))
        else:
            moved_on = lambda saved=saved: newest_checkpoint(job) != saved or job.state() in slurm_cluster.ENDED  # noqa: E731
            job.cluster.wait_for(moved_on, 300, "a new checkpoint")
            time.sleep(random.uniform(0, 0.5))
        if job.state() in slurm_cluster.ENDED:
            break
        action = random.choice(INTERRUPTIONS)
        at = newest_checkpoint(job)
        action(job)
        ended = lambda before=before: job.restarts() > before or job.state() in slurm_cluster.ENDED  # noqa: E731
        patience = time.monotonic() + 90
        while not ended() and time.monotonic() < patience:
            time.sleep(0.2)
        if job.restarts() > before:
            done.append(f"{action.__name__} ({at})")
            job.cluster.start_again(job.id)
    return done


def newest_checkpoint(job: Job) -> str:
    names = sorted(path.name for path in job.run.glob("checkpoints/step-*[0-9]"))
    return names[-1] if names else "no checkpoint"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=4, help="interruptions of each training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cases with this in their name")
    options = parser.parse_args()
    if reason := slurm_cluster.missing():
        sys.exit(f"there can be no SLURM cluster here: {reason}")
    random.seed(options.seed)
    failures = 0
    with tempfile.TemporaryDirectory() as root, Cluster(Path(root) / "slurm") as cluster:
        folder = Path(root)
        for name, (script, sbatch_options, environment) in CASES.items():
            if options.only not in name:
                continue
            settings = "training.max_steps=400 checkpoint.every_steps=30"
            whole = Job(
                cluster, folder, script, *sbatch_options, settings=f"name=whole-{script} {settings}", **environment
            )
            whole.end()
            broken = Job(
                cluster, folder, script, *sbatch_options, settings=f"name=broken-{script} {settings}", **environment
            )
            done = interrupted(broken, options.times)
            broken.end()
            same = broken.metrics() == whole.metrics()
            loss = broken.metrics()[-1]["valid/nll"]
            result = f"final nll {loss:.6f}, {'the same' if same else 'NOT THE SAME'}"
            # More than were asked for: SLURM may take a job that comes back at once for the one it is still killing.
            if broken.restarts() != len(done):
                result += f", {broken.restarts()} restarts"
            failures += not same or broken.restarts() < len(done) or not done
            print(f"{name}: {', '.join(done)}: {result}", flush=True)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
