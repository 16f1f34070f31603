"""Where a run stands: what a checkpoint keeps besides tensors and the place in the data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Window:
    """Sums since the last line of metrics."""

    steps: int = 0
    nll: float = 0.0
    sentences: float = 0.0
    words: float = 0.0
    gradient_norm: float = 0.0
    skipped: int = 0
    recomputed: float = 0.0


@dataclass
class Position:
    """All that a checkpoint keeps besides tensors and the place in the data."""

    step: int = 0
    best_nll: float | None = None  # per token, of the validation text
    best_step: int | None = None
    evaluated_step: int | None = None  # the last step with an evaluation
    evaluations_since_best: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    ema_updates: int = 0
    window: Window = field(default_factory=Window)

    @classmethod
    def of(cls, state: dict[str, Any]) -> Position:
        names = cls.__dataclass_fields__
        return cls(**{name: state[name] for name in names if name != "window"}, window=Window(**state["window"]))
