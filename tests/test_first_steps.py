"""The commands of docs/first-steps.md, in their order, on a text of ten lines.

Those of `lm_pcfg` run in this process; test_readme.py starts them as a shell does.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import processes
from command_line import lm_pcfg
from lm_pcfg.storage.metrics_file import read_metrics

REPOSITORY = Path(__file__).resolve().parents[1]
TEXT = """the dog sees a cat
a cat sees the dog
the old dog sleeps
a cat sleeps in the house
the dog runs to the old house
she sees the house
she runs
the cat runs to a dog
he sees her in the old house
a dog sleeps
"""


def commands() -> list[str]:
    """Of the page, in its order; a here-document is one command."""
    page = (REPOSITORY / "docs" / "first-steps.md").read_text(encoding="utf-8")
    blocks = "".join(re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL))
    return re.findall(r"^(?:cat .*?\nEND|[^\n]+)$", blocks, flags=re.DOTALL | re.MULTILINE)


def in_the_shell(command: str, folder: Path) -> str:
    env = processes.environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    script = f"set -eux -o pipefail\n{command}"
    result = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
    return result.stdout


def in_this_process(command: str, folder: Path) -> str:
    """As the shell would read it, without the seconds that a process imports for."""
    words = shlex.split(command)[1:]
    assert not set(words) & {"|", ">", "<", "&&", ";"}
    result = lm_pcfg(*words, cwd=folder)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


@pytest.mark.long
def test_the_commands_of_the_first_page_run_in_their_order(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("lm_pcfg", "kernels", "configs", "launch"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "my").mkdir()
    for name in ("train.txt", "valid.txt"):
        (tmp_path / "my" / name).write_text(TEXT)
    ours = [command.startswith("lm_pcfg ") for command in commands()]
    assert (sum(ours), len(ours)) >= (8, 10)
    said = "".join(
        (in_this_process if own else in_the_shell)(command, tmp_path)
        for own, command in zip(ours, commands(), strict=True)
    )

    continued = list(read_metrics(tmp_path / "runs/first/metrics.jsonl"))
    assert (continued[-1]["step"], (tmp_path / "runs/first/FINISHED").exists()) == (24, True)  # 8 epochs
    assert (tmp_path / "my/first.svg").read_text().startswith("<svg")
    assert (tmp_path / "runs/two/FINISHED").exists()
    assert not (tmp_path / "runs/first-2").exists()
    assert len(re.findall(r"^ppl +[0-9.]+$", said, re.MULTILINE)) == 2  # of the grammar, and of the baseline
