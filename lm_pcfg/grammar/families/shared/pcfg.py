"""What the families of simple PCFGs have in common: symbols, rules [N, N+P] twice, state dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_inside.devices import chart_memory
from flash_inside.precision import chart_format
from lm_pcfg.grammar.dropout import Dropout, falls_in_levels, kept_of
from lm_pcfg.grammar.families.shared.family import BYTES, Family
from lm_pcfg.grammar.families.shared.sections import PCFGSection

#: Nonterminals of a step. More hide the launches, and the graphs' own memory (gradients of the rules, logits) would be
#: gigabytes.
LARGEST_CAPTURED_N = 8192


class PCFGFamily(Family):
    """A family whose modules make a `Grammar`."""

    has_trees = True
    sizes: tuple[str, ...] = ("nonterminals", "preterminals")
    shares_emission = True

    def fewest_symbols(self, model: PCFGSection) -> int:
        """Return 2 for a root over nonterminals, which cannot derive one word; else 1."""
        return 2 if model.root == "nonterminals" else 1

    def model_memory(self, model: PCFGSection, words: int, device: torch.device | str) -> float:
        """Count the weights, and on a CPU the rules of a step."""
        of_a_step = self.rules_of_a_step(model, device) if torch.device(device).type == "cpu" else 0
        return BYTES * (self.fewest_weights(model, words) + of_a_step)

    def rules_of_a_step(self, model: PCFGSection, device: torch.device | str) -> float:
        """Count the probabilities of left and right that state dropout leaves."""
        nonterminals = self.chart_nonterminals(model)
        return 2 * nonterminals * (nonterminals + model.preterminals) * self.share_of_a_step(model) ** 2

    def chart_memory(self, model: PCFGSection, lengths: Sequence[int], precision: str) -> float:
        return chart_memory(lengths, self._most_of_a_step(model), precision)

    def chart_type(self, model: PCFGSection, precision: str) -> torch.dtype:
        """Return bf16 for "bf16" if there are many nonterminals."""
        return chart_format(precision, self._most_of_a_step(model)).storage

    def _most_of_a_step(self, model: PCFGSection) -> int:
        """Return how many nonterminals state dropout leaves at most."""
        return kept_of(self.chart_nonterminals(model), 1.0 - self.share_of_a_step(model))

    def share_of_a_step(self, model: PCFGSection) -> float:
        """Return the share of the symbols that state dropout leaves at most: all, where it falls to 0."""
        return 1.0 - model.state_dropout if model.state_dropout_until is None else 1.0

    def chart_nonterminals(self, model: Any) -> int:
        """Return the nonterminals of the `Grammar`, which need not be those that the model is written in."""
        return model.nonterminals

    def fewest_weights(self, model: Any, words: int) -> int:
        """Return a lower bound on the number of weights: those of the largest tables."""
        raise NotImplementedError

    def feature_rate(self, model: Any) -> float:
        return 0.0

    def dropout(self, model: PCFGSection, *, seed: int, step: int, total_steps: int) -> Dropout:
        return Dropout.of_step(
            model, self.chart_nonterminals(model), self.feature_rate(model),
            seed=seed, step=step, total_steps=total_steps,
        )  # fmt: skip

    def can_capture(self, model: PCFGSection, dropout: Dropout) -> bool:
        every = self.chart_nonterminals(model)
        if dropout.kept is None:
            return every <= LARGEST_CAPTURED_N
        lasting = model.state_dropout_until is None or falls_in_levels(every)
        return lasting and len(dropout.kept.nonterminals) <= LARGEST_CAPTURED_N


def cut_rows(
    model: PCFGSection, tensors: dict[str, Tensor], nonterminals: Tensor, preterminals: Tensor, names: Sequence[str]
) -> tuple[PCFGSection, dict[str, Tensor]]:
    """Take the rows of these symbols out of tensors [N+P, ...], or [N, ...] where it has nonterminals alone."""
    device = next(iter(tensors.values())).device
    upper, lower = nonterminals.to(device), preterminals.to(device)
    both = torch.cat((upper, lower + model.nonterminals))
    rows = {name: upper if len(tensors[name]) == model.nonterminals else both for name in names if name in tensors}
    sizes = {"nonterminals": len(nonterminals), "preterminals": len(preterminals)}
    return model.model_copy(update=sizes), tensors | {name: tensors[name][some] for name, some in rows.items()}
