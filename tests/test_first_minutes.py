"""The first minutes: `make demo` finds a fitting Python, says what it does, and ends with what can be typed next.

Pythons and pips of these tests are shell scripts; test_readme.py has the demo itself.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from lm_pcfg.errors import UserError
from lm_pcfg.settings_file import load_settings
from lm_pcfg.training.tracking import default_store

REPOSITORY = Path(__file__).resolve().parents[1]
PIP = """#!/bin/sh
echo "Collecting torch<2.14,>=2.11 (from lm_pcfg==0.1.0)"
echo "Installing collected packages: torch"
exit $PIP_STATUS
"""
PYTHON = """#!/bin/sh
case "$2" in
  *version_info*) echo VERSION ;;
  venv) mkdir -p "$3/bin"; touch "$3/pyvenv.cfg"; cp "$0" "$3/bin/python"; cp "$FAKES/pip" "$3/bin/pip" ;;
esac
"""


@pytest.fixture
def fresh(tmp_path):
    """A folder with the script of the repository, and another with programmes in place of real ones."""
    for name in ("checkout/launch", "bin"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(REPOSITORY / "launch/environment.sh", tmp_path / "checkout/launch")
    shutil.copy(REPOSITORY / "Makefile", tmp_path / "checkout")
    (tmp_path / "checkout/pyproject.toml").touch()
    programme(tmp_path / "bin/pip", PIP)
    for name in (
        "bash",
        "sh",
        "sed",
        "find",
        "wc",
        "sleep",
        "touch",
        "rm",
        "mkdir",
        "cp",
        "cat",
        "head",
        "dirname",
        "make",
    ):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    return tmp_path


def programme(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def install(fresh: Path, *variables: str, pip_status: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(fresh / "bin"), "FAKES": str(fresh / "bin"), "PIP_STATUS": str(pip_status)}
    return subprocess.run(
        ["make", "--no-print-directory", "install", *variables], cwd=fresh / "checkout", env=environment,
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip


def errors(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode
    return [line for line in result.stderr.splitlines() if line.startswith("error")]


def test_an_old_python_is_refused_before_anything_is_made(fresh):
    programme(fresh / "bin/python3.10", PYTHON.replace("VERSION", "3.10"))
    (line,) = errors(install(fresh, "PYTHON=python3.10"))
    assert line == "error: python3.10 is Python 3.10, and 3.11 or later is needed: make demo PYTHON=python3.11"
    (line,) = errors(install(fresh, "PYTHON=python9"))
    assert "no Python that runs" in line
    (fresh / "bin/python3.10").rename(fresh / "bin/python3")
    (line,) = errors(install(fresh))
    assert "Python 3.11 or later is needed" in line
    assert not (fresh / "checkout/.venv").exists()


def test_an_environment_of_another_python_is_made_anew(fresh):
    """After `make demo PYTHON=python3.10` had failed, a right Python failed, too: the old environment stayed."""
    old = PYTHON.replace("VERSION", "3.10")
    programme(fresh / "checkout/.venv/bin/python", old)
    programme(fresh / "checkout/.venv/bin/pip", "#!/bin/sh\nexit 1\n")
    (fresh / "checkout/.venv/pyvenv.cfg").touch()
    programme(fresh / "bin/python3", old)
    programme(fresh / "bin/python3.12", PYTHON.replace("VERSION", "3.12"))
    result = install(fresh)  # python3 is too old, python3.12 is found
    assert result.returncode == 0, result.stderr
    assert ".venv belongs to Python 3.10, not to Python 3.12: it is made anew" in result.stderr
    assert result.stdout == ""
    assert "  torch<2.14,>=2.11\n  unpacking\n" in result.stderr  # pip's progress
    assert "about 3 minutes" in result.stderr

    assert install(fresh).stderr == ""  # once is enough
    assert install(fresh, "PYTHON=python3.12").stderr == ""
    programme(fresh / "bin/python3.11", PYTHON.replace("VERSION", "3.11"))
    assert install(fresh).stderr == ""  # a fitting one stays
    assert "it is made anew" in install(fresh, "PYTHON=python3.11").stderr
    later = (fresh / "checkout/.venv/.installed").stat().st_mtime + 10
    os.utime(fresh / "checkout/pyproject.toml", (later, later))
    assert "installing lm_pcfg into .venv with Python 3.11" in install(fresh).stderr


def test_a_failed_installation_is_tried_again(fresh):
    programme(fresh / "bin/python3", PYTHON.replace("VERSION", "3.13"))
    (line,) = errors(install(fresh, pip_status=1))
    assert "try again" in line
    assert install(fresh).returncode == 0


def test_unpacking_is_not_silent(fresh):
    """pip says nothing then, for most of the three minutes: packages are counted."""
    programme(fresh / "bin/python3", PYTHON.replace("VERSION", "3.13"))
    real = shutil.which("sleep")
    (fresh / "bin/sleep").unlink()
    programme(fresh / "bin/sleep", f"#!/bin/sh\n{real} 0.1\n")  # in place of 10 s
    programme(fresh / "bin/pip", PIP.replace("exit", f"{real} 1\nexit"))
    packages = fresh / "checkout/.venv/lib/python3.13/site-packages"
    packages.mkdir(parents=True)
    (packages / "torch-2.12.dist-info").mkdir()
    programme(fresh / "checkout/.venv/bin/python", PYTHON.replace("VERSION", "3.13"))
    assert "  ... 1 packages are in place after" in install(fresh).stderr


def test_a_folder_that_is_no_environment_is_left_alone(fresh):
    programme(fresh / "bin/python3", PYTHON.replace("VERSION", "3.13"))
    (fresh / "checkout/papers").mkdir()
    (line,) = errors(install(fresh, "VENV=papers"))
    assert "papers is no virtual environment" in line
    assert (fresh / "checkout/papers").is_dir()


@pytest.mark.parametrize("around", [{}, {"VENV": ".venv-other"}, {"MAKEFLAGS": " -- VENV=.venv-other"}])
def test_the_demo_names_the_next_commands_as_they_are_typed(around, monkeypatch):
    for name, value in around.items():  # the tests may be run by `VENV=.venv-other make test`
        monkeypatch.setenv(name, value)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VENV", "MAKE", "MFLAGS"))}
    result = subprocess.run(["make", "-n", "demo"], cwd=REPOSITORY, env=env, capture_output=True, text=True)
    for line in (
        ". .venv/bin/activate",
        "lm_pcfg parse embedded:test",
        "mlflow ui --backend-store-uri sqlite:///mlruns/mlflow.db",
    ):
        assert f'"  {line}"' in result.stdout
    assert result.stdout.splitlines()[-1] == ".venv/bin/lm_pcfg score embedded:test"


def test_the_readme_says_what_is_typed_after_the_demo_and_how_long_it_takes():
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    two, first, *_ = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    for command, line in zip(("make demo", "make test"), two.splitlines(), strict=True):
        assert re.match(rf"{command} +# .*\d+ minutes", line), line
    activate, *others = first.splitlines()
    assert activate == ". .venv/bin/activate"  # without it there is no lm_pcfg on the PATH
    assert others[0].startswith("lm_pcfg train ")
    assert f"mlflow ui --backend-store-uri {default_store(Path())}" in others  # without it the page is empty


def test_the_tests_that_guard_the_findings_are_there():
    page = (REPOSITORY / "docs/lab/first-minutes.md").read_text(encoding="utf-8")
    rows = re.findall(r"`(test_\w+\.py)`: ((?:`\w+`(?:, )?)+)", page)
    assert len(rows) > 30
    for file, names in rows:
        code = (REPOSITORY / "tests" / file).read_text(encoding="utf-8")
        assert all(len(re.findall(rf"def test_\w*{name}", code)) == 1 for name in re.findall(r"\w+", names)), names


# ---- without a clone ------------------------------------------------------------------------------------------------


def test_a_config_of_the_package_is_found_anywhere(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = load_settings(Path("configs/tiny.yaml"))
    assert (settings.name, settings.data.train) == ("tiny", "embedded:train")
    assert capsys.readouterr().err == "configs/tiny.yaml is not here: the one of the package is used\n"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/tiny.yaml").write_text("data: {train: mine.txt}\nmodel: {nonterminals: 2}\n")
    assert load_settings(Path("configs/tiny.yaml")).data.train == "mine.txt"
    for missing in ("configs/no-such.yaml", "tiny.yaml", "configs/../LICENSE"):
        with pytest.raises(UserError, match="cannot be read"):
            load_settings(Path(missing))


def test_a_wheel_is_told_to_have_the_configs():
    build = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert build["only-include"] == ["lm_pcfg", "kernels/flash_inside", "configs"]
    assert build["sources"]["configs"] == "lm_pcfg/configs"


@pytest.mark.long
def test_a_wheel_has_all_that_the_package_needs(tmp_path):
    """Built as `pip install .` builds it, and unpacked elsewhere: every file but Python's own caches is in it."""
    copy = tmp_path / "source"
    copy.mkdir()
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git repository")
    files = [name for name in listed.stdout.splitlines() if (REPOSITORY / name).is_file()]
    for name in files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, copy / name)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheel")]
    result = subprocess.run(build, cwd=copy, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    wanted = [name for name in files if name.startswith(("lm_pcfg/", "kernels/flash_inside/", "configs/"))]
    places = [name.removeprefix("kernels/").replace("configs/", "lm_pcfg/configs/", 1) for name in wanted]
    assert [name for name in places if not (site / name).is_file()] == []

    code = "import lm_pcfg.cli, lm_pcfg; print(lm_pcfg.__file__); lm_pcfg.cli.main()"
    (tmp_path / "anywhere").mkdir()
    result = subprocess.run(
        [sys.executable, "-P", "-c", code, "train", "--config", "configs/tiny.yaml", "--print-config"],
        cwd=tmp_path / "anywhere", env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.stdout.startswith(str(site)), result.stderr
    assert "embedded:train" in result.stdout
