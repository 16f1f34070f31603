"""The repository's own sbatch scripts, unmodified, on a real SLURM cluster of two nodes on this host."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import namespaces
import slurm_cluster
from command_line import lm_pcfg
from lm_pcfg.corpus.preparation.prepare import PrepareOptions, prepare
from lm_pcfg.corpus.vocabulary import VocabularyOptions
from slurm_cluster import Cluster, Job
from small_runs import write_untrained_run
from texts import write_text

reason = namespaces.skip_reason(slurm_cluster.missing())
pytestmark = [pytest.mark.long, pytest.mark.skipif(reason is not None, reason=f"no SLURM cluster: {reason}")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where jobs are submitted: not in the repository, and with a space in its name."""
    folder = tmp_path_factory.mktemp("jobs") / "my experiments"
    folder.mkdir()
    return folder


# ---- training on two nodes, undisturbed and requeued ----------------------------------------------------------------

ENGINES = {"ddp": "DDP, 2 processes on 2 hosts", "deepspeed": "DeepSpeed ZeRO 3, 2 processes on 2 hosts"}


@pytest.fixture(scope="module", params=ENGINES)
def undisturbed(request, cluster, folder) -> Job:
    job = Job(cluster, folder, request.param, "--nodes=2", ZERO="3")
    job.end()
    return job


def test_a_job_on_two_nodes_trains_on_both_and_logs_every_rank(undisturbed):
    assert (undisturbed.run / "FINISHED").exists()
    assert undisturbed.restarts() == 0
    assert ENGINES[undisturbed.run.name] in undisturbed.said()
    logs = {
        node: list(undisturbed.run.glob(f"logs/job-*/start-0/node-{node}/*/attempt_0/0/stderr.log")) for node in (0, 1)
    }
    assert [len(files) for files in logs.values()] == [1, 1]
    assert "finished after step 200" in logs[0][0].read_text()


def test_a_job_requeued_in_mid_training_ends_with_the_same_metrics(undisturbed, cluster, folder):
    script = undisturbed.run.name
    job = Job(cluster, folder, script, "--nodes=2", settings=f"name={script}-requeued", ZERO="3")
    job.wait_for_checkpoint()
    cluster.command("scontrol", "requeue", job.id)
    cluster.start_again(job.id)
    job.end()
    assert job.restarts() == 1
    assert "stopped by " in job.said()
    assert "continued from step" in job.said()
    assert job.metrics() == undisturbed.metrics()  # bit for bit


# ---- signals --------------------------------------------------------------------------------------------------------


def test_slurms_early_warning_saves_and_requeues(cluster, folder):
    """--signal=B:USR1@120 reaches the batch script alone; two nodes have to hear of it."""
    job = Job(cluster, folder, "ddp", "--nodes=2", settings="name=warned training.max_steps=5000")
    job.wait_for_checkpoint()
    cluster.command("scancel", "--batch", "--signal=USR1", job.id)
    cluster.start_again(job.id)
    assert "the workers are to save and stop" in job.said()
    assert job.said().count("stopped by ") == 1
    assert not job.processes()
    job.wait_for("continued from step")
    cluster.command("scancel", "--signal=TERM", job.id)  # to the steps, not to the batch script
    cluster.wait_for_state(job.id, "PENDING")
    assert job.said().count("stopped by ") == 2
    assert not job.processes()
    cluster.command("scancel", job.id)


def test_scancel_saves_and_leaves_no_process(cluster, folder):
    settings = "name=cancelled training.max_steps=3000"
    job = Job(cluster, folder, "single_node", "--cpus-per-task=2", settings=settings, PROCESSES_PER_NODE="2")
    job.wait_for_checkpoint()
    assert "CPUs=2 Tasks=1" in cluster.command("scontrol", "show", "step", f"{job.id}.0")
    cluster.command("scancel", job.id)
    job.end("CANCELLED")
    cluster.wait_for(lambda: "not requeued from here" in job.said(), 30, "the last word of the script")
    assert "stopped by " in job.said()
    assert job.restarts() == 0


# ---- what must not be requeued --------------------------------------------------------------------------------------


def test_a_finished_run_is_left_alone(undisturbed, cluster, folder):
    before = (undisturbed.run / "metrics.jsonl").read_bytes()
    job = Job(cluster, folder, undisturbed.run.name, "--nodes=2")
    job.end()
    assert "is FINISHED, nothing to do" in job.said()
    assert (undisturbed.run / "metrics.jsonl").read_bytes() == before


def test_wrong_settings_fail_at_once(cluster, folder):
    job = Job(cluster, folder, "ddp", settings="name=wrong model.nonterminal=3")
    job.end("FAILED")
    assert "did you mean" in job.said()
    assert job.restarts() == 0


