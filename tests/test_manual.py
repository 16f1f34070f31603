"""Every command of the README and of the manual runs, in a folder as it is after `make demo`.

Commands stand in blocks of bash. A comment at the end of a command says what it needs beyond this machine, and then it
does not run here: `# GPU`, `# SLURM`, `# Docker`, `# network` or `# own data`. pytest's summary lists those.

To be quick, a training makes two steps and leaves MLflow alone, `lm_pcfg` runs in this process, the embedded corpus is
small, and texts and trees of one's own are a few lines. Each page begins with the run of the README's first command.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from command_line import lm_pcfg
from lm_pcfg.cli import app
from lm_pcfg.corpus.embedded import files, source_grammar

REPOSITORY = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((REPOSITORY / "docs").glob("*.md")))]
NEEDS = ("GPU", "SLURM", "Docker", "network", "own data")
FEW_STEPS = ["training.max_steps=2", "evaluation.batch_cost=100000", "tracking.mlflow=false"]
#: Commands, or whole pages, that another test runs as they stand.
ELSEWHERE = {
    "docs/first-steps.md": "test_first_steps.py",
    "accelerate launch --config_file launch/accelerate/cpu.yaml -m lm_pcfg": "test_sharing.py",
    "accelerate launch --config_file launch/accelerate": "test_two_hosts.py",
    "lm_pcfg doctor": "test_doctor.py",
    "make demo": "test_readme.py",
}
LINES = "the small doctor tastes the dogs\nthese cars visit that good dog\n"
TREES = "(S (NP (DT the) (JJ small) (NN doctor)) (VP (VBZ tastes) (NP (DT the) (NNS dogs))))\n"
#: What stands for texts, trees and suites of one's own.
FILES = {
    "text.txt": LINES,
    "wsj.mrg": TREES,
    "other_parser.txt": TREES,
    "blimp/agreement.jsonl": '{"sentence_good": "the dogs taste", "sentence_bad": "the dogs tastes"}\n',
    "zorro/agreement-in.txt": "the dogs tastes\nthe dogs taste\n",
}


class Command(NamedTuple):
    page: str
    text: str  # without its comment
    needs: str  # "" or one of NEEDS


def blocks_of(page: str, language: str) -> list[str]:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@cache
def commands() -> list[Command]:
    """All commands, in the order of the pages; a loop or a here-document is one command."""
    found = []
    for page in PAGES:
        for block in blocks_of(page, "bash"):
            text = ""
            for line in block.splitlines():
                text += f"{line}\n"
                unfinished = line.endswith("\\") or (("<<" in text or text.startswith("for ")) and not is_whole(text))
                if not unfinished:
                    found.append(command_of(page, text))
                    text = ""
    return [command for command in found if command.text]


def is_whole(text: str) -> bool:
    check = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    return check.returncode == 0 and not check.stderr


def command_of(page: str, text: str) -> Command:
    comment = re.search(r"(?:^|\s)#\s*(.*)$", text, re.MULTILINE)
    needs = next((need for need in NEEDS if comment and comment[1].startswith(need)), "")
    return Command(page, re.sub(r"(^|\s+)#\s.*$", "", text, flags=re.MULTILINE).strip(), needs)


def run_elsewhere(command: Command) -> str | None:
    known = (test for start, test in ELSEWHERE.items() if start == command.page or command.text.startswith(start))
    return next(known, None)


# ---- running --------------------------------------------------------------------------------------------------------


def ran(folder: Path, line: str, text: bytes = b"") -> bytes:
    """Run a command line of `lm_pcfg` in this process; return what it printed."""
    words = shlex.split(line)
    assert words.pop(0) == "lm_pcfg"
    if words[0] == "train" and not {"--print-config", "--dry-run"} & set(words):
        words += FEW_STEPS
    with contextlib.chdir(folder):
        words = [name for word in words for name in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of samples that are cut: these grammars know nothing yet
        result = lm_pcfg(*words, cwd=folder, text=text)
    assert result.returncode == 0, f"{line}\n{result.stderr.decode()}"
    return result.stdout


def run(command: Command, folder: Path) -> None:
    """Run it as a shell would, without a shell where that is easy."""
    line = command.text
    if line.startswith("make "):  # a test that starts all tests would never end: see that make knows how
        assert "pytest" in in_shell(f"{line} -n", folder)
    elif line == ". .venv/bin/activate":
        assert (BIN / "activate").is_file()
    elif line.startswith(("mlflow ui ", "lm_pcfg serve")):
        stop(folder)
        serve(line, folder)
    elif line.startswith("curl ") and folder in SERVERS:
        in_shell(re.sub(r"(127\.0\.0\.1|localhost):\d+", f"127.0.0.1:{SERVERS[folder][1]}", line), folder)
    elif match := re.fullmatch(r"""(?:echo "([^"]*)" \| )?(lm_pcfg [^|>$]*)(?: > (\S+))?""", line):
        said, words, file = match.groups()
        output = ran(folder, words.strip(), (f"{said}\n" if said else "").encode())
        if file:
            (folder / file).write_bytes(output)
            assert output
    else:
        training = " lm_pcfg/train.py " in line
        in_shell(f"{line} {shlex.join(FEW_STEPS)}" if training else line, folder)


