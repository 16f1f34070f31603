"""A recipe search: variants of one config, trained one after another or several at once, compared with their control.

The file names a config, what all runs change in it, and the variants:

    config: ptb_lm_4096.yaml                                    # beside the file
    common: [model.nonterminals=2048, training.epochs=5]
    variants:
      ema: [ema.decay=0.999]
      no-state-dropout: [model.state_dropout=0]

`control` has only the common changes, and comes first. Runs are in runs/NAME-OF-THE-FILE/. The same command may be
given again and again: it skips runs that are finished and continues those that were stopped. Runs are compared on the
validation text. Changes on the command line are common ones; a variant's own changes win over them.

Small grammars leave a GPU idle while the host launches kernels: train several at once, each in a process of its own.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pydantic import Field, ValidationError

from lm_pcfg.console import say, warn
from lm_pcfg.errors import UserError
from lm_pcfg.inference import report
from lm_pcfg.inference.comparison import incomparable
from lm_pcfg.settings import Section, Settings
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage.run_folder import FAILED, FINISHED, failure_of
from lm_pcfg.yaml_text import parse_yaml

CONTROL = "control"
EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"
_POLL_SECONDS = 0.2


class Search(Section):
    config: str
    common: list[str] = Field(default_factory=list)
    variants: dict[str, list[str]] = Field(default_factory=dict)


def read_search(file: Path) -> Search:
    try:
        search = Search.model_validate(parse_yaml(file.read_text(encoding="utf-8"), str(file)))
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValidationError, UnicodeDecodeError):
        raise UserError(
            f"{file} should have config: FILE, common: [KEY=VALUE, ...] and variants: {{NAME: [KEY=VALUE, ...], ...}}"
        ) from None
    if CONTROL in search.variants:
        raise UserError(f"{file}: the variant {CONTROL} is there already, with the common changes alone")
    return search


def settings_of(file: Path, overrides: list[str]) -> dict[str, Settings]:
    """Load the settings of every variant, the control first. Mistakes are found here, before anything is trained."""
    search = read_search(file)
    runs = {}
    for name, changes in {CONTROL: [], **search.variants}.items():
        changed = [*search.common, *overrides, *changes]  # the last wins: the variant's own
        try:
            folder = load_settings(file.parent / search.config, changed).runs_folder
            placed = [f"name={name}", f"runs_folder={folder}/{file.stem}"]
            runs[name] = load_settings(file.parent / search.config, [*changed, *placed, "resume=auto"])
        except UserError as error:
            raise UserError(f"{file}: variant {name}: {error}") from None
        _refuse_another(runs[name])
    return runs


def _refuse_another(settings: Settings) -> None:
    """Refuse a run folder that was made with other settings than this variant has."""
    config = _folder(settings) / "config.yaml"
    if config.exists() and load_settings(config, ["resume=auto"]) != settings:
        raise UserError(f"{config} has other settings than this variant now; remove that run, or rename the variant")


def run_search(file: Path, overrides: list[str], only: str | None = None, at_once: int = 1) -> bool:
    """Train all variants, or `only` one; return False if this process was asked to stop before the end."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("search trains in one process; for many, a job array of single runs (docs/clusters.md)")
    runs = settings_of(file, overrides)
    if only is not None and only not in runs:
        raise UserError(f"{file} has no variant {only}: use one of {', '.join(runs)}")
    given = os.environ.get(EXPERIMENT)
    os.environ[EXPERIMENT] = given or file.stem  # in MLflow a search is an experiment
    try:
        return _run_search(file, overrides, runs, only, at_once)
    finally:
        if given is None:
            del os.environ[EXPERIMENT]


def _run_search(file: Path, overrides: list[str], runs: dict[str, Settings], only: str | None, at_once: int) -> bool:
    if at_once > 1 and only is None:
        return _several_at_once(file, overrides, runs, at_once)
    from flash_inside import free_memory
    from lm_pcfg.training import loop

    for name, settings in _left(runs).items():
        if only not in (None, name):
            continue
        folder = _folder(settings)
        say(f"{name}: {folder}")
        try:
            loop.train(settings)
        except loop.TrainingStopped as error:  # the recipe's fault: the next one may do better
            warn(f"{name}: {error}")
            continue
        finally:
            gc.collect()
            free_memory()
        if not (folder / FINISHED).exists():
            return False
    return True


