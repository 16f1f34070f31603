"""Checks of what keeps something: the disk, MLflow, the embedded corpus."""

from __future__ import annotations

import http.client
import os
import shutil
import sqlite3
import tempfile
import time
import urllib.request
from contextlib import closing
from importlib import metadata
from pathlib import Path

from lm_pcfg.doctor.finding import Finding, without_secrets

_SECONDS = 5.0
_LITTLE, _TOO_LITTLE = 5 << 30, 100 << 20  # bytes
_SLOW_FSYNC = 0.5  # seconds; a checkpoint makes some ten


def disk(folder: Path | None = None) -> Finding:
    """Write and sync a file where runs would be."""
    place = folder or (Path("runs") if Path("runs").is_dir() else Path())
    shown = "the current folder" if place == Path() else f"{place}/"
    free = shutil.disk_usage(place).free
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".lm_pcfg-doctor-") as file:
            file.write(b"\0" * (1 << 20))
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - began
    except OSError as error:
        mend = "go to a folder that you can write to, or give runs_folder=FOLDER"
        return Finding("broken", f"{shown} cannot be written: {error.strerror}", mend)
    found = f"{free / 2**30:.1f} GiB free in {shown}; fsync of 1 MiB takes {1000 * seconds:.0f} ms"
    if free < _TOO_LITTLE:
        return Finding("broken", found, "make room, or give runs_folder=FOLDER on another disk")
    if free < _LITTLE:
        return Finding(
            "warning", found, "large grammars have checkpoints of GiB: make room, or set checkpoint.keep_last"
        )
    if seconds > _SLOW_FSYNC:
        return Finding("warning", found, "checkpoints will be slow: prefer a local disk (runs_folder=FOLDER)")
    return Finding("ok", found)


def tracking() -> Finding:
    """Ask the MLflow that a training would log to. A training goes on without it, so it is never broken."""
    if installed_version("mlflow") is None:
        return Finding("warning", "mlflow is not installed", "pip install mlflow, or train with tracking.mlflow=false")
    uri = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlruns/mlflow.db"
    if uri.startswith("sqlite:///"):
        return _sqlite(Path(uri.removeprefix("sqlite:///").partition("?")[0]))
    if not uri.startswith(("http://", "https://")):
        return Finding("ok", f"MLFLOW_TRACKING_URI is {uri}; it was not tried")
    mend = "start the server, correct MLFLOW_TRACKING_URI, or unset it to log into mlruns/; a training goes on without"
    try:
        # The address may have a password, with which urllib cannot do anything; the health check asks for none.
        with urllib.request.urlopen(f"{without_secrets(uri).rstrip('/')}/health", timeout=_SECONDS) as answer:
            text = answer.read(64).decode(errors="replace").strip()
    except (OSError, ValueError) as error:  # also those of urllib
        reason = getattr(error, "reason", error)
        return Finding("warning", f"{uri} does not answer: {reason}", mend)
    except http.client.HTTPException as error:  # another kind of server, or an address that is none
        return Finding("warning", f"{uri} cannot be asked over HTTP: {type(error).__name__}", mend)
    if text != "OK":
        return Finding("warning", f"{uri} answers, but not as MLflow does", mend)
    return Finding("ok", f"the server at {uri} answers")


def _sqlite(path: Path) -> Finding:
    """Look whether the store can be opened and locked; never create it."""
    if not path.exists():
        parent = next(folder for folder in (path.parent, *path.parent.absolute().parents) if folder.exists())
        if not os.access(parent, os.W_OK):
            return Finding(
                "warning", f"{path} cannot be made here", "train in a folder of yours, or set MLFLOW_TRACKING_URI"
            )
        return Finding("ok", f"sqlite:///{path}, which the first training makes")
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=_SECONDS)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            (runs,) = connection.execute("SELECT count(*) FROM runs").fetchone()
            connection.rollback()
    except sqlite3.Error as error:
        mend = "move the file away, or set MLFLOW_TRACKING_URI; a training goes on without MLflow"
        return Finding("warning", f"sqlite:///{path} cannot be used: {error}", mend)
    return Finding("ok", f"sqlite:///{path} with {runs} runs; mlflow ui --backend-store-uri sqlite:///{path}")


def embedded_corpus() -> Finding:
    """Generate it, and compare with what it has to be."""
    from lm_pcfg.corpus.embedded import files
    from lm_pcfg.corpus.embedded.checksums import SHA256

    made = files.checksums(files.generate())
    if wrong := sorted(name for name, digest in SHA256.items() if made.get(name) != digest):
        mend = "reinstall lm_pcfg; if that does not help, tell us your Python and machine"
        return Finding("broken", f"{', '.join(wrong)} come out different here", mend)
    return Finding("ok", f"{len(made)} files are generated as they should be")


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
