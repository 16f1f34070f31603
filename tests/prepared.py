"""What tests of `lm_pcfg prepare` share: the command in a process of its own, the function, and what they made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lm_pcfg.corpus.preparation.prepare import PrepareOptions, prepare
from lm_pcfg.corpus.shards.blocks import Source, StreamedText
from lm_pcfg.corpus.shards.prepared import PreparedCorpus, read_manifest, vocabulary_of

REPOSITORY = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'kernels'}", "COLUMNS": "100"}
COMMAND = [sys.executable, "-m", "lm_pcfg", "prepare"]


def sentences(folder: Path) -> list[list[int]]:
    vocabulary = vocabulary_of(read_manifest(folder))
    corpus = StreamedText([Source(PreparedCorpus(folder, vocabulary))], vocabulary).in_memory()
    return [corpus[k].tolist() for k in range(len(corpus))]


def made(folder: Path, *inputs: Path | str, processes: int = 1, **options) -> Path:
    prepare([str(name) for name in inputs], folder, PrepareOptions(**options), processes=processes)
    return folder


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)


def one_line_error(result: subprocess.CompletedProcess, status: int = 1) -> str:
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "rror" in line]
    return line
