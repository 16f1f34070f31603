"""The settings of the families here, apart from them: a config is read without torch, which takes seconds to import."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, PlainValidator

from lm_pcfg.settings import Count, Fraction, ModelSection, check, setting


@dataclass(frozen=True)
class Init:
    """How parameters start: `xavier_normal`, `xavier_uniform`, or, with standard deviations of the embeddings,
    `normal(symbols, words)` or `contexts(symbols, words)`, where words begin as their neighbours in the text tell."""

    scheme: Literal["xavier_normal", "xavier_uniform", "normal", "contexts"] = "xavier_normal"
    symbols: float | None = None  # standard deviation of symbol embeddings, for `normal` and `contexts`
    words: float | None = None  # standard deviation of word embeddings

    @classmethod
    def parse(cls, value: object) -> Init:
        if isinstance(value, Init):
            return value
        text = value.strip() if isinstance(value, str) and len(value) < 100 else ""  # more digits than any number needs
        if text in ("xavier_normal", "xavier_uniform"):
            return cls(text)  # type: ignore[arg-type]
        number = r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*"
        if match := re.fullmatch(rf"(normal|contexts)\s*\({number},{number}\)", text):
            symbols, words = float(match[2]), float(match[3])
            if 0 < min(symbols, words) <= max(symbols, words) < math.inf:
                return cls(match[1], symbols, words)  # type: ignore[arg-type]
        raise ValueError(
            "should be xavier_normal, xavier_uniform, normal(symbols, words) such as normal(0.15, 0.1), "
            "or contexts(symbols, words) in sn_pcfg, rank_pcfg and tn_pcfg"
        )

    def __str__(self) -> str:
        return self.scheme if self.symbols is None else f"{self.scheme}({self.symbols}, {self.words})"


InitField = Annotated[Init, PlainValidator(Init.parse), PlainSerializer(str)]


class PCFGSection(ModelSection):
    """What simple PCFGs have, however their probabilities are parameterised."""

    nonterminals: Count = setting(..., "number of nonterminal symbols")
    preterminals: Count = setting(None, "number of preterminal symbols; null: twice the nonterminals")
    root: Literal["all", "nonterminals"] = setting("all", "start symbol -> any symbol, or nonterminals as in the paper")
    state_dropout: Fraction = setting(
        0.0, "fraction of the symbols left out at each step (of 256 and more, such that a multiple of 16 is left)"
    )
    state_dropout_until: float | None = setting(
        None,
        "fraction of the steps over which state dropout falls to 0, linearly (with 256 nonterminals and more in "
        "32nds of the symbols); null: it stays",
        gt=0,
        le=1,
    )

    @check(mode="before")
    @classmethod
    def _preterminals(cls, data: Any) -> Any:
        """Resolved at once, so that the saved settings say what was used."""
        if isinstance(data, dict) and data.get("preterminals") is None:
            given = data.get("nonterminals")  # if that is wrong, it will be the only thing reported
            return data | {"preterminals": 2 * given if type(given) is int and given > 0 else 1}
        return data


class SNPCFGSection(PCFGSection):
    dimension: Count = setting(512, "dimension of the embeddings and networks")
    parameterization: Literal["paper", "released", "bounded"] = setting(
        "paper",
        "networks of the paper, of its released code, or these with bounds on what a residual layer adds, so that "
        "features cannot multiply from layer to layer",
    )
    children: Literal["plain", "rotated"] = setting(
        "plain",
        "rotated: children have embeddings turned by a learnt matrix, so that no symbol begins as its own child",
    )
    init: InitField = setting(
        Init(),
        "xavier_normal, xavier_uniform, or standard deviations of the embeddings: normal(symbols, words), or "
        "contexts(symbols, words), where words begin as their neighbours in the training text tell",
    )
    emission_temperature: float = setting(1.0, "divides the logits of words given a preterminal", gt=0)
    feature_dropout: Fraction = setting(
        0.0, "fraction of the coordinates dropped at each step just before the softmax over words"
    )


class RankPCFGSection(PCFGSection):
    rank: Count = setting(None, "number of rank symbols, which charts are over; null: as many as the nonterminals")
    dimension: Count = setting(512, "dimension of the embeddings and networks")
    parameterization: Literal["paper", "bounded"] = setting(
        "paper", "networks of the paper, or these with bounds on what a residual layer of the emission adds"
    )
    init: InitField = setting(
        Init(),
        "xavier_normal, xavier_uniform, or standard deviations of the embeddings: normal(symbols, words), or "
        "contexts(symbols, words), where words begin as their neighbours in the training text tell",
    )

    @check(mode="before")
    @classmethod
    def _rank(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("rank") is None:
            given = data.get("nonterminals")
            return data | {"rank": given if type(given) is int and given > 0 else 1}
        return data


class TNPCFGSection(RankPCFGSection):
    dimension: Count = setting(256, "dimension of the embeddings and networks")


class NPCFGSection(PCFGSection):
    dimension: Count = setting(256, "dimension of the embeddings and networks")
    init: InitField = setting(
        Init("xavier_uniform"), "xavier_normal, xavier_uniform, or standard deviations: normal(symbols, words)"
    )

    @check(mode="after")
    def _tables(self) -> NPCFGSection:
        if self.init.scheme == "contexts":
            raise ValueError("init: contexts is of sn_pcfg, rank_pcfg and tn_pcfg; use normal(symbols, words)")
        return self


class CPCFGSection(NPCFGSection):
    """What compound PCFGs have."""

    latent: Count = setting(64, "dimension of the latent vector of a sentence")
    encoder: Count = setting(512, "dimension of the word embeddings and LSTM states that infer it from the sentence")
    kl_warmup_steps: int = setting(0, "steps in which the weight of the KL term rises to 1; 0: it is always 1", ge=0)


class SCPCFGSection(CPCFGSection):
    dimension: Count = setting(512, "dimension of the embeddings and networks")
    init: InitField = setting(Init(), "xavier_normal, xavier_uniform, or standard deviations: normal(symbols, words)")


class TablesSection(PCFGSection):
    init: InitField = setting(Init(), "normal(symbols, words): standard deviations of the logits; by default 1 and 1")

    @check(mode="after")
    def _has_no_embeddings(self) -> TablesSection:
        if self.init.scheme == "contexts":
            raise ValueError("init: contexts needs word embeddings; use family sn_pcfg")
        return self


class HMMSection(ModelSection):
    """What hidden Markov models have, however their transitions are parameterised."""

    states: Count = setting(..., "number of hidden states")
    dimension: Count = setting(256, "dimension of the embeddings of states and words")
    init: InitField = setting(
        Init("normal", 0.25, 0.25), "xavier_normal, xavier_uniform, or standard deviations: normal(states, words)"
    )
    state_dropout: Fraction = setting(
        0.0, "fraction of the states left out at each step (of 256 and more, such that a multiple of 16 is left)"
    )

    @check(mode="after")
    def _ends_and_tables(self) -> HMMSection:
        if self.eos != "explicit":
            raise ValueError("eos: implicit is of grammars; a hidden Markov model ends in a word, so use eos: explicit")
        if self.init.scheme == "contexts":
            raise ValueError("init: contexts is of sn_pcfg, rank_pcfg and tn_pcfg; use normal(states, words)")
        return self


class LHMMSection(HMMSection):
    features: Count = setting(1024, "features whose products are the transitions")
    feature_dropout: Fraction = setting(0.0, "fraction of the features of transitions left out at each step")


class RankHMMSection(HMMSection):
    rank: Count = setting(4096, "values of the rank variable between two states, which emits the words")


#: Families whose settings are here; those of other families are in their files.
SECTIONS: dict[str, type[ModelSection]] = {
    "c_pcfg": CPCFGSection,
    "n_pcfg": NPCFGSection,
    "rank_pcfg": RankPCFGSection,
    "sc_pcfg": SCPCFGSection,
    "sn_pcfg": SNPCFGSection,
    "tables": TablesSection,
    "tn_pcfg": TNPCFGSection,
    "nhmm": HMMSection,
    "lhmm": LHMMSection,
    "rank_hmm": RankHMMSection,
}
