"""Which folder a run writes to, and what it continues from. Nothing that exists is ever overwritten by a new run."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Protocol

from lm_pcfg.console import warn
from lm_pcfg.errors import UserError
from lm_pcfg.settings import Settings, former_names
from lm_pcfg.storage import checkpoint, durable
from lm_pcfg.storage.durable import replace_file
from lm_pcfg.storage.notes import (
    ENVIRONMENT,
    FAILED,
    FINISHED,
    LAST_CHECKPOINT,
    STARTED_FROM,
    TRACKING_ID,
    failure_of,
    read_note,
    read_tracking_id,
)

_EARLIER_CONFIG = re.compile(r"config\.([1-9][0-9]{0,8})\.yaml")
_MOST_CONFIGS = 20  # that are kept: the first, and the newest
_LARGEST_CONFIG = 1 << 20  # bytes; a few kilobytes are usual
_ATTEMPTS = 100  # to make a folder that another start removes


class InUse(UserError):
    """Another training holds the folder."""


class Vocabulary(Protocol):
    def save(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class Start:
    """Where a training begins: in its folder, with the checkpoint `given`, or (`continued`) where the run stopped."""

    folder: Path
    given: Path | None = None
    continued: bool = False

    def find_checkpoint(self, warn: Callable[[str], None]) -> Path | None:
        """Find the checkpoint from which training goes on; None: it starts from the beginning.

        Claim the folder first: what a crash left there is removed, and must not be what another training is writing.
        """
        if not self.continued:
            return self.given
        if (failure := failure_of(self.folder)) is not None:
            anew = checkpoint.latest(self.folder) is None and not had_checkpoint(self.folder)
            end = "begin anew in this folder" if anew else "continue from its last checkpoint"
            raise UserError(
                f"{self.folder} has FAILED and is left alone ({failure}); start another run with name=..., or remove "
                f"{self.folder / FAILED} to {end}"
            )
        if own := checkpoint.find_resumable(self.folder, warn):
            return own
        if had_checkpoint(self.folder):
            raise UserError(f"{none_left(self.folder)}, or start over with another name=...")
        return started_from(self.folder)

    @property
    def is_new(self) -> bool:
        """Whether a new run begins; it may have another folder just as well."""
        of_own_run = self.given is not None and checkpoint.run_folder_of(self.given) == self.folder.resolve()
        return not self.continued and not of_own_run

    def still_right(self) -> bool:
        """Look again, once the folder is claimed: no other training has made it its own since it was chosen."""
        if self.continued:
            return True
        if not self.is_new:
            newest = checkpoint.latest(self.folder)
            return newest is not None and newest.resolve() == self.given
        return not _is_run(self.folder)


def claim_start(settings: Settings, launcher: str) -> tuple[Start, RunFolder]:
    """Choose by the setting `resume`, as `choose_start` does, and keep other trainings out of the folder."""
    taken: set[Path] = set()  # by trainings that have written nothing there yet
    while True:
        start = choose_start(settings, launcher, taken)
        folder = RunFolder(start.folder, launcher)
        try:
            if folder.claim(start.still_right):
                return start, folder
        except InUse:
            if not start.is_new:
                raise
            taken.add(start.folder)


def choose_start(settings: Settings, launcher: str, taken: Collection[Path] = ()) -> Start:
    """Choose by the setting `resume`; launcher: identity of the process that started this one.

    taken: folders in which no new run can begin.

    false: a new run; if one of that name exists, name-2, name-3 ... auto: continue the run of this name if it has a
    checkpoint. PATH: continue from that checkpoint, or from the newest complete one of that run (not the best): in its
    own run if it is the newest there, else as a new run.
    """
    folder = Path(settings.runs_folder) / settings.name
    if settings.resume != "auto" and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        # A launcher that restarts its workers gives them the arguments they began with: they go on where they were.
        for own in _runs_of(folder):
            if _launched_by(own) == launcher:
                return Start(own, continued=True)
    if settings.resume == "auto":
        return Start(_of_any_version(folder), continued=True)
    if settings.resume is False:
        return Start(_unused(folder, taken))
    given = Path(str(settings.resume))
    if checkpoint.latest(given) is not None:  # a run folder
        if given.resolve() == folder.resolve():
            return Start(folder, continued=True)
        given = checkpoint.newest_whole(given, warn) or given
    source_run, source = checkpoint.resolve_checkpoint(given, Path(settings.runs_folder), named_by="resume=PATH")
    checkpoint.verify(source)
    newest = checkpoint.latest(source_run)
    if folder.resolve() == source_run and newest is not None and newest.resolve() == source:
        return Start(folder, source)
    return Start(_unused(folder, taken), source)


def remember_checkpoint(folder: Path, saved: Path) -> None:
    """Note beside the checkpoints which was written last, for the day on which they are gone."""
    try:
        replace_file(folder / LAST_CHECKPOINT, f"{saved.name}\n".encode())
    except OSError as error:
        raise UserError(f"cannot write checkpoint {saved.name} into {LAST_CHECKPOINT}: {error.strerror}") from error


def had_checkpoint(folder: Path) -> bool:
    """Whether a run ever had a checkpoint. `best`: runs of earlier versions have no note."""
    return any(os.path.lexists(folder / name) for name in (LAST_CHECKPOINT, "best"))


def unfinished(folder: Path) -> list[Path]:
    """Return the runs of this name, NAME, NAME-2, NAME-3 ..., that have neither finished nor failed."""
    ends = (FINISHED, FAILED)
    return [run for run in _runs_of(folder) if not any((run / end).exists() for end in ends)]


def earlier_configs(folder: Path) -> list[Path]:
    """Return the settings of earlier stretches of a run that were replaced by others, oldest first."""
    found = [(int(match[1]), entry) for entry in folder.iterdir() if (match := _EARLIER_CONFIG.fullmatch(entry.name))]
    return [file for _, file in sorted(found)]


def started_from(folder: Path) -> Path | None:
    """Find the checkpoint of another run that this one began with, if it was stopped before it had any of its own."""
    file = folder / STARTED_FROM
    if not file.exists():
        return None
    text = read_note(file)
    if not text:
        raise UserError(f"{file} is damaged: it should name a checkpoint; start over with resume=PATH and another name")
    checkpoint.verify(Path(text))
    return Path(text)


def none_left(folder: Path) -> str:
    return f"{folder} has had checkpoints, and none is left: bring {folder / 'checkpoints'} back from a copy"


def _of_any_version(folder: Path) -> Path:
    """Return the folder, or that of the name which an earlier version gave this run if there is only that one."""
    formers = () if _is_run(folder) else map(folder.with_name, former_names(folder.name))
    for former in filter(_is_run, formers):
        warn(f"there is no {folder}: resume=auto means {former}, as an earlier version named this run")
        return former
    return folder


def _unused(folder: Path, taken: Collection[Path]) -> Path:
    """Return the folder itself if no run is there yet, else folder-2, folder-3 ..."""
    return next(name for name in _series(folder) if name not in taken and not _is_run(name))


def _series(folder: Path) -> Iterator[Path]:
    return (folder if number == 1 else folder.with_name(f"{folder.name}-{number}") for number in count(1))


def _runs_of(folder: Path) -> list[Path]:
    """Return the runs folder, folder-2, folder-3 ... Some may be missing: a start that failed has left none."""
    number_of = re.compile(re.escape(folder.name) + r"-([2-9]|[1-9][0-9]{1,8})")
    found = {1: folder}
    if folder.parent.is_dir():
        entries = [(number_of.fullmatch(entry.name), entry) for entry in folder.parent.iterdir()]
        found |= {int(match[1]): entry for match, entry in entries if match}
    return [run for _, run in sorted(found.items()) if _is_run(run)]


def _launched_by(folder: Path) -> str:
    lock = folder / ".lock"
    return read_note(lock) if lock.exists() else ""


def _is_run(folder: Path) -> bool:
    parts = ("config.yaml", "checkpoints", "metrics.jsonl", LAST_CHECKPOINT)
    return any((folder / part).exists() for part in parts)


def _without_resume(config: bytes) -> list[bytes]:
    """Return the lines of a config but for the one that says how the last command was given."""
    return [line for line in config.splitlines() if not line.startswith(b"resume:")]


def _lock(file: IO[str]) -> bool:
    """Take the lock or raise BlockingIOError; False: there are none here, as on some cluster file systems."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        return False
    return True


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


