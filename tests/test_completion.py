"""What the Tab key offers in bash, zsh and fish, asked as their scripts ask."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lm_pcfg.cli import app
from lm_pcfg.commands.output import complete_setting
from lm_pcfg.settings_file import load_settings, setting_keys

REPOSITORY = Path(__file__).resolve().parents[1]
SHELLS = ("bash", "zsh", "fish")


def asked(monkeypatch, capsys, **variables: str) -> str:
    """Return what the programme prints with these variables of the environment."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        app(prog_name="lm_pcfg", standalone_mode=False)  # the name is what the script calls
    assert not end.value.code
    return capsys.readouterr().out


def offered(monkeypatch, capsys, shell: str, line: str) -> str:
    zsh_and_fish = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    bash = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    return asked(monkeypatch, capsys, _LM_PCFG_COMPLETE=f"complete_{shell}", **zsh_and_fish, **bash)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "there", "absent"),
    [
        ("lm_pcfg s", ["score", "sample", "surprisal", "suite", "search"], "train"),
        ("lm_pcfg score --pre", ["--precision"], "--per-sentence"),
        ("lm_pcfg score --precision b", ["bf16"], "fp64"),
        ("lm_pcfg train --config x.yaml optimizer.l", ["optimizer.learning_rate="], "optimizer.name"),
        ("lm_pcfg bench n", ["ngram"], "inside"),
    ],
)
def test_tab(monkeypatch, capsys, shell, line, there, absent):
    output = offered(monkeypatch, capsys, shell, line)
    assert all(word in output for word in there), output
    assert absent not in output


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script(monkeypatch, capsys, shell):
    script = asked(monkeypatch, capsys, _LM_PCFG_COMPLETE=f"source_{shell}")
    assert f"_LM_PCFG_COMPLETE=complete_{shell}" in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True).returncode == 0


def test_bash_calls_the_programme(tmp_path):
    """In the shell itself, with the programme under its name."""
    programme = tmp_path / "lm_pcfg"
    programme.write_text(f"#!{sys.executable}\nfrom lm_pcfg.cli import main\nmain()\n")
    programme.chmod(0o755)
    script = """
        eval "$(_LM_PCFG_COMPLETE=source_bash lm_pcfg)"
        COMP_WORDS=(lm_pcfg doc) COMP_CWORD=1
        _lm_pcfg_completion lm_pcfg
        echo "${COMPREPLY[*]}"
    """
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment)
    assert result.stdout.strip() == "doctor", result.stderr


def test_every_setting_is_offered():
    keys = setting_keys()
    assert {"seed", "batch.sentences", "model.nonterminals", "model.states", "optimizer.schedule.kind"} <= set(keys)
    assert not {"batch", "model", "optimizer.schedule"} & set(keys)  # sections have no value
    settings = load_settings(REPOSITORY / "configs/tiny.yaml").model_dump()
    here = [key for section, values in settings.items() for key in ([section] if not isinstance(values, dict) else [])]
    assert set(here) <= set(keys)
    assert complete_setting("seed") == ["seed="]
