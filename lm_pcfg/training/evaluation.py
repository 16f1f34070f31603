"""Score the validation text, and gold trees if there are any, with the current weights.

Processes share the work; the result is the same, bit for bit.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from flash_inside import Statistics
from lm_pcfg.corpus.batches import BatchOptions, plan_batches
from lm_pcfg.corpus.opening import Corpora
from lm_pcfg.corpus.span_f1 import labelled_spans, sentence_f1
from lm_pcfg.corpus.stream import BatchStream
from lm_pcfg.corpus.treebank import Tree
from lm_pcfg.corpus.unknown import Unknown
from lm_pcfg.distributed.collectives import Collectives
from lm_pcfg.grammar.computation import EXACT
from lm_pcfg.grammar.families import family_of
from lm_pcfg.grammar.families.shared.family import Distribution
from lm_pcfg.grammar.likelihood import CorpusScore, corpus_score, sentence_log_probabilities
from lm_pcfg.grammar.parsing import Parser, mbr_trees
from lm_pcfg.settings import EvaluationSection, Settings
from lm_pcfg.training.position import figure

LABELS = 5  # the most frequent ones, whose recall is logged


@dataclass(frozen=True)
class TreeScore:
    """How well MBR trees agree with gold trees, in percent."""

    s_f1: float
    recall: dict[str, float]  # of the most frequent labels

    def metrics(self) -> dict[str, float]:
        # MLflow refuses other letters than these in a name.
        names = {label: re.sub(r"[^A-Za-z0-9_.-]", "_", label) for label in self.recall}
        return {"valid/s_f1": self.s_f1} | {f"valid/recall_{names[k]}": value for k, value in self.recall.items()}


@dataclass(frozen=True)
class Evaluation:
    score: CorpusScore
    recomputed: float
    grammar: dict[str, float]  # entropies and the like
    seconds: float
    unknown: Unknown
    trees: TreeScore | None = None
    warning: str | None = None
    is_bound: bool = False  # whether its perplexity is an upper bound

    @property
    def s_f1(self) -> float | None:
        return self.trees.s_f1 if self.trees else None

    def metrics(self) -> dict[str, float]:
        return {
            "valid/ppl": self.score.perplexity,
            "valid/ppl_words": self.score.words_perplexity,
            "valid/nll": self.score.nll,
            "valid/tokens": self.score.tokens,
            "valid/impossible": self.score.impossible,
            **({} if self.unknown.share is None else {"valid/unknown_share": self.unknown.share}),
            "valid/recomputed": self.recomputed,
            "valid/seconds": round(self.seconds, 3),
            **(self.trees.metrics() if self.trees else {}),
            **self.grammar,
        }

    def describe(self) -> str:
        impossible = f", {self.score.impossible} sentences with probability 0" if self.score.impossible else ""
        trees = f", S-F1 {self.s_f1:.2f}" if self.s_f1 is not None else ""
        perplexity = f"{'at most ' if self.is_bound else ''}{figure(self.score.perplexity)}"
        return f"validation perplexity {perplexity}, {self.unknown.brief}{impossible}{trees}"


def is_due(settings: EvaluationSection, step: int, stream: BatchStream, epoch: int, batch_before: int) -> bool:
    """Return whether to evaluate after this step, which began at batch `batch_before` of `epoch`."""
    if settings.every_steps and step % settings.every_steps == 0:
        return True
    if settings.every_epochs is None:
        return False
    batches = stream.batches_per_epoch(epoch)
    after = stream.state()
    done = batches if after["epoch"] > epoch else after["batch"]
    passed = [math.floor((epoch + part / batches) / settings.every_epochs + 1e-9) for part in (batch_before, done)]
    return passed[1] > passed[0]


def measured_on(corpora: Corpora, settings: Settings) -> str | None:
    """Return a fingerprint of the text, and of trees, that decide which checkpoint is the best; None: there is none.

    Figures of other lines cannot be compared with those so far.
    """
    if corpora.valid is None:
        return None
    if settings.evaluation.select != "trees":
        return corpora.valid.fingerprint
    return hashlib.sha256(f"{corpora.valid.fingerprint} {corpora.trees}".encode()).hexdigest()


class _Interrupted(Exception):
    pass


def evaluate(
    skeleton: nn.Module,
    weights: dict[str, Tensor],
    corpora: Corpora,
    settings: Settings,
    processes: Collectives,
    stop_asked: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Put `weights` (raw, averaged or gathered) into `skeleton`, a module on `meta`, and score the texts of `corpora`.

    Return None if a process was asked to stop meanwhile: a scheduler does not wait for the end of a long text.
    """
    began = time.perf_counter()
    statistics = Statistics()
    valid, trees = corpora.valid, corpora.trees or []
    assert valid is not None

    def check(lines: int, detail: str = "", /) -> None:
        if stop_asked():
            raise _Interrupted

    labels = frequent_labels(trees)
    own, own_trees, interrupted = np.zeros(len(valid)), np.zeros(len(trees) + len(labels)), False
    with torch.no_grad():
        grammar = functional_call(skeleton, weights, (EXACT,))
        figures: dict[str, Distribution] = getattr(grammar, "sentence_figures", {})
        own_figures = {name: np.zeros(len(valid)) for name in figures}
        try:
            own = sentence_log_probabilities(
                grammar, valid, batch_cost=settings.evaluation.batch_cost, precision=settings.evaluation.precision,
                backend=settings.inside.backend, statistics=statistics, on_batch=check,
                rank=processes.rank, world_size=processes.world_size,
            )  # fmt: skip
            for name, figure in figures.items():
                own_figures[name] = sentence_log_probabilities(
                    figure, valid, batch_cost=settings.evaluation.batch_cost, on_batch=check,
                    rank=processes.rank, world_size=processes.world_size,
                )  # fmt: skip
            if trees:
                parser = Parser(grammar, corpora.vocabulary, settings.evaluation.precision, settings.inside.backend)
                own_trees = compared_trees(
                    parser, trees, labels, batch_cost=settings.evaluation.batch_cost, statistics=statistics,
                    on_batch=check,
                    rank=processes.rank, world_size=processes.world_size,
                )  # fmt: skip
        except _Interrupted:
            interrupted = True
        recomputed, interruptions = processes.sums([float(statistics.recomputed), float(interrupted)])
        if interruptions:
            return None
        properties = grammar.describe()
    for name, own_figure in own_figures.items():
        values = processes.all_reduce(torch.from_numpy(own_figure).to(processes.device)).cpu().numpy()
        properties[f"valid/{name}"] = math.fsum(values.tolist()) / max(1, len(values))  # a sentence
    log_p = processes.all_reduce(torch.from_numpy(own).to(processes.device)).cpu().numpy()
    tree_score = None
    if trees:
        sums = processes.all_reduce(torch.from_numpy(own_trees).to(processes.device)).tolist()
        found = dict(zip(labels, sums[len(trees) :], strict=True))
        recall = {label: 100 * found[label] / count for label, count in labels.items()}
        tree_score = TreeScore(100 * math.fsum(sums[: len(trees)]) / len(trees), recall)
    seconds, warning = time.perf_counter() - began, getattr(grammar, "warning", None)
    score = corpus_score(valid, log_p)
    is_bound = family_of(settings.model).scores_are_bounds
    return Evaluation(score, recomputed, properties, seconds, valid.unknown_words, tree_score, warning, is_bound)


