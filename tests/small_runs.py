"""Small runs for tests of what is done with models: of a few steps each, made by the command itself, or of none."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from lm_pcfg.cli import app
from lm_pcfg.corpus.pieces import AnyVocabulary, train_pieces
from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyOptions
from lm_pcfg.grammar.families import family_of
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint
from lm_pcfg.training.documents import documents
from texts import WORDS, write_config, write_text

#: Changes to the settings of `write_config`; PIECES stands for those that a vocabulary of pieces needs.
PIECES = "pieces"
CHANGES: dict[str, list[str]] = {
    "one": [],
    "two": ["seed=1"],
    "ends": ["model.eos=explicit"],
    "nonterminals": ["model.root=nonterminals"],
    "pieces": [PIECES],
    "pieces_ends": [PIECES, "model.eos=explicit"],
}
#: Models of other families.
FAMILIES = {
    "rank_pcfg": {"nonterminals": 4, "preterminals": 6, "rank": 8, "dimension": 8},
    "nhmm": {"states": 6, "dimension": 8, "eos": "explicit"},
    "n_pcfg": {"nonterminals": 3, "preterminals": 4, "dimension": 8},
}


def train_small_runs(folder: Path, names: Iterable[str]) -> Path:
    """Train the runs of these names; return the folder that has them."""
    config = write_config(folder, training={"max_steps": 3})
    text = write_text(folder / "pieces.txt", 200, seed=5).read_text().splitlines()
    (folder / "pieces.model").write_bytes(train_pieces(text, kind="unigram", size=40).model)
    pieces = [f"data.sentencepiece={folder / 'pieces.model'}", "data.max_length=60"]
    for name in names:
        own = config
        if name in FAMILIES:
            settings = yaml.safe_load(config.read_text()) | {"model": {"family": name, **FAMILIES[name]}}
            own = folder / f"{name}.yaml"
            own.write_text(json.dumps(settings))
        changes = [part for change in CHANGES.get(name, []) for part in (pieces if change == PIECES else [change])]
        result = CliRunner().invoke(app, ["train", "--config", str(own), f"name={name}", *changes])
        assert result.exit_code == 0, result.output
    return folder / "runs"


def write_untrained_run(
    folder: Path, name: str, model: dict[str, Any], *, vocabulary: AnyVocabulary | None = None, averaged: bool = False,
    **changes: Any,
) -> Path:  # fmt: skip
    """Write a run with the first weights of a model, which takes no training; averaged: and others as their average."""
    config = write_config(folder, **changes)
    config.write_text(json.dumps(yaml.safe_load(config.read_text()) | {"model": model}))
    settings = load_settings(config, [f"name={name}"])
    vocabulary = vocabulary or Vocabulary(["<unk>", *WORDS], VocabularyOptions())
    if settings.model.eos == "explicit":
        vocabulary = vocabulary.with_end_of_sentence()

    def weights(seed: int) -> dict[str, Any]:
        return family_of(settings.model).build(settings.model, vocabulary.words, seed).state_dict()

    checkpoint.save(
        folder / "runs" / name, 1, model=weights(0), optimizer={}, ema=weights(1) if averaged else None,
        state={"vocabulary_hash": vocabulary.hash}, documents=documents(settings, vocabulary),
    )  # fmt: skip
    run = folder / "runs" / name
    for file, content in documents(settings, vocabulary).items():
        (run / file).parent.mkdir(exist_ok=True)
        (run / file).write_bytes(content)
    return run
