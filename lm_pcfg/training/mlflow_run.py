"""All calls of MLflow for one run, and what they report of the machine: versions, host, commit."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import importlib.metadata
import json
import logging
import os
import platform
import posixpath
import re
import shlex
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

Status = Literal["FINISHED", "FAILED", "KILLED"]

METRICS_PER_CALL = 1000  # MLflow's own limits
_SETTINGS_PER_CALL = 100
_LONGEST_NAME = 250
_LONGEST_VALUE = 6000
LARGEST_ANSWER = 32 << 20  # bytes of a server's; ours ask for nothing larger than the parameters of a run
CHANGED = "+changes"  # after the commit of a source that was edited
_BOUNDED = "lm_pcfg-bounded-"  # and the name of the one that was there
_PACKAGES = (
    *("lm_pcfg", "torch", "triton", "deepspeed", "accelerate", "transformers"),
    *("datasets", "safetensors", "mlflow", "mlflow-skinny", "numpy"),
)


class MlflowRun:
    """A run in MLflow. Only the tracker's thread uses it. Each method can be called again until it has succeeded."""

    def __init__(
        self,
        *,
        uri: str,
        artifact_location: str | None,
        experiment: str,
        run_name: str,
        run_id: str | None,
        parameters: dict[str, Any],
        artifacts: dict[str, str],
        tags: dict[str, str],
        warn: Callable[[str], None],
        remember_run_id: Callable[[str], None],
    ) -> None:
        self._uri = uri
        self._artifact_location = artifact_location
        self._experiment = experiment
        self._run_name = run_name
        self._wanted_run_id = run_id
        self._parameters: dict[str, str] | None = _flatten(parameters)
        self._artifacts: dict[str, str] | None = artifacts
        self._tags = {valid_name(name): str(value)[:_LONGEST_VALUE] for name, value in tags.items()}
        self._warn = warn
        self._remember_run_id = remember_run_id
        self._client: Any = None
        self._experiment_id: str | None = None
        self._run_id: str | None = None
        self._earlier_parameters: dict[str, str] = {}
        self._artifact_folder = ""

    def begin(self) -> None:
        """Open the store, find or create experiment and run."""
        if self._run_id is not None:
            return
        if self._experiment_id is None:
            with _alone_with_sqlite(self._uri):
                self._client = quiet_client(self._uri)
                self._experiment_id = self._find_or_create_experiment()
        self._run_id = self._continue_run() or self._create_run()
        try:
            self._remember_run_id(self._run_id)
        except Exception as error:  # the caller's file; without it a resumed run starts a new MLflow run
            self._warn(f"the MLflow run {self._run_id} could not be remembered for a resume: {one_line(error)}")

    def _find_or_create_experiment(self) -> str:
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is not None:
            return experiment.experiment_id
        try:
            return self._client.create_experiment(self._experiment, artifact_location=self._artifact_location)
        except Exception:
            experiment = self._client.get_experiment_by_name(self._experiment)
            if experiment is None:
                raise
            return experiment.experiment_id  # another run created it in between

    def _continue_run(self) -> str | None:
        if self._wanted_run_id is None:
            return None
        try:
            run = self._client.get_run(self._wanted_run_id)
        except Exception as error:
            if not refused_for_good(error):
                raise
            run = None
        if run is None or run.info.lifecycle_stage != "active":
            self._warn(f"MLflow has no run {self._wanted_run_id} any more; a new one begins")
            self._wanted_run_id = None
            return None
        self._client.update_run(self._wanted_run_id, status="RUNNING")
        self._earlier_parameters = dict(run.data.params)
        # The first files stay: how the run began is worth keeping.
        self._artifact_folder = time.strftime("resumed-%Y%m%d-%H%M%S/")
        return self._wanted_run_id

    def _create_run(self) -> str:
        tags = source_tags()  # MLflow takes the user of a run from these, and from no later ones
        return self._client.create_run(self._experiment_id, run_name=self._run_name, tags=tags).info.run_id

    def log_settings(self) -> None:
        """Parameters, tags. MLflow lets no parameter change: what a resume changes becomes a tag `resumed.<name>`."""
        if self._parameters is None:
            return
        from mlflow.entities import Param, RunTag

        new = {name: value for name, value in self._parameters.items() if name not in self._earlier_parameters}
        changed = {
            f"resumed.{name}"[:_LONGEST_NAME]: value
            for name, value in self._parameters.items()
            if self._earlier_parameters.get(name, value) != value
        }
        settings = [Param(*item) for item in new.items()] + [RunTag(*item) for item in (self._tags | changed).items()]
        for start in range(0, len(settings), _SETTINGS_PER_CALL):
            chunk = settings[start : start + _SETTINGS_PER_CALL]
            self._client.log_batch(
                self._run_id,
                params=[setting for setting in chunk if isinstance(setting, Param)],
                tags=[setting for setting in chunk if isinstance(setting, RunTag)],
            )
        self._parameters = None

    def log_artifacts(self) -> None:
        if self._artifacts is None:
            return
        for name, text in (environment_artifacts() | self._artifacts).items():
            self._client.log_text(self._run_id, text, self._artifact_folder + name)
        self._artifacts = None

    def log_metrics(self, batch: list[tuple[str, float, int, int]]) -> None:
        from mlflow.entities import Metric

        self._client.log_batch(self._run_id, metrics=[Metric(*metric) for metric in batch])

    def end(self, status: Status) -> None:
        self._client.set_terminated(self._run_id, status)


