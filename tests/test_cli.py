"""The commands as a user types them: results on standard output, one clear line for a mistake, exit status 0, 1, 2."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from command_line import lm_pcfg
from lm_pcfg import cli
from lm_pcfg.commands.info import info
from lm_pcfg.commands.text.score import score as score_command
from lm_pcfg.commands.train import train
from texts import WORDS, write_config, write_text

REPOSITORY = Path(__file__).resolve().parents[1]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'kernels'}", "COLUMNS": "100", **more}


def in_process(*command: str, cwd: Path):
    """Run a command in a process of its own."""
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, timeout=300, env=environment())


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a finished run under runs/, as after a first training."""
    folder = tmp_path_factory.mktemp("trained")
    result = lm_pcfg("train", "--config", str(write_config(folder)), cwd=folder)
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout == b""
    return folder


def score(folder: Path, file: str, *options: str, text: bytes = b""):
    return lm_pcfg("score", file, *options, "--device", "cpu", cwd=folder, text=text)


def score_json(folder: Path, file: str, *options: str, text: bytes = b"") -> dict:
    result = score(folder, file, "--json", *options, text=text)
    assert result.returncode == 0, result.stderr.decode()
    return json.loads(result.stdout)


def one_line_error(result, status: int = 1) -> str:
    assert result.returncode == status
    assert b"Traceback" not in result.stderr
    assert result.stdout == b""
    lines = [line for line in result.stderr.decode().splitlines() if "error" in line.lower()]
    assert len(lines) == 1, result.stderr.decode()
    return lines[0]


# ---- help -----------------------------------------------------------------------------------------------------------


