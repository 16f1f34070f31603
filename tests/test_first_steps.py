"""The commands of docs/first-steps.md, in their order, on a text of ten lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


def commands() -> str:
    page = (REPOSITORY / "docs" / "first-steps.md").read_text(encoding="utf-8")
    return "\n".join(re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL))


def test_the_commands_of_the_first_page_run_in_their_order(tmp_path):
    for name in ("lm_pcfg", "kernels", "configs", "launch"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "my").mkdir()
    for name in ("train.txt", "valid.txt"):
        (tmp_path / "my" / name).write_text(TEXT)
    paths = [str(REPOSITORY), str(REPOSITORY / "kernels"), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    env.pop("MLFLOW_TRACKING_URI", None)
    script = f"set -eux -o pipefail\n{commands()}"
    result = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr

    continued = list(read_metrics(tmp_path / "runs/first/metrics.jsonl"))
    assert (continued[-1]["step"], (tmp_path / "runs/first/FINISHED").exists()) == (24, True)  # 8 epochs
    assert (tmp_path / "my/first.svg").read_text().startswith("<svg")
    assert (tmp_path / "runs/two/FINISHED").exists()
    assert not (tmp_path / "runs/first-2").exists()
    assert len(re.findall(r"^ppl +[0-9.]+$", result.stdout, re.MULTILINE)) == 2  # of the grammar, and of the baseline
