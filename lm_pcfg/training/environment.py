"""What a run ran on: versions, machine, commit."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

_PACKAGES = (
    *("lm_pcfg", "torch", "triton", "deepspeed", "accelerate", "transformers"),
    *("datasets", "safetensors", "mlflow", "mlflow-skinny", "numpy"),
)


def environment_artifacts() -> dict[str, str]:
    """What the run ran on: environment.json and pip-list.txt."""
    versions = {dist.name: dist.version for dist in importlib.metadata.distributions() if dist.name}
    environment: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "command": sys.argv,
        "git_commit": _git_commit(Path(__file__).parent),
        "packages": {name: versions.get(name) for name in _PACKAGES},
        "gpus": [],
    }
    torch = sys.modules.get("torch")  # a training has imported it; others need not wait for it
    if torch is not None:
        environment["cuda"] = torch.version.cuda
        environment["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    pip_list = "".join(f"{name}=={versions[name]}\n" for name in sorted(versions, key=str.lower))
    return {"environment.json": json.dumps(environment, indent=2) + "\n", "pip-list.txt": pip_list}


def _git_commit(folder: Path) -> str | None:
    """The commit this source was checked out from, with `+changes` where it was edited; None outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git(
            "ls-files", "--error-unmatch", Path(__file__).name
        )  # a site-packages inside some other repository is not it
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