def test_help_answers_quickly_and_imports_nothing_heavy(tmp_path):
    times = []  # of the processor: a busy machine makes no difference
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = in_process("-m", "lm_pcfg", "--help", cwd=tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert result.returncode == 0
        assert all(command in result.stdout.decode() for command in ("train", "score", "info"))
    assert min(times) < 0.5
    heavy = ["torch", "deepspeed", "mlflow", "datasets", "accelerate", "transformers", "triton", "numpy"]
    code = f"import sys, lm_pcfg.cli; print([name for name in {heavy} if name in sys.modules])"
    assert in_process("-c", code, cwd=tmp_path).stdout.strip() == b"[]"


@pytest.mark.parametrize("command", [*cli.COMMANDS, "bench"])
def test_every_command_has_help(command, tmp_path):
    result = lm_pcfg(command, "--help", cwd=tmp_path)
    assert result.returncode == 0
    assert b"Usage" in result.stdout


@pytest.mark.parametrize("command", [[], ["bench"]])
def test_help_is_not_cut(command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    listed = lm_pcfg(*command, "--help", cwd=tmp_path).stdout.decode()
    assert "..." not in listed.partition("Commands:")[2]
    if not command:
        assert all(command.__doc__.split(".")[0].split()[-1] in listed for command in cli.COMMANDS.values())


def test_ctrl_c_while_the_command_line_is_imported_is_one_line(monkeypatch, capsys):
    import tomllib

    from lm_pcfg import __main__

    class Interrupted:
        def find_spec(self, name, *_):
            if name == "lm_pcfg.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "lm_pcfg.cli")
    monkeypatch.delattr("lm_pcfg.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as end:
        __main__.main()
    assert (end.value.code, capsys.readouterr().err) == (130, "lm_pcfg: interrupted\n")
    code = "import sys; before = set(sys.modules); import lm_pcfg.__main__; print(sorted(set(sys.modules) - before))"
    imported = in_process("-S", "-c", code, cwd=REPOSITORY).stdout.decode()
    assert imported.strip() == "['__future__', 'lm_pcfg', 'lm_pcfg.__main__']"
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"lm_pcfg": "lm_pcfg.__main__:main"}


def test_memory_is_kept_between_steps(monkeypatch):
    """The allocator reads the environment when PyTorch is imported, which no command does before this."""
    told: list[str] = []
    monkeypatch.setattr(cli, "_prepare_streams", lambda: None)
    monkeypatch.setattr(cli, "_run", lambda: told.append(os.environ["MIMALLOC_PURGE_DELAY"]) or 0)
    for given in ({}, {"MIMALLOC_PURGE_DELAY": "0"}):
        monkeypatch.setattr(os, "environ", given)
        with contextlib.suppress(SystemExit):
            cli.main()
    assert told == ["10000", "0"]


# ---- train ----------------------------------------------------------------------------------------------------------


def losses(run_folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines for key in ("train/loss", "valid/ppl") if key in line]


@pytest.mark.long
def test_accelerate_launch_gives_the_same_losses(tmp_path):
    config = str(write_config(tmp_path))
    script = str(REPOSITORY / "lm_pcfg" / "train.py")
    plain, launched = ["-m", "lm_pcfg", "train"], ["-m", "accelerate.commands.launch", script]
    for name, command in (("plain", plain), ("launched", launched)):
        result = in_process(*command, "--config", config, f"name={name}", cwd=tmp_path)
        assert result.returncode == 0, result.stderr.decode()
    plain, launched = (losses(tmp_path / "runs" / name) for name in ("plain", "launched"))
    assert len(plain) > 4
    assert plain == launched


def test_no_module_of_the_package_folder_shadows_another_package():
    """`accelerate launch lm_pcfg/train.py` puts lm_pcfg/ on sys.path until train.py takes it off again."""
    own = {path.stem for path in (REPOSITORY / "lm_pcfg").iterdir() if path.suffix == ".py" or path.is_dir()}
    own -= {"__init__", "__main__", "__pycache__"}
    import importlib.metadata

    installed = {name.split(".")[0] for name in importlib.metadata.packages_distributions()}
    assert not own & (set(sys.stdlib_module_names) | installed)


def test_print_config_is_complete_and_reads_back(tmp_path):
    result = lm_pcfg(
        "train", "--config", str(write_config(tmp_path)), "--print-config", "model.eos=explicit", cwd=tmp_path
    )
    assert result.returncode == 0
    (tmp_path / "again.yaml").write_bytes(result.stdout)
    again = lm_pcfg("train", "--config", "again.yaml", "--print-config", cwd=tmp_path)
    assert again.stdout == result.stdout
    assert b"eos: explicit" in result.stdout
    assert not (tmp_path / "runs").exists()


def test_dry_run_makes_one_step_and_writes_nothing(tmp_path):
    config = str(write_config(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    result = lm_pcfg("train", "--config", config, "--dry-run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr.decode()
    assert b"peak_memory" in result.stdout
    assert b"parameters" in result.stdout
    assert result.stdout.decode().splitlines()[-1].startswith("the whole training takes about ")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--config", "none.yaml"], 1, "none.yaml: cannot be read"),
        (["--config", "small.yaml", "model.nonterminal=3"], 1, "did you mean 'model.nonterminals'"),
        (["--config", "small.yaml", "data.train=gone.txt"], 1, "gone.txt"),
        (["--config", "small.yaml", "inside.backend=reference", "inside.precision=bf16"], 1, "fp64 or fp32"),
        (["--config", "small.yaml", f"data.valid={'x' * 300}"], 1, "xxx...: File name too long; check the path"),
        (["--config", "small.yaml", f"data.train={'x' * 300}.parquet"], 1, "xxx...: File name too long"),
        (["--config", "small.yaml", f"resume={'x' * 300}"], 1, "File name too long"),
        (["--config", "small.yaml", "a\x1cb\u2028\x1b[31m=["], 1, r"a\x1cb\u2028\x1b[31m: line 1"),
        (["--config", "small.yaml", "data.sentencepiece=/dev/null"], 1, "not a plain file"),
        (["--config", "small.yaml", "data.sentencepiece=empty"], 1, "not a SentencePiece model (it is empty)"),
        (["--config", "small.yaml", "inside.backend=triton"], 1, "inside.backend: triton needs a GPU"),
        ([], 2, "--config"),
    ],
    ids=lambda value: " ".join(value[2:])[:60] if isinstance(value, list) else None,
)
def test_mistakes_in_training_get_one_line(arguments, status, message, tmp_path):
    write_config(tmp_path)
    (tmp_path / "empty").touch()
    assert message in one_line_error(lm_pcfg("train", *arguments, cwd=tmp_path), status)


# ---- score ----------------------------------------------------------------------------------------------------------


def test_score_right_after_training_uses_the_newest_best_checkpoint(trained):
    report = score_json(trained, "valid.txt")
    assert report["checkpoint"] == str((trained / "runs" / "small" / "best").resolve())
    lines = [line.split() for line in (trained / "valid.txt").read_text().splitlines()]
    assert report["lines"] == len(lines)
    assert report["words"] == sum(map(len, lines))
    assert report["tokens"] == report["words"] + report["lines"]
    assert report["ppl"] == pytest.approx(math.exp(report["nll"] / report["tokens"]))
    assert report["ppl_words"] == pytest.approx(math.exp(report["nll"] / report["words"]))
    assert report["skipped"] == report["unknown_words"] == 0
    metrics = [json.loads(line) for line in (trained / "runs/small/metrics.jsonl").read_text().splitlines()]
    assert report["ppl"] == pytest.approx(min(line["valid/ppl"] for line in metrics if "valid/ppl" in line), rel=1e-6)


def test_perplexity_does_not_depend_on_the_batches(trained):
    alone, together = (score_json(trained, "train.txt", "--batch-cost", cost) for cost in ("1", "1000000"))
    assert alone["ppl"] == pytest.approx(together["ppl"], rel=1e-6)
    assert alone["lines"] == together["lines"]


def test_per_sentence_keeps_the_input_order_and_blank_lines(trained):
    text = (trained / "valid.txt").read_text().splitlines()
    mixed = [text[0], "", text[1], "   ", "the " * 300, text[2], ""]
    result = score(trained, "-", "--per-sentence", text="\n".join(mixed).encode())
    assert result.returncode == 0
    values = result.stdout.decode().split("\n")
    assert [value == "" for value in values] == [False, True, False, True, False, False, True]
    assert values[4] == "-inf"
    for position in (0, 2, 5):
        alone = score(trained, "-", "--per-sentence", text=mixed[position].encode())
        assert float(values[position]) == pytest.approx(float(alone.stdout), rel=1e-6)
    assert "perplexity" not in result.stdout.decode()


def test_a_very_long_line_is_refused_with_its_number_and_the_way_out(trained):
    text = f"the cat sleeps\n{'cat ' * 10_000}\na dog runs\n".encode()
    report = score_json(trained, "-", text=text)
    assert (report["lines"], report["skipped"], report["words"]) == (2, 1, 6)
    result = score(trained, "-", text=text)
    assert "standard input, line 2: 10,000 words, skipped; --max-length 250" in result.stderr.decode()
    longer = b"a dog runs\n" + b"cat " * 30
    lower, higher = (score_json(trained, "-", "--max-length", most, text=longer) for most in ("29", "30"))
    assert (lower["lines"], lower["skipped"]) == (1, 1)
    assert (higher["lines"], higher["skipped"]) == (2, 0)


def test_unknown_words_are_counted(trained):
    report = score_json(trained, "-", text=b"the zebra sees a giraffe\n")
    assert report["unknown_words"] == 2
    assert math.isfinite(report["nll"])


def test_crlf_and_a_missing_last_newline_change_nothing(trained):
    plain = score_json(trained, "-", text=b"the cat sleeps\na dog runs\n")
    windows = score_json(trained, "-", text=b"\xef\xbb\xbfthe cat sleeps\r\na dog runs")
    assert plain == windows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "bad.txt: no such file"),
        (b"", "no line could be scored (it is empty)"),
        (b"\n \n", "no line could be scored (all blank)"),
        (b"cat " * 999, "no line could be scored (1 skipped)"),
        (gzip.compress(b"the cat sleeps\n" * 9), "gzip"),
        (b"the cat\x00 sleeps\n", "binary"),
        (b"the cat sleeps\nthe caf\xe9\n", "line 2"),
    ],
    ids=["missing", "empty", "blank", "skipped", "gzip", "NUL", "latin-1"],
)
def test_bad_files_get_one_clear_line(trained, tmp_path, content, message):
    if content is not None:
        (tmp_path / "bad.txt").write_bytes(content)
    result = score(trained, str(tmp_path / "bad.txt"))
    assert message.lower() in one_line_error(result).lower()


