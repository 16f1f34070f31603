"""A store of MLflow that fails, hangs or is shared never stops, slows or soils a training."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lm_pcfg.training import mlflow_run, tracking
from lm_pcfg.training.mlflow_run import MlflowRun, one_line
from mlflow_store import DEAD_SERVER, Recorder, client, history, wait_until


class TestFailures:
    def test_a_dead_server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", DEAD_SERVER)
        recorder = Recorder()
        tracker = recorder.tracker()
        begin = time.perf_counter()
        for step in range(1000):
            tracker.log(step, {"a": 1.0, "b": 2.0, "c": 3.0})
        assert time.perf_counter() - begin < 0.5
        wait_until(lambda: recorder.warnings)
        begin = time.perf_counter()
        tracker.finish("FINISHED", timeout=10.0)
        assert time.perf_counter() - begin < 10.5
        failure, lost = recorder.warnings
        assert "training goes on" in failure
        assert "127.0.0.1" in failure
        assert "3000 metrics lost" in lost
        assert "\n" not in failure + lost
        assert recorder.run_ids == []

    def test_finish_does_not_wait_longer_than_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(MlflowRun, "begin", lambda self: time.sleep(1.5))
        recorder = Recorder()
        tracker = recorder.tracker()
        tracker.log(1, {"loss": 1.0})
        begin = time.perf_counter()
        tracker.finish("FINISHED", timeout=0.3)
        assert time.perf_counter() - begin < 1.0
        assert recorder.warnings == ["MLflow: 1 metrics lost, all are in metrics.jsonl (no answer within 0.3 s)"]
        tracker._thread.join()

    def test_a_store_that_becomes_reachable_gets_everything(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        uri = f"sqlite:///{tmp_path}/later/mlflow.db"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        (tmp_path / "later").touch()  # a file where the folder should be, which stops even root
        recorder = Recorder()
        tracker = recorder.tracker(retry_seconds=0.3)
        for step in range(2500):
            tracker.log(step, {"loss": float(step)})
        wait_until(lambda: recorder.warnings)
        time.sleep(1.0)  # some more attempts in vain, which say nothing more
        (tmp_path / "later").unlink()
        wait_until(lambda: recorder.run_ids)
        tracker.log(2500, {"loss": 2500.0})
        tracker.finish("FINISHED")
        assert len(recorder.warnings) == 1
        mlflow = client(uri)
        assert history(mlflow, recorder.run_ids[0], "loss") == [(step, float(step)) for step in range(2501)]
        run = mlflow.get_run(recorder.run_ids[0])
        assert run.info.status == "FINISHED"
        assert run.data.params["lr"] == "0.001"
        assert len(mlflow.list_artifacts(recorder.run_ids[0])) == 4

    def test_mlflow_cannot_be_imported(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        monkeypatch.setitem(sys.modules, "mlflow", None)
        recorder = Recorder()
        tracker = recorder.tracker()
        tracker.log(1, {"a": 1.0, "b": 1.0})
        wait_until(lambda: recorder.warnings)
        tracker.finish("FAILED")
        failure, lost = recorder.warnings
        assert "import of mlflow halted" in failure
        assert "2 metrics lost" in lost

    def test_nothing_logged_and_nothing_reached(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "mlruns").touch()
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        recorder = Recorder()
        tracker = recorder.tracker()
        wait_until(lambda: recorder.warnings)
        tracker.finish("FINISHED")
        assert len(recorder.warnings) == 2
        assert "incomplete" in recorder.warnings[1]

    def test_an_answer_without_end_is_not_read_to_its_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sent = []

        class Endless(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                sent.append(0)
                while sent[-1] < 400 << 20:
                    self.wfile.write(b"{" * (1 << 20))
                    sent[-1] += 1 << 20

            do_POST = do_GET

            def log_message(self, *arguments: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *arguments: Any) -> None:
                pass  # whoever asked has hung up

        server = Server(("127.0.0.1", 0), Endless)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_AUTH", "")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
        recorder = Recorder()
        tracker = recorder.tracker()
        wait_until(lambda: recorder.warnings)
        tracker.finish("FINISHED")
        server.shutdown()
        server.server_close()
        assert "answer has more than 32 MiB" in recorder.warnings[0]
        assert 0 < max(sent) < 100 << 20

    def test_authentication_of_the_user_is_still_asked(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        from mlflow.tracking.request_auth.registry import fetch_auth
        from requests import Request

        (tmp_path / "netrc").write_text("machine tracking.test login me password secret\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        monkeypatch.setenv("MLFLOW_TRACKING_AUTH", "")
        mlflow_run._bound_answers()
        mlflow_run._bound_answers()  # a second run of this process, or a process that this one started
        name = os.environ["MLFLOW_TRACKING_AUTH"]
        request = Request("GET", "http://tracking.test/", auth=fetch_auth(name)).prepare()
        assert request.headers["Authorization"].startswith("Basic ")
        assert len(request.hooks["response"]) == 1

    def test_memory_is_bounded(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "mlruns").touch()
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        monkeypatch.setattr(tracking, "_MOST_WAITING_METRICS", 100)
        recorder = Recorder()
        tracker = recorder.tracker()
        for step in range(500):
            tracker.log(step, {"a": 1.0, "b": 1.0})
        wait_until(lambda: len(tracker._waiting) == 100)
        tracker.finish("FINISHED")
        assert "1000 metrics lost" in recorder.warnings[-1]

    def test_artifacts_that_fail_hold_up_nothing_else(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(self: Any) -> None:
            raise PermissionError("artifacts may not be written")

        monkeypatch.setattr(MlflowRun, "log_artifacts", refuse)
        recorder = Recorder()
        tracker = recorder.tracker()
        tracker.log(1, {"loss": 1.0})
        wait_until(lambda: recorder.warnings)
        tracker.finish("FINISHED")
        assert "artifacts may not be written" in recorder.warnings[0]
        assert "incomplete" in recorder.warnings[1]
        assert store.get_run(recorder.run_ids[0]).info.status == "FINISHED"
        assert history(store, recorder.run_ids[0], "loss") == [(1, 1.0)]

    def test_a_batch_refused_for_good_does_not_block_the_next(self, store: Any) -> None:
        recorder = Recorder()
        tracker = recorder.tracker(flush_seconds=0.1)
        wait_until(lambda: recorder.run_ids and len(store.list_artifacts(recorder.run_ids[0])) == 4)
        store.delete_run(recorder.run_ids[0])  # by somebody in the user interface
        tracker.log(1, {"loss": 1.0})
        wait_until(lambda: recorder.warnings)
        assert "active" in recorder.warnings[0]
        store.restore_run(recorder.run_ids[0])
        tracker.log(2, {"loss": 2.0})
        tracker.finish("FINISHED")
        assert history(store, recorder.run_ids[0], "loss") == [(2, 2.0)]
        assert "1 metrics lost" in recorder.warnings[1]

    def test_a_run_id_that_cannot_be_remembered(self, store: Any) -> None:
        def fail(run_id: str) -> None:
            raise OSError("No space left on device")

        recorder = Recorder()
        recorder.tracker(remember_run_id=fail).finish("FINISHED")
        (warning,) = recorder.warnings
        assert "No space left on device" in warning

    def test_passwords_stay_out_of_messages(self) -> None:
        assert one_line(ValueError("at\n http://me:secret@host:1/x")) == "at http://host:1/x"


@pytest.mark.long
class TestTwoProcesses:
    def test_share_a_new_store_and_say_nothing(self, tmp_path: Path) -> None:
        # With everything hidden that mlflow-skinny does not bring.
        program = textwrap.dedent("""
            import sys
            for name in ("flask", "pandas", "docker", "graphene", "matplotlib", "sklearn", "scipy", "pyarrow", "huey"):
                sys.modules[name] = None
            from lm_pcfg.training.tracking import Tracker
            tracker = Tracker(run_name=sys.argv[1], run_id=None, parameters={"lr": 1}, artifacts={"a.txt": "a"},
                              warn=print, remember_run_id=lambda run_id: None)
            for step in range(10):
                tracker.log(step, {"loss": step})
            tracker.finish("FINISHED", timeout=60.0)
        """)
        source = str(Path(__file__).parents[1])
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        environment["PYTHONPATH"] = source
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", program, name],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for name in ("one", "two")
        ]
        for process in processes:
            output, _ = process.communicate(timeout=90)
            assert output.decode() == ""
            assert process.returncode == 0
        mlflow = client(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
        experiment = mlflow.get_experiment_by_name("lm_pcfg")
        runs = mlflow.search_runs([experiment.experiment_id])
        assert sorted(run.info.run_name for run in runs) == ["one", "two"]
        for run in runs:
            assert run.info.status == "FINISHED"
            assert history(mlflow, run.info.run_id, "loss") == [(step, float(step)) for step in range(10)]
