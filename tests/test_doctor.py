"""`lm_pcfg doctor`: what it finds, that nothing can stop it, and that its words can be shown to anybody."""

from __future__ import annotations

import http.server
import json
import os
import socket
import sqlite3
import sys
import threading
import time

import pytest

from command_line import lm_pcfg
from lm_pcfg.doctor import checks, compute, processes, stores
from lm_pcfg.doctor.finding import Finding, finding_of, public


def run_check(code: str, seconds: float = 20.0) -> Finding:
    return checks._in_process_of_its_own([sys.executable, "-c", code], seconds)


# ---- the frame ------------------------------------------------------------------------------------------------------


def test_a_check_that_crashes_hangs_or_babbles_is_a_finding():
    killed = run_check("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert (killed.state, "signal 11" in killed.found) == ("broken", True)
    failed = run_check("import sys; print('half a story'); sys.exit('no such library')")
    assert (failed.state, failed.found) == ("broken", "the check ended with status 1: no such library")
    babbling = run_check("""print('Setting up...'); print('{"state": "ok", "found": "it works"}')""")
    assert babbling == Finding("ok", "it works")
    began = time.monotonic()
    child = "import subprocess; subprocess.run(['sleep', '60'])"  # holds the output open after its parent's end
    hanging = run_check(child, seconds=0.5)
    assert (hanging.state, "did not end within 0.5 s" in hanging.found) == ("broken", True)
    assert time.monotonic() - began < 10


def test_an_error_in_a_check_is_what_it_found():
    def of_half_a_library() -> Finding:
        raise ImportError("libcudart.so.12:\n cannot open")

    assert finding_of(of_half_a_library) == Finding("broken", "ImportError: libcudart.so.12: cannot open")


def test_nobody_reads_passwords_in_a_report():
    said = public("http://me:geheim@host:5000/x?token=abc#y does not answer; postgresql://u:p@db/mlflow\nnext")
    assert said == "http://host:5000/x does not answer; postgresql://db/mlflow next"
    assert len(public("x" * 5000)) == 400


def test_nobody_reads_names_of_users_or_machines_in_a_report(monkeypatch):
    monkeypatch.setenv("HOME", "/home/erika")
    for name in ("LOGNAME", "USER"):
        monkeypatch.setenv(name, "erika")
    monkeypatch.setattr("socket.gethostname", lambda: "gpu7.example.org")
    said = public("/home/erika/runs of erika@gpu7 and gpu7.example.org:29500; erikas-gpu7 and /home/erikas stay")
    assert said == "~/runs of USER@HOST and HOST:29500; erikas-gpu7 and /home/erikas stay"
    monkeypatch.setenv("LOGNAME", "root")
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    assert public("/usr of root on localhost") == "/usr of root on localhost"


def test_a_check_runs_in_a_process_of_its_own():
    found = checks.examine_one("python")
    assert (found.name, found.state) == ("python", "ok")
    assert found.seconds > 0


def test_the_command_tells_how_to_mend_what_is_broken(tmp_path, monkeypatch):
    findings = {
        "disk": Finding("broken", "runs/ cannot be written", "go elsewhere"),
        "slurm": Finding("none", "sbatch is not on the PATH"),
    }

    def examined(name: str, seconds: float) -> Finding:
        found = findings.get(name, Finding("ok", "fine"))
        found.name = name
        return found

    monkeypatch.setattr(checks, "examine_one", examined)
    result = lm_pcfg("doctor", cwd=tmp_path)
    lines = result.stdout.decode().splitlines()
    assert result.returncode == 1
    place = next(number for number, line in enumerate(lines) if line.startswith("broken   disk"))
    assert lines[place + 1].strip() == "-> go elsewhere"
    assert lines[-1] == "broken: disk"
    assert len(lines) == 1 + len(checks.CHECKS) + 1 + 1

    findings["disk"] = Finding("warning", "slow", "a local disk")
    result = lm_pcfg("doctor", "--json", cwd=tmp_path)
    report = json.loads(result.stdout)
    assert (result.returncode, report["broken"]) == (0, [])
    assert [one["name"] for one in report["checks"]] == list(checks.CHECKS)
    assert {one["state"] for one in report["checks"]} == {"ok", "warning", "none"}


@pytest.mark.long
def test_every_check_ends_on_this_machine(tmp_path):
    result = lm_pcfg("doctor", "--json", cwd=tmp_path)
    report = json.loads(result.stdout)
    assert (result.returncode, report["broken"]) == (0, []), report
    assert not list(tmp_path.iterdir())


# ---- the checks -----------------------------------------------------------------------------------------------------


def test_missing_and_wrong_packages_are_named(monkeypatch):
    wanted = ["numpy>=2", "torch>=99", "no-such-package>1", "pytest>=99; extra == 'dev'"]
    monkeypatch.setattr(compute.metadata, "requires", lambda name: wanted)
    found = compute.packages()
    assert found.state == "broken"
    assert "is not >=99, no-such-package is missing" in found.found
    assert "numpy" not in found.found
    assert "pip install" in found.mend
    monkeypatch.setattr(compute.metadata, "requires", lambda name: wanted[:1])
    assert compute.packages().state == "ok"


def test_the_python_and_the_pytorch_of_this_test_are_fine(monkeypatch):
    assert (compute.python().state, compute.pytorch().state) == ("ok", "ok")
    monkeypatch.setattr(sys, "version_info", (3, 10, 2, "final", 0))
    assert compute.python().state == "broken"


def test_a_driver_without_a_pytorch_for_it_is_broken(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert compute.gpu().state == "none"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    found = compute.gpu()
    assert (found.state, "built for CPUs" in found.found) == ("broken", True)
    assert "--force-reinstall" in found.mend


def test_wrong_kernels_are_broken(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(compute, "_largest_error", lambda device: 0.5)
    assert compute.triton().state == "broken"
    monkeypatch.setattr(compute, "_largest_error", lambda device: 1e-7)
    found = compute.triton()
    assert (found.state, "interpreter" in found.found) == ("ok", True)


def test_a_process_group_of_one(monkeypatch):
    import torch.distributed

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    assert processes.gloo() == Finding("ok", "a group of one process works on lo")
    assert not torch.distributed.is_initialized()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    found = processes.gloo()
    assert (found.state, "GLOO_SOCKET_IFNAME=eth99" in found.mend) == ("broken", True)
    assert not torch.distributed.is_initialized()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert processes.nccl().state == "none"


def test_a_slurm_that_does_not_answer_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert processes.slurm().state == "none"
    for name, text in {"sbatch": "echo slurm 99", "scontrol": "echo 'controller is DOWN' >&2; exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    found = processes.slurm()
    assert (found.state, "controller is DOWN" in found.found) == ("warning", True)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho controller is UP\n")
    assert processes.slurm() == Finding("ok", "slurm 99; controller is UP")


def test_the_disk(tmp_path, monkeypatch):
    assert stores.disk(tmp_path).state in ("ok", "warning")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(stores, "_TOO_LITTLE", 1 << 62)
    assert stores.disk(tmp_path).state == "broken"

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(stores.tempfile, "NamedTemporaryFile", refuse)
    found = stores.disk(tmp_path)
    assert (found.state, "cannot be written: Permission denied" in found.found) == ("broken", True)
    assert "runs_folder" in found.mend


def test_a_store_of_mlflow_is_opened_but_never_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert stores.tracking().state == "ok"
    assert not list(tmp_path.iterdir())
    (tmp_path / "mlruns").mkdir()
    with sqlite3.connect("mlruns/mlflow.db") as connection:
        connection.execute("CREATE TABLE runs (id)")
    assert "mlflow ui --backend-store-uri sqlite:///mlruns/mlflow.db" in stores.tracking().found
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # as if it were not set
    assert "sqlite:///mlruns/mlflow.db with 0 runs" in stores.tracking().found
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlruns/mlflow.db?timeout=5")
    assert "sqlite:///mlruns/mlflow.db with 0 runs" in stores.tracking().found
    (tmp_path / "other.db").write_bytes(b"no database at all" * 100)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///other.db")
    assert stores.tracking().state == "warning"


def test_a_server_of_mlflow_is_asked_for_its_health(monkeypatch):
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"OK" if self.path == "/health" else b"what?")

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:geheim@{address}")
        assert finding_of(stores.tracking) == Finding("ok", f"the server at http://{address} answers")
        monkeypatch.setattr("socket.gethostname", lambda: "127.0.0.1")  # asked under its name, which nobody reads
        assert finding_of(stores.tracking).found == f"the server at http://HOST:{server.server_port} answers"
        monkeypatch.undo()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{address}/elsewhere")
        assert "not as MLflow does" in stores.tracking().found
        server.shutdown()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:geheim@{address}")
    found = finding_of(stores.tracking)
    assert (found.state, "does not answer" in found.found) == ("warning", True)
    assert "geheim" not in found.found + found.mend


def test_a_server_that_speaks_no_http_is_a_warning(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"220 mail.example.org ready\r\n")

        threading.Thread(target=greet, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        found = finding_of(stores.tracking)
    assert (found.state, "cannot be asked over HTTP: BadStatusLine" in found.found) == ("warning", True)
    assert "correct MLFLOW_TRACKING_URI" in found.mend


def test_a_corpus_that_comes_out_different_is_broken(monkeypatch):
    from lm_pcfg.corpus.embedded import files

    monkeypatch.setattr(files, "generate", lambda: {"train.txt": b"x"})
    found = stores.embedded_corpus()
    assert (found.state, found.found.startswith("test.trees, test.txt")) == ("broken", True)