# ---- trees ----------------------------------------------------------------------------------------------------------


def frequent_labels(trees: Sequence[Tree]) -> dict[str, int]:
    """Return the labels whose recall is logged, and how many gold spans have each."""
    return dict(Counter(label for tree in trees for _, label in labelled_spans(tree)).most_common(LABELS))


def compared_trees(
    parser: Parser, trees: Sequence[Tree], labels: Iterable[str], *, batch_cost: int,
    statistics: Statistics | None = None, on_batch: Callable[[int], None] = lambda lines: None, rank: int = 0,
    world_size: int = 1,
) -> np.ndarray:  # fmt: skip
    """Return the F1 of the MBR tree of every sentence, and behind them how many gold spans of each label it has.

    fp64 [trees + labels]. Each rank leaves 0 where others compute: the sum over ranks is exact.
    """
    parser.check()
    f1, found = np.zeros(len(trees)), dict.fromkeys(labels, 0)
    lines = [" ".join(tree.words) for tree in trees]
    lengths = np.array([len(ids) for ids in parser.vocabulary.tokenise(lines)])
    for indices in plan_batches(lengths, BatchOptions(by="cost", cost=batch_cost))[rank::world_size]:
        some = [lines[index] for index in indices]
        for index, tree in zip(indices, mbr_trees(some, parser.posteriors(some, statistics)), strict=True):
            spans = {(first, end) for first, end, _ in tree.nodes}
            f1[index] = sentence_f1(trees[index], spans)
            for span, label in labelled_spans(trees[index]):
                if label in found:
                    found[label] += span in spans
        on_batch(len(indices))
    return np.concatenate((f1, np.array(list(found.values()), dtype=np.float64)))
