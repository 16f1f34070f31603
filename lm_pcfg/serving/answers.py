"""What is asked of a model, and what it answers: the shapes of requests, and one function for each kind.

A number that is not finite is null in JSON: the log-probability of a line that the grammar cannot generate.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lm_pcfg.corpus.treebank import Tree, bracketed
from lm_pcfg.corpus.unknown import literals
from lm_pcfg.errors import UserError
from lm_pcfg.inference.lines import unit_of
from lm_pcfg.inference.model import Model
from lm_pcfg.inference.sample import Drawn
from lm_pcfg.pages import model_parts

MOST_LINES = 64  # of a request
MOST_CHARACTERS = 10_000  # of a line
MOST_SAMPLES = 100
MOST_LISTED = 100  # likeliest words
DRAWS_OF_TREES = 200  # from which alternatives are counted
MOST_ALTERNATIVES = 4

Text = Annotated[str, Field(max_length=MOST_CHARACTERS)]


class Request(BaseModel):
    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, asked: Any) -> Any:
        """Refuse unknown entries by one message, not by one each: there may be a hundred thousand."""
        if isinstance(asked, dict) and (unknown := [key for key in asked if key not in cls.model_fields]):
            shown = ", ".join(key[:40] for key in unknown[:3]).encode("utf-8", "replace").decode()
            raise ValueError(f"unknown: {shown}; known: {', '.join(cls.model_fields)}")
        return asked


class LinesRequest(Request):
    lines: Annotated[list[Text], Field(min_length=1, max_length=MOST_LINES, examples=[["the cat sat"]])]


class ParseRequest(LinesRequest):
    method: Literal["mbr", "viterbi"] = "mbr"


class SampleRequest(Request):
    number: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    prefix: Annotated[Text, Field(description="what every sentence begins with")] = ""


class NextRequest(Request):
    prefix: Annotated[Text, Field(examples=["the company said"])]
    most: Annotated[int, Field(ge=1, le=MOST_LISTED)] = 10


class AnalyseRequest(Request):
    line: Annotated[Text, Field(min_length=1, examples=["the cat sat"])]


class Answers:
    """A model and the length of line it may be asked about."""

    def __init__(self, model: Model, most_words: int):
        self.model = model
        self.most_words = int(min(most_words, model.longest_line()))

    def score(self, request: LinesRequest) -> dict[str, Any]:
        """Natural log-probabilities of lines."""
        self.check(request.lines)
        scores = self.model.score(request.lines)
        return {
            "log_probabilities": [finite(value) for value in scores.tolist()],
            "are_lower_bounds": self.model.is_bound,
            "unknown": self._unknown(request),
        }

    def parse(self, request: ParseRequest) -> dict[str, Any]:
        """Trees of lines; one without words where the grammar has none."""
        self.check(request.lines)
        return {"trees": [_tree(tree) for tree in self.model.parse(request.lines, request.method)]}

    def surprisal(self, request: LinesRequest) -> dict[str, Any]:
        """Surprisals of the words of lines, and of their ends, in bits; null for a blank line."""
        self.check(request.lines)
        found = self.model.surprisal(request.lines)
        return {
            "surprisals": [
                one and {"words": one.words, "bits": [finite(b) for b in one.bits.tolist()], "end": finite(one.end)}
                for one in found
            ]
        }

    def sample(self, request: SampleRequest) -> dict[str, Any]:
        """Sentences drawn from the model, all of them or those that begin with a prefix; longer ones are left out."""
        drawn, most = Drawn(), self.most_words
        if request.prefix.split():
            self.check([request.prefix])
            found = self.model.draw_completions(
                request.prefix, request.number, seed=request.seed, max_length=most, drawn=drawn
            )
            sentences = [text for text in found if text is not None]
        else:
            samples = self.model.draw(request.number, seed=request.seed, max_length=most, drawn=drawn)
            sentences = [one.text for one in samples]
        return {"sentences": sentences, "left_out": request.number - len(sentences), "max_length": most}

    def next(self, request: NextRequest) -> dict[str, Any]:
        """The likeliest continuations of a prefix; `<end>` is the end of the sentence."""
        self.check([request.prefix])
        found = self.model.next_word(request.prefix, request.most)
        return {"continuations": [{"word": word, "probability": p} for word, p in found]}

    def about(self) -> dict[str, Any]:
        """What is served: names of checkpoints, families, sizes, limits."""
        model = self.model
        return {
            "models": [
                {"checkpoint": model_parts.public_name(one.checkpoint), "family": one.settings.model.family}
                for one in model.grammars
            ],
            "vocabulary": len(model.vocabulary),
            "unit": unit_of(model.vocabulary),
            "limits": {"lines": MOST_LINES, "words": self.most_words, "characters": MOST_CHARACTERS},
        }

    def check(self, lines: list[str]) -> None:
        for vocabulary in {id(one.vocabulary): one.vocabulary for one in self.model.grammars}.values():
            for number, ids in enumerate(vocabulary.tokenise(lines), start=1):
                if len(ids) > self.most_words:
                    raise UserError(
                        f"line {number} has {len(ids):,} {unit_of(vocabulary)}: at most {self.most_words} are taken"
                    )

    def _unknown(self, request: LinesRequest) -> list[int]:
        vocabulary = self.model.vocabulary
        tokenised = zip(request.lines, vocabulary.tokenise(request.lines), strict=True)
        return [ids.count(vocabulary.unknown_id) - literals(line, vocabulary) for line, ids in tokenised]


def alternatives(model: Model, line: str) -> list[tuple[float, Tree]]:
    """Return the shapes of trees that are drawn most often for a line, with their shares of the draws."""
    model.check_trees()
    (drawn,) = model.sample_trees([line], DRAWS_OF_TREES)
    shapes = Counter(tuple((first, end) for first, end, _ in one.tree.nodes if end - first > 1) for one in drawn)
    words = tuple(line.split())
    return [
        (count / len(drawn), Tree(words, ("",) * len(words), tuple((*span, "") for span in shape)))
        for shape, count in shapes.most_common(MOST_ALTERNATIVES)
    ]


def _tree(tree: Tree) -> dict[str, Any]:
    bracket = bracketed(tree) if tree.words else ""
    return {"words": tree.words, "tags": tree.tags, "nodes": tree.nodes, "bracket": bracket}


def finite(value: float) -> float | None:
    """Return the number, or None, which is null in JSON, if it is not finite."""
    return value if math.isfinite(value) else None
