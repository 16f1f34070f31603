"""A recipe search: variants of one config, trained one after another or several at once, compared with their control.

The file names a config, what all runs change in it, and the variants:

    config: ptb_lm_4096.yaml                                    # beside the file
    common: [model.nonterminals=2048, training.epochs=5]
    variants:
      ema: [ema.decay=0.999]
      no-state-dropout: [model.state_dropout=0]

`control` has the common changes alone and comes first. Runs are in runs/NAME-OF-THE-FILE/; what is finished is not done
again and what was stopped continues, so the same command may be given as often as it takes. Validation text alone is
looked at. Changes on the command line are common ones: what a variant changes itself stays.

Small grammars leave a GPU idle while the host launches; several at once, each in a process of its own, fill it.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import Field, ValidationError

from lm_pcfg.errors import UserError
from lm_pcfg.inference import learning_curves
from lm_pcfg.settings import Section, Settings
from lm_pcfg.settings_file import load_settings, parse_yaml

CONTROL = "control"
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
    """Of every variant, the control first; wrong ones are found here, before anything is trained."""
    search = read_search(file)
    runs = {}
    for name, changes in {CONTROL: [], **search.variants}.items():
        changed = [*search.common, *overrides, *changes]  # what a variant is about stays
        try:
            folder = load_settings(file.parent / search.config, changed).runs_folder
            placed = [f"name={name}", f"runs_folder={folder}/{file.stem}", f"tracking.experiment={file.stem}"]
            runs[name] = load_settings(file.parent / search.config, [*changed, *placed, "resume=auto"])
        except UserError as error:
            raise UserError(f"{file}: variant {name}: {error}") from None
        _refuse_another(runs[name])
    return runs


def _refuse_another(settings: Settings) -> None:
    """A run folder that was made with other settings must not be taken for this variant's."""
    config = _folder(settings) / "config.yaml"
    if config.exists() and load_settings(config, ["resume=auto"]) != settings:
        raise UserError(f"{config} has other settings than this variant now; remove that run, or rename the variant")


def run_search(
    file: Path,
    overrides: list[str],
    say: Callable[[str], None],
    warn: Callable[[str], None],
    only: str | None = None,
    at_once: int = 1,
) -> bool:
    """Whether every run came to its end; False: this process was asked to stop.

    only: the name of the one variant to train
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("search trains in one process; for many, a job array of single runs (launch/README.md)")
    runs = settings_of(file, overrides)
    if only is not None and only not in runs:
        raise UserError(f"{file} has no variant {only}: use one of {', '.join(runs)}")
    if at_once > 1 and only is None:
        return _several_at_once(file, overrides, runs, at_once, say, warn)
    from flash_inside import free_memory
    from lm_pcfg.training import loop

    for name, settings in _left(runs, warn).items():
        if only not in (None, name):
            continue
        folder = _folder(settings)
        say(f"{name}: {folder}")
        try:
            loop.train(settings)
        except loop.TrainingStopped as error:  # the recipe's fault: the next one may do better
            (folder / "FAILED").write_text(f"{error}\n")
            warn(f"{name}: {error}")
            continue
        finally:
            gc.collect()
            free_memory()
        if not (folder / "FINISHED").exists():
            return False
    return True


def _left(runs: dict[str, Settings], warn: Callable[[str], None]) -> dict[str, Settings]:
    """Those that have neither finished nor failed."""
    for name, settings in runs.items():
        if (failed := _folder(settings) / "FAILED").exists():
            warn(f"{name} failed before: {failed.read_text().strip()}")
    ends = ("FINISHED", "FAILED")
    return {
        name: settings for name, settings in runs.items() if not any((_folder(settings) / end).exists() for end in ends)
    }


def _several_at_once(
    file: Path,
    overrides: list[str],
    runs: dict[str, Settings],
    at_once: int,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> bool:
    """Each variant in a process of its own, which writes to NAME.log beside its run folder.

    UserError, when all have ended: some did so with an error that is not the recipe's.
    """
    from lm_pcfg.training.launcher import OF_A_SEARCH
    from lm_pcfg.training.stop_signals import StopSignals

    waiting, running = list(_left(runs, warn)), dict[str, subprocess.Popen[bytes]]()
    broken, told = list[str](), False
    with StopSignals() as stop:
        while running or (waiting and not stop.received):
            while waiting and len(running) < at_once and not stop.received:
                name = waiting.pop(0)
                log = _log(runs[name])
                log.parent.mkdir(parents=True, exist_ok=True)
                command = [sys.executable, "-m", "lm_pcfg", "search", str(file), *overrides, "--only", name]
                with log.open("ab") as out:  # in a group of its own: a Ctrl-C is told once, below
                    running[name] = subprocess.Popen(
                        command, stdout=out, stderr=out, start_new_session=True, env=os.environ | {OF_A_SEARCH: "1"}
                    )
                say(f"{name}: {log}")
            if stop.received and not told:
                told = True
                for process in running.values():
                    process.send_signal(signal.SIGTERM)
            for name, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                if process.returncode:
                    broken.append(name)
                    warn(f"{name}: status {process.returncode}: {_last_line(_log(runs[name]))}")
                elif (_folder(runs[name]) / "FINISHED").exists():
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


def table(file: Path, overrides: list[str], warn: Callable[[str], None]) -> str:
    """What the runs have come to so far, in Markdown."""
    search, settings = read_search(file), settings_of(file, overrides)
    folders = {name: _folder(of_run) for name, of_run in settings.items()}
    begun = {name: folder for name, folder in folders.items() if (folder / "config.yaml").exists()}
    runs = learning_curves.read_runs(list(begun.values()), warn)
    lines = {name: learning_curves.summary(run) for name, run in zip(begun, runs, strict=True)}
    control = lines.get(CONTROL, {}).get("best_valid_ppl")
    rows = [
        "| run | changes | valid | against control | train | skipped | training s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, line in lines.items():
        ended = "" if line["finished"] else " (failed)" if (folders[name] / "FAILED").exists() else " (unfinished)"
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
