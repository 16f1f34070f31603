"""The training loop, from settings to a finished run. Read it from `train` down."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lm_pcfg.console import Progress, duration, progress, say, warn
from lm_pcfg.corpus.vocabularies import AnyVocabulary
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.likelihood import perplexity
from lm_pcfg.settings import Settings
from lm_pcfg.training import checkpoint, data
from lm_pcfg.training.collectives import telling_lost_contact
from lm_pcfg.training.engine import Engine
from lm_pcfg.training.evaluation import evaluate, is_due
from lm_pcfg.training.metrics_file import MetricsFile
from lm_pcfg.training.position import Position, Window
from lm_pcfg.training.run_folder import RunFolder, choose_start
from lm_pcfg.training.run_tracking import track
from lm_pcfg.training.saving import Saver, load_fitting
from lm_pcfg.training.steps import Steps
from lm_pcfg.training.stop_signals import StopSignals
from lm_pcfg.training.throughput import Throughput
from lm_pcfg.training.tracking import Status
from lm_pcfg.training.word_of_stop import WordOfStop


class TrainingStopped(UserError):
    """The run cannot go on; its last good checkpoint is intact."""


def train(settings: Settings) -> Path:
    """Run the training that the settings describe; returns the run folder."""
    with telling_lost_contact():
        engine = Engine(settings)  # until all have met, a signal ends this process at once
    with StopSignals() as stop, telling_lost_contact(), ExitStack() as at_end:
        start = engine.on_main(lambda: choose_start(settings))
        folder = RunFolder(start.folder)
        engine.on_main(folder.claim)
        at_end.callback(folder.release)
        source = engine.on_main(lambda: start.find_checkpoint(warn))
        vocabulary = engine.together(lambda: folder.load_vocabulary(source)) if source else None
        trainer = Trainer(settings, engine, vocabulary)
        if source is not None:
            same_run = checkpoint.run_folder_of(source) == start.folder.resolve()
            trainer.restore(source, same_run=same_run)
            if same_run:
                engine.on_main(lambda: trainer.repair_best(start.folder))
        engine.on_main(lambda: folder.begin(settings, trainer.corpora.vocabulary, source))
        description = engine.describe()
        if engine.is_main:
            where = f", continued from step {trainer.position.step}" if source else ""
            shards = trainer.computation.shards
            emission = f", emission in {shards.count} shards" if shards is not None else ""
            say(f"run {start.folder}{where}: {description}{emission}")
        trainer.run(folder, stop)
        engine.close_at_exit()
    return start.folder


class Trainer(Steps):
    """Steps with a run folder, evaluations and an end."""

    def __init__(self, settings: Settings, engine: Engine, vocabulary: AnyVocabulary | None):
        super().__init__(settings, engine, vocabulary)
        self._saved_step = 0

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def run(self, folder: RunFolder, stop: StopSignals) -> None:
        self.folder = folder
        self.metrics = MetricsFile(folder.path / "metrics.jsonl", warn)
        self.saver = Saver(folder.path, self.settings.checkpoint.keep_last)
        self.word_of_stop = WordOfStop(stop, self.engine)
        self.tracker = track(self.settings, folder, self.corpora.vocabulary, self.engine.is_main)
        status: Status = "FAILED"
        try:
            self.engine.on_main(self._begin)
            self.settle_buckets()
            with progress("step", self.total_steps, done=self.position.step, show=self.engine.is_main) as bar:
                finished, reason = self._loop(stop, bar)
            self.engine.on_main(self.saver.wait)
            status = "FINISHED" if finished else "KILLED"
            if self.engine.is_main:
                folder.mark_finished(finished, reason)
                say(reason if finished else f"{reason}; the same command with resume=auto continues it")
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            self.metrics.close()
            wait = self.settings.tracking.wait_seconds
            self.tracker.finish(status, min(wait, 2.0) if status == "FAILED" else wait)  # the error is yet to be told

    def _begin(self) -> None:
        with self.folder.writing():
            self.metrics.truncate_after(self.position.step)
        say(data.describe("train", self.corpora.train))
        if self.corpora.valid is not None:
            say(data.describe("valid", self.corpora.valid))

    def _loop(self, stop: StopSignals, bar: Progress) -> tuple[bool, str]:
        """Whether the run came to its own end, and why it ended, in words."""
        settings, position = self.settings, self.position
        self._clock, self._skipped_told = time.perf_counter(), position.skipped
        if position.evaluation_pending and self._evaluate(bar):  # the run was stopped before this evaluation
            self._save()
        while position.step < self.total_steps and not self._out_of_patience():
            if self._stop_agreed(stop):
                if position.evaluation_pending or position.step != self._saved_step:
                    self._save()
                return False, f"stopped by {stop.received or 'another process'} after step {position.step}"
            epoch, batch_of_epoch = self.stream.epoch, self.stream.state()["batch"]
            self._timed_step()
            self._tell_skipped(bar)
            last = position.step == self.total_steps
            position.evaluation_pending = self.corpora.valid is not None and (
                last or is_due(settings.evaluation, position.step, self.stream, epoch, batch_of_epoch)
            )
            detail = ""
            if position.step % settings.training.log_every == 0 or position.evaluation_pending or last:
                detail = self._log_window(epoch)
            bar.advance(1, detail)
            if position.evaluation_pending and not self._stop_agreed(stop):
                if self._evaluate(bar):
                    self._save()
            elif settings.checkpoint.every_steps and position.step % settings.checkpoint.every_steps == 0:
                self._save()
        if position.step != self._saved_step:
            self._save()
        self._tell_skipped(bar)
        best = ""
        if position.best_nll is not None:
            best = f", best validation perplexity {perplexity(position.best_nll):.3f} at step {position.best_step}"
        if position.evaluation_pending:  # the stop came at the very last step
            return False, f"stopped by {stop.received or 'another process'} before the last evaluation"
        why = "no improvement" if self._out_of_patience() else "finished"
        return True, f"{why} after step {position.step}{best}"

    def _timed_step(self) -> None:
        times, waited, began = self.throughput, self.engine.waited, time.perf_counter()
        batches = self.stream.next_step()
        times.data += time.perf_counter() - began
        self.step(batches)
        times.communication += self.engine.waited - waited
        times.total += time.perf_counter() - began

    def _tell_skipped(self, bar: Progress) -> None:
        """Every skipped update is told; too many in a row end the run, on all processes."""
        if self.position.skipped == self._skipped_told:
            return
        self._skipped_told = self.position.skipped
        if self.engine.is_main:
            bar.message(f"step {self._skipped_step}: loss or gradient is not finite, update skipped")
        self.engine.on_main(self._stop_if_hopeless)

    def _stop_if_hopeless(self) -> None:
        in_a_row = self.position.skipped_in_a_row
        if in_a_row >= self.settings.optimizer.max_skipped_in_a_row:
            self.saver.wait()  # for the checkpoint that is named here
            raise TrainingStopped(
                f"{in_a_row} updates in a row were not finite, training stops; last checkpoint before them: "
                f"{checkpoint.latest(self.folder.path) or 'none'}; try a lower learning rate or a longer warm-up"
            )

    def _stop_agreed(self, stop: StopSignals) -> bool:
        """Whether any process was asked to stop. A checkpoint that could not be written ends the run on all of them."""
        asked, failed = self.engine.sums([float(stop.received is not None), float(self.saver.failed())])
        if failed:
            self.engine.on_main(self.saver.wait)
        return asked > 0

    def _out_of_patience(self) -> bool:
        patience = self.settings.evaluation.patience
        return patience is not None and self.position.evaluations_since_best >= patience

    # ---- evaluation, metrics, checkpoints ---------------------------------------------------------------------------

    def _evaluate(self, bar: Progress) -> bool:
        """Whether it came to its end; it stays pending if a process was asked to stop before that."""
        assert self.corpora.valid is not None
        self.settle()
        weights = self.learner.whole(self.average.weights if self.average else self.learner.pieces())
        stop_asked = self.word_of_stop.heard
        result = evaluate(self.skeleton, weights, self.corpora.valid, self.settings, self.engine, stop_asked)
        self._clock = time.perf_counter()  # an evaluation is no training
        if result is None:
            return False
        score = result.score
        nll = score.nll / score.tokens if score.tokens else None
        improved = self.position.take_evaluation(nll, score.impossible)
        self._record(result.metrics())
        if self.engine.is_main:
            mark = "  best so far" if improved else ""
            bar.message(f"step {self.position.step}: {result.describe()} ({duration(result.seconds)}){mark}")
        return True

    def _take_time(self) -> None:
        """The window has all seconds of training up to now."""
        before, self._clock = self._clock, time.perf_counter()
        self.position.window.seconds += self._clock - before

    def _log_window(self, epoch: int) -> str:
        """Write the sums since the last time; what the progress line shows."""
        began = time.perf_counter()
        self.settle()  # the last update may still be at work: that time is the step's
        self.throughput.total += time.perf_counter() - began
        self._take_time()
        window, seconds = self.position.window, self.position.window.seconds
        speeds = self.throughput.metrics(self.engine)
        self.position.window, self.throughput = Window(), Throughput()
        updates = window.steps - window.skipped
        metrics: dict[str, float] = {
            "epoch": epoch,
            "train/skipped": self.position.skipped,
            "train/recomputed": window.recomputed,
            "train/learning_rate": self.learning_rate,
            **data.metrics(self.corpora.train, self.stream, self.engine.sums),
            "train/seconds": round(seconds, 6),
        }
        detail = "no finite update"
        tokens = window.words + window.sentences
        if updates and tokens:
            train_perplexity = perplexity(window.nll / tokens)
            metrics |= {
                "train/loss": window.nll / (tokens if self.settings.loss.normalise == "tokens" else window.sentences),
                "train/ppl": train_perplexity,
                "train/gradient_norm": window.gradient_norm / updates,
            }
            speed = f"  {speeds['train/words_per_second']:,.0f} words/s" if speeds else ""
            detail = f"epoch {epoch + 1}  loss {metrics['train/loss']:.4f}  ppl {train_perplexity:.2f}{speed}"
        self._record(metrics | speeds)
        return detail

    def _record(self, metrics: dict[str, Any]) -> None:
        if self.engine.is_main:
            self.metrics.append(self.position.step, metrics)
            self.tracker.log(self.position.step, metrics)

    def _save(self) -> None:
        """A checkpoint of this step; `best` follows the validation text.

        None while updates are being skipped: what led there may have spoilt the weights, and the checkpoints before it
        must not make room for theirs. (Unless they were just found to be the best: then they are well.)
        """
        self.settle()
        position = self.position
        if position.skipped_in_a_row and position.best_step != position.step:
            return
        self._saved_step = position.step
        self._take_time()
        position.ema_updates = self.average.updates if self.average else 0
        learner = self.learner
        tensors = {  # all processes take part in gathering these, one writes them
            "model": learner.whole(learner.pieces()),
            "optimizer": learner.optimizer_tensors(),
            "ema": learner.whole(self.average.weights) if self.average else None,
        }
        state = {
            **asdict(position),
            "data": self.stream.state(),
            "epoch": self.stream.epoch,
            "seed": self.settings.seed,
            "world_size": self.engine.world_size,
            "engine": self.engine.name,
            "vocabulary_hash": self.corpora.vocabulary.hash,
        }
        best_steps = position.best_steps(self.settings.checkpoint.keep_best)
        self.engine.on_main(lambda: self.saver.start(tensors, state, best_steps))

    def restore(self, folder: Path, *, same_run: bool) -> None:
        """Continue bit for bit from a checkpoint; a run that starts from another run's has no best of its own yet."""
        vocabulary, device = self.corpora.vocabulary, self.engine.device
        loaded = self.engine.together(lambda: load_fitting(folder, self.skeleton, vocabulary, device))
        state = loaded.state
        assert loaded.optimizer is not None
        self.learner.load(loaded.model, loaded.optimizer)
        self.forget_captured()
        self.position = Position.of(state)
        self._saved_step = self.position.step if same_run else 0
        if not same_run:
            self.position.forget_best()
        if self.average is not None:
            # A run that had no average so far starts one from its weights.
            weights = self.learner.pieces_of(loaded.ema or loaded.model)
            self.average.load(weights, self.position.ema_updates)
        self.engine.together(lambda: self.stream.restore(state["data"]))
        self.total_steps = self.count_steps()

    def repair_best(self, run_folder: Path) -> None:
        """A kill between saving the best checkpoint and pointing to it leaves the link behind."""
        for saved in checkpoint.list_checkpoints(run_folder):
            if checkpoint.step_of(saved) == self.position.best_step:
                checkpoint.point_best(run_folder, saved)
