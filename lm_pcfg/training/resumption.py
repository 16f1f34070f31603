"""A resume that can be trusted: which settings it changes, which it must not, and the command that continues a run.

A checkpoint carries the settings it was trained with (documents.py), and those are compared. What its tensors depend on
cannot change, nor what is used at the beginning of a run only: such changes would have no effect, or a wrong one.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lm_pcfg.console import say, warn
from lm_pcfg.corpus.batches import BatchError
from lm_pcfg.distributed import launcher
from lm_pcfg.errors import UserError
from lm_pcfg.settings import Settings
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.run_folder import unfinished
from lm_pcfg.storage.saving import load_fitting, tidy
from lm_pcfg.training.documents import flat, open_settings
from lm_pcfg.training.evaluation import measured_on
from lm_pcfg.training.position import Position
from lm_pcfg.training.steps import Steps

Changes = dict[str, tuple[Any, Any]]  # by setting: before, now

_WHICH_RUN = ("name", "runs_folder", "resume")
_FIXED = ("data.vocabulary.", "data.sentencepiece", "model.")
#: Settings of models that say how one is trained, not what it is.
_HOW_A_MODEL_IS_TRAINED = ("state_dropout", "state_dropout_until", "feature_dropout", "kl_warmup_steps")
#: Of the saved position: the text, and how it is put into batches.
_OF_THE_TEXT = ("data.", "batch.", "seed", "model.")
_OF_VALIDATION = ("data.valid", "evaluation.max_length")
_MOST_NAMED = 4  # settings that a refusal lists
_LONGEST_VALUE = 80  # characters


# ---- settings -------------------------------------------------------------------------------------------------------


def changes_since(source: Path, settings: Settings, tell: Callable[[str], None]) -> Changes:
    """Return the settings that differ from those of the checkpoint `source`; refuse those that cannot change."""
    try:
        before = flat(open_settings(source, lambda message: None).model_dump(mode="json"))
    except UserError as error:  # of a version that had others
        tell(f"{source}: its settings cannot be compared with the new ones ({error})")
        return {}
    now = flat(settings.model_dump(mode="json"))
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in _WHICH_RUN]
    changes = {key: (before.get(key), now.get(key)) for key in keys}
    if fixed := {key: change for key, change in changes.items() if _is_fixed(key)}:
        named = ", ".join(describe(fixed)[:_MOST_NAMED])
        more = f" and {len(fixed) - _MOST_NAMED} more" if len(fixed) > _MOST_NAMED else ""
        raise UserError(
            f"{source} cannot continue with another vocabulary or model: {named}{more}; keep what it was trained with "
            "(its config.yaml has it), or start another run (without resume=...)"
        )
    return changes


def _is_fixed(key: str) -> bool:
    section, _, name = key.partition(".")
    return key.startswith(_FIXED) and not (section == "model" and name in _HOW_A_MODEL_IS_TRAINED)


def describe(changes: Changes) -> list[str]:
    return [f"{key}: {_shown(before)} -> {_shown(now)}" for key, (before, now) in changes.items()]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


@contextmanager
def refusal_explained(changes: Changes) -> Iterator[None]:
    """Name the settings that changed where a position inside an epoch is refused: its batches would be others."""
    try:
        yield
    except BatchError as error:
        of_the_text = {key: change for key, change in changes.items() if key.startswith(_OF_THE_TEXT)}
        changed = f" (changed: {', '.join(describe(of_the_text))})" if of_the_text else ""
        raise BatchError(f"{error}{changed}") from error


def tell_changes(
    changes: Changes, kept: Path | None, state: dict[str, Any] | None, text: str, forgotten: str = ""
) -> None:
    """Say in what the rest of a run differs from what its checkpoint was trained with.

    kept: where the earlier settings are; state: that of the checkpoint; text: the fingerprint of the training text;
    forgotten: what forget_other_best says.
    """
    where = f" (the earlier ones are in {kept})" if kept else ""
    if changes:
        say(f"settings that change from here on{where}:")
        for line in describe(changes):
            say(f"  {line}")
    elif kept:
        say(f"its settings are others than before its first checkpoint{where}")
    if forgotten:
        warn(forgotten)
    other = state is not None and state["data"]["plan"] != text
    if other and not any(key.startswith(_OF_THE_TEXT) and key != "data.valid" for key in changes):
        warn("the training text has another content than before, under the same name; the next epoch begins with it")


def tell_finished(folder: Path, how: str, changes: Changes) -> None:
    """Say that a run has nothing left to train. Its files stay as they are."""
    say(f"{folder} has ended before: {how}. Nothing is left to train.")
    if changes:
        say(f"not used: {', '.join(describe(changes))}")
    for other in unfinished(folder):
        say(f"{other} has not finished; {how_to_continue(other, f'name={other.name}')}")
    say("to train it further, raise training.epochs or training.max_steps; for another run, leave resume=... out")


def good_checkpoint(run: Path, before: int) -> Path | None:
    """Return the checkpoint of an earlier step to go back to: the best, or the newest that had not diverged."""
    for folder in (checkpoint.best(run), *reversed(checkpoint.list_checkpoints(run))):
        with suppress(UserError):  # one that is damaged
            state = checkpoint.verify(folder, only=set()) if folder is not None else None
            if state is not None and state["step"] < before and not state.get("diverged"):
                return folder
    return None


# ---- from a checkpoint ---------------------------------------------------------------------------------------------


def restore(steps: Steps, source: Path, *, same_run: bool) -> dict[str, Any]:
    """Continue from a checkpoint, and return its state; a run that starts from another run's has no best yet."""
    engine, vocabulary = steps.engine, steps.corpora.vocabulary
    loaded = engine.on_all(lambda: load_fitting(source, steps.skeleton, vocabulary.hash, engine.device))
    steps.restore(loaded)
    if not same_run:
        steps.position.forget_best()
    return loaded.state