def environment() -> dict[str, str]:
    ours = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    ours["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels"), ours.get("PYTHONPATH", "")])
    for name in ("MLFLOW_TRACKING_URI", "VENV", "PYTHON", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS"):
        ours.pop(name, None)  # `make test` hands its own variables down, and prints folders when below another
    return ours


def in_shell(line: str, folder: Path) -> str:
    result = subprocess.run(
        ["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=300, env=environment()
    )
    assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
    return result.stdout


SERVERS: dict[Path, tuple[subprocess.Popen[bytes], int]] = {}  # of `lm_pcfg serve`, by the folder of their page


def serve(line: str, folder: Path) -> None:
    """Start a server on a free port, and wait until it is healthy. The commands after it on the page may ask it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    few = ["--workers", "1"] if line.startswith("mlflow") else []
    with open(folder / "server.log", "wb") as log:
        server = subprocess.Popen(
            [*shlex.split(line), "--port", str(port), *few], cwd=folder, env=environment(), start_new_session=True,
            stdout=log, stderr=log,
        )  # fmt: skip
    SERVERS[folder] = server, port
    until = time.monotonic() + 240
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        assert server.poll() is None, (folder / "server.log").read_text()
        assert time.monotonic() < until, f"{line}: no answer\n{(folder / 'server.log').read_text()}"
        time.sleep(0.2)


def stop(folder: Path) -> None:
    server, _ = SERVERS.pop(folder, (None, 0))
    if server is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


# ---- the tests ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A folder for each page: the repository's, a run of the README's first command, and files of one's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(source_grammar, "SENTENCES", {"train": 1000, "valid": 40, "test": 60})
        patch.setattr(files, "SHA256", files.checksums(files.generate()))
        first = tmp_path_factory.mktemp("first")

        def furnish(folder: Path) -> None:
            for name in ("Makefile", "pyproject.toml", "configs", "lm_pcfg", "kernels", "launch", "docker"):
                (folder / name).symlink_to(REPOSITORY / name)
            for name, text in FILES.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(text)

        @cache
        def folder(page: str) -> Path:
            own = tmp_path_factory.mktemp(Path(page).stem)
            furnish(own)
            for name in ("runs", "data"):
                if (first / name).exists():
                    shutil.copytree(first / name, own / name, symlinks=True)
            return own

        furnish(first)
        ran(first, "lm_pcfg train --config configs/tiny.yaml")
        yield folder
        for page in list(SERVERS):
            stop(page)


@pytest.mark.long
@pytest.mark.parametrize("command", commands(), ids=lambda command: f"{command.page}: {command.text.splitlines()[0]}")
def test_a_command_of_the_manual_runs(command, folder_of):
    if command.needs:
        pytest.skip(f"needs {command.needs}: {command.page}: {command.text.splitlines()[0]}")
    if test := run_elsewhere(command):
        assert (REPOSITORY / "tests" / test).is_file()
        return
    run(command, folder_of(command.page))


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if "lm_pcfg.load" in "".join(blocks_of(page, "python"))])
def test_the_python_of_a_page_runs(page, folder_of, monkeypatch):
    monkeypatch.chdir(folder_of(page))
    names: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks_of(page, "python"):
            exec(block, names)


def test_commands_are_found_and_marked():
    found = commands()
    assert len(found) > 40
    assert {command.needs for command in found} <= {"", *NEEDS}
    loop = next(command for command in found if command.text.startswith("for seed in"))
    assert (loop.needs, loop.text.endswith("done")) == ("GPU", True)
    assert not any(command.needs for command in found if command.page == "README.md")
    assert command_of("x", "make demo    # install\n") == ("x", "make demo", "")
    assert command_of("x", "nvidia-smi # GPU: one is enough\n") == ("x", "nvidia-smi", "GPU")


def test_commands_within_sentences_exist_with_their_options():
    """`lm_pcfg bench step --config X` of a table is not run, but it could be."""
    tree = typer.main.get_command(app)
    wrong = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", (REPOSITORY / page).read_text(encoding="utf-8"), flags=re.DOTALL)
        for line in re.findall(r"`(lm_pcfg [^`]+)`", text):
            command, words = tree, line.split()[1:]
            while words and words[0] in getattr(command, "commands", {}):
                command = command.commands[words.pop(0)]
            if hasattr(command, "commands") and words and words[0].isalpha() and words[0].islower():
                wrong.append(f"{page}: {line}: there is no {words[0]}")
            elif not command.context_settings.get("ignore_unknown_options"):  # benchmarks of kernels read theirs
                known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
                options = [word for word in words if re.match(r"--?[a-z]", word)]
                wrong += [f"{page}: {line}: there is no {word}" for word in options if word not in known | {"--help"}]
    assert wrong == []
