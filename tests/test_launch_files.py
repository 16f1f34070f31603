"""The files of launch/: readable by those they are for, without contradiction, and all in the manual."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest
from accelerate.commands.config.config_args import load_config_from_file

LAUNCH = Path(__file__).resolve().parents[1] / "launch"
MANUAL = (LAUNCH.parent / "docs" / "clusters.md").read_text(encoding="utf-8")
SCRIPTS = sorted((LAUNCH / "slurm").glob("*.sbatch"))


@pytest.mark.parametrize(
    ("name", "kind", "machines", "processes"),
    [
        ("cpu", "MULTI_GPU", 1, 2),
        ("one_gpu", "NO", 1, 1),
        ("one_node", "MULTI_GPU", 1, 8),
        ("nodes", "MULTI_GPU", 2, 16),
    ],
)
def test_accelerate_reads_its_configurations(name, kind, machines, processes):
    config = load_config_from_file(str(LAUNCH / "accelerate" / f"{name}.yaml"))
    assert (config.distributed_type, config.num_machines, config.num_processes) == (kind, machines, processes)
    assert (
        config.mixed_precision is None
    )  # inside.precision is; named here, it would not go together with a DeepSpeed file


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_configurations_have_their_stage(stage):
    config = json.loads((LAUNCH / "deepspeed" / f"zero{stage}.json").read_text())
    assert config["zero_optimization"]["stage"] == stage
    assert config["gradient_accumulation_steps"] == 1


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_requeued_warned_and_keeps_its_log(script):
    text = script.read_text()
    directives = ["--requeue", "--ntasks-per-node=1", "--signal=B:USR1@120", "--open-mode=append"]
    if script.name == "score.sbatch":  # there is nothing to save: it starts anew, and so do its results
        directives[2:] = ["--open-mode=truncate"]
    for directive in directives:
        assert f"#SBATCH {directive}\n" in text
    assert subprocess.run(["bash", "-n", script]).returncode == 0


def test_shellcheck_finds_nothing():
    if which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    scripts = [path for path in sorted((LAUNCH / "slurm").iterdir()) if path.suffix in (".sh", ".sbatch")]
    assert len(scripts) == 8
    scripts += [LAUNCH.parent / ".ci" / "run", LAUNCH / "environment.sh"]
    scripts += [file for room in ("kernels", "docs") for file in (LAUNCH.parent / room).rglob("*.sh")]
    result = subprocess.run(["shellcheck", *scripts], cwd=LAUNCH.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        (None, []),
        ("", []),
        ("  \n", []),
        ("seed=1  'data.train=my file.txt' name=\"x y\"", ["seed=1", "data.train=my file.txt", "name=x y"]),
    ],
)
def test_overrides_of_a_job_are_taken_apart_at_spaces_outside_of_quotes(tmp_path, overrides, settings):
    words = split_by_job_script(tmp_path, overrides)
    assert words.stdout.splitlines() == ["resume=auto", *settings]


def test_overrides_that_cannot_be_taken_apart_are_named(tmp_path):
    result = split_by_job_script(tmp_path, "name='half")
    assert result.returncode == 1
    assert "error: OVERRIDES cannot be taken apart: name='half" in result.stderr


def test_a_warning_that_comes_while_srun_starts_is_repeated(tmp_path):
    """srun is deaf for a moment then; a warning lost would cost the job its requeue."""
    programs = {
        "accelerate": "",
        "scontrol": "case $1 in show) echo JobState=RUNNING ;; requeue) echo requeued $2 ;; esac",
        # The first signal is lost, the second one ends it as it would the workers.
        "srun": "trap 'trap \"exit 0\" USR1' USR1; kill -USR1 $PPID; for _ in {1..200}; do sleep 0.1; done",
    }
    result = run_job(tmp_path, programs)
    assert result.stdout == "requeued 1\n", result.stderr
    assert "early warning: the workers are to save and stop" in result.stderr
    assert "not finished (status 0)" in result.stderr


# The warning comes between a script's look at it and its `wait`, where bash does not let a signal end the wait.
WARNED_BEFORE_THE_FIRST_WAIT = """
wait() {
  if [ -z "${told:-}" ]; then told=yes; builtin kill -USR1 $$; fi
  builtin wait "$@"
}
"""


@pytest.mark.parametrize("script", ["job", "prepare", "node"])
def test_a_warning_just_before_the_script_waits_is_passed_on_at_once(tmp_path, script):
    (tmp_path / "wait.sh").write_text(WARNED_BEFORE_THE_FIRST_WAIT)
    workers = "trap 'echo told; exit 0' USR1 TERM; for _ in {1..80}; do sleep 0.1; done; echo too late"
    variables = {"BASH_ENV": str(tmp_path / "wait.sh")}
    if script == "job":
        programs = {"accelerate": "", "srun": workers, "scontrol": "case $1 in show) echo JobState=RUNNING ;; esac"}
        result = run_job(tmp_path, programs, variables)
    elif script == "prepare":
        variables |= {"ARGUMENTS": "a", "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MAX": "2"}
        result = run_prepare(tmp_path, workers, variables)
    else:  # the workers are children of the launcher; Python, as bash cannot trap what its parent ignored
        heard = "signal(SIGUSR1, lambda *_: exit('told')); sleep(8)"
        worker = f'{sys.executable} -c "from signal import *; from time import sleep; {heard}"'
        place(tmp_path, {"accelerate": f"unset BASH_ENV; {worker} 2>&1 & wait $!"})
        variables |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0"}
        variables |= {"SLURMD_NODENAME": "here", "GPUS_PER_NODE": "0", "PROCESSES_PER_NODE": "1", "ENGINE": "ddp"}
        variables |= {"MAIN_ADDRESS": "here", "MAIN_PORT": "1", "LOGS": str(tmp_path)}
        node = ["bash", str(LAUNCH / "slurm" / "node.sh")]
        result = subprocess.run(node, env=variables, capture_output=True, text=True, timeout=30)
    assert result.stdout == "told\n", result.stderr


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_that_failed_is_neither_started_nor_requeued(tmp_path, when):
    programs = {
        "accelerate": "",
        "scontrol": "case $1 in show) echo JobState=RUNNING ;; requeue) echo requeued ;; esac",
        "srun": f"echo started; echo it diverged >'{tmp_path}/run/FAILED'; exit 1",
    }
    (tmp_path / "run").mkdir()
    if when == "before":
        (tmp_path / "run" / "FAILED").write_text("it diverged\n")
    result = run_job(tmp_path, programs)
    assert result.returncode == 1
    assert result.stdout == ("" if when == "before" else "started\n")
    assert "run has FAILED: it diverged; it is left alone" in result.stderr


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"ARGUMENTS": "a 'b c'", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MAX": "4"}, "a|b c|--part|3/4|"),
        ({"ARGUMENTS": "a", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MAX": "3", "PARTS": "16"}, "a|--part|3/16|"),
        ({"ARGUMENTS": "a"}, "error: no array"),
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MAX": "4"}, "error: no ARGUMENTS"),
        ({"ARGUMENTS": "'a", "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MAX": "1"}, "error: ARGUMENTS cannot be"),
    ],
)  # fmt: skip
def test_an_element_of_the_array_prepares_its_part(tmp_path, variables, said):
    result = run_prepare(tmp_path, 'shift 9; printf "%s|" "$@"', variables)
    assert said in result.stdout + result.stderr
    assert result.returncode == ("error" in said)


@pytest.mark.parametrize(("restarts", "requeued"), [("1", "requeued 7_1\n"), ("10", "")])
def test_an_element_that_runs_out_of_time_is_requeued(tmp_path, restarts, requeued):
    srun = "trap 'exit 143' TERM; kill -USR1 $PPID; for _ in {1..200}; do sleep 0.1; done"
    variables = {"ARGUMENTS": "a", "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MAX": "2"}
    result = run_prepare(tmp_path, srun, {**variables, "SLURM_RESTART_COUNT": restarts})
    assert result.stdout == requeued, result.stderr
    assert ("use more parts" in result.stderr) == (not requeued)
    assert result.returncode


def place(folder: Path, programs: dict[str, str]) -> None:
    """Shell scripts in the folder's `bin`, which comes first on a job's PATH."""
    for name, text in programs.items():
        (folder / "bin" / name).parent.mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)


def run_prepare(folder: Path, srun: str, variables: dict[str, str]) -> subprocess.CompletedProcess:
    """Run prepare.sbatch with this in the place of srun."""
    programs = {"python": "", "srun": srun, "scontrol": "echo requeued $2"}
    place(folder, programs)
    job = {
        "VENV": str(folder),
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(LAUNCH.parent),
    }
    script = ["bash", str(LAUNCH / "slurm" / "prepare.sbatch")]
    everything = {"PATH": os.environ["PATH"], **job, **variables}
    return subprocess.run(script, env=everything, capture_output=True, text=True, timeout=30)


def run_job(folder: Path, programs: dict[str, str], more: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run job.sh with these programs in the place of SLURM's; the run is `run` in the folder."""
    place(folder, programs)
    script = (
        f'repository={LAUNCH.parent}; source "$repository/launch/slurm/job.sh"; '
        f"resolved() {{ echo '{folder}/run'; }}; train_job ddp"
    )
    variables = {"VENV": str(folder), "CONFIG": "any.yaml", "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1"}
    variables |= {"SLURM_JOB_NODELIST": "here", "PATH": os.environ["PATH"], **(more or {})}
    return subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, timeout=30)


