"""MLflow gets everything a run logs, over a resume too, and the scores of the run."""

import contextlib
import getpass
import hashlib
import json
import math
import sqlite3
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from lm_pcfg.cli import app
from lm_pcfg.training import loop, tracked_scores
from lm_pcfg.training.mlflow_run import environment_artifacts, git_commit, valid_name
from lm_pcfg.training.tracking import NoTracker
from mlflow_store import DEAD_SERVER, Recorder, client, history, wait_until
from small_runs import write_untrained_run
from texts import write_config


class TestDelivery:
    def test_a_whole_run_in_the_default_store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        monkeypatch.chdir(tmp_path)
        recorder = Recorder()
        tracker = recorder.tracker(run_name="my run")
        for step in range(1500):
            tracker.log(step, {"train/loss": 1 / (step + 1), "grad norm (pre-clip)": step})
        tracker.finish("FINISHED", timeout=120.0)  # to make a store takes long on a busy machine
        assert recorder.warnings == []
        (run_id,) = recorder.run_ids

        mlflow = client(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
        run = mlflow.get_run(run_id)
        assert run.info.status == "FINISHED"
        assert run.info.run_name == "my run"
        assert mlflow.get_experiment(run.info.experiment_id).name == "lm_pcfg"
        assert run.data.params == {
            "model.nonterminals": "8",
            "model.root": "all",
            "lr": "0.001",
            "sizes": "[1, 2]",
        }
        assert run.data.tags["engine"] == "accelerate"
        assert history(mlflow, run_id, "train/loss") == [(step, 1 / (step + 1)) for step in range(1500)]
        assert history(mlflow, run_id, "grad norm _pre-clip_") == [(step, float(step)) for step in range(1500)]
        artifacts = tmp_path / "mlruns" / "artifacts" / run_id / "artifacts"
        names = ["config.yaml", "environment.json", "pip-list.txt", "vocabulary.txt"]
        assert sorted(entry.path for entry in mlflow.list_artifacts(run_id)) == names
        assert (artifacts / "config.yaml").read_text() == "lr: 0.001\n"

    def test_the_experiment_is_the_one_of_the_environment(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "another")
        recorder = Recorder()
        recorder.tracker().finish("FINISHED")
        run = store.get_run(recorder.run_ids[0])
        assert store.get_experiment(run.info.experiment_id).name == "another"

    @pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
    def test_status(self, store: Any, status: Any) -> None:
        recorder = Recorder()
        tracker = recorder.tracker()
        wait_until(lambda: recorder.run_ids)
        (run_id,) = recorder.run_ids
        assert store.get_run(run_id).info.status == "RUNNING"
        tracker.finish(status)
        tracker.finish("FINISHED")  # the first word counts
        assert store.get_run(run_id).info.status == status
        assert recorder.warnings == []

    def test_metrics_arrive_while_the_run_goes_on(self, store: Any) -> None:
        recorder = Recorder()
        tracker = recorder.tracker(flush_seconds=0.1)
        tracker.log(7, {"loss": 2.0})
        wait_until(lambda: recorder.run_ids and history(store, recorder.run_ids[0], "loss") == [(7, 2.0)])
        tracker.finish("FINISHED")
        assert recorder.warnings == []

    def test_values_that_are_not_finite_or_not_numbers(self, store: Any) -> None:
        recorder = Recorder()
        tracker = recorder.tracker()
        odd: Any = {"nan": math.nan, "up": math.inf, "down": -math.inf, "text": "abc", "none": None, "flag": True}
        tracker.log(1, odd)
        tracker.finish("FINISHED")
        assert recorder.warnings == []
        metrics = store.get_run(recorder.run_ids[0]).data.metrics
        assert math.isnan(metrics.pop("nan"))
        assert metrics == {"up": sys.float_info.max, "down": -sys.float_info.max, "flag": 1.0}

    def test_more_settings_than_one_call_takes(self, store: Any) -> None:
        recorder = Recorder()
        many = {f"p{index}": index for index in range(250)}
        recorder.tracker(parameters={"many": many, "long": "x" * 10_000, "odd?name": None, "empty": {}}).finish(
            "FINISHED"
        )
        assert recorder.warnings == []
        parameters = store.get_run(recorder.run_ids[0]).data.params
        assert len(parameters) == 253
        assert parameters["many.p249"] == "249"
        assert parameters["odd_name"] == "null"

    def test_no_tracker(self) -> None:
        """It has what the loop calls of a Tracker, and does nothing."""
        tracker = NoTracker()
        assert tracker.log(1, {"loss": 1.0}) is None
        assert tracker.finish("FINISHED") is None


class TestResume:
    def test_continues_the_same_run(self, store: Any) -> None:
        first = Recorder()
        tracker = first.tracker()
        tracker.log(1, {"loss": 1.0})
        tracker.finish("KILLED")
        (run_id,) = first.run_ids
        second = Recorder()
        tracker = second.tracker(run_id=run_id, parameters={"lr": 0.5, "sizes": [1, 2], "new": 1})
        wait_until(lambda: second.run_ids)
        assert store.get_run(run_id).info.status == "RUNNING"
        tracker.log(2, {"loss": 0.5})
        tracker.finish("FINISHED")
        assert first.warnings + second.warnings == []
        assert second.run_ids == [run_id]
        run = store.get_run(run_id)
        assert run.info.status == "FINISHED"
        assert history(store, run_id, "loss") == [(1, 1.0), (2, 0.5)]
        assert (run.data.params["lr"], run.data.params["new"]) == ("0.001", "1")
        assert {k: v for k, v in run.data.tags.items() if k.startswith("resumed.")} == {"resumed.lr": "0.5"}
        folders = [entry.path for entry in store.list_artifacts(run_id) if entry.is_dir]
        assert len(folders) == 1
        assert folders[0].startswith("resumed-")

    @pytest.mark.parametrize("fate", ["unknown", "deleted", "malformed"])
    def test_a_run_that_is_gone_gives_a_new_one(self, store: Any, fate: str) -> None:
        run_id = {"unknown": "0" * 32, "malformed": "../x"}.get(fate)
        if run_id is None:
            run_id = store.create_run("0").info.run_id
            store.delete_run(run_id)
        recorder = Recorder()
        tracker = recorder.tracker(run_id=run_id)
        tracker.log(1, {"loss": 1.0})
        tracker.finish("FINISHED")
        assert recorder.warnings == [f"MLflow has no run {run_id} any more; a new one begins"]
        (new_run_id,) = recorder.run_ids
        assert new_run_id != run_id
        assert store.get_run(new_run_id).info.status == "FINISHED"
        assert history(store, new_run_id, "loss") == [(1, 1.0)]


class TestScores:
    """What a run and its scores have in MLflow, and that `score` never fails, waits or makes a store for it."""

    @pytest.fixture(scope="class")
    def run(self, shared_store: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A run with a vocabulary that leaves out some words, logged in the shared store."""
        folder = tmp_path_factory.mktemp("scored")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setenv("MLFLOW_TRACKING_URI", shared_store)
            patch.setattr(loop, "SECONDS_FOR_TRACKING", 120.0)  # a busy machine may have to make the store first
            config = write_config(folder, tracking={"mlflow": True})
            result = CliRunner().invoke(app, ["train", "--config", str(config), "data.vocabulary.size=12"])
            assert result.exit_code == 0, result.output
        return folder / "runs" / "small"

    def score(self, run: Path, *options: str) -> Any:
        result = CliRunner().invoke(
            app, ["score", str(run.parents[1] / "valid.txt"), "--checkpoint", str(run), *options]
        )
        assert result.exit_code == 0, result.output
        return result

    def test_a_run_has_its_source_its_vocabulary_and_its_best_value(self, run: Path, store: Any) -> None:
        found = store.get_run((run / "mlflow_run_id").read_text().strip())
        assert found.info.user_id == found.data.tags["mlflow.user"] == getpass.getuser()
        assert found.data.tags["mlflow.source.name"] == Path(sys.argv[0]).name
        assert found.data.tags["mlflow.source.type"] == "LOCAL"
        if commit := git_commit():
            assert found.data.tags["mlflow.source.git.commit"] == commit.removesuffix("+changes")
        described = json.loads((run / "vocab" / "vocabulary.json").read_text())
        assert found.data.params["vocabulary.types"] == "12" == str(described["types"])
        share = described["training_unknown"] / described["training_words"]
        assert float(found.data.params["vocabulary.training_unknown_share"]) == pytest.approx(share)
        best = min(value for _, value in history(store, found.info.run_id, "valid/ppl"))
        assert found.data.metrics["best/valid_ppl"] == pytest.approx(best)

    def test_a_score_is_logged_to_the_run_it_scores(
        self, run: Path, store: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tracked_scores, "SECONDS", 60.0)
        run_id = (run / "mlflow_run_id").read_text().strip()
        before = len(store.search_runs([store.get_run(run_id).info.experiment_id]))
        for options in (["--no-track"], ["--checkpoint", str(run)]):  # not wanted; a mixture is no run
            self.score(run, *options)
        assert not any(name.startswith("score/") for name in store.get_run(run_id).data.metrics)
        exported = run / "exports" / "pruned"  # another model than the run's, for all one knows
        text = str(run.parents[1] / "valid.txt")
        for words in (["export", str(run), str(exported)], ["score", text, "--checkpoint", str(exported)]):
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 0, result.output
        assert not any(name.startswith("score/") for name in store.get_run(run_id).data.metrics)
        report = json.loads(self.score(run, "--json").stdout)
        other = json.loads(self.score(run, "--json", "--max-length", "5", "--weights", "raw").stdout)
        name = "score/valid.txt-weights-raw-max-length-5/ppl"
        assert store.get_run(run_id).data.metrics[name] == pytest.approx(other["ppl"])
        found = store.get_run(run_id)
        assert found.data.metrics["score/valid.txt/ppl"] == pytest.approx(report["ppl"])
        assert found.data.metrics["score/valid.txt/unknown_share"] == pytest.approx(report["unknown_share"])
        for figure in ("ppl_per_word", "ppl_per_byte"):  # of a text with unknown words
            assert found.data.metrics[f"score/valid.txt/{figure}_at_least"] == pytest.approx(report[figure])
            assert f"score/valid.txt/{figure}" not in found.data.metrics
        assert tracked_scores._figure_name("ppl_per_byte", {"ppl_per_byte_is_lower_bound": False}) == "ppl_per_byte"
        assert history(store, run_id, "score/valid.txt/ppl")[0][0] == 16  # the step of the checkpoint
        assert json.loads(found.data.tags["score.valid.txt"])["checkpoint"] == report["checkpoint"]
        assert found.info.status == "FINISHED"
        assert len(store.search_runs([found.info.experiment_id])) == before

    def test_scores_of_two_texts_of_one_name_stay_apart(
        self, run: Path, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tracked_scores, "SECONDS", 60.0)
        run_id = (run / "mlflow_run_id").read_text().strip()
        reports = {}
        texts = {"A": "the cat sees a dog\n", "B": "a dog\n", "C": "the  cat sees a dog\n"}  # C is A, to a model
        for folder, text in (*texts.items(), *texts.items()):  # and again
            (tmp_path / folder).mkdir(exist_ok=True)
            file = tmp_path / folder / "test.txt"
            file.write_text(text)
            result = CliRunner().invoke(app, ["score", str(file), "--checkpoint", str(run), "--json"])
            assert result.exit_code == 0, result.output
            reports[folder] = json.loads(result.stdout)
        data = store.get_run(run_id).data
        other = f"test.txt-{hashlib.sha256(texts['B'].encode()).hexdigest()[:8]}"
        figures = {name: value for name, value in data.metrics.items() if name.startswith("score/test.txt")}
        assert {name.split("/")[1] for name in figures} == {"test.txt", other}
        assert figures["score/test.txt/ppl"] == pytest.approx(reports["A"]["ppl"])
        assert figures[f"score/{other}/ppl"] == pytest.approx(reports["B"]["ppl"])
        assert json.loads(data.tags["score.test.txt"])["file"].endswith("C/test.txt")
        assert json.loads(data.tags[f"score.{other}"])["file"].endswith("B/test.txt")

    def test_the_seed_of_a_compound_model_is_part_of_its_score(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = {"family": "sc_pcfg", "nonterminals": 4, "preterminals": 6, "dimension": 8}
        own = write_untrained_run(tmp_path, "own", model)
        plain = write_untrained_run(tmp_path, "plain", model | {"family": "sn_pcfg"})
        sent = list[tuple[str, Any]]()
        log = SimpleNamespace(send=lambda name, step, report, warn: sent.append((name, report.get("seed"))))
        monkeypatch.setattr(tracked_scores, "score_log", lambda run, wanted: contextlib.nullcontext(log))
        (tmp_path / "one").write_text("the cat\n")
        for run, seed in ((own, "0"), (own, "3"), (plain, "3")):  # a plain model draws nothing
            words = ["score", str(tmp_path / "one"), "--checkpoint", str(run), "--seed", seed]
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 0, result.output
        assert sent == [("one", 0), ("one-seed-3", 3), ("one", None)]

    @pytest.mark.parametrize(
        ("tag", "name"),
        [
            ('{"file": "x/a"}', "a"),  # of an earlier version
            ('{"file": "y/a"}', "a-01234567"),
            ('{"file": "y/a", "text_hash": "0123456789"}', "a"),
            ("[", "a"),
            ("[]", "a"),
        ],
    )
    def test_a_name_is_taken_by_another_text(self, tag: str, name: str) -> None:
        given = tracked_scores._Given("a", 1, {}, {"file": "x/a", "text_hash": "0123456789"})
        assert tracked_scores._free_name(given, {"score.a": tag}) == name

    def test_a_store_that_another_process_has_locked_is_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        monkeypatch.setattr(tracked_scores, "SECONDS_FOR_A_LOCK", 0.02)
        monkeypatch.chdir(tmp_path)
        run = tmp_path / "runs" / "a"
        run.mkdir(parents=True)
        (run / "mlflow_run_id").write_text("0" * 32)
        (tmp_path / "mlruns").mkdir()
        warnings = list[str]()
        with contextlib.closing(sqlite3.connect(tmp_path / "mlruns" / "mlflow.db", isolation_level=None)) as store:
            store.execute("CREATE TABLE runs (run_uuid TEXT)")
            store.execute("BEGIN EXCLUSIVE")
            with tracked_scores.score_log(run) as log:
                assert log is not None
                log.send("a", 1, {"ppl": 2.0}, warnings.append)
            assert len(warnings) == 1
            assert "this score was not logged (another process has locked the store)" in warnings[0]
            with tracked_scores.score_log(run) as log:
                assert log is not None
                store.execute("ROLLBACK")  # free while the text is scored: it has no such run
                assert log.send("a", 1, {"ppl": 2.0}, pytest.fail) == "not there"
            with tracked_scores.score_log(run) as log:
                assert log is None

    def test_a_server_that_does_not_answer_is_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answer = threading.Event()
        monkeypatch.setattr(tracked_scores.ScoreLog, "_log", lambda log: str(answer.wait()))
        began, warnings = time.monotonic(), list[str]()
        tracked_scores.ScoreLog("http://127.0.0.1:1", "1").send("a", 1, {"ppl": 2.0}, warnings.append)
        assert time.monotonic() - began < 2.5  # it began after the result
        answer.set()
        assert "no answer within 2 s" in warnings[0]

    def test_only_rank_0_logs(self, run: Path, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "1")
        with tracked_scores.score_log(run) as log:
            assert log is None
        monkeypatch.setenv("RANK", "0")
        with tracked_scores.score_log(run) as log:
            assert log is not None
        log._thread.join(20.0)
        assert log.outcome == "not there"  # nothing was sent

    @pytest.mark.parametrize("uri", ["", "sqlite:///{}/none/mlflow.db", "sqlite:///{}/empty.db", "file://{}/files"])
    def test_a_store_is_never_made(self, run: Path, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "empty.db").touch()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri.format(tmp_path))
        assert "MLflow" not in self.score(run).output
        assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.db"]
        assert (tmp_path / "empty.db").stat().st_size == 0
        assert not (run.parents[1] / "mlruns" / "mlflow.db").exists()

    def test_a_dead_server_is_one_line_after_the_result(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", DEAD_SERVER)
        monkeypatch.setattr(tracked_scores, "SECONDS_FOR_A_SERVER", 0.2)
        result = self.score(run, "--json")
        assert "ppl" in json.loads(result.stdout)
        (line,) = [line for line in result.stderr.splitlines() if "MLflow" in line]
        assert "this score was not logged (" in line
        assert "--no-track" in line


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("train/loss", "train/loss"),
        ("valid ppl: all", "valid ppl: all"),
        ("a//b/", "a/b"),
        ("../x", "x"),
        ("/", "_"),
        ("é=1", "é_1"),
        ("x" * 300, "x" * 250),
    ],
)
def test_names_mlflow_accepts(name: str, valid: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    assert valid_name(name) == valid
    _validate_metric_name(valid)


def test_environment() -> None:
    artifacts = environment_artifacts()
    environment = json.loads(artifacts["environment.json"])
    assert environment["python"] == sys.version.split()[0]
    assert environment["packages"]["torch"] is not None
    assert {"hostname", "platform", "command", "git_commit", "gpus"} <= environment.keys()
    assert "torch==" in artifacts["pip-list.txt"]