@pytest.mark.chaos  # minutes: `make chaos`
def test_a_job_with_gpus_starts_a_process_for_each_and_refuses_to_do_without(cluster, folder):
    options = {"settings": "name=gpus", "MAX_STARTS_WITHOUT_PROGRESS": "1"}
    job = Job(cluster, folder, "single_node", "--gpus-per-node=2", **options)
    job.end("FAILED")
    assert "processes a node: 2, GPUs a node: 2" in job.said()
    assert "device: cuda was asked for, but PyTorch sees no GPU" in job.said()
    assert job.restarts() == 0


@pytest.mark.chaos  # minutes: `make chaos`
def test_a_failing_run_is_not_requeued_for_ever(cluster, folder):
    job = Job(
        cluster, folder, "single_node", settings="name=failing data.train=nowhere.txt", MAX_STARTS_WITHOUT_PROGRESS="2"
    )
    cluster.start_again(job.id)
    job.end("FAILED")
    assert job.restarts() == 1
    assert job.said().count("nowhere.txt") >= 2
    assert "2 starts in a row brought no new checkpoint" in job.said()


# ---- corpora and scores ---------------------------------------------------------------------------------------------


def test_arrays_prepare_a_corpus_and_two_nodes_score_it(cluster, folder):
    """Byte for byte and to the last digit what one machine makes of it."""
    for number in range(3):
        write_text(folder / f"raw-{number}.txt", 40, seed=number)
    write_untrained_run(folder, "scored", {"nonterminals": 6, "preterminals": 7, "dimension": 8})
    script = {name: str(slurm_cluster.SCRIPTS / f"{name}.sbatch") for name in ("prepare", "score")}
    where: dict[str, Any] = {"cwd": folder, "VENV": sys.prefix, "OMP_NUM_THREADS": "1"}
    arguments = "'raw-*.txt' --out 'in parts' --shard-lines 25"
    counted = cluster.sbatch("--array=1-3", script["prepare"], ARGUMENTS=arguments, **where)
    made = cluster.sbatch(
        "--array=1-3", f"--dependency=afterok:{counted}", script["prepare"], ARGUMENTS=arguments, **where
    )
    scoring = "score raw-0.txt --checkpoint runs/scored --threads 1 --batch-cost 100 --json"
    files = ["--output=scores", "--error=said"]
    scored = cluster.sbatch("--nodes=2", *files, script["score"], ARGUMENTS=scoring, PROCESSES_PER_NODE="2", **where)
    for job in (*(f"{made}_{part}" for part in (1, 2, 3)), scored):
        assert cluster.wait_for_state(job, *slurm_cluster.ENDED) == "COMPLETED", (folder / "said").read_text()
    with contextlib.chdir(folder):
        options = PrepareOptions(words=VocabularyOptions(size=10_000), shard_lines=25)
        prepare(["raw-*.txt"], Path("at once"), options, processes=1)
        one, many = (
            {path.relative_to(out): path.read_bytes() for path in Path(out).rglob("*") if path.is_file()}
            for out in ("at once", "in parts")
        )
        assert one == many
        alone = lm_pcfg(*scoring.split(), cwd=folder)
    assert (folder / "scores").read_bytes() == alone.stdout


# ---- job arrays -----------------------------------------------------------------------------------------------------


@pytest.mark.chaos  # minutes: `make chaos`
def test_an_array_trains_one_run_for_each_seed_and_each_is_requeued_alone(cluster, folder):
    job = Job(cluster, folder, "seeds", "--array=3,5", settings="name=array training.max_steps=400")
    runs = {seed: folder / "runs" / f"array-seed-{seed}" for seed in (3, 5)}
    # The last element has the id of the array itself: what is meant for it alone must not reach the others.
    cluster.wait_for(lambda: any((runs[5] / "checkpoints").glob("step-*[0-9]")), 180, "a checkpoint")
    # Where SLURM tracks processes with cgroups, a signal to the steps reaches node.sh, not what it started.
    (on_node,) = cluster.host.processes("^[^ ]*bash [^ ]*/node.sh .*name=array-seed-5( |$)")
    os.kill(on_node, signal.SIGUSR1)
    cluster.start_again(f"{job.id}_5")
    cluster.wait_for(
        lambda: all((run / "FINISHED").exists() for run in runs.values()), 300, f"the runs of job {job.id}"
    )
    assert [cluster.job(f"{job.id}_{seed}")["Restarts"] for seed in runs] == ["0", "1"]
    assert all(f"\nseed: {seed}\n" in (run / "config.yaml").read_text() for seed, run in runs.items())
