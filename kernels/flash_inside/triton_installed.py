"""Whether tensors get the Triton kernels."""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import cache

import torch
from torch import Tensor


@cache
def triton_installed() -> bool:
    """Asked once, for tensors on a GPU, so that the warning comes once."""
    installed = importlib.util.find_spec("triton") is not None
    if not installed:
        warnings.warn("triton is not installed: CUDA tensors use the slower torch backend", stacklevel=4)
    return installed


def in_triton(tensor: Tensor) -> bool:
    """For passes that have a kernel and a form in PyTorch. fp64 has no kernel: it is for checking."""
    if tensor.dtype == torch.float64:
        return False
    return (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") and triton_installed()
