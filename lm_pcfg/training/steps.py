"""One optimizer step after another: data, model, optimizer and moving average, and what is counted of them.

Folders, metrics, evaluations and stops are the trainer's (loop.py). A dry run and `bench step` use the steps alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from flash_inside.devices import memory_of
from flash_inside.softmax import product_precision
from lm_pcfg.console import say
from lm_pcfg.corpus import opening
from lm_pcfg.corpus.batches import Batch, describe_lengths
from lm_pcfg.corpus.pieces import AnyVocabulary
from lm_pcfg.distributed import make_learner
from lm_pcfg.distributed.engine import Engine
from lm_pcfg.distributed.learner import Update
from lm_pcfg.distributed.throughput import Throughput
from lm_pcfg.errors import UserError, memory_told
from lm_pcfg.grammar.brackets import with_brackets
from lm_pcfg.grammar.computation import Computation, backward_through
from lm_pcfg.grammar.contexts import EncodedText
from lm_pcfg.grammar.dropout import Dropout
from lm_pcfg.grammar.emission import EmissionShards
from lm_pcfg.grammar.families import family_of
from lm_pcfg.grammar.families.shared.family import Distribution
from lm_pcfg.grammar.likelihood import accumulate_gradients
from lm_pcfg.settings import Settings
from lm_pcfg.storage.checkpoint import Loaded
from lm_pcfg.training.graphs import CapturedNetworks, GraphCapture, Module
from lm_pcfg.training.position import Position
from lm_pcfg.training.schedules import MovingAverage, learning_rate_factor


class PendingUpdate(NamedTuple):
    """An update that was made, but whose figures the host has not read."""

    step: int
    outcome: Callable[[], Update]
    sentences: float
    words: float


class StepModel(NamedTuple):
    """The model of a step: its graph through the networks (None: a CUDA graph has it), and leaves for micro-batches."""

    graph: Distribution | None
    leaves: Distribution
    captured: CapturedNetworks | None


class Steps:
    def __init__(self, settings: Settings, engine: Engine, vocabulary: AnyVocabulary | None = None):
        """vocabulary: that of a resumed run; None: that of the training text."""
        self.settings, self.engine = settings, engine
        self.family, model = family_of(settings.model), settings.model
        fewest = self.family.fewest_symbols(model)
        for name, file in (("data.brackets", settings.data.brackets), ("evaluation.trees", settings.evaluation.trees)):
            if file is not None and not self.family.has_trees:
                raise UserError(f"{name} needs a model with trees, and family {model.family} has none")
        if engine.zero_stage == 3 and self.family.works_with_weights:
            raise UserError(f"family {model.family} needs all its weights in every batch: use DDP, or ZeRO 1 or 2")
        self.corpora = engine.on_all(
            lambda: with_brackets(opening.load_corpora(settings, vocabulary, fewest), settings.data)
        )
        self.stream = opening.training_stream(
            settings, self.corpora.train, rank=engine.rank, world_size=engine.world_size
        )
        words = self.corpora.vocabulary.words
        engine.on_all(self._check_memory)
        text = None
        wanted = self.family.text_wanted(model)
        if wanted and vocabulary is None:  # the weights of a resumed run come from its checkpoint
            if engine.is_main:
                say(f"init: the neighbours of {len(words):,} words tell where they begin (seconds to minutes)")
            text = EncodedText(*opening.first_text(settings, self.corpora.train, wanted), engine.device)
        module = self.family.build(model, words, settings.seed, text).to(engine.device)
        if any(True for _ in module.buffers()):
            raise ValueError(f"family {model.family}: state has to be in parameters; buffers are not saved")
        #: Names, shapes and forward of the module, without memory.
        self.skeleton = self.family.build(model, words, settings.seed).to("meta")
        self.learner = make_learner(module, settings.optimizer, engine)
        self.computation = Computation(
            precision=settings.networks.precision,
            charts=settings.inside.precision,
            shards=EmissionShards(engine.model_group) if engine.model_group and self.family.shares_emission else None,
        )
        self.average = MovingAverage(self.learner.local_weights(), settings.ema.decay) if settings.ema.decay else None
        self.position = Position()
        self.throughput = Throughput()
        self.learning_rate = 0.0  # of the last step
        self.skipped_step, self.trouble = 0, ""  # the last one whose update was left out, and what was not finite
        self._pending: PendingUpdate | None = None
        self.total_steps = self.count_steps()
        allowed = settings.networks.cuda_graphs and self.learner.asynchronous and engine.device.type == "cuda"
        self.capture = GraphCapture(self.learner, self._compute, allowed)

    def _check_memory(self) -> None:
        """Refuse a model or sentences that do not fit: on a CPU the system would end the process after a while."""
        settings, batch, device = self.settings, self.settings.batch, self.engine.device
        copies = 2 if device.type == "cpu" else 1  # the model, and its gradients
        taken = self.family.check_memory(settings.model, len(self.corpora.vocabulary.words), device, copies)
        lengths = self.corpora.train.longest(1 if batch.by == "cost" else batch.sentences)
        if batch.by == "cost" and lengths:
            lengths = self.corpora.train.longest(max(1, batch.cost // lengths[0] ** 2))
        needed = self.family.chart_memory(settings.model, lengths, settings.inside.precision)
        if self.engine.device.type != "cpu" or needed <= (there := memory_of() - taken):
            return
        longest, way_out = f"{lengths[0]:,} {self.corpora.train.unit}", ""
        what = f"a sentence of {longest} takes"
        if len(lengths) > 1:
            what = f"a batch of the {len(lengths)} longest sentences, up to {longest}, takes"
            size = len(lengths) if batch.by == "sentences" else sum(length**2 for length in lengths)  # as there are
            way_out = f" or batch.{batch.by}={max(1, int(0.9 * size * there / needed))}"
        fitting = int(0.9 * lengths[0] * math.sqrt(there / needed))  # memory grows with the square
        fewer = "".join(f" or fewer model.{name}" for name in self.family.sizes[:1])
        raise UserError(
            f"training text: {what} {needed / 2**30:,.1f} GiB of memory, and the model leaves {there / 2**30:,.1f}; "
            f"try data.max_length={max(1, fitting)}{way_out}{fewer if taken > there else ''}"
        )

    def count_steps(self) -> int:
        """Return the steps of the whole run: those made, and those that the rest of the data takes."""
        training = self.settings.training
        steps = self.position.step + self.stream.steps_left(training.epochs)
        return steps if training.max_steps is None else min(steps, training.max_steps)

    # ---- one step: model, gradients at its tensors, update ----------------------------------------------------------

    def next(self) -> None:
        """Take the next batches, make a step of them, and time both."""
        times, waited, began = self.throughput, self.engine.waited, time.perf_counter()
        batches = self.stream.next_step()
        times.data += time.perf_counter() - began
        self.step(batches)
        times.communication += self.engine.waited - waited
        times.total += time.perf_counter() - began

    def step(self, batches: list[Batch]) -> bool:
        """Make one forward and one backward pass of the networks, whatever the number of micro-batches.

        Return False if an update was skipped because loss or gradient were not finite: this one, or the one before it
        if the host reads its figures later (Learner.asynchronous).
        """
        settings, position, skipped_before = self.settings, self.position, self.position.skipped
        own = [float(sum(batch.n_sentences for batch in batches)), float(sum(batch.n_words for batch in batches))]
        sentences, words = self.engine.sums(own)  # of all ranks
        count = words + sentences if settings.loss.normalise == "tokens" else sentences
        factor = learning_rate_factor(settings.optimizer.schedule, position.step, self.total_steps)
        self.learning_rate = settings.optimizer.learning_rate * factor
        if not sentences:  # every rank's shard was lost: nothing to learn from, on any rank
            self.finish_update()
            position.step += 1
            self._count(Update(0.0, 0.0, 0.0), 0.0, 0.0)
            return position.skipped == skipped_before

        # The engine averages over ranks: the gradient is that of (sum over all ranks) / global count.
        scale = self.engine.world_size / count
        told = memory_told(partial(self._describe, batches), partial(self._less_memory, batches))
        with product_precision(self.computation.precision), told:
            model = self.compute_model(batches)
            nll, recomputed = self.accumulate(model, batches, scale)
            self.finish_update()  # the last update is long done by now, and its weights are still there
            outcome = self.update(model, nll, recomputed, scale)
        position.step += 1
        self._pending = PendingUpdate(position.step, outcome, sentences, words)
        if not self.learner.asynchronous:
            self.finish_update()
        self.throughput.steps += 1
        self.throughput.sentences += own[0]
        self.throughput.words += own[1]
        self.throughput.communication += self.learner.reduction.take_seconds()
        if self.engine.model_group is not None:
            self.throughput.communication += self.engine.model_group.take_seconds()
        return position.skipped == skipped_before

    def _describe(self, batches: list[Batch]) -> str:
        largest = describe_lengths(max(batches, key=lambda batch: batch.cost).lengths, self.corpora.train.unit)
        return f"step {self.position.step + 1} on {self.engine.device.type}, whose largest batch is {largest}"

    def _less_memory(self, batches: list[Batch]) -> str:
        """Say which settings make a step smaller. Smaller batches, more of them, leave the step itself as it is."""
        settings, batch = self.settings, self.settings.batch
        largest = max(batches, key=lambda one: one.cost)
        ways = []
        if largest.n_sentences > 1:
            ways.append(
                f"batch.{batch.by}={max(1, getattr(batch, batch.by) // 2)} batch.accumulate={2 * batch.accumulate}"
            )
        ways.append(f"data.max_length={max(1, int(0.7 * max(largest.lengths, default=1)))}")
        own, narrow = (self.family.chart_type(settings.model, one) for one in (settings.inside.precision, "bf16"))
        if self.engine.device.type == "cuda" and narrow.itemsize < own.itemsize:
            ways.append("inside.precision=bf16")
        ways += [f"a smaller model.{name}" for name in self.family.sizes[:1]]
        *others, last = ways
        return f"{', '.join(others)}{' or ' if others else ''}{last} (--dry-run tries the largest batch)"

    def compute_model(self, batches: list[Batch]) -> StepModel:
        dropout = self._dropout()
        possible = not self.family.wants_batches and self.family.can_capture(self.settings.model, dropout)
        captured = self.capture.networks(dropout, possible)
        if captured is not None:
            return StepModel(None, captured.model(dropout), captured)
        graph = self._compute(dropout, self.learner.model, batches)
        return StepModel(graph, graph.detached(), None)

    def accumulate(self, model: StepModel, batches: list[Batch], scale: float) -> tuple[Tensor, int]:
        """Add the gradients at the model's tensors; return -log-likelihood and the number of recomputed sentences."""
        return accumulate_gradients(model.leaves, batches, scale, self.settings.inside)

    def update(self, model: StepModel, nll: Tensor, recomputed: float, scale: float) -> Callable[[], Update]:
        """Take the gradients through the networks and update the weights; return a function that says how it went."""
        if model.captured is not None:
            return model.captured.update(nll, recomputed, self.learning_rate)
        assert model.graph is not None
        through = self._whole_loss(model.graph, model.leaves, scale)
        return self.learner.update(through, nll, recomputed, self.learning_rate)

    @staticmethod
    def _whole_loss(graph: Distribution, leaves: Distribution, scale: float) -> Tensor:
        """Return a scalar whose backward pass brings the gradients of likelihood and penalty to the parameters."""
        through = backward_through(graph, leaves)
        return through if graph.penalty is None else through + graph.penalty * scale

    def finish_update(self) -> None:
        """Count what the last update came to, if that is not known yet, and take it into the moving average."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        update = pending.outcome()
        if update.applied and self.average is not None:
            self.average.update(self.learner.local_weights())
        if not update.applied:
            self.skipped_step, self.trouble = pending.step, update.trouble
        self._count(update, pending.sentences, pending.words)

    def _dropout(self) -> Dropout:
        """Draw what this step leaves out; it is the same on all processes."""
        return self.family.dropout(
            self.settings.model, seed=self.settings.seed, step=self.position.step, total_steps=self.total_steps
        )

    def _compute(self, dropout: Dropout, module: Module, batches: list[Batch] | None = None) -> Any:
        """Compute the model of a step; if the module is the engine's, all processes have to call this."""
        wanted = (batches or ()) if self.family.wants_batches else ()
        return module(self.computation._replace(dropout=dropout, batches=wanted))

    def _count(self, update: Update, sentences: float, words: float) -> None:
        position, window = self.position, self.position.window
        window.steps += 1
        window.recomputed += update.recomputed
        if update.applied:
            position.skipped_in_a_row = 0
            window.nll += update.nll
            window.sentences += sentences
            window.words += words
            window.gradient_norm += update.gradient_norm
        else:
            position.skip()
            window.skipped += 1

    # ---- weights and state ------------------------------------------------------------------------------------------

    def fix_bucket_order(self) -> None:
        """Make a backward pass without effect, so that a resumed run sums as an undisturbed one does: bit for bit.

        DDP orders its buckets anew after the first backward pass, and from three ranks on sums depend on the order.
        """
        if self.engine.is_deepspeed or self.engine.world_size == 1:
            return
        batches = self.stream.costliest_step(0) if self.family.wants_batches else []
        graph = self._compute(self._dropout(), self.learner.model, batches)
        self.learner.backward(self._whole_loss(graph, graph.detached(), 0.0))  # all gradients are 0
        self.learner.optimizer.zero_grad()

    def weights_told(self) -> str:
        """Say whether this process's weights are finite: if they are, networks or charts are at fault."""
        lost = [name for name, weight in self.learner.local_weights().items() if not weight.isfinite().all()]
        whose = "" if self.engine.world_size == 1 else " of this process"
        if not lost:
            return f"all weights{whose} are finite"
        return f"weights{whose} that are not finite: {', '.join(lost)}"

    def calmer(self) -> str:
        """Say what keeps a training from diverging."""
        ways = ["a lower learning rate", "a longer warm-up"]
        if getattr(self.settings.model, "parameterization", "bounded") != "bounded":  # other families have none
            ways.append("model.parameterization=bounded from the start")
        return f"{', '.join(ways[:-1])} or {ways[-1]}"

    def evaluated_weights(self) -> dict[str, Tensor]:
        """Return whole tensors of the moving average, or of the weights without one; all processes take part."""
        return self.learner.gathered(self.average.weights if self.average else self.learner.local_weights())

    def tensors(self) -> dict[str, dict[str, Tensor] | None]:
        """Return what a checkpoint holds, in whole tensors; all processes take part."""
        learner = self.learner
        return {
            "model": learner.gathered(learner.local_weights()),
            "optimizer": learner.optimizer_tensors(),
            "ema": learner.gathered(self.average.weights) if self.average else None,
        }

    def restore(self, loaded: Loaded) -> None:
        """Continue bit for bit from a checkpoint."""
        assert loaded.optimizer is not None
        self.learner.load(loaded.model, loaded.optimizer)
        self.capture.forget()
        self.position = Position.of(loaded.state)
        if self.average is not None:
            # A run that had no average so far starts one from its weights.
            weights = self.learner.local_parts(loaded.ema or loaded.model)
            self.average.load(weights, self.position.ema_updates)
        self.engine.on_all(lambda: self.stream.restore(loaded.state["data"]))
        self.total_steps = self.count_steps()
