"""Tables: a simple PCFG without networks, whose every probability has a free logit of its own. For small grammars."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lm_pcfg.grammar.computation import EXACT, Computation
from lm_pcfg.grammar.contexts import EncodedText
from lm_pcfg.grammar.emission import Emission
from lm_pcfg.grammar.families.shared.pcfg import PCFGFamily, cut_rows
from lm_pcfg.grammar.families.shared.sections import PCFGSection, TablesSection
from lm_pcfg.grammar.grammar import Grammar


class TablePCFG(nn.Module):
    """Tables of logits -> a `Grammar`. The classical parameterisation: nothing is shared between symbols.

    root [N] or [N+P], left and right [N, N+P], emission [P, V]; all begin normal with the given standard deviations.
    """

    def __init__(
        self,
        *,
        nonterminals: int,
        preterminals: int,
        words: int,
        root_over: str = "all",
        symbol_deviation: float = 1.0,
        word_deviation: float = 1.0,
        seed: int = 0,
    ):
        super().__init__()
        self.nonterminals = nonterminals
        symbols = nonterminals + preterminals
        generator = torch.Generator().manual_seed(seed)

        def table(deviation: float, *shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * deviation)

        self.root = table(symbol_deviation, symbols if root_over == "all" else nonterminals)
        self.left = table(symbol_deviation, nonterminals, symbols)
        self.right = table(symbol_deviation, nonterminals, symbols)
        self.emission = table(word_deviation, preterminals, words)

    def forward(self, computation: Computation = EXACT) -> Grammar:
        """With state dropout, a grammar over the kept symbols, renumbered in their order.

        Rules are of the tables' type.
        """
        tables: list[Tensor] = [self.root, self.left, self.right, self.emission]
        root, left, right, emission = tables
        if computation.dropout.kept is not None:
            kept = computation.dropout.kept.to(emission.device)
            columns = kept.columns(self.nonterminals)
            root = root[columns if len(root) > self.nonterminals else kept.nonterminals]
            left, right = (side[kept.nonterminals][:, columns] for side in (left, right))
            emission = emission[kept.preterminals]
        # As features . embeddings: one unit vector a preterminal, and the columns of the table.
        units = torch.eye(emission.shape[0], dtype=emission.dtype, device=emission.device)
        rules = root.double().softmax(0), left.softmax(1), right.softmax(1)
        return Grammar(*rules, Emission.of(units, emission.T, computation.precision, computation.shards))


class Tables(PCFGFamily):
    name, section = "tables", TablesSection

    def build(
        self, model: TablesSection, words: Sequence[str], seed: int,
        text: EncodedText | None = None
    ) -> TablePCFG:  # fmt: skip
        init = model.init
        return TablePCFG(
            nonterminals=model.nonterminals,
            preterminals=model.preterminals,
            words=len(words),
            root_over=model.root,
            symbol_deviation=1.0 if init.symbols is None else init.symbols,
            word_deviation=1.0 if init.words is None else init.words,
            seed=seed,
        )

    def cut(
        self, model: TablesSection, tensors: dict[str, Tensor], nonterminals: Tensor, preterminals: Tensor
    ) -> tuple[PCFGSection, dict[str, Tensor]]:
        section, rows = cut_rows(model, tensors, nonterminals, preterminals, ["root", "left", "right"])
        columns = torch.cat((nonterminals, preterminals + model.nonterminals)).to(tensors["left"].device)
        sides = {name: rows[name][:, columns] for name in ("left", "right")}
        return section, {**rows, **sides, "emission": tensors["emission"][preterminals.to(columns.device)]}

    def fewest_weights(self, model: TablesSection, words: int) -> int:
        return 2 * model.nonterminals * (model.nonterminals + model.preterminals)


FAMILY = Tables()
