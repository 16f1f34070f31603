"""Log-probabilities of the lines of a text and of each of their words, and its perplexity."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flash_inside import Prefixes, Statistics
from lm_pcfg.console import unseen
from lm_pcfg.corpus.sentences import Sentences, encode_sentences
from lm_pcfg.corpus.text import EMBEDDED_PREFIX, display_name, read_words
from lm_pcfg.corpus.unknown import Unknown
from lm_pcfg.distributed.sharing import ALONE, Ranks
from lm_pcfg.errors import UserError
from lm_pcfg.grammar.families.shared.family import Likelihood
from lm_pcfg.grammar.likelihood import CorpusScore, corpus_score, perplexity, sentence_log_probabilities
from lm_pcfg.inference.bounds import Bounds
from lm_pcfg.inference.lines import OnLines, Warnings, longest_line, map_lines, warn_of_unknown
from lm_pcfg.inference.next_word import (
    Mix,
    NextWords,
    WordMixture,
    before_each,
    check_mix,
    mixed_conditionals,
    mixed_prefixes,
)
from lm_pcfg.inference.trained import TrainedGrammar

BATCH_COST = 25_600  # words squared of a batch


@dataclass
class TextScore:
    """The sums over all lines that have a probability, and the number of those that were left out."""

    nlls: list[float] = field(default_factory=list)
    pieces: int = 0  # what the vocabulary makes of the lines: words, or pieces of words
    words: int = 0  # between white space
    bytes: int = 0  # of the words joined by single spaces
    characters: int = 0  # of the same: code points
    lines: int = 0
    skipped: int = 0
    blank: int = 0
    unknown_words: int = 0  # or pieces, if the vocabulary is of pieces
    literal_unknown: int = 0  # `<unk>` that are written in the text
    is_scored: bytearray = field(default_factory=bytearray)  # for every line: 1 if it is in the sums, else 0
    statistics: Statistics = field(default_factory=Statistics)  # of all grammars of a mixture together
    digest: Any = field(default_factory=hashlib.sha256)  # of the words of all lines: which text it was
    bounds: Bounds | None = None  # of a compound model, whose sums here are of the evidence lower bound

    @property
    def total(self) -> CorpusScore:
        """The score per piece; with a word vocabulary that is per word."""
        return CorpusScore(nll=math.fsum(self.nlls), words=self.pieces, lines=self.lines, impossible=0)

    @property
    def perplexity_per_word(self) -> float:
        """Vocabularies can be compared by this one, if they know the words. An end of line is a word, as in `total`.

        It is a lower bound if words are unknown: to write them would cost more than the `<unk>` that was predicted.
        """
        return CorpusScore(math.fsum(self.nlls), self.words, self.lines, impossible=0).perplexity

    @property
    def perplexity_per_byte(self) -> float:
        """The same per byte, and likewise a lower bound. The end of a line counts as one byte, its newline."""
        return CorpusScore(math.fsum(self.nlls), self.bytes, self.lines, impossible=0).perplexity

    @property
    def bits_per_character(self) -> float:
        """The same as bits of a character, and likewise a lower bound. The end of a line counts as one character."""
        return math.fsum(self.nlls) / math.log(2) / (self.characters + self.lines)

    def unknown(self, unit: str) -> Unknown:
        return Unknown(self.unknown_words, self.literal_unknown, self.pieces, unit)


def check_mixture(mixture: Sequence[TrainedGrammar]) -> None:
    """Refuse grammars of different vocabularies: their probabilities are of different strings."""
    first = mixture[0]
    for other in mixture:
        if other.vocabulary.hash != first.vocabulary.hash:
            raise UserError(
                f"{first.checkpoint} and {other.checkpoint} have different vocabularies; a mixture needs one for all"
            )


def parts_of(
    mixture: Sequence[TrainedGrammar], mix: Mix, next_words: Callable[[], Sequence[NextWords]]
) -> list[Likelihood]:
    """Return the distributions whose mean is the mixture: its grammars; or one, their mixture word by word.

    next_words: what each grammar says of prefixes, which may be refused. It is needed for a mixture word by word.
    """
    check_mix(mix)
    check_mixture(mixture)
    if mix == "words":
        models = next_words()
        if len(models) > 1:
            return [WordMixture(models)]
    return [one.grammar for one in mixture]


def mixture_log_probabilities(
    parts: Sequence[Likelihood], sentences: Sentences, *, precision: str = "fp32", backend: str = "auto",
    batch_cost: int = BATCH_COST, statistics: Statistics | None = None, on_lines: OnLines = unseen,
    ranks: Ranks = ALONE,
) -> np.ndarray:  # fmt: skip
    """Return the log-probability of every sentence, fp64 [lines], -inf for those without a tree.

    parts: of one vocabulary, see `parts_of`; each has the same share.
    """
    how: dict[str, Any] = {"batch_cost": batch_cost, "precision": precision, "backend": backend}
    how |= {"statistics": statistics, "rank": ranks.rank, "world_size": ranks.world_size}
    found = [
        ranks.summed(
            partial(
                sentence_log_probabilities, one, sentences, **how,
                on_batch=on_lines if last else unseen,  # done when the last part has them
            )
        )
        for one, last in zip(parts, [*[False] * (len(parts) - 1), True], strict=True)
    ]  # fmt: skip
    return np.logaddexp.reduce(found) - math.log(len(parts))  # of the mean probability


def score_lines(
    mixture: Sequence[TrainedGrammar], source: str, result: TextScore, *, max_length: int, precision: str = "fp32",
    backend: str = "auto", batch_cost: int = BATCH_COST, mix: Mix = "sentences", warn: Callable[[str], None],
    on_lines: OnLines = unseen, ranks: Ranks = ALONE,
) -> Iterator[float | None]:  # fmt: skip
    """Yield the log-probability of every line (-inf: skipped, None: blank), and add up the sums in `result`."""
    parts = ranks.on_all(lambda: parts_of(mixture, mix, lambda: [NextWords(one) for one in mixture]))

    def log_probabilities(lines: list[str], on_lines: OnLines) -> list[float]:
        sentences = encode_sentences(enumerate(lines, start=1), vocabulary)
        how: dict[str, Any] = {"precision": precision, "backend": backend, "batch_cost": batch_cost}
        how |= {"statistics": result.statistics, "on_lines": on_lines, "ranks": ranks}
        if result.bounds is None:
            log_p = mixture_log_probabilities(parts, sentences, **how)
        else:
            log_p = result.bounds.score(mixture[0], sentences, **how)
        score = corpus_score(sentences, log_p)
        result.nlls.append(score.nll)
        result.pieces += score.words
        result.lines += score.lines
        return log_p.tolist()

    name, warnings, vocabulary = display_name(source), Warnings(warn), mixture[0].vocabulary
    fewest = min(one.fewest_symbols for one in mixture)
    lines = map_lines(
        source, vocabulary, log_probabilities, command="score", max_length=max_length,
        fitting=longest_line(mixture, precision), min_length=fewest, warnings=warnings, on_lines=on_lines,
        ranks=ranks,
    )  # fmt: skip
    for line in lines:
        value = line.value if not line.skipped else None if line.skipped == "blank" else -math.inf
        words = line.text.split()
        text = " ".join(words).encode("utf-8")
        result.digest.update(text + b"\n")
        if line.value == -math.inf:
            warnings.add("impossible", f"{name}, line {line.number}: probability 0, skipped")
        elif line.value is not None:
            result.words += len(words)
            result.unknown_words += line.unknown
            result.literal_unknown += line.literal
            result.bytes += len(text)
            result.characters += len(text.decode("utf-8"))
        result.blank += value is None
        result.skipped += value == -math.inf
        result.is_scored.append(value is not None and math.isfinite(value))
        yield value
    ranks.add_up(result.statistics)
    unknown = result.unknown(vocabulary.unit)
    warn_of_unknown(name, result.unknown_words + result.literal_unknown, vocabulary, warn)
    if message := unknown.warning(name):
        warn(message)
    warnings.summarise()


def score_report(
    mixture: Sequence[TrainedGrammar], source: str, result: TextScore, precision: str = "fp32", mix: Mix = "sentences"
) -> dict[str, Any]:
    """What `lm_pcfg score` prints, once all lines are scored; an error if none could be."""
    total = result.total
    if not total.lines:
        why = f"{result.skipped} skipped" if result.skipped else "it is empty" if not result.blank else "all blank"
        raise UserError(f"{display_name(source)}: no line could be scored ({why})")
    # The evidence lower bound of a compound model makes the figures larger: then they bound nothing.
    is_lower_bound = result.unknown_words > 0 and result.bounds is None
    report = {
        "file": source,
        "checkpoint": " + ".join(str(one.checkpoint) for one in mixture),
        "weights": " + ".join(one.weights for one in mixture),
        **({"mix": mix} if len(mixture) > 1 else {}),
        "nll": total.nll,
        "words": result.words,
        "pieces": result.pieces,
        "bytes": result.bytes,
        "characters": result.characters,
        "lines": total.lines,
        "tokens": total.tokens,
        "unit": mixture[0].vocabulary.unit,
        "ppl": total.perplexity,
        "ppl_per_word": result.perplexity_per_word,
        "ppl_per_word_is_lower_bound": is_lower_bound,
        "ppl_per_byte": result.perplexity_per_byte,
        "ppl_per_byte_is_lower_bound": is_lower_bound,
        "bits_per_character": result.bits_per_character,
        "bits_per_character_is_lower_bound": is_lower_bound,
        "ppl_words": perplexity(total.nll / result.words),
        "skipped": result.skipped,
        **result.unknown(mixture[0].vocabulary.unit).report(),
        "recomputed": result.statistics.recomputed,
        "precision": precision,
    }
    if result.bounds is not None:
        report |= result.bounds.report(total.tokens)
    if source.startswith(EMBEDDED_PREFIX):  # its source is known: the best possible score of the lines that were scored
        from lm_pcfg.corpus import embedded

        lines = [words for words, counts in zip(read_words(source), result.is_scored, strict=True) if counts]
        report["best_possible_ppl"] = embedded.best_possible(lines).ppl
    return report


# ---- word by word ---------------------------------------------------------------------------------------------------


class Surprisal(NamedTuple):
    """The surprisal of every word of a line, in bits; their sum, with the end, is -log2 p(line)."""

    words: list[str]
    bits: np.ndarray  # [words]
    end: float  # bits of the end of the sentence
    #: [words + 1] bits: entropy of what comes next, a word or the end, before each word and before the end. None: not
    #: asked for
    entropy: np.ndarray | None = None

    @property
    def total(self) -> float:
        return math.fsum([*self.bits.tolist(), self.end])

    @property
    def entropy_reduction(self) -> np.ndarray | None:
        """By how much each word lowers that entropy: [words] bits, below 0 where a word raises it."""
        return None if self.entropy is None else self.entropy[:-1] - self.entropy[1:]


def surprisals(
    models: Sequence[NextWords], lines: Sequence[str], *, precision: str, statistics: Statistics | None = None,
    with_entropy: bool = False, mix: Mix = "sentences",
) -> list[Surprisal | None]:  # fmt: skip
    """Return the surprisals of some lines; None: blank, or its words cannot be told apart.

    Several models are an even mixture, see next_word.py. Word by word, it is of the symbols of the vocabulary: with
    pieces, of each piece.
    """
    results: list[Surprisal | None] = [None] * len(lines)
    vocabulary = models[0].trained.vocabulary
    end = [] if vocabulary.end_id is None else [vocabulary.end_id]
    # What comes after the last word does not depend on the word there: any will do.
    after_last = [0] if with_entropy and not end else []
    symbols: list[int] = []
    there: list[tuple[int, list[int], int]] = []  # line, boundaries of its words, symbols with <eos>
    for number, (ids, line) in enumerate(zip(vocabulary.tokenise(lines), lines, strict=True)):
        boundaries = vocabulary.word_boundaries(ids, len(line.split())) if ids else None
        if boundaries is not None:
            symbols += ids + end + after_last
            there.append((number, boundaries, len(ids) + len(end)))
    if not there:
        return results
    words, lengths = torch.tensor(symbols), [length + len(after_last) for _, _, length in there]
    found = [
        model.prefixes(words, lengths, precision=precision, statistics=statistics, with_next=with_entropy)
        for model in models
    ]
    of_all = mixed_prefixes(found, lengths, mix, ends_are_words=bool(end))
    begins, ends = of_all.begins.cpu().numpy(), of_all.ends.cpu().numpy()
    log_begun = [before_each(one.begins, lengths, 0.0) for one in found]  # log P of the symbols before each
    closings = [
        model.closings(words, lengths, one.ends) if with_entropy else None
        for model, one in zip(models, found, strict=True)
    ]
    first = 0
    for number, boundaries, length in there:
        own = slice(first, first + length + len(after_last))
        cumulative = np.concatenate(([0.0], begins[own]))[boundaries]  # log P before each word, and after the last
        entropy = _entropies(models, found, closings, log_begun, own, mix)[boundaries] if with_entropy else None
        with np.errstate(invalid="ignore"):  # what follows a word of probability 0 has no surprisal: NaN
            bits = (cumulative[:-1] - cumulative[1:]) / math.log(2)
            end_bits = float(cumulative[-1] - ends[first + length - 1]) / math.log(2)
        results[number] = Surprisal(lines[number].split(), bits, end_bits, entropy)
        first = own.stop
    return results


def _entropies(
    models: Sequence[NextWords], found: Sequence[Prefixes], closings: Sequence[Tensor | None],
    log_begun: Sequence[Tensor], own: slice, mix: Mix,
) -> np.ndarray:  # fmt: skip
    """Return the entropy in bits of what comes before each symbol of a sentence: [symbols]."""
    joint = []
    for model, one, closing in zip(models, found, closings, strict=True):
        assert one.next is not None
        joint.append(model.following(one.next[own], None if closing is None else closing[own]))
    log_p = mixed_conditionals(joint, [one[own, None] for one in log_begun], mix)  # [symbols, V + 1]
    terms = torch.where(log_p == -math.inf, 0.0, log_p.exp() * log_p)  # NaN after words of probability 0
    return -terms.sum(1).cpu().numpy() / math.log(2)
