"""Checks of what trains together: process groups, DeepSpeed, SLURM."""

from __future__ import annotations

import os
import shutil
import subprocess
from datetime import timedelta

from lm_pcfg.doctor.finding import Finding

_SECONDS = 20.0


def gloo() -> Finding:
    return _one_process("gloo", "cpu")


def nccl() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("none", "it connects GPUs, and there are none")
    if not torch.distributed.is_nccl_available():
        return Finding("broken", "this PyTorch has no NCCL", "install a PyTorch for CUDA, or use engine.backend=gloo")
    return _one_process("nccl", "cuda")


def _one_process(backend: str, device: str) -> Finding:
    """Make a group of one process on the loopback interface, and sum a number in it."""
    import torch
    from torch import distributed

    from lm_pcfg.distributed.rendezvous import use_loopback

    use_loopback()
    interface = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME", "any interface")
    try:
        distributed.init_process_group(
            backend, store=distributed.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=_SECONDS)
        )
        number = torch.full((1,), 3.0, device=device)
        distributed.all_reduce(number)
        sum_is_right = number.item() == 3.0
        distributed.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        mend = f"is {backend.upper()}_SOCKET_IFNAME={interface} an interface of this machine (ip link)?"
        return Finding("broken", f"no process group: {error}", mend)
    if not sum_is_right:
        return Finding("broken", "the sum over one process is wrong", "reinstall PyTorch")
    return Finding("ok", f"a group of one process works on {interface}")


def deepspeed() -> Finding:
    from importlib.util import find_spec

    if find_spec("deepspeed") is None:
        return Finding("none", "not installed: it is for Linux; DDP needs nothing of it")
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import accelerate
    import deepspeed as package

    found = f"{package.__version__} with accelerate {accelerate.__version__}"
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        mend = "apt-get install build-essential, if you want to use DeepSpeed or Triton's kernels"
        return Finding("warning", f"{found}; there is no C++ compiler", mend)
    return Finding("ok", found)


def slurm() -> Finding:
    if shutil.which("sbatch") is None:
        return Finding("none", "sbatch is not on the PATH")
    job = f", in job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
    try:
        return Finding("ok", f"{_output('sbatch', '--version')}{job}; {_output('scontrol', 'ping')}")
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        mend = "ask your site, or look at the log of slurmctld; without SLURM use accelerate launch (docs/clusters.md)"
        return Finding("warning", f"SLURM is installed{job}, but does not answer: {said}", mend)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS).stdout.strip()
