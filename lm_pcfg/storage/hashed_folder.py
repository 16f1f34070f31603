"""A folder of tensors and documents that is complete or absent, and whose files are known by their size and hash.

Checkpoints are such folders, and exported models. One file of it, the state, has the hashes of the others.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from lm_pcfg.storage import durable
from lm_pcfg.storage.state_file import FORMAT, CheckpointError, state_bytes

_one_save_at_a_time = threading.Lock()


def write_folder(
    final: Path, tensor_files: Mapping[str, dict[str, Tensor]], documents: Mapping[str, bytes], state: dict[str, Any],
    *, state_name: str, unhashed: Mapping[str, bytes] | None = None,
) -> None:  # fmt: skip
    """Write a folder of tensors and documents that is complete or absent; the state has the hashes of all its files.

    unhashed: files that people may change later.
    """
    temporary = durable.temporary_name(final)
    with _one_save_at_a_time:
        try:
            durable.make_folder(final.parent)
            durable.remove_leftovers(final.parent)
            temporary.mkdir()
            files = {}
            for name, tensors in tensor_files.items():
                save_file(_independent_cpu_tensors(tensors), temporary / name)
                # safetensors lets nobody else read its files; these are as readable as the folder.
                (temporary / name).chmod(temporary.stat().st_mode & 0o666)
                durable.fsync(temporary / name)
                files[name] = {"sha256": _sha256(temporary / name), "size": (temporary / name).stat().st_size}
            for name, content in documents.items():
                _write(temporary / name, content)
                files[name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            for name, content in (unhashed or {}).items():
                _write(temporary / name, content)
            _write(temporary / state_name, state_bytes({**state, "format": FORMAT, "files": files}))
            for folder in {(temporary / name).parent for name in files}:
                durable.fsync(folder)
            durable.put_in_place(temporary, final)
        finally:
            # Not there after a success, unless an older folder was swapped out into this name.
            shutil.rmtree(temporary, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    durable.fsync(path)


def _independent_cpu_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors on the CPU, no two of which share memory (tied weights), which safetensors refuses."""
    seen: set[int] = set()
    independent = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        if tensor.untyped_storage().data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        independent[name] = tensor
    return independent


def _sha256(path: Path) -> str:
    with durable.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_file(path: Path, size: int, sha256: str) -> None:
    try:
        actual_size = path.stat().st_size
        if actual_size != size:
            what = "truncated" if actual_size < size else "damaged"
            raise CheckpointError(f"{path} is {what}: {actual_size} bytes instead of {size}")
        if _sha256(path) != sha256:
            raise CheckpointError(f"{path} is damaged: its content does not match its checksum")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {durable.reason(error)}") from error
