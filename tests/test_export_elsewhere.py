"""Exports as others open them: from the Hugging Face hub (a stub of it), through MLflow without pickle, over HTTP."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

import lm_pcfg
from lm_pcfg.corpus.treebank import bracketed
from lm_pcfg.errors import UserError
from lm_pcfg.export.export import ExportOptions, export
from lm_pcfg.storage import hub
from small_runs import write_untrained_run
from test_every_family import section_of

LINES = ["the cat sees a dog", "", "a zebra runs"]
COMMIT = "a" * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("elsewhere")
    run = write_untrained_run(place, "run", section_of("sn_pcfg"))
    export(run, place / "model", ExportOptions())
    return place / "model"


# ---- the hub --------------------------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """Serves the repository me/grammar as the hub does."""

    protocol_version = "HTTP/1.1"
    repository: dict[str, bytes]
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        name = self.path.partition("/resolve/")[2].partition("/")[2]
        if self.path.startswith("/me/grammar/resolve/") and name in self.repository:
            content = self.repository[name]
            etag = hashlib.sha256(content).hexdigest()
            self.answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        else:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound" if "/me/grammar/" in self.path else "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for header, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def repository(folder, tmp_path, monkeypatch) -> Iterator[type[Hub]]:
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    files |= {"modeling.py": b"raise SystemExit('code was run')", "pytorch_model.bin": pickle.dumps("pickle")}
    served = type("Served", (Hub,), {"repository": files, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), served) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        monkeypatch.chdir(tmp_path)
        yield served
        server.shutdown()


@pytest.mark.parametrize("name", ["me/grammar", "hf://me/grammar", f"hf://me/grammar@{COMMIT}"])
def test_a_model_of_the_hub_is_opened_without_its_code(repository, folder, name):
    found = lm_pcfg.load(name)
    np.testing.assert_array_equal(found.score(LINES), lm_pcfg.load(folder).score(LINES))
    assert any("model.safetensors" in path for path in repository.asked)
    assert not any(name in path for path in repository.asked for name in ("modeling.py", "pytorch_model.bin"))
    repository.repository = {}  # it is kept
    assert lm_pcfg.load(f"hf://me/grammar@{COMMIT}").score(LINES[:1]) == found.score(LINES[:1])


def test_a_damaged_model_of_the_hub_is_told(repository):
    words = repository.repository["vocab/words.txt"]
    repository.repository["vocab/words.txt"] = words[:-2] + b"x\n"
    with pytest.raises(UserError, match=r"words\.txt is damaged"):
        lm_pcfg.load("me/grammar")


def test_the_hub_cannot_name_other_files(repository):
    """The names in config.json are checked before anything else is fetched."""
    description = json.loads(repository.repository["config.json"])
    from lm_pcfg.storage.state_file import state_bytes

    for name in ("modeling.py", "../../outside", "vocab/../../../outside"):
        files = description["files"] | {name: description["files"]["config.yaml"]}
        repository.repository["config.json"] = state_bytes(description | {"files": files})
        with pytest.raises(UserError, match=r"config\.json"):
            lm_pcfg.load("me/grammar")
    assert not any("/resolve/" in path and "config.json" not in path for path in repository.asked)


def test_models_of_others_and_names_that_are_not_there(repository):
    with pytest.raises(UserError, match="me/other is neither a folder here nor a model of lm_pcfg on the hub"):
        lm_pcfg.load("me/other")
    repository.repository["config.json"] = b'{"model_type": "gpt2"}'
    with pytest.raises(UserError, match="a model of type 'gpt2'"):
        lm_pcfg.load("me/grammar")
    for name in ("hf://me", "hf://../me/grammar", "hf://me/..", "hf://me/grammar@main?x"):
        with pytest.raises(UserError, match="no name on the hub"):
            lm_pcfg.load(name)


def test_paths_here_are_never_asked_for_on_the_hub(repository, tmp_path):
    (tmp_path / "models").mkdir()
    for name in ("runs/tiny", "models/tiny", "./me/grammar/x", "/me/grammar", "me/grammar/checkpoints"):
        with pytest.raises(UserError, match="does not exist"):
            lm_pcfg.load(name)
    assert repository.asked == []
    assert hub.local_folder(Path("runs/tiny")) == Path("runs/tiny")


# ---- MLflow ---------------------------------------------------------------------------------------------------------


def expected(folder: Path) -> tuple[list[float | None], list[str]]:
    model = lm_pcfg.load(folder)
    scores = [None if np.isnan(score) else score for score in model.score(LINES).tolist()]
    return scores, [bracketed(tree) if tree.words else "" for tree in model.parse(LINES)]


def test_mlflow_scores_and_parses_with_pickle_forbidden(folder, monkeypatch):
    import mlflow.pyfunc
    import pandas

    def forbidden(*_, **__):
        raise AssertionError("pickle was used")

    scores, trees = expected(folder)  # imports torch, which looks at pickle
    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    model = mlflow.pyfunc.load_model(str(folder))
    assert model.metadata.signature.params.params[0].default == "score"
    assert model.predict(LINES) == scores
    assert model.predict(pandas.DataFrame({"text": LINES}), params={"task": "score"}) == scores
    assert model.predict(LINES, params={"task": "parse"}) == trees
    with pytest.raises(UserError, match="unknown task 'translate': use score or parse"):
        model.predict(LINES, params={"task": "translate"})


def test_the_lines_that_mlflow_may_give(folder):
    from lm_pcfg.export.mlflow_model import _load_pyfunc

    model = _load_pyfunc(str(folder))
    scores, _ = expected(folder)
    for given in (LINES, np.array(LINES), {"text": LINES}):
        assert model.predict(given) == scores
    assert model.predict(LINES[0]) == scores[:1]
    with pytest.raises(UserError, match="should be text"):
        model.predict([1, 2])


@pytest.mark.long
def test_a_tracking_store_keeps_it(folder, tmp_path, monkeypatch):
    """The call that docs/export.md has, and what it logged is loaded again."""
    import mlflow.pyfunc

    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "docs/export.md").read_text()
    (call,) = re.findall(r"`(mlflow\.pyfunc\.log_model\(.*?\))`", text, re.DOTALL)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    try:
        experiment = mlflow.create_experiment("export", artifact_location=(tmp_path / "artifacts").as_uri())
        with mlflow.start_run(experiment_id=experiment):
            logged = eval(call.replace("models/tiny", str(folder)), {"mlflow": mlflow})
        model = mlflow.pyfunc.load_model(logged.model_uri)
    finally:
        mlflow.set_tracking_uri(before)
    scores, trees = expected(folder)
    assert model.predict(LINES) == scores
    assert model.predict(LINES, params={"task": "parse"}) == trees


@pytest.mark.long
def test_mlflow_serves_it(folder, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", str(folder), "--env-manager", "local"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    address = f"http://127.0.0.1:{port}"

    def ask(body: dict) -> dict:
        content, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{address}/invocations", content, kind)) as answer:
            return json.load(answer)

    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{address}/ping").close()
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.2)
        scores, trees = expected(folder)
        table = {"columns": ["text"], "data": [[line] for line in LINES]}
        assert ask({"dataframe_split": table})["predictions"] == scores
        assert ask({"inputs": LINES, "params": {"task": "parse"}})["predictions"] == trees
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask({"inputs": LINES, "params": {"task": "translate"}})
        assert refused.value.code == 400
    finally:
        os.killpg(server.pid, 15)
        server.wait(30)
