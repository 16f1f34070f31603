"""One optimizer step after another: data, model, optimizer and moving average, and what is counted of them.

Folders, metrics, evaluations and stops are the loop's (loop.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from flash_inside import Statistics, rules_type
from flash_inside.softmax import product_precision
from lm_pcfg.corpus.batches import Batch
from lm_pcfg.corpus.vocabularies import AnyVocabulary
from lm_pcfg.grammar.boundary import Grammar, backward_through
from lm_pcfg.grammar.build import build_model
from lm_pcfg.grammar.feature_dropout import FeatureDropout
from lm_pcfg.grammar.state_dropout import draw_kept
from lm_pcfg.settings import Settings
from lm_pcfg.training import data
from lm_pcfg.training.computation import training_computation
from lm_pcfg.training.engine import Engine
from lm_pcfg.training.learner import Update, make_learner
from lm_pcfg.training.optimization import MovingAverage, learning_rate_factor, state_dropout_rate
from lm_pcfg.training.position import Position
from lm_pcfg.training.throughput import Throughput


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
        model = self._build_model().to(engine.device)
        self.skeleton = self._build_model().to("meta")  # names, shapes and forward, without memory
        self.learner = make_learner(model, settings.optimizer, engine)
        self.computation = training_computation(settings, engine)
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

    def _build_model(self) -> torch.nn.Module:
        return build_model(self.settings.model, len(self.corpora.vocabulary), self.settings.seed)

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

        nll = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        statistics = Statistics()
        with product_precision(self.computation.precision):
            grammar = self._grammar()
            self.settle()  # while the networks are computed
            leaves = grammar.detached()
            for batch in batches:
                if batch.n_sentences:
                    log_z = leaves.log_likelihood(
                        torch.from_numpy(batch.words), batch.lengths, precision=settings.inside.precision,
                        backend=settings.inside.backend, statistics=statistics,
                    )  # fmt: skip
                    # The engine averages over ranks: the gradient is that of (sum over all ranks) / global count.
                    (-log_z.sum() * (self.engine.world_size / count)).backward()
                    nll -= log_z.detach().double().sum()
            self.computation.mark("inside")
            through = backward_through(grammar, leaves)
            outcome = self.learner.update(
                through, nll, float(statistics.recomputed), self.learning_rate, self.computation.mark
            )
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

    def _grammar(self) -> Grammar:
        """Of this step, with its dropout; all processes take part."""
        model, seed, step = self.settings.model, self.settings.seed, self.position.step
        rate = state_dropout_rate(model, step, self.total_steps)
        kept = draw_kept(model.nonterminals, model.preterminals, rate, seed=seed, step=step)
        dropout = FeatureDropout(model.embedding_dropout, model.feature_dropout, seed, step)
        nonterminals = model.nonterminals if kept is None else len(kept.nonterminals)
        rules = rules_type(self.settings.inside.precision, nonterminals)
        return self.learner.model(kept, self.computation._replace(dropout=dropout, rules=rules))

    def settle_buckets(self) -> None:
        """DDP orders its buckets anew after the first backward pass, and from three ranks on sums depend on the order.

        A pass without effect comes first, so that a resumed run sums as an undisturbed one does: bit for bit.
        """
        if self.engine.is_deepspeed or self.engine.world_size == 1:
            return
        grammar = self._grammar()
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
