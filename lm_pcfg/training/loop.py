"""The training of a model, from settings to a finished run. Read it from `train` down."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lm_pcfg.console import Progress, duration, progress, say, warn
from lm_pcfg.corpus import opening
from lm_pcfg.corpus.sentences import Sentences
from lm_pcfg.distributed import launcher
from lm_pcfg.distributed.collectives import lost_contact_reported
from lm_pcfg.distributed.engine import Engine
from lm_pcfg.distributed.throughput import Throughput
from lm_pcfg.errors import UserError
from lm_pcfg.grammar import brackets
from lm_pcfg.grammar.likelihood import perplexity
from lm_pcfg.settings import Settings
from lm_pcfg.settings_file import dump_yaml
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.metrics_file import MetricsFile
from lm_pcfg.storage.run_folder import FAILED, FINISHED, RunFolder, Start, claim_start
from lm_pcfg.storage.saving import Saver
from lm_pcfg.training.documents import documents, open_vocabulary
from lm_pcfg.training.evaluation import evaluate, is_due, measured_on
from lm_pcfg.training.mlflow_run import Status, environment_json
from lm_pcfg.training.position import Window, figure
from lm_pcfg.training.resumption import (
    Changes,
    changes_since,
    forget_other_best,
    good_checkpoint,
    how_to_continue,
    refusal_explained,
    restore,
    tell_changes,
    tell_finished,
    tidy_continued,
)
from lm_pcfg.training.signals import StopFlag, StopSignals
from lm_pcfg.training.steps import Steps
from lm_pcfg.training.tracking import track

SECONDS_BETWEEN_GLANCES = 10.0  # at the loss, where lines of metrics are rare
MOST_SKIPPED_IN_A_ROW = 20  # updates that are not finite, before a run stops
SECONDS_FOR_TRACKING = 20.0  # that the end of a run waits for a slow MLflow server
#: Of one process, of several: its error comes after it. MLflow's import and a new store take 5; other ranks wait for 5.
SECONDS_FOR_TRACKING_AFTER_FAILURE = (15.0, 4.0)


class TrainingStopped(UserError):
    """The run cannot go on; its last good checkpoint is intact."""


def train(settings: Settings) -> Path:
    """Run the training that the settings describe; returns the run folder."""
    with lost_contact_reported():
        engine = Engine(settings)  # until all have met, a signal ends this process at once
    with StopSignals() as stop, lost_contact_reported(), ExitStack() as at_end:

        def choose() -> Start:
            start, claimed = claim_start(settings, launcher.identity())
            at_end.callback(claimed.release)
            return start

        start = engine.on_main(choose)
        folder = RunFolder(start.folder, launcher.identity())
        source = engine.on_main(lambda: start.find_checkpoint(warn))
        settings = settings.model_copy(update={"name": start.folder.name})  # it may be the second of its name
        vocabulary, changes = None, Changes()
        if source is not None:
            tell = warn if engine.is_main else _nothing
            changes = engine.on_all(lambda: changes_since(source, settings, tell))
            vocabulary = engine.on_all(lambda: open_vocabulary(source, tell))
        steps = Steps(settings, engine, vocabulary)
        same_run = source is not None and checkpoint.run_folder_of(source) == start.folder.resolve()
        with refusal_explained(changes):
            continued = restore(steps, source, same_run=same_run) if source is not None else None
        finished = engine.on_main(lambda: folder.finished) if same_run and nothing_left(steps) else None
        forgotten = forget_other_best(steps, changes, start.folder) if same_run and finished is None else ""
        if finished is not None:
            if engine.is_main:
                tell_finished(start.folder, finished, changes)
        else:
            kept = engine.on_main(lambda: folder.begin(dump_yaml(settings), steps.corpora.vocabulary, source))
            if same_run and source is not None and continued is not None:
                engine.on_main(partial(tidy_continued, steps, source, continued))
            description = engine.describe()
            if engine.is_main:
                where = f", continued from step {steps.position.step}" if source else ""
                shards = steps.computation.shards
                emission = f", emission in {shards.count} shards" if shards is not None else ""
                say(f"run {start.folder}{where}: {description}{emission}")
                tell_changes(changes, kept, continued, steps.stream.plan.fingerprint, forgotten)
            Trainer(steps, folder, stop, continued if same_run else None).run()
        engine.close_at_exit()
    return start.folder


def _nothing(message: str) -> None:
    """What other processes say: the main one says the same."""


def nothing_left(steps: Steps) -> bool:
    """Whether a run has made its last step, and evaluated it."""
    ended = steps.position.step >= steps.total_steps or out_of_patience(steps)
    return ended and not steps.position.evaluation_pending


def out_of_patience(steps: Steps) -> bool:
    patience = steps.settings.evaluation.patience
    return patience is not None and steps.position.evaluations_since_best >= patience


class Trainer:
    """Makes the steps, evaluates, writes metrics and checkpoints into a run folder, and decides when to end."""

    def __init__(self, steps: Steps, folder: RunFolder, stop: StopSignals, continued: dict[str, Any] | None = None):
        """continued: the state of the run's own checkpoint that it continues from; None if there is none."""
        self.steps, self.settings, self.engine, self.corpora = steps, steps.settings, steps.engine, steps.corpora
        self.position = steps.position
        self.folder, self.stop = folder, stop
        self.metrics = MetricsFile(folder.path / "metrics.jsonl", warn)
        carried = documents(self.settings, self.corpora.vocabulary)
        self.saver = Saver(folder.path, self.settings.checkpoint.keep_last, carried, self.metrics)
        self.stop_flag = StopFlag(stop, self.engine)
        self.tracker = track(self.settings, folder, self.corpora.vocabulary, self.engine.is_main)
        self._continued, self._saved_step = continued, continued["step"] if continued else 0
        self._skipped_reported = self.position.skipped
        self._clock = time.perf_counter()  # up to here the seconds of training are counted
        self._shown: float | None = None  # when a loss was shown last

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        status: Status = "FAILED"
        try:
            self.engine.on_main(self._begin)
            self.steps.fix_bucket_order()
            with progress("step", self.steps.total_steps, done=self.position.step, show=self.engine.is_main) as bar:
                finished, reason = self._loop(bar)
            self.engine.on_main(self.saver.wait)
            status = "FINISHED" if finished else "KILLED"
            if self.engine.is_main:
                self._tell_end(finished, reason)
        except TrainingStopped as error:  # on the main process
            self._mark_failed(error)
            raise
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            self.metrics.close()
            of_failure = SECONDS_FOR_TRACKING_AFTER_FAILURE[self.engine.world_size > 1]
            self.tracker.finish(status, of_failure if status == "FAILED" else SECONDS_FOR_TRACKING)

    def _tell_end(self, finished: bool, reason: str) -> None:
        if finished:
            self.folder.mark(FINISHED, reason)
        if not finished:
            say(f"{reason}; {how_to_continue(self.folder.path)}")
        elif self.settings.training.max_steps == self.position.step and not out_of_patience(self.steps):
            say(f"{reason}; {how_to_continue(self.folder.path, 'training.max_steps=null')}")
        else:
            say(reason)

    def _mark_failed(self, error: TrainingStopped) -> None:
        """Leave a word for whoever would start the run again: a restart, a job script, a search."""
        try:
            self.folder.mark(FAILED, str(error))
        except UserError as failure:
            warn(str(failure))

    def _begin(self) -> None:
        with self.folder.writing():
            if self._continued is not None:
                self.metrics.truncate_after(self.position.step, self._continued.get("metrics"))
            elif (beside := self.metrics.set_aside()) is not None:
                say(f"{self.folder.path} was stopped before its first checkpoint: its metrics are now {beside.name}")
        self.folder.remember_environment(environment_json())
        say(opening.describe("train", self.corpora.train))
        if isinstance(self.corpora.train, Sentences) and self.corpora.train.limits is not None:
            say(brackets.describe(self.corpora.train, self.settings.data))
        if self.corpora.valid is not None:
            say(opening.describe("valid", self.corpora.valid))
        measured = self.corpora.train if self.corpora.valid is None else self.corpora.valid
        name = "train" if self.corpora.valid is None else "valid"
        if isinstance(measured, Sentences) and (message := measured.unknown_words.warning(name)):
            warn(message)
        if self.corpora.trees is not None:
            trees, select = self.settings.evaluation.trees, self.settings.evaluation.select
            say(f"trees: {len(self.corpora.trees):,} of {trees}; the best checkpoint is chosen by {select}")

    def _loop(self, bar: Progress) -> tuple[bool, str]:
        """Train to the end or to a stop; return whether the run finished, and the reason in words."""
        settings, position, stop, steps = self.settings, self.position, self.stop, self.steps
        self._clock, epoch = time.perf_counter(), steps.stream.epoch
        if position.evaluation_pending and self._evaluate(bar):  # the run was stopped before this evaluation
            self._save()
        while position.step < steps.total_steps and not out_of_patience(steps):
            if self._stop_agreed():
                if position.evaluation_pending or position.step != self._saved_step:
                    self._save()
                if position.window.steps:  # a resume drops this line, which comes after the checkpoint's, and sums on
                    self._log_window(epoch)
                return False, f"stopped by {stop.received or 'another process'} after step {position.step}"
            epoch, batch_of_epoch = steps.stream.epoch, steps.stream.state()["batch"]
            steps.next()
            self._report_skipped(bar)
            last = position.step == steps.total_steps
            position.evaluation_pending = self.corpora.valid is not None and (
                last or is_due(settings.evaluation, position.step, steps.stream, epoch, batch_of_epoch)
            )
            detail, is_first = "", self._shown is None
            if position.step % settings.training.log_every == 0 or position.evaluation_pending or last:
                detail = self._log_window(epoch)
            elif self.engine.is_main:
                detail = self._glance(epoch)
            if is_first and detail and self.engine.is_main:
                bar.message(f"step {position.step}: {detail}")
            bar.advance(1, detail)
            if position.evaluation_pending and not self._stop_agreed():
                if self._evaluate(bar):
                    self._save()
            elif settings.checkpoint.every_steps and position.step % settings.checkpoint.every_steps == 0:
                self._save()
        if position.step != self._saved_step:
            self._save()
        self._report_skipped(bar)
        if position.evaluation_pending:  # the stop came at the very last step
            return False, f"stopped by {stop.received or 'another process'} before the last evaluation"
        self.engine.on_main(self._stop_if_diverged)
        why = "no improvement" if out_of_patience(steps) else "finished"
        best = position.describe_best(self._unknown(), steps.family.scores_are_bounds)
        return True, f"{why} after step {position.step}{best}"

    def _unknown(self) -> str:
        """What stands beside a validation perplexity, if words of that text are unknown."""
        unknown = self.corpora.valid.unknown_words if self.corpora.valid is not None else None
        return f" ({unknown.brief})" if unknown is not None and unknown.count else ""

    def _report_skipped(self, bar: Progress) -> None:
        """Report every skipped update; too many in a row end the run, on all processes."""
        if self.position.skipped == self._skipped_reported:
            return
        self._skipped_reported = self.position.skipped
        if self.engine.is_main:
            bar.message(f"step {self.steps.skipped_step}: {self.steps.trouble} is not finite, update skipped")
        self.engine.on_main(self._stop_if_hopeless)

    def _stop_if_hopeless(self) -> None:
        in_a_row = self.position.skipped_in_a_row
        if in_a_row >= MOST_SKIPPED_IN_A_ROW:
            self.saver.wait()  # for the checkpoint that is named here
            raise TrainingStopped(
                f"{in_a_row} updates in a row were not finite (the last one: {self.steps.trouble}; "
                f"{self.steps.weights_told()}), training stops; last checkpoint before them: "
                f"{checkpoint.latest(self.folder.path) or 'none'}; try {self.steps.calmer()}"
            )

    def _stop_if_diverged(self) -> None:
        """A run that ends without a usable model has failed."""
        if why := self.position.divergence():
            self.saver.wait()
            raise TrainingStopped(
                f"the training diverged: at its end, step {self.position.step}, {why}; checkpoint to go back to: "
                f"{good_checkpoint(self.folder.path, self.position.step) or 'none'}; try {self.steps.calmer()}"
            )

    def _stop_agreed(self) -> bool:
        """Return whether any process was asked to stop. A checkpoint that could not be written ends the run on all."""
        asked, failed = self.engine.sums([float(self.stop.received is not None), float(self.saver.failed())])
        if failed:
            self.engine.on_main(self.saver.wait)
        return asked > 0

    # ---- evaluation, metrics, checkpoints ---------------------------------------------------------------------------

    def _evaluate(self, bar: Progress) -> bool:
        """Evaluate; return whether it was completed. It stays pending if a process was asked to stop before that."""
        self.steps.finish_update()
        result = evaluate(
            self.steps.skeleton, self.steps.evaluated_weights(), self.corpora, self.settings, self.engine,
            self.stop_flag.is_set,
        )  # fmt: skip
        self._clock = time.perf_counter()  # an evaluation is no training
        if result is None:
            return False
        score = result.score
        nll = score.nll / score.tokens if score.tokens else None
        by_trees = self.settings.evaluation.select == "trees"
        self.position.validated = measured_on(self.corpora, self.settings) or ""
        improved = self.position.take_evaluation(
            nll, score.impossible, result.s_f1 if by_trees else None, len(self.corpora.vocabulary)
        )
        self._record(result.metrics())
        if improved and self.engine.is_main:
            self.tracker.log(self.position.step, self.position.best_metrics())  # a column to sort runs by
        if self.engine.is_main:
            mark = "  best so far" if improved else ""
            bar.message(f"step {self.position.step}: {result.describe()} ({duration(result.seconds)}){mark}")
            for warning in filter(None, (result.warning, self.position.diverged)):
                bar.message(f"warning: {warning}")
        return True

    def _take_time(self) -> None:
        """Add the seconds of training since the last call to the window."""
        before, self._clock = self._clock, time.perf_counter()
        self.position.window.seconds += self._clock - before

    def _log_window(self, epoch: int) -> str:
        """Write the sums since the last line of metrics; return what the progress line shows."""
        began = time.perf_counter()
        self.steps.finish_update()  # the last update may still be at work: that time is the step's
        self.steps.throughput.total += time.perf_counter() - began
        self._take_time()
        window, seconds = self.position.window, self.position.window.seconds
        speeds = self.steps.throughput.metrics(self.engine)
        self.position.window, self.steps.throughput = Window(), Throughput()
        updates = window.steps - window.skipped
        metrics: dict[str, float] = {
            "epoch": epoch,
            "train/skipped": self.position.skipped,
            "train/recomputed": window.recomputed,
            "train/learning_rate": self.steps.learning_rate,
            **opening.metrics(self.corpora.train, self.steps.stream, self.engine.sums),
            "train/seconds": round(seconds, 6),
        }
        detail = self._loss_of(window, epoch)
        if detail:
            metrics |= {
                "train/loss": window.nll / self._normaliser(window),
                "train/ppl": perplexity(window.nll / (window.words + window.sentences)),
                "train/gradient_norm": window.gradient_norm / updates,
                "train/words": window.words,
            }
            detail += f"  {speeds['train/words_per_second']:,.0f} {self.corpora.train.unit}/s" if speeds else ""
        self._shown = time.perf_counter()
        self._record(metrics | speeds)
        return detail or "no finite update"

    def _glance(self, epoch: int) -> str:
        """Return what the progress line shows now and then until the next line of metrics; nothing: as before."""
        now = time.perf_counter()
        if self._shown is not None and now - self._shown < SECONDS_BETWEEN_GLANCES:
            return ""
        self.steps.finish_update()
        detail = self._loss_of(self.position.window, epoch)
        self._shown = now if detail else self._shown
        return detail

    def _loss_of(self, window: Window, epoch: int) -> str:
        """Return the loss of the steps since the last line of metrics, in words; nothing if no update was finite."""
        tokens = window.words + window.sentences
        if window.steps == window.skipped or not tokens:
            return ""
        loss = window.nll / self._normaliser(window)
        return f"epoch {epoch + 1}  loss {loss:.4f}  ppl {figure(perplexity(window.nll / tokens), 2)}"

    def _normaliser(self, window: Window) -> float:
        by_tokens = self.settings.loss.normalise == "tokens"
        return window.words + window.sentences if by_tokens else window.sentences

    def _record(self, metrics: dict[str, Any]) -> None:
        if self.engine.is_main:
            self.metrics.append(self.position.step, metrics)
            self.tracker.log(self.position.step, metrics)

    def _save(self) -> None:
        """Save a checkpoint of this step; `best` follows the validation text.

        While updates are being skipped save none: the weights may be spoilt, and good checkpoints must not be deleted
        for them. Weights that were just found to be the best are an exception, and those of a run that has ended well.
        """
        steps, position = self.steps, self.position
        steps.finish_update()
        ended_well = nothing_left(steps) and not position.divergence()
        if position.skipped_in_a_row and position.best_step != position.step and not ended_well:
            return
        self._saved_step = position.step
        self._take_time()
        position.ema_updates = steps.average.updates if steps.average else 0
        tensors = steps.tensors()
        state = {
            **asdict(position),
            "data": steps.stream.state(),
            "epoch": steps.stream.epoch,
            "seed": self.settings.seed,
            "world_size": self.engine.world_size,
            "engine": self.engine.name,
            "vocabulary_hash": self.corpora.vocabulary.hash,
            "valid_unknown_share": self.corpora.valid.unknown_words.share if self.corpora.valid is not None else None,
        }
        best_steps = position.best_steps(self.settings.checkpoint.keep_best)
        self.engine.on_main(lambda: self.saver.start(tensors, state, best_steps))
