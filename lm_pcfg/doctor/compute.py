"""Checks of what computes: Python, the packages, PyTorch, GPUs and Triton."""

from __future__ import annotations

import math
import os
import re
import sys
from importlib import metadata

from lm_pcfg.doctor.finding import Finding

OLDEST_PYTHON = (3, 11)
_NEEDED = "make demo installs everything that is needed into .venv; or: pip install -e ."


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    where = "a virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("broken", f"{version}, too old", "install Python 3.11 or later: make demo PYTHON=python3.11")
    return Finding("ok", f"{version}, in {where}")


def packages() -> Finding:
    """Compare the packages that are installed with those that this one asks for."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in metadata.requires("lm_pcfg") or []]
    except metadata.PackageNotFoundError:
        return Finding("warning", "lm_pcfg runs from its source folder and is not installed", _NEEDED)
    wrong, right = [], []
    for one in wanted:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{one.name} is missing")
            continue
        if one.specifier.contains(version, prereleases=True):
            right.append(f"{one.name} {version}")
        else:
            wrong.append(f"{one.name} {version} is not {one.specifier}")
    if wrong:
        return Finding("broken", ", ".join(wrong), _NEEDED)
    return Finding("ok", ", ".join(right))


def pytorch() -> Finding:
    import torch

    from flash_inside.devices import memory_of

    product = torch.eye(4) @ torch.arange(16.0).view(4, 4)
    if product.sum() != 120:
        return Finding("broken", f"{torch.__version__} computes wrong products", "pip install --force-reinstall torch")
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
    memory = memory_of()
    room = f", {memory / 2**30:.1f} GiB of memory" if memory < math.inf else ""
    return Finding("ok", f"{torch.__version__}, {built}, {torch.get_num_threads()} threads{room}")


def gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None and hidden.strip() in ("", "-1"):
            return Finding("none", "CUDA_VISIBLE_DEVICES hides all GPUs; training runs on the CPU")
        if not os.path.exists("/proc/driver/nvidia/version"):
            return Finding("none", "this machine has no NVIDIA driver; training runs on the CPU")
        if torch.version.cuda is None:
            mend = "pip install --force-reinstall 'torch>=2.11,<2.14'; for Linux, the wheels of PyPI bring CUDA"
            return Finding("broken", "there is an NVIDIA driver, but this PyTorch is built for CPUs", mend)
        mend = "compare nvidia-smi with the CUDA version of PyTorch; in a container, start it with --gpus all"
        return Finding("broken", "there is an NVIDIA driver, but PyTorch sees no GPU", mend)
    names = []
    for index in range(torch.cuda.device_count()):
        torch.ones(4, device=f"cuda:{index}").sum().item()
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"sm_{properties.major}{properties.minor}"
        names.append(f"{properties.name} ({capability}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free)")
    old = [name for name in names if (match := re.search(r"sm_(\d+)\d,", name)) and int(match[1]) < 8]
    if old:
        return Finding("warning", ", ".join(names), "bf16 and TF32 need sm_80 or later: use inside.precision=fp32")
    return Finding("ok", ", ".join(names))


def triton() -> Finding:
    """Run the kernels of the inside algorithm on two sentences, and compare with the reference."""
    from importlib.util import find_spec

    if find_spec("triton") is None:
        return Finding("none", "not installed: it is for Linux; GPUs use the slower torch backend")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    if hidden or not os.path.exists("/proc/driver/nvidia/version"):
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    import torch

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    error = _largest_error("cpu" if interpreted or not torch.cuda.is_available() else "cuda")
    version = metadata.version("triton")
    if error > 1e-4:
        return Finding(
            "broken", f"{version}: log-probabilities are wrong by {error:.2g}", "use inside.backend=torch, and tell us"
        )
    if interpreted:
        return Finding("ok", f"{version}, no GPU: the kernels run in Triton's interpreter, training uses PyTorch")
    return Finding("ok", f"{version}: the kernels compile and run (error {error:.1g})")


def _largest_error(device: str) -> float:
    import torch

    import flash_inside

    draws = torch.Generator().manual_seed(0)
    nonterminals, preterminals, lengths = 16, 32, [5, 3]
    rules = [
        torch.rand(*shape, generator=draws).softmax(-1).to(device)
        for shape in ((nonterminals + preterminals,), *2 * ((nonterminals, nonterminals + preterminals),))
    ]
    emissions = torch.randn(sum(lengths), preterminals, generator=draws).to(device)
    fast, slow = (
        flash_inside.inside(flash_inside.Rules(*rules), emissions, lengths, precision="fp32", backend=backend)
        for backend in ("triton", "reference")
    )
    return float((fast - slow).abs().max())
