"""Several processes that train one model: engine, collectives, learners, launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from lm_pcfg.distributed.engine import Engine
    from lm_pcfg.distributed.learner import Learner
    from lm_pcfg.settings import OptimizerSection


def make_learner(model: nn.Module, settings: OptimizerSection, engine: Engine) -> Learner:
    """The learner of this engine; imported here, since DeepSpeed takes seconds and the launcher needs none of it."""
    if engine.is_deepspeed:
        from lm_pcfg.distributed.zero import ZeroLearner

        return ZeroLearner(model, settings, engine)
    from lm_pcfg.distributed.learner import Learner

    return Learner(model, settings, engine)
