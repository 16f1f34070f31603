"""Where the time of the steps goes, on every process: data, communication, and the rest, which is computing.

Communication is time in which this process does nothing else: small collectives, and the part of the gradients'
reduction that comes after the last gradient, which the backward pass does not hide. A process that waits for a slow one
has much of it, and the slow one has much computing: the straggler ratio is the largest computing time over the mean.
What ZeRO gathers inside its own calls counts as computing; under ZeRO 3 so does the reduction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from lm_pcfg.distributed.collectives import Collectives, seconds_between, timestamp


class ReductionClock:
    """Times from the last gradient to the end of the backward pass. On a GPU it uses events and waits for none."""

    def __init__(self, parameters: Iterable[torch.Tensor], processes: Collectives):
        self._device = processes.device
        self._ready: Any = None
        self._done: Any = None
        parameters = list(parameters)
        if processes.world_size > 1 and parameters:
            register_multi_grad_hook(parameters, self._gradients_ready)

    def _gradients_ready(self, gradients: Any) -> None:
        self._ready = timestamp(self._device)

    def backward_done(self) -> None:
        if self._ready is not None:
            self._done = timestamp(self._device)

    def take_seconds(self) -> float:
        """Return the seconds of this step; call it when the device has finished the step."""
        ready, self._ready = self._ready, None
        return 0.0 if ready is None else seconds_between(ready, self._done)


@dataclass
class Throughput:
    """Sums since the last line of metrics, of this process; they are not kept in checkpoints."""

    steps: int = 0
    words: float = 0.0
    sentences: float = 0.0
    data: float = 0.0
    communication: float = 0.0
    total: float = 0.0

    def metrics(self, processes: Collectives) -> dict[str, Any]:
        """Return the metrics; all processes take part, and lists are in the order of ranks."""
        seconds = self.total
        if not self.steps or seconds <= 0:
            return {}
        compute = self.total - self.data - self.communication
        ranks = processes.all_gather((self.words, self.sentences, self.data, compute, self.communication))
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
