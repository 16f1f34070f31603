"""One optimizer step after another: data, model, optimizer and moving average, and what is counted of them.

Folders, metrics, evaluations and stops are the loop's (loop.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flash_inside import rules_type
from flash_inside.softmax import product_precision
from lm_pcfg.console import say, warn
from lm_pcfg.corpus.batches import Batch
from lm_pcfg.corpus.vocabularies import AnyVocabulary
from lm_pcfg.grammar.boundary import Grammar, backward_through
from lm_pcfg.grammar.build import build_model, check_that_it_fits
from lm_pcfg.grammar.feature_dropout import FeatureDropout
from lm_pcfg.grammar.state_dropout import Kept, draw_kept
from lm_pcfg.settings import Settings
from lm_pcfg.training import data
from lm_pcfg.training.captured import LARGEST_N, CapturedNetworks, Model
from lm_pcfg.training.computation import training_computation
from lm_pcfg.training.engine import Engine
from lm_pcfg.training.learner import Update, make_learner
from lm_pcfg.training.micro_batches import accumulate_gradients
from lm_pcfg.training.optimization import MovingAverage, learning_rate_factor, state_dropout_rate
from lm_pcfg.training.position import Position
from lm_pcfg.training.throughput import Throughput

STEPS_BEFORE_CAPTURE = 3  # kernels are compiled then, and Adam has its state


def _size(kept: Kept | None) -> tuple[int, ...]:
    return () if kept is None else tuple(map(len, kept))


class Unread(NamedTuple):
    """An update that was made, but whose figures the host has not looked at."""

    step: int
    outcome: Callable[[], Update]
    sentences: float
    words: float


class Steps:
    def __init__(self, settings: Settings, engine: Engine, vocabulary: AnyVocabulary | None):
        self.settings, self.engine = settings, engine
        self.corpora = engine.together(lambda: data.load_corpora(settings, vocabulary))
        self.stream = data.training_stream(settings, self.corpora.train, rank=engine.rank, world_size=engine.world_size)
        check_that_it_fits(settings.model, len(self.corpora.vocabulary), engine.device)
        announce = say if engine.rank == 0 else (lambda _: None)
        model = self._build_model(data.word_vectors(settings, self.corpora, announce)).to(engine.device)
        self.skeleton = self._build_model().to("meta")  # names, shapes and forward, without memory
        self.learner = make_learner(model, settings.optimizer, engine)
        self.computation = training_computation(settings, engine)
        #: Whether the networks' passes may become CUDA graphs.
        self.captures = (
            settings.networks.cuda_graphs
            and self.learner.reads_late
            and engine.device.type == "cuda"
            and settings.model.nonterminals * (1.0 - settings.model.state_dropout) <= LARGEST_N
        )
        self._captured: CapturedNetworks | None = None
        #: Of the grammar in the last steps, and how many they are.
        self._size: tuple[int, ...] | None = None
        self._alike = 0
        self.average = MovingAverage(self.learner.pieces(), settings.ema.decay) if settings.ema.decay else None
        self.position = Position()
        self.throughput = Throughput()
        self._unread: Unread | None = None
        self.total_steps = self.count_steps()

    def count_steps(self) -> int:
        """Of the whole run: those made, and those that the rest of the data takes at this number of ranks."""
        training = self.settings.training
        steps = self.position.step + self.stream.steps_left(training.epochs)
        return steps if training.max_steps is None else min(steps, training.max_steps)

    def _build_model(self, word_vectors: Tensor | None = None) -> torch.nn.Module:
        settings, words = self.settings, self.corpora.vocabulary.words
        return build_model(settings.model, words, settings.seed, word_vectors)

    def step(self, batches: list[Batch]) -> bool:
        """One forward and one backward pass of the networks, whatever the number of micro-batches.

        False: loss or gradient were not finite, and the update was left out: of this step, or of the one before where
        the host learns of it late (Learner.reads_late).
        """
        settings, position, skipped_before = self.settings, self.position, self.position.skipped
        by_tokens = settings.loss.normalise == "tokens"
        own = [float(sum(batch.n_sentences for batch in batches)), float(sum(batch.n_words for batch in batches))]
        sentences, words = self.engine.sums(own)  # of all ranks
        count = words + sentences if by_tokens else sentences
        factor = learning_rate_factor(settings.optimizer.schedule, position.step, self.total_steps)
        self.learning_rate = settings.optimizer.learning_rate * factor
        if not sentences:  # every rank's shard was lost: nothing to learn from, on any rank
            self.settle()
            position.step += 1
            self._count(Update(True, 0.0, 0.0, 0.0), 0.0, 0.0)
            return position.skipped == skipped_before

        with product_precision(self.computation.precision):
            kept, dropout = self._draw()
            captured = self._captured_networks(kept, dropout)
            grammar = None
            if captured is not None:
                leaves = captured.grammar(kept, dropout)
                self.computation.mark("emission")
            else:
                grammar = self._grammar(kept, dropout)
                leaves = grammar.detached()
            # The engine averages over ranks: the gradient is that of (sum over all ranks) / global count.
            scale, of_rules = self.engine.world_size / count, None if captured is None else captured.of_rules
            nll, recomputed = accumulate_gradients(leaves, batches, scale, settings.inside, of_rules)
            self.computation.mark("inside")
            self.settle()  # the last update is long done by now, and its weights are still there
            if captured is not None:
                outcome = captured.update(nll, recomputed, self.learning_rate)
            else:
                assert grammar is not None
                through = backward_through(grammar, leaves)
                outcome = self.learner.update(through, nll, recomputed, self.learning_rate, self.computation.mark)
        position.step += 1
        self._unread = Unread(position.step, outcome, sentences, words)
        if not self.learner.reads_late:
            self.settle()
        self.throughput.steps += 1
        self.throughput.sentences += own[0]
        self.throughput.words += own[1]
        self.throughput.communication += self.learner.reduction.take()
        if self.computation.shards is not None:
            self.throughput.communication += self.computation.shards.waited()
        return position.skipped == skipped_before

    def settle(self) -> None:
        """Count what the last update came to, if that is not known yet, and take it into the moving average."""
        if self._unread is None:
            return
        unread, self._unread = self._unread, None
        update = unread.outcome()
        if update.applied and self.average is not None:
            self.average.update(self.learner.pieces())
        if not update.applied:
            self._skipped_step = unread.step
        self._count(update, unread.sentences, unread.words)

    def _draw(self) -> tuple[Kept | None, FeatureDropout]:
        """What this step leaves out: symbols, coordinates. The same on all processes."""
        model, seed, step = self.settings.model, self.settings.seed, self.position.step
        rate = state_dropout_rate(model, step, self.total_steps)
        kept = draw_kept(model.nonterminals, model.preterminals, rate, seed=seed, step=step)
        rates = model.embedding_dropout, model.feature_dropout, model.rule_dropout
        return kept, FeatureDropout.of_step(*rates, seed=seed, step=step)

    def _nonterminals(self, kept: Kept | None) -> int:
        """That take part in a step."""
        return self.settings.model.nonterminals if kept is None else len(kept.nonterminals)

    def _grammar(self, kept: Kept | None, dropout: FeatureDropout, model: Model | None = None) -> Grammar:
        """All processes take part, unless it is computed by the model itself instead of what the engine made of it."""
        rules = rules_type(self.settings.inside.precision, self._nonterminals(kept))
        return (model or self.learner.model)(kept, self.computation._replace(dropout=dropout, rules=rules))

    def _captured_networks(self, kept: Kept | None, dropout: FeatureDropout) -> CapturedNetworks | None:
        """None where the host launches the networks' kernels itself; so it does in the first steps of a size."""
        size = _size(kept)
        if size != self._size:
            self._size, self._alike, self._captured = size, 0, None
        self._alike += 1
        sizes_change = kept is not None and self.settings.model.state_dropout_until is not None
        if not self.captures or sizes_change or self._alike <= STEPS_BEFORE_CAPTURE:
            return None
        if self._nonterminals(kept) > LARGEST_N:
            return None
        if self._captured is None:
            torch.cuda.empty_cache()  # a capture cannot use memory that others have freed
            try:
                self._captured = CapturedNetworks(self.learner, self._grammar, kept, dropout, self.engine.device)
            except torch.OutOfMemoryError:
                warn("no memory for CUDA graphs of the networks: this run goes on without them (networks.cuda_graphs)")
                self.captures = False
        return self._captured

    def forget_captured(self) -> None:
        """Graphs of the networks hold the memory of the optimizer's state as it is now."""
        self._captured, self._size = None, None

    def stop_capturing(self) -> None:
        """From now on the host launches everything itself."""
        self.captures = False
        self.forget_captured()

    def settle_buckets(self) -> None:
        """DDP orders its buckets anew after the first backward pass, and from three ranks on sums depend on the order.

        A pass without effect comes first, so that a resumed run sums as an undisturbed one does: bit for bit.
        """
        if self.engine.is_deepspeed or self.engine.world_size == 1:
            return
        grammar = self._grammar(*self._draw())
        self.engine.accelerator.backward(backward_through(grammar, grammar.detached()))  # of gradients that are all 0
        self.learner.optimizer.zero_grad()

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
            position.skipped += 1
            position.skipped_in_a_row += 1
            window.skipped += 1