class RunFolder:
    """The files of a run apart from checkpoints and metrics. One training at a time may hold it."""

    def __init__(self, folder: Path, launcher: str):
        """launcher: identity of the process that started this one."""
        self.path, self._launcher = folder, launcher
        self._lock: IO[str] | None = None
        self._is_locked = False  # by this object, where there are locks
        self._made: list[Path] = []  # folders that were not there before, inner ones first

    def claim(self, is_right: Callable[[], bool] = lambda: True) -> bool:
        """Keep a second training out of the folder until `release`, or the end of this process.

        is_right is asked under the lock: False lets the folder go again, and is returned.
        """
        try:
            lock = self._take_lock()
            if not is_right():
                self.release()
                return False
            lock.truncate(0)
            lock.write(self._launcher)
            lock.flush()
            self._sweep()
        except BlockingIOError:
            self._lock = None
            raise InUse(f"{self.path} is in use by another training; give this one another name=...") from None
        except OSError as error:
            self.release()
            raise UserError(f"cannot write to {self.path}: {error.strerror}; set runs_folder=...") from None
        return True

    def _take_lock(self) -> IO[str]:
        """Open and lock .lock in the folder, which is made if need be. Who had both before may be removing them."""
        failures = 0
        while True:
            try:
                self._made = sorted({*self._made, *durable.make_folder(self.path)}, reverse=True)
                lock = self._lock = durable.open_lock(self.path / ".lock")
            except FileNotFoundError:
                failures += 1
                if failures == _ATTEMPTS:
                    raise
                continue
            self._is_locked = _lock(lock)
            if not self._is_locked or _is_at(lock, self.path / ".lock"):
                return lock
            lock.close()

    def _sweep(self) -> None:
        """Remove what processes left here that were killed while they wrote."""
        for folder in (self.path, self.path / "vocab", self.path / "checkpoints"):
            if folder.is_dir():
                durable.remove_leftovers(folder)
        (self.path / ".metrics.jsonl.new").unlink(missing_ok=True)  # of an earlier version

    def release(self) -> None:
        """Let the folder go. If it was made for this training, and nothing was written to it, nothing of it is left.

        Folders are removed only while they are empty, so that whatever else is there stays: logs of a job, another run.
        """
        if self._lock is None:
            return
        unused = False
        with suppress(OSError):
            if self._is_locked and self.path in self._made and os.listdir(self.path) == [".lock"]:
                (self.path / ".lock").unlink()
                unused = True
        self._lock.close()  # first: some network file systems keep an open file under another name
        with suppress(OSError):
            for folder in self._made if unused else ():
                folder.rmdir()
        self._lock, self._is_locked, self._made = None, False, []

    @contextmanager
    def writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror or error}") from error

    def begin(self, config: str, vocabulary: Vocabulary, source: Path | None = None) -> Path | None:
        """Write what a run is made of; it has neither finished nor failed from now on.

        config: the settings as YAML; source: the checkpoint it continues from. Return where other settings that the
        run had before are kept; None if it had none.
        """
        with self.writing():
            if source is None:
                (self.path / STARTED_FROM).unlink(missing_ok=True)
            elif checkpoint.run_folder_of(source) != self.path.resolve():
                replace_file(self.path / STARTED_FROM, os.fsencode(source.resolve()) + b"\n")
            for end in (FINISHED, FAILED):
                (self.path / end).unlink(missing_ok=True)
            vocabulary.save(self.path / "vocab")
            kept = self._keep_config(config.encode())
            replace_file(self.path / checkpoint.CONFIG, config.encode())
        return kept

    def _keep_config(self, new: bytes) -> Path | None:
        """Keep config.yaml as config.1.yaml, config.2.yaml ... if it is about to be replaced by other settings."""
        file = self.path / checkpoint.CONFIG
        if not file.is_file() or file.stat().st_size > _LARGEST_CONFIG:
            return None
        before = durable.read_file(file, _LARGEST_CONFIG)
        if _without_resume(before) == _without_resume(new):
            return None
        kept = earlier_configs(self.path)
        if kept and durable.read_file(kept[-1], _LARGEST_CONFIG) == before:
            return kept[-1]  # a kill came between this and the new one
        number = int(kept[-1].name.split(".")[1]) + 1 if kept else 1
        beside = self.path / f"config.{number}.yaml"
        replace_file(beside, before)
        for old in kept[1 : max(1, len(kept) + 2 - _MOST_CONFIGS)]:
            old.unlink()
        return beside

    @property
    def tracking_id(self) -> str | None:
        run_id = read_tracking_id(self.path)
        if run_id is None and (self.path / TRACKING_ID).exists():
            warn(f"{self.path / TRACKING_ID} is damaged: a new MLflow run begins")
        return run_id

    def remember_tracking_id(self, run_id: str) -> None:
        replace_file(self.path / TRACKING_ID, f"{run_id}\n".encode())

    def remember_environment(self, environment: str) -> None:
        """environment: what the run runs on, as JSON"""
        with self.writing():
            replace_file(self.path / ENVIRONMENT, environment.encode())

    @property
    def finished(self) -> str | None:
        """How the run has ended by itself; None: it has not."""
        return read_note(self.path / FINISHED) or None

    def mark(self, end: str, reason: str) -> None:
        """Say in the file FINISHED or FAILED why the run has ended by itself."""
        with self.writing():
            replace_file(self.path / end, f"{reason}\n".encode())
