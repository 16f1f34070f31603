"""Words or pieces: what a run's `vocab/` folder may hold."""

from __future__ import annotations

import json
from pathlib import Path

from lm_pcfg.corpus import pieces
from lm_pcfg.corpus.pieces import PieceVocabulary
from lm_pcfg.corpus.vocabulary import DESCRIPTION_FILE, Vocabulary

AnyVocabulary = Vocabulary | PieceVocabulary


def load_vocabulary(folder: Path) -> AnyVocabulary:
    """What `save` of either kind wrote."""
    try:
        description = json.loads((Path(folder) / DESCRIPTION_FILE).read_bytes())
        kind = description.get("kind") if isinstance(description, dict) else None
    except (OSError, ValueError):
        kind = None  # Vocabulary.load says what is wrong
    return PieceVocabulary.load(Path(folder)) if kind == pieces.KIND else Vocabulary.load(folder)