def forget_other_best(steps: Steps, changes: Changes, run: Path) -> str:
    """Forget the best so far of a run if what follows cannot be compared with it; return a line that says so.

    The content decides, not the name. Of a checkpoint without a fingerprint, of an earlier version, the settings do.
    """
    position, select = steps.position, steps.settings.evaluation.select
    now = measured_on(steps.corpora, steps.settings)
    if position.best_step is None or now is None:
        return ""
    names = (*_OF_VALIDATION, "evaluation.trees") if select == "trees" else _OF_VALIDATION
    named = any(name in changes for name in names)
    if (select == "trees") != (position.best_s_f1 is not None):
        why = f"the best checkpoint is chosen by {select} from now on"
    elif (position.validated == now) if position.validated else not named:
        return ""
    elif named:
        why = "the best checkpoint is chosen on other lines from now on"
    else:
        why = "the validation text has another content than before, under the same name"
    former = position.best_step
    position.set_best_aside()
    folder = run / "checkpoints" / checkpoint.name_of(former)
    stays = f"; its checkpoint stays: {folder}" if folder.is_dir() else ""
    return f"{why}: the best so far is forgotten, and the next evaluation is the best again{stays}"


def tidy_continued(steps: Steps, source: Path, state: dict[str, Any]) -> None:
    """Do what a kill after the checkpoint `source` of this run may have left undone; state: that of the checkpoint."""
    run, kept = checkpoint.run_folder_of(source), steps.settings.checkpoint
    checkpoint.repair_best(run, steps.position.best_step)
    tidy(run, source, kept.keep_last, Position.of(state).best_steps(kept.keep_best))


# ---- the command that continues a run -------------------------------------------------------------------------------


def how_to_continue(run: Path, *changes: str) -> str:
    """Say how this run is continued: by a command that can be typed where this one was.

    It names the run's own config.yaml, which has the run's name and every setting. changes: settings to add.
    """
    if sys.argv[1:2] == ["search"]:
        return "the same search continues it"
    if "SLURM_JOB_ID" in os.environ and launcher.has_launcher():
        return "the same job, submitted or requeued, continues it"
    others = "" if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" else " (here; on the other hosts likewise)"
    command = [*_programme(), "--config", str(run / checkpoint.CONFIG), "resume=auto", *changes]
    return f"to continue it: {shlex.join(command)}{others}"


def _programme() -> list[str]:
    """Return the words before the arguments of a training, as they were typed."""
    typed = Path(sys.argv[0])
    if typed.parts[-2:] == ("lm_pcfg", "__main__.py"):
        return [*_found(sys.executable), "-m", "lm_pcfg", "train"]
    if typed.name == "train.py":
        launch = launcher.command_line()
        place = next((place for place, word in enumerate(launch) if Path(word).name == typed.name), None)
        if place is None:
            return [*_found(sys.executable), sys.argv[0]]
        words = launch[: place + 1]
        if len(words) > 1 and Path(words[0]).name.startswith("python") and not words[1].startswith("-"):
            words = words[1:]  # a script that its interpreter was started with
        return [*_found(words[0]), *words[1:]]
    return [*(_found(sys.argv[0]) if typed.name == "lm_pcfg" else ["lm_pcfg"]), "train"]


def _found(program: str) -> list[str]:
    """Return the name alone where the shell finds this very program by it."""
    name = Path(program).name
    found = shutil.which(name)
    return [name if found and os.path.realpath(found) == os.path.realpath(program) else program]
