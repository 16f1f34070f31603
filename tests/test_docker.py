"""The files of docker/, read without an engine: every path, command and package in them exists."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lm_pcfg import cli

REPOSITORY = Path(__file__).resolve().parents[1]
DOCKER = REPOSITORY / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
TARGETS = ("cpu", "cuda")


def stage(name: str) -> str:
    """The instructions of a stage and of those it is built on."""
    text = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    (own,) = (part for part in text if re.match(rf"\S+ AS {name}\n", part))
    base = own.split()[0]
    return (stage(base) if re.search(rf"^FROM \S+ AS {base}$", DOCKERFILE, re.MULTILINE) else "") + own


def copied(text: str) -> list[str]:
    """What COPY takes from the repository."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


def sent_to_engine(name: str) -> bool:
    """Whether .dockerignore lets a file through; its last line that fits decides."""
    sent = True
    for line in (REPOSITORY / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if line.startswith("#") or not line:
            continue
        if fnmatch(name, pattern) or name.startswith(f"{pattern}/"):
            sent = line.startswith("!")
    return sent


def test_hadolint_finds_nothing():
    folders = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))  # active or not
    hadolint = shutil.which("hadolint", path=folders)
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    result = subprocess.run([hadolint, "--no-color", DOCKER / "Dockerfile"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.long
def test_compose_reads_its_file():
    command = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
    if shutil.which(command[0]) is None:
        pytest.skip("docker-compose is not installed")
    config = [*command, "-f", str(DOCKER / "compose.yaml"), "config", "--quiet"]
    result = subprocess.run(config, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_every_base_and_every_package_is_pinned():
    names = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    stages = {name for _, name in names}
    for base, _ in names:
        assert base in stages or re.fullmatch(r"python:3\.\d+\.\d+-slim-bookworm", base), base
    pins = dict(
        line.split("==") for line in (DOCKER / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, project["dependencies"]):
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is not {version} of docker/constraints.txt"
    for line in re.findall(r"pip install [^&\n]+", DOCKERFILE):
        assert "--no-deps" in line or "--constraint constraints.txt" in line, line
        assert "--no-cache-dir" in line


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_copies_what_there_is_and_runs_without_rights(target):
    text = stage(target)
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["1000"]
    assert text.rindex("\nUSER") > text.rindex("\nRUN")
    assert re.search(r"^HEALTHCHECK .*CMD", text, re.MULTILINE)
    assert json.loads(re.search(r"^ENTRYPOINT (.+)$", text, re.MULTILINE)[1]) == ["lm_pcfg"]
    for source in copied(text + stage("packages")):
        assert (REPOSITORY / source).exists(), source
        assert sent_to_engine(source), f"{source} is in .dockerignore"
    assert copied(text)[-1] == "lm_pcfg"  # what changes most comes last
    needed = {"pyproject.toml", "README.md", "LICENSE", "configs", "kernels", "lm_pcfg"}
    assert set(copied(text)) == needed  # what hatchling reads


def test_the_engine_sees_nothing_else():
    assert not any(map(sent_to_engine, ("runs/x", "data/x", ".git/config", ".venv/bin/python", "tests/x.py", "docs/x")))
    assert not sent_to_engine("lm_pcfg/__pycache__")
    assert sent_to_engine("lm_pcfg/cli.py")


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_service_is_built_here_and_its_command_exists(name):
    service = COMPOSE["services"][name]
    build = service["build"]
    assert (DOCKER / build["context"]).resolve() == REPOSITORY
    assert (REPOSITORY / build["dockerfile"]).is_file()
    assert build["target"] in TARGETS
    assert service["image"] == f"lm_pcfg:{build['target']}"
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    if service.get("entrypoint"):
        assert service["entrypoint"] == ["mlflow"]
        return
    command = service["command"]
    for word in command:
        if word.startswith("configs/"):
            assert (REPOSITORY / word).is_file()
    check_usage(command)


def check_usage(command: list[str]) -> None:
    """Parse a command as the programme does, and do nothing with it."""
    name, *arguments = command
    one = typer.main.get_command(cli.app).commands[name]
    one.make_context(name, arguments)


def test_options_that_do_not_exist_are_told():
    for wrong in (["serve", "--porto", "1"], ["serve", "--port", "x"], ["serve", "runs/tiny"]):
        with pytest.raises(cli._WrongUsage):
            check_usage(wrong)
    with pytest.raises(KeyError):
        check_usage(["server"])


def test_what_writes_to_a_folder_of_the_host_does_so_as_its_user():
    for name, service in COMPOSE["services"].items():
        writes = any(one[0] in "$./" and not one.endswith(":ro") for one in service.get("volumes", ()))
        assert (service.get("user") == "${UID:-1000}:${GID:-1000}") == writes, name


def test_the_index_of_pytorch_brings_torch_alone():
    (line,) = (line for line in re.findall(r"pip install [^&\n]+", DOCKERFILE) if "--index-url" in line)
    assert "--no-deps" in line
    assert line.split()[-1] == "torch"


def test_servers_have_a_health_check_and_their_data_lies_in_volumes():
    services = COMPOSE["services"]
    for name, port in {"mlflow": 5000, "serve": 8000}.items():
        assert f"http://localhost:{port}/health" in services[name]["healthcheck"]["test"][-1]
        compile(services[name]["healthcheck"]["test"][-1], "healthcheck", "exec")
        assert services[name]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert services["mlflow"]["volumes"] == ["mlflow:/mlflow"]
    assert "mlflow" in COMPOSE["volumes"]
    assert "sqlite:////mlflow/mlflow.db" in services["mlflow"]["command"][3]
    assert "/mlflow" in stage("common")  # made for the user of the image, so that it can write there


@pytest.mark.long
def test_mlflow_has_the_options_of_the_service():
    result = subprocess.run([sys.executable, "-m", "mlflow", "server", "--help"], capture_output=True, text=True)
    options = [word.split("=")[0] for word in COMPOSE["services"]["mlflow"]["command"][1:]]
    assert [option for option in options if option not in result.stdout] == [], result.stderr
