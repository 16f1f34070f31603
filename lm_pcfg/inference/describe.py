"""What `lm_pcfg info` tells about a checkpoint."""

from __future__ import annotations

from typing import Any

from lm_pcfg.grammar import analysis
from lm_pcfg.grammar.likelihood import perplexity
from lm_pcfg.inference.model import TrainedGrammar


def describe(trained: TrainedGrammar) -> dict[str, Any]:
    settings, state, grammar = trained.settings, trained.state, trained.grammar
    radius = analysis.spectral_radius(grammar)
    best = state.get("best_nll")
    return {
        "checkpoint": str(trained.checkpoint),
        "weights": trained.weights,
        "step": state["step"],
        "epoch": state["epoch"],
        "best_validation_ppl": perplexity(best) if best is not None else None,
        "best_step": state.get("best_step"),
        "nonterminals": settings.model.nonterminals,
        "preterminals": settings.model.preterminals,
        "vocabulary": len(trained.vocabulary),
        "vocabulary_hash": trained.vocabulary.hash,
        "parameters": trained.parameters,
        "parameterization": settings.model.parameterization,
        "root": settings.model.root,
        "eos": settings.model.eos,
        # Below 1 every derivation ends and the probabilities of all strings sum to 1.
        "spectral_radius": radius,
        "subcritical": radius < 1.0,
        "mass_of_finite_strings": analysis.finite_mass(grammar),
        "expected_length": analysis.expected_length(grammar),
        **{name: value for name, value in analysis.summary(grammar).items() if name != "grammar/spectral_radius"},
    }
