"""Can the perplexities of runs be compared? The one answer of `lm_pcfg report`, of its page, and of `search`.

Everything is read from the run folders as it stands there: what a run does not tell is not held against it.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lm_pcfg.corpus.pieces import MODEL_FILE
from lm_pcfg.corpus.text import read_bounded
from lm_pcfg.corpus.unknown import WARN_FROM, percent
from lm_pcfg.corpus.vocabulary import DESCRIPTION_FILE, END_OF_SENTENCE, WORDS_FILE
from lm_pcfg.inference.report import Run

_MOST_NAMED = 4
_CHOICE = ("size", "min_count", "end_of_sentence")  # options that say how words were chosen, not how a text is read


def incomparable(runs: Sequence[Run]) -> list[str]:
    """Say why the perplexities of these runs should not be compared; one reason a line."""
    reasons = differences(runs)
    if many := [run.name for run in runs if (run.unknown_share or 0.0) >= WARN_FROM]:
        unknown = f"{percent(WARN_FROM)} or more of the validation text is unknown"
        reasons.append(f"{', '.join(many)}: {unknown}; perplexities are only comparable with the same vocabulary")
    return reasons


def differences(runs: Sequence[Run]) -> list[str]:
    """Say what makes perplexities of these runs figures of different things: units, vocabularies, validation texts."""
    reasons = []
    if len({run.unit for run in runs if run.unit}) > 1:
        reasons.append(
            "perplexities per word and per piece cannot be compared: `lm_pcfg score` has ppl_per_word, for a text "
            f"whose words all of the models know{_who_does_not(runs)}"
        )
    by_unit = defaultdict(list)
    for run in runs:
        by_unit[run.unit].append(run)
    for some in by_unit.values():
        reasons += _vocabularies(some)
    return reasons + _validation_texts(list(by_unit.values()))


def incomparable_losses(runs: Sequence[Run]) -> list[str]:
    """Say why the losses of these runs should not be compared."""
    if len(set(map(str, _settings(runs, "loss", "normalise")))) > 1:
        return ["these runs have different units of the loss (loss.normalise): their losses cannot be compared"]
    return []


def _who_does_not(runs: Sequence[Run]) -> str:
    without = [f"{run.name} {percent(run.unknown_share)}" for run in runs if run.unknown_share]
    return f" (unknown in the validation text: {named(without)})" if without else ""


# ---- vocabularies ---------------------------------------------------------------------------------------------------


def _vocabularies(runs: Sequence[Run]) -> list[str]:
    """runs: of one unit."""
    if len({vocabulary_identity(run.vocabulary) for run in runs} - {None}) < 2:
        return []
    sizes = named(f"{types:,}" for types in sorted({run.types for run in runs if run.types is not None}))
    of_sizes = f" ({sizes} types)" if sizes else ""
    return [f"these runs have different vocabularies{of_sizes}: their perplexities cannot be compared"]


def vocabulary_identity(folder: Path) -> str | None:
    """What is the same for vocabularies that tell the same words apart; None: not known.

    Their own hash is of more: whether ends of lines are explicit, and which size was asked for.
    """
    try:
        description = json.loads(read_bounded(folder / DESCRIPTION_FILE))
        own = description.get("sha256")
        if (folder / MODEL_FILE).is_file():
            return hashlib.sha256(read_bounded(folder / MODEL_FILE)).hexdigest()
        if not (folder / WORDS_FILE).is_file():
            return None if own is None else str(own)
        options = {name: value for name, value in dict(description["options"]).items() if name not in _CHOICE}
        words = set(read_bounded(folder / WORDS_FILE).decode("utf-8").split("\n")) - {END_OF_SENTENCE}
        return hashlib.sha256(json.dumps([options, sorted(words)], sort_keys=True).encode()).hexdigest()
    except (OSError, ValueError, TypeError, KeyError, RecursionError, AttributeError):
        return None


# ---- validation texts -----------------------------------------------------------------------------------------------


def _validation_texts(by_unit: Sequence[Sequence[Run]]) -> list[str]:
    """Texts are told apart by their names, by their sizes, and by which lines are left out of them."""
    runs = [run for some in by_unit for run in some]
    names = sorted({str(name) for name in _settings(runs, "data", "valid") if name is not None})
    if len(names) > 1:
        if all(len({run.valid_tokens for run in some}) == 1 and some[0].valid_tokens for some in by_unit):
            return [f"these runs may have different validation texts ({named(names)}): compare with care"]
        return [f"these runs have different validation texts ({named(names)}): their perplexities cannot be compared"]
    for some in by_unit:
        # Words are those between spaces in any vocabulary; a line has other pieces in each.
        if some[0].unit == "pieces" and len({vocabulary_identity(run.vocabulary) for run in some}) > 1:
            continue
        sizes = sorted({run.valid_tokens for run in some if run.valid_tokens is not None})
        limits = sorted({str(limit or "none") for limit in _settings(some, "evaluation", "max_length")})
        why = f"evaluation.max_length is {named(limits)}" if len(limits) > 1 else "another text, or fewer of its lines"
        if len(sizes) > 1:
            found = f"{named(f'{size:,}' for size in sizes)} tokens; {why}"
            return [f"these runs have different validation texts ({found}): their perplexities cannot be compared"]
        if len(limits) > 1 and any(run.valid_tokens is None for run in some):
            return [f"these runs may have different validation texts ({why}): compare their perplexities with care"]
    return []


def _settings(runs: Sequence[Run], section: str, name: str) -> list[Any]:
    """A setting of those runs that tell it."""
    return [run.settings[section][name] for run in runs if name in run.settings.get(section, {})]


def named(values: Iterable[str]) -> str:
    """a, b and c; of many the first and others"""
    *first, last = list(values) or [""]
    if len(first) >= _MOST_NAMED:
        first, last = first[: _MOST_NAMED - 1], "others"
    return f"{', '.join(first)} and {last}" if first else last
