"""Probabilistic context-free grammars as language models.

    import lm_pcfg

    model = lm_pcfg.load("runs/tiny")
    model.score(["the cat sat"])      # natural log-probabilities
    model.parse(["the cat sat"])      # trees

Importing this package imports nothing heavy; `load` does.
"""

from __future__ import annotations

TYPE_CHECKING = False  # without typing: a Ctrl-C while that is imported could not be answered (__main__.py)
if TYPE_CHECKING:
    from os import PathLike
    from typing import Literal

    from lm_pcfg.inference.model import Model

__all__ = ["load"]


def load(
    *paths: str | PathLike[str], weights: Literal["auto", "ema", "raw"] = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto", prepare_cpu: bool = False,
) -> Model:  # fmt: skip
    """Load a trained model from a run folder (its best checkpoint), a checkpoint, an exported folder or the hub.

    paths        hf://owner/name, or owner/name where no folder `owner` is here: a model on the Hugging Face hub, of
                 which only its tensors, settings and vocabulary are read, never code; several: their even mixture in
                 scores, next words and samples, their consensus in trees; none: the newest run under runs/
    weights      averaged weights where there are any (auto, ema), or those of the last step (raw)
    device       where to compute; auto: a GPU if there is one
    prepare_cpu  set the process's number of threads and make it flush denormal numbers to zero, as the commands do: a
                 CPU is much faster then. False: nothing of the process is changed.

    Raises `lm_pcfg.errors.UserError` with a line for the user if it cannot be loaded.
    """
    from lm_pcfg.inference.model import load_model

    return load_model(paths, weights=weights, device=device, prepare=prepare_cpu)