def _left(runs: dict[str, Settings]) -> dict[str, Settings]:
    """Return the runs that have neither finished nor failed."""
    for name, settings in runs.items():
        if (failure := failure_of(_folder(settings))) is not None:
            warn(f"{name} failed before: {failure}")
    ends = (FINISHED, FAILED)
    return {
        name: settings for name, settings in runs.items() if not any((_folder(settings) / end).exists() for end in ends)
    }


def _several_at_once(file: Path, overrides: list[str], runs: dict[str, Settings], at_once: int) -> bool:
    """Train each variant in a process of its own, which writes to NAME.log beside its run folder.

    When all have ended, a UserError names those that ended with an error that is not the recipe's fault.
    """
    from lm_pcfg.distributed.launcher import OF_A_SEARCH
    from lm_pcfg.training.signals import StopSignals

    waiting, running = list(_left(runs)), dict[str, subprocess.Popen[bytes]]()
    broken, stopping = list[str](), False
    with StopSignals() as stop:
        while running or (waiting and not stop.received):
            while waiting and len(running) < at_once and not stop.received:
                name = waiting.pop(0)
                log = _log(runs[name])
                log.parent.mkdir(parents=True, exist_ok=True)
                command = [sys.executable, "-m", "lm_pcfg", "search", str(file), *overrides, "--only", name]
                with log.open("ab") as out:  # in a session of its own: a Ctrl-C reaches it once, by the signal below
                    running[name] = subprocess.Popen(
                        command, stdout=out, stderr=out, start_new_session=True, env=os.environ | {OF_A_SEARCH: "1"}
                    )
                say(f"{name}: {log}")
            if stop.received and not stopping:
                stopping = True
                for process in running.values():
                    process.send_signal(signal.SIGTERM)
            for name, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                if process.returncode:
                    broken.append(name)
                    warn(f"{name}: status {process.returncode}: {_last_line(_log(runs[name]))}")
                elif (_folder(runs[name]) / FINISHED).exists():
                    say(f"{name}: finished")
            time.sleep(_POLL_SECONDS)
    if broken:
        raise UserError(
            f"{', '.join(broken)} could not be trained (see above, and NAME.log); the same command tries again, and "
            "with --table shows the others"
        )
    return not stop.received


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next(filter(None, reversed(lines)), "without a word")


def table(file: Path, overrides: list[str]) -> str:
    """Return the results of the runs so far, in Markdown."""
    search, settings = read_search(file), settings_of(file, overrides)
    folders = {name: _folder(of_run) for name, of_run in settings.items()}
    begun = {name: folder for name, folder in folders.items() if (folder / "config.yaml").exists()}
    runs = report.read_runs(list(begun.values()), warn)
    lines = {name: report.summary(run) for name, run in zip(begun, runs, strict=True)}
    for reason in incomparable(runs):
        warn(reason)
    control = lines.get(CONTROL, {}).get("best_valid_ppl")
    rows = [
        "| run | changes | valid | against control | train | skipped | training s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, line in lines.items():
        ended = "" if line["finished"] else " (failed)" if (folders[name] / FAILED).exists() else " (unfinished)"
        changes = [*search.common, *overrides] if name == CONTROL else search.variants[name]
        best = line["best_valid_ppl"]
        against = None if best is None or control is None or name == CONTROL else best - control
        cells = [
            name + ended, " ".join(f"`{change}`" for change in changes), _shown(best, ".2f"), _shown(against, "+.2f"),
            _shown(line["last_train_ppl"], ".2f"), _shown(line["skipped_share"], ".2%"),
            _shown(line["training_seconds"], ".0f"),
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _folder(settings: Settings) -> Path:
    return Path(settings.runs_folder) / settings.name


def _log(settings: Settings) -> Path:
    return Path(settings.runs_folder) / f"{settings.name}.log"