def test_a_folder_is_no_text(trained):
    assert "folder" in one_line_error(score(trained, "runs"))


def test_no_run_yet(tmp_path):
    write_text(tmp_path / "text.txt", 2)
    assert "lm_pcfg train --config" in one_line_error(score(tmp_path, "text.txt"))


def test_wrong_usage_is_status_2(trained):
    assert "exclude each other" in one_line_error(score(trained, "valid.txt", "--json", "--per-sentence"), 2)
    assert one_line_error(score(trained, "valid.txt", "--precision", "fp8"), 2)


def test_a_damaged_checkpoint_is_named(trained, tmp_path):
    import shutil

    shutil.copytree(trained / "runs", tmp_path / "runs", symlinks=True)
    model = (tmp_path / "runs/small/best").resolve() / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    assert "model.safetensors" in one_line_error(score(tmp_path, str(trained / "valid.txt")))


def test_the_papers_root_skips_one_word_lines(trained):
    text = b"cat\nthe cat sleeps\n"
    over_all, paper = (score_json(trained, "-", "--root", root, text=text) for root in ("trained", "nonterminals"))
    assert (over_all["lines"], over_all["skipped"]) == (2, 0)
    assert (paper["lines"], paper["skipped"]) == (1, 1)


def test_results_reach_standard_output_beside_a_progress_bar(trained):
    """Standard error is a terminal, standard output a file: as in `lm_pcfg score FILE --per-sentence > out`."""
    terminal, other_end = os.openpty()
    command = [sys.executable, "-m", "lm_pcfg", "score", "valid.txt", "--per-sentence", "--device", "cpu"]
    with (trained / "out.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=trained, stdout=out, stderr=other_end, env=environment(TERM="xterm"))
        os.close(other_end)
        with contextlib.suppress(OSError):  # the other end is closed
            while os.read(terminal, 4096):
                pass
        assert process.wait(timeout=120) == 0
    values = (trained / "out.txt").read_text().splitlines()
    assert len(values) == 12
    assert all(math.isfinite(float(value)) for value in values)


@pytest.mark.long
def test_closed_pipes_full_disks_and_closed_input(trained):
    python = f"{sys.executable} -m lm_pcfg"

    def shell(line: str):
        return subprocess.run(["bash", "-c", line], cwd=trained, capture_output=True, text=True, env=environment())

    closed = shell(f"{python} score valid.txt --per-sentence --device cpu | head -1; echo ${{PIPESTATUS[0]}}")
    assert closed.stdout.splitlines()[-1] == "0"
    full = shell(f"{python} score valid.txt --json --device cpu > /dev/full")
    assert (full.returncode, full.stderr.count("No space left on device")) == (1, 1)
    assert "Traceback" not in full.stderr
    no_input = shell(f"{python} score - --device cpu <&-")
    assert (no_input.returncode, "standard input is closed" in no_input.stderr) == (1, True)


def test_the_best_possible_score_is_that_of_the_lines_that_were_scored(trained):
    report = score_json(trained, "embedded:test", "--max-length", "3")
    assert report["skipped"] > 0
    assert report["best_possible_ppl"] < report["ppl"]
    assert "trees, not text" in one_line_error(score(trained, "embedded:test.trees"))


def test_too_little_memory_is_one_line(tmp_path):
    result = lm_pcfg(
        "train", "--config", str(write_config(tmp_path)), "--dry-run", "model.nonterminals=2000000000", cwd=tmp_path
    )
    assert re.search(
        r"not enough memory for such a model; try a larger machine, fewer symbols \(model.nonterminals, .*"
        r"\(at least [\d,.]+ GiB are needed, and there are [\d,.]+\)",
        one_line_error(result),
    )


# ---- info -----------------------------------------------------------------------------------------------------------


def test_info_reports_the_grammar(trained):
    result = lm_pcfg("info", "--json", "--device", "cpu", cwd=trained)
    assert result.returncode == 0, result.stderr.decode()
    report = json.loads(result.stdout)
    assert report["nonterminals"] == 4
    assert report["vocabulary"] == len(WORDS) + 1
    assert report["subcritical"] == (report["spectral_radius"] < 1)
    assert 0 < report["mass_of_finite_strings"] <= 1 + 1e-6
    for folder in ("runs/small", "runs/small/best"):
        named = lm_pcfg("info", folder, "--json", "--device", "cpu", cwd=trained)
        assert json.loads(named.stdout) == report
    assert "give one of them" in lm_pcfg("info", "runs/small", "--checkpoint", "x", cwd=trained).stderr.decode()
    assert lm_pcfg("info", "--device", "cpu", cwd=trained).returncode == 0


# ---- from Python ----------------------------------------------------------------------------------------------------


def test_commands_are_plain_functions(tmp_path, capsys):
    train(config=write_config(tmp_path), overrides=["training.max_steps=2"])
    run = tmp_path / "runs" / "small"
    assert (run / "FINISHED").exists()
    capsys.readouterr()
    score_command(str(tmp_path / "valid.txt"), checkpoint=[run], as_json=True, device="cpu")
    assert json.loads(capsys.readouterr().out)["lines"] == 12
    score_command(str(tmp_path / "valid.txt"), checkpoint=[run], per_sentence=True, device="cpu")
    assert len(capsys.readouterr().out.splitlines()) == 12
    info(checkpoint=run, as_json=True, device="cpu")
    assert json.loads(capsys.readouterr().out)["step"] == 2
    with pytest.raises(typer.BadParameter):
        score_command("valid.txt", per_sentence=True, as_json=True)


# ---- bench ----------------------------------------------------------------------------------------------------------


def test_bench_inside_checks_and_times(tmp_path):
    grid = ["--grid", "8x4x2", "--methods", "torch,log-sum-exp", "--precision", "fp32", "--seconds", "0.05"]
    result = lm_pcfg("bench", "inside", *grid, "--device", "cpu", "--csv", "inside.csv", cwd=tmp_path)
    assert result.returncode == 0, result.stderr.decode()
    rows = (tmp_path / "inside.csv").read_text().splitlines()
    assert len(rows) == 3
    assert rows[0].startswith("method,nonterminals")
