"""The model card of an export: what the model is, how it is used, its figures and the commands that give them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_pcfg.errors import UserError
from lm_pcfg.grammar.likelihood import perplexity

LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,60}")  # an identifier, as the hub has them


@dataclass(frozen=True)
class Figure:
    """A text and what `lm_pcfg score` says of it."""

    file: str
    report: dict[str, Any]  # of inference/score.py
    model: str  # what the command scores: the export, or the model that was pruned
    options: tuple[str, ...] = ()  # of the command

    @property
    def command(self) -> str:
        return shlex.join(["lm_pcfg", "score", shown(self.file), "--checkpoint", self.model, *self.options])


@dataclass(frozen=True)
class Pruning:
    """What was left out, and the figures of each text before and after."""

    file: str
    below: float
    nonterminals: tuple[int, int]  # before, after
    preterminals: tuple[int, int]
    trained_with: str  # settings of the model as it was trained, where they differ now
    figures: Sequence[tuple[Figure, Figure]]


def check_licence(licence: str) -> None:
    if not LICENCE.fullmatch(licence):
        raise UserError(f"--license {licence!r} should be an identifier as the hub has them: apache-2.0, say, or other")


def shown(path: str | Path) -> str:
    """Return a path as others may read it: one of this machine by its last part only."""
    text = str(path)
    return Path(text).name if Path(text).is_absolute() else text


def model_card(
    *, name: str, licence: str, description: dict[str, Any], figures: Sequence[Figure], pruning: Pruning | None
) -> str:
    """Write README.md. name: of the folder; description: what config.json says of the model."""
    model = description["model"]
    sizes = ", ".join(f"{key.replace('_', ' ')} {model[key]:,}" for key in _SIZES if model.get(key) is not None)
    unit = description["unit"]
    kind = "hidden Markov model" if "states" in model else "probabilistic context-free grammar"
    quoted = shlex.quote(name)
    stored = "averaged (EMA) weights" if description["weights"] == "ema" else f"weights of step {description['step']:,}"
    parts = [
        f"---\nlicense: {licence}\nlibrary_name: lm_pcfg\ntags:\n- pcfg\n- language-model\n- grammar-induction\n---\n",
        f"# {_text(Path(name).name)}\n",
        f"A {kind} as a language model, of family `{model['family']}` ({sizes}), with a vocabulary of "
        f"{description['vocabulary_size']:,} {unit} and {description['parameters']:,} parameters: {stored}. "
        "`config.yaml` has the settings of its training.\n",
        "It gives the probability of a line of text, words between white space, each line for itself.\n",
        "## Use\n",
        f'```python\nimport lm_pcfg\n\nmodel = lm_pcfg.load("{_text(name)}")  # this folder, or owner/name on the hub\n'
        'model.score(["the cat sat"])  # natural log-probabilities\n```\n',
        f"```bash\nlm_pcfg score text.txt --checkpoint {quoted}\nlm_pcfg sample --checkpoint {quoted}\n```\n",
        *_figures(description, figures, unit),
        *(_pruning(pruning, unit) if pruning else []),
        "## Files\n",
        "`model.safetensors` has the tensors, `vocab/` the vocabulary, and `config.json` the sizes and hashes by which "
        "`lm_pcfg.load` and `lm_pcfg verify` tell a damaged file. There is no code and no pickle in this folder.\n",
    ]
    return "\n".join(parts)


_SIZES = ("nonterminals", "preterminals", "states", "rank", "features", "dimension", "latent")


def _figures(description: dict[str, Any], figures: Sequence[Figure], unit: str) -> list[str]:
    parts = ["## Figures\n"]
    if "best_nll" in description:
        parts.append(_of_the_training(description, unit))
    if figures:
        rows = [_row(_text(shown(one.file)), one.report) for one in figures]
        parts.append("\n".join([*_head(unit, f"perplexity per {unit[:-1]}"), *rows, ""]))
        parts.append(_commands(figures))
    if len(parts) == 1:
        parts.append("None was measured: `lm_pcfg export` measures with `--score FILE`.\n")
    return parts


def _of_the_training(description: dict[str, Any], unit: str) -> str:
    """Say what the evaluation of these weights gave."""
    bound = "at most " if "latent" in description["model"] else ""  # a compound model has bounds only
    share, impossible = description.get("valid_unknown_share"), description.get("best_impossible", 0)
    unknown = f", {100 * share:.2f} % unknown" if share is not None else ""
    left_out = f", {impossible:,} sentences of probability 0 left out" if impossible else ""
    before = ", before it was pruned" if "pruned" in description else ""
    changes = description.get("pruned", {}).get("trained_with", "").split()
    command = shlex.join(["lm_pcfg", "train", "--config", "config.yaml", *changes])
    return (
        f"Perplexity {bound}{perplexity(description['best_nll']):.3f} per {unit[:-1]}{unknown}{left_out}, on the "
        f"validation text of its training, at step {description['best_step']:,}{before}: `{command}`.\n"
    )


def _pruning(pruning: Pruning, unit: str) -> list[str]:
    text = _text(shown(pruning.file))
    counts = " and ".join(
        f"{after:,} of {before:,} {kind}"
        for kind, (before, after) in (("nonterminals", pruning.nonterminals), ("preterminals", pruning.preterminals))
    )
    first = pruning.figures[0][0].report
    rows = [
        f"{_row(_text(shown(before.file)), before.report)} {after.report['ppl']:.3f} |"
        for before, after in pruning.figures
    ]
    return [
        "## Pruning\n",
        f"Symbols with less than {pruning.below:g} expected uses in the {first['lines']:,} lines of {text} were left "
        f"out, and the probabilities of the others divided by what is left: {counts} stay.\n",
        "\n".join([*_head(unit, f"perplexity per {unit[:-1]} before", "after"), *rows, ""]),
        _commands([one for pair in pruning.figures for one in pair]),
    ]


def _head(unit: str, *columns: str) -> list[str]:
    names = ["text", "lines", "words", f"unknown {unit}", *columns]
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]


def _row(name: str, report: dict[str, Any]) -> str:
    bound = "at most " if "ppl_at_most_elbo" in report else ""
    share = report["unknown_words"] / report["pieces"]  # with a vocabulary of words, its pieces are the words
    unknown = f"{report['unknown_words']:,} ({share:.1%})"
    return f"| {name} | {report['lines']:,} | {report['words']:,} | {unknown} | {bound}{report['ppl']:.3f} |"


def _commands(figures: Sequence[Figure]) -> str:
    return "\n".join(["```bash", *(f"{one.command}  # ppl {one.report['ppl']:.3f}" for one in figures), "```\n"])


def _text(name: str) -> str:
    """Make a name harmless in Markdown and in a string of Python."""
    return re.sub(r"[^\w./:@+ -]", "_", name)
