"""What MLflow is told of a run: its settings, its vocabulary, where its folder is."""

from __future__ import annotations

from lm_pcfg.console import warn
from lm_pcfg.corpus.vocabularies import AnyVocabulary
from lm_pcfg.settings import Settings
from lm_pcfg.settings_file import dump_yaml
from lm_pcfg.training.run_folder import RunFolder
from lm_pcfg.training.tracking import NoTracker, Tracker


def track(settings: Settings, folder: RunFolder, vocabulary: AnyVocabulary, is_main: bool) -> Tracker | NoTracker:
    """Of the main process; the others track nothing."""
    if not (is_main and settings.tracking.mlflow):
        return NoTracker()
    return Tracker(
        run_name=folder.path.name,
        experiment=settings.tracking.experiment,
        run_id=folder.tracking_id,
        parameters=settings.model_dump(mode="json"),
        artifacts={"config.yaml": dump_yaml(settings), "vocabulary_hash.txt": vocabulary.hash + "\n"},
        tags={"run_folder": str(folder.path.resolve()), "vocabulary_hash": vocabulary.hash},
        warn=warn,
        remember_run_id=folder.remember_tracking_id,
    )
