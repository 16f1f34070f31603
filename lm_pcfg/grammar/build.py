"""From settings to a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flash_inside.memory import check_memory
from lm_pcfg.grammar.simple_pcfg import SimplePCFG
from lm_pcfg.grammar.spelling import Spelling
from lm_pcfg.grammar.table_pcfg import TablePCFG
from lm_pcfg.settings import ModelSection

BYTES = 4  # of a number in fp32


def check_that_it_fits(model: ModelSection, words: int, device: torch.device | str) -> None:
    """MemoryError: the weights, or on a CPU the rules of a step as well, are more than this machine's memory.

    A lower bound, so that nothing is refused that would fit. To be asked before a model is built: what promises memory
    that is not there is killed without a word.
    """
    symbols = model.nonterminals + model.preterminals
    rules = 2 * model.nonterminals * symbols
    weights = symbols * model.dimension + words * (model.word_dimension or model.dimension)
    if model.parameterization == "tables":
        weights = rules
    of_a_step = rules * (1.0 - model.state_dropout) ** 2 if torch.device(device).type == "cpu" else 0
    check_memory(BYTES * (weights + of_a_step))


def build_model(model: ModelSection, words: Sequence[str], seed: int, word_vectors: Tensor | None = None) -> nn.Module:
    """words: the vocabulary. The weights are a function of it, the settings, the seed and the vectors.

    word_vectors: for `init: contexts`, see `contexts.context_vectors`; None where other weights will be put in.
    """
    init = model.init
    if model.parameterization == "tables":
        return TablePCFG(
            nonterminals=model.nonterminals,
            preterminals=model.preterminals,
            words=len(words),
            root_over=model.root,
            symbol_deviation=1.0 if init.symbols is None else init.symbols,
            word_deviation=1.0 if init.words is None else init.words,
            seed=seed,
        )
    return SimplePCFG(
        nonterminals=model.nonterminals,
        preterminals=model.preterminals,
        words=len(words),
        dimension=model.dimension,
        spelling=Spelling(words, model.word_dimension or model.dimension, model.spelling) if model.spelling else None,
        word_dimension=model.word_dimension,
        emission_temperature=model.emission_temperature,
        emission_smoothing=model.emission_smoothing,
        word_bias=model.word_bias == "zipf",
        rotated_children=model.children == "rotated",
        parameterization=model.parameterization,
        root_over=model.root,
        init="xavier_normal" if init.symbols is not None else init.scheme,
        symbol_deviation=init.symbols,
        word_deviation=init.words,
        word_vectors=word_vectors,
        seed=seed,
    )
