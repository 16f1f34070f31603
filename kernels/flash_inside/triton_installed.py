"""Whether GPUs get the Triton kernels."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache


@cache
def triton_installed() -> bool:
    """Asked once, for tensors on a GPU, so that the warning comes once."""
    installed = importlib.util.find_spec("triton") is not None
    if not installed:
        warnings.warn("triton is not installed: CUDA tensors use the slower torch backend", stacklevel=4)
    return installed