def quiet_client(uri: str) -> Any:
    from mlflow import MlflowClient  # 2 s, hence here in the thread

    # MLflow, alembic and urllib3 tell their story on standard error; drop what this thread makes them say.
    this_thread = threading.get_ident()

    def not_from_here(record: logging.LogRecord) -> bool:
        return record.thread != this_thread

    for name in ("mlflow", "alembic", "sqlalchemy.engine"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(not_from_here)
    logging.getLogger("urllib3.connectionpool").addFilter(not_from_here)
    if uri.startswith(("http://", "https://")):
        _bound_answers()
    return MlflowClient(tracking_uri=uri)


def _bound_answers() -> None:
    """Let no server fill the memory with an answer that has no end.

    MLflow reads an answer as a whole. What it lets others add to a request is its authentication (a plugin, named by
    MLFLOW_TRACKING_AUTH), and one of `requests` may watch the answer, too. One that was named is asked as before.
    """
    import requests
    from mlflow.tracking.request_auth import registry
    from mlflow.tracking.request_auth.abstract_request_auth_provider import RequestAuthProvider

    # Processes that this one starts inherit the variable, but not what is registered here.
    named = os.environ.get("MLFLOW_TRACKING_AUTH", "").removeprefix(_BOUNDED)
    registered = [provider.get_name() for provider in registry._request_auth_provider_registry]
    if named in ("kubernetes", "kubernetes-namespaced"):  # these change more than a request
        return

    class Bounded(requests.auth.AuthBase):
        def __call__(self, request: Any) -> Any:
            own = registry.fetch_auth(named) if named else requests.utils.get_netrc_auth(request.url)
            if own is not None:
                request = own(request) if callable(own) else requests.auth.HTTPBasicAuth(*own)(request)
            request.register_hook("response", _watch)
            return request

    class Provider(RequestAuthProvider):
        def get_name(self) -> str:
            return _BOUNDED + named

        def get_auth(self) -> Bounded:
            return Bounded()

    if _BOUNDED + named not in registered:
        registry._request_auth_provider_registry.register(Provider)
    os.environ["MLFLOW_TRACKING_AUTH"] = _BOUNDED + named


def _watch(response: Any, **_: Any) -> None:
    """Make an answer end with an error where it grows too long; called before it is read."""
    read = response.raw.stream

    def stream(*arguments: Any, **named: Any) -> Iterator[bytes]:
        size = 0
        for part in read(*arguments, **named):
            size += len(part)
            if size > LARGEST_ANSWER:
                response.raw.close()
                raise OSError(f"the server's answer has more than {LARGEST_ANSWER >> 20} MiB")
            yield part

    response.raw.stream = stream


@contextlib.contextmanager
def _alone_with_sqlite(uri: str) -> Iterator[None]:
    """Hold off other runs while the sqlite store is created, and find out quickly whether it can be written.

    MLflow's own lock lies in the temporary folder, so it knows nothing of other hosts; and it would try for 100 s to
    open a file that cannot be opened.
    """
    if (path := sqlite_file(uri)) is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as lock_file:
        with contextlib.suppress(OSError):  # a file system without locks: MLflow's own has to do
            fcntl.flock(lock_file, fcntl.LOCK_EX)
        with contextlib.closing(sqlite3.connect(path, timeout=10.0)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
        yield


def sqlite_file(uri: str) -> Path | None:
    """The file of a sqlite store; None for other stores, and for one in memory."""
    path = re.sub(r"\?.*", "", uri.removeprefix("sqlite:///"))
    return None if not uri.startswith("sqlite:///") or path in ("", ":memory:") else Path(path)


def refused_for_good(error: Exception) -> bool:
    """Whether the store understood and said no, so that asking again is no use."""
    return getattr(error, "error_code", None) in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"://[^/@\s]+@", "://", text)  # a password in the address
    return text if len(text) <= 300 else text[:297] + "..."


def valid_name(name: str) -> str:
    """MLflow takes letters, digits and `_ - . : / space`, and only what reads as a plain relative path."""
    name = posixpath.normpath(re.sub(r"[^\w./: -]", "_", name)).lstrip("/.") or "_"
    return name[:_LONGEST_NAME].rstrip("/")


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """{"model": {"nt": 8}} as {"model.nt": "8"}."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            flat[valid_name(f"{prefix}{name}")] = text[:_LONGEST_VALUE]
    return flat


def environment_artifacts() -> dict[str, str]:
    """What the run ran on: environment.json and pip-list.txt."""
    versions = {dist.name: dist.version for dist in importlib.metadata.distributions() if dist.name}
    pip_list = "".join(f"{name}=={versions[name]}\n" for name in sorted(versions, key=str.lower))
    return {"environment.json": environment_json(), "pip-list.txt": pip_list}


def environment_json() -> str:
    """What this process runs on."""
    environment: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "command": sys.argv,
        "git_commit": git_commit(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "gpus": [],
    }
    torch = sys.modules.get("torch")  # a training has imported it; others need not wait for it
    if torch is not None:
        environment["cuda"] = torch.version.cuda
        environment["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return json.dumps(environment, indent=2) + "\n"


@cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def source_tags() -> dict[str, str]:
    """Where a run came from, under the names that MLflow's pages show: source, user and commit."""
    programme = Path(sys.argv[0]).name
    tags = {"mlflow.source.type": "LOCAL", "mlflow.source.name": programme}
    tags["command"] = shlex.join([programme, *sys.argv[1:]])
    with contextlib.suppress(OSError, KeyError, ImportError):  # a user without a name, as in some containers
        tags["mlflow.user"] = getpass.getuser()
    if commit := git_commit():
        tags["mlflow.source.git.commit"] = commit.removesuffix(CHANGED)
        tags["mlflow.source.git.dirty"] = str(commit.endswith(CHANGED)).lower()
    return {name: value[:_LONGEST_VALUE] for name, value in tags.items()}


@cache
def git_commit(folder: Path = Path(__file__).parent) -> str | None:
    """The commit this source was checked out from, with `+changes` where it was edited; None outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # not a site-packages inside some other repository
        return git("rev-parse", "HEAD") + (CHANGED if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
