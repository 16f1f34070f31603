"""Where the time of the steps goes, on every process: data, communication, and the rest, which is computing.

Communication is time in which this process does nothing else: small collectives, and of the gradients' reduction what
the backward pass does not hide, from the last gradient on. So a process that waits for a slow one has much of it, and
the slow one has much computing: the straggler ratio is the largest computing time over the mean.
What ZeRO gathers inside its own calls counts as computing; under ZeRO 3 that includes the reduction.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from lm_pcfg.training.collectives import Collectives


class ReductionClock:
    """Time from the last gradient to the end of the backward pass. On a GPU by events, which nobody waits for."""

    def __init__(self, parameters: Iterable[torch.Tensor], processes: Collectives):
        self._on_gpu = processes.device.type == "cuda"
        self._ready: Any = None
        self._done: Any = None
        parameters = list(parameters)
        if processes.world_size > 1 and parameters:
            register_multi_grad_hook(parameters, self._gradients_ready)

    def _gradients_ready(self, gradients: Any) -> None:
        self._ready = self._now()

    def backward_done(self) -> None:
        self._done = self._now()

    def take(self) -> float:
        """Seconds of this step; call it when the device has finished the step."""
        ready, done, self._ready = self._ready, self._done, None
        if ready is None:
            return 0.0
        return ready.elapsed_time(done) / 1000 if self._on_gpu else done - ready

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass
class Throughput:
    """Sums since the last line of metrics, of this process; they are not kept in checkpoints."""

    steps: int = 0
    words: float = 0.0
    sentences: float = 0.0
    data: float = 0.0
    communication: float = 0.0
    total: float = 0.0

    def metrics(self, seconds: float, processes: Collectives) -> dict[str, Any]:
        """seconds: since the last line. All processes take part; lists are in the order of ranks."""
        if not self.steps or seconds <= 0:
            return {}
        compute = self.total - self.data - self.communication
        ranks = processes.gather((self.words, self.sentences, self.data, compute, self.communication))
        words, sentences, data, computing, communication = (list(column) for column in zip(*ranks, strict=True))
        steps, mean_compute = self.steps, sum(computing) / len(ranks)
        metrics: dict[str, Any] = {
            "train/words_per_second": sum(words) / seconds,
            "train/sentences_per_second": sum(sentences) / seconds,
            "time/data": sum(data) / len(ranks) / steps,
            "time/compute": mean_compute / steps,
            "time/communication": sum(communication) / len(ranks) / steps,
            "time/straggler_ratio": max(computing) / mean_compute if mean_compute > 0 else 1.0,
        }
        if len(ranks) > 1:
            metrics |= {
                "ranks/words_per_second": [value / seconds for value in words],
                "ranks/sentences_per_second": [value / seconds for value in sentences],
                "ranks/data": [value / steps for value in data],
                "ranks/compute": [value / steps for value in computing],
                "ranks/communication": [value / steps for value in communication],
            }
        return metrics