def split_by_job_script(folder: Path, overrides: str | None) -> subprocess.CompletedProcess:
    """What job.sh makes of OVERRIDES, where there is an `accelerate` and nothing of SLURM."""
    accelerate = folder / "bin" / "accelerate"
    accelerate.parent.mkdir()
    accelerate.touch(mode=0o755)
    variables = {"PATH": os.environ["PATH"], "VENV": str(folder), "CONFIG": "any.yaml", "SLURM_JOB_ID": "1"}
    if overrides is not None:
        variables["OVERRIDES"] = overrides
    script = f'repository={LAUNCH.parent}; source "$repository/launch/slurm/job.sh"; printf "%s\\n" "${{settings[@]}}"'
    return subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True)


def test_the_manual_tells_of_every_file_and_of_every_variable():
    for file in [*LAUNCH.glob("accelerate/*.yaml"), *SCRIPTS]:
        assert f"launch/{file.parent.name}/{file.name}" in MANUAL
    read = {
        name for file in (LAUNCH / "slurm").iterdir() for name in re.findall(r"\$\{([A-Z_]+):[-=]", file.read_text())
    }
    own = {name for name in read if not name.startswith("SLURM")}
    assert own >= {"CONFIG", "OVERRIDES", "VENV", "ZERO", "MAIN_PORT"}
    assert all(f"`{name}`" in MANUAL for name in own), own
