"""The command line in the process of the tests: importing PyTorch takes longer than most of them."""

from __future__ import annotations

import contextlib
import io
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from lm_pcfg import cli


def lm_pcfg(*arguments: str, cwd: Path, text: bytes = b""):
    """What the programme does with a command line, in this process: importing torch takes longer than most tests."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with (
        contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
        mock.patch("sys.argv", ["lm_pcfg", *arguments]), mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(text))),
        pytest.raises(SystemExit) as end,
    ):  # fmt: skip
        cli.main()
    for stream in (out, err):
        stream.flush()
    return subprocess.CompletedProcess(arguments, end.value.code, out.buffer.getvalue(), err.buffer.getvalue())


def ran(folder, *arguments, text=b""):
    result = lm_pcfg(*arguments, cwd=folder, text=text)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def refusal(folder, *arguments):
    result = lm_pcfg(*arguments, cwd=folder)
    assert result.returncode == 1
    assert result.stderr.decode().count("\n") == 1
    return result.stderr.decode()
