"""A model as the LM evaluation harness (lm_eval) asks for it: log-probabilities of continuations, greedy text.

It needs nothing of the harness, but follows its conventions: requests are objects whose `args` hold strings. The
harness takes only models that inherit from its own class:

    from lm_eval.api.model import LM

    class GrammarLM(HarnessModel, LM):
        pass

    lm_eval.simple_evaluate(model=GrammarLM(lm_pcfg.load("runs/tiny")), tasks=["blimp"])

Words are what stands between white space. A context with its continuation is the beginning of one sentence, however
long it is; the end of the sentence belongs to neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from lm_pcfg.corpus.pieces import PieceVocabulary
from lm_pcfg.errors import UserError
from lm_pcfg.inference.lines import unit_of
from lm_pcfg.inference.model import Model
from lm_pcfg.inference.next_word import GrowingSentence
from lm_pcfg.inference.sample import counted

MOST_WORDS = 256  # that are generated, unless a request says max_gen_toks


class Request(Protocol):
    """An instance of a task, as `lm_eval.api.instance.Instance`."""

    @property
    def args(self) -> tuple[Any, ...]: ...


class HarnessModel:
    """Answers the three kinds of requests of the LM evaluation harness."""

    def __init__(self, model: Model):
        super().__init__()  # the harness's class has settings of its own
        self.model = model
        self._next_words = model.next_words()  # families that cannot say what comes next refuse here

    def loglikelihood(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """Return log p(continuation | context) of each (context, continuation), and whether it is the greedy one.

        Greedy: every word of it (every piece, with a vocabulary of pieces) is the likeliest one after those before. A
        word that the vocabulary does not have is never greedy. Where the context itself has probability 0 the answer is
        -inf.
        """
        pairs = [(context.split(), continuation.split()) for context, continuation in (one.args for one in requests)]
        texts = [" ".join(before + words) for before, words in pairs]
        found = self.model.surprisal([self._checked(text) for text in texts])
        results = []
        for (before, words), text, one in zip(pairs, texts, found, strict=True):
            if not words:
                results.append((0.0, True))  # nothing is certain to follow
                continue
            if one is None:
                raise UserError(f"the words of {text[:60]!r} cannot be told apart by the model's pieces")
            log_p = -math.fsum(one.bits[len(before) :].tolist()) * math.log(2)
            possible = not math.isnan(log_p)
            results.append((log_p if possible else -math.inf, possible and self._is_greedy(text, len(before))))
        return results

    def loglikelihood_rolling(self, requests: Sequence[Request]) -> list[float]:
        """Return the log-probability of each text: the sum over its lines, each a sentence with its end."""
        texts = [[line for line in one.args[0].split("\n") if self._ids(line)] for one in requests]
        lines = [self._checked(line) for text in texts for line in text]
        scores = iter(self.model.score(lines).tolist())
        return [math.fsum(next(scores) for _ in text) for text in texts]

    def generate_until(self, requests: Sequence[Request]) -> list[str]:
        """Return the likeliest word after each context, then the likeliest after that, and so on.

        A request is (context, settings): `until` has the strings that end it, and are cut off; so does the end of the
        sentence; `max_gen_toks` is the most words (or pieces).
        """
        return [self._generate(*one.args) for one in requests]

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        if settings.get("do_sample"):
            raise UserError("generation is greedy here: set do_sample to false, or draw with model.complete")
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        vocabulary = self.model.vocabulary
        text = ""
        sentence = GrowingSentence(self._next_words, self._ids(self._checked(context)))
        begun, longest = len(sentence.words), self.model.longest_line()
        for _ in range(int(settings.get("max_gen_toks") or MOST_WORDS)):
            best = int(np.argmax(sentence.log_probabilities()))
            if best == len(vocabulary) or len(sentence.words) >= longest:
                break
            sentence.add(best)
            text = self._text(sentence.words[begun:])
            if cuts := [place for stop in stops if stop and (place := text.find(stop)) >= 0]:
                return text[: min(cuts)]
        return text

    def _is_greedy(self, text: str, before: int) -> bool:
        """Whether all words but the first ones are the likeliest after those before; it stops at one that is not."""
        vocabulary, ids = self.model.vocabulary, self._ids(text)
        boundaries = vocabulary.word_boundaries(ids, len(text.split()))
        assert boundaries is not None
        first = boundaries[before]
        if vocabulary.unknown_id in ids[first:]:
            name = vocabulary.words[vocabulary.unknown_id]  # what is written for the unknown word itself
            words = list(zip(text.split(), pairwise(boundaries), strict=True))
            if any(vocabulary.unknown_id in ids[start:end] and word != name for word, (start, end) in words[before:]):
                return False
        sentence = GrowingSentence(self._next_words, ids[:first])
        for id in ids[first:]:
            if int(np.argmax(sentence.log_probabilities())) != id:
                return False
            sentence.add(id)
        return True

    def _ids(self, text: str) -> list[int]:
        return self.model.vocabulary.tokenise([text])[0] if text.split() else []

    def _text(self, ids: Sequence[int]) -> str:
        vocabulary = self.model.vocabulary
        if isinstance(vocabulary, PieceVocabulary):
            return vocabulary.decode(ids)
        return " ".join(vocabulary.words[id] for id in ids)

    def _checked(self, text: str) -> str:
        """Refuse a text whose chart does not fit into memory: to cut it would change what is asked."""
        limit = self.model.longest_line()
        if (length := len(self._ids(text))) > limit:
            size = counted(length, unit_of(self.model.vocabulary))
            raise UserError(f"a text of {size} ({text[:40]!r}...); at most {limit:,.0f} fit into memory")
        return text
